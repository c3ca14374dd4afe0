"""SplitMix64: random numbers as a function of a seed and a position, the same on every machine and numpy version."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def splitmix64(seed: npt.NDArray[np.uint64], position: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Output number `position` of the generator seeded with `seed`; the arguments broadcast. Steele et al. 2014.

    For one seed no two positions collide: the function is a bijection of the 64-bit numbers.

    >>> splitmix64(np.array([1234567], np.uint64), np.arange(2, dtype=np.uint64)).tolist()
    [6457827717110365317, 3203168211198807973]
    """
    z = seed + (position + np.uint64(1)) * _GAMMA  # wraps around, as it should
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def uniform(seed: npt.NDArray[np.uint64], position: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Uniform numbers in [0, 1), from the upper 53 bits."""
    return (splitmix64(seed, position) >> np.uint64(11)).astype(np.float64) * 2.0**-53
