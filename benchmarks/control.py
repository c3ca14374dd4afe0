"""What the controls of staleness are worth, on the laboratory task: three seeds, one JSON, one table.

    python benchmarks/control.py stages    # stages that end when they are spent, against every fixed size
    python benchmarks/control.py guard     # a learning rate ten times too large, with and without the guard
    python benchmarks/control.py auto      # the recipe `auto`, against each of its parts alone
    python benchmarks/control.py pipelined --jobs 1   # who waits where generation goes on beside learning

Runs are ordinary run directories under --runs: what is there is not made again. Accuracies hold on any machine;
seconds do, and are those of one thread per run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from stalewise.store import batch_directories, read_batch_manifest
from stalewise.store.json_lines import read_jsonl

BASE: dict[str, Any] = {
    "task.name": "arithmetic",
    "model.threads": 1,
    "sampler.max_new_tokens": 8,
    "schedule.updates": 128,
    "objective.name": "mu_grpo",
    "optimizer.learning_rate": 3e-4,
    "evaluation.every": 16,
    "evaluation.prompts": 512,
    "evaluation.samples": 4,
}
SPENT = {"schedule.end": "spent"}


def fixed(updates_per_generation: int) -> dict[str, Any]:
    return {"schedule.kind": "synchronous", "schedule.updates_per_generation": updates_per_generation}


def stage_variants() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for rate in (3e-4, 1e-3):
        for size in (4, 8, 16, 32, 64, 128):
            found[f"η {rate:g}, fixed µ {size}"] = {"optimizer.learning_rate": rate, **fixed(size)}
        for bound in (0.8, 0.9, 0.95):
            settings = {"optimizer.learning_rate": rate, **SPENT, "schedule.spent_ess": bound}
            found[f"η {rate:g}, spent at ESS {bound:g}"] = settings
    return found


def guard_variants() -> dict[str, dict[str, Any]]:
    ruinous = {"optimizer.learning_rate": 3e-3, "schedule.stages": 4}
    actions = ("off", "halve", "fresh", "both")
    return {"η 3e-4, no guard": {"schedule.stages": 4}} | {
        f"η 3e-3, guard {action}": {**ruinous, "guard.action": action} for action in actions
    }


def auto_variants() -> dict[str, dict[str, Any]]:
    """The recipe and its parts, each at a learning rate that is right, three times and ten times too large."""
    staged, planned = {"schedule.stages": 4}, {"plan.learning_rate": "planned"}
    parts: dict[str, dict[str, Any]] = {
        "µ-GRPO in 4 stages": staged,
        "P3O in 4 stages": {**staged, "objective.name": "p3o"},
        "vcpo alone": {**staged, "optimizer.step_control": "vcpo"},
        "spent alone": SPENT,
        "guard alone": {**staged, "guard.action": "halve"},
        "auto, not calibrated": {**SPENT, "guard.action": "halve"},
        "auto with P3O, not calibrated": {**SPENT, "guard.action": "halve", "objective.name": "p3o"},
    }
    found = {
        f"η {rate:g}, {name}": {"optimizer.learning_rate": rate, **settings}
        for rate in (3e-4, 1e-3, 3e-3)
        for name, settings in parts.items()
    }
    found["η planned, 4 stages"] = {**staged, **planned}
    found["η planned, auto"] = {**SPENT, "guard.action": "halve", **planned}
    return found


def pipelined_variants() -> dict[str, dict[str, Any]]:
    """Long enough for the start of a second process, some seconds of imports, to be a small part."""
    small = {"schedule.updates": 1024, "batch.prompts": 8, "evaluation.every": 0}
    beside = {"schedule.kind": "pipelined", "schedule.updates_per_generation": 4}
    return {
        "synchronous, µ 4": {**small, **fixed(4)},
        "pipelined, µ 4, lag 1": {**small, **beside, "schedule.lag": 1},
        "pipelined, µ 4, lag 2": {**small, **beside, "schedule.lag": 2},
    }


VARIANTS = {
    "stages": stage_variants,
    "guard": guard_variants,
    "auto": auto_variants,
    "pipelined": pipelined_variants,
}
SWEEP = ("--staleness", "3,31,127", "--lr", "3e-4,1e-3,2e-3,4e-3", "--seeds", "0,1")


def words_of(verb: str, name: str, settings: Mapping[str, Any], runs: Path) -> list[str]:
    config = runs / f"{name}.toml"
    runs.mkdir(parents=True, exist_ok=True)
    config.write_text("")
    words = [sys.executable, "-m", "stalewise", verb, str(config), "--set", f"name={name}", "--set", f"runs={runs}"]
    for key, value in (BASE | dict(settings)).items():
        words += ["--set", f"{key}={json.dumps(value)}"]
    return words


def calibrate(runs: Path, jobs: int) -> None:
    """Fit the law, so that a learning rate can be planned."""
    words = words_of("sweep", "law", {"evaluation.prompts": 128}, runs)
    subprocess.run([*words, *SWEEP, "--jobs", str(jobs)], check=True, stdout=sys.stderr)


def train(name: str, settings: Mapping[str, Any], runs: Path) -> int:
    """Run one config in a process of its own; its exit status."""
    words = words_of("train", name, settings, runs)
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode not in (0, 4):  # 4: the run collapsed, which is a result
        raise SystemExit(f"{name}: {done.stderr.strip().splitlines()[-1]}")
    return done.returncode


def measure(directory: Path) -> dict[str, Any]:
    """What a run came to, from its directory."""
    accuracies = [record["accuracy"]["value"] for record in read_jsonl(directory / "eval.jsonl")]
    taken_back = [
        record["accuracy"]["value"]
        for place in sorted(directory.glob("rollbacks/*"))
        for record in read_jsonl(place / "eval.jsonl")
    ]
    journal, beside = (read_jsonl(directory / name) for name in ("journal.jsonl", "journal-generator.jsonl"))
    batches = [read_batch_manifest(place) for place in batch_directories(directory / "rollouts")]
    updates = read_jsonl(directory / "metrics.jsonl")
    best = max([*accuracies, *taken_back])
    return {
        "final": accuracies[-1],
        "best": best,
        "final_of_best": accuracies[-1] / best,
        "generations": len([record for record in [*journal, *beside] if record["event"] == "generate"]),
        "rollouts_unused": 1 - sum(record["rollouts"] for record in updates) / sum(batch.rows for batch in batches),
        "rollbacks": len(list(directory.glob("rollbacks/*"))),
        "seconds": sum(record["seconds"] for record in journal if record["event"] != "evaluate"),
        "learner_waits": waits(journal),
        "generator_waits": waits(beside),
    }


def waits(journal: list[dict[str, Any]]) -> float:
    """The share of its time that a process waits for the other; 0 where there is one process."""
    spent = {event: sum(one["seconds"] for one in journal if one["event"] == event) for event in ("wait", "evaluate")}
    return spent["wait"] / (sum(one["seconds"] for one in journal) - spent["evaluate"] or 1.0)


def table(results: Mapping[str, list[dict[str, Any]]], title: str) -> Table:
    made = Table("", *(key.replace("_", " ") for key in next(iter(results.values()))[0]), title=title)
    for name, seeds in results.items():
        cells = []
        for key in seeds[0]:
            values = [seed[key] for seed in seeds]
            spread = (
                f" ± {statistics.stdev(values):.3f}" if len(values) > 1 and key.startswith(("final", "best")) else ""
            )
            cells.append(f"{statistics.mean(values):.3f}{spread}")
        made.add_row(name, *cells)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=sorted(VARIANTS))
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated")
    parser.add_argument("--runs", type=Path, default=Path("runs/control"))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs side by side")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    variants = VARIANTS[arguments.part]()
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    jobs = {
        (name, seed): f"{arguments.part}-{index:02d}-seed{seed}"
        for index, name in enumerate(variants)
        for seed in seeds
    }
    if arguments.part == "auto":
        calibrate(arguments.runs, arguments.jobs)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(lambda job: train(jobs[job], {**variants[job[0]], "seed": job[1]}, arguments.runs), jobs))
    results = {name: [measure(arguments.runs / jobs[name, seed]) for seed in seeds] for name in variants}
    Console(stderr=True, width=180).print(table(results, f"{arguments.part}, {len(seeds)} seeds"))
    record = {"part": arguments.part, "seeds": seeds, "base": BASE, "variants": variants, "results": results}
    print(json.dumps(record))
    if arguments.output:
        arguments.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
