"""Simulates a run on a cluster request by request, to check the formulas of `makespan`.

Each response has a random length, devices have slots, and steps take longer the more requests are in flight. Failures
come at random while a side works: the device's requests in flight restart, or the trainer returns to its last
checkpoint. A failed side stops until it has recovered. One seed determines everything.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from stalewise.planning.cluster.hardware import HOUR, Arrangement, Cluster
from stalewise.planning.cluster.makespan import ScheduleOutcome, outcome


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
        self.worked = 0.0  # with what was done again, and with downtimes
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
