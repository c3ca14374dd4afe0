"""Which policies of a run are known to be good, and since which one it is worse than it was, beyond doubt.

Two kinds of evidence: held-out accuracy, and the reward of rollouts. The reward tells about the policy that made them
and not about the one that learns from them, and is known for a whole generation batch as soon as that is made: so a
policy is judged before anything is learned from its rollouts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

RISK = 0.05  # that a run which is as good as ever is called bad, over all of its evidence
LAST_RISK = 0.2  # of the same in its last evaluation, after which nothing comes that could clear a doubt
INTERVAL = 2 * NormalDist().inv_cdf(0.975)  # standard errors that a 95% interval is wide


@dataclass(frozen=True, slots=True)
class Evidence:
    """What policies are worth, with its standard error; `updates` is how much of a run rests on it."""

    versions: tuple[int, ...]
    updates: int
    value: float
    error: float
    is_last: bool = False

    @property
    def surely(self) -> float:
        """What they are worth at least: the luckiest of many is not the best."""
        return self.value - INTERVAL / 2 * self.error

    def is_worse(self, best: Evidence, fraction: float, comparisons: int) -> bool:
        """Whether it is below that fraction of the best by more than chance does, in so many comparisons."""
        risk = LAST_RISK if self.is_last else RISK / comparisons
        error = max(self.error, best.error)  # few rewards, by bad luck, also look more alike than they are
        doubt = NormalDist().inv_cdf(1 - risk / 2) * math.hypot(error, fraction * best.error)
        return self.value + doubt < fraction * best.value


@dataclass(frozen=True, slots=True)
class Trouble:
    """`bad_version` is the first policy that is known to be worse than an earlier one was."""

    reason: str
    bad_version: int
    best: float = math.nan
    value: float = math.nan

    def describe(self) -> str:
        """Say it in words."""
        numbers = "" if math.isnan(self.best) else f" ({self.value:.3f}, and it was {self.best:.3f})"
        return f"{self.reason} at version {self.bad_version}{numbers}"


@dataclass(frozen=True, slots=True)
class Judgement:
    """What is known so far; policies of which neither is known are in no set."""

    trouble: Trouble | None = None
    good: frozenset[int] = frozenset()
    poor: frozenset[int] = frozenset()
    best: frozenset[int] = frozenset()  # trouble always comes after them

    def __or__(self, other: Judgement) -> Judgement:
        """What both say together: a policy that one of them calls poor is not good."""
        troubles = [one.trouble for one in (self, other) if one.trouble is not None]
        trouble = min(troubles, key=lambda one: one.bad_version, default=None)
        poor = self.poor | other.poor
        return Judgement(trouble, (self.good | other.good) - poor, poor, self.best | other.best)


def judge(evidence: Iterable[Evidence], *, fraction: float, window: int, reason: str) -> Judgement:
    """Find trouble: policies that are worth less than `fraction` of the best so far.

    It is certain when policies that `window` updates rest on are so, one after the other; a better one in between
    clears them. Where nothing was ever above 0 there is nothing to lose. Unknown values are passed over: they are the
    verifier's trouble, not the policy's.

    >>> fair, poor = Evidence((8,), 8, 0.9, 0.01), Evidence((16,), 8, 0.5, 0.02)
    >>> found = judge([fair, poor], fraction=0.9, window=8, reason="accuracy fell")
    >>> found.trouble.describe(), sorted(found.good)
    ('accuracy fell at version 16 (0.500, and it was 0.900)', [8])
    """
    good: set[int] = set()
    poor: set[int] = set()
    best = Evidence((), 0, 0.0, 0.0)
    below: list[Evidence] = []
    known = [one for one in evidence if not math.isnan(one.value + one.error)]
    for comparisons, one in enumerate(known):
        is_poor = best.surely > 0 and one.value < fraction * best.value
        (poor if is_poor else good).update(one.versions)
        if is_poor and one.is_worse(best, fraction, comparisons):
            below.append(one)
            if sum(found.updates for found in below) >= window:
                trouble = Trouble(reason, below[0].versions[0], best.value, below[0].value)
                return Judgement(trouble, frozenset(good), frozenset(poor), frozenset(best.versions))
            continue
        below = []
        best = max(best, one, key=lambda found: found.surely)
    return Judgement(None, frozenset(good), frozenset(poor), frozenset(best.versions))


def rewards_as_evidence(rewards: Sequence[tuple[int, float, float]], window: int) -> list[Evidence]:
    """Put updates together whose rollouts are of one version, and versions until `window` updates rest on them.

    Each update is given as the version that made its rollouts, their mean reward and its standard error.

    >>> found = rewards_as_evidence([(0, 0.4, 0.03), (0, 0.6, 0.04), (2, 0.8, 0.0), (4, 0.6, 0.0), (6, 0.5, 0.1)], 2)
    >>> [(one.versions, one.updates, one.value, round(one.error, 3)) for one in found]
    [((0,), 2, 0.5, 0.025), ((2, 4), 2, 0.7, 0.0), ((6,), 1, 0.5, 0.1)]
    """
    found: list[Evidence] = []
    held: list[tuple[int, float, float]] = []
    for place, update in enumerate(rewards):
        held.append(update)
        ends_version = place + 1 == len(rewards) or rewards[place + 1][0] != update[0]
        if ends_version and len(held) >= window:
            found += _pooled(held)
            held = []
    return found + _pooled(held)


def _pooled(updates: Sequence[tuple[int, float, float]]) -> list[Evidence]:
    known = [(reward, error) for _, reward, error in updates if not math.isnan(reward + error)]
    if not known:
        return []
    versions = tuple(sorted({version for version, _, _ in updates}))
    value = sum(reward for reward, _ in known) / len(known)
    return [Evidence(versions, len(updates), value, math.hypot(*(error for _, error in known)) / len(known))]
