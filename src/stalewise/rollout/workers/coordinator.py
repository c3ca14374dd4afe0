"""The trainer's side: orders generation batches, makes part of their shards, and uploads what workers need.

Without `storage.url` all processes share the run directory, and a worker may join at any time. With it, the directory
belongs to the trainer: checkpoints and records are uploaded when they are committed, rollouts are downloaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stalewise.config import RunConfig
from stalewise.config.run_directory import identity_differences
from stalewise.errors import StoreError
from stalewise.rollout.generate import BatchPlan
from stalewise.rollout.workers import work_order
from stalewise.rollout.workers.shard_queue import ShardQueue, WorkerSession
from stalewise.rollout.workers.sync import PolicySync, policy_digest, policy_folder
from stalewise.store import batch_directory, is_committed, json_lines
from stalewise.store.atomic import commit_directory, parse_json, remove_temporaries, temporary_name, write_atomic
from stalewise.store.checkpoints import checkpoint_directory, versions
from stalewise.store.object_store import ObjectStore, open_object_store
from stalewise.tasks.difficulty import COPY as DIFFICULTY

CONFIG = "config.resolved.json"
RECORDS = "records"
_NOT_RECORDS = frozenset({"rollouts", "checkpoints", "work", "tokens"})  # large, or not needed elsewhere


class Coordinator:
    """Coordinates the workers of a run for a trainer, or for the process that generates for it, as `role` says.

    Each role has one process at a time; of several ranks, the first has it (`stalewise.rollout.workers.rank_workers`).
    Processes without a role ("") may order the same batches and share their work.
    """

    def __init__(self, config: RunConfig, role: str, log: Callable[[str], object]) -> None:
        self.config, self.run, self.role, self.log = config, config.directory, role, log
        self.object_store = open_object_store(config.storage.url or str(self.run), config.storage.options)
        self.sync = PolicySync(self.object_store) if config.storage.url else None
        self.session: WorkerSession | None = None
        self._may_publish = False  # after a comparison with what is in the object store

    def order_batch(self, plan: BatchPlan, checkpoint: Path, taken: Sequence[int] = ()) -> ShardQueue:
        """Order a generation batch; returns the queue of shards for this process, which has `taken` some already."""
        directory = batch_directory(self.run / "rollouts", version=plan.version, generation_batch=plan.generation_batch)
        if self.session is None:
            lost_after_s = self.config.workers.lost_after_s
            session = WorkerSession(self.object_store, self._worker, role=self.role, lost_after_s=lost_after_s)
            self.session = session.__enter__()
        order = self._order_of(plan, checkpoint)
        if self.sync is not None:
            for index in self.sync.drop_misfits(directory.name, order.fits):
                self.log(f"shard {index} of {directory.name} was made for a withdrawn order: it is made again")
        takes = self.config.workers.learner == "shares"
        queue = ShardQueue(order, directory, self.session, sync=self.sync, collects=True, takes=takes, log=self.log)
        queue.take(list(taken), len(taken))  # before others see the order
        work_order.place_order(self.object_store, order)
        return queue

    def provenance(self, plan: BatchPlan, checkpoint: Path) -> dict[str, Any]:
        """What the manifests of shards record that this process made without an order."""
        return {**self._order_of(plan, checkpoint).provenance, "worker": self._worker}

    def _order_of(self, plan: BatchPlan, checkpoint: Path) -> work_order.WorkOrder:
        return work_order.WorkOrder(plan, policy_digest(checkpoint), work_order.config_digest(self.config))

    @property
    def _worker(self) -> str:
        return f"{self.role or 'learner'} on {socket.gethostname()}"

    def check(self) -> None:
        """Raise if generating must end; a single process never has to."""

    def complete_batch(self, queue: ShardQueue) -> dict[str, Any]:
        """A batch is committed here: commit it in the object store, remove the order; returns notes for the journal."""
        if self.sync is not None:
            self.sync.publish_batch(queue.directory)
        return self.end_order(queue)

    def end_order(self, queue: ShardQueue) -> dict[str, Any]:
        """All shards of an order are there: remove it; returns notes for the journal."""
        work_order.withdraw_order(self.object_store, queue.order.name)
        return {}

    def withdraw(self) -> None:
        """Withdraw all orders."""
        for order in work_order.open_orders(self.object_store):
            work_order.withdraw_order(self.object_store, order.name)

    def publish(self) -> None:
        """Upload checkpoints and records; does nothing without `storage.url`."""
        if self.sync is None:
            return
        if not self._may_publish:
            self._refuse_to_replace(self.sync)  # what is missing here is removed there
            self._may_publish = True
        newest = versions(self.run)[-1]
        folder = policy_folder(newest, policy_digest(checkpoint_directory(self.run, newest)))
        # Records first: a published checkpoint must have the records that lead to it.
        self.object_store.write(_records_name(folder), _records(self.run))
        self.sync.publish_checkpoints(self.run)
        if self.config.task.difficulty:  # before the config, for which workers wait
            self.object_store.write(DIFFICULTY, (self.run / DIFFICULTY).read_bytes())
        self.object_store.write(CONFIG, (self.run / CONFIG).read_bytes())
        kept = {_records_name(folder) for folder in self.sync.published().values()}
        for name in self.object_store.names(RECORDS):
            if f"{RECORDS}/{name}" not in kept:
                self.object_store.remove(f"{RECORDS}/{name}")

    def _refuse_to_replace(self, sync: PolicySync) -> None:
        """Refuse an object store that holds another run, or a newer state of this one."""
        newest, records = _newest_records(self.object_store, sync.published(), self.config)
        # A run that was rolled back since then has fewer versions and more rollbacks.
        here, rollbacks = versions(self.run)[-1], len(list((self.run / "rollbacks").glob("r*/rollback.json")))
        rollbacks_there = sum(name.endswith("/rollback.json") for name in records)
        if newest is not None and newest > here and rollbacks <= rollbacks_there:
            raise StoreError(
                f"{self.object_store.where} is at version {newest}, and {self.run} at {here}: the run has gone on "
                f"elsewhere; remove {self.run} to go on from there, or choose another name and storage.url"
            )

    def complete(self) -> None:
        """Tell the workers that the run is complete."""
        self.publish()
        self.object_store.write(work_order.COMPLETE, b"{}")
        remove_temporaries(self.run / "work")  # of workers that were killed

    def close(self) -> None:
        """End the session."""
        if self.session is not None:
            self.session.__exit__()
            self.session = None


def restore(config: RunConfig, log: Callable[[str], object]) -> None:
    """Download the records and checkpoints of a run that is not here; rollouts are downloaded when they are needed."""
    run = config.directory
    if not config.storage.url or (run / "checkpoints").is_dir():
        return
    object_store = open_object_store(config.storage.url, config.storage.options)
    sync = PolicySync(object_store)
    published = sync.published()
    newest, records = _newest_records(object_store, published, config)
    if newest is None:
        return
    log(f"{run} goes on from version {newest} of {object_store.where}")
    for name, text in records.items():
        write_atomic(run / name, text)
    temporary = temporary_name(run / "checkpoints")
    for version, folder in published.items():
        if version <= newest:
            sync.fetch_checkpoint(folder, temporary / f"v{version:06d}")
    commit_directory(temporary, run / "checkpoints")


def _records_name(folder: str) -> str:
    """The object with the records that lead to a checkpoint."""
    return f"{RECORDS}/{folder.removeprefix('checkpoints/')}.json"


def _records(run: Path) -> bytes:
    """Ledger, metrics, journal and other small files as one object, from which a run can go on elsewhere."""
    files: dict[str, str] = {}
    # How far the records went comes first: they may grow while they are read.
    for path in sorted(run.rglob("*"), key=lambda path: (path.name != json_lines.RECORDS, path)):
        parts = path.relative_to(run).parts
        is_record = path.suffix in (".json", ".jsonl") and not any(part.startswith(".") for part in parts)
        if is_record and not _NOT_RECORDS & set(parts) and path.is_file():
            files["/".join(parts)] = path.read_text()
    return json.dumps({"sha256": _digest(files), "files": files}).encode()


def _leads_out(path: str) -> bool:
    """Whether a file of this name would lie outside of the run's directory."""
    return path.startswith("/") or ".." in Path(path).parts


def _digest(files: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def _newest_records(
    object_store: ObjectStore, published: Mapping[int, str], config: RunConfig
) -> tuple[int | None, dict[str, str]]:
    """The newest version that a run could go on from, if any, and its records; refuses those of another config."""
    contents = {version: object_store.read(_records_name(folder)) for version, folder in published.items()}
    newest = max((version for version, content in contents.items() if content is not None), default=None)
    if newest is None:
        return None, {}
    try:
        record = json.loads(contents[newest] or b"")
        files: dict[str, str] = record["files"]
        if record["sha256"] != _digest(files) or CONFIG not in files or any(map(_leads_out, files)):
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError):
        where = f"{object_store.where}/{_records_name(published[newest])}"
        raise StoreError(f"{where} is half written or damaged: continue the run where it was") from None
    if differences := identity_differences(config, parse_json(files[CONFIG].encode(), CONFIG)):
        raise StoreError(
            f"{object_store.where} holds the run of another config ({'; '.join(differences[:3])}): choose another "
            "storage.url, or remove what is there"
        )
    return newest, files


def is_being_written(run: Path, path: Path) -> bool:
    """Whether another process may be writing this: it is in a run's `work`, `rewards`, or an incomplete batch."""
    within = path.relative_to(run).parts  # the run may have any of these names
    if within[0] in ("work", "rewards"):
        return True
    with contextlib.suppress(StoreError):
        return within[-3:-2] == ("rollouts",) and not is_committed(path.parent)
    return True
