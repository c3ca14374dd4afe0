"""Rates of a cluster, and arrangements of a schedule on it."""

from __future__ import annotations

import pytest

from clusters import SMALL
from stalewise.planning.cluster_hardware import (
    GenerationRates,
)


def test_rates_give_back_what_was_measured() -> None:
    generation = SMALL.generation
    fixed, slope = generation.seconds_per_step, generation.seconds_per_token
    assert 1 / (fixed + slope) == pytest.approx(250.0)
    assert 32 / (fixed + slope * 32) == pytest.approx(4000.0)
    flat = GenerationRates(tokens_per_second=4000.0, slots=32)
    assert (flat.seconds_per_step, flat.seconds_per_token) == (pytest.approx(0.0), pytest.approx(1 / 4000))
