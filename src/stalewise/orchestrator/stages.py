"""The stages of a run with `schedule.end = "spent"`, and its drift budget.

Such a run finds the sizes of its stages itself. `ledger/stages.jsonl` has one line per stage, written when the stage
begins, with the reason why the stage before ended. At the end of the run comes a line of a stage without updates. A
line follows from the checkpoint at which the stage begins and from the lines before it, so a run that was killed writes
the same line again. `DriftBudget` measures how much of the law's limits on drift is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from stalewise.config import ScheduleSection
from stalewise.config.run_directory import schedule_of
from stalewise.staleness.schedule import Schedule
from stalewise.staleness.spent import Stage, StageSchedule, fresh_ess, is_spent, remaining_ess
from stalewise.store.json_lines import append_line, truncate_jsonl
from stalewise.store.records import STAGE, read_records

WARN_AT = 0.8  # fraction of a limit
WARN_ESS = 0.5  # fraction of the effective sample size of fresh rollouts
WARNINGS = {
    "batch_budget": "drift within this generation batch is at {used} of its limit (R_batch): use smaller stages or a "
    "lower optimizer.learning_rate",
    "horizon_budget": "drift over the run is at {used} of its limit (R_crit): stop here, or continue in a new run with "
    "a lower optimizer.learning_rate",
}


class DriftBudget:
    """Measures each update against the drift limits, and warns once per run about each.

    It warns when most of a limit is used, or when one more step like the last would cross it. `limits` are the lower
    ends of R_batch (drift within one generation batch) and R_crit (drift over the run): 0 for an unknown one, None if
    both are unknown. `used` holds the largest fractions on record, about which an earlier process has warned.
    """

    def __init__(
        self, limits: tuple[float, float] | None, log: Callable[[str], object], used: Mapping[str, float] | None = None
    ) -> None:
        self.limits, self.log = limits, log
        self.warned = {name for name, fraction in (used or {}).items() if fraction >= WARN_AT}
        self.last: dict[str, float] = {}

    def measure(self, drift: float, drift_of_version: float) -> dict[str, float]:
        """Metrics of an update, from the drift after it and the drift of the policy that made its rollouts."""
        batch_drift = drift - drift_of_version
        if self.limits is None:
            return {"batch_drift": batch_drift, "batch_budget": math.nan, "horizon_budget": math.nan}
        pairs = zip(WARNINGS, (batch_drift, drift), self.limits, strict=True)
        used = {name: value / limit if limit > 0 else math.nan for name, value, limit in pairs}
        for name, fraction in used.items():
            step = fraction - self.last.get(name, fraction)  # negative where a new batch begins
            if name not in self.warned and (fraction >= WARN_AT or fraction + max(step, 0.0) >= 1.0):
                self.warned.add(name)
                self.log(WARNINGS[name].format(used=f"{fraction:.0%}"))
        self.last = used
        return {"batch_drift": batch_drift, **used}

    def check_ess(self, ess: Sequence[float]) -> None:
        """Warn when the effective sample size of a stage's updates falls to half of its initial value."""
        fell = is_spent(ess, WARN_ESS) and not is_spent(ess[:-1], WARN_ESS)  # at this update, not before it
        left = remaining_ess(ess) / fresh_ess(ess) if fell else math.nan
        if left < WARN_ESS and "ess" not in self.warned:
            self.warned.add("ess")
            self.log(
                f"the effective sample size of this stage's rollouts is {left:.0%} of its initial value: smaller "
                'stages, schedule.end = "spent" or a lower optimizer.learning_rate keep them useful'
            )

    @staticmethod
    def note(metrics: dict[str, float]) -> str:
        """The budget for a progress line; empty where it is unknown."""
        used = {"batch": metrics.get("batch_budget", math.nan), "run": metrics.get("horizon_budget", math.nan)}
        known = ", ".join(f"{fraction:.0%} of {name}" for name, fraction in used.items() if not math.isnan(fraction))
        return f"  budget {known}" if known else ""


def read_schedule(section: ScheduleSection, stages_path: Path) -> Schedule:
    """The schedule of a run; for an open-ended one, with the stages that have begun."""
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
    """The schedule at this version, with a new stage if one begins here, which is appended to the file.

    `spent` returns why the stage before ended at this version, None if it did not.
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
        append_line(stages_path, {**asdict(stage), "ended": None}, durable=False)
    elif planned := lines[-1]["planned_updates"]:  # 0: the end of the run is recorded
        ended = reason or {"reason": "all of it was used", "planned_updates": planned}
        append_line(stages_path, {**asdict(stage), "ended": ended}, durable=False)
    return schedule
