"""Planning for a cluster: formulas against simulation, limits that can be computed by hand, and the command."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from stalewise.cli import app
from stalewise.errors import ConfigError
from stalewise.planning.cluster.cluster_plan import load_cluster, plan_cluster
from stalewise.planning.cluster.hardware import (
    Cluster,
    Failures,
    Generation,
    Learning,
    Plans,
    Transfer,
    in_turns,
    split,
)
from stalewise.planning.cluster.lengths import Lengths
from stalewise.planning.cluster.makespan import best_splits, generation_seconds, predict, with_failures
from stalewise.planning.cluster.simulation import generate_batch, simulate

EXAMPLE = Path(__file__).parents[3] / "configs/clusters/mu_grpo.toml"
TOLERANCE = {"in turns": 0.07, "beside": 0.08, "streamed": 0.15}  # what docs/cluster.md states

SMALL = Cluster(
    devices=4,
    generation=Generation(tokens_per_second=4000.0, slots=32, tokens_per_second_alone=250.0, seconds_per_batch=0.5),
    lengths=Lengths(mean=500.0, sigma=0.7, most=2048, prompt=50.0),
    learning=Learning(tokens_per_second=3000.0, rollouts_per_update=32, seconds_per_update=0.1),
    schedule=Plans(updates=64, updates_per_generation=4, stages=2, pipelined_updates_per_generation=8),
    transfer=Transfer(1e9, 1e9, 1e9, 5e3, wake_up_seconds=1.0),
)


# ---------------------------------------------------------------- lengths


@pytest.mark.parametrize("lengths", [Lengths(500.0, 0.7, 2048), Lengths(4000.0, 1.2, 8192), Lengths(300.0, 0.1, 4096)])
def test_drawn_lengths_are_those_of_the_formulas(lengths: Lengths) -> None:
    drawn = lengths.draw(64 * 4000, np.random.default_rng(0)).reshape(-1, 64)
    assert drawn.mean() == pytest.approx(lengths.mean, rel=0.01)
    assert drawn.std() == pytest.approx(lengths.deviation(), rel=0.02)
    assert drawn.max(axis=1).mean() == pytest.approx(lengths.longest(64), rel=0.01)
    assert (drawn**2).mean() / (2 * drawn.mean()) == pytest.approx(lengths.mean_residual(), rel=0.02)
    assert lengths.mean_residual() < lengths.longest_residual(64) < lengths.most


def test_a_slot_ends_as_many_responses_as_the_renewal_equation_says() -> None:
    lengths = Lengths(500.0, 0.7, 2048)
    ends = np.cumsum(lengths.draw(20000 * 40, np.random.default_rng(0)).reshape(-1, 40), axis=1)
    for count in (0.2, 1.0, 2.5, 12.0):
        steps = lengths.renewal(count)
        assert (ends <= steps).sum(axis=1).mean() == pytest.approx(count, rel=0.02)


# ---------------------------------------------------------------- by hand


def test_rates_give_back_what_was_measured() -> None:
    generation = SMALL.generation
    fixed, slope = generation.seconds_per_step, generation.seconds_per_token
    assert 1 / (fixed + slope) == pytest.approx(250.0)
    assert 32 / (fixed + slope * 32) == pytest.approx(4000.0)
    flat = Generation(tokens_per_second=4000.0, slots=32)
    assert (flat.seconds_per_step, flat.seconds_per_token) == (pytest.approx(0.0), pytest.approx(1 / 4000))


def test_a_run_without_spread_or_transfer_is_a_division() -> None:
    cluster = replace(
        SMALL,
        lengths=Lengths(mean=500.0, sigma=1e-3, most=2048),
        generation=Generation(tokens_per_second=4000.0, slots=32),
        learning=Learning(tokens_per_second=3000.0, rollouts_per_update=32),
        transfer=Transfer(0.0, 1e9, 1e9, 0.0),
    )
    expected = 64 * 32 * 500 / 4 * (1 / 4000 + 1 / 3000)
    for arrangement in in_turns(cluster):
        assert predict(cluster, arrangement).seconds == pytest.approx(expected, rel=0.01)
        assert simulate(cluster, arrangement).seconds == pytest.approx(expected, rel=0.01)


def test_one_batch_ends_with_its_longest_response() -> None:
    batch = generate_batch(SMALL, 1, 20, np.random.default_rng(3))
    generation = SMALL.generation
    expected = generation.seconds_per_step * max(batch.lengths) + generation.seconds_per_token * sum(batch.lengths)
    assert batch.seconds == pytest.approx(0.5 + expected)
    assert batch.lengths == sorted(batch.lengths) and batch.ended == sorted(batch.ended)


def test_a_slow_disk_bounds_generation() -> None:
    slow = replace(SMALL, transfer=replace(SMALL.transfer, disk_bytes_per_second=1e3))
    assert generation_seconds(slow, 4, 128) == 128 * 5.0
    assert generate_batch(slow, 4, 128, np.random.default_rng(0)).seconds == 128 * 5.0


def test_failures_that_undo_more_than_is_done_are_an_error() -> None:
    broken = replace(SMALL, failures=Failures(per_device_hour=900.0, recovery_seconds=10.0))
    assert with_failures(broken, 4, 100.0, 0.5) == pytest.approx(100.0 / 0.5 * 11.0)
    with pytest.raises(ConfigError, match=r"no run gets through; lower failures\.per_device_hour"):
        with_failures(broken, 4, 100.0, 1.5)


# ---------------------------------------------------------------- formula and simulation


def drawn_cluster(number: int) -> Cluster:
    """A setting from the range for which the tolerance is stated."""
    random = np.random.default_rng(number)
    slots, mean = int(random.choice([16, 64, 256])), float(random.choice([300.0, 1500.0, 4000.0]))
    full = float(random.choice([2000.0, 12500.0]))
    return Cluster(
        devices=int(random.choice([2, 4, 8])),
        generation=Generation(full, slots, full / slots * float(random.choice([2.0, 5.0]))),
        lengths=Lengths(mean, float(random.uniform(0.2, 1.0)), 8192, prompt=100.0),
        learning=Learning(float(random.choice([2000.0, 9000.0])), int(random.choice([32, 128]))),
        schedule=Plans(updates=32, updates_per_generation=4, stages=2, pipelined_updates_per_generation=4),
        transfer=Transfer(15e9, 5e10, 5e9, 5e4, wake_up_seconds=5.0),
        failures=Failures(float(random.choice([0.0, 0.05])), 60.0, 1e10, checkpoint_every=8),
    )


@pytest.mark.parametrize("number", range(24))
def test_the_formula_is_near_the_simulation(number: int) -> None:
    cluster = drawn_cluster(number)
    for arrangement in [*in_turns(cluster), *best_splits(cluster)]:
        simulated = [simulate(cluster, arrangement, seed).seconds for seed in range(4)]
        expected = pytest.approx(float(np.mean(simulated)), rel=TOLERANCE[arrangement.way])
        assert predict(cluster, arrangement).seconds == expected, arrangement


def test_failures_cost_in_the_simulation_what_the_formula_says() -> None:
    failing = replace(SMALL, failures=Failures(1.0, 30.0, 1e9, checkpoint_every=8))
    spared = replace(failing, failures=replace(failing.failures, per_device_hour=0.0))
    staged = in_turns(SMALL)[1]
    with_them, without = ([simulate(one, staged, seed).seconds for seed in range(300)] for one in (failing, spared))
    lost = predict(failing, staged).seconds - predict(spared, staged).seconds
    error = math.hypot(np.std(with_them), np.std(without)) / math.sqrt(300)
    assert lost > 5 * error
    assert abs(np.mean(with_them) - np.mean(without) - lost) < 3 * error


def test_a_simulation_is_its_seed() -> None:
    for arrangement in [*in_turns(SMALL), *split(SMALL, 2)]:
        assert simulate(SMALL, arrangement, 1) == simulate(SMALL, arrangement, 1)
        assert simulate(SMALL, arrangement, 1) != simulate(SMALL, arrangement, 2)


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


# ---------------------------------------------------------------- the paper's setting


def test_the_setting_of_mu_grpo_comes_near_its_averages_and_not_to_its_best() -> None:
    plan = plan_cluster(load_cluster(EXAMPLE))
    assert plan.generation_speed_up() == pytest.approx(1.82, rel=0.15)
    assert plan.speed_up("staged") == pytest.approx(1.53, rel=0.10)
    assert plan.speed_up("staged") < 2.2 * 0.75
    idle = {one.formula.name: one.formula.learner_idle for one in plan.schedules}
    assert idle["streamed"] > 0.2 and idle["streamed staged"] < 0.006
    half = plan_cluster(load_cluster(EXAMPLE, {"learning.rollouts_per_update": 64}))
    assert half.speed_up("staged") > 2.0


# ---------------------------------------------------------------- the command


def call(*words: str) -> Any:
    return CliRunner().invoke(app, ["plan", *words])


def test_the_command_prints_all_schedules() -> None:
    few = ("--set", "schedule.updates=16", "--set", "schedule.stages=2")
    shown = call("--cluster", str(EXAMPLE), "--simulate", *few)
    assert shown.exit_code == 0, shown.output
    for text in ("synchronous", "staged", "pipelined", "streamed", "simulated", "× as fast", "2 + 2"):
        assert text in shown.stdout
    record = json.loads(call("--cluster", str(EXAMPLE), "--json", *few).stdout)
    assert [one["formula"]["name"] for one in record["schedules"]][:3] == ["synchronous", "staged", "pipelined"]
    assert math.isfinite(record["staged_over_synchronous"]) and record["schedules"][0]["simulated"] is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "plan takes a config, or --cluster"),
        (("x.toml", "--cluster", str(EXAMPLE)), "give one of them"),
        (("x.toml", "--simulate"), "--simulate goes with --cluster"),
        (("--cluster", "missing.toml"), "missing.toml does not exist"),
        (("--cluster", str(EXAMPLE), "--set", "lengths.meen=3"), "lengths.meen is no setting; did you mean mean?"),
        (("--cluster", str(EXAMPLE), "--set", "lengths.mean=9000"), "mean is 9000.0 and most is 8192"),
        (("--cluster", str(EXAMPLE), "--set", "devices=0"), "devices must be a whole number >= 1, got 0"),
        (("--cluster", str(EXAMPLE), "--set", "schedule.stages=0"), "stages must be a whole number >= 1"),
        (("--cluster", str(EXAMPLE), "--set", "generation.tokens_per_second_alone=1"), "the share of one of 256"),
        (("--cluster", str(EXAMPLE), "--set", "transfer.weights_bytes=-1"), "weights_bytes must be 0 or more"),
    ],
)
def test_wrong_input_is_one_line(words: tuple[str, ...], message: str) -> None:
    result = call(*words)
    assert result.exit_code == 2
    assert message in result.stderr and result.stderr.count("\n") == 1
