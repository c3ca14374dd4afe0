"""Counts what went wrong while scoring, so that a report can say it instead of hiding it in a mean."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from stalewise.types import Reward


@dataclass(frozen=True)
class ErrorCounts:
    """How many responses were scored, how many failed, by kind of error, with the first example of each kind.

    The kind is what stands before the colon: "ValueError", "worker died", "timeout after 5.0 s". Counts of two
    batches add up.

    >>> nan = float("nan")
    >>> counts = count_errors([Reward(1.0), Reward(nan, error="ValueError: no digits"), Reward(0.0)])
    >>> print(counts)
    1 of 3 responses could not be scored: 1 × ValueError (no digits)
    >>> print(counts + counts)
    2 of 6 responses could not be scored: 2 × ValueError (no digits)
    """

    total: int = 0
    kinds: Mapping[str, int] = field(default_factory=dict)
    examples: Mapping[str, str] = field(default_factory=dict)

    @property
    def failed(self) -> int:
        """How many responses could not be scored."""
        return sum(self.kinds.values())

    def __add__(self, other: ErrorCounts) -> ErrorCounts:
        kinds = Counter(self.kinds) + Counter(other.kinds)
        return ErrorCounts(self.total + other.total, dict(kinds), {**other.examples, **self.examples})

    def __str__(self) -> str:
        if not self.failed:
            return f"all {self.total} responses were scored"
        most_first = sorted(self.kinds.items(), key=lambda pair: (-pair[1], pair[0]))
        shown = (f"{count} × {kind}{self._detail(kind)}" for kind, count in most_first)
        return f"{self.failed} of {self.total} responses could not be scored: {', '.join(shown)}"

    def _detail(self, kind: str) -> str:
        detail = self.examples[kind].removeprefix(kind).removeprefix(": ")
        return f" ({detail})" if detail else ""


def count_errors(rewards: Iterable[Reward]) -> ErrorCounts:
    """Count the errors of a batch by kind."""
    total, kinds, examples = 0, Counter[str](), dict[str, str]()
    for reward in rewards:
        total += 1
        if reward.error:
            kind = reward.error.partition(":")[0]
            kinds[kind] += 1
            examples.setdefault(kind, reward.error)
    return ErrorCounts(total, dict(kinds), examples)
