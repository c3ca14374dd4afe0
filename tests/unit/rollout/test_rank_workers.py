"""Ranks that generate together; with processes of their own in tests/equivalence/test_rank_rollouts.py."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stalewise.config import make_config
from stalewise.errors import RankError
from stalewise.rollout.generate import BatchPlan
from stalewise.rollout.workers.coordinator import Coordinator
from stalewise.rollout.workers.rank_workers import RankCoordinator
from tiny import tiny_record


def coordinator(runs: Path, log: list[str], reports: dict[int, Any]) -> RankCoordinator:
    ranks: Any = SimpleNamespace(
        world=3, others=range(1, 3), has_heard=lambda rank: rank in reports, receive=reports.pop
    )
    return RankCoordinator(Coordinator(make_config(tiny_record(runs)), "journal", log.append), ranks)


def test_a_batch_with_fewer_shards_than_ranks_is_said_once(runs: Path) -> None:
    log: list[str] = []
    one, plan = coordinator(runs, log, {}), BatchPlan(0, 0, 0, 8, 4, 4, 0)
    one._warn_of_few_shards(plan)
    one._warn_of_few_shards(plan)
    assert len(log) == 1 and log[0].startswith("only 2 of 3 ranks generate") and "rollouts_per_shard = 8" in log[0]


def test_reports_are_counted_and_a_failure_is_raised(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reports = {1: SimpleNamespace(what="generated", record={"shards": 5})}
    one = coordinator(runs, [], reports)
    one.check()
    assert one.made == {1: 5}
    reports[2] = SimpleNamespace(what="failed", record={"error": "no memory"})
    with pytest.raises(RankError, match="rank 2 cannot generate: no memory"):
        one.check()
