"""The statistics of verdicts: Welch, Holm, Fisher, the number of seeds, and probit models that predict outcomes."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize
from scipy.special import ndtr
from scipy.stats import hypergeom, norm, t

CONFIDENCE = 0.95
ALPHA, POWER = 0.05, 0.90  # of the calculation of seeds, one-sided
SCALES = (0.05, 5.0)  # of a probit: outcomes that one threshold separates would ask for 0
SURE = 1e-3  # no prediction is more certain than this


@dataclass(frozen=True, slots=True)
class Mean:
    """Mean over seeds with its 95% interval (Student's t); NaN interval for one seed."""

    value: float
    low: float
    high: float
    seeds: int

    def __str__(self) -> str:
        if self.seeds == 0:
            return "–"
        return f"{self.value:.3f}" + (f" [{self.low:.3f}, {self.high:.3f}]" if self.seeds > 1 else " (one seed)")


def mean_of(values: Sequence[float]) -> Mean:
    """Mean and interval.

    >>> str(mean_of([0.5, 0.7, 0.9]))
    '0.700 [0.203, 1.197]'
    """
    if not values:
        return Mean(math.nan, math.nan, math.nan, 0)
    value, n = float(np.mean(values)), len(values)
    if n == 1:
        return Mean(value, math.nan, math.nan, 1)
    half = float(t.ppf((1 + CONFIDENCE) / 2, n - 1)) * float(np.std(values, ddof=1)) / math.sqrt(n)
    return Mean(value, value - half, value + half, n)


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference of means with its standard error and degrees of freedom."""

    value: float
    error: float
    freedom: float

    @property
    def interval(self) -> tuple[float, float]:
        """The 95% interval, two-sided."""
        half = float(t.ppf((1 + CONFIDENCE) / 2, self.freedom)) * self.error if self.error else 0.0
        return self.value - half, self.value + half

    def p_above(self, bound: float = 0.0) -> float:
        """One-sided p-value of "the difference is at most `bound`". Values without any spread decide nothing: 1."""
        if not self.error:
            return 1.0
        return float(t.sf((self.value - bound) / self.error, self.freedom))

    def p_below(self, bound: float = 0.0) -> float:
        """One-sided p-value of "the difference is at least `bound`"."""
        return Difference(-self.value, self.error, self.freedom).p_above(-bound)

    def __str__(self) -> str:
        return f"{self.value:+.3f} [{self.interval[0]:+.3f}, {self.interval[1]:+.3f}]"


def welch(one: Sequence[float], other: Sequence[float]) -> Difference:
    """mean(other) − mean(one) of independent samples whose variances may differ; each needs two values."""
    parts = [float(np.var(values, ddof=1)) / len(values) for values in (one, other)]
    total = sum(parts)
    below = sum(part**2 / (len(values) - 1) for part, values in zip(parts, (one, other), strict=True))
    value = float(np.mean(other) - np.mean(one))
    return Difference(value, math.sqrt(total), total**2 / below if below else math.inf)


@dataclass(frozen=True, slots=True)
class Spread:
    """Standard deviation over seeds, pooled over arms: with three or four seeds an arm's own is hardly known."""

    deviation: float
    freedom: float

    @classmethod
    def of(cls, samples: Sequence[Sequence[float]]) -> Spread:
        """Pooled over samples of two values or more."""
        freedom = sum(len(values) - 1 for values in samples)
        squares = sum(float(np.var(values)) * len(values) for values in samples)
        return cls(math.sqrt(squares / freedom), freedom)

    def less(self, one: Sequence[float], other: Sequence[float]) -> Difference:
        """mean(one) − mean(other)."""
        error = self.deviation * math.sqrt(1 / len(one) + 1 / len(other))
        return Difference(float(np.mean(one) - np.mean(other)), error, self.freedom)

    def mean(self, values: Sequence[float]) -> Difference:
        """The mean of these values, against a constant."""
        return Difference(float(np.mean(values)), self.deviation / math.sqrt(len(values)), self.freedom)


def paired(values: Sequence[float]) -> Difference:
    """The mean of differences, each an observation of its own."""
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return Difference(float(np.mean(values)), error, len(values) - 1)


def holm(p_values: Mapping[str, float], claims: int = 0) -> dict[str, float]:
    """Holm's adjusted p-values: below 0.05 is below 0.05 over all of them together.

    Of so many claims, where some have no p-value yet.

    >>> holm({"a": 0.01, "b": 0.04, "c": 0.03})
    {'a': 0.03, 'c': 0.06, 'b': 0.06}
    >>> holm({"a": 0.01}, claims=4)
    {'a': 0.04}
    """
    adjusted: dict[str, float] = {}
    largest = 0.0
    for place, (name, p) in enumerate(sorted(p_values.items(), key=lambda pair: pair[1])):
        largest = max(largest, min(1.0, (max(len(p_values), claims) - place) * p))
        adjusted[name] = round(largest, 12)
    return adjusted


def fisher(more: tuple[int, int], fewer: tuple[int, int]) -> float:
    """One-sided exact p-value of "the first does not happen more often": (times, of) and (times, of).

    >>> round(fisher((6, 6), (0, 6)) * 924)
    1
    """
    (x, n), (y, m) = more, fewer
    return float(hypergeom.sf(x - 1, n + m, x + y, n))


def seeds_needed(sd_one: float, sd_other: float, margin: float) -> int:
    """Seeds of each arm with which a difference of `margin` is found: one-sided 5%, power 90%.

    >>> seeds_needed(0.003, 0.036, 0.03)
    13
    """
    quantiles = float(norm.ppf(1 - ALPHA) + norm.ppf(POWER))
    return max(2, math.ceil(quantiles**2 * (sd_one**2 + sd_other**2) / margin**2))


def smallest_found(difference: Difference) -> float:
    """The difference that as many runs with this spread find: one-sided 5%, power 90%."""
    return float(norm.ppf(1 - ALPHA) + norm.ppf(POWER)) * difference.error


@dataclass(frozen=True, slots=True)
class Probit:
    """P(outcome) = Φ((log x − location) / scale)."""

    location: float
    scale: float

    def log_scores(self, x: Sequence[float] | np.ndarray, outcome: Sequence[bool] | np.ndarray) -> np.ndarray:
        """Log-probability of each outcome; probabilities are kept from 0.001 to 0.999."""
        p = ndtr((np.log(x) - self.location) / self.scale).clip(SURE, 1 - SURE)
        return np.where(outcome, np.log(p), np.log1p(-p))


def fit_probit(x: Sequence[float], outcome: Sequence[bool]) -> Probit:
    """Maximum likelihood, with the scale from 0.05 to 5, from several starts: the bounded likelihood has flats."""
    values, outcomes = np.asarray(x), np.asarray(outcome)
    logs = np.log(values)

    def loss(place: np.ndarray) -> float:
        return -float(Probit(place[0], math.exp(place[1])).log_scores(values, outcomes).sum())

    bounds = [(float(logs.min()) - 3, float(logs.max()) + 3), tuple(map(math.log, SCALES))]
    starts = [(float(q), s) for q in np.quantile(logs, (0.1, 0.3, 0.5, 0.7, 0.9)) for s in (-2.0, -0.5)]
    found = [minimize(loss, start, method="Nelder-Mead", bounds=bounds) for start in starts]
    best = min(found, key=lambda one: float(one.fun))
    return Probit(float(best.x[0]), math.exp(float(best.x[1])))


def by_cluster(values: Sequence[float], clusters: Sequence[Hashable]) -> list[float]:
    """Mean of each cluster: runs that differ in their seed alone are one observation."""
    groups: dict[Hashable, list[float]] = {}
    for value, cluster in zip(values, clusters, strict=True):
        groups.setdefault(cluster, []).append(float(value))
    return [float(np.mean(group)) for group in groups.values()]
