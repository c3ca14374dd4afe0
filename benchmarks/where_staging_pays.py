"""Where staging pays: time of an update at µ = 4 divided by that at µ = 64, by size, length, devices and switch.

    python benchmarks/where_staging_pays.py            # a table
    python benchmarks/where_staging_pays.py --json

Rates of one H200 come from the raw files of the other benchmarks: a step of decoding reads the keys and values at the
memory's rate, and takes what was measured at its number of rows for everything else; learning has the fastest rate that
was measured. `stalewise plan --cluster` computes the rest. Its formula is compared here with whole runs of
benchmarks/switches.py. Several devices were not measured: rates grow with their number, and weights pass at 50 GB/s.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from stalewise.planning.cluster_hardware import (
    Cluster,
    FailureRates,
    GenerationRates,
    LearningRates,
    ResponseLengths,
    ScheduleSettings,
    TransferRates,
)
from stalewise.planning.cluster_plan import plan_cluster

RESULTS = Path(__file__).resolve().parent / "results"
PROMPT = 128  # tokens of the prompts of versus_vllm.py
UPDATES, STAGE, ROLLOUTS = 256, 64, 128
WEIGHTS = {"0.5b": 0.49e9, "1.5b": 1.54e9, "7b": 7.6e9}
BANDWIDTH = 4.8e12  # bytes/s of an H200's memory
KEPT_BYTES = {"0.5b": 12_288, "1.5b": 28_672, "7b": 57_344}  # keys and values of a token
CACHED = {"0.5b": 1_050_000, "1.5b": 1_050_000, "7b": 525_000}  # tokens of keys and values, as in versus_vllm.py
LEARNER = {"0.5b": "0.5b/full/plain", "1.5b": "1.5b/full/plain", "7b": "7b/full/recompute"}
LENGTHS = {"short": ResponseLengths(300.0, 0.5, 1024, PROMPT), "long": ResponseLengths(4000.0, 0.8, 16384, PROMPT)}
SWITCHES = (0.6, 5.0, 20.0)  # seconds


def read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text())


def steps(size: str) -> list[tuple[float, float, float]]:
    """Rows, tokens of keys and values, and seconds of one step of decoding, as measured."""
    found: list[tuple[float, float, float]] = []
    for name, part in read("versus_vllm-h200.json")["parts"].items():
        one, _, tokens = name.partition("/")
        if one == size:
            rows = part["ours"]["fixed"]["tokens"] / int(tokens)
            rows_at_once = min(rows, part["ours"]["rows"][-1])
            seconds = part["ours"]["fixed"]["seconds"] / (int(tokens) * rows / rows_at_once)
            found.append((rows_at_once, rows_at_once * (PROMPT + int(tokens) / 2), seconds))
    for name, step in read("decode_steps-h200.json").items():
        words = name.replace(",", "").split()
        if words[0] == size and words[-1] == "fused":
            found.append((float(words[1]), float(words[1]) * float(words[4]), step["ms"] / 1e3))
    return found


def step(size: str, rows: float, tokens: float) -> float:
    """Seconds of a step: the keys and values at the memory's rate, and the rest as measured at so many rows."""
    per_token = KEPT_BYTES[size] / BANDWIDTH
    rest: dict[float, list[float]] = {}
    for measured_rows, measured_tokens, seconds in steps(size):
        rest.setdefault(measured_rows, []).append(seconds - per_token * measured_tokens)
    at = sorted(rest)
    return per_token * tokens + float(np.interp(rows, at, [np.mean(rest[one]) for one in at]))


def generation(size: str, lengths: ResponseLengths) -> GenerationRates:
    """Rates of one device whose cache is full."""
    context = lengths.prompt + lengths.mean_residual()  # of a response in flight
    most = max(rows for rows, _, _ in steps(size))
    rows = int(min(most, CACHED[size] / context))
    return GenerationRates(rows / step(size, rows, rows * context), rows, 1.0 / step(size, 1.0, context))


def cluster(
    size: str, lengths: ResponseLengths, devices: int, switch: float, *, rollouts: int = ROLLOUTS, mu: int = 4
) -> Cluster:
    learner = read("learner-h200.json")["fastest"][LEARNER[size]]["tokens_per_second"]
    network = 50e9 if devices > 1 else 1e15  # on one device the copy is part of the switch
    return Cluster(
        devices=devices,
        generation=generation(size, lengths),
        lengths=lengths,
        learning=LearningRates(tokens_per_second=learner, rollouts_per_update=rollouts),
        schedule=ScheduleSettings(updates=UPDATES, updates_per_generation=mu, stages=UPDATES // STAGE),
        transfer=TransferRates(
            weights_bytes=2 * WEIGHTS[size],
            network_bytes_per_second=network,
            disk_bytes_per_second=2e9,
            bytes_per_rollout=12 * lengths.mean,
            wake_up_seconds=switch,
        ),
        failures=FailureRates(),
    )


def table() -> list[dict[str, Any]]:
    """One row for each size, length and number of devices."""
    rows: list[dict[str, Any]] = []
    for size in WEIGHTS:
        for kind, lengths in LENGTHS.items():
            for devices in (1, 8):
                plans = {switch: plan_cluster(cluster(size, lengths, devices, switch)) for switch in SWITCHES}
                at_4, at_64 = (plans[SWITCHES[0]].record()["schedules"][place]["formula"] for place in (0, 1))
                generating = [one["generate_seconds"] / UPDATES for one in (at_4, at_64)]
                rows.append(
                    {
                        "size": size,
                        "lengths": kind,
                        "devices": devices,
                        "generating_s": generating,
                        "learning_s": at_4["learn_seconds"] / UPDATES,
                        "times": {f"{switch:g}": plan.speed_up("staged") for switch, plan in plans.items()},
                    }
                )
    return rows


def check() -> list[dict[str, Any]]:
    """Generating an update in whole runs of switches.py, measured and by the formula."""
    found: list[dict[str, Any]] = []
    for name, run in read("switches-h200.json")["runs"].items():
        size, *_ = name.partition("-disk/")[0].split("/")
        if run["tokens"] != 400 or size not in WEIGHTS:
            continue
        lengths = ResponseLengths(399.0, 0.01, 400, PROMPT)  # random weights end at the limit
        plan = plan_cluster(cluster(size, lengths, 1, 0.0, rollouts=run["rollouts"], mu=run["mu"]))
        formula = plan.record()["schedules"][0]["formula"]["generate_seconds"] / UPDATES
        measured = run["seconds"]["generate"] / run["updates"]
        found.append({"run": name, "measured_s": measured, "formula_s": formula, "ratio": formula / measured})
    return found


def show(rows: list[dict[str, Any]], checked: list[dict[str, Any]]) -> str:
    switches = " | ".join(f"switch of {seconds:g} s" for seconds in SWITCHES)
    lines = [f"| | responses | GPUs | generating at µ = 4, 64, s | learning, s | {switches} |", "|---" * 8 + "|"]
    for row in rows:
        times = " | ".join(f"{value:.2f}×" for value in row["times"].values())
        generating = ", ".join(f"{value:.2f}" for value in row["generating_s"])
        head = f"| {row['size'].upper()} | {row['lengths']} | {row['devices']} | {generating}"
        lines.append(f"{head} | {row['learning_s']:.2f} | {times} |")
    lines += [
        f"{one['run']}: generating an update takes {one['measured_s']:.3f} s, {one['formula_s']:.3f} s by the formula"
        for one in checked
    ]
    return "\n".join(lines)


def main(given: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(given)
    rows, checked = table(), check()
    print(json.dumps({"rows": rows, "check": checked}) if arguments.json else show(rows, checked))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
