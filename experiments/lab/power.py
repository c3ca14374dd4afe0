"""How often runs with SmolLM2 would show a claim that is true: simulated runs, judged by the claim's own rule.

    python -m experiments.lab.power [--times 400]

Scores are normal around the means below: what the papers report, scaled to warm-started SmolLM2, which goes from .25 to
.85 in 64 updates. The correction is that of nine claims and their opposites.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from experiments.lab.results import FORMAT, Results
from experiments.lab.verdicts import SHOWN, judge, rules

CLAIMS = 9
START, END = 0.25, 0.85  # accuracy before and after training
DEVIATIONS = 0.02, 0.05, 0.1  # of a score over seeds; judged runs have .003 to .2, most of them up to .04
LOST = 0.5  # by a method that a mismatch harms: most of what it gained
Means = Mapping[tuple[str, ...], tuple[float, float]]  # best on the way and end, by the values of the axes


def clipping_dilemma() -> tuple[tuple[str, ...], Means]:
    """The tight clip stays at .5; the relaxed clip climbs to .7, at one rate before it falls to .35."""
    means = {("tight", rate): (0.5, 0.49) for rate in ("2e-6", "5e-6", "1e-5", "2e-5")}
    means |= {("relaxed", "2e-6"): (0.65, 0.645), ("relaxed", "5e-6"): (0.7, 0.69)}
    means |= {("relaxed", "1e-5"): (0.7, 0.35), ("relaxed", "2e-5"): (0.5, 0.1)}
    return ("clip", "rate"), means


def mismatch_by_gain() -> tuple[tuple[str, ...], Means]:
    """P3O loses nothing; GRPO loses most of its gain at temperature 1.2 and with fp8."""
    kinds = ("none", "lag 1", "lag 2", "temperature 1.2", "temperature 1.2, raw", "fp8", "50% foreign")
    means = {("P3O", kind): (END, END) for kind in kinds}
    harmed = ("temperature 1.2", "fp8")
    means |= {("GRPO ε=0.2", kind): (END, END - LOST * (kind in harmed)) for kind in kinds}
    return ("method", "mismatch"), means


def two_anchors_by_gain() -> tuple[tuple[str, ...], Means]:
    """Both losses with two anchors are level with one at 1.0, and lose most of the gain at 1.2."""
    methods, temperatures = ("one anchor", "separate", "mixture"), ("1.0", "1.2")
    return ("method", "temperature"), {
        (method, at): (END, END - LOST * (method != "one anchor" and at == "1.2"))
        for method in methods
        for at in temperatures
    }


NAMES = {"clipping_dilemma": "{}, η={}", "mismatch_by_gain": "{}, {}", "two_anchors_by_gain": "{}, T={}"}
SCENARIOS: dict[str, Callable[[], tuple[tuple[str, ...], Means]]] = {
    "clipping_dilemma": clipping_dilemma,
    "mismatch_by_gain": mismatch_by_gain,
    "two_anchors_by_gain": two_anchors_by_gain,
}


def simulated(rule: str, seeds: int, deviation: float, random: np.random.Generator) -> Results:
    """Results of one experiment."""
    axes, means = SCENARIOS[rule]()
    arms: list[dict[str, Any]] = []
    for values, (best, end) in means.items():
        runs: dict[str, Any] = {}
        for seed in range(seeds):
            by = deviation * random.normal(size=2)
            last = end + by[0]
            accuracy = [START, max(best + by[1], last), last, last, last]
            runs[str(seed)] = {"ended": "", "evaluations": {"accuracy": accuracy}, "series": {}}
        head = {"name": NAMES[rule].format(*values), "kind": "train", "axes": dict(zip(axes, values, strict=True))}
        arms.append({**head, "rate": 0.0, "seeds": runs})
    return Results({"format": FORMAT, "tuning": {}, "arms": arms, "done": len(arms)})


def power(rule: str, seeds: int, deviation: float, times: int, random: np.random.Generator) -> float:
    """How often the claim is shown."""
    found = [rules()[rule](simulated(rule, seeds, deviation, random)) for _ in range(times)]
    return float(np.mean([judge({rule: finding}, CLAIMS)[rule][0] == SHOWN for finding in found]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=400, help="simulations of each kind")
    times, random = parser.parse_args().times, np.random.default_rng(0)
    print("| rule | seeds | " + " | ".join(f"deviation {deviation}" for deviation in DEVIATIONS) + " |")
    print("|---" * (2 + len(DEVIATIONS)) + "|")
    for rule in SCENARIOS:
        for seeds in (3, 4, 6):
            shares = [power(rule, seeds, deviation, times, random) for deviation in DEVIATIONS]
            print(f"| `{rule}` | {seeds} | " + " | ".join(f"{share:.0%}" for share in shares) + " |", flush=True)


if __name__ == "__main__":
    main()
