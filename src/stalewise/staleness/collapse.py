"""Collapse, defined so that a program can find it.

A run has collapsed at update t if its smoothed reward (or held-out accuracy) at t is below half of its best value so
far and does not come back to that half within a window; or if a value is not finite. "Half" is measured from `floor`,
the reward of a useless policy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
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
