"""Means with intervals, from resampled prompts and from runs; and counter-based random numbers. Imports no torch.

Axes: N resamples, R runs, P prompts, S sides of a comparison.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

CONFIDENCE = 0.95
RESAMPLES = 2000
COMPARED_RESAMPLES = 10_000
AT_ONCE = 500  # resamples at a time, to bound memory
TAILS = ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2)


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over prompts with its 95% interval."""

    value: float
    low: float
    high: float


def random_generator(seed: int) -> np.random.Generator:
    """The generator of resampling: the same data give the same interval on every machine."""
    return np.random.Generator(np.random.Philox(key=seed))


def bootstrap(value_P: npt.NDArray[np.float64], *, seed: int = 0) -> Interval:
    """Mean over prompts with a percentile interval from resampled prompts; `interval_of_equal` if all are alike."""
    if not len(value_P):
        return Interval(math.nan, math.nan, math.nan)
    if are_equal(value_P):
        return interval_of_equal(float(value_P.mean()), len(value_P))
    chosen = random_generator(seed).integers(len(value_P), size=(RESAMPLES, len(value_P)))
    return percentile_interval(float(value_P.mean()), value_P[chosen].mean(axis=1))


def are_equal(value_P: npt.NDArray[np.float64]) -> bool:
    """Whether all prompts have the same value, up to rounding. Then resampling gives no interval."""
    return bool(np.ptp(value_P) <= 1e-9 * max(1.0, float(np.abs(value_P).max())))


def interval_of_equal(value: float, prompts: int, *, least: float = 0.0, largest: float = 1.0) -> Interval:
    """The interval of a mean if all P prompts have the same value.

    With probability 2.5%, P draws miss a share 1 − 0.025^(1/P) of all prompts. The missed prompts may have any value
    from `least` to `largest`, or to the common value if it is outside. For 0 and 1 this is the exact binomial interval.

    >>> none, all_right, one_prompt = interval_of_equal(0.0, 30), interval_of_equal(1.0, 30), interval_of_equal(0.5, 1)
    >>> [(round(interval.low, 2), round(interval.high, 2)) for interval in (none, all_right, one_prompt)]
    [(0.0, 0.12), (0.88, 1.0), (0.01, 0.99)]
    """
    covered = TAILS[0] ** (1 / prompts)
    low, high = ((1 - covered) * end for end in (min(least, value), max(largest, value)))
    return Interval(value, covered * value + low, covered * value + high)


def percentile_interval(value: float, resampled: npt.NDArray[np.float64]) -> Interval:
    """A value with the middle 95% of its resamples."""
    low, high = np.quantile(resampled, TAILS)
    return Interval(value, float(low), float(high))


def resample_prompts(scores: Sequence[npt.NDArray[np.float64]]) -> list[npt.NDArray[np.float64]]:
    """Means of several lists of scores, one per prompt, over the same prompts drawn with replacement."""
    generator = random_generator(0)
    score_PS = np.stack(list(scores), axis=1)
    prompts = len(score_PS)
    means: list[npt.NDArray[np.float64]] = []
    for _ in range(COMPARED_RESAMPLES // AT_ONCE):
        weight_NP = generator.multinomial(prompts, np.full(prompts, 1 / prompts), size=AT_ONCE) / prompts
        means.append(weight_NP @ score_PS)
    return list(np.concatenate(means).T)


def error_of_runs(value_R: npt.NDArray[np.float64], *, seed: int) -> npt.NDArray[np.float64]:
    """Samples of the error of the mean over runs: Student's t with R − 1 degrees of freedom; zeros for a single run.

    A bootstrap would be too narrow: its 95% interval of three runs reaches from the smallest to the largest value and
    contains the true mean in only three of four cases.
    """
    runs = len(value_R)
    if runs == 1:
        return np.zeros(COMPARED_RESAMPLES)
    spread = float(value_R.std(ddof=1)) / math.sqrt(runs)
    return spread * random_generator(seed).standard_t(runs - 1, size=COMPARED_RESAMPLES)


_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def splitmix64(seed: npt.NDArray[np.uint64], position: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Output number `position` of the generator seeded with `seed`; the arguments broadcast. Steele et al. 2014.

    For one seed the function is a bijection of the 64-bit numbers, so no two positions collide.

    >>> splitmix64(np.array([1234567], np.uint64), np.arange(2, dtype=np.uint64)).tolist()
    [6457827717110365317, 3203168211198807973]
    """
    z = seed + (position + np.uint64(1)) * _GAMMA  # wraps around, as intended
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def uniform(seed: npt.NDArray[np.uint64], position: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Uniform numbers in [0, 1), from the upper 53 bits; equal on every machine and for every numpy version."""
    return (splitmix64(seed, position) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def format_duration(seconds: float) -> str:
    """Seconds in readable units.

    >>> format_duration(7.26), format_duration(95), format_duration(7384)
    ('7.3 s', '1 min 35 s', '2 h 3 min')
    """
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min {rest} s"
