"""Verdicts, and when a difference counts.

"Beyond doubt" means that the 95% interval over seeds (Student's t, paired by seed) lies on one side. A single seed has
no interval: a difference then counts if it exceeds 0.05, and the page says that it rests on one seed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from experiments.lab.results import Mean

SHOWN, NOT_SHOWN, OPPOSITE, UNKNOWN = "shown", "not shown", "opposite", "cannot say"
COLLAPSE_RULE = (
    "the mean of two evaluations of held-out accuracy falls below half of its best and does not come back within "
    "three, or the run ends below it, or an update is not finite"
)
ONE_SEED = 0.05  # threshold for a difference with one seed only
EQUAL = 0.02  # accuracies closer than this count as equal


@dataclass(frozen=True, slots=True)
class Finding:
    """A verdict, our number, and further lines for the page."""

    verdict: str
    ours: str
    lines: list[str] = field(default_factory=list)


def missing(what: str) -> Finding:
    """A finding for results that lack `what`."""
    return Finding(UNKNOWN, f"missing: {what}")


def above(mean: Mean, bound: float = 0.0) -> bool:
    """Whether a mean is above a bound beyond doubt."""
    return mean.low > bound if mean.seeds > 1 else mean.value > bound + ONE_SEED


def below(mean: Mean, bound: float = 0.0) -> bool:
    """Whether a mean is below a bound beyond doubt."""
    return mean.high < bound if mean.seeds > 1 else mean.value < bound - ONE_SEED


def judged(shown: bool, opposite: bool) -> str:
    """The verdict as text."""
    return SHOWN if shown else OPPOSITE if opposite else NOT_SHOWN


def signed(mean: Mean) -> str:
    """A difference with its interval."""
    tail = f" [{mean.low:+.3f}, {mean.high:+.3f}]" if mean.seeds > 1 else " (one seed)"
    return f"{mean.value:+.3f}{tail}"
