"""Checks of records read from a run directory: a damaged record is reported and left out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Check = Callable[[Any], bool]

LARGEST = 2**53  # integers up to here are exact as floats


def is_whole(value: Any) -> bool:
    """Whether this is an integer that a float can hold."""
    return isinstance(value, int) and abs(value) <= LARGEST


def is_number(value: Any) -> bool:
    """Whether this is a finite number."""
    return is_whole(value) or (isinstance(value, float) and math.isfinite(value))


def instance_of(kind: type) -> Check:
    """A check for a value of this type."""
    return lambda value: isinstance(value, kind)


is_text, is_table = instance_of(str), instance_of(dict)


def dict_of(check: Check) -> Check:
    """A check for a dict whose values all pass `check`."""
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


def list_of(check: Check) -> Check:
    """A check for a list whose items all pass `check`."""
    return lambda value: isinstance(value, list) and all(map(check, value))


def is_interval(value: Any) -> bool:
    """Whether this is a mean with the ends of its interval; NaN means unknown."""
    return isinstance(value, dict) and all(
        is_whole(value.get(end)) or isinstance(value.get(end), float) for end in ("value", "low", "high")
    )


def is_by_prompt(value: Any) -> bool:
    """Whether this has results per prompt: three lists of equal length, or nothing."""
    checks = {"prompt_ids": list_of(is_text), "score": list_of(is_number), "scored": list_of(is_whole)}
    if not isinstance(value, dict) or not value or not all(check(value.get(key)) for key, check in checks.items()):
        return value == {}
    return 0 < len(value["prompt_ids"]) == len(value["score"]) == len(value["scored"])


is_counts = dict_of(is_whole)
is_sources = list_of(lambda batch: is_table(batch) and is_whole(batch.get("updates")))


@dataclass(frozen=True, slots=True)
class RecordSchema:
    """The keys of the records of one file: required, optional, and required for one kind of event."""

    required: Mapping[str, Check]
    optional: Mapping[str, Check] = field(default_factory=dict)
    of_event: Mapping[str, Mapping[str, Check]] = field(default_factory=dict)

    def accepts(self, record: Any) -> bool:
        """Whether a record can be used."""
        if not isinstance(record, dict):
            return False
        required = {**self.required, **self.of_event.get(str(record.get("event")), {})}
        return all(check(record.get(key)) for key, check in required.items()) and all(
            check(record[key]) for key, check in self.optional.items() if record.get(key) is not None
        )


METRIC = RecordSchema({"update": is_whole})
JOURNAL = RecordSchema(
    {"time": is_number, "event": is_text, "seconds": is_number},
    optional={"generation_batch": is_whole, "first": is_whole},
    of_event={"learn": {"first": is_whole, "stop": is_whole}},
)
EVALUATION = RecordSchema(
    {
        **dict.fromkeys(("version", "prompts", "samples", "verifier_errors"), is_whole),
        **dict.fromkeys(("response_length", "truncated_fraction", "seconds"), is_number),
        "task": is_text,
        "accuracy": is_interval,
        "pass_at": dict_of(is_interval),
    },
    optional={
        "verifier_error_kinds": is_counts,
        "by_prompt": is_by_prompt,
        "majority": is_interval,
        "settings": is_table,
        "by_task": dict_of(
            lambda one: is_table(one) and is_whole(one.get("prompts")) and is_interval(one.get("accuracy"))
        ),
    },
)
STAGE = RecordSchema({"generation_batch": is_whole}, optional={"planned_updates": is_whole, "ended": is_table})
ROLLBACK = RecordSchema(
    {"time": is_number, "from_version": is_whole, "to_version": is_whole, "reason": is_text},
    optional={"learning_rate_factor": is_number},
)
_ORIGIN = RecordSchema(
    {"run": is_text, "version": is_whole, "changes": dict_of(lambda pair: isinstance(pair, list) and len(pair) == 2)}
)
FORKED = RecordSchema({**_ORIGIN.required, "ancestors": list_of(_ORIGIN.accepts)})
HOLDER = RecordSchema({"pid": is_whole, "host": is_text, "since": is_text})
