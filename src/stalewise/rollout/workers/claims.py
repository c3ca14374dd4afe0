"""Who makes which shard. A claim is an object that exactly one worker could create; a sign of life keeps it valid.

Each worker keeps one object, `work/sessions/<session>`, that it writes anew ever so often. A shard's claims are
numbered: `work/claims/<order>/shard-00004-0` names the session that took it, and where that has shown no sign of life
for long enough, one other worker, and only one, can create `shard-00004-1`. Nothing is ever overwritten or compared
with a clock: a worker that watches another one asks only whether that object's bytes changed while so many seconds
passed on its own monotonic clock. So clocks that are off, or go back, do no harm.

A worker that was only slow finds its shard taken. Whoever commits first wins (`stalewise.store`), and that is all.
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
from pathlib import Path

from stalewise.errors import StoreError
from stalewise.rollout.workers.work_order import CLAIMS
from stalewise.store.object_store import ObjectStore

log = logging.getLogger(__name__)

SESSIONS = "work/sessions"
LEAVE_S = 1.0
BEATS = 6  # signs of life in the time after which a worker counts as lost
_CLAIM = re.compile(r"shard-(\d{5,})-(\d+)")
_UNSAFE = re.compile(r"[^\w.\-]")


class Session:
    """One process at work, and its sign of life; `with Session(...) as session`.

    Of a `role` there is one at a time, which a lock sees to: another session of the same role has ended, killed or not.
    So have those of `role.anything` that were there before: whoever had the role led them.
    """

    def __init__(self, object_store: ObjectStore, worker: str, *, lost_after_s: float, role: str = "") -> None:
        self.worker, self.role = worker, role
        self._kind = _UNSAFE.sub("_", f"role.{role}" if role else f"worker.{worker}")
        self.id = f"{self._kind}-{secrets.token_hex(6)}"
        self._depot, self._pause = object_store, lost_after_s / BEATS
        self._beat = 0
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Session:
        for name in self._depot.names(SESSIONS):
            if self.succeeds(name) or (self.role and name.startswith(f"{self._kind}.")):
                self._depot.remove(f"{SESSIONS}/{name}")
        self._tell()
        self._thread = threading.Thread(target=self._live, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        with contextlib.suppress(StoreError):  # it counts as lost soon enough
            self._depot.remove(f"{SESSIONS}/{self.id}")

    def succeeds(self, session: str) -> bool:
        """Whether a session has ended because this one has its role now."""
        return bool(self.role) and session != self.id and session.rpartition("-")[0] == self._kind

    def _live(self) -> None:
        while not self._over.wait(self._pause):
            try:
                self._tell()
            except StoreError as error:  # a network that is away for a moment; if for longer, others take over
                log.warning("no sign of life could be given: %s", error)

    def _tell(self) -> None:
        self._beat += 1
        said = {"worker": self.worker, "place": _place(), "pid": os.getpid(), "beat": self._beat}
        self._depot.write(f"{SESSIONS}/{self.id}", json.dumps(said).encode())


class LivenessMonitor:
    """Watches the signs of life of other sessions by its own clock."""

    def __init__(self, object_store: ObjectStore, lost_after_s: float) -> None:
        self._depot, self._lost_after_s = object_store, lost_after_s
        self._seen: dict[str, tuple[bytes | None, float]] = {}

    def is_lost(self, session: str) -> bool:
        """Whether a session has ended, or has not changed its sign of life for too long while we were looking."""
        said, now = self._depot.read(f"{SESSIONS}/{session}"), time.monotonic()
        if said is not None and _has_ended_here(said):
            return True
        before = self._seen.get(session)
        if before is None or before[0] != said:
            self._seen[session] = (said, now)
            return False
        # One that took leave removed it; a moment's patience, since a network file system may show things late.
        patience = self._lost_after_s if said is not None else min(self._lost_after_s, LEAVE_S)
        return now - before[1] >= patience


@cache
def _place() -> str:
    """The machine since it was started, and its view of processes; empty where that cannot be known."""
    try:
        started = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {started} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _has_ended_here(said: bytes) -> bool:
    """Whether a sign of life is that of a process of this very machine which is no more: no need to watch it."""
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
        record = json.loads(said)
        if _place() and record["place"] == _place():
            try:
                os.kill(record["pid"], 0)
            except ProcessLookupError:
                return True
            except OSError:  # another user's
                pass
    return False


class Claims:
    """The claims of one order, for one session."""

    def __init__(self, object_store: ObjectStore, order: str, session: Session, lookout: LivenessMonitor) -> None:
        self._depot, self._folder = object_store, f"{CLAIMS}/{order}"
        self._session, self._lookout = session, lookout
        self._holders: dict[str, str] = {}  # a claim never changes
        self._mine: set[int] = set()
        self.taken_over = 0

    def take(self, shards: Sequence[int], most: int) -> list[int]:
        """Claim some of these shards: those that nobody has, then those of workers that were lost."""
        latest = self._latest()
        open_to_all = [shard for shard in shards if shard not in latest]
        taken: list[int] = []
        for shard in [*open_to_all, *(shard for shard in shards if shard in latest)]:
            if len(taken) == most:
                break
            if shard not in self._mine and self._take(shard, latest.get(shard)):
                taken.append(shard)
        self._mine.update(taken)
        return taken

    def _take(self, shard: int, number: int | None) -> bool:
        if number is not None:
            holder = self._holder(f"shard-{shard:05d}-{number}")
            ended = holder == self._session.id or self._session.succeeds(holder)
            if not ended and not self._lookout.is_lost(holder):
                return False
        name = f"shard-{shard:05d}-{0 if number is None else number + 1}"
        if not self._depot.create(f"{self._folder}/{name}", self._session.id.encode()):
            return False
        self.taken_over += number is not None
        return True

    def _latest(self) -> dict[int, int]:
        """Of each shard that was ever claimed, the number of the latest claim."""
        found: dict[int, int] = {}
        for match in map(_CLAIM.fullmatch, self._depot.names(self._folder)):
            if match:
                found[int(match[1])] = max(int(match[2]), found.get(int(match[1]), 0))
        return found

    def _holder(self, name: str) -> str:
        if name not in self._holders:
            content = self._depot.read(f"{self._folder}/{name}")
            self._holders[name] = "" if content is None else content.decode(errors="replace")
        return self._holders[name]
