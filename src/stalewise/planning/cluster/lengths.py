"""Response lengths: a log-normal, truncated at a limit, with the expected longest of many.

A generation batch ends with its longest response. So the expected maximum matters, and the residual length of the
responses in flight when no more requests wait, which is long because long responses are more likely to be in flight.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Annotated, Self

import numpy as np
from pydantic import ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass

from stalewise.staleness.likelihood import Array, log_ndtr

POINTS = 4097  # of the grid of lengths for integrals
BISECTIONS = 80
RENEWAL_POINTS = 512

Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
CHECKED = ConfigDict(extra="forbid", allow_inf_nan=False)  # of a table of the cluster file


@dataclass(frozen=True, config=CHECKED)
class ResponseLengths:
    """Tokens of responses: `mean` and limit `most` after truncation; `sigma` of the logarithm before it."""

    mean: Positive
    sigma: Positive
    most: Count
    prompt: NotNegative = 0.0  # tokens of a prompt, which the trainer reads too

    @model_validator(mode="after")
    def _check_mean(self) -> Self:
        if self.mean >= self.most:
            raise ValueError(f"mean is {self.mean} and most is {self.most}: expected a mean below the limit")
        return self

    @cached_property
    def location(self) -> float:
        """Mean of the logarithm before truncation, by bisection: the mean after it is the measured one."""
        low, high = math.log(self.mean) - self.sigma**2, math.log(self.most) + 8.0 * self.sigma
        for _ in range(BISECTIONS):
            middle = (low + high) / 2.0
            is_below = _integral(_survival(self.grid, middle, self.sigma)) * self.most < self.mean
            low, high = (middle, high) if is_below else (low, middle)
        return (low + high) / 2.0

    @cached_property
    def grid(self) -> Array:
        """Lengths from 0 to the limit at which `survival` and `residual_survival` are evaluated."""
        return np.linspace(0.0, self.most, POINTS)

    @cached_property
    def survival(self) -> Array:
        """Share of responses longer than each length of the grid; truncated ones end at the last."""
        return _survival(self.grid, self.location, self.sigma)

    @cached_property
    def residual_survival(self) -> Array:
        """The same for residuals of responses in flight."""
        below = cumulative(self.survival)
        return 1.0 - below / below[-1]

    @cached_property
    def _renewals(self) -> Array:
        """Expected responses that a slot has finished after each step: M(x) = F(x) + ∫ M(x − y) dF(y)."""
        grid = np.linspace(0.0, self.most, RENEWAL_POINTS + 1)
        shares = np.diff(1.0 - _survival(grid, self.location, self.sigma))
        shares[-1] += 1.0 - shares.sum()  # truncated
        ended = np.zeros(RENEWAL_POINTS + 1)
        for at in range(1, RENEWAL_POINTS + 1):
            ended[at] = float(shares[:at] @ (1.0 + ended[at - 1 :: -1]))
        return ended

    def draw(self, count: int, random: np.random.Generator) -> Array:
        """Random lengths in whole tokens."""
        return np.clip(np.ceil(random.lognormal(self.location, self.sigma, count)), 1.0, self.most)

    def longest(self, count: float) -> float:
        """Expected longest of `count` responses: E[max] = ∫ 1 − F(x)^count."""
        return _integral(1.0 - (1.0 - self.survival) ** count) * self.most

    def longest_residual(self, count: float) -> float:
        """Expected longest residual of `count` responses in flight."""
        return _integral(1.0 - (1.0 - self.residual_survival) ** count) * self.most

    def mean_residual(self) -> float:
        """Mean residual of a response in flight, and mean of its part so far: E[L²]/(2·E[L])."""
        return _integral(self.residual_survival) * self.most

    def deviation(self) -> float:
        """Standard deviation."""
        return math.sqrt(max(0.0, self.mean * (2.0 * self.mean_residual() - self.mean)))

    def renewal(self, count: float) -> float:
        """Steps after which a slot has finished `count` responses on average, one after the other."""
        ended, step = self._renewals, self.most / RENEWAL_POINTS
        if count <= ended[-1]:
            return float(np.interp(count, ended, step * np.arange(len(ended))))
        return self.most + (count - float(ended[-1])) * self.mean


def cumulative(values: Array) -> Array:
    """Integral up to each point of a grid with spacing 1."""
    return np.concatenate([[0.0], np.cumsum((values[1:] + values[:-1]) / 2.0)])


def _survival(grid: Array, location: float, sigma: float) -> Array:
    return np.exp(log_ndtr((location - np.log(np.maximum(grid, 1e-9))) / sigma))


def _integral(values: Array) -> float:
    """Integral over a grid from 0 to 1."""
    return float(np.mean((values[1:] + values[:-1]) / 2.0))
