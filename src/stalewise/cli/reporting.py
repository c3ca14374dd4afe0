"""Commands that read runs, without torch (report, watch, compare, serve) or pass them on (export, push)."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from stalewise.cli.app import AsJson, RunDirectory, app, print_json
from stalewise.errors import ConfigError, StoreError

Version = Annotated[int | None, typer.Option(min=0, help="Version of the policy; default: the newest.")]
Adapter = Annotated[bool, typer.Option("--adapter", help="Export the LoRA adapter instead of the merged policy.")]
Rollouts = Annotated[bool, typer.Option("--rollouts", help="Export the rollouts as a dataset instead of a policy.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an earlier export.")]


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run directories; several are compared.")],
    output: Annotated[Path | None, typer.Option(help="File to write; default: report/index.html in the run.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write an HTML report of one or several runs."""
    _check_runs(*runs)  # before the slow import
    from stalewise.reporting.read import read_runs
    from stalewise.reporting.render import report_record, write_page

    records = read_runs(runs)
    path = write_page(records, output)
    print_json(report_record(path, records)) if as_json else typer.echo(str(path))


@app.command()
def watch(
    run: RunDirectory,
    once: Annotated[bool, typer.Option("--once", help="Show the status once and exit.")] = False,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between refreshes.")] = 1.0,
    as_json: AsJson = False,
) -> None:
    """Show the status of a run until it is finished. Ctrl-C stops watching; the run continues."""
    _check_runs(run)
    from stalewise.cli.tables import status_view, stdout_console
    from stalewise.reporting.status import run_status

    console, now = stdout_console(), run_status(run)
    if as_json:
        return print_json(asdict(now))
    if once or not console.is_terminal:
        return console.print(status_view(now))
    from rich.live import Live

    with contextlib.suppress(KeyboardInterrupt), Live(status_view(now), console=console, auto_refresh=False) as live:
        while now.state != "finished":
            time.sleep(every)
            now = run_status(run)
            live.update(status_view(now), refresh=True)


@app.command()
def flips(
    run: RunDirectory,
    before: Annotated[int | None, typer.Option(help="Version; default: the first that was evaluated.")] = None,
    after: Annotated[int | None, typer.Option(help="Version; default: the last that was evaluated.")] = None,
    suite: Annotated[str, typer.Option(help="Suite; default: the run's own evaluation.")] = "",
    as_json: AsJson = False,
) -> None:
    """Show which held-out prompts one version solves and another does not."""
    _check_runs(run)
    from stalewise.cli.tables import print_flips
    from stalewise.reporting.compare import flips

    record = flips(run, before, after, suite)
    print_json(record) if as_json else print_flips(record)


@app.command()
def difficulty(
    runs: Annotated[list[Path] | None, typer.Argument(help="Run directories whose rollouts are counted.")] = None,
    output: Annotated[Path | None, typer.Option(help="Table to write; an existing table is added to.")] = None,
    stage: Annotated[Literal["all", "first", "last"], typer.Option(help="Which generation batches count.")] = "all",
    passing: Annotated[float, typer.Option(help="Smallest reward that passes.")] = 1.0,
    low: Annotated[float, typer.Option(min=0, max=1, help="Lower end of the range of pass rates to count.")] = 0.1,
    high: Annotated[float, typer.Option(min=0, max=1, help="Upper end of the range of pass rates to count.")] = 0.9,
    as_json: AsJson = False,
) -> None:
    """Count how often each prompt passed, in a table that `task.difficulty` reads to choose prompts."""
    if not runs and (output is None or not output.exists()):
        raise ConfigError("name the run directories to count, or with --output a table that exists")
    _check_runs(*(runs or ()))
    from stalewise.cli.tables import print_difficulty
    from stalewise.reporting.inspection import pass_counts
    from stalewise.store.atomic import read_json, write_json_atomic
    from stalewise.tasks.difficulty import DifficultyTable, PassCounts, read_table

    table = read_table(output, read_json) if output is not None and output.exists() else DifficultyTable()
    added = 0
    for run in runs or ():
        for batch, name, counts in pass_counts(run, stage=stage, passing=passing):
            added += table.add(batch, name, {prompt: PassCounts(*count) for prompt, count in counts.items()})
    if output is not None and added:
        write_json_atomic(output, table.record(), sealed=True)
    record = {"added": added, **table.summary(low, high), "low": low, "high": high}
    print_json(record) if as_json else print_difficulty(record, table.prompts, output)


@app.command()
def compare(
    runs: Annotated[list[Path] | None, typer.Argument(help="Two run directories: A, then B.")] = None,
    a: Annotated[list[Path] | None, typer.Option("--a", help="A run of side A; repeat for each seed.")] = None,
    b: Annotated[list[Path] | None, typer.Option("--b", help="A run of side B; repeat for each seed.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare two runs on held-out prompts: which is better, how certain that is, and the cost of each."""
    if runs and len(runs) == 2 and not a and not b:
        a, b = runs[:1], runs[1:]
    elif runs or not a or not b:
        usage = "name two run directories, A and B; or, with several seeds, use --a RUN --a RUN --b RUN --b RUN"
        raise ConfigError(usage)
    _check_runs(*a, *b)
    from stalewise.cli.tables import print_comparison
    from stalewise.reporting.compare import compare

    result = compare(a, b)
    print_json(result.record()) if as_json else print_comparison(result)


@app.command()
def serve(
    run: RunDirectory,
    port: Annotated[int, typer.Option(help="Port on this machine; 0: any free port.")] = 8080,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in the default browser.")] = False,
) -> None:
    """Show a run in a browser: its live report, and its rollouts token by token. Ctrl-C stops the server."""
    from stalewise.reporting.browser import make_server

    with make_server(run, port) as server:
        typer.echo(server.url)
        typer.echo("reachable from this machine only, with this address; Ctrl-C stops the server", err=True)
        if open_page:
            typer.launch(server.url)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()


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
        raise ConfigError("--rollouts exports the rollouts of all versions: omit --version and --adapter")
    from stalewise.integrations.hub import export_policy, export_rollouts
    from stalewise.integrations.hub.card import RECORD
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
    to: Annotated[Path | None, typer.Option(help="Upload nothing: write REPO_ID under this directory.")] = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Upload a policy with its model card to the Hugging Face hub, or the rollouts as a dataset."""
    from stalewise.integrations.hub import push

    done = push(run, repo_id, version=version, adapter=adapter, rollouts=rollouts, private=private, to=to, force=force)
    print_json({"place": done, "uploaded": to is None}) if as_json else typer.echo(done)


@app.command(hidden=True, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def reproduce(context: typer.Context) -> None:
    """Run `python -m experiments.lab`, where this command has moved."""
    warning = "`stalewise reproduce` is now `python -m experiments.lab`; this alias will be removed"
    typer.echo(f"warning: {warning}", err=True)
    roots = (Path.cwd(), Path(__file__).parents[3])
    root = next((path for path in roots if (path / "experiments/lab/__main__.py").is_file()), None)
    if root is None:
        raise ConfigError(
            "the lab is part of the repository, not of the package: clone it and run `python -m experiments.lab` there"
        )
    search_path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "experiments.lab", *context.args]
    raise typer.Exit(subprocess.run(command, env={**os.environ, "PYTHONPATH": search_path}, check=False).returncode)


def _check_runs(*directories: Path) -> None:
    for directory in directories:
        try:
            is_run = (directory / "config.resolved.json").is_file()
        except OSError as error:
            raise StoreError(f"cannot read {directory}: {error.strerror}; ask its owner for permission") from error
        if not is_run:
            from stalewise.config.run_directory import not_a_run

            raise StoreError(not_a_run(directory))
