"""What a cluster is, in measured rates: enough to say how long a schedule takes on it.

docs/cluster.md says what each number is and where it comes from. `makespan` has the formulas.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from stalewise.planning.cluster.lengths import Lengths
from stalewise.staleness.law import require_count, require_positive
from stalewise.staleness.schedule import Schedule, pipelined, staged, synchronous

HOUR, DAY = 3600.0, 86400.0
FORBID: dict[str, Any] = {"extra": "forbid"}  # an unknown key of the TOML file is an error


def _require_not_negative(**values: float) -> None:
    for name, value in values.items():
        if not 0.0 <= value < math.inf:
            raise ValueError(f"{name} must be 0 or more and finite, got {value}")


@dataclass(frozen=True, slots=True)
class Generation:
    """One device that generates: tokens per second with all slots taken and, if that was measured, with one."""

    tokens_per_second: float
    slots: int
    tokens_per_second_alone: float | None = None  # None: the rate does not depend on how many are in flight
    seconds_per_batch: float = 0.0

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID

    def __post_init__(self) -> None:
        require_positive("tokens_per_second", self.tokens_per_second)
        require_count("slots", self.slots)
        _require_not_negative(seconds_per_batch=self.seconds_per_batch)
        alone = self.tokens_per_second_alone
        if alone is not None and not self.tokens_per_second / self.slots <= alone <= self.tokens_per_second:
            raise ValueError(
                f"tokens_per_second_alone is {alone}; expected {self.tokens_per_second / self.slots:g}, the share of "
                f"one of {self.slots} requests, to {self.tokens_per_second:g}, the rate of all of them"
            )

    @property
    def seconds_per_token(self) -> float:
        """Slope b: seconds that each request in flight adds to a step, in which each gets one token."""
        if self.tokens_per_second_alone is None or self.slots == 1:
            return 1.0 / self.tokens_per_second
        full = self.slots / self.tokens_per_second
        return (full - 1.0 / self.tokens_per_second_alone) / (self.slots - 1)

    @property
    def seconds_per_step(self) -> float:
        """Fixed part a of a step: what it takes however few requests are in flight (reading the weights, mostly)."""
        return self.slots / self.tokens_per_second - self.slots * self.seconds_per_token


@dataclass(frozen=True, slots=True)
class Learning:
    """One device that learns, and what an update consumes; rates grow with the number of devices."""

    tokens_per_second: float
    rollouts_per_update: int
    seconds_per_update: float = 0.0

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID

    def __post_init__(self) -> None:
        require_positive("tokens_per_second", self.tokens_per_second)
        require_count("rollouts_per_update", self.rollouts_per_update)
        _require_not_negative(seconds_per_update=self.seconds_per_update)


@dataclass(frozen=True, slots=True)
class Plans:
    """Updates of the run, and the schedules to compare: µ of the synchronous, number of stages, µ and lag beside."""

    updates: int
    updates_per_generation: int = 4
    stages: int = 4
    pipelined_updates_per_generation: int = 4
    lag: int = 1

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID

    def __post_init__(self) -> None:
        for name in ("updates", "updates_per_generation", "stages", "pipelined_updates_per_generation", "lag"):
            require_count(name, getattr(self, name))
        staged(self.updates, self.stages)


@dataclass(frozen=True, slots=True)
class Transfer:
    """What moves: weights to the engines, rollouts to the learner and to disk; and how long an engine takes to wake."""

    weights_bytes: float
    network_bytes_per_second: float  # of one device, each of which receives the weights
    disk_bytes_per_second: float
    bytes_per_rollout: float
    wake_up_seconds: float = 0.0

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID

    def __post_init__(self) -> None:
        require_positive("network_bytes_per_second", self.network_bytes_per_second)
        require_positive("disk_bytes_per_second", self.disk_bytes_per_second)
        _require_not_negative(
            weights_bytes=self.weights_bytes,
            bytes_per_rollout=self.bytes_per_rollout,
            wake_up_seconds=self.wake_up_seconds,
        )

    @property
    def switch_seconds(self) -> float:
        """Once per generation batch: the policy goes to the engines, and these get ready."""
        return self.weights_bytes / self.network_bytes_per_second + self.wake_up_seconds

    @property
    def seconds_per_rollout(self) -> float:
        """Moving and storing one rollout: generation is not faster than this, however many devices it has."""
        return self.bytes_per_rollout / min(self.disk_bytes_per_second, self.network_bytes_per_second)


@dataclass(frozen=True, slots=True)
class Failures:
    """How often devices fail, how long it takes until the run goes on, and how far back the last checkpoint lies."""

    per_device_hour: float = 0.0
    recovery_seconds: float = 0.0
    checkpoint_bytes: float = 0.0
    checkpoint_every: int = 64  # updates

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID

    def __post_init__(self) -> None:
        _require_not_negative(
            per_device_hour=self.per_device_hour,
            recovery_seconds=self.recovery_seconds,
            checkpoint_bytes=self.checkpoint_bytes,
        )
        require_count("checkpoint_every", self.checkpoint_every)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Devices that can all do everything, their rates, and the run that is planned."""

    devices: int
    generation: Generation
    lengths: Lengths
    learning: Learning
    schedule: Plans
    transfer: Transfer
    failures: Failures = field(default_factory=Failures)

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID

    def __post_init__(self) -> None:
        require_count("devices", self.devices)

    @property
    def tokens_per_update(self) -> float:
        """Prompt and response tokens that an update reads."""
        return self.learning.rollouts_per_update * (self.lengths.mean + self.lengths.prompt)

    @property
    def checkpoint_seconds(self) -> float:
        """Writing one checkpoint."""
        return self.failures.checkpoint_bytes / self.transfer.disk_bytes_per_second


Way = Literal["in turns", "beside", "streamed"]


@dataclass(frozen=True, slots=True)
class Arrangement:
    """A schedule, and which devices do what.

    `in turns`: all devices generate, then all learn. `beside`: they are split; the learner takes whole generation
    batches, made `lag` ahead. `streamed`: they are split; the learner takes rollouts of the current generation batch as
    soon as there are enough for an update.
    """

    name: str
    schedule: Schedule
    way: Way
    generating: int
    learning: int


def in_turns(cluster: Cluster) -> list[Arrangement]:
    """The synchronous and the staged schedule, both with all devices for both sides."""
    plans = cluster.schedule
    schedules = {
        "synchronous": synchronous(plans.updates, min(plans.updates, plans.updates_per_generation)),
        "staged": staged(plans.updates, plans.stages),
    }
    return [Arrangement(name, one, "in turns", cluster.devices, cluster.devices) for name, one in schedules.items()]


def split(cluster: Cluster, generating: int) -> list[Arrangement]:
    """The schedules that generate beside learning, with so many devices for generation and the others for learning."""
    plans = cluster.schedule
    beside = pipelined(plans.updates, min(plans.updates, plans.pipelined_updates_per_generation), plans.lag)
    rest = cluster.devices - generating
    small, large = (one.schedule for one in in_turns(cluster))
    return [
        Arrangement("pipelined", beside, "beside", generating, rest),
        Arrangement("streamed", small, "streamed", generating, rest),
        Arrangement("streamed staged", large, "streamed", generating, rest),
    ]
