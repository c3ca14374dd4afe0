"""A cluster described by measured rates (docs/cluster.md explains them), and arrangements of schedules on it."""

from __future__ import annotations

import dataclasses
from typing import Literal, Self

from pydantic import model_validator
from pydantic.dataclasses import dataclass

from stalewise.planning.cluster.lengths import CHECKED, Count, NotNegative, Positive, ResponseLengths
from stalewise.staleness.schedule import Schedule, pipelined, staged, synchronous

HOUR, DAY = 3600.0, 86400.0


@dataclass(frozen=True, slots=True, config=CHECKED)
class GenerationRates:
    """Generation on one device: tokens per second with all slots taken and, if measured, with one."""

    tokens_per_second: Positive
    slots: Count
    tokens_per_second_alone: float | None = None  # None: the rate does not depend on the requests in flight
    seconds_per_batch: NotNegative = 0.0

    @model_validator(mode="after")
    def _check_rates(self) -> Self:
        least, most = self.tokens_per_second / self.slots, self.tokens_per_second
        if self.tokens_per_second_alone is not None and not least <= self.tokens_per_second_alone <= most:
            raise ValueError(
                f"tokens_per_second_alone is {self.tokens_per_second_alone}; expected {least:g}, the share of one of "
                f"{self.slots} requests, to {most:g}, the rate of all of them"
            )
        return self

    @property
    def seconds_per_token(self) -> float:
        """Slope b: seconds that each request in flight adds to a step. Each gets one token per step."""
        if self.tokens_per_second_alone is None or self.slots == 1:
            return 1.0 / self.tokens_per_second
        full = self.slots / self.tokens_per_second
        return (full - 1.0 / self.tokens_per_second_alone) / (self.slots - 1)

    @property
    def seconds_per_step(self) -> float:
        """Fixed part a of a step: mostly reading the weights."""
        return self.slots / self.tokens_per_second - self.slots * self.seconds_per_token


@dataclass(frozen=True, slots=True, config=CHECKED)
class LearningRates:
    """Learning on one device, and the rollouts of an update. Rates grow with the number of devices."""

    tokens_per_second: Positive
    rollouts_per_update: Count
    seconds_per_update: NotNegative = 0.0


@dataclass(frozen=True, slots=True, config=CHECKED)
class ScheduleSettings:
    """Updates of the run, and the schedules to compare: synchronous (µ), staged (stages) and pipelined (µ and lag)."""

    updates: Count
    updates_per_generation: Count = 4
    stages: Count = 4
    pipelined_updates_per_generation: Count = 4
    lag: Count = 1

    @model_validator(mode="after")
    def _check_stages(self) -> Self:
        staged(self.updates, self.stages)  # raises if there are more stages than updates
        return self


@dataclass(frozen=True, slots=True, config=CHECKED)
class TransferRates:
    """Sizes of weights and rollouts, bandwidths, and the time an engine takes to wake."""

    weights_bytes: NotNegative
    network_bytes_per_second: Positive  # of each device; each receives the weights
    disk_bytes_per_second: Positive
    bytes_per_rollout: NotNegative
    wake_up_seconds: NotNegative = 0.0

    @property
    def switch_seconds(self) -> float:
        """Time per generation batch to send the policy to the engines and wake them."""
        return self.weights_bytes / self.network_bytes_per_second + self.wake_up_seconds

    @property
    def seconds_per_rollout(self) -> float:
        """Time to move and store one rollout: a limit for generation on any number of devices."""
        return self.bytes_per_rollout / min(self.disk_bytes_per_second, self.network_bytes_per_second)


@dataclass(frozen=True, slots=True, config=CHECKED)
class FailureRates:
    """Failures of devices, the time to recover, and checkpoints."""

    per_device_hour: NotNegative = 0.0
    recovery_seconds: NotNegative = 0.0
    checkpoint_bytes: NotNegative = 0.0
    checkpoint_every: Count = 64  # updates


@dataclass(frozen=True, slots=True, config=CHECKED)
class Cluster:
    """Identical devices, their rates, and the run to plan."""

    devices: Count
    generation: GenerationRates
    lengths: ResponseLengths
    learning: LearningRates
    schedule: ScheduleSettings
    transfer: TransferRates
    failures: FailureRates = dataclasses.field(default_factory=FailureRates)

    @property
    def tokens_per_update(self) -> float:
        """Prompt and response tokens of an update."""
        return self.learning.rollouts_per_update * (self.lengths.mean + self.lengths.prompt)

    @property
    def checkpoint_seconds(self) -> float:
        """Time to write one checkpoint."""
        return self.failures.checkpoint_bytes / self.transfer.disk_bytes_per_second


@dataclasses.dataclass(frozen=True, slots=True)
class Arrangement:
    """A schedule, and the devices of each side.

    `in turns`: all devices generate, then all learn. `beside`: devices are split; the trainer takes whole generation
    batches, made `lag` ahead. `streamed`: devices are split; the trainer takes rollouts of the current generation batch
    as soon as there are enough for an update.
    """

    name: str
    schedule: Schedule
    way: Literal["in turns", "beside", "streamed"]
    generating: int
    learning: int


def in_turns(cluster: Cluster) -> list[Arrangement]:
    """The synchronous and the staged schedule, with all devices for both sides."""
    plans = cluster.schedule
    schedules = {
        "synchronous": synchronous(plans.updates, min(plans.updates, plans.updates_per_generation)),
        "staged": staged(plans.updates, plans.stages),
    }
    return [Arrangement(name, one, "in turns", cluster.devices, cluster.devices) for name, one in schedules.items()]


def split(cluster: Cluster, generating: int) -> list[Arrangement]:
    """The schedules that generate beside learning, with `generating` devices for that and the rest for learning."""
    plans = cluster.schedule
    beside = pipelined(plans.updates, min(plans.updates, plans.pipelined_updates_per_generation), plans.lag)
    rest = cluster.devices - generating
    small, large = (one.schedule for one in in_turns(cluster))
    return [
        Arrangement("pipelined", beside, "beside", generating, rest),
        Arrangement("streamed", small, "streamed", generating, rest),
        Arrangement("streamed staged", large, "streamed", generating, rest),
    ]
