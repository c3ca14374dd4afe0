"""When each update's rollouts were made, and by which policy: synchronous, staged and pipelined as one idea.

A generation batch serves `updates_per_generation` (µ) updates. With `lag` L, generation batch g is made while the
learner is L batches behind it, that is by the policy version (g − L)·µ, or by version 0 at the start of the run. A
version is a number of optimizer updates; age is computed at use: age = update − version.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Step:
    """Where one update's rollouts come from."""

    update: int
    generation_batch: int
    version: int  # policy that made the batch
    age: int  # update − version


@dataclass(frozen=True, slots=True)
class Schedule:
    """T updates, µ of them on each generation batch, which is made `lag` batches ahead.

    >>> [(s.generation_batch, s.version, s.age) for s in Schedule(updates=6, updates_per_generation=2, lag=1).steps()]
    [(0, 0, 0), (0, 0, 1), (1, 0, 2), (1, 0, 3), (2, 2, 2), (2, 2, 3)]
    """

    updates: int
    updates_per_generation: int
    lag: int = 0

    def __post_init__(self) -> None:
        for name, value, least in (
            ("updates", self.updates, 1),
            ("updates_per_generation", self.updates_per_generation, 1),
            ("lag", self.lag, 0),
        ):
            if value < least:
                raise ValueError(f"schedule {name} is {value}; expected at least {least}")

    @property
    def generation_batches(self) -> int:
        """How often generation runs; the last batch may serve fewer updates."""
        return -(-self.updates // self.updates_per_generation)

    @property
    def worst_age(self) -> int:
        """S, the largest age that any update of the run will meet.

        Batch g ≥ L is at age L·µ when its first update comes, and µ − 1 older at its last: (L + 1)·µ − 1. A run shorter
        than that ends before: all of its rollouts are of version 0, and its last update is T − 1.
        """
        return min((self.lag + 1) * self.updates_per_generation, self.updates) - 1

    def at(self, update: int) -> Step:
        """The step with this index, counted from 0."""
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
        """Prompts of a generation batch, in the task's order, at so many per update."""
        updates = self.updates_of(generation_batch)
        return range(updates.start * per_update, updates.stop * per_update)

    def steps(self) -> Iterator[Step]:
        """All steps in order."""
        return map(self.at, range(self.updates))


def synchronous(updates: int, updates_per_generation: int = 4) -> Schedule:
    """Generate, learn µ = 4 updates, generate again: what others do."""
    return Schedule(updates, updates_per_generation)


def staged(updates: int, stages: int = 4) -> Schedule:
    """A few large stages: µ = updates / stages, rounded up, so the last may be shorter, or not needed.

    >>> staged(updates=4096, stages=4).updates_per_generation
    1024
    """
    if not 1 <= stages <= updates:
        raise ValueError(f"schedule stages is {stages}; expected 1 to {updates}, the number of updates")
    return Schedule(updates, -(-updates // stages))


def pipelined(updates: int, updates_per_generation: int, lag: int = 1) -> Schedule:
    """Generation runs beside learning, `lag` generation batches ahead."""
    return Schedule(updates, updates_per_generation, lag)
