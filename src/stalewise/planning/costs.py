"""What a probe measured, and what a run of any schedule costs by it: seconds, bytes on disk."""

from __future__ import annotations

from dataclasses import dataclass

from stalewise.config import RunConfig


@dataclass(frozen=True, slots=True)
class Phase:
    """G_upd = ‖Δθ‖/η over consecutive updates, counted from 1: its mean and its standard deviation."""

    first: int
    last: int
    mean: float
    spread: float


@dataclass(frozen=True, slots=True)
class Probe:
    """What a short real run measured. NaN or None where it had nothing to measure."""

    updates: int
    phases: list[Phase]
    reward_mean: float
    reward_variance_within: float  # mean over groups of the variance inside a group
    reward_variance_between: float  # variance of the groups' means
    teaching_share: float  # groups whose rewards differ
    tokens_per_second: float  # of generation
    generation_sizes: tuple[int, int]  # rollouts of the smallest and of the largest generation batch that was timed
    seconds_per_generation: float  # what each generation costs besides its rollouts: loading the policy, mostly
    seconds_per_rollout: float
    seconds_per_update: float
    tokens_per_update: float
    seconds_per_switch: float  # from generating to learning and back: learner and checkpoint
    seconds_to_start: float
    seconds_per_evaluated_response: float
    peak_memory_bytes: int | None
    bytes_per_rollout: float
    bytes_per_checkpoint: int


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds and bytes that a run comes to."""

    learn: float
    generate: float
    switch: float
    evaluate: float
    rollout_bytes: float
    checkpoint_bytes: float

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.learn + self.generate + self.switch + self.evaluate

    @property
    def disk_bytes(self) -> float:
        """Rollouts, which are all kept, and the checkpoints that are there at a time."""
        return self.rollout_bytes + self.checkpoint_bytes


def costs(probe: Probe, config: RunConfig, *, updates: int, updates_per_generation: int) -> Costs:
    """What a run costs that differs from the config in T and µ alone.

    T·learn + rollouts·slope + generations·fixed + stops·switch + evaluations, a stop being where a checkpoint is due.
    """
    rollouts = updates * config.batch.prompts * config.batch.group_size
    generations = -(-updates // updates_per_generation)
    stops = places(updates, updates_per_generation, config.checkpoints.every, config.evaluation.every)
    evaluations = 1 + places(updates, config.evaluation.every)
    responses = evaluations * config.evaluation.prompts * config.evaluation.samples
    kept = min(config.checkpoints.keep + 1, stops + 1)  # and the one that makes the next rollouts
    return Costs(
        learn=updates * probe.seconds_per_update,
        generate=generations * probe.seconds_per_generation + rollouts * probe.seconds_per_rollout,
        switch=probe.seconds_to_start + stops * probe.seconds_per_switch,
        evaluate=responses * probe.seconds_per_evaluated_response,
        rollout_bytes=rollouts * probe.bytes_per_rollout,
        checkpoint_bytes=kept * probe.bytes_per_checkpoint,
    )


def places(updates: int, *periods: int) -> int:
    """How many of 1..updates are the last or a multiple of a period; a period of 0 has no multiples.

    >>> places(10, 4, 5)  # 4, 5, 8, 10
    4
    """
    return len({updates, *(place for period in periods if period for place in range(period, updates + 1, period))})
