"""Stages that end when their rollouts are spent; their sizes are decided during the run.

The rollouts of a stage are assigned to updates in random order, so the rollouts of the current update are a fair sample
of all remaining ones. Their effective sample size and divergence, measured before the update, therefore estimate those
of the remaining rollouts. When one of the two passes a bound, the stage ends. The next stage generates rollouts
according to how many this one used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, ClassVar

from stalewise.staleness.schedule import BatchSpan, ListedSchedule, Schedule

WINDOW = 3  # updates; the median over them, since one token of weight can halve the ESS of a single update
SPENT_ESS = 0.9  # default bound, as a fraction of the initial ESS; docs/control.md has the evidence
FIRST_STAGE = 8  # updates
GROWTH = 2.0  # factor on the size of a stage that was not spent
HEADROOM = 1.25  # factor on the updates of a spent stage, so that sizes can grow again while few rollouts are wasted


@dataclass(frozen=True, slots=True)
class Stage(BatchSpan):
    """The generation batch of one stage."""

    first_prompt: int  # in the task's endless order; unused prompts are skipped, so rollout ids are unique


@dataclass(frozen=True, slots=True)
class StageSchedule(ListedSchedule):
    """A schedule that is known up to the last stage that has begun."""

    stages: tuple[Stage, ...] = ()
    is_open_ended: ClassVar[bool] = True

    def prompts_of(self, generation_batch: int, per_update: int) -> range:
        """The prompts of a generation batch, as indices in the task's order."""
        stage = self.stages[generation_batch]
        return range(stage.first_prompt, stage.first_prompt + stage.planned_updates * per_update)

    def begin_stage(self, version: int, *, was_spent: bool, per_update: int) -> tuple[Schedule, BatchSpan] | None:
        """The schedule with the stage that begins at this version, and that stage; None where one continues.

        After the last update the stage has no updates, and the schedule stays as it is.
        """
        last = self.stages[-1] if self.stages else None
        if last is not None:
            planned = range(last.first_update, last.first_update + last.planned_updates)
            if last.first_update == version or (version in planned and not was_spent):
                return None
        stage = next_stage(self, version, was_spent=was_spent, per_update=per_update)
        return (replace(self, stages=(*self.stages, stage)) if stage.planned_updates else self), stage

    def forget_after(self, version: int) -> Schedule:
        """The schedule without stages that begin after this version."""
        return replace(self, stages=tuple(stage for stage in self.stages if stage.first_update <= version))

    def spent(self, ess: Sequence[float], batch_budget: float, bound: float) -> dict[str, Any] | None:
        """Why the current stage ends before its rollouts are used up; None while it continues."""
        planned = self.stages[-1].planned_updates
        numbers = {"ess": remaining_ess(ess), "fresh_ess": fresh_ess(ess), "bound": bound, "planned_updates": planned}
        if is_spent(ess, bound):
            return {"reason": "effective sample size", **numbers}
        if batch_budget >= 1.0:
            return {"reason": "drift", **numbers, "batch_budget": batch_budget}
        return None


def useful_share(ess: float, kl: float) -> float:
    """The smaller of the effective sample size and exp(−2·KL); NaN if unknown.

    Tokens that the policy makes rare hardly change the ESS: their weights go to 0, and only large weights lower it.
    They do change the divergence from the behaviour policy, per token. For normally distributed log-ratios with
    variance s² the divergence is s²/2 and the ESS is exp(−s²): so exp(−2·KL) is on the scale of the ESS, and one bound
    serves both.
    """
    return math.nan if math.isnan(ess + kl) else min(ess, math.exp(-2 * kl))


def remaining_ess(ess: Sequence[float]) -> float:
    """Effective sample size of the remaining rollouts: the median of the last updates; NaN if one is unknown."""
    recent = ess[-WINDOW:]
    return math.nan if not recent or any(map(math.isnan, recent)) else median(recent)


def fresh_ess(ess: Sequence[float]) -> float:
    """Effective sample size of a stage's rollouts when they were new; below 1 if sampler and trainer differ."""
    return max(ess[:WINDOW], default=math.nan)


def is_spent(ess: Sequence[float], bound: float) -> bool:
    """Whether the effective sample sizes of a stage fell below `bound` times their initial value.

    The bound is relative, since new rollouts would lose as much to temperature or rounding. Unknown values count as
    spent.
    """
    return len(ess) >= WINDOW and not remaining_ess(ess) >= bound * fresh_ess(ess)


def next_stage(schedule: StageSchedule, version: int, *, was_spent: bool, per_update: int) -> Stage:
    """The stage that begins at this version: twice the last one, or about the updates that a spent one used."""
    left = schedule.updates - version
    if not schedule.stages:
        return Stage(0, version, min(FIRST_STAGE, left), 0)
    last = schedule.stages[-1]
    used = version - last.first_update
    planned = math.ceil(HEADROOM * used) if was_spent else math.ceil(GROWTH * last.planned_updates)
    first_prompt = last.first_prompt + last.planned_updates * per_update
    return Stage(last.generation_batch + 1, version, min(planned, left), first_prompt)
