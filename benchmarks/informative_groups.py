"""What groups without variance cost: the same run with each rule, and with a table of pass rates of an earlier run.

    python benchmarks/informative_groups.py --out benchmarks/results/informative-groups-cpu.json

Arms: `keep` (all groups), `skip` (the same gradient without their passes), `drop`, `refill`, and `table` (`skip`, with
the prompts that a table of pass rates of the `keep` run of another seed calls neither solved nor hopeless). Counted are
rollouts sampled and rollouts that passed through the model in learning, until the run ends and until held-out accuracy
first reaches a target. Counts do not depend on the machine. Any task and model: `--set task.name=… --set model.path=…`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

from stalewise.api import run
from stalewise.config import make_config, parse_override, set_dotted
from stalewise.reporting.inspection import pass_counts
from stalewise.store.atomic import write_json_atomic
from stalewise.store.json_lines import read_jsonl
from stalewise.tasks.difficulty import DifficultyTable, PassCounts

ARMS = ("keep", "skip", "drop", "refill", "table")
RULES = {"table": "skip"}


def settings(runs: Path, name: str, arm: str, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    record: dict[str, Any] = {
        "name": name,
        "runs": str(runs),
        "seed": seed,
        "schedule": {"updates": arguments.updates, "stages": arguments.stages},
        "batch": {
            "prompts": arguments.prompts,
            "group_size": arguments.group_size,
            "without_variance": RULES.get(arm, arm),
        },
        "sampler": {"max_new_tokens": 8},
        "optimizer": {"learning_rate": arguments.learning_rate},
        "evaluation": {"every": arguments.every, "prompts": 256, "samples": 2},
    }
    for text in arguments.set or ():
        set_dotted(record, *parse_override(text))
    return record


def measure(directory: Path, target: float) -> dict[str, Any]:
    """Accuracy and counts of a finished run, whole and up to the version that first reached the target."""
    updates = read_jsonl(directory / "metrics.jsonl")
    evaluations = [(one["version"], one["accuracy"]["value"]) for one in read_jsonl(directory / "eval.jsonl")]
    journal = read_jsonl(directory / "journal.jsonl")
    sampled = {e["version"]: e["rollouts"] for e in journal if e["event"] == "generate"}

    def counts(version: int) -> dict[str, float]:
        return {
            "sampled": sum(rollouts for made_by, rollouts in sampled.items() if made_by < version),
            "learned": sum(one.get("responses", 0) for one in updates if one["update"] < version),
        }

    reached = next((version for version, accuracy in evaluations if accuracy >= target), None)
    return {
        "accuracy": evaluations[-1][1],
        **counts(len(updates)),
        "degenerate_fraction": statistics.fmean(one["degenerate_fraction"] for one in updates),
        "to_target": None if reached is None else {"updates": reached, **counts(reached)},
        "evaluations": evaluations,
    }


def write_table(source: Path, path: Path) -> None:
    table = DifficultyTable()
    for batch, name, counts in pass_counts(source):
        table.add(batch, name, {prompt: PassCounts(*one) for prompt, one in counts.items()})
    write_json_atomic(path, table.record())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--updates", type=int, default=64)
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--every", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--target", type=float, default=0.9)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument("--set", action="append", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    results: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arguments.arms}
    with tempfile.TemporaryDirectory() as place:
        runs = Path(place)
        if "table" in arguments.arms:
            run(make_config(settings(runs, "earlier", "keep", 1000, arguments)))
            write_table(runs / "earlier", runs / "table.json")
        for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
            for arm in arguments.arms:
                record = settings(runs, f"{arm}-{seed}", arm, seed, arguments)
                if arm == "table":
                    set_dotted(record, "task.difficulty", str(runs / "table.json"))
                run(make_config(record))
                results[arm].append({"seed": seed, **measure(runs / f"{arm}-{seed}", arguments.target)})
                shutil.rmtree(runs / f"{arm}-{seed}")  # checkpoints of a large model are gigabytes
                print(arm, seed, {k: v for k, v in results[arm][-1].items() if k != "evaluations"}, flush=True)
                if arguments.out is not None:
                    asked = {key: value for key, value in vars(arguments).items() if key != "out"}
                    write_json_atomic(arguments.out, {"settings": asked, "arms": results})
    print(json.dumps({arm: [one["accuracy"] for one in found] for arm, found in results.items()}))


if __name__ == "__main__":
    main()
