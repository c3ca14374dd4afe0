"""A worker: a process on any machine that makes shards of the batches that a trainer orders, until the run is complete.

It needs only the run directory or the URL of the run's object store. Workers may come and go at any time.
"""

from __future__ import annotations

import copy
import os
import shutil
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stalewise.config import FORMAT, RunConfig, load_config, make_config, set_dotted
from stalewise.config.run_directory import identity_differences
from stalewise.errors import StoreError
from stalewise.rollout.factory import make_sampler
from stalewise.rollout.generate import ScoreCheck, commit_shards, make_shards
from stalewise.rollout.sampler import OffloadableSampler, Sampler
from stalewise.rollout.workers import work_order
from stalewise.rollout.workers.coordinator import CONFIG, DIFFICULTY
from stalewise.rollout.workers.shard_queue import OrderWithdrawn, ShardQueue, WorkerSession
from stalewise.rollout.workers.sync import PolicySync, policy_digest
from stalewise.rollout.workers.work_order import WorkOrder
from stalewise.store import batch_directory
from stalewise.store.atomic import check_format, parse_json
from stalewise.store.checkpoints import checkpoint_directory, read_state
from stalewise.store.object_store import DirectoryStore, ObjectStore, open_object_store
from stalewise.tasks import Task, close_task
from stalewise.tasks.sandbox import scratch_folder
from stalewise.types import NullCallback, ProgressCallback

POLL_S = 0.1
REMOTE_POLL_S = 2.0
LOG_AFTER_S = 10.0  # of waiting for orders, a message is logged

Afterwards = Callable[["RunLocation", Path], object]


@dataclass
class WorkDone:
    """Counts of what a worker made."""

    worker: str
    shards: int = 0
    rollouts: int = 0
    taken_over: int = 0  # shards that a lost worker had begun
    too_late: int = 0  # shards that another process committed first
    batches: list[str] = field(default_factory=list)  # names of the batches that it made shards of


def work(
    source: str | Path,
    *,
    worker: str = "",
    overrides: Mapping[str, Any] | None = None,
    once: bool = False,
    cache: str | Path | None = None,
    callback: ProgressCallback | None = None,
    afterwards: Afterwards | None = None,
) -> WorkDone:
    """Make shards of all ordered batches until the run is complete; `once`: until no order is open.

    `source` is a run directory, the URL of a run's object store, or a config. `overrides` are settings that may differ
    between workers, such as `model.device` and the engine. Downloaded policies are kept in `cache`, by default a
    temporary directory. If this worker shares the run directory, `afterwards` is called with each committed batch.
    """
    callback = callback or NullCallback()
    location = RunLocation.find(str(source), overrides or {}, wait=not once, log=callback.log)
    config, name = location.config, worker or f"{socket.gethostname()}-{os.getpid()}"
    with (
        scratch_folder("worker") as scratch,
        WorkerSession(location.object_store, name, lost_after_s=config.workers.lost_after_s) as session,
        ExitStack() as opened,
        closing(make_sampler(config, log=callback.log)) as sampler,
    ):
        task = location.make_task(Path(scratch))
        opened.callback(close_task, task)
        rollout_worker = RolloutWorker(location, session, task, sampler, Path(cache or scratch), callback)
        rollout_worker.afterwards = afterwards
        rollout_worker.work(once)
        return rollout_worker.done


@dataclass(frozen=True)
class RunLocation:
    """The object store of a run, its config, and its directory if this machine shares it."""

    object_store: ObjectStore
    config: RunConfig
    run: Path | None  # None: only the object store is shared

    @classmethod
    def of_config(cls, config: RunConfig) -> RunLocation:
        """The location of a run with this config."""
        url, run = config.storage.url, config.directory
        return cls(open_object_store(url or str(run), config.storage.options), config, None if url else run)

    @classmethod
    def find(
        cls, source: str, overrides: Mapping[str, Any], *, wait: bool, log: Callable[[str], object]
    ) -> RunLocation:
        """Find a run by directory, URL or config file; `wait` for it if it has not started yet."""
        of_file = None
        if "://" in source:
            prefix = "storage.options."
            options = {key.removeprefix(prefix): value for key, value in overrides.items() if key.startswith(prefix)}
            object_store, run = open_object_store(source, options), None
        elif not Path(source).is_file() and Path(source).suffix != ".toml":  # a run directory, now or soon
            object_store, run = DirectoryStore(source), Path(source)
        else:
            of_file = cls.of_config(load_config(source, overrides))
            object_store, run = of_file.object_store, of_file.run
        record = _read_config(object_store, wait, log)
        if of_file is None:
            changed = copy.deepcopy({key: value for key, value in record.items() if key != "format"})
            for key, value in overrides.items():
                set_dotted(changed, key, value)
            config = make_config(changed, source=object_store.where)
            if run is not None and config.storage.url:  # the trainer's own directory: orders are in the object store
                remote = cls.of_config(config)
                object_store, run = remote.object_store, remote.run
                record = _read_config(object_store, wait, log)
        else:
            config = of_file.config
            if config.plan.learning_rate != "given":  # the trainer has chosen it
                optimizer = config.optimizer.model_copy(update={"learning_rate": record["optimizer"]["learning_rate"]})
                config = config.model_copy(update={"optimizer": optimizer})
        ignored = [f"model.{name}" for name in work_order.WORKER_SETTINGS]
        if differences := identity_differences(config, record, but=ignored):
            raise StoreError(
                f"{object_store.where} belongs to another config ({'; '.join(differences[:3])}): a worker uses the "
                "run's own config; leave these settings out, or name the run directory instead of a file"
            )
        return cls(object_store, config, run)

    def make_task(self, scratch: Path) -> Task:
        """The run's task, with the run's table of pass rates if it has one, which is copied to `scratch`."""
        if not self.config.task.difficulty:
            return self.config.make_task()
        if (content := self.object_store.read(DIFFICULTY)) is None:
            raise StoreError(
                f"{self.object_store.where}/{DIFFICULTY} is missing, the run's table of pass rates: restart the "
                "trainer, which puts it there"
            )
        (scratch / DIFFICULTY).write_bytes(content)
        return self.config.make_task(scratch / DIFFICULTY)


def _read_config(object_store: ObjectStore, wait: bool, log: Callable[[str], object]) -> dict[str, Any]:
    """The resolved config of the run in an object store."""
    where, content = object_store.where, object_store.read(CONFIG)
    if content is None and not wait:
        raise StoreError(f"{where} holds no run: start `stalewise train` or `stalewise generate` first")
    if content is None:
        log(f"waiting for a run in {where}: start `stalewise train` there")
    while content is None:
        time.sleep(POLL_S if isinstance(object_store, DirectoryStore) else REMOTE_POLL_S)
        content = object_store.read(CONFIG)
    try:
        record = parse_json(content, f"{where}/{CONFIG}")
        format_there = record.get("format")
    except StoreError:
        raise StoreError(f"{where}/{CONFIG} is half written or no config: start the trainer again") from None
    check_format(where, format_there, FORMAT, advice="use the trainer's release")
    return record


@dataclass
class RolloutWorker:
    """Makes shards of the orders of one run; `processes` and `check` are passed to each `ShardQueue`."""

    location: RunLocation
    session: WorkerSession
    task: Task
    sampler: Sampler
    cache: Path
    callback: ProgressCallback
    processes: int = 1
    check: Callable[[], object] = lambda: None
    afterwards: Afterwards | None = None

    def __post_init__(self) -> None:
        self.object_store, self.done = self.location.object_store, WorkDone(self.session.worker)
        self.sync = None if self.location.run is not None else PolicySync(self.object_store)

    def work(self, once: bool) -> None:
        """Make shards for one order after another."""
        finished: set[str] = set()
        idle_since: float | None = time.monotonic()  # None: the message about waiting was logged
        while True:
            placed = work_order.open_orders(self.object_store)
            finished &= {order.name for order in placed}  # a completed order may be placed again
            orders = [order for order in placed if order.name not in finished]
            if orders:
                self.make(orders[0])
                finished.add(orders[0].name)
                idle_since = time.monotonic()
                continue
            if once or self.object_store.read(work_order.COMPLETE) is not None:
                return
            if idle_since is not None and time.monotonic() - idle_since > LOG_AFTER_S:
                self.callback.log(f"waiting for orders in {self.object_store.where}: `stalewise train` places them")
                idle_since = None
            time.sleep(POLL_S if self.sync is None else REMOTE_POLL_S)

    def make(self, order: WorkOrder) -> None:
        """Make shards of a generation batch, and wait until all of it is there."""
        if order.config != work_order.config_digest(self.location.config):
            raise StoreError(
                f"{self.object_store.where}/{order.path} is for another config than this worker's: restart the worker "
                "with the run directory instead of a config"
            )
        try:
            plan, checkpoint = order.plan, self._policy(order)
        except StoreError:
            if work_order.is_open(self.object_store, order):
                raise
            return  # the order was withdrawn together with its policy
        root = self.location.run / "rollouts" if self.location.run is not None else self.cache / order.name
        directory = batch_directory(root, version=plan.version, generation_batch=plan.generation_batch)
        queue = ShardQueue(order, directory, self.session, sync=self.sync, collects=False, log=self.callback.log)
        queue.processes, queue.check = self.processes, self.check
        self.callback.begin("generate", plan.prompts * plan.group_size)
        try:
            check = ScoreCheck(self.location.config.task.max_unscored, self.callback.log)
            make_shards(plan, checkpoint, directory, self.task, self.sampler, queue, self.callback.advance, check)
            if self.location.run is not None and not plan.most_prompts:  # the trainer commits a batch that may grow
                commit_shards(plan, directory, self.task.name)
                work_order.withdraw_order(self.object_store, order.name)
                if self.afterwards is not None:
                    if isinstance(self.sampler, OffloadableSampler):
                        self.sampler.sleep()
                    self.afterwards(self.location, directory)
        except OrderWithdrawn:
            pass
        finally:
            self.done.shards += len(queue.made_here)
            self.done.rollouts += sum(len(plan.prompt_range(shard)) for shard in queue.made_here) * plan.group_size
            self.done.taken_over += queue.taken_over
            self.done.too_late += len(queue.too_late_here)
            self.done.batches += [directory.name] if queue.made_here else []
            if self.sync is not None:
                shutil.rmtree(root, ignore_errors=True)

    def _policy(self, order: WorkOrder) -> Path:
        """The checkpoint of an order; StoreError if another policy is there."""
        version = order.plan.version
        if self.sync is not None:
            return self.sync.fetch_policy(version, order.policy, self.cache)
        assert self.location.run is not None
        checkpoint = checkpoint_directory(self.location.run, version)
        if not (checkpoint / "manifest.json").is_file():
            raise StoreError(f"{checkpoint} is missing, though {order.path} needs it: is this the trainer's directory?")
        if (digest := policy_digest(checkpoint)) != order.policy:
            raise StoreError(
                f"{checkpoint} is another policy than {order.path} asks for ({digest[:12]}, not {order.policy[:12]}): "
                "a worker needs the trainer's own checkpoints; name its run directory or URL"
            )
        read_state(checkpoint)  # compares its files with their checksums
        return checkpoint
