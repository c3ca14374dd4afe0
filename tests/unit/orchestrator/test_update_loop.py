"""The updates between two checkpoints, with a trainer that only counts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from stalewise.config import RunConfig
from stalewise.orchestrator.run_log import RunLog
from stalewise.orchestrator.stages import DriftBudget
from stalewise.orchestrator.update_loop import PreparedUpdate, UpdateLoop, describe_update
from stalewise.staleness.schedule import Schedule
from stalewise.staleness.spent import Stage, StageSchedule
from stalewise.store import batch_directories, open_batch
from stalewise.store.json_lines import read_jsonl
from stalewise.types import NullCallback


def test_the_parts_of_rewards_are_metrics_of_each_update(tiny_run: RunConfig) -> None:
    parts = {
        one.rollout_id: one.reward_parts
        for path in batch_directories(tiny_run.directory / "rollouts")
        for one in open_batch(path).iter_rollouts()
    }
    metrics = read_jsonl(tiny_run.directory / "metrics.jsonl")
    ledger = read_jsonl(tiny_run.directory / "ledger" / "updates.jsonl")
    for line, entry in zip(metrics, ledger, strict=True):
        used = [parts[i] for first, last in entry["rollout_ids"] for i in range(first, last + 1)]
        for name in ("correct", "format"):
            assert line[f"part/{name}"] == pytest.approx(np.mean([one[name] for one in used]))


class Pending:
    def __init__(self, ess: float, kl: float, drift: float) -> None:
        self.ess, self.kl, self.drift = ess, kl, drift

    def metrics(self) -> dict[str, Any]:
        return {"reward": 0.5, "ess": self.ess, "kl_behaviour_policy": self.kl, "drift": self.drift}

    def tokens(self) -> None:
        return None


class Counter:
    """Takes updates whose effective sample sizes and divergences are known beforehand."""

    device = torch.device("cpu")

    def __init__(self, ess: Sequence[float], kl: Sequence[float]) -> None:
        self.ess, self.kl, self.version = ess, kl, 0

    def enqueue(self, inputs: object) -> Pending:
        self.version += 1
        return Pending(self.ess[self.version - 1], self.kl[self.version - 1], 0.1 * self.version)


class Notes(NullCallback):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def advance(self, amount: int, note: str = "") -> None:
        self.notes.append(note)


def take(
    directory: Path,
    schedule: Schedule,
    ess: Sequence[float],
    limits: tuple[float, float] | None = None,
    kl: Sequence[float] = (0.0,) * 8,
) -> tuple[dict[str, Any] | None, int, Notes]:
    run_log, trainer, callback = RunLog(directory), Counter(ess, kl), Notes()
    run_log.tokens = cast(Any, type("NoTokens", (), {"add": lambda *_: None})())
    loop = UpdateLoop(schedule, run_log, DriftBudget(limits, print), callback, 4, 0.9)

    def prepared() -> Iterator[PreparedUpdate]:
        for update in range(len(ess)):
            yield schedule.at(update), np.array([update]), cast(Any, None)

    return loop.run(prepared(), cast(Any, trainer)), trainer.version, callback


def test_all_updates_of_a_fixed_stage_are_taken_and_logged(tmp_path: Path) -> None:
    reason, taken, callback = take(tmp_path, Schedule(4, 4), [1.0, 0.5, 0.4, 0.3])
    assert (reason, taken) == (None, 4)
    records = read_jsonl(tmp_path / "metrics.jsonl")
    assert [record["update"] for record in records] == [0, 1, 2, 3]
    assert callback.notes[0] == "reward 0.500  ESS 1.000"


def test_an_open_ended_stage_ends_where_its_rollouts_are_spent(tmp_path: Path) -> None:
    schedule = StageSchedule(8, 8, stages=(Stage(0, 0, 8, 0),))
    reason, taken, _ = take(tmp_path, schedule, [1.0, 0.95, 0.85, 0.8, 0.7])
    assert taken == 4  # the median of 0.95, 0.85 and 0.8 is the first below 0.9
    assert reason is not None
    assert reason == {
        "reason": "effective sample size",
        "ess": 0.85,
        "fresh_ess": 1.0,
        "bound": 0.9,
        "planned_updates": 8,
    }


def test_an_open_ended_stage_ends_where_the_policy_left_its_rollouts(tmp_path: Path) -> None:
    schedule = StageSchedule(8, 8, stages=(Stage(0, 0, 8, 0),))
    reason, taken, _ = take(tmp_path, schedule, [1.0] * 8, kl=[0.0, 0.0, 0.04, 0.5, 0.04, 0.06, 0.06, 0.06])
    assert taken == 6  # the median of 0.5, 0.04 and 0.06 is the first above −ln(0.9)/2 = 0.053
    assert reason is not None and reason["ess"] == pytest.approx(math.exp(-0.12))


def test_an_open_ended_stage_ends_where_its_drift_limit_is_reached(tmp_path: Path) -> None:
    schedule = StageSchedule(8, 8, stages=(Stage(0, 0, 8, 0),))
    reason, taken, _ = take(tmp_path, schedule, [1.0] * 5, limits=(0.25, math.inf))
    assert taken == 3  # 0.3 of 0.25
    assert reason is not None and reason["reason"] == "drift" and reason["batch_budget"] > 1


def test_an_update_without_tokens_has_a_dash_for_its_effective_sample_size() -> None:
    assert describe_update({"reward": 1.0, "ess": math.nan}) == "reward 1.000  ESS –"
    assert describe_update({"reward": 1.0}) == "reward 1.000  ESS –"
    assert describe_update({"reward": 0.5, "ess": 0.25}) == "reward 0.500  ESS 0.250"
