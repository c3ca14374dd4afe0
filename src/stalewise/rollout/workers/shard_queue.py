"""A process's share of a generation batch that others work at, too."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stalewise.rollout.workers.claims import Claims, LivenessMonitor, Session
from stalewise.rollout.workers.sync import PolicySync
from stalewise.rollout.workers.work_order import WorkOrder, is_open
from stalewise.store import shard_path
from stalewise.store.manifest import read_shard_manifest, shard_manifest_path
from stalewise.store.object_store import ObjectStore

POLL_S = 0.05
REMOTE_POLL_S = 0.5
LONELY_S = 60.0  # of waiting for workers, after which it is said that none has done anything
_MANIFEST = re.compile(r"shard-(\d{5,})\.json")


class Withdrawn(Exception):
    """An order was fulfilled or taken back by others."""


class ShardQueue:
    """What one process does of an order; `made_here`, `too_late_here` and `taken_over` count it.

    Everybody writes shards to `directory`. Without an `exchange` that is the one directory of all of them. With one,
    shards are put into the depot from there; whoever `collects` gets those of the others as well.
    """

    def __init__(
        self,
        order: WorkOrder,
        directory: Path,
        object_store: ObjectStore,
        session: Session,
        lookout: LivenessMonitor,
        *,
        exchange: PolicySync | None,
        collects: bool,
        takes: bool = True,
        among: int = 1,
        check: Callable[[], object] = lambda: None,
        log: Callable[[str], object] = lambda text: None,
    ) -> None:
        """`among` so many that began together, each takes no more than its part; `check` raises where all must end."""
        self.order, self.directory, self.exchange, self.collects = order, directory, exchange, collects
        self.provenance: Mapping[str, Any] = {**order.provenance, "worker": session.worker}
        self.among, self.check = among, check
        self._depot, self._takes, self._say = object_store, takes, log
        self._claims = Claims(object_store, order.name, session, lookout)
        self.made_here: list[int] = []
        self.too_late_here: list[int] = []
        self._known: set[int] = set()
        self._changed = time.monotonic()

    @property
    def taken_over(self) -> int:
        """Shards that a worker which was lost had begun."""
        return self._claims.taken_over

    def present(self) -> set[int]:
        """Shards that are committed where all can see them."""
        self.check()
        there = set() if self.exchange is None else self.exchange.shards(self.directory.name)
        found = _here(self.directory)  # after that: what is made meanwhile must not be fetched
        if self.exchange is not None:
            if self.collects:
                # Committed by a sitting that was killed before it put them there.
                for index in sorted(found - there - set(self.made_here)):
                    self._publish(index)
                for index in sorted(there - found):
                    self.exchange.fetch_shard(self.directory, index)
            found = there | (_here(self.directory) if self.collects else set())
        elif self.collects:
            found = {index for index in found if index in self._known or self._fits(index)}
        if found - self._known:
            self._known, self._changed = found, time.monotonic()
        return set(found)

    def _fits(self, index: int) -> bool:
        """Whether a shard was made by this order; one of an order that was taken back is removed."""
        if self.order.fits(read_shard_manifest(self.directory, index).extra):
            return True
        self._say(f"{shard_path(self.directory, index)} was made for an order that was taken back: made again")
        self._remove(index)
        return False

    def take(self, missing: list[int], most: int) -> list[int]:
        """Shards that this process has a claim to now, and that nobody has committed since it looked."""
        if not self._takes or not missing:
            return []
        if not self.collects and not is_open(self._depot, self.order):
            raise Withdrawn
        taken = self._claims.take(missing, min(most, -(-len(missing) // self.among)))
        if not taken:
            return []
        there = _here(self.directory) if self.exchange is None else self.exchange.shards(self.directory.name)
        return [index for index in taken if index not in there]

    def made(self, shard: int) -> None:
        """Put it where all can see it."""
        self.made_here.append(shard)
        if self.exchange is not None:
            self._publish(shard)

    def _publish(self, shard: int) -> None:
        assert self.exchange is not None
        if not self.exchange.publish_shard(self.directory, shard):
            self.too_late(shard)
            self._remove(shard)  # the one that is there is the one that counts
        elif not self.collects:
            self._remove(shard)  # whoever needs it gets it from the depot

    def _remove(self, shard: int) -> None:
        shard_manifest_path(self.directory, shard).unlink(missing_ok=True)
        shard_path(self.directory, shard).unlink(missing_ok=True)

    def too_late(self, shard: int) -> None:
        """Count it, and say it."""
        self.too_late_here.append(shard)
        if shard in self.made_here:
            self.made_here.remove(shard)
        self._say(
            f"shard {shard} of {self.directory.name} was made twice: somebody else committed it first, ours is dropped"
        )

    def wait(self) -> None:
        """Give the others time; say it where nobody seems to do anything."""
        time.sleep(POLL_S if self.exchange is None else REMOTE_POLL_S)
        if not self.collects and not is_open(self._depot, self.order):
            raise Withdrawn
        if self.among == 1 and time.monotonic() - self._changed > LONELY_S:
            self._changed = time.monotonic()
            self._say(
                f"{self.directory.name} waits for workers: no shard has come for {LONELY_S:g} s; start one with "
                f"`stalewise generate {self._depot.where} --worker NAME`"
            )


def _here(directory: Path) -> set[int]:
    """Shards whose file and manifest are in a directory."""
    names = {entry.name for entry in directory.iterdir()} if directory.is_dir() else set()
    indices = (int(match[1]) for match in map(_MANIFEST.fullmatch, names) if match)
    return {index for index in indices if shard_path(directory, index).name in names}
