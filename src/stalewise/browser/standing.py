"""How a run stands, in one line above its pages: what it does, how fast, how long it takes, what budget is left."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

from stalewise.errors import StalewiseError
from stalewise.inspection import visible
from stalewise.report.live import Phase, Standing, standing
from stalewise.report.summary import duration

LOOK_AGAIN_S = 1.5  # a run is not read more often than this, however many pages are open


class StandingLine:
    """The line of one run, read anew when it is asked for and the last one has grown old."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self._lock = threading.Lock()
        self._read = float("-inf")
        self._words = ""

    def words(self) -> str:
        """The line; where the run cannot be read, why."""
        with self._lock:
            if time.monotonic() - self._read > LOOK_AGAIN_S:
                try:
                    self._words = " · ".join(_facts(standing(self.run)))
                except StalewiseError as error:
                    self._words = visible(str(error))
                self._read = time.monotonic()
            return self._words


def _facts(now: Standing) -> Iterator[str]:
    yield now.state
    if now.phases:
        yield ("" if now.state == "running" else "next: ") + ", ".join(map(_phase, now.phases))
    yield f"update {now.update:,} of {now.updates:,}"
    if now.updates_per_second is not None:
        yield f"{now.updates_per_second:,.1f} updates/s"
    if now.seconds_left and now.state in ("running", "maybe running"):
        yield f"about {duration(now.seconds_left)} left"
    if now.batch_budget is not None and now.horizon_budget is not None:
        yield f"drift: {now.batch_budget:.0%} of the batch's budget, {now.horizon_budget:.0%} of the run's"


def _phase(phase: Phase) -> str:
    if not phase.total:
        return f"{phase.what} {phase.done:,}" if phase.done else phase.what
    return f"{phase.what} {phase.done:,} of {phase.total:,}"
