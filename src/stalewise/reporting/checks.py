"""What a record has to be like to be of use. A file may be damaged, and the page says so instead of failing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Check = Callable[[Any], bool]

LARGEST = 2**53  # up to here a whole number is the same as a float


def is_whole(value: Any) -> bool:
    """A whole number that a float can hold."""
    return isinstance(value, int) and abs(value) <= LARGEST


def is_number(value: Any) -> bool:
    """A finite number.

    >>> is_number(0.5), is_number(math.nan), is_number(None)
    (True, False, False)
    """
    return is_whole(value) or (isinstance(value, float) and math.isfinite(value))


def is_text(value: Any) -> bool:
    """Words."""
    return isinstance(value, str)


def is_interval(value: Any) -> bool:
    """A mean with the ends of its interval; all of them may be NaN, which is "unknown"."""
    return isinstance(value, dict) and all(
        is_whole(value.get(end)) or isinstance(value.get(end), float) for end in ("value", "low", "high")
    )


def is_intervals(value: Any) -> bool:
    """Intervals by name."""
    return isinstance(value, dict) and all(map(is_interval, value.values()))


def is_counts(value: Any) -> bool:
    """Whole numbers by name."""
    return isinstance(value, dict) and all(map(is_whole, value.values()))


def is_table(value: Any) -> bool:
    """A record within a record."""
    return isinstance(value, dict)


def is_by_prompt(value: Any) -> bool:
    """Scores prompt by prompt: three lists side by side, or nothing."""
    if not isinstance(value, dict) or not value:
        return value == {}
    prompts, score, scored = (_list(value.get(key)) for key in ("prompt_ids", "score", "scored"))
    is_even = 0 < len(prompts) == len(score) == len(scored)
    return is_even and all(map(is_text, prompts)) and all(map(is_number, score)) and all(map(is_whole, scored))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def is_sources(value: Any) -> bool:
    """The generation batches that a run of `stalewise learn` was given."""
    return isinstance(value, list) and all(is_table(batch) and is_whole(batch.get("updates")) for batch in value)


@dataclass(frozen=True, slots=True)
class Shape:
    """What the records of one file have: always, if at all, and where they tell of one kind of event."""

    needed: Mapping[str, Check]
    optional: Mapping[str, Check] = field(default_factory=dict)
    of_event: Mapping[str, Mapping[str, Check]] = field(default_factory=dict)

    def fits(self, record: Any) -> bool:
        """Whether a record can be used."""
        if not isinstance(record, dict):
            return False
        needed = {**self.needed, **self.of_event.get(str(record.get("event")), {})}
        return all(check(record.get(key)) for key, check in needed.items()) and all(
            check(record[key]) for key, check in self.optional.items() if record.get(key) is not None
        )


METRIC = Shape({"update": is_whole})
JOURNAL = Shape(
    {"time": is_number, "event": is_text, "seconds": is_number},
    optional={"generation_batch": is_whole, "first": is_whole},
    of_event={"learn": {"first": is_whole, "stop": is_whole}},
)
EVALUATION = Shape(
    {
        "version": is_whole,
        "task": is_text,
        "prompts": is_whole,
        "samples": is_whole,
        "accuracy": is_interval,
        "pass_at": is_intervals,
        "response_length": is_number,
        "truncated_fraction": is_number,
        "verifier_errors": is_whole,
        "seconds": is_number,
    },
    optional={"verifier_error_kinds": is_counts, "by_prompt": is_by_prompt},
)
STAGE = Shape({"generation_batch": is_whole}, optional={"planned_updates": is_whole, "ended": is_table})
ROLLBACK = Shape(
    {"time": is_number, "from_version": is_whole, "to_version": is_whole, "reason": is_text},
    optional={"learning_rate_factor": is_number},
)
HOLDER = Shape({"pid": is_whole, "host": is_text, "since": is_text})
