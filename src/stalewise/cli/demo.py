"""`stalewise demo`: GRPO against two methods that use a few large stages, in minutes on two cores.

All three start from the embedded policy of the task `arithmetic` and take the same number of updates on the same number
of rollouts. They differ in their schedule and objective.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

from stalewise.api import evaluate, run
from stalewise.cli.app import print_json
from stalewise.cli.tables import make_table, print_lines
from stalewise.config import RunConfig, make_config
from stalewise.config.run_directory import RunResult
from stalewise.orchestrator.evaluation import Evaluation, describe_evaluation
from stalewise.reporting.render import write_report
from stalewise.store.records import METRIC, read_records
from stalewise.types import NullCallback, ProgressCallback

UPDATES = 384
PROMPTS = 4
TIMED = ("generate", "learn", "switch")
RUNS: dict[str, dict[str, Any]] = {
    "grpo": {"kind": "synchronous", "updates_per_generation": 4},
    "mu_grpo": {"kind": "staged", "stages": 4},
    "p3o": {"kind": "staged", "stages": 4},
}


def demo_config(name: str, runs: Path, *, prompts: int = PROMPTS, updates: int = UPDATES) -> RunConfig:
    """The config of one run."""
    record = {
        "name": name,
        "runs": str(runs),
        "task": {"name": "arithmetic"},
        # A second thread gains little for so small a model, and loses much on a busy machine.
        "model": {"threads": 1},
        "schedule": {**RUNS[name], "updates": updates},
        "objective": {"name": name},
        "batch": {"prompts": prompts, "group_size": 8},
        # Warm-up and decay let all three take twice the steps that a constant rate allows (docs/log.md).
        "optimizer": {"learning_rate": 6e-4, "schedule": "cosine", "warmup_updates": min(16, updates // 4)},
        "sampler": {"max_new_tokens": 8},
        "evaluation": {"prompts": 256, "samples": 4},
    }
    return make_config(record)


def run_demo(runs: Path, callback: ProgressCallback | None = None) -> dict[str, RunResult]:
    """Make all three runs; finished ones are not repeated."""
    callback = callback or NullCallback()
    callback.log(f"base policy, {describe_evaluation(warm_up())}")
    results: dict[str, RunResult] = {}
    for name in RUNS:
        config = demo_config(name, runs)
        plan = config.schedule.schedule()
        batches = f"{plan.generation_batches} generation batches for {plan.updates_per_generation} updates each"
        callback.log(f"{name}: {plan.updates} updates, {batches}")
        results[name] = run(config, callback)
    return results


def warm_up() -> Evaluation:
    """Evaluate the base policy. Otherwise the first run would include imports and first calls, and look slower."""
    return evaluate("arithmetic", task="arithmetic", prompts=256, samples=4, callback=NullCallback())


def summary_of(result: RunResult) -> dict[str, Any]:
    """Accuracy and time of one run. `seconds` excludes evaluation, which is the same in each."""
    seconds = result.seconds
    interval = result.evaluations[-1]["accuracy"]
    # Skipped updates, whose groups have no variance, have no ESS.
    ess = [record["ess"] for record in read_records(result.directory / "metrics.jsonl", METRIC) if record["taken"]]
    return {
        "accuracy": result.accuracy,
        "accuracy_low": interval["low"],
        "accuracy_high": interval["high"],
        "seconds": sum(seconds[name] for name in TIMED),
        **{f"{name}_seconds": seconds[name] for name in TIMED},
        "updates": result.updates,
        "final_ess": ess[-1] if ess else float("nan"),
        "directory": str(result.directory),
    }


def summary_table(figures: dict[str, Any]) -> Table:
    """The summary as a table."""
    title = f"arithmetic: {UPDATES} updates, base accuracy {figures['base_accuracy']:.3f}; times in seconds, last ESS"
    table = make_table(("run", "accuracy [95%]", "total", *TIMED, "ESS"), left=("run",), title=title)
    for name, run_figures in figures["runs"].items():
        accuracy = "{accuracy:.3f} [{accuracy_low:.3f}, {accuracy_high:.3f}]".format(**run_figures)
        seconds = (f"{run_figures[key]:.1f}" for key in ("seconds", *(f"{activity}_seconds" for activity in TIMED)))
        table.add_row(name, accuracy, *seconds, f"{run_figures['final_ess']:.3f}")
    return table


def main(*, as_json: bool, runs: Path, callback: ProgressCallback | None = None) -> None:
    """Run the demo and print a table and the report's path, or one JSON object."""
    results = run_demo(runs, callback)
    base = next(iter(results.values())).evaluations[0]["accuracy"]["value"]
    figures = {"base_accuracy": base, "runs": {name: summary_of(result) for name, result in results.items()}}
    report = write_report([result.directory for result in results.values()], runs / "report.html")
    if as_json:
        print_json({**figures, "report": str(report)})
    else:
        print_lines(summary_table(figures), f"report: {report}")
