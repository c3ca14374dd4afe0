"""The process that orders generation batches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stalewise.api import generate
from stalewise.config import make_config
from stalewise.errors import StoreError
from stalewise.rollout.workers import coordinator
from stalewise.rollout.workers.coordinator import is_being_written
from stalewise.rollout.workers.shard_queue import LivenessMonitor, ShardClaims, WorkerSession
from stalewise.store import shard_path
from stalewise.store.atomic import temporary_name
from stalewise.store.object_store import DirectoryStore
from tiny import tiny_record
from working import ordered

BATCH = "g000000-v000000"


def test_a_learner_goes_on_at_once_with_what_its_killed_predecessor_had_claimed(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tiny_record(runs, workers={"lost_after_s": 600.0}))
    order = ordered(config)
    object_store = DirectoryStore(config.directory)
    predecessor = WorkerSession(object_store, "learner", role="journal", lost_after_s=600.0)
    predecessor._write_heartbeat()  # and then it is killed
    claims = ShardClaims(order.name, predecessor)
    assert claims.take([0, 1], 2) == [0, 1]

    def watch(*_: object) -> bool:
        raise AssertionError("nobody needs to be watched: the lock says that it is gone")

    monkeypatch.setattr(LivenessMonitor, "is_lost", watch)
    (made,) = generate(config)
    assert made.rows == 32 and [shard.extra["worker"] for shard in made.shards] != ["learner"] * 2


def test_a_learner_that_starts_leaves_alone_what_a_worker_is_writing(runs: Path) -> None:
    config = make_config(tiny_record(runs))
    ordered(config)
    directory = config.directory / "rollouts" / BATCH
    directory.mkdir(parents=True)
    writing, left = temporary_name(shard_path(directory, 7)), temporary_name(config.directory / "x.json")
    writing.write_text("half")
    left.write_text("half")
    ordered(config)
    assert writing.exists() and not left.exists()
    assert is_being_written(config.directory, writing) and not is_being_written(config.directory, left)
    generate(config)
    assert not is_being_written(config.directory, writing)
    assert not writing.exists()  # whoever wrote it was killed: the batch is complete without it


@pytest.mark.parametrize("damage", ["digest", "path"])
def test_records_that_are_damaged_or_lead_out_of_the_run_are_refused(runs: Path, damage: str) -> None:
    config = make_config(tiny_record(runs))
    generate(config)
    record = json.loads(coordinator._records(config.directory))
    if damage == "path":
        record["files"]["../../evil.json"] = "{}"
        record["sha256"] = coordinator._digest(record["files"])
    else:
        record["sha256"] = "0" * 64
    there = DirectoryStore(runs / "there")
    there.write(coordinator._records_name("v0"), json.dumps(record).encode())
    with pytest.raises(StoreError, match="half written or damaged: continue the run where it was"):
        coordinator._newest_records(there, {0: "v0"}, config)
