"""Predicts the time of a run on a cluster by formulas, and simulates the run request by request to check them.

Each response has a random length, devices have slots, and steps take longer the more requests are in flight. Failures
are random while a side works: the requests in flight on the device restart, or the trainer returns to its last
checkpoint. A failed side stops until it has recovered. One seed determines everything.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from stalewise.errors import ConfigError
from stalewise.planning.cluster_hardware import DAY, HOUR, Arrangement, Cluster, cumulative, split


@dataclass(frozen=True, slots=True)
class ScheduleOutcome:
    """Times and traffic of a schedule. Idle is the share of time in which a side does not work."""

    name: str
    updates_per_generation: int
    worst_age: int
    generating: int  # devices
    learning: int
    is_split: bool  # False: all devices generate and learn in turns
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
        stages = [_streamed(cluster, arrangement, *stage) for stage in zip(sizes, generate, learn, strict=True)]
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
    return [min(ways, key=lambda way: predict(cluster, way).seconds) for ways in zip(*splits, strict=True)]


class _Device:
    """Requests in flight on one device. They advance together: each gets one token per step."""

    def __init__(self, fixed: float, slope: float) -> None:
        self.fixed, self.slope = fixed, slope
        self.now = self.steps = 0.0
        self.in_flight: list[tuple[float, float]] = []  # (step of its end, length)

    def advance(self, now: float) -> None:
        if self.in_flight:
            self.steps += (now - self.now) / (self.fixed + self.slope * len(self.in_flight))
        self.now = now

    def take(self, length: float) -> None:
        heapq.heappush(self.in_flight, (self.steps + length, length))

    def finish(self) -> float:
        """Finish the request that ends next; `next_end` must be now."""
        self.steps, length = heapq.heappop(self.in_flight)
        return length

    def restart(self) -> None:
        self.in_flight = sorted((self.steps + length, length) for _, length in self.in_flight)

    def next_end(self) -> float:
        if not self.in_flight:
            return math.inf
        left = max(0.0, self.in_flight[0][0] - self.steps)
        return self.now + left * (self.fixed + self.slope * len(self.in_flight))


@dataclass(frozen=True, slots=True)
class SimulatedBatch:
    """One generation batch: lengths in order of their end, and seconds from its start to each end."""

    lengths: list[float]
    ended: list[float]
    seconds: float


def generate_batch(cluster: Cluster, devices: int, requests: int, random: np.random.Generator) -> SimulatedBatch:
    """Generate one batch: a free slot on any device takes the next request."""
    generation, failures = cluster.generation, cluster.failures
    workers = [_Device(generation.seconds_per_step, generation.seconds_per_token) for _ in range(devices)]
    waiting: list[float] = cluster.lengths.draw(requests, random).tolist()
    for index in range(min(requests, devices * generation.slots)):
        workers[index % devices].take(waiting.pop())
    events = [(device.next_end(), number) for number, device in enumerate(workers)]
    heapq.heapify(events)
    failure_times = _failure_times(failures.per_device_hour * devices / HOUR, random)
    next_failure, downtime = next(failure_times), generation.seconds_per_batch
    lengths: list[float] = []
    ended: list[float] = []
    while len(ended) < requests:
        now, number = events[0]
        if next_failure < now:
            failed = int(random.integers(devices))
            workers[failed].advance(next_failure)
            workers[failed].restart()
            downtime += failures.recovery_seconds
            next_failure += next(failure_times)
            events = [(device.next_end(), number) for number, device in enumerate(workers)]
            heapq.heapify(events)
            continue
        device = workers[number]
        device.now = now
        lengths.append(device.finish())
        ended.append(now + downtime)
        if waiting:
            device.take(waiting.pop())
        heapq.heapreplace(events, (device.next_end(), number))
    return SimulatedBatch(lengths, ended, max(ended[-1], requests * cluster.transfer.seconds_per_rollout))


def _failure_times(rate: float, random: np.random.Generator) -> Iterator[float]:
    while True:
        yield float(random.exponential(1.0 / rate)) if rate else math.inf


class _SimulatedTrainer:
    """Takes updates one after the other; counts the work since its last checkpoint."""

    def __init__(self, cluster: Cluster, devices: int, random: np.random.Generator) -> None:
        self.cluster, self.devices, self.updates = cluster, devices, 0
        self.now = self.since_checkpoint = 0.0
        self.worked = 0.0  # includes repeated work and downtimes
        self.failure_times = _failure_times(cluster.failures.per_device_hour * devices / HOUR, random)
        self.next_failure = next(self.failure_times)

    def update(self, ready: float, tokens: float) -> None:
        """One update, as soon as its rollouts are ready."""
        learning, failures = self.cluster.learning, self.cluster.failures
        work = own = tokens / (learning.tokens_per_second * self.devices) + learning.seconds_per_update
        self.updates += 1
        is_checkpoint = self.updates % failures.checkpoint_every == 0
        if is_checkpoint:
            work = own = own + self.cluster.checkpoint_seconds
        taken = 0.0
        while self.next_failure < work:
            taken += self.next_failure + failures.recovery_seconds
            work, self.next_failure = self.since_checkpoint + own, next(self.failure_times)
        self.next_failure -= work
        self.worked += taken + work
        self.now = max(self.now, ready) + taken + work
        self.since_checkpoint = 0.0 if is_checkpoint else self.since_checkpoint + own


def simulate(cluster: Cluster, arrangement: Arrangement, seed: int = 0) -> ScheduleOutcome:
    """Simulate a whole schedule, batch by batch."""
    random = np.random.default_rng(seed)
    trainer = _SimulatedTrainer(cluster, arrangement.learning, random)
    schedule, rollouts = arrangement.schedule, cluster.learning.rollouts_per_update
    learned = [0.0]  # time of the version after each number of generation batches
    generator_free = generated = 0.0
    for number in range(schedule.generation_batches):
        updates = len(schedule.updates_of(number))
        version_ready = learned[max(0, number - schedule.lag)]
        start = max(generator_free, version_ready) + cluster.transfer.switch_seconds
        batch = generate_batch(cluster, arrangement.generating, updates * rollouts, random)
        generator_free = start + batch.seconds
        generated += batch.seconds
        for at in range(0, len(batch.ended), rollouts):
            tokens = sum(batch.lengths[at : at + rollouts]) + rollouts * cluster.lengths.prompt
            streamed = arrangement.way == "streamed"
            trainer.update(start + batch.ended[at + rollouts - 1] if streamed else generator_free, tokens)
        learned.append(trainer.now)
    return outcome(cluster, arrangement, trainer.now, generated, trainer.worked)
