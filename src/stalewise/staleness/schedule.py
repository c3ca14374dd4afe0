"""When each update's rollouts are made, and by which policy: synchronous, staged and pipelined schedules.

A generation batch serves `updates_per_generation` (µ) updates. With `lag` L, generation batch g is made while the
trainer is L batches behind it: by policy version (g − L)·µ, or by version 0 at the start of the run. A version is a
number of optimizer updates. The age of a rollout is computed at use: age = update − version.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True)
class Step:
    """The origin of one update's rollouts."""

    update: int
    generation_batch: int
    version: int  # policy that made the batch
    age: int  # update − version


@dataclass(frozen=True, slots=True)
class Schedule:
    """T updates, µ of them on each generation batch, which is made `lag` batches ahead.

    The last three methods do nothing here: they are for schedules whose stages are decided during training
    (`StageSchedule`).
    """

    updates: int
    updates_per_generation: int
    lag: int = 0
    is_open_ended: ClassVar[bool] = False

    @property
    def begins_at(self) -> int:
        """The first update of this schedule; earlier updates belong to the schedule of another run."""
        return 0

    def __post_init__(self) -> None:
        for name, least in (("updates", 1), ("updates_per_generation", 1), ("lag", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"schedule {name} is {getattr(self, name)}; expected at least {least}")

    @property
    def generation_batches(self) -> int:
        """Number of generation batches; the last may serve fewer updates."""
        return -(-self.updates // self.updates_per_generation)

    @property
    def worst_age(self) -> int:
        """S, the largest age of any rollout when it is used.

        Batch g ≥ L has age L·µ at its first update and (L + 1)·µ − 1 at its last. In a shorter run all rollouts come
        from version 0, and the last update is T − 1.
        """
        return min((self.lag + 1) * self.updates_per_generation, self.updates) - 1

    def at(self, update: int) -> Step:
        """The step of an update, counted from 0."""
        if not 0 <= update < self.updates:
            raise IndexError(f"update is {update}; expected 0 to {self.updates - 1}")
        generation_batch = update // self.updates_per_generation
        version = self.version_of(generation_batch)
        return Step(update, generation_batch, version, update - version)

    def version_of(self, generation_batch: int) -> int:
        """The policy version that makes this generation batch."""
        return max(0, generation_batch - self.lag) * self.updates_per_generation

    def updates_of(self, generation_batch: int) -> range:
        """The updates that learn from this generation batch."""
        first = generation_batch * self.updates_per_generation
        return range(first, min(first + self.updates_per_generation, self.updates))

    def prompts_of(self, generation_batch: int, per_update: int) -> range:
        """The prompts of a generation batch, as indices in the task's order."""
        updates = self.updates_of(generation_batch)
        return range(updates.start * per_update, updates.stop * per_update)

    def steps(self) -> Iterator[Step]:
        """All steps in order."""
        return map(self.at, range(self.updates))

    def begin_stage(self, version: int, *, was_spent: bool, per_update: int) -> tuple[Schedule, BatchSpan] | None:
        """The schedule with the stage that begins at this version, and that stage; None where none begins."""
        return None

    def forget_after(self, version: int) -> Schedule:
        """The schedule without stages that begin after this version."""
        return self

    def spent(self, ess: Sequence[float], batch_budget: float, bound: float) -> dict[str, Any] | None:
        """Why the current stage ends before its rollouts are used up; None while it continues."""
        return None


@dataclass(frozen=True, slots=True)
class BatchSpan:
    """A generation batch with rollouts for `planned_updates` updates, made by the policy of the first of them."""

    generation_batch: int
    first_update: int
    planned_updates: int

    @property
    def version(self) -> int:
        """The policy version that makes the batch."""
        return self.first_update


@dataclass(frozen=True, slots=True)
class ListedSchedule(Schedule):
    """A schedule whose generation batches are listed, in the order of their updates."""

    stages: tuple[BatchSpan, ...] = ()

    @property
    def generation_batches(self) -> int:
        """Number of generation batches so far."""
        return len(self.stages)

    def at(self, update: int) -> Step:
        """The step of an update, counted from 0."""
        begun = sum(stage.first_update <= update for stage in self.stages)
        if not begun or update >= self.updates:
            raise IndexError(f"update is {update}; no stage of a run of {self.updates} updates has begun there")
        version = self.stages[begun - 1].version
        return Step(update, begun - 1, version, update - version)

    def version_of(self, generation_batch: int) -> int:
        """The policy version that makes this generation batch."""
        return self.stages[generation_batch].version

    def updates_of(self, generation_batch: int) -> range:
        """The updates that learn from this batch: the planned ones, but none after the next batch began."""
        first, after = self.stages[generation_batch], self.stages[generation_batch + 1 :]
        end = min(
            first.first_update + first.planned_updates, self.updates, *(batch.first_update for batch in after[:1])
        )
        return range(first.first_update, end)


@dataclass(frozen=True, slots=True)
class PastBatch(BatchSpan):
    """A generation batch of the schedule that a run had before it was forked."""

    made_by: int

    @property
    def version(self) -> int:
        """The policy version that made the batch."""
        return self.made_by


@dataclass(frozen=True, slots=True)
class ForkedSchedule(Schedule):
    """The generation batches of an earlier schedule, followed by a new schedule with batches of its own.

    `updates` counts all updates; µ and the lag hold for the new batches. `first_prompt` is the first prompt of the
    first new batch.
    """

    past: tuple[PastBatch, ...] = ()
    first_prompt: int = 0

    @property
    def begins_at(self) -> int:
        """The first update of the new schedule."""
        return self.past[-1].first_update + self.past[-1].planned_updates if self.past else 0

    @property
    def _rest(self) -> Schedule:
        return Schedule(self.updates - self.begins_at, self.updates_per_generation, self.lag)

    @property
    def generation_batches(self) -> int:
        """Number of generation batches, past ones included."""
        return len(self.past) + self._rest.generation_batches

    @property
    def worst_age(self) -> int:
        """The largest age of any rollout when it is used."""
        ages = [batch.first_update + batch.planned_updates - 1 - batch.version for batch in self.past]
        return max([self._rest.worst_age, *ages])

    def at(self, update: int) -> Step:
        """The step of an update, counted from 0."""
        if not 0 <= update < self.updates:
            raise IndexError(f"update is {update}; expected 0 to {self.updates - 1}")
        if update >= self.begins_at:
            generation_batch = len(self.past) + self._rest.at(update - self.begins_at).generation_batch
        else:
            generation_batch = sum(batch.first_update <= update for batch in self.past) - 1
        version = self.version_of(generation_batch)
        return Step(update, generation_batch, version, update - version)

    def version_of(self, generation_batch: int) -> int:
        """The policy version that makes this generation batch."""
        if generation_batch < len(self.past):
            return self.past[generation_batch].version
        return self.begins_at + self._rest.version_of(generation_batch - len(self.past))

    def updates_of(self, generation_batch: int) -> range:
        """The updates that learn from this generation batch."""
        if generation_batch < len(self.past):
            batch = self.past[generation_batch]
            return range(batch.first_update, batch.first_update + batch.planned_updates)
        rest = self._rest.updates_of(generation_batch - len(self.past))
        return range(rest.start + self.begins_at, rest.stop + self.begins_at)

    def prompts_of(self, generation_batch: int, per_update: int) -> range:
        """The prompts of a generation batch, as indices in the task's order; a past one is never made again."""
        if generation_batch < len(self.past):
            return range(0)
        rest = self._rest.prompts_of(generation_batch - len(self.past), per_update)
        return range(rest.start + self.first_prompt, rest.stop + self.first_prompt)


def synchronous(updates: int, updates_per_generation: int = 4) -> Schedule:
    """Generate, take µ = 4 updates, generate again: the usual schedule of other libraries."""
    return Schedule(updates, updates_per_generation)


def staged(updates: int, stages: int = 4) -> Schedule:
    """A few large stages: µ = updates / stages, rounded up, so the last stage may be shorter or missing."""
    if not 1 <= stages <= updates:
        raise ValueError(f"schedule stages is {stages}; expected 1 to {updates}, the number of updates")
    return Schedule(updates, -(-updates // stages))


def pipelined(updates: int, updates_per_generation: int, lag: int = 1) -> Schedule:
    """Generation runs in parallel with training, `lag` generation batches ahead."""
    return Schedule(updates, updates_per_generation, lag)
