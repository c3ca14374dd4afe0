"""Moments in fewer bits against float32: the same runs, by seed and precision, and how far their curves are apart.

    python benchmarks/moments.py                                            # the embedded policy, minutes on a CPU
    python benchmarks/moments.py --model DIRECTORY --train FILE --test FILE # a model on a file of questions, on a GPU

Prints and writes a JSON file: rewards by update, held-out accuracy, and the distance of each run's curve from that of
float32 with the same seed, beside the distance between float32 runs of different seeds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

KINDS = ("float32", "int8", "bfloat16")
WINDOW = 8  # updates that are averaged in a curve


def config_record(arguments: argparse.Namespace, kind: str, seed: int, runs: str) -> dict[str, Any]:
    """The run of one precision and seed."""
    record: dict[str, Any] = {
        "name": f"{kind}-{seed}",
        "runs": runs,
        "seed": seed,
        "schedule": {"kind": "staged", "updates": arguments.updates, "stages": arguments.stages},
        "batch": {"prompts": arguments.prompts, "group_size": 8},
        "objective": {"name": "grpo"},
        "optimizer": {"learning_rate": arguments.learning_rate, "moments": kind},
        "evaluation": {"prompts": arguments.test_prompts},
        "learner": {"record_tokens": False},
        "checkpoints": {"keep": 1},
    }
    if arguments.model:
        record["model"] = {"path": arguments.model}
        # As in benchmarks/gsm8k.py, which converts the model and names the files.
        options = {"path": arguments.train, "evaluation_path": arguments.test, "verifier": "math", "chat": True}
        options["system"] = "Please reason step by step, and put your final answer within \\boxed{}."
        record["task"] = {"name": "jsonl", "options": options}
        record["sampler"] = {"max_new_tokens": 400, "rollouts_per_shard": 1024}
        record["optimizer"]["warmup_updates"] = 8
    return record


def measure(arguments: argparse.Namespace, kind: str, seed: int, runs: str) -> dict[str, Any]:
    """Run it; rewards by update and accuracies."""
    from stalewise.api import run
    from stalewise.config import make_config
    from stalewise.store.json_lines import read_jsonl

    config, start = make_config(config_record(arguments, kind, seed, runs)), time.perf_counter()
    run(config)
    shutil.rmtree(config.directory / "checkpoints")  # those of a run with a large model would fill the disk
    updates = read_jsonl(config.directory / "metrics.jsonl")
    evaluations = read_jsonl(config.directory / "eval.jsonl")
    return {
        "seconds": time.perf_counter() - start,
        "reward": [round(one["reward"], 5) for one in updates],
        "update_norm": [one.get("update_norm") for one in updates],
        "accuracy": [one["accuracy"]["value"] for one in evaluations],
    }


def smooth(rewards: list[float]) -> list[float]:
    """Means of WINDOW updates.

    >>> smooth([0.0, 1.0] * 8)
    [0.5, 0.5]
    """
    return [statistics.fmean(rewards[start : start + WINDOW]) for start in range(0, len(rewards), WINDOW)]


def distance(one: list[float], other: list[float]) -> float:
    """Mean absolute difference of two curves."""
    return statistics.fmean(abs(a - b) for a, b in zip(smooth(one), smooth(other), strict=True))


def headline(runs: dict[str, dict[str, Any]], kinds: list[str], seeds: list[int]) -> dict[str, Any]:
    """Distances of the curves from float32 of the same seed; between seeds of float32; mean final accuracies."""
    curves = {name: run["reward"] for name, run in runs.items()}
    between = [distance(curves[f"float32-{a}"], curves[f"float32-{b}"]) for a, b in itertools.combinations(seeds, 2)]
    return {
        "between_seeds": statistics.fmean(between) if between else None,
        "from_float32": {
            kind: statistics.fmean(distance(curves[f"{kind}-{seed}"], curves[f"float32-{seed}"]) for seed in seeds)
            for kind in kinds
            if kind != "float32"
        },
        "accuracy": {
            kind: statistics.fmean(runs[f"{kind}-{seed}"]["accuracy"][-1] for seed in seeds) for kind in kinds
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--kinds", default=",".join(KINDS), help="float32 and those to compare with it")
    parser.add_argument("--updates", type=int, default=64)
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--test-prompts", type=int, default=128)
    parser.add_argument("--model", default="")
    parser.add_argument("--train", default="")
    parser.add_argument("--test", default="")
    arguments = parser.parse_args()
    seeds, kinds = [int(seed) for seed in arguments.seeds.split(",")], arguments.kinds.split(",")
    if "float32" not in kinds:
        parser.error("--kinds has no float32, with which the others are compared")
    runs: dict[str, dict[str, Any]] = json.loads(arguments.out.read_text())["runs"] if arguments.out.exists() else {}
    with tempfile.TemporaryDirectory(prefix="moments-") as directory:
        for kind, seed in itertools.product(kinds, seeds):
            if f"{kind}-{seed}" not in runs:
                runs[f"{kind}-{seed}"] = measure(arguments, kind, seed, directory)
                settings = {
                    name: value for name, value in vars(arguments).items() if name not in ("out", "seeds", "kinds")
                }
                arguments.out.write_text(json.dumps({"settings": settings, "runs": runs}, indent=1) + "\n")
                print(f"{kind}-{seed}: {runs[f'{kind}-{seed}']['seconds']:.0f} s", flush=True)
    record = {**headline(runs, kinds, seeds), **json.loads(arguments.out.read_text())}
    arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps({key: record[key] for key in ("between_seeds", "from_float32", "accuracy")}, indent=1))


if __name__ == "__main__":
    main()
