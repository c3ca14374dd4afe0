"""What a person sees of a run: bars with rate and time left on a terminal, one line per phase elsewhere. On stderr."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from stalewise.config import RunConfig
from stalewise.types import NullCallback, ProgressCallback

UNITS = {"generate": "rollouts", "wait": "rollouts", "learn": "updates", "evaluate": "responses"}


class RateColumn(ProgressColumn):
    """How many per second."""

    def render(self, task: Task) -> Text:
        """Show the rate of the last half minute, or that of the whole once it is done."""
        rate = task.finished_speed or task.speed
        if rate is None and task.completed and task.elapsed:  # one step only, as where all rollouts fit one shard
            rate = task.completed / task.elapsed
        return Text("" if rate is None else f"{rate:,.1f}/s", style="progress.data.speed")


class Bars:
    """A bar per phase; the finished ones stay above it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress: Progress | None = None

    def begin(self, what: str, total: int) -> None:
        """Start a bar."""
        self.close()
        self._progress = Progress(
            TextColumn("{task.description:<8}"),
            BarColumn(),
            MofNCompleteColumn(),
            RateColumn(),
            TimeRemainingColumn(elapsed_when_finished=True),
            TextColumn("{task.fields[note]}"),
            console=self._console,
        )
        self._progress.add_task(what, total=total, note="")
        self._progress.start()

    def advance(self, amount: int, note: str = "") -> None:
        """Move the bar, and leave it where it is once all is done."""
        if self._progress is None:
            return
        (task,) = self._progress.tasks
        told: dict[str, Any] = {"note": escape(note)} if note else {}
        self._progress.update(task.id, advance=amount, **told)
        if task.finished:
            self.close()

    def metrics(self, update: int, record: dict[str, Any]) -> None:
        """Do nothing: the note of `advance` shows the ones that matter."""

    def log(self, message: str) -> None:
        """Print a line above the bar."""
        self._console.print(message, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Draw the bar for the last time, and leave the terminal as it should be."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


class Lines:
    """One plain line when a phase is done: for log files and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._what = ""
        self._total = self._done = 0
        self._note = ""
        self._start = 0.0

    def begin(self, what: str, total: int) -> None:
        """Note when the phase began."""
        self.close()
        self._what, self._total, self._done, self._note = what, total, 0, ""
        self._start = time.perf_counter()

    def advance(self, amount: int, note: str = "") -> None:
        """Count, and print the line once all is done."""
        self._done += amount
        self._note = note or self._note
        if self._what and self._done >= self._total:
            self.close()

    def metrics(self, update: int, record: dict[str, Any]) -> None:
        """Do nothing."""

    def log(self, message: str) -> None:
        """Print it."""
        self._console.print(message, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Print the line of a phase that ended before its time."""
        if self._what:
            seconds = time.perf_counter() - self._start
            rate = self._done / seconds if seconds else 0.0
            count = f"{self._done}/{self._total} {UNITS.get(self._what, '')}".rstrip()
            self.log(f"{self._what}: {count} in {seconds:.1f} s ({rate:,.1f}/s)  {self._note}".rstrip())
        self._what = ""


class Several:
    """Tells every watcher."""

    def __init__(self, watchers: Sequence[ProgressCallback]) -> None:
        self.watchers = watchers

    def begin(self, what: str, total: int) -> None:
        """Tell all of them."""
        for callback in self.watchers:
            callback.begin(what, total)

    def advance(self, amount: int, note: str = "") -> None:
        """Tell all of them."""
        for callback in self.watchers:
            callback.advance(amount, note)

    def metrics(self, update: int, record: dict[str, Any]) -> None:
        """Tell all of them."""
        for callback in self.watchers:
            callback.metrics(update, record)

    def log(self, message: str) -> None:
        """Tell all of them."""
        for callback in self.watchers:
            callback.log(message)


@contextlib.contextmanager
def watching(config: RunConfig | None = None, *, is_first: bool = True) -> Iterator[ProgressCallback]:
    """Progress on stderr, and the trackers of the config, for as long as the block lasts.

    Of several processes at one run only the first is worth watching.
    """
    if not is_first:
        yield NullCallback()
        return
    console = Console(stderr=True)
    shown = Bars(console) if console.is_terminal else Lines(console)
    with contextlib.ExitStack() as stack:
        watchers: list[ProgressCallback] = [shown]
        if config is not None and config.trackers:
            from stalewise.reporting.trackers import Trackers  # imported here: accelerate brings torch along

            trackers = Trackers(config)
            stack.callback(trackers.close)
            watchers.append(trackers)
        stack.callback(shown.close)
        yield Several(watchers)
