"""The probe: a real run, and its measurements by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calibrations import config_at
from stalewise.config import RunConfig
from stalewise.errors import CalibrationError, ConfigError
from stalewise.planning.calibration import (
    CollapseRule,
    UpdateNormPhase,
    read_calibration,
)
from stalewise.planning.probe import generation_costs, measure, phases, rewards, switching_costs, uneven_stage
from stalewise.store import batch_directories, batch_directory, commit_batch, read_batch_manifest, write_shard
from stalewise.store.json_lines import read_jsonl
from stored_rollouts import make_rollouts
from tiny import call, called_json, refused, tiny_record, write_config


def test_a_probe_measures_a_real_run(tmp_path: Path, runs: Path) -> None:
    file = write_config(tmp_path / "tiny.toml", tiny_record(runs, plan={"strict": True}, sampler={"engine": "auto"}))
    found = called_json("probe", file, "--updates", 8)
    directory = runs / "tiny-probe"
    metrics = read_jsonl(directory / "metrics.jsonl")
    assert [(phase["first"], phase["last"]) for phase in found["phases"]] == [(1, 2), (3, 8)]
    assert found["phases"][0]["mean"] == pytest.approx(sum(m["update_norm_per_lr"] for m in metrics[:2]) / 2)
    manifests = [read_batch_manifest(batch) for batch in batch_directories(directory / "rollouts")]
    assert [manifest.rows for manifest in manifests] == [48, 48, 32]  # of 3, 3 and 2 updates with 16 rollouts each
    assert found["generation_sizes"] == [32, 48]
    means = [manifest.reward_mean or 0.0 for manifest in manifests]
    assert found["reward_mean"] == pytest.approx((48 * means[0] + 48 * means[1] + 32 * means[2]) / 128)
    total = found["reward_variance_within"] + found["reward_variance_between"]
    assert total == pytest.approx(found["reward_mean"] * (1 - found["reward_mean"]))  # rewards are 0 or 1
    assert 0 < found["teaching_share"] <= 1
    for name in ("tokens_per_second", "seconds_per_rollout", "seconds_per_update", "seconds_per_switch"):
        assert 0 < found[name] < math.inf
    assert found["peak_memory_bytes"] > 50e6
    assert 0 < found["bytes_per_rollout"] < 10_000 < found["bytes_per_checkpoint"]
    calibration = read_calibration(next((runs / "calibrations").iterdir()))
    assert calibration.places["probe"].engine == "hf"  # what `auto` picked
    before = (directory / "journal.jsonl").read_bytes()
    again = called_json("probe", file, "--updates", 8)
    assert again == found  # of a run that is complete, nothing is done anew
    assert (directory / "journal.jsonl").read_bytes() == before
    shown = call("probe", file, "--updates", 8)
    assert shown.exit_code == 0
    assert "G = ‖Δθ‖/η" in shown.stdout and "rewards differ in" in shown.stdout
    planned = call("plan", file, "--set", "schedule.updates=8", "--set", "schedule.stages=2")
    assert planned.exit_code == 3
    assert "time: about" in planned.stdout
    assert "no safe learning rate is known: there is a probe, but no sweep; run `stalewise sweep" in planned.stderr


def test_a_probe_that_is_too_short_is_refused(tmp_path: Path, runs: Path) -> None:
    file = write_config(tmp_path / "tiny.toml", tiny_record(runs))
    assert refused("probe", file, "--updates", 7) == "--updates 7: a probe needs at least 8"


def test_a_run_is_measured_whoever_made_it(tiny_run: RunConfig) -> None:
    found = measure(tiny_run.directory)
    assert (found.updates, found.peak_memory_bytes, found.generation_sizes) == (4, None, (32, 32))
    assert found.seconds_per_generation == 0.0  # one size tells nothing of it


def test_equal_rewards_teach_nothing_though_their_mean_is_rounded(tmp_path: Path) -> None:
    directory = batch_directory(tmp_path / "rollouts", version=0, generation_batch=0)
    rollouts = make_rollouts(0, 8)  # two groups of four
    assert np.var([0.1, 0.1, 0.1]) > 0  # by rounding alone
    given = [0.1, 0.1, 0.1, math.nan, 0.0, 1.0, 0.0, 1.0]
    write_shard(
        directory, 0, [replace(one, reward=reward) for one, reward in zip(rollouts, given, strict=True)], seconds=1.5
    )
    commit_batch(directory, shards=1, task="arithmetic")
    assert rewards(tmp_path)["teaching_share"] == 0.5


def test_phases_grow_fourfold() -> None:
    metrics = [{"update": u, "update_norm_per_lr": 8.0 if u < 2 else 2.0 if u < 8 else 1.0} for u in range(20)]
    assert phases(metrics) == [
        UpdateNormPhase(1, 2, 8.0, 0.0),
        UpdateNormPhase(3, 8, 2.0, 0.0),
        UpdateNormPhase(9, 20, 1.0, 0.0),
    ]


def event(batch: int, rollouts: int, seconds: float) -> dict[str, Any]:
    timed = {"event": "generate", "seconds": seconds}
    return {**timed, "generation_batch": batch, "rollouts": rollouts, "tokens": 10 * rollouts}


def test_the_fixed_cost_of_a_generation_is_told_from_its_slope() -> None:
    journal = [event(0, 100, 50.0), event(1, 100, 3.0), event(2, 100, 3.0), event(3, 20, 1.4)]
    found = generation_costs(journal, {0: 1.0, 1: 1.0, 2: 1.0, 3: 0.5})
    assert found["seconds_per_generation"] == pytest.approx(1.0)
    assert found["seconds_per_rollout"] == pytest.approx(0.02)
    assert found["generation_sizes"] == (20, 100)
    assert found["tokens_per_second"] == pytest.approx(2200 / 7.4)


def test_a_generation_of_two_processes_is_not_timed() -> None:
    journal = [event(0, 100, 50.0), event(1, 100, 0.5), event(2, 100, 3.0), event(3, 20, 1.4)]
    found = generation_costs(journal, {0: 1.0, 1: 1.0, 2: 1.0, 3: 0.5})
    assert found["seconds_per_rollout"] == pytest.approx(0.02)
    with pytest.raises(CalibrationError, match="no generation of the probe ran uninterrupted"):
        generation_costs(journal[:2], {0: 1.0, 1: 1.0})


def test_where_noise_hides_the_fixed_cost_it_is_none() -> None:
    found = generation_costs([event(1, 100, 3.0), event(2, 20, 0.1)], {1: 0.0, 2: 0.0})
    assert (found["seconds_per_generation"], found["seconds_per_rollout"]) == (0.0, pytest.approx(3.1 / 120))


def test_starting_is_told_from_switching() -> None:
    seconds = [("first checkpoint", 1.0), ("learner", 5.0), ("checkpoint", 0.5), ("learner", 0.1), ("checkpoint", 0.7)]
    seconds += [("commit", 0.3), ("commit", 0.0), ("offload", 0.2), ("offload", 0.4), ("memory", 2.0)]
    journal = [{"event": "switch", "reason": reason, "seconds": time} for reason, time in seconds]
    found = switching_costs(journal)
    assert found["seconds_per_switch"] == pytest.approx(0.1 + 0.6 + 0.15 + 0.3)
    assert found["seconds_to_start"] == pytest.approx(1.0 + 4.9 + 2.0)


def test_a_warm_up_longer_than_the_probe_is_refused(runs: Path) -> None:
    from stalewise.planning.probe import probe_config

    with pytest.raises(ConfigError, match="warmup_updates is 50, more than the 32 updates"):
        probe_config(config_at(runs, optimizer={"warmup_updates": 50}), 32)


def test_short_runs_keep_away_from_the_bucket_and_the_workers_of_the_run(runs: Path) -> None:
    from stalewise.planning.grid import make_grid
    from stalewise.planning.probe import probe_config

    config = config_at(runs, storage={"url": "s3://bucket/run"}, workers={"learner": "waits"})
    grid = make_grid(
        config, stalenesses=[1], learning_rates=[1e-3], seeds=[0], updates=8, rule=CollapseRule(evaluations=4)
    )
    for short in (probe_config(config, 32), *(cell.config for cell in grid)):
        assert (short.storage.url, short.workers.learner) == ("", "shares")


def test_the_last_generation_batch_of_a_probe_is_small() -> None:
    assert [uneven_stage(updates) for updates in (32, 12, 8)] == [10, 5, 3]  # 10 10 10 2, 5 5 2, 3 3 2
