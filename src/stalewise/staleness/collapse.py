"""Collapse of a reward curve, and which policies of a run are good.

A run collapsed at update t if its smoothed reward (or held-out accuracy) at t is below half of its best value so far
and does not return to that half within a window, or if a value is not finite. "Half" is measured from `floor`, the
reward of a useless policy.

`assess` decides by statistical tests which policies are bad, for the collapse guard. Its scores are held-out accuracies
and rewards of rollouts. A reward scores the policy that generated the rollouts, not the one that is trained on them. It
is known as soon as a generation batch is complete: so a policy is assessed before training on its rollouts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from statistics import NormalDist
from typing import Literal


@dataclass(frozen=True, slots=True)
class Collapse:
    """When and how a run collapsed."""

    update: int  # index of the first value below the line, not of the one at which the collapse was certain
    reason: Literal["below half of best", "not finite"]
    best: float  # best smoothed value before; NaN where there was none yet
    value: float  # smoothed value at `update`


@dataclass(frozen=True, slots=True)
class CollapseDetector:
    """Reads a curve value by value; `observe` returns the next state."""

    smoothing: int = 8  # values in the rolling mean
    window: int = 32  # values within which a run may recover
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
        """The bound below which a value counts towards a collapse; −inf until a value is above the floor."""
        rise = self.best - self.floor
        return self.floor + self.fraction * rise if rise > 0 else -math.inf

    def observe(self, value: float) -> CollapseDetector:
        """The state after one more value. A collapse is final."""
        if self.collapse is not None:
            return self
        if not math.isfinite(value):
            best = self.best if self.best > -math.inf else math.nan
            return replace(self, seen=self.seen + 1, collapse=Collapse(self.seen, "not finite", best, value))
        recent = (*self.recent, value)[-self.smoothing :]
        after = replace(self, recent=recent, seen=self.seen + 1)
        # One lucky value at the start must not become the best: the mean counts once it is over a full window.
        return after if len(recent) < self.smoothing else after._compare(sum(recent) / len(recent), self.seen)

    def _compare(self, smoothed: float, index: int) -> CollapseDetector:
        if smoothed >= self.line:
            return replace(self, best=max(self.best, smoothed), below_since=None, below_value=math.nan)
        if self.below_since is None:
            return replace(self, below_since=index, below_value=smoothed)
        if index - self.below_since < self.window:
            return self
        return replace(self, collapse=Collapse(self.below_since, "below half of best", self.best, self.below_value))


RISK = 0.05  # probability of calling a steady run bad, over all of its scores
LAST_RISK = 0.2  # the same for the last evaluation, which no later score can clear
INTERVAL = 2 * NormalDist().inv_cdf(0.975)  # width of a 95% interval in standard errors


@dataclass(frozen=True, slots=True)
class PolicyScore:
    """Reward or accuracy of some policies, with its standard error, and how many `updates` depend on them."""

    versions: tuple[int, ...]
    updates: int
    value: float
    error: float
    is_last: bool = False

    @property
    def lower_bound(self) -> float:
        """Lower end of the 95% interval. The best score is chosen by it, so that the luckiest one is not chosen."""
        return self.value - INTERVAL / 2 * self.error

    def is_significantly_below(self, best: PolicyScore, fraction: float, comparisons: int) -> bool:
        """Whether the score is below `fraction` of the best, at a risk that is shared by all comparisons."""
        risk = LAST_RISK if self.is_last else RISK / comparisons
        error = max(self.error, best.error)  # the error of few rewards may be underestimated by chance
        margin = NormalDist().inv_cdf(1 - risk / 2) * math.hypot(error, fraction * best.error)
        return self.value + margin < fraction * best.value


@dataclass(frozen=True, slots=True)
class Degradation:
    """A significant loss of score; `bad_version` is the first policy that is worse than an earlier one."""

    reason: str
    bad_version: int
    best: float = math.nan
    value: float = math.nan

    def describe(self) -> str:
        """One phrase for a message."""
        numbers = "" if math.isnan(self.best) else f" ({self.value:.3f}, and it was {self.best:.3f})"
        return f"{self.reason} at version {self.bad_version}{numbers}"


@dataclass(frozen=True, slots=True)
class Assessment:
    """Which versions are good and which are poor; versions without a score are in no set."""

    degradation: Degradation | None = None
    good: frozenset[int] = frozenset()
    poor: frozenset[int] = frozenset()
    best: frozenset[int] = frozenset()  # a degradation always comes after these versions

    def __or__(self, other: Assessment) -> Assessment:
        """Combine two kinds of scores: a policy that is poor by one of them is not good."""
        both = [assessment.degradation for assessment in (self, other) if assessment.degradation is not None]
        earliest = min(both, key=lambda degradation: degradation.bad_version, default=None)
        poor = self.poor | other.poor
        return Assessment(earliest, (self.good | other.good) - poor, poor, self.best | other.best)


def assess(scores: Iterable[PolicyScore], *, fraction: float, window: int, reason: str) -> Assessment:
    """Find policies that score significantly less than `fraction` of the best so far.

    It is a degradation when `window` consecutive updates depend on such policies; a better policy in between resets the
    count. Unknown scores (failures of the verifier) are skipped. While the best score is not above 0, none is poor.
    """
    good, poor = set[int](), set[int]()
    best = PolicyScore((), 0, 0.0, 0.0)
    below: list[PolicyScore] = []
    degradation: Degradation | None = None
    known = [score for score in scores if not math.isnan(score.value + score.error)]
    for comparisons, score in enumerate(known):
        is_poor = best.lower_bound > 0 and score.value < fraction * best.value
        (poor if is_poor else good).update(score.versions)
        if not (is_poor and score.is_significantly_below(best, fraction, comparisons)):
            below = []
            best = max(best, score, key=lambda candidate: candidate.lower_bound)
            continue
        below.append(score)
        if sum(low_score.updates for low_score in below) >= window:
            degradation = Degradation(reason, below[0].versions[0], best.value, below[0].value)
            break
    return Assessment(degradation, frozenset(good), frozenset(poor), frozenset(best.versions))


def scores_from_rewards(rewards: Sequence[tuple[int, float, float]], window: int) -> list[PolicyScore]:
    """Pool the rewards of updates: by the version that generated their rollouts, then until `window` updates are full.

    Each update is given as the version that generated its rollouts, their mean reward and its standard error.
    """
    scores, pool = list[PolicyScore](), list[tuple[int, float, float]]()
    for _, updates in groupby(rewards, key=lambda update: update[0]):
        pool += updates
        if len(pool) >= window:
            scores += _pooled(pool)
            pool = []
    return scores + _pooled(pool)


def _pooled(updates: Sequence[tuple[int, float, float]]) -> list[PolicyScore]:
    known = [(reward, error) for _, reward, error in updates if not math.isnan(reward + error)]
    if not known:
        return []
    versions = tuple(sorted({version for version, _, _ in updates}))
    value = sum(reward for reward, _ in known) / len(known)
    return [PolicyScore(versions, len(updates), value, math.hypot(*(error for _, error in known)) / len(known))]
