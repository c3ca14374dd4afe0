"""Progress of a run on stderr: bars with rate and time left on a terminal, one line per phase elsewhere."""

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
from stalewise.errors import visible
from stalewise.types import NullCallback, ProgressCallback, report_evaluation

UNITS = {"generate": "rollouts", "wait": "rollouts", "learn": "updates", "evaluate": "responses"}


class RateColumn(ProgressColumn):
    """Items per second."""

    def render(self, task: Task) -> Text:
        """The rate of the last half minute; of the whole phase once it is done."""
        rate = task.finished_speed or task.speed
        if rate is None and task.completed and task.elapsed:  # a single step, as with one shard
            rate = task.completed / task.elapsed
        return Text("" if rate is None else f"{rate:,.1f}/s", style="progress.data.speed")


class _ConsoleCallback(NullCallback):
    def __init__(self, console: Console) -> None:
        self._console = console

    def log(self, message: str) -> None:
        self._console.print("\n".join(map(visible, message.split("\n"))), markup=False, highlight=False, soft_wrap=True)


class Bars(_ConsoleCallback):
    """A bar per phase; finished bars stay above it."""

    _progress: Progress | None = None

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
        """Move the bar, and stop it at the end."""
        if self._progress is None:
            return
        (task,) = self._progress.tasks
        fields: dict[str, Any] = {"note": escape(note)} if note else {}
        self._progress.update(task.id, advance=amount, **fields)
        if task.finished:
            self.close()

    def close(self) -> None:
        """Stop the bar and restore the terminal."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


class Lines(_ConsoleCallback):
    """One plain line per finished phase, for log files and pipes."""

    _what = _note = ""
    _total = _done = 0
    _start = 0.0

    def begin(self, what: str, total: int) -> None:
        """Start a phase."""
        self.close()
        self._what, self._total, self._done, self._note = what, total, 0, ""
        self._start = time.perf_counter()

    def advance(self, amount: int, note: str = "") -> None:
        """Count, and print the line at the end."""
        self._done += amount
        self._note = note or self._note
        if self._what and self._done >= self._total:
            self.close()

    def close(self) -> None:
        """Print the line of an unfinished phase."""
        if self._what:
            seconds = time.perf_counter() - self._start
            rate = self._done / seconds if seconds else 0.0
            count = f"{self._done}/{self._total} {UNITS.get(self._what, '')}".rstrip()
            self.log(f"{self._what}: {count} in {seconds:.1f} s ({rate:,.1f}/s)  {self._note}".rstrip())
        self._what = ""


class Several:
    """Forwards everything to several callbacks."""

    def __init__(self, callbacks: Sequence[ProgressCallback]) -> None:
        self.callbacks = callbacks

    def begin(self, what: str, total: int) -> None:
        """Forward to all."""
        for callback in self.callbacks:
            callback.begin(what, total)

    def advance(self, amount: int, note: str = "") -> None:
        """Forward to all."""
        for callback in self.callbacks:
            callback.advance(amount, note)

    def metrics(self, update: int, record: dict[str, Any]) -> None:
        """Forward to all."""
        for callback in self.callbacks:
            callback.metrics(update, record)

    def evaluation(self, record: dict[str, Any]) -> None:
        """Forward to all."""
        for callback in self.callbacks:
            report_evaluation(callback, record)

    def log(self, message: str) -> None:
        """Forward to all."""
        for callback in self.callbacks:
            callback.log(message)


@contextlib.contextmanager
def watching(config: RunConfig | None = None, *, is_first: bool = True) -> Iterator[ProgressCallback]:
    """Shows progress on stderr and feeds the config's trackers inside the block; on the first rank only."""
    if not is_first:
        yield NullCallback()
        return
    console = Console(stderr=True)
    progress = Bars(console) if console.is_terminal else Lines(console)
    with contextlib.ExitStack() as stack:
        callbacks: list[ProgressCallback] = [progress]
        if config is not None and config.trackers:
            from stalewise.reporting.trackers import Trackers  # here, since accelerate imports torch

            callbacks.append(stack.enter_context(contextlib.closing(Trackers(config))))
        stack.callback(progress.close)
        yield Several(callbacks)
