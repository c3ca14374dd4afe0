"""The current status of a run, read from its directory alone, also while another process works on it."""

from __future__ import annotations

import contextlib
import json
import math
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil

from stalewise.errors import StalewiseError, visible
from stalewise.reporting.read import IDLE, Run, read_run, total_seconds
from stalewise.reporting.summary import accuracy_of, findings
from stalewise.statistics import format_duration
from stalewise.store import parse_batch_name
from stalewise.store.atomic import RunLock
from stalewise.store.records import HOLDER

RECENT = 8  # updates that the reward is averaged over
RATE_WINDOW = 32  # updates that the rate is measured over
REFRESH_S = 1.5  # a run is read at most this often, however many pages are open

State = Literal["not started", "running", "maybe running", "stopped", "finished"]


@dataclass(frozen=True, slots=True)
class RunPhase:
    """An activity of a run and its progress."""

    what: str
    done: int
    total: int | None  # None: unknown


@dataclass(frozen=True, slots=True)
class RunStatus:
    """The status that `stalewise watch` shows. None where a value is unknown."""

    directory: str
    name: str
    task: str
    objective: str
    state: State
    holder: str  # the process that executes the run
    phases: list[RunPhase]  # two where generating and learning overlap
    stage: int | None  # counted from 0
    stages: int | None
    update: int
    updates: int
    updates_per_second: float | None
    seconds_left: float | None
    seconds: dict[str, float]
    reward: float | None  # mean of the last updates
    ess: float | None
    accuracy: dict[str, Any] | None  # accuracy of the last evaluated version
    batch_budget: float | None
    horizon_budget: float | None
    rollbacks: int
    warnings: list[str]


def run_status(directory: Path) -> RunStatus:
    """Read the status of a run once."""
    run = read_run(directory)
    state, holder = state_of(run)
    evaluation = run.evaluations[-1] if run.evaluations else None
    return RunStatus(
        directory=str(directory),
        name=run.label,
        task=str(run.config.get("task.name", "unknown")),
        objective=str(run.config.get("objective.name", "unknown")),
        state=state,
        holder=holder,
        phases=current_phases(run) if state != "finished" else [],
        stage=current_stage(run),
        stages=len(run.sources) or (None if run.is_open_ended else run.schedule.generation_batches),
        update=run.updates,
        updates=run.planned_updates,
        updates_per_second=update_rate(run),
        seconds_left=0.0 if state == "finished" else seconds_left(run),
        seconds=run.seconds,
        reward=_last(run, "reward", RECENT),
        ess=_last(run, "ess"),
        accuracy=None if evaluation is None else accuracy_of(evaluation),
        batch_budget=_last(run, "batch_budget"),
        horizon_budget=_last(run, "horizon_budget"),
        rollbacks=len(run.rollbacks),
        warnings=findings(run),
    )


def state_of(run: Run) -> tuple[State, str]:
    """The state of a run, and the process that executes it. Reads the lock file and does not take the lock."""
    holder: Any = {}
    with contextlib.suppress(OSError, ValueError):
        holder = json.loads((run.directory / RunLock.FILE).read_text() or "{}")
    if HOLDER.accepts(holder):
        process = f"process {holder['pid']} on {holder['host']} since {holder['since']}"
        if holder["host"] != socket.gethostname():
            return "maybe running", f"{process}, which cannot be checked from this machine"
        if _is_alive(holder["pid"], holder["since"]):
            return "running", process
    if run.is_complete:
        return "finished", ""
    return ("stopped", "") if run.updates or run.batches or run.evaluations else ("not started", "")


def _is_alive(pid: int, since: str) -> bool:
    """Whether this process still exists, and is not a later one with the same pid."""
    with contextlib.suppress(psutil.Error, ValueError):
        return psutil.Process(pid).create_time() <= datetime.fromisoformat(since).timestamp() + 1
    return False


def current_phases(run: Run) -> list[RunPhase]:
    """The activities in progress; if none is visible on disk, the next activity."""
    phases: list[RunPhase] = []
    per_update = int(run.config.get("batch.prompts", 0)) * int(run.config.get("batch.group_size", 0))
    for name, rows in run.unfinished.items():
        planned = _planned_updates(run, parse_batch_name(name).generation_batch)
        phases.append(RunPhase("generate", rows, None if planned is None else planned * per_update))
    if run.updates > run.committed:
        batch = run.finite("generation_batch")
        done = int((batch == batch[-1]).sum()) if len(batch) else run.updates
        phases.append(RunPhase("learn", done, _planned_updates(run, int(batch[-1])) if len(batch) else None))
    return phases or [_next_phase(run)]


def _next_phase(run: Run) -> RunPhase:
    version, every = run.committed, run.config.get("evaluation.every", 0)
    is_due = version in (0, run.planned_updates) or (every > 0 and version % every == 0)
    if is_due and version not in {record["version"] for record in run.evaluations}:
        responses = run.config.get("evaluation.prompts", 0) * run.config.get("evaluation.samples", 0)
        return RunPhase("evaluate", 0, responses)
    has_fresh = len(run.batches or run.sources) > run.finite("generation_batch").max(initial=-1) + 1
    in_stage = not run.is_open_ended and version % run.schedule.updates_per_generation
    return RunPhase("learn" if has_fresh or in_stage else "generate", 0, None)


def _planned_updates(run: Run, generation_batch: int) -> int | None:
    if generation_batch in run.stages:
        return run.stages[generation_batch].get("planned_updates")
    if generation_batch < len(run.sources):
        return run.sources[generation_batch]["updates"]
    if run.is_open_ended or generation_batch >= run.schedule.generation_batches:
        return None
    return len(run.schedule.updates_of(generation_batch))


def current_stage(run: Run) -> int | None:
    """The generation batch being learned from; between two stages, the one being generated."""
    if run.unfinished and run.updates == run.committed:
        return parse_batch_name(next(iter(run.unfinished))).generation_batch
    batch = run.finite("generation_batch")
    return int(batch[-1]) if len(batch) else 0 if run.batches else None


def update_rate(run: Run) -> float | None:
    """Updates per second while learning, over the last updates."""
    seconds = run.finite("seconds")[-RATE_WINDOW:]
    return len(seconds) / float(seconds.sum()) if len(seconds) and seconds.sum() > 0 else None


def seconds_left(run: Run) -> float | None:
    """Time left at the present rates; None before the first update.

    In a pipelined run the later end counts: that of the trainer's own work, or that of the last generation batch and
    the updates on it. Time that one process waits for the other is part of that and is not added.
    """
    rate = update_rate(run)
    if rate is None:
        return None
    share = (run.planned_updates - run.updates) / run.updates
    done = max(len(run.batches), 1)
    planned = done * (1 + share) if run.is_open_ended else run.schedule.generation_batches
    spent = run.seconds
    generated = (total_seconds(run.generator) if run.generator else spent)["generate"]
    generate = 0.0 if run.sources else generated * max(planned - done, 0) / done
    learn = (run.planned_updates - run.updates) / rate
    apart = ("generate", "learn", IDLE, *(("wait",) if run.generator else ()))
    other = sum(seconds for name, seconds in spent.items() if name not in apart) * share
    if not run.generator:
        return other + generate + learn
    last_batch = min(run.schedule.updates_per_generation / rate, learn)
    return max(other + learn, generate + last_batch)


def _last(run: Run, key: str, updates: int = 1) -> float | None:
    """The mean of the last finite values."""
    values = run.finite(key)[-updates:]
    mean = float(np.mean(values)) if len(values) else math.nan
    return mean if math.isfinite(mean) else None


class StatusLine:
    """The status of a run as one line for its pages, read again when it is older than REFRESH_S."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self._lock = threading.Lock()
        self._read_at = float("-inf")
        self._text = ""

    def text(self) -> str:
        """The line, or why the run cannot be read."""
        with self._lock:
            if time.monotonic() - self._read_at > REFRESH_S:
                try:
                    self._text = " · ".join(_facts(run_status(self.run)))
                except StalewiseError as error:
                    self._text = visible(str(error))
                self._read_at = time.monotonic()
            return self._text


def _facts(now: RunStatus) -> Iterator[str]:
    yield now.state
    if now.phases:
        yield ("" if now.state == "running" else "next: ") + ", ".join(map(_format_phase, now.phases))
    yield f"update {now.update:,} of {now.updates:,}"
    if now.updates_per_second is not None:
        yield f"{now.updates_per_second:,.1f} updates/s"
    if now.seconds_left and now.state in ("running", "maybe running"):
        yield f"about {format_duration(now.seconds_left)} left"
    if now.batch_budget is not None and now.horizon_budget is not None:
        yield f"drift: {now.batch_budget:.0%} of the batch's budget, {now.horizon_budget:.0%} of the run's"


def _format_phase(phase: RunPhase) -> str:
    done = f" {phase.done:,} of {phase.total:,}" if phase.total else f" {phase.done:,}" if phase.done else ""
    return f"{phase.what}{done}"
