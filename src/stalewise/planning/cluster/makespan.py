"""Formulas for the time of a schedule on a cluster. `simulation` checks them request by request.

A device with n requests in flight makes a step of a + b·n seconds, in which each gets one token. A generation batch
then takes a·(steps) + b·(tokens of a device): waiting for the longest response, and work.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from stalewise.errors import ConfigError
from stalewise.planning.cluster.hardware import DAY, HOUR, Arrangement, Cluster, split
from stalewise.planning.cluster.lengths import cumulative


@dataclass(frozen=True, slots=True)
class ScheduleOutcome:
    """Times and traffic of a schedule. Idle is the share of time in which a side does not work."""

    name: str
    updates_per_generation: int
    worst_age: int
    generating: int  # devices
    learning: int
    is_split: bool  # or all devices do both, in turns
    seconds: float
    stage_seconds: float
    generate_seconds: float
    learn_seconds: float
    switch_seconds: float
    learner_idle: float
    generator_idle: float
    network_bytes_per_day: float
    disk_bytes_per_day: float


def outcome(
    cluster: Cluster, arrangement: Arrangement, seconds: float, generate: float, learn: float
) -> ScheduleOutcome:
    """Outcome of a schedule from its total time and the working time of each side."""
    schedule, transfer = arrangement.schedule, cluster.transfer
    batches = schedule.generation_batches
    rollouts = schedule.updates * cluster.learning.rollouts_per_update * transfer.bytes_per_rollout
    weights = batches * transfer.weights_bytes * arrangement.generating
    checkpoints = schedule.updates // cluster.failures.checkpoint_every * cluster.failures.checkpoint_bytes
    return ScheduleOutcome(
        name=arrangement.name,
        updates_per_generation=schedule.updates_per_generation,
        worst_age=schedule.worst_age,
        generating=arrangement.generating,
        learning=arrangement.learning,
        is_split=arrangement.way != "in turns",
        seconds=seconds,
        stage_seconds=seconds / batches,
        generate_seconds=generate,
        learn_seconds=learn,
        switch_seconds=batches * transfer.switch_seconds,
        learner_idle=1.0 - learn / seconds,
        generator_idle=1.0 - generate / seconds,
        network_bytes_per_day=(weights + rollouts) * DAY / seconds,
        disk_bytes_per_day=(checkpoints + rollouts) * DAY / seconds,
    )


def generation_seconds(cluster: Cluster, devices: int, requests: int) -> float:
    """Time of one generation batch without failures: to the longest response, or of the device with the most tokens."""
    lengths, generation = cluster.lengths, cluster.generation
    fixed, slope = generation.seconds_per_step, generation.seconds_per_token
    each = requests / devices
    longest = fixed * _steps(cluster, devices, requests) + slope * each * lengths.mean
    if requests <= devices * generation.slots and devices > 1:
        largest_normal = NormalDist().inv_cdf((devices - 0.375) / (devices + 0.25))  # of `devices` values, after Blom
        most_tokens = each * lengths.mean + largest_normal * lengths.deviation() * math.sqrt(each)
        longest = max(longest, fixed * lengths.longest(max(1.0, each)) + slope * most_tokens)
    return max(generation.seconds_per_batch + longest, requests * cluster.transfer.seconds_per_rollout)


def _steps(cluster: Cluster, devices: int, requests: int) -> float:
    """Steps until the last response ends: the longest, or the longest residual after full slots until none wait."""
    lengths, slots = cluster.lengths, devices * cluster.generation.slots
    if requests <= slots:
        return lengths.longest(requests)
    full = requests * lengths.mean / slots - lengths.mean_residual()
    return max(lengths.longest(requests), full + lengths.longest_residual(slots))


def update_seconds(cluster: Cluster, devices: int) -> float:
    """Time of one update without failures, with its share of the checkpoints."""
    learning = cluster.learning
    work = cluster.tokens_per_update / (learning.tokens_per_second * devices)
    return work + learning.seconds_per_update + cluster.checkpoint_seconds / cluster.failures.checkpoint_every


def with_failures(cluster: Cluster, devices: int, seconds: float, lost: float) -> float:
    """Time of `seconds` of work if each failure costs `lost` seconds of it and the time to recover.

    Repeated work can fail again: W = seconds/(1 − Λ·lost), and W·(1 + Λ·recovery) with recovery.
    """
    rate = cluster.failures.per_device_hour * devices / HOUR
    if rate * lost >= 1.0:
        raise ConfigError(
            f"{devices} devices fail every {1.0 / rate:.3g} s and each time {lost:.3g} s of work are lost: "
            "no run gets through; lower failures.per_device_hour or failures.checkpoint_every"
        )
    return seconds / (1.0 - rate * lost) * (1.0 + rate * cluster.failures.recovery_seconds)


def predict(cluster: Cluster, arrangement: Arrangement) -> ScheduleOutcome:
    """Outcome of a schedule by formula."""
    schedule = arrangement.schedule
    switch = cluster.transfer.switch_seconds
    sizes = [len(schedule.updates_of(0)), len(schedule.updates_of(schedule.generation_batches - 1))]
    generate, learn = ([side(cluster, arrangement, size) for size in sizes] for side in (_generate, _learn))
    before_last = schedule.generation_batches - 1
    worked_generating = before_last * generate[0] + generate[1]
    worked_learning = before_last * learn[0] + learn[1]
    if arrangement.way == "in turns":
        seconds = worked_generating + worked_learning + (before_last + 1) * switch
    elif arrangement.way == "beside":
        between = max(0, before_last - 1) * max(switch + generate[0], learn[0])
        last = max(switch + generate[1], learn[0]) if before_last else 0.0
        seconds = switch + generate[0] + between + last + learn[1]
    else:
        stages = [_streamed(cluster, arrangement, *one) for one in zip(sizes, generate, learn, strict=True)]
        seconds = before_last * stages[0] + stages[1] + (before_last + 1) * switch
    return outcome(cluster, arrangement, seconds, worked_generating, worked_learning)


def _generate(cluster: Cluster, arrangement: Arrangement, updates: int) -> float:
    devices, requests = arrangement.generating, updates * cluster.learning.rollouts_per_update
    seconds = generation_seconds(cluster, devices, requests)
    full = requests > devices * cluster.generation.slots
    in_flight = cluster.lengths.mean_residual() * cluster.generation.slots / cluster.generation.tokens_per_second
    # One device's requests in flight restart: others share the work if more wait; otherwise all wait for it.
    return with_failures(cluster, devices, seconds, in_flight / devices if full else seconds / 2.0)


def _learn(cluster: Cluster, arrangement: Arrangement, updates: int) -> float:
    each = update_seconds(cluster, arrangement.learning)
    lost = each * min(cluster.failures.checkpoint_every, cluster.schedule.updates) / 2.0
    return with_failures(cluster, arrangement.learning, updates * each, lost)


def _streamed(cluster: Cluster, arrangement: Arrangement, updates: int, generate: float, learn: float) -> float:
    """Time of a stage in which the trainer follows the generator: the longest wait of an update, and all work after it.

    If all requests find a slot at once, responses end in order of length, and the last updates get the long ones.
    Otherwise they end at an even rate, and the trainer waits for the first update's rollouts or for the last one's,
    which were in flight to the end and are long.
    """
    lengths, generation = cluster.lengths, cluster.generation
    rollouts, devices = cluster.learning.rollouts_per_update, arrangement.generating
    in_flight = min(updates * rollouts, devices * generation.slots)
    refilled = updates * rollouts > in_flight
    grid, survival = lengths.grid, lengths.survival
    alive = np.ones_like(survival) if refilled else survival
    per_step = generation.seconds_per_step + generation.seconds_per_token * alive * in_flight / devices
    clock = generation.seconds_per_batch + cumulative(per_step) * grid[1]
    if refilled:
        first = generation.seconds_per_batch + lengths.renewal(rollouts / in_flight) * float(per_step[0])
        in_flight_mean = min(float(lengths.most), 2.0 * lengths.mean_residual())
        last = (in_flight_mean + lengths.prompt) / (lengths.mean + lengths.prompt)
        return max(generate + last * learn / updates, first + learn)
    shorter = np.arange(updates, dtype=np.float64) / updates  # share of responses that end before those of an update
    length = np.interp(shorter, 1.0 - survival, grid)
    ready = np.append(np.interp(length[1:], grid, clock), generate)
    beyond = lengths.mean - np.interp(length, grid, cumulative(survival) * grid[1])  # E[max(0, L − length)]
    left = (length + lengths.prompt) * (1.0 - shorter) + beyond
    return float(np.max(ready + learn * left / left[0]))


def best_splits(cluster: Cluster) -> list[Arrangement]:
    """Each schedule that generates beside learning, with its fastest split of devices; none on one device."""
    splits = [split(cluster, generating) for generating in range(1, cluster.devices)]
    return [min(ways, key=lambda one: predict(cluster, one).seconds) for ways in zip(*splits, strict=True)]
