"""How long responses are: a log-normal, cut at a limit; and how long the longest of many takes.

A generation batch ends with its longest response. So what matters besides the mean is the expected maximum, and what is
left of the responses in flight when no more requests wait: a residual length, which is longer than one would think,
because long responses are the ones that one finds in flight.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from stalewise.staleness.law import require_count, require_positive
from stalewise.staleness.likelihood import Array, log_ndtr

POINTS = 4097  # of the grid over lengths on which integrals are sums
BISECTIONS = 80
RENEWAL_POINTS = 512


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of responses: `mean` and `most` as measured, after the cut; `sigma` is that of the logarithm before it."""

    mean: float
    sigma: float
    most: int
    prompt: float = 0.0  # tokens of a prompt, which the learner reads, too

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        require_positive("mean", self.mean)
        require_positive("sigma", self.sigma)
        require_count("most", self.most)
        if not self.mean < self.most:
            raise ValueError(f"mean is {self.mean} and most is {self.most}: the mean of what is cut is below the cut")
        if not 0.0 <= self.prompt < math.inf:
            raise ValueError(f"prompt must be 0 or more and finite, got {self.prompt}")

    @property
    def location(self) -> float:
        """Mean of the logarithm before the cut."""
        return _location(self)

    def draw(self, count: int, random: np.random.Generator) -> Array:
        """So many lengths, whole tokens."""
        drawn = random.lognormal(self.location, self.sigma, count)
        return np.clip(np.ceil(drawn), 1.0, self.most)

    def longest(self, count: float) -> float:
        """Expected longest of so many responses."""
        return _longest(self.survival(), count) * self.most

    def longest_residual(self, count: float) -> float:
        """Expected longest of what is left of so many responses in flight."""
        return _longest(self.residual_survival(), count) * self.most

    def mean_residual(self) -> float:
        """Mean of what is left of a response in flight, and of what is there of it: E[L²]/(2·E[L])."""
        return _integral(self.residual_survival()) * self.most

    def deviation(self) -> float:
        """Standard deviation."""
        return math.sqrt(max(0.0, self.mean * (2.0 * self.mean_residual() - self.mean)))

    def renewal(self, count: float) -> float:
        """Steps after which a slot has ended `count` responses, on average, when it takes one after the other."""
        ended, step = _renewal(self), self.most / RENEWAL_POINTS
        if count <= ended[-1]:
            return float(np.interp(count, ended, step * np.arange(len(ended))))
        return self.most + (count - float(ended[-1])) * self.mean

    def grid(self) -> Array:
        """Lengths from 0 to the limit, at which `survival` and `residual_survival` are given."""
        return np.linspace(0.0, self.most, POINTS)

    def survival(self) -> Array:
        """Share of responses that are longer than each length of the grid; all that are cut end at the last one."""
        return _survival(self.grid(), self.location, self.sigma)

    def residual_survival(self) -> Array:
        """The same of what is left of responses in flight."""
        below = cumulative(self.survival())
        return 1.0 - below / below[-1]


def cumulative(values: Array) -> Array:
    """Integral up to each point of a grid whose points are 1 apart.

    >>> cumulative(np.array([1.0, 1.0, 3.0])).tolist()
    [0.0, 1.0, 3.0]
    """
    return np.concatenate([[0.0], np.cumsum((values[1:] + values[:-1]) / 2.0)])


def _survival(grid: Array, location: float, sigma: float) -> Array:
    logarithm = np.log(np.maximum(grid, 1e-9))
    return np.exp(log_ndtr((location - logarithm) / sigma))


def _integral(values: Array) -> float:
    """Integral over a grid from 0 to 1."""
    return float(np.mean((values[1:] + values[:-1]) / 2.0))


def _longest(survival: Array, count: float) -> float:
    """E[max] = ∫ 1 − F(x)^count, as a share of the limit."""
    return _integral(1.0 - (1.0 - survival) ** count)


@lru_cache(maxsize=256)
def _location(lengths: Lengths) -> float:
    """Where the log-normal lies whose mean after the cut is the one that was measured."""
    low, high = math.log(lengths.mean) - lengths.sigma**2, math.log(lengths.most) + 8.0 * lengths.sigma
    for _ in range(BISECTIONS):
        middle = (low + high) / 2.0
        if _integral(_survival(lengths.grid(), middle, lengths.sigma)) * lengths.most < lengths.mean:
            low = middle
        else:
            high = middle
    return (low + high) / 2.0


@lru_cache(maxsize=256)
def _renewal(lengths: Lengths) -> Array:
    """Expected number of responses that a slot has ended after so many steps: M(x) = F(x) + ∫ M(x − y) dF(y)."""
    shares = np.diff(
        1.0 - _survival(np.linspace(0.0, lengths.most, RENEWAL_POINTS + 1), lengths.location, lengths.sigma)
    )
    shares[-1] += 1.0 - shares.sum()  # what is cut
    ended = np.zeros(RENEWAL_POINTS + 1)
    for at in range(1, RENEWAL_POINTS + 1):
        ended[at] = float(shares[:at] @ (1.0 + ended[at - 1 :: -1]))
    return ended
