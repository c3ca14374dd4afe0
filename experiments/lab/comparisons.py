"""Comparisons that verdicts use: tuned arms, measures of runs, times at equal accuracy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from experiments.lab.finding import EQUAL
from experiments.lab.results import ArmResult, Mean, Measure, Results, collapsed, final, mean_of, seconds

from stalewise.reporting.compare import first_reached


def tuned(arms: Sequence[ArmResult], measure: Measure = final) -> ArmResult | None:
    """The arm with the best mean."""
    known = [arm for arm in arms if math.isfinite(arm.mean(measure).value)]
    return max(known, key=lambda arm: arm.mean(measure).value, default=None)


def largest_value(results: Results, axis: str) -> str:
    """The largest value of a numeric axis."""
    return max(results.values(axis), key=float, default="")


def only(arms: Sequence[ArmResult]) -> ArmResult | None:
    """The first arm, or None."""
    return arms[0] if arms else None


def less(a: float | None, b: float | None) -> float | None:
    """a − b, or None if either is unknown."""
    return None if a is None or b is None else a - b


def collapsed_of(arm: ArmResult) -> str:
    """How many of its runs collapsed, as text."""
    return "{} of {}".format(*arm.count(collapsed))


def mean_metric(key: str) -> Measure:
    """A measure: the mean of a metric over a run."""

    def measure(run: Mapping[str, Any]) -> float | None:
        values = [value for value in run.get("series", {}).get(key, [[], []])[1] if value is not None]
        return float(np.mean(values)) if values else None

    return measure


def speed_up(slow: ArmResult, fast: ArmResult) -> Mean:
    """Ratio of training times, slow over fast, paired by seed."""
    pairs = [(seconds(slow.runs[seed]), seconds(fast.runs[seed])) for seed in slow.runs if seed in fast.runs]
    return mean_of(a / b for a, b in pairs if a and b)


def over_all(ones: Sequence[ArmResult], others: Sequence[ArmResult]) -> Mean:
    """Final accuracy of `ones` minus that of `others`, each averaged over its arms, paired by the seeds all have."""
    seeds = set.intersection(*(set(arm.runs) for arm in (*ones, *others)))
    means = [
        [mean_of(final(arm.runs[seed]) for arm in arms).value for arms in (ones, others)] for seed in sorted(seeds)
    ]
    return mean_of(one - other for one, other in means)


def time_to_equal(fresh: ArmResult, staged: ArmResult) -> str:
    """How much earlier the staged arm reaches the final accuracy of the fresh arm, as text."""
    curves = [np.array([point[:2] for point in arm.curve(x="seconds")]) for arm in (fresh, staged)]
    if any(len(curve) < 3 for curve in curves):
        return ""
    target = float(curves[0][-1, 1]) - EQUAL
    times = [first_reached(curve[:, 0], curve[:, 1], target) for curve in curves]
    if times[1] is None:
        return f"; it never reaches {target:.3f}"
    return (
        f"; {target:.3f} is reached after {times[0]:.1f} s and {times[1]:.1f} s: {times[0] / times[1]:.2f}×"
        if times[0]
        else ""
    )
