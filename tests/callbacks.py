"""Callbacks that note what a run says, or interrupt it."""

from __future__ import annotations

from typing import Any

from stalewise.types import NullCallback


class Listener(NullCallback):
    def __init__(self) -> None:
        self.said: list[str] = []

    def log(self, message: str) -> None:
        self.said.append(message)


class StopAt(NullCallback):
    """Ctrl-C after an update."""

    def __init__(self, update: int) -> None:
        self.update = update

    def metrics(self, update: int, record: dict[str, Any]) -> None:
        if update == self.update:
            raise KeyboardInterrupt
