"""The simulation of a cluster."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from clusters import SMALL
from stalewise.planning.cluster_hardware import (
    FailureRates,
    in_turns,
    split,
)
from stalewise.planning.cluster_simulation import generate_batch, predict, simulate


def test_one_batch_ends_with_its_longest_response() -> None:
    batch = generate_batch(SMALL, 1, 20, np.random.default_rng(3))
    generation = SMALL.generation
    expected = generation.seconds_per_step * max(batch.lengths) + generation.seconds_per_token * sum(batch.lengths)
    assert batch.seconds == pytest.approx(0.5 + expected)
    assert batch.lengths == sorted(batch.lengths) and batch.ended == sorted(batch.ended)


def test_failures_cost_in_the_simulation_what_the_formula_says() -> None:
    failing = replace(SMALL, failures=FailureRates(1.0, 30.0, 1e9, checkpoint_every=8))
    spared = replace(failing, failures=replace(failing.failures, per_device_hour=0.0))
    staged = in_turns(SMALL)[1]
    with_them, without = ([simulate(one, staged, seed).seconds for seed in range(150)] for one in (failing, spared))
    lost = predict(failing, staged).seconds - predict(spared, staged).seconds
    error = math.hypot(np.std(with_them), np.std(without)) / math.sqrt(150)
    assert lost > 5 * error
    assert abs(np.mean(with_them) - np.mean(without) - lost) < 3 * error


def test_a_simulation_is_its_seed() -> None:
    for arrangement in [*in_turns(SMALL), *split(SMALL, 2)]:
        assert simulate(SMALL, arrangement, 1) == simulate(SMALL, arrangement, 1)
        assert simulate(SMALL, arrangement, 1) != simulate(SMALL, arrangement, 2)
