from __future__ import annotations

import numpy as np
import pytest

from stalewise.statistics import splitmix64, uniform


def test_outputs_are_the_published_ones() -> None:
    # The published first outputs of SplitMix64 seeded with 1234567.
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    positions = np.arange(5, dtype=np.uint64)
    assert splitmix64(np.array(1234567, dtype=np.uint64), positions).tolist() == published


def test_uniform_numbers_are_uniform_and_below_one() -> None:
    seeds = np.arange(200, dtype=np.uint64)[:, None]
    numbers = uniform(seeds, np.arange(500, dtype=np.uint64)[None, :])
    assert numbers.shape == (200, 500)
    assert numbers.min() >= 0 and numbers.max() < 1
    # Mean ½ with standard error √(1/12/100,000) = .0009; each tenth holds a tenth with .0009, too.
    assert numbers.mean() == pytest.approx(0.5, abs=0.004)
    assert np.histogram(numbers, bins=10, range=(0, 1))[0] / numbers.size == pytest.approx(0.1, abs=0.004)
    # Rows of neighbouring seeds have nothing in common.
    assert abs(np.corrcoef(numbers[:-1].ravel(), numbers[1:].ravel())[0, 1]) < 0.015
