"""Which policies of a run are known to be good, and since which one it is worse than it was, beyond doubt.

Two kinds of evidence: held-out accuracy, and the reward of rollouts. The reward tells about the policy that made them
and not about the one that learns from them, and is known for a whole generation batch as soon as that is made: so a
policy is judged before anything is learned from its rollouts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Z = 1.96  # 95% intervals


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a policy is worth, with its interval; `updates` is how much of a run rests on it.

    `is_last`: nothing comes after it that could clear a doubt.
    """

    version: int
    updates: int
    value: float
    low: float
    high: float
    is_last: bool = False

    def is_worse(self, best: Evidence, fraction: float) -> bool:
        """Whether it is below that fraction of the best: beyond doubt, or rather than not if it is the last.

        That is by more than the interval of the difference, or by more than its standard error.
        """
        doubt = math.hypot(self.high - self.value, fraction * (best.value - best.low))
        return best.low > 0 and self.value + (doubt / Z if self.is_last else doubt) < fraction * best.value


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
    """What is known so far. `good_versions` never holds a version from the trouble on."""

    trouble: Trouble | None
    good_versions: frozenset[int]


def judge(evidence: Iterable[Evidence], *, fraction: float, window: int, reason: str) -> Judgement:
    """Find trouble: a policy that is worth less than `fraction` of the best so far.

    It is certain when policies that `window` updates rest on are so, one after the other; a better one in between
    clears them. Where nothing was ever above 0 there is nothing to lose. Unknown values are passed over: they are the
    verifier's trouble, not the policy's.

    >>> fair, poor = Evidence(8, 8, 0.9, 0.88, 0.92), Evidence(16, 8, 0.5, 0.45, 0.55)
    >>> found = judge([fair, poor], fraction=0.9, window=8, reason="accuracy fell")
    >>> found.trouble.describe(), sorted(found.good_versions)
    ('accuracy fell at version 16 (0.500, and it was 0.900)', [8])
    """
    good: set[int] = set()
    best = Evidence(0, 0, 0.0, 0.0, 0.0)
    below: list[Evidence] = []
    for one in evidence:
        if math.isnan(one.value):
            continue
        if one.is_worse(best, fraction):
            below.append(one)
            if sum(found.updates for found in below) >= window:
                first = below[0]
                trouble = Trouble(reason, first.version, best.value, first.value)
                return Judgement(trouble, frozenset(version for version in good if version < first.version))
            continue
        below = []
        good.add(one.version)
        best = max(best, one, key=lambda found: found.low)
    return Judgement(None, frozenset(good))


def rewards_as_evidence(rewards: Sequence[tuple[int, float, float]]) -> list[Evidence]:
    """Put the updates on rollouts of one version together: version, mean reward and its standard error of each.

    >>> found = rewards_as_evidence([(0, 0.4, 0.03), (0, 0.6, 0.04), (2, 0.8, 0.0)])
    >>> [(one.version, one.updates, one.value, round(one.high, 3)) for one in found]
    [(0, 2, 0.5, 0.549), (2, 1, 0.8, 0.8)]
    """
    by_version: dict[int, list[tuple[float, float]]] = {}
    for version, reward, error in rewards:
        if not math.isnan(reward + error):
            by_version.setdefault(version, []).append((reward, error))
    found: list[Evidence] = []
    for version, pairs in by_version.items():
        value = sum(reward for reward, _ in pairs) / len(pairs)
        margin = Z * math.hypot(*(error for _, error in pairs)) / len(pairs)
        found.append(Evidence(version, len(pairs), value, value - margin, value + margin))
    return found
