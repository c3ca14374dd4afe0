"""Collapse, defined so that a program can find it.

A run has collapsed at update t if its smoothed reward (or held-out accuracy) at t is below half of its best value so
far and does not come back to that half within a window; or if a value is not finite. "Half" is measured from `floor`,
the reward of a useless policy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Literal


@dataclass(frozen=True, slots=True)
class Collapse:
    """When and how a run collapsed.

    `update` is the index of the first value below the line, not of the one at which it was certain; it is an update
    where one value per update is observed.
    """

    update: int
    reason: Literal["below half of best", "not finite"]
    best: float  # best smoothed value before; NaN where there was none yet
    value: float  # smoothed value at `update`


@dataclass(frozen=True, slots=True)
class CollapseDetector:
    """Reads one value after the other; `observe` returns the next state, so a run can be replayed from any point.

    >>> curve = [0.4] * 8 + [0.9] * 8 + [0.1] * 8
    >>> find_collapse(curve, smoothing=4, window=4).update
    18
    """

    smoothing: int = 8  # values in the rolling mean
    window: int = 32  # values in which a run may come back
    fraction: float = 0.5
    floor: float = 0.0
    recent: tuple[float, ...] = ()
    best: float = -math.inf
    seen: int = 0
    below_since: int | None = None
    below_value: float = math.nan
    collapse: Collapse | None = None

    def __post_init__(self) -> None:
        if self.smoothing < 1 or self.window < 1 or not 0 < self.fraction < 1:
            raise ValueError(
                f"smoothing, window and fraction are {self.smoothing}, {self.window} and {self.fraction}; "
                "expected at least 1, at least 1, and between 0 and 1"
            )

    @property
    def line(self) -> float:
        """Below this the run is in danger; −inf as long as it never rose above the floor."""
        rise = self.best - self.floor
        return self.floor + self.fraction * rise if rise > 0 else -math.inf

    def observe(self, value: float) -> CollapseDetector:
        """The state after one more value. A collapse, once found, stays."""
        if self.collapse is not None:
            return self
        if not math.isfinite(value):
            best = self.best if self.best > -math.inf else math.nan
            return replace(self, seen=self.seen + 1, collapse=Collapse(self.seen, "not finite", best, value))
        recent = (*self.recent, value)[-self.smoothing :]
        after = replace(self, recent=recent, seen=self.seen + 1)
        # One lucky value at the start must not become the best: the mean counts once it is over a full window.
        return after if len(recent) < self.smoothing else after._judge(sum(recent) / len(recent), self.seen)

    def _judge(self, smoothed: float, index: int) -> CollapseDetector:
        if smoothed >= self.line:
            return replace(self, best=max(self.best, smoothed), below_since=None, below_value=math.nan)
        if self.below_since is None:
            return replace(self, below_since=index, below_value=smoothed)
        if index - self.below_since < self.window:
            return self
        found = Collapse(self.below_since, "below half of best", self.best, self.below_value)
        return replace(self, collapse=found)


def find_collapse(
    values: Iterable[float], *, smoothing: int = 8, window: int = 32, fraction: float = 0.5, floor: float = 0.0
) -> Collapse | None:
    """The collapse in a curve, or None.

    A curve that ends below the line before its window is over has not collapsed by the definition; the detector's
    `below_since` tells since when it is in danger.
    """
    detector = CollapseDetector(smoothing=smoothing, window=window, fraction=fraction, floor=floor)
    for value in values:
        detector = detector.observe(value)
    return detector.collapse


# Which policies of a run are known to be good, and since which one it is worse than it was, beyond doubt.
# Two kinds of evidence: held-out accuracy, and the reward of rollouts. The reward tells about the policy that made them
# and not about the one that learns from them, and is known for a whole generation batch as soon as that is made: so a
# policy is judged before anything is learned from its rollouts.

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
