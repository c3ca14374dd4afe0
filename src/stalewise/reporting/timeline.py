"""Where the time of a run went: from its journal to seconds per stage and activity, and to a clock for its updates.

A journal record is written when its activity ends, so it began `seconds` before its `time`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

# What a run does, in the order in which it is drawn. Time between journal records is `idle`.
ACTIVITIES = ("generate", "learn", "switch", "wait", "evaluate")
IDLE = "idle"
NOT_TRAINING = frozenset({"evaluate", IDLE})  # what is not a cost of the method, but of looking at it or of a stop

Column = npt.NDArray[np.float64]
Record = Mapping[str, Any]
StageOf = Callable[[int], int]
Spent = dict[int, dict[str, float]]  # seconds by stage (generation batch), then by activity


def spent_by_stage(journal: Sequence[Record], stage_of: StageOf) -> Spent:
    """Seconds per activity in each stage, with those in between.

    In between the run was stopped, or did work that a crash undid. What has no stage of its own (switching, evaluating)
    counts to the stage that was last generated or learned.
    """
    spent: Spent = {}
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


def add_uncommitted(
    spent: Spent, metrics: Mapping[str, Column], committed: int, stage_of: Callable[[int], int]
) -> None:
    """Add the updates since the last checkpoint: `learn` is journalled with the next one."""
    for update, seconds in _since(metrics, committed):
        _add(spent, stage_of(update), "learn", seconds)


def committed_updates(journal: Iterable[Record], rollbacks: Iterable[Record]) -> int:
    """Updates whose time the journal knows: up to its last `learn`, or to where the run was taken back after that."""
    marks = [(record["time"], record["stop"]) for record in journal if record["event"] == "learn"]
    marks += [(record["time"], record["to_version"]) for record in rollbacks]
    return max(marks, default=(0.0, 0))[1]


def clock_of(journal: Sequence[Record], metrics: Mapping[str, Column], committed: int) -> Column:
    """Seconds of training until the end of each update on record; NaN where the journal does not tell.

    Evaluating and idle time are left out: a run that is looked at often, or was stopped overnight, is no slower.
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
    for update, seconds in _since(metrics, committed):
        now += seconds
        clock[update] = now
    return np.array([clock.get(update, np.nan) for update in updates])


def total(spent: Spent) -> dict[str, float]:
    """Seconds per activity over all stages, in the order of ACTIVITIES; `wait` only where there was some."""
    found: dict[str, float] = {name: 0.0 for name in ACTIVITIES if name != "wait" or _occurs(spent, name)}
    for row in spent.values():
        for name, seconds in row.items():
            found[name] = found.get(name, 0.0) + seconds
    idle = found.pop(IDLE, 0.0)
    return {**found, IDLE: idle}


def _occurs(spent: Spent, name: str) -> bool:
    return any(name in row for row in spent.values())


def _add(spent: Spent, stage: int, event: str, seconds: float) -> None:
    row = spent.setdefault(stage, {})
    row[event] = row.get(event, 0.0) + seconds


def _since(metrics: Mapping[str, Column], committed: int) -> list[tuple[int, float]]:
    if "seconds" not in metrics:
        return []
    pairs = zip(metrics["update"].tolist(), np.nan_to_num(metrics["seconds"]).tolist(), strict=True)
    return [(int(update), seconds) for update, seconds in pairs if update >= committed]
