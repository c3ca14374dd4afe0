"""The stages of a run that finds their sizes itself (`schedule.end = "spent"`), in `ledger/stages.jsonl`.

One line per stage, written when it begins, with why the stage before ended; and one of no updates at the end of the
run. A line follows from the checkpoint at which the stage begins and from the lines before it, so a run that was killed
writes the same line again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from stalewise.config import ScheduleSection
from stalewise.config.run_directory import schedule_of
from stalewise.staleness.schedule import Schedule
from stalewise.staleness.spent import Stage, StageSchedule
from stalewise.store.json_lines import append_line, truncate_jsonl
from stalewise.store.records import STAGE, read_records


def read_schedule(section: ScheduleSection, stages_path: Path) -> Schedule:
    """The schedule of a run, with the stages that have begun where it finds them itself."""
    if section.end == "count":
        return schedule_of(section, stages_path.parent.parent)
    names = [field.name for field in fields(Stage)]
    stages = [Stage(**{name: record[name] for name in names}) for record in read_records(stages_path, STAGE)]
    return StageSchedule(section.updates, section.updates, stages=tuple(s for s in stages if s.planned_updates))


def forget_stages(schedule: Schedule, stages_path: Path, version: int) -> Schedule:
    """Drop the stages that begin after this version, on disk too: they begin again."""
    truncate_jsonl(stages_path, lambda record: record["first_update"] <= version)
    return schedule.forget_after(version)


def begin_stage(
    schedule: Schedule, stages_path: Path, version: int, *, spent: Callable[[], dict[str, Any] | None], per_update: int
) -> Schedule:
    """The schedule at this version, with a new stage where one begins; that is written to disk.

    `spent` returns why the stage before was ended at this version, None where it was not.
    """
    if not schedule.is_open_ended:
        return schedule
    reason = spent()
    begun = schedule.begin_stage(version, was_spent=reason is not None, per_update=per_update)
    if begun is None:
        return schedule
    schedule, stage = begun
    lines = read_records(stages_path, STAGE)
    if not lines:
        append_line(stages_path, {**asdict(stage), "ended": None})
    elif planned := lines[-1]["planned_updates"]:  # 0: the end of the run is on record
        ended = reason or {"reason": "all of it was used", "planned_updates": planned}
        append_line(stages_path, {**asdict(stage), "ended": ended})
    return schedule
