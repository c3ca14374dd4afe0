"""A run on a cluster, simulated request by request: what the formulas of `staleness.makespan` are checked against.

Responses have lengths of their own, devices have slots, and steps take longer the more requests are in flight. Failures
come at random while a side works: the requests in flight on the device begin again, or the learner goes back to its
last checkpoint. A side that has failed stands still until it has recovered. All that is random comes from one seed.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from stalewise.planning.cluster.hardware import HOUR, Arrangement, Cluster
from stalewise.planning.cluster.makespan import Outcome, outcome


class _Device:
    """Requests in flight on one device. They advance together, so `steps` counts the tokens that each has got."""

    def __init__(self, fixed: float, slope: float) -> None:
        self.fixed, self.slope = fixed, slope
        self.now = self.steps = 0.0
        self.in_flight: list[tuple[float, float]] = []  # (steps at its end, length)

    def advance(self, now: float) -> None:
        if self.in_flight:
            self.steps += (now - self.now) / (self.fixed + self.slope * len(self.in_flight))
        self.now = now

    def take(self, length: float) -> None:
        heapq.heappush(self.in_flight, (self.steps + length, length))

    def finish(self) -> float:
        """End the shortest request in flight; `next_end` must be now."""
        self.steps, length = heapq.heappop(self.in_flight)
        return length

    def begin_again(self) -> None:
        self.in_flight = sorted((self.steps + length, length) for _, length in self.in_flight)

    def next_end(self) -> float:
        if not self.in_flight:
            return math.inf
        left = max(0.0, self.in_flight[0][0] - self.steps)
        return self.now + left * (self.fixed + self.slope * len(self.in_flight))


@dataclass(frozen=True, slots=True)
class Batch:
    """One generation batch: lengths in the order in which they ended, and when that was, from its start on."""

    lengths: list[float]
    ended: list[float]
    seconds: float


def generate_batch(cluster: Cluster, devices: int, requests: int, random: np.random.Generator) -> Batch:
    """Generate one batch: a free slot takes the next request, whichever device it is on."""
    generation, failures = cluster.generation, cluster.failures
    crowd = [_Device(generation.seconds_per_step, generation.seconds_per_token) for _ in range(devices)]
    waiting: list[float] = cluster.lengths.draw(requests, random).tolist()
    for place in range(min(requests, devices * generation.slots)):
        crowd[place % devices].take(waiting.pop())
    events = [(device.next_end(), number) for number, device in enumerate(crowd)]
    heapq.heapify(events)
    breaks = _breaks(failures.per_device_hour * devices / HOUR, random)
    next_break, standstill = next(breaks), generation.seconds_per_batch
    lengths: list[float] = []
    ended: list[float] = []
    while len(ended) < requests:
        now, number = events[0]
        if next_break < now:
            broken = int(random.integers(devices))
            crowd[broken].advance(next_break)
            crowd[broken].begin_again()
            standstill += failures.recovery_seconds
            next_break += next(breaks)
            events = [(device.next_end(), number) for number, device in enumerate(crowd)]
            heapq.heapify(events)
            continue
        device = crowd[number]
        device.now = now
        lengths.append(device.finish())
        ended.append(now + standstill)
        if waiting:
            device.take(waiting.pop())
        heapq.heapreplace(events, (device.next_end(), number))
    return Batch(lengths, ended, max(ended[-1], requests * cluster.transfer.seconds_per_rollout))


def _breaks(rate: float, random: np.random.Generator) -> Iterator[float]:
    while True:
        yield float(random.exponential(1.0 / rate)) if rate else math.inf


@dataclass(slots=True)
class _Learner:
    """Makes updates one after the other; remembers what it has worked since its last checkpoint."""

    cluster: Cluster
    devices: int
    random: np.random.Generator
    now: float = 0.0
    worked: float = 0.0  # with what was done again, and with standstills
    since_checkpoint: float = 0.0
    updates: int = 0
    next_break: float = field(init=False)

    def __post_init__(self) -> None:
        self.next_break = self._draw()

    def _draw(self) -> float:
        return next(_breaks(self.cluster.failures.per_device_hour * self.devices / HOUR, self.random))

    def update(self, ready: float, tokens: float) -> None:
        """One update, as soon as its rollouts are there."""
        learning, failures = self.cluster.learning, self.cluster.failures
        work = own = tokens / (learning.tokens_per_second * self.devices) + learning.seconds_per_update
        self.updates += 1
        is_checkpoint = self.updates % failures.checkpoint_every == 0
        if is_checkpoint:
            work = own = own + self.cluster.checkpoint_seconds
        taken = 0.0
        while self.next_break < work:
            taken += self.next_break + failures.recovery_seconds
            work, self.next_break = self.since_checkpoint + own, self._draw()
        self.next_break -= work
        self.worked += taken + work
        self.now = max(self.now, ready) + taken + work
        self.since_checkpoint = 0.0 if is_checkpoint else self.since_checkpoint + own


def simulate(cluster: Cluster, arrangement: Arrangement, seed: int = 0) -> Outcome:
    """Run a whole schedule through, batch by batch."""
    random = np.random.default_rng(seed)
    learner = _Learner(cluster, arrangement.learning, random)
    schedule, rollouts = arrangement.schedule, cluster.learning.rollouts_per_update
    learned = [0.0]  # when the version after so many generation batches was there
    generator_free = generated = 0.0
    for number in range(schedule.generation_batches):
        updates = len(schedule.updates_of(number))
        version_there = learned[max(0, number - schedule.lag)]
        start = max(generator_free, version_there) + cluster.transfer.switch_seconds
        batch = generate_batch(cluster, arrangement.generating, updates * rollouts, random)
        generator_free = start + batch.seconds
        generated += batch.seconds
        for tokens, ended in _parts(cluster, batch, rollouts):
            ready = start + ended if arrangement.way == "streamed" else generator_free
            learner.update(ready, tokens)
        learned.append(learner.now)
    return outcome(cluster, arrangement, learner.now, generated, learner.worked)


def _parts(cluster: Cluster, batch: Batch, rollouts: int) -> Sequence[tuple[float, float]]:
    """For each update, its tokens, and when its last rollout ended."""
    prompts = rollouts * cluster.lengths.prompt
    starts = range(0, len(batch.ended), rollouts)
    return [(sum(batch.lengths[at : at + rollouts]) + prompts, batch.ended[at + rollouts - 1]) for at in starts]
