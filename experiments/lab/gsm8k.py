"""Claims 3, 4 and 9 on GSM8K with a 0.5B model: judged on the runs of benchmarks/gsm8k.py, each at its tuned rate.

A run's score is its accuracy after the last update, on 1,319 held-out questions with 4 samples each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from experiments.lab.statistics import Difference, mean_of, smallest_found, welch
from experiments.lab.verdicts import EQUAL, Finding, missing

from stalewise.store.atomic import read_json

FILE = Path("benchmarks", "results", "gsm8k-h200.json")
MARGIN = 0.03  # of claim 4, as in the laboratory
# For each rule: the keys of `claims` in that file that it compares, and the words for them on the page.
CLAIMS = {
    "accuracy_at_speed": {"3": "16", "3 (µ = 64)": "64", "3 (µ = 128)": "128"},
    "no_knob": {"4": "a tight clip"},
    "ours": {"9 (µ = 4)": "GRPO with µ=4", "9 (µ = 16)": "µ-GRPO with µ=16", "9 (µ = 64)": "µ-GRPO with µ=64"},
}
Record = Mapping[str, Any]


def accuracy_at_speed(record: Record) -> Finding:
    """µ-GRPO against GRPO with µ = 4, each at its own rate, at 128 updates. Shown where it is not below by more than
    0.02 at equal updates and is above at equal wall-clock, at µ = 16, at 64 and at 128 (Welch, one-sided, all six).
    Opposite where it is below by more than 0.02 at equal updates at any (the smallest p-value, times three).
    """
    pairs = CLAIMS["accuracy_at_speed"]
    updates = {mu: gap for key, mu in pairs.items() if (gap := _at_equal_updates(record, key))}
    seconds = {mu: gap for key, mu in pairs.items() if (gap := _at_equal_wallclock(record, key))}
    if len(updates) < len(pairs) or len(seconds) < len(pairs):
        return missing("two seeds of GRPO with µ=4, and of µ-GRPO at three µ")
    ours = f"{_mean(record, 'synchronous')} with µ=4; µ-GRPO less that at equal updates: "
    ours += ", ".join(f"{gap} at µ={mu}" for mu, gap in updates.items())
    ours += "; at equal wall-clock: " + ", ".join(f"{gap} at µ={mu}" for mu, gap in seconds.items())
    parts = [gap.p_above(-EQUAL) for gap in updates.values()] + [gap.p_above() for gap in seconds.values()]
    worst = min(1.0, len(updates) * min(gap.p_below(-EQUAL) for gap in updates.values()))
    return Finding(max(parts), worst, ours, _found({f"µ={mu}": gap for mu, gap in updates.items()}))


def no_knob(record: Record) -> Finding:
    """P3O against GRPO with a tight clip, both with µ = 16, each at its own rate, at 128 updates. Shown where P3O is
    not below by more than 0.03 (Welch, one-sided); opposite where it is below by more than that.
    """
    gap = _at_equal_updates(record, "4")
    if gap is None:
        return missing("two seeds of P3O and of a tight clip")
    ours = f"P3O less a tight clip: {gap} at µ=16 ({_mean(record, 'p3o')}, {_mean(record, 'grpo_tight')})"
    return Finding(gap.p_above(-MARGIN), gap.p_below(-MARGIN), ours, _found({"a tight clip": gap}))


def ours(record: Record) -> Finding:
    """`auto` against each single method: GRPO with µ = 4, and µ-GRPO with µ = 16 and 64, each at its own rate, when the
    faster of the two has made its 128 updates. Shown where `auto` is not below any by more than 0.02 (Welch, one-sided,
    all three). Opposite where it is below one of them by more than that (the smallest p-value, times three).
    """
    pairs = CLAIMS["ours"]
    gaps = {words: gap for key, words in pairs.items() if (gap := _at_equal_wallclock(record, key))}
    if len(gaps) < len(pairs):
        return missing("two seeds with a clock of `auto` and of three single methods")
    told = "auto at equal wall-clock less " + ", ".join(f"{words}: {gap}" for words, gap in gaps.items())
    same = {words: gap for key, words in pairs.items() if (gap := _at_equal_updates(record, key))}
    lines = ["At equal updates: " + ", ".join(f"{gap} ({words})" for words, gap in same.items()) + "."]
    worst = min(1.0, len(gaps) * min(gap.p_below(-EQUAL) for gap in gaps.values()))
    return Finding(max(gap.p_above(-EQUAL) for gap in gaps.values()), worst, told, [*_found(gaps), *lines])


RULES: dict[str, Callable[[Record], Finding]] = {rule.__name__: rule for rule in (accuracy_at_speed, no_knob, ours)}


def benchmark_findings(root: Path) -> dict[str, tuple[Finding, int]]:
    """By the name of a verdict what the benchmark's runs say, and how many seeds an arm of the claim has at least.

    Claims whose arms do not have two seeds yet are left out.
    """
    if not (path := root / FILE).is_file():
        return {}
    record = read_json(path)
    made = {name: rule(record) for name, rule in RULES.items()}
    return {name: (finding, _fewest(record, name)) for name, finding in made.items() if finding.p_shown is not None}


def _fewest(record: Record, rule: str) -> int:
    arms = {arm for claim in CLAIMS[rule] for arm in _arms(record, claim)}
    return min(len(record["final_accuracy"][arm]["values"]) for arm in arms)


def _mean(record: Record, arm: str) -> str:
    return str(mean_of(record["final_accuracy"][arm]["values"]))


def _at_equal_updates(record: Record, claim: str) -> Difference | None:
    sides = [(record["final_accuracy"].get(arm) or {"values": []})["values"] for arm in _arms(record, claim)]
    return welch(sides[1], sides[0]) if sides and all(len(side) > 1 for side in sides) else None


def _at_equal_wallclock(record: Record, claim: str) -> Difference | None:
    sides = ((record["claims"].get(claim) or {}).get("equal_wallclock") or {}).get("values", [])
    return welch(sides[1], sides[0]) if sides and all(len(side) > 1 for side in sides) else None


def _arms(record: Record, claim: str) -> list[str]:
    return (record["claims"].get(claim) or {"arms": []})["arms"]


def _found(gaps: Mapping[str, Difference]) -> list[str]:
    """What differences would have been found."""
    told = ", ".join(f"{smallest_found(gap):.3f} ({name})" for name, gap in gaps.items())
    return [f"Differences that would be found (one-sided 5%, power 90%): {told}."]
