"""The main job in minutes on two cores: GRPO as others run it, against two methods that learn in a few large stages.

All three start from the embedded policy of the task `arithmetic`, take the same number of updates on the same number of
rollouts, and differ in when those are made and in what an update minimises.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from stalewise.api import evaluate, run
from stalewise.config import RunConfig, make_config
from stalewise.config.run_directory import RunResult
from stalewise.orchestrator.evaluation import Evaluation, describe_evaluation
from stalewise.reporting import write_report
from stalewise.store.atomic import read_jsonl
from stalewise.types import NullCallback, ProgressCallback

UPDATES = 384
PROMPTS = 4
RUNS: dict[str, dict[str, Any]] = {
    "grpo": {"kind": "synchronous", "updates_per_generation": 4},
    "mu_grpo": {"kind": "staged", "stages": 4},
    "p3o": {"kind": "staged", "stages": 4},
}


def demo_config(name: str, runs: Path, *, prompts: int = PROMPTS, updates: int = UPDATES) -> RunConfig:
    """The config of one of the three runs."""
    return make_config(
        {
            "name": name,
            "runs": str(runs),
            "task": {"name": "arithmetic"},
            "model": {"threads": 1},  # so small a model gains little from a second, and loses much on a busy machine
            "schedule": {**RUNS[name], "updates": updates},
            "objective": {"name": name},
            "batch": {"prompts": prompts, "group_size": 8},
            "optimizer": {"learning_rate": 3e-4},
            "sampler": {"max_new_tokens": 8},
            "evaluation": {"prompts": 256, "samples": 4},
        }
    )


def run_demo(runs: Path, callback: ProgressCallback | None = None) -> dict[str, RunResult]:
    """All three runs, one after the other; what an earlier call finished is not done again."""
    callback = callback or NullCallback()
    callback.log(f"base policy, {describe_evaluation(warm_up())}")
    results: dict[str, RunResult] = {}
    for name in RUNS:
        callback.log(f"{name}: {describe_schedule(name)}")
        results[name] = run(demo_config(name, runs), callback)
    return results


def warm_up() -> Evaluation:
    """Measure the base policy; without this the first run would pay for imports and first calls, and look slower."""
    return evaluate("arithmetic", task="arithmetic", prompts=256, samples=4)


def describe_schedule(name: str) -> str:
    """What a run does, in words."""
    schedule = demo_config(name, Path()).schedule.schedule()
    per_generation = schedule.updates_per_generation
    return (
        f"{schedule.updates} updates, {schedule.generation_batches} generations of rollouts for {per_generation} each"
    )


def summary(results: dict[str, RunResult]) -> dict[str, Any]:
    """What `stalewise demo --json` prints."""
    base = next(iter(results.values())).evaluations[0]["accuracy"]["value"]
    return {
        "base_accuracy": base,
        "runs": {name: summary_of(result) for name, result in results.items()},
    }


def summary_of(result: RunResult) -> dict[str, Any]:
    """Accuracy and cost of one run. `seconds` is all of it but evaluation, which is the same in each."""
    seconds = result.seconds
    interval = result.evaluations[-1]["accuracy"]
    # Of the last update that was taken: one whose groups all had no variance measured nothing.
    ess = [record["ess"] for record in read_jsonl(result.directory / "metrics.jsonl") if record["taken"]]
    return {
        "accuracy": result.accuracy,
        "accuracy_low": interval["low"],
        "accuracy_high": interval["high"],
        "seconds": seconds["generate"] + seconds["learn"] + seconds["switch"],
        "generate_seconds": seconds["generate"],
        "learn_seconds": seconds["learn"],
        "switch_seconds": seconds["switch"],
        "updates": result.updates,
        "final_ess": ess[-1] if ess else float("nan"),
        "directory": str(result.directory),
    }


def table(figures: dict[str, Any]) -> Table:
    """The same for a person."""
    title = f"arithmetic: {UPDATES} updates, base accuracy {figures['base_accuracy']:.3f}; times in seconds, last ESS"
    rows = Table(title=title, box=SIMPLE_HEAD)
    for column in ("run", "accuracy [95%]", "total", "generate", "learn", "switch", "ESS"):
        rows.add_column(column, justify="left" if column == "run" else "right", no_wrap=True)
    for name, run_figures in figures["runs"].items():
        rows.add_row(
            name,
            "{accuracy:.3f} [{accuracy_low:.3f}, {accuracy_high:.3f}]".format(**run_figures),
            *(f"{run_figures[key]:.1f}" for key in ("seconds", "generate_seconds", "learn_seconds", "switch_seconds")),
            f"{run_figures['final_ess']:.3f}",
        )
    return rows


def main(*, as_json: bool, runs: Path, callback: ProgressCallback | None = None) -> None:
    """Run the demo and print it: a table and the report's path, or one JSON object."""
    results = run_demo(runs, callback)
    figures = summary(results)
    report = write_report([result.directory for result in results.values()], runs / "report.html")
    if as_json:
        print(json.dumps({**figures, "report": str(report)}))
        return
    console = Console()
    console.print(table(figures))
    console.print(f"report: {report}", soft_wrap=True)
