"""A worker: a process on any machine that makes shards of what a learner orders, until there is nothing left to make.

It needs the run directory, or the URL of its depot, and no more: config, policies and orders are there. Any number may
come and go; one that is lost in the middle of a shard costs that shard's time.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stalewise.config import FORMAT, RunConfig, load_config, make_config, set_dotted
from stalewise.config.run_directory import identity_differences
from stalewise.errors import StoreError
from stalewise.rollout.factory import make_sampler
from stalewise.rollout.generate import commit_made, make_shards
from stalewise.rollout.sampler import Sampler
from stalewise.rollout.workers.claims import LivenessMonitor, Session
from stalewise.rollout.workers.shard_queue import ShardQueue, Withdrawn
from stalewise.rollout.workers.sync import PolicySync, digest_of
from stalewise.rollout.workers.work_order import (
    COMPLETE,
    ITS_OWN,
    WorkOrder,
    config_digest,
    is_open,
    open_orders,
    withdraw,
)
from stalewise.store import batch_directory
from stalewise.store.checkpoints import checkpoint_directory, read_state
from stalewise.store.object_store import DirectoryStore, ObjectStore, open_object_store
from stalewise.tasks import Task, make_task
from stalewise.types import NullCallback, ProgressCallback

CONFIG = "config.resolved.json"
POLL_S = 0.1
REMOTE_POLL_S = 2.0
SAY_AFTER_S = 10.0  # of waiting


@dataclass
class WorkDone:
    """What a worker did."""

    worker: str
    shards: int = 0
    rollouts: int = 0
    taken_over: int = 0  # of those: begun by a worker that was lost
    too_late: int = 0  # made, but somebody else had committed them
    batches: list[str] = field(default_factory=list)  # that it had a part in


def work(
    source: str | Path,
    *,
    worker: str = "",
    overrides: Mapping[str, Any] | None = None,
    once: bool = False,
    cache: str | Path | None = None,
    callback: ProgressCallback | None = None,
) -> WorkDone:
    """Make shards of whatever is ordered in a run until the run is complete; `once`: until no order is open.

    `source` is a run directory, the URL of a run's depot, or a config. `overrides` are for what may differ from worker
    to worker, as `model.device` and the engine do. Policies from a depot are kept in `cache`, or for the time being.
    """
    callback = callback or NullCallback()
    place = RankFolder.of(str(source), overrides or {}, wait=not once, log=callback.log)
    with tempfile.TemporaryDirectory(prefix="stalewise-worker-") as scratch:
        name = worker or f"{socket.gethostname()}-{os.getpid()}"
        lost_after_s = place.config.workers.lost_after_s
        with Session(place.object_store, name, lost_after_s=lost_after_s) as session:
            task = make_task(place.config.task.name, seed=place.config.seed, **place.config.task.options)
            sampler = make_sampler(place.config, log=callback.log)
            try:
                one = Worker(place, session, task, sampler, Path(cache or scratch), callback)
                one.work(once)
                return one.done
            finally:
                sampler.close()
                task.verifier.close()


@dataclass(frozen=True)
class RankFolder:
    """Where a worker works: the depot, the config of the run there, and its directory where machines share it."""

    object_store: ObjectStore
    config: RunConfig
    run: Path | None  # None: the depot is all there is

    @classmethod
    def of_run(cls, config: RunConfig) -> RankFolder:
        """Where a run of this config is, once it has begun."""
        url = config.storage.url
        object_store = open_object_store(url, config.storage.options) if url else DirectoryStore(config.directory)
        return cls(object_store, config, None if url else config.directory)

    @classmethod
    def of(cls, source: str, overrides: Mapping[str, Any], *, wait: bool, log: Callable[[str], object]) -> RankFolder:
        """Find it; where the learner has not begun yet, wait for that."""
        if "://" in source:
            object_store, run, given = open_object_store(source, _storage_options(overrides)), None, None
        elif not Path(source).is_file() and Path(source).suffix != ".toml":  # a run directory, now or soon
            object_store, run, given = DirectoryStore(source), Path(source), None
        else:
            given = load_config(source, overrides)
            its = cls.of_run(given)
            object_store, run = its.object_store, its.run
        found = _config_of(object_store, wait, log)
        if given is None:
            given = _changed(found, overrides, object_store.where)
            if run is not None and given.storage.url:  # the learner's own directory, where no orders are
                its = cls.of_run(given)
                object_store, run = its.object_store, its.run
                found = _config_of(object_store, wait, log)
        elif given.plan.learning_rate != "given":  # the learner has settled it
            optimizer = given.optimizer.model_copy(update={"learning_rate": found["optimizer"]["learning_rate"]})
            given = given.model_copy(update={"optimizer": optimizer})
        if differences := identity_differences(given, found, but=[f"model.{name}" for name in ITS_OWN]):
            raise StoreError(
                f"{object_store.where} belongs to another config ({'; '.join(differences[:3])}): a worker makes rollouts of "
                "the run's own config only; leave the settings out, or name the run directory instead of a file"
            )
        return cls(object_store, given, run)


def _changed(found: Mapping[str, Any], overrides: Mapping[str, Any], where: str) -> RunConfig:
    """The config of a run with some settings of this worker's own."""
    record = copy.deepcopy({key: value for key, value in found.items() if key != "format"})
    for key, value in overrides.items():
        set_dotted(record, key, value)
    return make_config(record, source=where)


def _storage_options(overrides: Mapping[str, Any]) -> dict[str, Any]:
    prefix = "storage.options."
    return {key.removeprefix(prefix): value for key, value in overrides.items() if key.startswith(prefix)}


def _config_of(object_store: ObjectStore, wait: bool, log: Callable[[str], object]) -> dict[str, Any]:
    """The resolved config of the run in a depot."""
    content, said = object_store.read(CONFIG), False
    while content is None:
        if not wait:
            raise StoreError(
                f"{object_store.where} holds no run: start `stalewise train` or `stalewise generate` first"
            )
        if not said:
            log(f"waiting for a run in {object_store.where}: start `stalewise train` there")
            said = True
        time.sleep(POLL_S if isinstance(object_store, DirectoryStore) else REMOTE_POLL_S)
        content = object_store.read(CONFIG)
    try:
        record = json.loads(content)
        found = record.get("format")
    except (ValueError, AttributeError):
        raise StoreError(
            f"{object_store.where}/{CONFIG} is half written or no config: start the learner again"
        ) from None
    if found != FORMAT:
        raise StoreError(
            f"{object_store.where} has format {found}; this release reads {FORMAT}: use the learner's release"
        )
    return record


class Worker:
    """One worker at one place."""

    def __init__(
        self,
        place: RankFolder,
        session: Session,
        task: Task,
        sampler: Sampler,
        cache: Path,
        callback: ProgressCallback,
        *,
        among: int = 1,
        check: Callable[[], object] = lambda: None,
    ) -> None:
        """`among` and `check` are those of a `Share`."""
        self.place, self.session, self.task, self.sampler, self.callback = place, session, task, sampler, callback
        self.cache = cache
        self.exchange = None if place.run is not None else PolicySync(place.object_store)
        self.lookout = LivenessMonitor(place.object_store, place.config.workers.lost_after_s)
        self.done = WorkDone(session.worker)
        self.among, self.check = among, check

    def work(self, once: bool) -> None:
        """Work at one order after the other."""
        finished: set[str] = set()
        waited, said = time.monotonic(), False
        while True:
            placed = open_orders(self.place.object_store)
            finished &= {order.name for order in placed}  # one that was fulfilled may be placed again
            orders = [order for order in placed if order.name not in finished]
            if orders:
                self.fulfil(orders[0])
                finished.add(orders[0].name)
                waited, said = time.monotonic(), False
                continue
            if once or self.place.object_store.read(COMPLETE) is not None:
                return
            if not said and time.monotonic() - waited > SAY_AFTER_S:
                self.callback.log(
                    f"waiting for orders in {self.place.object_store.where}: they come from `stalewise train`"
                )
                said = True
            time.sleep(POLL_S if self.exchange is None else REMOTE_POLL_S)

    def fulfil(self, order: WorkOrder) -> None:
        """Make a share of a generation batch, and stay until all of it is there."""
        if order.config != config_digest(self.place.config):
            raise StoreError(
                f"{self.place.object_store.where}/{order.path} is for another config than this worker has: start it again, "
                "with the run directory instead of a config"
            )
        try:
            plan, checkpoint = order.plan, self._policy(order)
        except StoreError:
            if is_open(self.place.object_store, order):
                raise
            return  # it was taken back, and its policy with it
        root = self.place.run / "rollouts" if self.place.run is not None else self.cache / order.name
        directory = batch_directory(root, version=plan.version, generation_batch=plan.generation_batch)
        share = ShardQueue(
            order,
            directory,
            self.place.object_store,
            self.session,
            self.lookout,
            exchange=self.exchange,
            collects=False,
            among=self.among,
            check=self.check,
            log=self.callback.log,
        )
        self.callback.begin("generate", plan.prompts * plan.group_size)
        try:
            make_shards(
                plan,
                checkpoint=checkpoint,
                directory=directory,
                task=self.task,
                sampler=self.sampler,
                on_shard=self.callback.advance,
                shares=share,
            )
            if self.place.run is not None:
                commit_made(plan, directory, self.task.name)
                withdraw(self.place.object_store, order.name)
        except Withdrawn:
            pass
        finally:
            self._count(share)
            if self.exchange is not None:
                shutil.rmtree(root, ignore_errors=True)

    def _policy(self, order: WorkOrder) -> Path:
        """The checkpoint that an order names, and no other."""
        version = order.plan.version
        if self.exchange is not None:
            return self.exchange.fetch_policy(version, order.policy, self.cache)
        assert self.place.run is not None
        checkpoint = checkpoint_directory(self.place.run, version)
        if not (checkpoint / "manifest.json").is_file():
            raise StoreError(
                f"{checkpoint} is missing, though {order.path} asks for it: is this the learner's directory?"
            )
        if (found := digest_of(checkpoint)) != order.policy:
            raise StoreError(
                f"{checkpoint} is another policy than the one that {order.path} asks for ({found[:12]}, not "
                f"{order.policy[:12]}): a worker needs the learner's own checkpoints; name its run directory or URL"
            )
        read_state(checkpoint)  # compares its files with their checksums
        return checkpoint

    def _count(self, share: ShardQueue) -> None:
        plan, done = share.order.plan, self.done
        done.shards += len(share.made_here)
        done.rollouts += sum(len(plan.prompt_range(shard)) for shard in share.made_here) * plan.group_size
        done.taken_over += share.taken_over
        done.too_late += len(share.too_late_here)
        if share.made_here:
            done.batches.append(share.directory.name)
