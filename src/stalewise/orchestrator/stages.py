"""The stages of a run that finds their sizes itself (`schedule.end = "spent"`), as `ledger/stages.jsonl` tells them.

One line for each stage, written when it begins, with why the one before it ended and the numbers behind that; and one
of no updates at the end of the run, which tells how the last stage ended. A line follows from the checkpoint that the
stage begins at and from the lines before it, so it comes out the same when a sitting that was killed is repeated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from stalewise.config import RunConfig
from stalewise.staleness.schedule import Schedule
from stalewise.staleness.spent import Stage, StageSchedule, next_stage
from stalewise.store.atomic import append_line, read_jsonl, truncate_jsonl

SPENT_ESS = 0.9  # docs/control.md has the evidence


def first_schedule(config: RunConfig, stages_path: Path) -> Schedule:
    """The schedule of a config, with the stages that have begun where the run finds them itself."""
    if config.schedule.end == "count":
        return config.schedule.schedule()
    names = [field.name for field in fields(Stage)]
    stages = tuple(Stage(**{name: record[name] for name in names}) for record in read_jsonl(stages_path))
    begun = tuple(stage for stage in stages if stage.planned_updates)
    return StageSchedule(config.schedule.updates, config.schedule.updates, stages=begun)


def forget_stages(schedule: StageSchedule, stages_path: Path, version: int) -> StageSchedule:
    """Without the stages that began after this version: they begin again."""
    truncate_jsonl(stages_path, lambda record: record["first_update"] <= version)
    return replace(schedule, stages=tuple(stage for stage in schedule.stages if stage.first_update <= version))


def begin_stage(
    schedule: StageSchedule, stages_path: Path, version: int, *, spent: Mapping[str, Any] | None, per_update: int
) -> StageSchedule:
    """The schedule with a stage at this version: the one that goes on, or a new one where that is over.

    `spent` says why the stage before was ended at this version; None where it was not. After the last update no stage
    begins: the line that says how the last one ended is written, once.
    """
    last = schedule.stages[-1] if schedule.stages else None
    if last is not None and (last.first_update == version or (spent is None and version in _planned(last))):
        return schedule
    stage = next_stage(schedule, version, was_spent=spent is not None, per_update=per_update)
    ended = None if last is None else spent or {"reason": "all of it was used", "planned_updates": last.planned_updates}
    if version == schedule.updates:
        if read_jsonl(stages_path)[-1]["planned_updates"]:
            append_line(stages_path, {**asdict(stage), "ended": ended})
        return schedule
    append_line(stages_path, {**asdict(stage), "ended": ended})
    return replace(schedule, stages=(*schedule.stages, stage))


def _planned(stage: Stage) -> range:
    return range(stage.first_update, stage.first_update + stage.planned_updates)
