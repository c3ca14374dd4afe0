"""The verbs that look at runs: report, watch and compare. They read run directories and need no torch."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from stalewise.cli.app import AsJson, app, print_json
from stalewise.errors import ConfigError, StoreError


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run directories, to be compared where there are several.")],
    output: Annotated[Path | None, typer.Option(help="File to write.")] = None,
) -> None:
    """Write an HTML report of one run or of several."""
    for directory in runs:  # before the slow import
        _check_run(directory)
    from stalewise.reporting import write_report

    typer.echo(str(write_report(runs, output)))


@app.command()
def watch(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    once: Annotated[bool, typer.Option("--once", help="Show it once and leave.")] = False,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
    as_json: AsJson = False,
) -> None:
    """Show how a run stands, again and again until it is finished; Ctrl-C leaves, and the run goes on."""
    _check_run(run)
    from stalewise.cli.tables import console, view
    from stalewise.reporting.status import run_status

    if as_json:
        print_json(_without_nan(asdict(run_status(run))))
        return
    screen = console()
    now = run_status(run)
    if once or not screen.is_terminal:
        screen.print(view(now))
        return
    from rich.live import Live

    try:
        with Live(view(now), console=screen, auto_refresh=False) as live:
            while now.state != "finished":
                time.sleep(every)
                now = run_status(run)
                live.update(view(now), refresh=True)
    except KeyboardInterrupt:
        return


@app.command()
def compare(
    runs: Annotated[list[Path] | None, typer.Argument(help="Two run directories: A, then B.")] = None,
    a: Annotated[list[Path] | None, typer.Option("--a", help="A run of side A; again for each of its seeds.")] = None,
    b: Annotated[list[Path] | None, typer.Option("--b", help="A run of side B; again for each of its seeds.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say which of two is better on held-out prompts, how sure that is, and what each costs."""
    sides = _sides(runs or [], a or [], b or [])
    for directory in [*sides[0], *sides[1]]:
        _check_run(directory)
    from stalewise.reporting.compare import compare

    result = compare(*sides)
    if as_json:
        print_json(_without_nan(result.record()))
        return
    from stalewise.cli.tables import print_comparison

    print_comparison(result)


def _sides(runs: Sequence[Path], a: Sequence[Path], b: Sequence[Path]) -> tuple[Sequence[Path], Sequence[Path]]:
    if len(runs) == 2 and not a and not b:
        return runs[:1], runs[1:]
    if not runs and a and b:
        return a, b
    raise ConfigError(
        "name two run directories, A and B; or, with several seeds of each, say --a RUN --a RUN --b RUN --b RUN"
    )


def _check_run(directory: Path) -> None:
    try:
        is_run = (directory / "config.resolved.json").is_file()
    except OSError as error:
        raise StoreError(f"cannot read {directory}: {error.strerror}; ask its owner for leave to read it") from error
    if not is_run:
        raise StoreError(f"{directory} is no run directory: it has no config.resolved.json")


def _without_nan(value: Any) -> Any:
    """What JSON knows: a number that is none becomes null."""
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# The verb `serve`: look at a run in a browser while it goes on.


@app.command()
def serve(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    port: Annotated[int, typer.Option(help="Port on this machine; 0: any that is free.")] = 8080,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in the default browser.")] = False,
) -> None:
    """Show a run in a browser: its report, which follows the run, and its rollouts token by token. Ctrl-C ends it."""
    from stalewise.reporting.browser import make_server

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


# The verbs that hand a run on: export to a directory, push to a hub.

RunDirectory = Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")]
Version = Annotated[int | None, typer.Option(min=0, help="Version of the policy; the newest unless said.")]
Adapter = Annotated[bool, typer.Option("--adapter", help="The LoRA adapter alone, and not the merged policy.")]
Rollouts = Annotated[bool, typer.Option("--rollouts", help="The rollouts as a dataset, and not a policy.")]
Force = Annotated[bool, typer.Option("--force", help="Replace what is there, where it is an earlier export.")]


@app.command()
def export(
    run: RunDirectory,
    directory: Annotated[Path, typer.Argument(metavar="DIRECTORY", help="Directory to write.")],
    version: Version = None,
    adapter: Adapter = False,
    rollouts: Rollouts = False,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Write a policy as a Hugging Face directory with a model card, or the rollouts as a dataset."""
    if rollouts and (adapter or version is not None):
        raise ConfigError("rollouts are exported all together: leave out --version and --adapter")
    from stalewise.integrations.hub import export_policy, export_rollouts
    from stalewise.integrations.hub.provenance import RECORD
    from stalewise.store.atomic import read_json

    if rollouts:
        written = export_rollouts(run, directory, force=force)
    else:
        written = export_policy(run, directory, version=version, adapter=adapter, force=force)
    print_json({"directory": str(written), **read_json(written / RECORD)}) if as_json else typer.echo(str(written))


@app.command()
def push(
    run: RunDirectory,
    repo_id: Annotated[str, typer.Argument(metavar="REPO_ID", help="Name of the repository, as in owner/name.")],
    version: Version = None,
    adapter: Adapter = False,
    rollouts: Rollouts = False,
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    to: Annotated[
        Path | None, typer.Option(help="Upload nothing: write what would be, at REPO_ID under this directory.")
    ] = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Upload a policy with its model card to the Hugging Face hub, or the rollouts as a dataset."""
    from stalewise.integrations.hub import push

    done = push(run, repo_id, version=version, adapter=adapter, rollouts=rollouts, private=private, to=to, force=force)
    print_json({"place": done, "uploaded": to is None}) if as_json else typer.echo(done)
