"""Stages that end when their data is spent, and whose sizes are found on the way: nobody has to say µ.

The rollouts of a stage are dealt to updates in random order, so those of the present update are a fair sample of all
that remain, and their effective sample size, measured before the update learns from them, is that of the remainder.
When it falls below a bound, the stage is over. What a stage used tells how much the next one should generate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from stalewise.staleness.schedule import Schedule, Step

WINDOW = 3  # updates; the median over them, since one token of weight can halve the ESS of a single update
FIRST_STAGE = 8  # updates
GROWTH = 2.0  # of a stage after one that was not spent
HEADROOM = 1.25  # over what a spent stage used, so that sizes can rise again while little is made in vain


@dataclass(frozen=True, slots=True)
class Stage:
    """One generation batch: made by version `first_update`, with rollouts for `planned_updates` updates."""

    generation_batch: int
    first_update: int
    planned_updates: int
    first_prompt: int  # in the task's endless order; unused prompts are passed over, so rollout ids are unique


@dataclass(frozen=True, slots=True)
class StageSchedule(Schedule):
    """A schedule that is known as far as its stages have begun.

    >>> stages = (Stage(0, 0, 8, 0), Stage(1, 5, 6, 32))
    >>> schedule = StageSchedule(updates=100, updates_per_generation=100, stages=stages)
    >>> schedule.updates_of(0), schedule.updates_of(1), schedule.at(7).age
    (range(0, 5), range(5, 11), 2)
    """

    stages: tuple[Stage, ...] = ()

    @property
    def generation_batches(self) -> int:
        """How many there are so far."""
        return len(self.stages)

    def at(self, update: int) -> Step:
        """The step with this index, counted from 0."""
        for stage in reversed(self.stages):
            if stage.first_update <= update:
                break
        else:
            raise IndexError(f"update is {update}; no stage has begun")
        return Step(update, stage.generation_batch, stage.first_update, update - stage.first_update)

    def version_of(self, generation_batch: int) -> int:
        """The policy version that makes this generation batch."""
        return self.stages[generation_batch].first_update

    def updates_of(self, generation_batch: int) -> range:
        """The updates that learn from this batch: all it is enough for, or those until the next stage began."""
        stage = self.stages[generation_batch]
        end = min(stage.first_update + stage.planned_updates, self.updates)
        after = self.stages[generation_batch + 1 :]
        return range(stage.first_update, min(end, after[0].first_update) if after else end)

    def prompts_of(self, generation_batch: int, per_update: int) -> range:
        """Prompts of a generation batch, in the task's order."""
        stage = self.stages[generation_batch]
        return range(stage.first_prompt, stage.first_prompt + stage.planned_updates * per_update)


def remaining_ess(ess: Sequence[float]) -> float:
    """Effective sample size of what remains, from those of the stage's updates; NaN where one is not known.

    >>> remaining_ess([1.0, 0.97, 0.2, 0.95])
    0.95
    """
    recent = ess[-WINDOW:]
    return math.nan if not recent or any(map(math.isnan, recent)) else median(recent)


def fresh_ess(ess: Sequence[float]) -> float:
    """Effective sample size of a stage's rollouts when they were new: below 1 where the sampler itself differs."""
    return max(ess[:WINDOW], default=math.nan)


def is_spent(ess: Sequence[float], bound: float) -> bool:
    """Whether a stage with these effective sample sizes is over: they fell below `bound` of what they were.

    What temperature or rounding cost from the start, new rollouts would cost again. Unknown is not fine.

    >>> is_spent([1.0, 0.99, 0.98], 0.9), is_spent([1.0, 0.88, 0.85], 0.9), is_spent([0.5, 0.5, 0.5], 0.9)
    (False, True, False)
    """
    return len(ess) >= WINDOW and not remaining_ess(ess) >= bound * fresh_ess(ess)


def next_stage(schedule: StageSchedule, version: int, *, was_spent: bool, per_update: int) -> Stage:
    """The stage that begins at this version: larger than one that was not spent, else about what it used.

    >>> stages = (Stage(0, 0, 8, 0),)
    >>> schedule = StageSchedule(updates=100, updates_per_generation=100, stages=stages)
    >>> next_stage(schedule, 8, was_spent=False, per_update=4)
    Stage(generation_batch=1, first_update=8, planned_updates=16, first_prompt=32)
    >>> next_stage(schedule, 5, was_spent=True, per_update=4).planned_updates
    7
    """
    left = schedule.updates - version
    if not schedule.stages:
        return Stage(0, version, min(FIRST_STAGE, left), 0)
    last = schedule.stages[-1]
    used = version - last.first_update
    planned = math.ceil(HEADROOM * used) if was_spent else math.ceil(GROWTH * last.planned_updates)
    first_prompt = last.first_prompt + last.planned_updates * per_update
    return Stage(last.generation_batch + 1, version, min(planned, left), first_prompt)
