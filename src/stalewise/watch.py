"""Whoever wants to see a run go on. Imports nothing heavy: the command line, trackers and tests implement it."""

from __future__ import annotations

from typing import Any, Protocol


class Watcher(Protocol):
    """Whoever wants to see a run go on: a progress bar, a tracker, a test."""

    def begin(self, what: str, total: int) -> None:
        """`what` (generate, learn, evaluate) starts, with this many rollouts or updates to come."""
        ...

    def advance(self, amount: int, note: str = "") -> None:
        """So many more of them are done."""
        ...

    def metrics(self, update: int, record: dict[str, Any]) -> None:
        """An update was taken."""
        ...

    def say(self, message: str) -> None:
        """Something a person should read."""
        ...


class Silence:
    """A watcher that does not look."""

    def begin(self, what: str, total: int) -> None:
        """Do nothing."""

    def advance(self, amount: int, note: str = "") -> None:
        """Do nothing."""

    def metrics(self, update: int, record: dict[str, Any]) -> None:
        """Do nothing."""

    def say(self, message: str) -> None:
        """Do nothing."""
