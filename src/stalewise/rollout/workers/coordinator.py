"""The trainer's side of generation by workers: orders batches, makes part of their shards, uploads what workers need.

Without `storage.url` all processes share the run directory. With it, only the trainer has the run directory: it uploads
checkpoints and records when they are committed, and downloads rollouts. Workers may join at any time.
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
_NOT_RECORDS = frozenset({"rollouts", "checkpoints", "work", "tokens"})  # directories that are large or stay local


class Coordinator:
    """Coordinates the workers of a run. `role` tells the trainer from a separate process that generates for it.

    Each role has one process at a time; of several ranks this is the first (`stalewise.rollout.workers.rank_workers`).
    Several processes without a role ("") may order the same batches and share their work.
    """

    def __init__(self, config: RunConfig, role: str, log: Callable[[str], object]) -> None:
        self.config = config
        self.run = config.directory
        self.role = role
        self.log = log
        self.object_store = open_object_store(config.storage.url or str(self.run), config.storage.options)
        self.sync = PolicySync(self.object_store) if config.storage.url else None
        self.session: WorkerSession | None = None
        self._may_publish = False  # True once the content of the object store was compared with this run

    def order_batch(self, plan: BatchPlan, checkpoint: Path, taken: Sequence[int] = ()) -> ShardQueue:
        """Order a generation batch; returns this process's queue of shards. It makes the shards in `taken` already."""
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
        """The provenance for manifests of shards that this process made before their order."""
        return {**self._order_of(plan, checkpoint).provenance, "worker": self._worker}

    def _order_of(self, plan: BatchPlan, checkpoint: Path) -> work_order.WorkOrder:
        return work_order.WorkOrder(plan, policy_digest(checkpoint), work_order.config_digest(self.config))

    @property
    def _worker(self) -> str:
        return f"{self.role or 'learner'} on {socket.gethostname()}"

    def check(self) -> None:
        """Raise if generating must end; a single process never raises."""

    def complete_batch(self, queue: ShardQueue) -> dict[str, Any]:
        """Commit a batch in the object store after it was committed here; remove the order, return journal notes."""
        if self.sync is not None:
            self.sync.publish_batch(queue.directory)
        return self.end_order(queue)

    def end_order(self, queue: ShardQueue) -> dict[str, Any]:
        """Remove an order whose shards are all committed; returns notes for the journal."""
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
            self._refuse_to_replace(self.sync)  # first: checkpoints that are missing here are removed there
            self._may_publish = True
        newest = versions(self.run)[-1]
        folder = policy_folder(newest, policy_digest(checkpoint_directory(self.run, newest)))
        # Records first: a run can continue from a published checkpoint only with its records.
        self.object_store.write(_records_name(folder), _records(self.run))
        self.sync.publish_checkpoints(self.run)
        if self.config.task.difficulty:  # before the config: workers begin when they find that
            self.object_store.write(DIFFICULTY, (self.run / DIFFICULTY).read_bytes())
        self.object_store.write(CONFIG, (self.run / CONFIG).read_bytes())
        kept = {_records_name(folder) for folder in self.sync.published().values()}
        for name in self.object_store.names(RECORDS):
            if f"{RECORDS}/{name}" not in kept:
                self.object_store.remove(f"{RECORDS}/{name}")

    def _refuse_to_replace(self, sync: PolicySync) -> None:
        """Refuse an object store that holds another run, or a newer state of this one."""
        newest, records = _newest_records(self.object_store, sync.published(), self.config)
        here = versions(self.run)[-1]
        rollbacks_here = len(list((self.run / "rollbacks").glob("r*/rollback.json")))
        rollbacks_there = sum(name.endswith("/rollback.json") for name in records)
        # A run that was rolled back since the last upload has fewer versions, but more rollbacks.
        if newest is not None and newest > here and rollbacks_here <= rollbacks_there:
            raise StoreError(
                f"{self.object_store.where} is at version {newest}, and {self.run} at {here}: the run has gone on "
                f"elsewhere; remove {self.run} to go on from there, or choose another name and storage.url"
            )

    def complete(self) -> None:
        """Tell the workers that the run is complete."""
        self.publish()
        self.object_store.write(work_order.COMPLETE, b"{}")
        remove_temporaries(self.run / "work")  # left by killed workers

    def close(self) -> None:
        """End the session."""
        if self.session is not None:
            self.session.__exit__()
            self.session = None


def restore(config: RunConfig, log: Callable[[str], object]) -> None:
    """Download records and checkpoints if the run directory does not exist; rollouts are downloaded when needed."""
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
    """The name of the object with the records of the run up to a checkpoint."""
    return f"{RECORDS}/{folder.removeprefix('checkpoints/')}.json"


def _records(run: Path) -> bytes:
    """Ledger, metrics, journal and other small files as one object; with it a run can continue on another machine."""
    files: dict[str, str] = {}
    # The file with the committed lengths of the records comes first, since records may grow while they are read.
    for path in sorted(run.rglob("*"), key=lambda path: (path.name != json_lines.RECORDS, path)):
        parts = path.relative_to(run).parts
        is_record = path.suffix in (".json", ".jsonl") and not any(part.startswith(".") for part in parts)
        if is_record and not _NOT_RECORDS & set(parts) and path.is_file():
            files["/".join(parts)] = path.read_text()
    return json.dumps({"sha256": _digest(files), "files": files}).encode()


def _leads_out(path: str) -> bool:
    """Whether a file of this name would be outside the run's directory."""
    return path.startswith("/") or ".." in Path(path).parts


def _digest(files: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def _newest_records(
    object_store: ObjectStore, published: Mapping[int, str], config: RunConfig
) -> tuple[int | None, dict[str, str]]:
    """The newest version with records, if any, and the records; refuses a run of another config."""
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
    """Whether another process may be writing a file: it is in a run's `work`, `rewards`, or an incomplete batch."""
    within = path.relative_to(run).parts  # relative: the run itself may be called `work`
    if within[0] in ("work", "rewards"):
        return True
    with contextlib.suppress(StoreError):
        return within[-3:-2] == ("rollouts",) and not is_committed(path.parent)
    return True
