"""Whose turn a shard of a generation batch is: everything is ours, unless others work at the same batch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from stalewise.store import committed_shards


class Shares(Protocol):
    """What one process is told about the batch that it works at."""

    provenance: Mapping[str, Any]  # what the manifests of its shards say about where they come from

    def present(self) -> set[int]:
        """Shards that are committed, by whomever."""
        ...

    def take(self, missing: list[int], most: int) -> list[int]:
        """Shards of the missing ones that are this process's to make now; none where others have them."""
        ...

    def made(self, shard: int) -> None:
        """This process has committed a shard."""
        ...

    def too_late(self, shard: int) -> None:
        """This process has made a shard that somebody else committed first; it counts for nothing."""
        ...

    def wait(self) -> None:
        """Nothing is to be had: wait a moment for the others."""
        ...


class Alone:
    """The only process at a batch: it makes all that is missing, in order."""

    provenance: Mapping[str, Any] = {}

    def __init__(self, directory: Path) -> None:
        self._present = {shard.index for shard in committed_shards(directory)}
        self._taken: set[int] = set()

    def present(self) -> set[int]:
        """Shards that were there, and those that were made since."""
        return set(self._present)

    def take(self, missing: list[int], most: int) -> list[int]:
        """The next ones."""
        taken = [shard for shard in missing if shard not in self._taken][:most]
        self._taken.update(taken)
        return taken

    def made(self, shard: int) -> None:
        """Note it."""
        self._present.add(shard)

    def too_late(self, shard: int) -> None:
        """Note it."""
        self._present.add(shard)

    def wait(self) -> None:
        """Wait for nobody: the thread that writes shards has been waited for."""
