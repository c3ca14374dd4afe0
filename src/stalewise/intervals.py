"""Means with intervals, from resampled prompts. Pure numpy, so that what only reads results needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

CONFIDENCE = 0.95
RESAMPLES = 2000
TAILS = ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2)


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over prompts with its bootstrap interval."""

    value: float
    low: float
    high: float


def random_generator(seed: int) -> np.random.Generator:
    """The generator that resampling uses: the same data give the same interval on every machine."""
    return np.random.Generator(np.random.Philox(key=seed))


def bootstrap(value_P: npt.NDArray[np.float64], *, seed: int = 0) -> Interval:
    """Mean over prompts with a percentile interval from resampled prompts."""
    chosen = random_generator(seed).integers(len(value_P), size=(RESAMPLES, len(value_P)))
    return percentile_interval(float(value_P.mean()), value_P[chosen].mean(axis=1))


def percentile_interval(value: float, resampled: npt.NDArray[np.float64]) -> Interval:
    """A value with the middle 95% of what it came to in resamples."""
    low, high = np.quantile(resampled, TAILS)
    return Interval(value, float(low), float(high))
