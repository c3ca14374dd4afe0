"""The formulas: limits that can be computed by hand, and agreement with the simulation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from clusters import SMALL, drawn_cluster
from stalewise.errors import ConfigError
from stalewise.planning.cluster_hardware import (
    FailureRates,
    GenerationRates,
    LearningRates,
    ResponseLengths,
    TransferRates,
    in_turns,
    split,
)
from stalewise.planning.cluster_simulation import (
    best_splits,
    generate_batch,
    generation_seconds,
    predict,
    simulate,
    with_failures,
)

TOLERANCE = {"in turns": 0.07, "beside": 0.08, "streamed": 0.15}  # what docs/cluster.md states


def test_a_run_without_spread_or_transfer_is_a_division() -> None:
    cluster = replace(
        SMALL,
        lengths=ResponseLengths(mean=500.0, sigma=1e-3, most=2048),
        generation=GenerationRates(tokens_per_second=4000.0, slots=32),
        learning=LearningRates(tokens_per_second=3000.0, rollouts_per_update=32),
        transfer=TransferRates(0.0, 1e9, 1e9, 0.0),
    )
    expected = 64 * 32 * 500 / 4 * (1 / 4000 + 1 / 3000)
    for arrangement in in_turns(cluster):
        assert predict(cluster, arrangement).seconds == pytest.approx(expected, rel=0.01)
        assert simulate(cluster, arrangement).seconds == pytest.approx(expected, rel=0.01)


def test_a_slow_disk_bounds_generation() -> None:
    slow = replace(SMALL, transfer=replace(SMALL.transfer, disk_bytes_per_second=1e3))
    assert generation_seconds(slow, 4, 128) == 128 * 5.0
    assert generate_batch(slow, 4, 128, np.random.default_rng(0)).seconds == 128 * 5.0


def test_failures_that_undo_more_than_is_done_are_an_error() -> None:
    broken = replace(SMALL, failures=FailureRates(per_device_hour=900.0, recovery_seconds=10.0))
    assert with_failures(broken, 4, 100.0, 0.5) == pytest.approx(100.0 / 0.5 * 11.0)
    with pytest.raises(ConfigError, match=r"no run gets through; lower failures\.per_device_hour"):
        with_failures(broken, 4, 100.0, 1.5)


@pytest.mark.parametrize(
    "number", [*range(8), *(pytest.param(number, marks=pytest.mark.nightly) for number in range(8, 24))]
)
def test_the_formula_is_near_the_simulation(number: int) -> None:
    cluster = drawn_cluster(number)
    for arrangement in [*in_turns(cluster), *best_splits(cluster)]:
        simulated = [simulate(cluster, arrangement, seed).seconds for seed in range(4)]
        expected = pytest.approx(float(np.mean(simulated)), rel=TOLERANCE[arrangement.way])
        assert predict(cluster, arrangement).seconds == expected, arrangement


def test_the_best_split_is_the_best() -> None:
    for place, best in enumerate(best_splits(SMALL)):
        seconds = [predict(SMALL, split(SMALL, generating)[place]).seconds for generating in (1, 2, 3)]
        assert predict(SMALL, best).seconds == min(seconds) == seconds[best.generating - 1]
    assert best_splits(replace(SMALL, devices=1)) == []


def test_shares_and_traffic_add_up() -> None:
    for arrangement in in_turns(SMALL):
        found = predict(SMALL, arrangement)
        parts = found.generate_seconds + found.learn_seconds + found.switch_seconds
        assert found.seconds == pytest.approx(parts)
        assert found.learner_idle == pytest.approx(1 - found.learn_seconds / found.seconds)
        batches = {"synchronous": 16, "staged": 2}[arrangement.name]
        assert found.network_bytes_per_day * found.seconds / 86400 == pytest.approx(batches * 4e9 + 64 * 32 * 5e3)
        assert found.disk_bytes_per_day * found.seconds / 86400 == pytest.approx(64 * 32 * 5e3)
