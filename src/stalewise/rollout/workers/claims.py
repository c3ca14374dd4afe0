"""Which worker makes which shard. A claim is an object that only one worker can create; heartbeats keep it valid.

A worker rewrites its heartbeat, `work/sessions/<session>`, at regular intervals. `work/claims/<order>/shard-00004-0`
names the session that took a shard; if its heartbeat stops, one other worker can create `shard-00004-1`. No clocks are
compared: a worker watches for changed bytes by its own clock. The first to commit a shard wins: slowness is harmless.
"""

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
from collections.abc import Sequence
from functools import cache
from itertools import islice
from pathlib import Path

from stalewise.errors import StoreError
from stalewise.rollout.workers.work_order import CLAIMS
from stalewise.store.object_store import ObjectStore

log = logging.getLogger(__name__)

SESSIONS = "work/sessions"
REMOVED_S = 1.0  # how long a heartbeat must be missing: a network file system may show files late
BEATS = 6  # heartbeats in the time after which a worker counts as lost
_CLAIM = re.compile(r"shard-(\d{5,})-(\d+)")
_UNSAFE = re.compile(r"[^\w.\-]")


class WorkerSession:
    """One working process and its heartbeat; `with WorkerSession(...) as session`.

    A lock ensures one process per `role`: earlier sessions of the role, and of `role.anything`, have ended.
    """

    def __init__(self, object_store: ObjectStore, worker: str, *, lost_after_s: float, role: str = "") -> None:
        self.object_store, self.worker, self.role = object_store, worker, role
        self.monitor = LivenessMonitor(object_store, lost_after_s)
        self._kind = _UNSAFE.sub("_", f"role.{role}" if role else f"worker.{worker}")
        self.id = f"{self._kind}-{secrets.token_hex(6)}"
        self._interval_s = lost_after_s / BEATS
        self._beat = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat_until_over, daemon=True)

    def __enter__(self) -> WorkerSession:
        for name in self.object_store.names(SESSIONS):
            if self.succeeds(name) or (self.role and name.startswith(f"{self._kind}.")):
                self.object_store.remove(f"{SESSIONS}/{name}")
        self._write_heartbeat()
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join()
        with contextlib.suppress(StoreError):  # without a heartbeat it soon counts as lost
            self.object_store.remove(f"{SESSIONS}/{self.id}")

    def succeeds(self, session: str) -> bool:
        """Whether that session has ended because this one has its role now."""
        return bool(self.role) and session != self.id and session.rpartition("-")[0] == self._kind

    def _beat_until_over(self) -> None:
        while not self._over.wait(self._interval_s):
            try:
                self._write_heartbeat()
            except StoreError as error:  # if the network stays away for longer, other workers take over
                log.warning("cannot write the heartbeat: %s", error)

    def _write_heartbeat(self) -> None:
        self._beat += 1
        record = {"worker": self.worker, "place": _machine(), "pid": os.getpid(), "beat": self._beat}
        self.object_store.write(f"{SESSIONS}/{self.id}", json.dumps(record).encode())


class LivenessMonitor:
    """Watches the heartbeats of other sessions by its own clock."""

    def __init__(self, object_store: ObjectStore, lost_after_s: float) -> None:
        self._object_store, self._lost_after_s = object_store, lost_after_s
        self._seen: dict[str, tuple[bytes | None, float]] = {}

    def is_lost(self, session: str) -> bool:
        """Whether a session has ended, or its heartbeat has not changed for too long since we first looked."""
        heartbeat, now = self._object_store.read(f"{SESSIONS}/{session}"), time.monotonic()
        if heartbeat is not None and _has_ended_here(heartbeat):
            return True
        before, since = self._seen.setdefault(session, (heartbeat, now))
        if before != heartbeat:
            self._seen[session] = (heartbeat, since := now)
        return now - since >= (self._lost_after_s if heartbeat is not None else min(self._lost_after_s, REMOVED_S))


@cache
def _machine() -> str:
    """This machine since its last boot, and its process namespace; empty if unknown."""
    try:
        started = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {started} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _has_ended_here(heartbeat: bytes) -> bool:
    """Whether a heartbeat is that of a process of this machine that no longer exists: no need to wait."""
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
        self._object_store, self._folder, self._session = session.object_store, f"{CLAIMS}/{order}", session
        self._holders: dict[str, str] = {}  # a claim never changes
        self._mine: set[int] = set()
        self.taken_over = 0

    def take(self, shards: Sequence[int], most: int) -> list[int]:
        """Claim up to `most` of these shards: unclaimed ones first, then those of lost workers."""
        latest: dict[int, int] = {}  # the number of the latest claim on each shard
        for match in filter(None, map(_CLAIM.fullmatch, self._object_store.names(self._folder))):
            latest[int(match[1])] = max(int(match[2]), latest.get(int(match[1]), 0))
        others = (shard for shard in sorted(shards, key=latest.__contains__) if shard not in self._mine)
        taken = list(islice((shard for shard in others if self._take(shard, latest.get(shard))), most))
        self._mine.update(taken)
        return taken

    def _take(self, shard: int, number: int | None) -> bool:
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
