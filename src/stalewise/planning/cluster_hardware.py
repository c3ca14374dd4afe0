"""A cluster, described by measured rates and response lengths (docs/cluster.md), and schedules arranged on it."""

from __future__ import annotations

import dataclasses
import math
from functools import cached_property
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass

from stalewise.staleness.likelihood import Array, log_ndtr
from stalewise.staleness.schedule import Schedule, pipelined, staged, synchronous

POINTS = 4097  # of the grid of lengths for integrals
BISECTIONS = 80
RENEWAL_POINTS = 512

Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
CHECKED = ConfigDict(extra="forbid", allow_inf_nan=False)  # of a table of the cluster file


@dataclass(frozen=True, config=CHECKED)
class ResponseLengths:
    """Tokens of responses: `mean` and limit `most` after truncation; `sigma` of the logarithm before it."""

    mean: Positive
    sigma: Positive
    most: Count
    prompt: NotNegative = 0.0  # tokens of a prompt, which the trainer reads too

    @model_validator(mode="after")
    def _check_mean(self) -> Self:
        if self.mean >= self.most:
            raise ValueError(f"mean is {self.mean} and most is {self.most}: expected a mean below the limit")
        return self

    @cached_property
    def location(self) -> float:
        """Mean of the logarithm before truncation, by bisection: the mean after it is the measured one."""
        low, high = math.log(self.mean) - self.sigma**2, math.log(self.most) + 8.0 * self.sigma
        for _ in range(BISECTIONS):
            middle = (low + high) / 2.0
            is_below = _integral(_survival(self.grid, middle, self.sigma)) * self.most < self.mean
            low, high = (middle, high) if is_below else (low, middle)
        return (low + high) / 2.0

    @cached_property
    def grid(self) -> Array:
        """Lengths from 0 to the limit at which `survival` and `residual_survival` are evaluated."""
        return np.linspace(0.0, self.most, POINTS)

    @cached_property
    def survival(self) -> Array:
        """Share of responses longer than each length of the grid; truncated ones end at the last."""
        return _survival(self.grid, self.location, self.sigma)

    @cached_property
    def residual_survival(self) -> Array:
        """The same for residuals of responses in flight."""
        below = cumulative(self.survival)
        return 1.0 - below / below[-1]

    @cached_property
    def _renewals(self) -> Array:
        """Expected responses that a slot has finished after each step: M(x) = F(x) + ∫ M(x − y) dF(y)."""
        grid = np.linspace(0.0, self.most, RENEWAL_POINTS + 1)
        shares = np.diff(1.0 - _survival(grid, self.location, self.sigma))
        shares[-1] += 1.0 - shares.sum()  # truncated
        ended = np.zeros(RENEWAL_POINTS + 1)
        for at in range(1, RENEWAL_POINTS + 1):
            ended[at] = float(shares[:at] @ (1.0 + ended[at - 1 :: -1]))
        return ended

    def draw(self, count: int, random: np.random.Generator) -> Array:
        """Random lengths in whole tokens."""
        return np.clip(np.ceil(random.lognormal(self.location, self.sigma, count)), 1.0, self.most)

    def longest(self, count: float) -> float:
        """Expected longest of `count` responses: E[max] = ∫ 1 − F(x)^count."""
        return _integral(1.0 - (1.0 - self.survival) ** count) * self.most

    def longest_residual(self, count: float) -> float:
        """Expected longest residual of `count` responses in flight."""
        return _integral(1.0 - (1.0 - self.residual_survival) ** count) * self.most

    def mean_residual(self) -> float:
        """Mean residual of a response in flight, and mean of its part so far: E[L²]/(2·E[L])."""
        return _integral(self.residual_survival) * self.most

    def deviation(self) -> float:
        """Standard deviation."""
        return math.sqrt(max(0.0, self.mean * (2.0 * self.mean_residual() - self.mean)))

    def renewal(self, count: float) -> float:
        """Steps after which a slot has finished `count` responses on average, one after the other."""
        ended, step = self._renewals, self.most / RENEWAL_POINTS
        if count <= ended[-1]:
            return float(np.interp(count, ended, step * np.arange(len(ended))))
        return self.most + (count - float(ended[-1])) * self.mean


def cumulative(values: Array) -> Array:
    """Integral up to each point of a grid with spacing 1."""
    return np.concatenate([[0.0], np.cumsum((values[1:] + values[:-1]) / 2.0)])


def _survival(grid: Array, location: float, sigma: float) -> Array:
    return np.exp(log_ndtr((location - np.log(np.maximum(grid, 1e-9))) / sigma))


def _integral(values: Array) -> float:
    """Integral over a grid from 0 to 1."""
    return float(np.mean((values[1:] + values[:-1]) / 2.0))


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
    return [
        Arrangement(name, schedule, "in turns", cluster.devices, cluster.devices)
        for name, schedule in schedules.items()
    ]


def split(cluster: Cluster, generating: int) -> list[Arrangement]:
    """The schedules that generate beside learning, with `generating` devices and the rest for learning."""
    plans = cluster.schedule
    beside = pipelined(plans.updates, min(plans.updates, plans.pipelined_updates_per_generation), plans.lag)
    rest = cluster.devices - generating
    small, large = (arrangement.schedule for arrangement in in_turns(cluster))
    return [
        Arrangement("pipelined", beside, "beside", generating, rest),
        Arrangement("streamed", small, "streamed", generating, rest),
        Arrangement("streamed staged", large, "streamed", generating, rest),
    ]
