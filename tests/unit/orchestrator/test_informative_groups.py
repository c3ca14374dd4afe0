"""Groups without variance: skipped, dropped over the whole stage, or replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from callbacks import Listener, StopAt
from stalewise.api import learn, run
from stalewise.config import RunConfig, make_config
from stalewise.errors import ConfigError
from stalewise.rollout.generate import BatchPlan
from stalewise.rollout.workers.worker import work
from stalewise.store import batch_directories, open_batch, read_ledger
from stalewise.store.json_lines import read_jsonl
from stalewise.store.ledger import from_ranges, ledger_path
from stalewise.store.reader import has_variance, split_informative
from tiny import tiny_record


def made(runs: Path, name: str = "run", rule: str = "refill", **changes: Any) -> RunConfig:
    changes = {"optimizer": {"learning_rate": 1e-3}, **changes}
    changes["batch"] = {"prompts": 8, "without_variance": rule, **changes.get("batch", {})}
    return make_config(tiny_record(runs, name, **changes))


def weights(config: RunConfig) -> dict[str, torch.Tensor]:
    return load_file(config.directory / "checkpoints/v000004/model.safetensors")


def distance(one: RunConfig, other: RunConfig) -> float:
    ours, theirs = weights(one), weights(other)
    return float(sum((ours[name] - theirs[name]).square().sum() for name in ours)) ** 0.5


def metrics(config: RunConfig) -> list[dict[str, Any]]:
    return read_jsonl(config.directory / "metrics.jsonl")


def test_groups_are_dealt_evenly_by_kind() -> None:
    group = np.repeat(np.arange(10), 2)[::-1].copy()  # rows of a group need not rise
    informative = np.isin(group, [1, 2, 3, 7, 8])
    dealt = split_informative(group, informative, per_update=2, updates=3)
    assert [sorted(set(group[rows])) for rows in dealt] == [[0, 1, 2, 4], [3, 5, 6, 7], [8, 9]]
    # More than the updates need: the last ones stay unused.
    dealt = split_informative(group, informative, per_update=2, updates=2)
    assert [sorted(set(group[rows])) for rows in dealt] == [[0, 1, 2, 4, 5], [3, 6, 7, 9]]
    assert all((np.diff(group[rows]) >= 0).all() for rows in dealt)
    nothing = split_informative(group, np.zeros(20, bool), per_update=2, updates=3)
    assert sorted(np.concatenate(nothing)) == list(range(20))


def test_variance_is_that_of_known_rewards() -> None:
    reward, group = np.array([1.0, np.nan, 0.0, 1.0, 0.1, 0.1, np.nan]), np.array([5, 5, 2, 2, 3, 3, 9])
    assert has_variance(reward, group).tolist() == [False, False, True, True, False, False, False]


def test_a_plan_that_grows_keeps_its_shards() -> None:
    plan = BatchPlan(0, 0, first_prompt=100, prompts=5, group_size=2, prompts_per_shard=4, seed=0, most_prompts=20)
    longer = plan.with_more(3).with_more(6)
    assert (plan.shards, longer.shards, longer.prompts, longer.rounds) == (2, 5, 14, (5, 3, 6))
    ranges = [longer.prompt_range(shard) for shard in range(longer.shards)]
    assert ranges[:2] == [plan.prompt_range(0), plan.prompt_range(1)]
    assert [(one.start, one.stop) for one in ranges] == [(100, 104), (104, 105), (105, 108), (108, 112), (112, 114)]
    with pytest.raises(IndexError):
        longer.prompt_range(5)


def test_skipped_groups_leave_the_gradient_and_cost_nothing(runs: Path) -> None:
    every, fewer = made(runs, "keep", "keep"), made(runs, "skip", "skip")
    for config in (every, fewer):
        run(config)
    pairs = list(zip(metrics(every), metrics(fewer), strict=True))
    assert sum(one["responses"] for one, _ in pairs) > sum(other["responses"] for _, other in pairs)
    for one, other in pairs:
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)
        assert other["responses"] == round((1 - other["degenerate_fraction"]) * one["responses"])
    size = sum(float(one.square().sum()) for one in weights(every).values()) ** 0.5
    assert distance(every, fewer) < 1e-4 * size


def test_dropped_groups_are_shared_out_over_the_stage(runs: Path) -> None:
    config = made(runs, rule="drop")
    run(config)
    kept = [one["responses"] for one in metrics(config)]
    informative = [open_batch(path).informative().sum() for path in batch_directories(config.directory / "rollouts")]
    assert (kept[0] + kept[1], kept[2] + kept[3]) == tuple(informative)
    assert max(kept[0] - kept[1], kept[2] - kept[3]) <= 4  # at most a group


def test_batches_grow_until_every_update_is_full(runs: Path) -> None:
    said = Listener()
    config = made(runs)
    run(config, said)
    assert [one["responses"] for one in metrics(config)] == [32.0] * 4  # 8 groups of 4, each with variance
    batches = [open_batch(path) for path in batch_directories(config.directory / "rollouts")]
    grown = [batch for batch in batches if len(batch) > 64]
    assert grown and all(len(batch) <= 3 * 64 for batch in batches)
    ids = np.concatenate([batch.column("rollout_id") for batch in batches])
    assert len(np.unique(ids)) == len(ids)
    used = np.concatenate([from_ranges(entry.rollout_ids) for entry in read_ledger(ledger_path(config.directory))])
    assert len(np.unique(used)) == len(used)
    lines = [line for line in said.said if "groups had variance" in line]
    assert len(lines) == 2 and "more prompts (" in "".join(lines)
    events = [e for e in read_jsonl(config.directory / "journal.jsonl") if e["event"] == "generate"]
    assert [e["refilled_prompts"] for e in events] == [len(batch) // 4 - 16 for batch in batches]


@pytest.mark.parametrize(
    "changes", [pytest.param({}, marks=pytest.mark.nightly), {"schedule": {"stages": None, "end": "spent"}}]
)
def test_a_run_that_was_stopped_grows_alike(runs: Path, changes: dict[str, Any]) -> None:
    whole, stopped = made(runs, "whole", **changes), made(runs, "stopped", **changes)
    run(whole)
    with pytest.raises(KeyboardInterrupt):
        run(stopped, StopAt(1))
    (first, *_) = batch_directories(stopped.directory / "rollouts")
    (first / "shard-00004.json").unlink()  # of a later round
    run(stopped)
    assert distance(whole, stopped) == 0


def test_a_limit_ends_it_and_is_said(runs: Path) -> None:
    said = Listener()
    config = made(runs, batch={"refill_limit": 1.05}, schedule={"stages": 1})
    run(config, said)
    (batch,) = (open_batch(path) for path in batch_directories(config.directory / "rollouts"))
    assert len(batch) == 36 * 4  # 4 updates of 8 prompts, and one more for each: 1.05 is rounded up
    (line,) = [line for line in said.said if "groups had variance" in line]
    assert ("updates are smaller for it" in line) == (batch.informative().sum() < 32 * 4)


def test_workers_help_a_batch_to_grow(runs: Path) -> None:
    alone, helped = made(runs, "alone"), made(runs, "helped", workers={"lost_after_s": 5.0})
    run(alone)

    class WithWorker(Listener):
        def log(self, message: str) -> None:
            super().log(message)
            if message.startswith("version 0"):  # before the first batch
                work(helped.directory, worker="w", once=True)

    run(helped, WithWorker())
    assert distance(alone, helped) == 0


def test_learning_takes_full_updates_of_stored_groups(runs: Path) -> None:
    source, config = made(runs, "source", "keep"), made(runs, "offline", "drop", batch={"prompts": 6})
    run(source)
    learn(config, [source.directory])
    assert [one["responses"] for one in metrics(config)] == [24.0] * len(metrics(config))
    batches = [open_batch(path) for path in batch_directories(source.directory / "rollouts")]
    assert len(metrics(config)) == sum(batch.informative().sum() // 24 for batch in batches) >= 2


def test_contradictions_are_one_message(runs: Path) -> None:
    with pytest.raises(ConfigError, match="refill_limit has no meaning"):
        made(runs, rule="drop", batch={"refill_limit": 2.0})
    with pytest.raises(ConfigError, match="also act on groups of equal rewards"):
        made(runs, rule="skip", objective={"entropy_bonus": 0.1})
    with pytest.raises(ConfigError, match="p3o also learns from tokens with advantage 0"):
        run(made(runs, rule="skip", objective={"name": "p3o"}))
