"""The verb `reproduce`: the claims of the papers, run from nothing and rendered."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from stalewise.cli import AsJson, _print_json, app
from stalewise.errors import ConfigError


@app.command()
def reproduce(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="Experiments, or all; none: list them.")
    ] = None,
    setting: Annotated[str, typer.Option(help="lab (embedded policies) or real (a language model).")] = "lab",
    seeds: Annotated[int | None, typer.Option(min=1, help="Fewer seeds than the experiment asks for.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Jobs side by side.")] = None,
    out: Annotated[Path, typer.Option(help="Where runs and results go.")] = Path("runs/reproduce"),
    deadline_s: Annotated[float | None, typer.Option(help="Start no job after so many seconds.")] = None,
    render_only: Annotated[bool, typer.Option("--render-only", help="Run nothing: render from kept results.")] = False,
    source: Annotated[
        Path | None, typer.Option("--from", help="With --render-only: take results from this directory first.")
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Let results of fewer jobs take the place of kept ones.")
    ] = False,
    keep_runs: Annotated[bool, typer.Option("--keep-runs", help="Keep weights and rollouts of every run.")] = False,
    experiments: Annotated[Path | None, typer.Option(help="Where experiments are defined.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run the experiments that test the papers' claims, judge them by their rules, and write their pages."""
    from experiments.lab.definition import SETTINGS, load_experiments
    from experiments.lab.reproducing import default_experiments, reproduce

    if setting not in SETTINGS:
        raise ConfigError(f"--setting {setting}: expected {' or '.join(SETTINGS)}")
    if source is not None and not render_only:
        raise ConfigError("--from goes with --render-only: it takes results that were made elsewhere")
    root = experiments or default_experiments()
    chosen = load_experiments(root, [] if names in (None, [], ["all"]) else names or [])
    if names and not render_only:
        made = reproduce(
            chosen,
            setting,
            out=out,
            seeds=seeds,
            workers=workers,
            deadline_s=deadline_s,
            keep_runs=keep_runs,
            log=lambda text: typer.echo(text, err=True),
        )
        source = out
        record: dict[str, Any] = {**asdict(made), "results": [str(path) for path in made.results]}
    else:
        record = {}
    if names:
        for sentence in _render(root, source, replace):
            typer.echo(sentence, err=True)
        if source is not None:
            _tell_own(root, [experiment.name for experiment in chosen], source)
    _show(root, [experiment.name for experiment in chosen], record, as_json)
    if record.get("failed"):
        raise typer.Exit(1)


def _render(root: Path, source: Path | None, replace: bool) -> list[str]:
    """Take results over, and write what follows from them: pages of all experiments, and the table of all.

    What is not taken, and why.
    """
    from experiments.lab.definition import load_experiments
    from experiments.lab.pages import render, results_table, take_results, write_files

    every = load_experiments(root)
    refused = take_results(every, source, replace=replace) if source is not None else []
    files = render(every)
    if (root.parent / "docs").is_dir():
        files[root.parent / "docs" / "results.md"] = results_table(every)
    write_files(files)
    return refused


def _tell_own(root: Path, names: list[str], source: Path) -> None:
    """What results say that did not take the place of the kept ones."""
    from experiments.lab.definition import load_experiments
    from experiments.lab.pages import describe_runs
    from experiments.lab.results import read_results, results_name
    from experiments.lab.verdicts import rules

    for experiment in load_experiments(root, names):
        for setting in experiment.settings:
            own, kept = (place / results_name(setting) for place in (source / experiment.name, experiment.directory))
            if own.is_file() and own.read_bytes() != kept.read_bytes():
                results = read_results(own)
                finding = rules()[experiment.table.verdict](results)
                typer.echo(f"{own}: {finding.verdict} ({finding.ours}); {describe_runs(results)}", err=True)


def _show(root: Path, names: list[str], record: dict[str, Any], as_json: bool) -> None:
    from experiments.lab.definition import load_experiments
    from experiments.lab.pages import found

    verdicts = {
        experiment.name: {
            setting: {"verdict": finding.verdict, "ours": finding.ours}
            for setting, (_, finding) in found(experiment).items()
        }
        for experiment in load_experiments(root, names)
    }
    if as_json:
        _print_json({**record, "experiments": verdicts})
        return
    for experiment in load_experiments(root, names):
        typer.echo(f"{experiment.table.number}. {experiment.name}: {experiment.table.claim}")
        for setting in experiment.settings:
            one = verdicts[experiment.name].get(setting, {"verdict": "not run yet", "ours": ""})
            typer.echo(f"   {setting}: {one['verdict']}" + (f" ({one['ours']})" if one["ours"] else ""))
    for name, reason in record.get("failed", {}).items():
        typer.echo(f"failed: {name}: {reason}", err=True)
