"""The records of a run: what is appended, dropped and read again."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from stalewise.orchestrator.run_log import RunLog
from stalewise.staleness.schedule import Step
from stalewise.store import ledger_path, read_ledger
from stalewise.store.json_lines import read_jsonl


def log_update(run_log: RunLog, update: int, generation_batch: int, **metrics: Any) -> None:
    record = {"update": update, "generation_batch": generation_batch, **metrics}
    run_log.log_update(Step(update, generation_batch, 0, update), np.array([4 * update, 4 * update + 1]), record)


def filled(directory: Path) -> RunLog:
    run_log = RunLog(directory)
    log_update(run_log, 0, 0, reward=0.5, ess=1.0, drift=0.1, batch_budget=0.4)
    log_update(run_log, 1, 1, reward=0.6, ess=0.9, drift=0.3, batch_budget=0.7)
    log_update(run_log, 2, 1, reward=0.7)  # was not taken
    log_update(run_log, 3, 1, reward=0.8, ess=0.8, drift=0.6, batch_budget=0.6)
    return run_log


def test_another_process_reads_what_one_has_logged(tmp_path: Path) -> None:
    ours, theirs = filled(tmp_path), RunLog(tmp_path)
    assert [one.update for one in theirs.updates] == [0, 1, 2, 3]
    assert [one.taken for one in theirs.updates] == [True, True, False, True]
    assert theirs.updates[0] == ours.updates[0]
    assert math.isnan(theirs.updates[2].drift) and math.isnan(theirs.updates[0].reward_error)
    assert [entry.rollout_ids for entry in read_ledger(ledger_path(tmp_path))][1] == ((4, 5),)


def test_what_decisions_need(tmp_path: Path) -> None:
    run_log = filled(tmp_path)
    assert [one.update for one in run_log.taken_on(1)] == [1, 3]
    assert run_log.taken_on(0) == []  # not the current batch
    assert run_log.budget_used() == {"batch_budget": 0.7, "horizon_budget": 0.0}
    assert [run_log.drift_at(version) for version in (0, 1, 2, 3, 4)] == [0.0, 0.1, 0.3, 0.3, 0.6]


def test_updates_that_were_not_saved_are_dropped_everywhere(tmp_path: Path) -> None:
    run_log = filled(tmp_path)
    run_log.drop_updates(first=2)
    assert [one.update for one in run_log.updates] == [0, 1]
    assert [record["update"] for record in read_jsonl(tmp_path / "metrics.jsonl")] == [0, 1]
    assert [entry.update for entry in read_ledger(ledger_path(tmp_path))] == [0, 1]


def test_a_change_of_the_world_size_is_logged_and_told(tmp_path: Path) -> None:
    run_log = filled(tmp_path)
    assert run_log.log_world_size(1, "alone") == ""
    assert not (tmp_path / "journal.jsonl").exists()  # one process, as always
    assert run_log.log_world_size(2, "replicated").startswith("world size 1 → 2: updates from here on are the same")
    assert run_log.log_world_size(2, "replicated") == ""
    assert [record.get("change") for record in read_jsonl(tmp_path / "journal.jsonl")] == ["world size 1 → 2", None]


def test_a_block_is_timed_with_its_notes(tmp_path: Path) -> None:
    run_log = RunLog(tmp_path, "other.jsonl")
    with run_log.timed("generate", version=3) as notes:
        notes["rollouts"] = 7
    (record,) = read_jsonl(tmp_path / "other.jsonl")
    assert (record["event"], record["version"], record["rollouts"]) == ("generate", 3, 7)
    assert record["seconds"] >= 0
