"""Lets several processes share the shards of a generation batch: each process claims the shards that it makes."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache
from itertools import islice
from pathlib import Path

from stalewise.errors import StoreError
from stalewise.rollout.generate import ShardSource
from stalewise.rollout.workers.sync import PolicySync, shard_indices
from stalewise.rollout.workers.work_order import CLAIMS, WorkOrder, is_open
from stalewise.store import shard_path
from stalewise.store.manifest import read_shard_manifest, shard_manifest_path
from stalewise.store.object_store import ObjectStore

log = logging.getLogger(__name__)

SESSIONS = "work/sessions"
REMOVED_S = 1.0  # a heartbeat must be missing for this long, since a network file system may show files late
BEATS = 6  # heartbeats in the time after which a worker counts as lost
POLL_S = 0.05
REMOTE_POLL_S = 0.5
IDLE_S = 60.0  # a message is logged if no shard arrives for this long
_CLAIM = re.compile(r"shard-(\d{5,})-(\d+)")
_UNSAFE = re.compile(r"[^\w.\-]")


class WorkerSession:
    """One worker process and its heartbeat; `with WorkerSession(...) as session`.

    The run directory's lock allows one process per `role`. A new session of a role therefore removes earlier sessions
    of the role, and of its subordinate roles (`role.…`).
    """

    def __init__(self, object_store: ObjectStore, worker: str, *, lost_after_s: float, role: str = "") -> None:
        self.object_store, self.worker, self.role = object_store, worker, role
        self.monitor = LivenessMonitor(object_store, lost_after_s)
        self._kind = _UNSAFE.sub("_", f"role.{role}" if role else f"worker.{worker}")
        self.id = f"{self._kind}-{secrets.token_hex(6)}"
        self._interval_s = lost_after_s / BEATS
        self._beat = 0
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._beat_until_over, daemon=True)

    def __enter__(self) -> WorkerSession:
        for name in self.object_store.names(SESSIONS):
            if self.succeeds(name) or (self.role and name.startswith(f"{self._kind}.")):
                self.object_store.remove(f"{SESSIONS}/{name}")
        self._write_heartbeat()
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._has_ended.set()
        self._thread.join()
        with contextlib.suppress(StoreError):  # without a heartbeat it soon counts as lost
            self.object_store.remove(f"{SESSIONS}/{self.id}")

    def succeeds(self, session: str) -> bool:
        """Whether this session has replaced that one: it has the same role."""
        return bool(self.role) and session != self.id and session.rpartition("-")[0] == self._kind

    def _beat_until_over(self) -> None:
        while not self._has_ended.wait(self._interval_s):
            try:
                self._write_heartbeat()
            except StoreError as error:  # if the store stays unavailable, other workers take over
                log.warning("cannot write the heartbeat: %s", error)

    def _write_heartbeat(self) -> None:
        self._beat += 1
        record = {"worker": self.worker, "place": _machine(), "pid": os.getpid(), "beat": self._beat}
        self.object_store.write(f"{SESSIONS}/{self.id}", json.dumps(record).encode())


class LivenessMonitor:
    """Watches the heartbeats of other sessions. It uses its own clock alone, since clocks of machines differ."""

    def __init__(self, object_store: ObjectStore, lost_after_s: float) -> None:
        self._object_store, self._lost_after_s = object_store, lost_after_s
        self._seen: dict[str, tuple[bytes | None, float]] = {}

    def is_lost(self, session: str) -> bool:
        """Whether a session has ended, or its heartbeat has not changed for too long."""
        heartbeat = self._object_store.read(f"{SESSIONS}/{session}")
        now = time.monotonic()
        if heartbeat is not None and _has_ended_here(heartbeat):
            return True
        before, since = self._seen.setdefault(session, (heartbeat, now))
        if before != heartbeat:
            self._seen[session] = (heartbeat, since := now)
        return now - since >= (self._lost_after_s if heartbeat is not None else min(self._lost_after_s, REMOVED_S))


@cache
def _machine() -> str:
    """Identifies this machine since its last boot, and its process namespace; empty if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _has_ended_here(heartbeat: bytes) -> bool:
    """Whether a heartbeat is from a process of this machine that no longer exists."""
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, OSError):  # OSError: another user's
        record = json.loads(heartbeat)
        if _machine() and record["place"] == _machine():
            try:
                os.kill(record["pid"], 0)
            except ProcessLookupError:
                return True
    return False


class ShardClaims:
    """The claims of one session on the shards of one order."""

    def __init__(self, order: str, session: WorkerSession) -> None:
        self._session = session
        self._object_store = session.object_store
        self._folder = f"{CLAIMS}/{order}"
        self._holders: dict[str, str] = {}  # sessions by claim; a claim never changes
        self._own: set[int] = set()
        self.taken_over = 0

    def take(self, shards: Sequence[int], most: int) -> list[int]:
        """Claim up to `most` of these shards: unclaimed ones first, then those of lost workers."""
        latest: dict[int, int] = {}  # the number of the latest claim on each shard
        for match in filter(None, map(_CLAIM.fullmatch, self._object_store.names(self._folder))):
            shard, number = int(match[1]), int(match[2])
            latest[shard] = max(number, latest.get(shard, 0))
        candidates = (shard for shard in sorted(shards, key=latest.__contains__) if shard not in self._own)
        taken = list(islice((shard for shard in candidates if self._take(shard, latest.get(shard))), most))
        self._own.update(taken)
        return taken

    def _take(self, shard: int, number: int | None) -> bool:
        """Try to claim a shard whose latest claim has this number; None: it has no claim."""
        if number is not None:
            path = f"{self._folder}/shard-{shard:05d}-{number}"
            if path not in self._holders:
                self._holders[path] = (self._object_store.read(path) or b"").decode(errors="replace")
            holder = self._holders[path]
            ended = holder == self._session.id or self._session.succeeds(holder)
            if not ended and not self._session.monitor.is_lost(holder):
                return False
        name = f"shard-{shard:05d}-{0 if number is None else number + 1}"
        if not self._object_store.create(f"{self._folder}/{name}", self._session.id.encode()):
            return False
        self.taken_over += number is not None
        return True


class OrderWithdrawn(Exception):
    """Another process has completed or withdrawn an order."""


class ShardQueue(ShardSource):
    """The shards that this process makes for an order; they are listed in `made_here` and `too_late_here`.

    Shards are written to `directory`, which all processes share if `sync` is None. Otherwise they are uploaded from
    there, and a process that `collects` also downloads the shards of other processes.
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
        self.order = order
        self.directory = directory
        self.sync = sync
        self.collects = collects
        self.provenance = {**order.provenance, "worker": session.worker}
        self.processes = 1  # number of processes that begin together: each takes no more than its part
        self.check: Callable[[], object] = lambda: None  # raises if generating must end
        self.made_here: list[int] = []  # shards that this process committed
        self.too_late_here: list[int] = []  # shards that another process committed first
        self._object_store = session.object_store
        self._takes = takes
        self._log = log
        self._claims = ShardClaims(order.name, session)
        self._known: set[int] = set()
        self._changed = time.monotonic()

    @property
    def taken_over(self) -> int:
        """Number of shards that were claimed by a lost worker before."""
        return self._claims.taken_over

    def present(self) -> set[int]:
        """Shards that are committed where all processes see them."""
        self.check()
        remote = set() if self.sync is None else self.sync.shards(self.directory.name)
        present = _local_shards(self.directory)  # after `remote`: a shard that is made meanwhile is not downloaded
        if self.sync is not None:
            if self.collects:
                # A process may have been killed between committing a shard and uploading it.
                for index in sorted(present - remote - set(self.made_here)):
                    self._publish(index)
                for index in sorted(remote - present):
                    self.sync.fetch_shard(self.directory, index)
            present = remote | (_local_shards(self.directory) if self.collects else set())
        elif self.collects:
            present = {index for index in present if index in self._known or self._fits(index)}
        if present - self._known:
            self._known, self._changed = present, time.monotonic()
        return set(present)

    def _fits(self, index: int) -> bool:
        """Whether a shard was made for this order; a shard of a withdrawn order is removed."""
        if self.order.fits(read_shard_manifest(self.directory, index).extra):
            return True
        self._log(f"{shard_path(self.directory, index)} was made for a withdrawn order: it is made again")
        self._remove(index)
        return False

    def take(self, missing: list[int], most: int) -> list[int]:
        """Claim up to `most` of the missing shards; returns those that nobody has committed meanwhile."""
        if not self._takes or not missing:
            return []
        self._check_open()
        taken = self._claims.take(missing, min(most, -(-len(missing) // self.processes)))
        if not taken:
            return []
        committed = _local_shards(self.directory) if self.sync is None else self.sync.shards(self.directory.name)
        return [index for index in taken if index not in committed]

    def _check_open(self) -> None:
        if not self.collects and not is_open(self._object_store, self.order):
            raise OrderWithdrawn

    def mark_committed(self, shard: int) -> None:
        """Count a shard, and upload it if processes share no directory."""
        self.made_here.append(shard)
        if self.sync is not None:
            self._publish(shard)

    def _publish(self, shard: int) -> None:
        assert self.sync is not None
        if not (published := self.sync.publish_shard(self.directory, shard)):
            self.mark_lost_race(shard)
        if not published or not self.collects:
            self._remove(shard)  # the one in the object store counts

    def _remove(self, shard: int) -> None:
        shard_manifest_path(self.directory, shard).unlink(missing_ok=True)
        shard_path(self.directory, shard).unlink(missing_ok=True)

    def mark_lost_race(self, shard: int) -> None:
        """Count and log a shard that another process committed first."""
        self.too_late_here.append(shard)
        if shard in self.made_here:
            self.made_here.remove(shard)
        self._log(f"shard {shard} of {self.directory.name} was made twice: another process committed it first")

    def wait(self) -> None:
        """Wait a moment; log a message if no shard has arrived for long."""
        time.sleep(POLL_S if self.sync is None else REMOTE_POLL_S)
        self._check_open()
        if self.processes == 1 and time.monotonic() - self._changed > IDLE_S:
            self._changed = time.monotonic()
            self._log(
                f"{self.directory.name} waits for workers: no shard has arrived for {IDLE_S:g} s; start one with "
                f"`stalewise generate {self._object_store.where} --worker NAME`"
            )


def _local_shards(directory: Path) -> set[int]:
    """Shards with both file and manifest in a directory."""
    names = {entry.name for entry in directory.iterdir()} if directory.is_dir() else set()
    return {index for index in shard_indices(names) if shard_path(directory, index).name in names}
