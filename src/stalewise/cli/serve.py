"""The verb `serve`: look at a run in a browser while it goes on."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from stalewise.cli import app


@app.command()
def serve(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    port: Annotated[int, typer.Option(help="Port on this machine; 0: any that is free.")] = 8080,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in the default browser.")] = False,
) -> None:
    """Show a run in a browser: its report, which follows the run, and its rollouts token by token. Ctrl-C ends it."""
    from stalewise.browser import make_server

    with make_server(run, port) as server:
        typer.echo(server.url)
        typer.echo(
            "on this machine alone, for whoever has this address; rollouts are behind its link; Ctrl-C ends it",
            err=True,
        )
        if open_page:
            typer.launch(server.url)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
