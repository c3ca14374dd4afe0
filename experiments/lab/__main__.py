"""Run the experiments that test the papers' claims, judge them by their rules, and write their pages.

Needs only what training needs (torch, transformers, numpy, pyarrow, pydantic, safetensors, scipy).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments.lab.definition import SETTINGS, Experiment, load_experiments
from experiments.lab.pages import describe_runs, found, import_results, render, results_table, write_files
from experiments.lab.plan import describe_plan
from experiments.lab.results import read_results, results_name
from experiments.lab.runner import (
    LabResult,
    default_experiments,
    kept_results,
    run_experiments,
    take_kept,
    take_results,
)
from experiments.lab.verdicts import rules

from stalewise.errors import ConfigError, StalewiseError

RESULTS = "*/results-*.json"  # of experiments, in the directory of all
FAILED, UNFINISHED = 1, 3  # exit status: of jobs that failed; of jobs that are left when the time is out


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m experiments.lab", description=__doc__)
    option = parser.add_argument
    option("names", nargs="*", metavar="NAME", help="experiments, or all; without a name: list them")
    option("--setting", choices=SETTINGS, default="lab", help="lab (embedded policies) or real (a language model)")
    option("--plan", action="store_true", help="print jobs and estimated core-seconds of each claim; run nothing")
    option("--smoke", action="store_true", help="runs of seconds, to try the whole path; judge nothing by them")
    option("--workers", type=positive_integer, help="number of jobs at a time")
    option("--out", type=Path, default=Path("runs/reproduce"), help="directory for runs and results")
    option(
        "--deadline-s",
        type=float,
        help=f"start no job after this many seconds; 0: only collect results. Exit status {UNFINISHED}: jobs are left",
    )
    option("--least-s", type=float, default=0.0, help="of --deadline-s, seconds that are kept for jobs to end")
    option("--render-only", action="store_true", help="run nothing; render from kept results")
    option("--no-render", action="store_true", help="write results to --out only; leave experiments/ and docs/ alone")
    option("--from", dest="source", type=Path, help="with --render-only: first import results from this directory")
    option(
        "--kept",
        type=Path,
        help="directory with results of jobs, or of experiments (experiments/): what is done there is not run again",
    )
    option("--replace", action="store_true", help="let results of fewer jobs replace the kept ones")
    option("--keep-runs", action="store_true", help="keep the weights and rollouts of every run")
    option("--experiments", type=Path, help="directory of the experiments' definitions")
    option("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args(words)
    if arguments.source is not None and not arguments.render_only:
        raise ConfigError("--from needs --render-only: it imports results made elsewhere")
    if arguments.kept is not None and not any(any(arguments.kept.glob(one)) for one in ("*.json", RESULTS)):
        raise ConfigError(
            f"--kept {arguments.kept}: there are no results of jobs; name a directory OUT/kept or experiments"
        )
    if arguments.kept is not None and arguments.render_only:
        raise ConfigError("--kept is for jobs that are to run; --render-only runs none")
    if arguments.render_only and arguments.no_render:
        raise ConfigError("--render-only and --no-render exclude each other: give one of them")
    if arguments.smoke and not (arguments.no_render or arguments.plan):
        raise ConfigError("--smoke needs --no-render: its runs are too short to be kept")
    return arguments


def positive_integer(text: str) -> int:
    """Type of an argument; argparse names it in its message."""
    if (number := int(text)) < 1:
        raise ValueError
    return number


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status."""
    try:
        return _main(parse(words))
    except StalewiseError as error:
        _log(f"error: {' '.join(str(error).split())}")
        return error.exit_code


def _main(arguments: argparse.Namespace) -> int:
    root, source = arguments.experiments or default_experiments(), arguments.source
    chosen = load_experiments(root, [] if arguments.names in ([], ["all"]) else arguments.names, smoke=arguments.smoke)
    if arguments.kept is not None:
        taken = take_kept(arguments.kept, arguments.out)
        taken += take_results(chosen, arguments.setting, arguments.kept, arguments.out)
        _log(f"results of {taken} jobs are taken over from {arguments.kept}")
    if arguments.plan:
        print("\n".join(describe_plan(chosen, arguments.setting, kept_results(arguments.out))))
        return 0
    result: LabResult | None = None
    if arguments.names and not arguments.render_only:
        result = run_experiments(
            chosen,
            arguments.setting,
            out=arguments.out,
            workers=arguments.workers,
            deadline_s=None if arguments.deadline_s is None else max(0.0, arguments.deadline_s - arguments.least_s),
            keep_runs=arguments.keep_runs,
            log=_log,
        )
        source = arguments.out
    if arguments.names and not arguments.no_render:
        render_pages(root, source, replace=arguments.replace)
    if arguments.names and source is not None:
        _log_unkept_results(chosen, source)
    _print(chosen, load_experiments(root), result, arguments.json)
    if result is None:
        return 0
    return FAILED if result.failed else UNFINISHED if result.done < result.jobs else 0


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def render_pages(root: Path, source: Path | None, *, replace: bool) -> None:
    """Import results from `source`, then write the pages of all experiments and the table of all."""
    experiments = load_experiments(root)
    for refusal in import_results(experiments, source, replace=replace) if source is not None else ():
        _log(refusal)
    files = render(experiments)
    if (root.parent / "docs").is_dir():
        table = results_table(experiments)
        files |= {root.parent / "docs" / "results.md": table} if table is not None else {}
    write_files(files)


def _log_unkept_results(experiments: Sequence[Experiment], source: Path) -> None:
    """Log what results in `source` say that are not the kept ones; verdicts need all claims."""
    for experiment in experiments:
        for setting in experiment.settings:
            own, kept = (path / results_name(setting) for path in (source / experiment.name, experiment.directory))
            results = read_results(own)
            if results is not None and not (kept.is_file() and own.read_bytes() == kept.read_bytes()):
                finding = rules()[experiment.rule(setting)](results)
                _log(f"{own}: {finding.ours}; {describe_runs(results)}")


def _print(
    experiments: Sequence[Experiment], every: Sequence[Experiment], result: LabResult | None, as_json: bool
) -> None:
    verdicts: dict[str, dict[str, Any]] = {experiment.name: {} for experiment in experiments}
    for (name, setting), one in found(every).items():  # corrected for the number of all claims, as on the pages
        if name in verdicts:
            verdicts[name][setting] = {"verdict": one.verdict, "p": one.p, "ours": one.finding.ours}
    record: dict[str, Any] = {} if result is None else asdict(result) | {"results": list(map(str, result.results))}
    if as_json:
        print(json.dumps({**record, "experiments": verdicts}))
        return
    for experiment in experiments:
        print(f"{experiment.table.number}. {experiment.name}: {experiment.table.claim}")
        for setting in experiment.settings:
            one = verdicts[experiment.name].get(setting, {"verdict": "not run yet", "ours": ""})
            print(f"   {setting}: {one['verdict']}" + (f" ({one['ours']})" if one["ours"] else ""))
    for name, reason in record.get("failed", {}).items():
        _log(f"failed: {name}: {reason}")


if __name__ == "__main__":
    sys.exit(main())
