"""The learner's side: it orders generation batches, takes its share of them, and puts what others need into the depot.

Without `storage.url` the run directory is where all meet, and a worker may join at any time. With it, the directory
stays the learner's own: checkpoints and records go to the depot when they are committed here, rollouts come from there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stalewise.config import RunConfig
from stalewise.config.run_directory import identity_differences
from stalewise.errors import StoreError
from stalewise.rollout.generate import BatchPlan
from stalewise.rollout.workers.claims import LivenessMonitor, Session
from stalewise.rollout.workers.shard_queue import ShardQueue
from stalewise.rollout.workers.sync import PolicySync, digest_of, folder_of
from stalewise.rollout.workers.work_order import COMPLETE, WorkOrder, config_digest, open_orders, place, withdraw
from stalewise.store import batch_directory, is_committed
from stalewise.store.atomic import commit_directory, remove_temporaries, temporary_name, write_atomic
from stalewise.store.checkpoints import checkpoint_directory, versions
from stalewise.store.object_store import DirectoryStore, ObjectStore, open_object_store

CONFIG = "config.resolved.json"
RECORDS = "records"
_NOT_RECORDS = frozenset({"rollouts", "checkpoints", "work", "tokens"})  # large, or no business of another machine


class Coordinator:
    """One sitting of a learner, or of the process that generates for it; `role` tells the two apart.

    Of a role there is one process at a time. Where a learner has several ranks, the first one has the role
    (`stalewise.rollout.workers.rank_workers`). Processes without one ("") may order the same and take their shares, too.
    """

    def __init__(self, config: RunConfig, role: str, log: Callable[[str], object]) -> None:
        self.config, self.run, self.role, self.log = config, config.directory, role, log
        url = config.storage.url
        self.object_store = open_object_store(url, config.storage.options) if url else DirectoryStore(self.run)
        self.exchange = PolicySync(self.object_store) if url else None
        self.session: Session | None = None
        self._is_compared = False  # with what is in the depot
        self.lookout = LivenessMonitor(self.object_store, config.workers.lost_after_s)

    def share(self, plan: BatchPlan, checkpoint: Path) -> ShardQueue:
        """Order a generation batch; the share of it that falls to this process."""
        directory = batch_directory(self.run / "rollouts", version=plan.version, generation_batch=plan.generation_batch)
        if self.session is None:
            worker = f"{self.role or 'learner'} on {socket.gethostname()}"
            self.session = Session(
                self.object_store, worker, role=self.role, lost_after_s=self.config.workers.lost_after_s
            ).__enter__()
        order = WorkOrder(plan, digest_of(checkpoint), config_digest(self.config))
        if self.exchange is not None:
            for index in self.exchange.drop_misfits(directory.name, order.fits):
                self.log(f"shard {index} of {directory.name} was made for an order that was taken back: made again")
        place(self.object_store, order)
        return ShardQueue(
            order,
            directory,
            self.object_store,
            self.session,
            self.lookout,
            exchange=self.exchange,
            collects=True,
            takes=self.config.workers.learner == "shares",
            log=self.log,
        )

    def check(self) -> None:
        """Raise where there is no use in going on with a share; alone there always is."""

    def fulfilled(self, share: ShardQueue) -> dict[str, Any]:
        """A batch is committed here: commit it there, and take the order off the list; what the journal is to say."""
        if self.exchange is not None:
            self.exchange.publish_batch(share.directory)
        withdraw(self.object_store, share.order.name)
        return {}

    def withdraw(self) -> None:
        """Take all orders back."""
        for order in open_orders(self.object_store):
            withdraw(self.object_store, order.name)

    def publish(self) -> None:
        """Put checkpoints and records into the depot, as they are here now; nothing to do without one."""
        if self.exchange is None:
            return
        if not self._is_compared:
            _refuse_to_replace(self.config, self.object_store, self.exchange)  # what is not here is removed there
            self._is_compared = True
        newest = versions(self.run)[-1]
        folder = folder_of(newest, digest_of(checkpoint_directory(self.run, newest)))
        # Records first: a checkpoint that is there has the records that lead to it.
        self.object_store.write(_records_of(folder), _records(self.run))
        self.exchange.publish_checkpoints(self.run)
        self.object_store.write(CONFIG, (self.run / CONFIG).read_bytes())
        kept = {_records_of(folder) for folder in self.exchange.published().values()}
        for name in self.object_store.names(RECORDS):
            if f"{RECORDS}/{name}" not in kept:
                self.object_store.remove(f"{RECORDS}/{name}")

    def complete(self) -> None:
        """Tell the workers that nothing more will be asked for."""
        self.publish()
        self.object_store.write(COMPLETE, b"{}")
        remove_temporaries(self.run / "work")  # of workers that were killed

    def close(self) -> None:
        """Take leave."""
        if self.session is not None:
            self.session.__exit__()
            self.session = None


def _records_of(folder: str) -> str:
    """Where the records lie that lead to a checkpoint."""
    return f"{RECORDS}/{folder.removeprefix('checkpoints/')}.json"


def _records(run: Path) -> bytes:
    """Ledger, metrics, journal and what else is small, as one object: a run goes on elsewhere from that."""
    found: dict[str, str] = {}
    for path in sorted(run.rglob("*")):
        parts = path.relative_to(run).parts
        is_record = path.suffix in (".json", ".jsonl") and not any(part.startswith(".") for part in parts)
        if is_record and not _NOT_RECORDS & set(parts) and path.is_file():
            found["/".join(parts)] = path.read_text()
    return json.dumps({"sha256": _digest(found), "files": found}).encode()


def _digest(files: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def restore(config: RunConfig, log: Callable[[str], object]) -> None:
    """Make a run directory from the depot where there is none here: records, then all checkpoints at once.

    Rollouts come when they are asked for. A run that is here stays as it is.
    """
    run = config.directory
    if not config.storage.url or (run / "checkpoints").is_dir():
        return
    object_store = open_object_store(config.storage.url, config.storage.options)
    published = PolicySync(object_store).published()
    newest = _newest_recorded(object_store, published)
    if newest is None:
        return
    records = _read_records(object_store, _records_of(published[newest]))
    _refuse_another_run(config, object_store, records)
    log(f"{run} goes on from version {newest} of {object_store.where}")
    for name, text in records.items():
        write_atomic(run / name, text)
    temporary = temporary_name(run / "checkpoints")
    for version, folder in published.items():
        if version <= newest:
            PolicySync(object_store).fetch_checkpoint(folder, temporary / f"v{version:06d}")
    commit_directory(temporary, run / "checkpoints")


def _newest_recorded(object_store: ObjectStore, published: Mapping[int, str]) -> int | None:
    """The newest version that a run could go on from."""
    recorded = [version for version, folder in published.items() if object_store.read(_records_of(folder)) is not None]
    return max(recorded, default=None)


def _refuse_another_run(config: RunConfig, object_store: ObjectStore, records: Mapping[str, str]) -> None:
    if differences := identity_differences(config, json.loads(records[CONFIG])):
        raise StoreError(
            f"{object_store.where} holds the run of another config ({'; '.join(differences[:3])}): say another storage.url, "
            "or remove what is there"
        )


def _refuse_to_replace(config: RunConfig, object_store: ObjectStore, exchange: PolicySync) -> None:
    """Refuse a depot that holds another run, or this one as it has gone on elsewhere: here is what would replace it."""
    published = exchange.published()
    newest, here = _newest_recorded(object_store, published), versions(config.directory)[-1]
    if newest is None:
        return
    records = _read_records(object_store, _records_of(published[newest]))
    _refuse_another_run(config, object_store, records)
    # One that was taken back since then has fewer versions, and one rollback more.
    taken_back = len(list((config.directory / "rollbacks").glob("r*/rollback.json")))
    known = sum(name.endswith("/rollback.json") for name in records)
    if newest > here and taken_back <= known:
        raise StoreError(
            f"{object_store.where} is at version {newest}, and {config.directory} at {here}: the run has gone on elsewhere; "
            f"remove {config.directory} to go on from there, or say another name and storage.url"
        )


def _read_records(object_store: ObjectStore, name: str) -> dict[str, str]:
    try:
        record = json.loads(object_store.read(name) or b"")
        files: dict[str, str] = record["files"]
        assert record["sha256"] == _digest(files)
        assert CONFIG in files and not any(path.startswith("/") or ".." in Path(path).parts for path in files)
        return files
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError):
        raise StoreError(f"{object_store.where}/{name} is half written or damaged: go on where the run was") from None


def is_in_the_making(path: Path) -> bool:
    """Whether a temporary file may be one that a worker writes now: in `work`, or in a batch that is not complete."""
    if "work" in (path.parent.name, path.parent.parent.name, path.parent.parent.parent.name):
        return True
    with contextlib.suppress(StoreError):
        return path.parent.parent.name == "rollouts" and not is_committed(path.parent)
    return True
