"""The shards of a generation batch for one of several processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from stalewise.rollout.generate import ShardSource
from stalewise.rollout.workers.claims import ShardClaims, WorkerSession
from stalewise.rollout.workers.sync import PolicySync, shard_indices
from stalewise.rollout.workers.work_order import WorkOrder, is_open
from stalewise.store import shard_path
from stalewise.store.manifest import read_shard_manifest, shard_manifest_path

POLL_S = 0.05
REMOTE_POLL_S = 0.5
IDLE_S = 60.0  # without a new shard, after which a message is logged


class OrderWithdrawn(Exception):
    """An order was completed or withdrawn by another process."""


class ShardQueue(ShardSource):
    """The shards that one process makes for an order; `made_here`, `too_late_here` and `taken_over` count them.

    Shards are written to `directory`, which all processes share if `sync` is None. Otherwise they are uploaded from
    there, and a process that `collects` also downloads those of the others.
    """

    def __init__(
        self,
        order: WorkOrder,
        directory: Path,
        session: WorkerSession,
        *,
        sync: PolicySync | None,
        collects: bool,
        takes: bool = True,
        log: Callable[[str], object] = lambda text: None,
    ) -> None:
        self.order, self.directory, self.sync, self.collects = order, directory, sync, collects
        self.provenance = {**order.provenance, "worker": session.worker}
        self.processes = 1  # that began together: each takes no more than its part
        self.check: Callable[[], object] = lambda: None  # raises if all must end
        self._object_store, self._takes, self._log = session.object_store, takes, log
        self._claims = ShardClaims(order.name, session)
        self.made_here: list[int] = []
        self.too_late_here: list[int] = []
        self._known: set[int] = set()
        self._changed = time.monotonic()

    @property
    def taken_over(self) -> int:
        """Shards that a lost worker had begun."""
        return self._claims.taken_over

    def present(self) -> set[int]:
        """Shards that are committed where all processes see them."""
        self.check()
        there = set() if self.sync is None else self.sync.shards(self.directory.name)
        present = _local_shards(self.directory)  # after `there`: what is made meanwhile must not be downloaded
        if self.sync is not None:
            if self.collects:
                # Those committed by a process that was killed before it uploaded them.
                for index in sorted(present - there - set(self.made_here)):
                    self._publish(index)
                for index in sorted(there - present):
                    self.sync.fetch_shard(self.directory, index)
            present = there | (_local_shards(self.directory) if self.collects else set())
        elif self.collects:
            present = {index for index in present if index in self._known or self._fits(index)}
        if present - self._known:
            self._known, self._changed = present, time.monotonic()
        return set(present)

    def _fits(self, index: int) -> bool:
        """Whether a shard was made for this order; one of a withdrawn order is removed."""
        if self.order.fits(read_shard_manifest(self.directory, index).extra):
            return True
        self._log(f"{shard_path(self.directory, index)} was made for a withdrawn order: it is made again")
        self._remove(index)
        return False

    def take(self, missing: list[int], most: int) -> list[int]:
        """Shards that this process claims now and that nobody has committed meanwhile."""
        if not self._takes or not missing:
            return []
        self._check_open()
        taken = self._claims.take(missing, min(most, -(-len(missing) // self.processes)))
        if not taken:
            return []
        there = _local_shards(self.directory) if self.sync is None else self.sync.shards(self.directory.name)
        return [index for index in taken if index not in there]

    def _check_open(self) -> None:
        if not self.collects and not is_open(self._object_store, self.order):
            raise OrderWithdrawn

    def made(self, shard: int) -> None:
        """Upload a shard if processes share no directory."""
        self.made_here.append(shard)
        if self.sync is not None:
            self._publish(shard)

    def _publish(self, shard: int) -> None:
        assert self.sync is not None
        if not (published := self.sync.publish_shard(self.directory, shard)):
            self.too_late(shard)
        if not published or not self.collects:
            self._remove(shard)  # the one in the object store counts

    def _remove(self, shard: int) -> None:
        shard_manifest_path(self.directory, shard).unlink(missing_ok=True)
        shard_path(self.directory, shard).unlink(missing_ok=True)

    def too_late(self, shard: int) -> None:
        """Count and log a shard that another process committed first."""
        self.too_late_here.append(shard)
        if shard in self.made_here:
            self.made_here.remove(shard)
        self._log(f"shard {shard} of {self.directory.name} was made twice: another process committed it first")

    def wait(self) -> None:
        """Wait a moment; log a message if no shard arrives for long."""
        time.sleep(POLL_S if self.sync is None else REMOTE_POLL_S)
        self._check_open()
        if self.processes == 1 and time.monotonic() - self._changed > IDLE_S:
            self._changed = time.monotonic()
            self._log(
                f"{self.directory.name} waits for workers: no shard has arrived for {IDLE_S:g} s; start one with "
                f"`stalewise generate {self._object_store.where} --worker NAME`"
            )


def _local_shards(directory: Path) -> set[int]:
    """Shards whose file and manifest are in a directory."""
    names = {entry.name for entry in directory.iterdir()} if directory.is_dir() else set()
    return {index for index in shard_indices(names) if shard_path(directory, index).name in names}
