"""Which policies of a run are known to be good, and since which one it has collapsed: from rewards and evaluations.

Reward is that of rollouts, so it tells about the policy that made them and not about the one that learns from them. It
is known for a whole generation batch as soon as that is made: a collapse is found before the batch is learned from.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stalewise.staleness.collapse import CollapseDetector


@dataclass(frozen=True, slots=True)
class Trouble:
    """A collapse: `bad_version` is the first policy that is known to be bad, `good_versions` are known to be good."""

    reason: str
    bad_version: int
    best: float
    value: float
    good_versions: frozenset[int] = frozenset()

    def describe(self) -> str:
        """Say it in words."""
        return f"{self.reason} at version {self.bad_version} ({self.value:.3g}, best {self.best:.3g})"


@dataclass(frozen=True, slots=True)
class Judgement:
    """What is known so far. `good_versions` never holds a version from the trouble on."""

    trouble: Trouble | None
    good_versions: frozenset[int]


def judge_rewards(curve: Iterable[tuple[int, float]], detector: CollapseDetector) -> Judgement:
    """Judge policies by the rewards of their rollouts: pairs of version and mean reward, one for each update.

    Rewards that are not known are passed over: that is the verifier's trouble, not the policy's.

    >>> curve = [(0, 0.4)] * 8 + [(8, 0.9)] * 8 + [(16, 0.1)] * 8
    >>> found = judge_rewards(curve, CollapseDetector(smoothing=4, window=4))
    >>> found.trouble.bad_version, sorted(found.good_versions)
    (16, [0, 8])
    """
    good: dict[int, bool] = {}
    below_version = 0
    for version, reward in curve:
        if math.isnan(reward):
            continue
        before, detector = detector, detector.observe(reward)
        if detector.below_since is not None and before.below_since is None:
            below_version = version
        if detector.collapse is not None:
            found = detector.collapse
            good_versions = frozenset(v for v, is_good in good.items() if is_good and v < below_version)
            trouble = Trouble("the reward fell", below_version, found.best, found.value, good_versions)
            return Judgement(trouble, good_versions)
        good[version] = detector.below_since is None
    return Judgement(None, frozenset(version for version, is_good in good.items() if is_good))


def judge_evaluations(accuracies: Sequence[tuple[int, float]], *, fraction: float, is_over: bool) -> Judgement:
    """Judge policies by held-out accuracy: two evaluations in a row below the line, or the last one of the run.

    >>> judge_evaluations([(0, 0.4), (8, 0.9), (16, 0.1)], fraction=0.5, is_over=True).trouble.bad_version
    16
    >>> judge_evaluations([(0, 0.4), (8, 0.9), (16, 0.1)], fraction=0.5, is_over=False).trouble
    """
    good: set[int] = set()
    best = -math.inf
    below: list[tuple[int, float]] = []
    for version, accuracy in accuracies:
        if accuracy >= fraction * best:
            good.add(version)
            best = max(best, accuracy)
            below = []
        else:  # also where it is not a number
            below.append((version, accuracy))
    certain = 1 if is_over else 2
    if len(below) < certain:
        return Judgement(None, frozenset(good))
    version, accuracy = below[0]
    return Judgement(Trouble("held-out accuracy fell", version, best, accuracy, frozenset(good)), frozenset(good))
