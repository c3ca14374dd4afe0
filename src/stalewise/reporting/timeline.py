"""A run's journal as seconds per stage and activity, and as a clock for its updates.

A journal record is written when its activity ends: it started `seconds` before its `time`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

# In the order in which they are drawn. Time between journal records is `idle`.
ACTIVITIES = ("generate", "learn", "switch", "wait", "evaluate")
IDLE = "idle"
NOT_TRAINING = frozenset({"evaluate", IDLE})  # not a cost of the method

Column = npt.NDArray[np.float64]
Record = Mapping[str, Any]
StageOf = Callable[[int], int]
StageSeconds = dict[int, dict[str, float]]  # by stage (generation batch), then by activity


def seconds_by_stage(journal: Sequence[Record], stage_of: StageOf) -> StageSeconds:
    """Seconds per activity in each stage. Gaps are idle: the run was stopped, or lost work in a crash.

    Switching and evaluating belong to no stage and count to the stage last generated or learned.
    """
    spent: StageSeconds = {}
    stage, end = 0, float("inf")
    for record in journal:
        if (gap := record["time"] - record["seconds"] - end) > 0:
            _add(spent, stage, IDLE, gap)
        end = record["time"] if end == float("inf") else max(end, record["time"])
        if record["event"] == "generate":
            stage = record.get("generation_batch", stage)
        elif "first" in record:
            stage = stage_of(record["first"])
        _add(spent, stage, record["event"], record["seconds"])
    return spent


def add_uncommitted(spent: StageSeconds, metrics: Mapping[str, Column], committed: int, stage_of: StageOf) -> None:
    """Add the updates since the last checkpoint: the journal gets `learn` with the next one."""
    for update, seconds in _uncommitted(metrics, committed):
        _add(spent, stage_of(update), "learn", seconds)


def committed_updates(journal: Iterable[Record], rollbacks: Iterable[Record]) -> int:
    """Updates covered by the journal: up to its last `learn`, or to the version of a later rollback."""
    marks = [(record["time"], record["stop"]) for record in journal if record["event"] == "learn"]
    marks += [(record["time"], record["to_version"]) for record in rollbacks]
    return max(marks, default=(0.0, 0))[1]


def update_clock(journal: Sequence[Record], metrics: Mapping[str, Column], committed: int) -> Column:
    """Seconds of training until the end of each recorded update; NaN where the journal has no record of it.

    Evaluation and idle time are left out: frequent evaluations or an overnight stop do not make a run slower.
    """
    updates = [int(update) for update in metrics.get("update", ())]
    lasted = dict(zip(updates, metrics.get("seconds", ()), strict=False))
    clock: dict[int, float] = {}
    now = 0.0
    for record in journal:
        if record["event"] in NOT_TRAINING:
            continue
        if record["event"] == "learn" and record["stop"] > record["first"]:
            learned = range(record["first"], record["stop"])
            weights = np.array([lasted.get(update, np.nan) for update in learned])
            if not (np.isfinite(weights).all() and weights.sum() > 0):
                weights = np.ones(len(learned))
            ends = now + record["seconds"] * np.cumsum(weights) / weights.sum()
            clock.update(zip(learned, ends.tolist(), strict=True))
        now += record["seconds"]
    for update, seconds in _uncommitted(metrics, committed):
        now += seconds
        clock[update] = now
    return np.array([clock.get(update, np.nan) for update in updates])


def total_seconds(spent: StageSeconds) -> dict[str, float]:
    """Seconds per activity over all stages, in the order of ACTIVITIES; `wait` only where it occurs."""
    waits = any("wait" in row for row in spent.values())
    totals: dict[str, float] = {name: 0.0 for name in ACTIVITIES if name != "wait" or waits}
    for row in spent.values():
        for name, seconds in row.items():
            totals[name] = totals.get(name, 0.0) + seconds
    idle = totals.pop(IDLE, 0.0)
    return {**totals, IDLE: idle}


def _add(spent: StageSeconds, stage: int, event: str, seconds: float) -> None:
    row = spent.setdefault(stage, {})
    row[event] = row.get(event, 0.0) + seconds


def _uncommitted(metrics: Mapping[str, Column], committed: int) -> list[tuple[int, float]]:
    if "seconds" not in metrics:
        return []
    pairs = zip(metrics["update"].tolist(), np.nan_to_num(metrics["seconds"]).tolist(), strict=True)
    return [(int(update), seconds) for update, seconds in pairs if update >= committed]
