"""The shards of one process among several."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stalewise.config import make_config
from stalewise.rollout.factory import batch_plan, make_sampler
from stalewise.rollout.generate import make_shards
from stalewise.rollout.sampler import Request, Response
from stalewise.rollout.workers.shard_queue import ShardQueue, WorkerSession
from stalewise.rollout.workers.work_order import WorkOrder, config_digest, open_orders, place_order
from stalewise.rollout.workers.worker import work
from stalewise.store import (
    committed_shards,
    open_batch,
    read_batch_manifest,
    shard_path,
)
from stalewise.store.checkpoints import checkpoint_directory
from stalewise.store.object_store import DirectoryStore
from stalewise.tasks import make_task
from stalewise.types import SamplerSettings
from tiny import tiny_record
from working import freeze, ordered

BATCH = "g000000-v000000"


def checksums(run: Path, batch: str = BATCH) -> list[str]:
    return [shard.sha256 for shard in read_batch_manifest(run / "rollouts" / batch).shards]


class Halting:
    """A sampler that waits in the middle of its work until it is told to go on."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.began, self.go_on = inner, threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def sample(self, requests: Sequence[Request], settings: SamplerSettings | None = None) -> list[Response]:
        self.began.set()
        assert self.go_on.wait(60)
        return self.inner.sample(requests, settings)


def test_those_that_began_together_leave_each_other_a_part_however_large_their_appetite(
    runs: Path, sessions: tuple[DirectoryStore, list[WorkerSession]]
) -> None:
    config = make_config(tiny_record(runs))
    order = WorkOrder(batch_plan(config, config.schedule.schedule(), 0), "policy", config_digest(config))
    object_store, (a, b, c) = sessions
    place_order(object_store, order)

    def taken(session: WorkerSession, processes: int) -> list[int]:
        queue = ShardQueue(order, runs, session, sync=None, collects=False)
        queue.processes = processes
        return queue.take([0, 1, 2, 3, 4, 5, 6, 7], 1000)

    assert [taken(a, 3), taken(b, 3), taken(c, 3)] == [[0, 1, 2], [3, 4, 5], [6, 7]]


def test_a_worker_that_was_only_slow_changes_nothing(runs: Path) -> None:
    config = make_config(tiny_record(runs, workers={"lost_after_s": 0.6}))
    order = ordered(config)
    object_store, directory = DirectoryStore(config.directory), config.directory / "rollouts" / BATCH
    said: list[str] = []
    with WorkerSession(object_store, "slow", lost_after_s=0.6) as session:
        queue = ShardQueue(order, directory, session, sync=None, collects=True, log=said.append)
        sampler = Halting(make_sampler(config))
        task = make_task("arithmetic", seed=0)
        checkpoint = checkpoint_directory(config.directory, 0)
        thread = threading.Thread(
            target=make_shards,
            args=(order.plan,),
            kwargs={
                "checkpoint": checkpoint,
                "directory": directory,
                "task": task,
                "sampler": sampler,
                "on_shard": lambda rollouts: None,
                "source": queue,
            },
        )
        thread.start()
        assert sampler.began.wait(60)
        freeze(session)
        done = work(config.directory, worker="quick", once=True)
        assert (done.shards, done.taken_over, done.too_late) == (2, 1, 0)
        before = checksums(config.directory)
        sampler.go_on.set()
        thread.join(60)
        assert not thread.is_alive()
    assert queue.made_here == [] and queue.too_late_here == [0]
    assert said == [f"shard 0 of {BATCH} was made twice: another process committed it first"]
    assert checksums(config.directory) == before
    assert len(open_batch(directory)) == 32  # checksums hold


def test_an_order_that_was_taken_back_leaves_nothing_behind(runs: Path) -> None:
    config = make_config(tiny_record(runs))
    first = ordered(config)
    assert work(config.directory, worker="a", once=True).shards == 2
    directory = config.directory / "rollouts" / BATCH
    (directory / "manifest.json").unlink()
    shard_path(directory, 1).unlink()
    plan = batch_plan(config, config.schedule.schedule(), 0, attempt=1)
    again = WorkOrder(plan, first.policy, config_digest(config))
    object_store = DirectoryStore(config.directory)
    place_order(object_store, first)
    place_order(object_store, again)
    assert [order.name for order in open_orders(object_store)] == [again.name]
    with WorkerSession(object_store, "learner", lost_after_s=60.0) as session:
        said: list[str] = []
        queue = ShardQueue(again, directory, session, sync=None, collects=True, log=said.append)
        assert queue.present() == set()  # what the first order asked for is not what this one asks for
        assert "was made for a withdrawn order" in said[0] and committed_shards(directory) == []
