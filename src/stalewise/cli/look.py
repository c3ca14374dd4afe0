"""The verbs that look at runs: report, watch and compare. They read run directories and need no torch."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from stalewise.cli import AsJson, _print_json, app
from stalewise.errors import ConfigError, StoreError


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run directories, to be compared where there are several.")],
    output: Annotated[Path | None, typer.Option(help="File to write.")] = None,
) -> None:
    """Write an HTML report of one run or of several."""
    for directory in runs:  # before the slow import
        _check_run(directory)
    from stalewise.report import write_report

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
    from stalewise.cli.view import console, view
    from stalewise.report.live import standing

    if as_json:
        _print_json(_without_nan(asdict(standing(run))))
        return
    screen = console()
    now = standing(run)
    if once or not screen.is_terminal:
        screen.print(view(now))
        return
    from rich.live import Live

    try:
        with Live(view(now), console=screen, auto_refresh=False) as live:
            while now.state != "finished":
                time.sleep(every)
                now = standing(run)
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
    from stalewise.compare import compare

    result = compare(*sides)
    if as_json:
        _print_json(_without_nan(result.record()))
        return
    from stalewise.cli.view import print_comparison

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
