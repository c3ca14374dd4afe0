"""Schemas of the records of a run, and the reader that checks each file and line against them.

Commands that continue a run read records strictly: damage is a StoreError. Commands that show a run leave damaged
records out and report them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stalewise.errors import StoreError
from stalewise.store.atomic import RESTORE, read_json
from stalewise.store.json_lines import scan_lines

Check = Callable[[Any], bool]

LARGEST = 2**53  # integers up to here are exact as floats


def is_whole(value: Any) -> bool:
    """Whether this is an integer that a float can hold."""
    return isinstance(value, int) and abs(value) <= LARGEST


def is_number(value: Any) -> bool:
    """Whether this is a finite number."""
    return is_whole(value) or (isinstance(value, float) and math.isfinite(value))


def is_real(value: Any) -> bool:
    """Whether this is a number; NaN means unknown, and infinities are measured where a run diverges."""
    return is_whole(value) or isinstance(value, float)


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
    """Whether these are results per prompt: three lists of equal length; or an empty dict."""
    checks = {"prompt_ids": list_of(is_text), "score": list_of(is_number), "scored": list_of(is_whole)}
    if not isinstance(value, dict) or not value or not all(check(value.get(key)) for key, check in checks.items()):
        return value == {}
    return 0 < len(value["prompt_ids"]) == len(value["score"]) == len(value["scored"])


is_counts = dict_of(is_whole)


@dataclass(frozen=True, slots=True)
class RecordSchema:
    """The keys of the records of one file: required, optional, and required for one kind of event."""

    required: Mapping[str, Check]
    optional: Mapping[str, Check] = field(default_factory=dict)
    of_event: Mapping[str, Mapping[str, Check]] = field(default_factory=dict)

    def accepts(self, record: Any) -> bool:
        """Whether a record can be used."""
        return not self.problem(record)

    def problem(self, record: Any) -> str:
        """The problem of a record; empty if there is none."""
        if not isinstance(record, dict):
            return "it is no JSON object"
        required = {**self.required, **self.of_event.get(str(record.get("event")), {})}
        if missing := [key for key in required if key not in record]:
            return f"{', '.join(missing)} missing"
        optional = {key: check for key, check in self.optional.items() if record.get(key) is not None}
        wrong = [key for key, check in {**required, **optional}.items() if not check(record[key])]
        return f"{wrong[0]} is {_shortened(record[wrong[0]])}" if wrong else ""


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def read_records(
    path: str | Path, schema: RecordSchema, on_damage: Callable[[str], object] | None = None
) -> list[dict[str, Any]]:
    """The records of a JSONL file; a missing file has none.

    A line that was changed, or that `schema` does not accept, is a StoreError. With `on_damage` it is reported there
    and left out. A last line that a crash has torn is always left out.
    """
    damage = on_damage or _refuse
    records: list[dict[str, Any]] = []
    try:
        lines = scan_lines(path) if on_damage is None else scan_lines(path, on_damage)
    except StoreError as error:
        damage(str(error))
        return records
    for line in lines:
        if problem := line.problem or schema.problem(line.record):
            damage(f"{path}, line {line.number} is damaged: {problem}; {RESTORE}")
        else:
            records.append(line.record)
    return records


def read_record(path: str | Path, schema: RecordSchema) -> dict[str, Any]:
    """Read one JSON object that `schema` accepts; anything else is a StoreError."""
    record = read_json(path)
    if problem := schema.problem(record):
        raise StoreError(f"{path} is damaged: {problem}; {RESTORE}")
    return record


def _refuse(problem: str) -> None:
    raise StoreError(problem)


ANY = RecordSchema({})
# The metrics that later decisions use.
SUMMARY = ("reward", "reward_error", "ess", "kl_behaviour_policy", "drift", "batch_budget", "horizon_budget")
METRIC = RecordSchema(
    {"update": is_whole}, optional={"generation_batch": is_whole, **dict.fromkeys((*SUMMARY, "seconds"), is_real)}
)
JOURNAL = RecordSchema(
    {"time": is_number, "event": is_text, "seconds": is_number},
    optional={"generation_batch": is_whole, "first": is_whole},
    of_event={"learn": {"first": is_whole, "stop": is_whole}, "ranks": {"world_size": is_whole}},
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
            lambda entry: is_table(entry) and is_whole(entry.get("prompts")) and is_interval(entry.get("accuracy"))
        ),
    },
)
SUITE = RecordSchema({**EVALUATION.required, "suite": is_text}, EVALUATION.optional)
STAGE = RecordSchema(
    dict.fromkeys(("generation_batch", "first_update", "planned_updates", "first_prompt"), is_whole),
    optional={"ended": is_table},
)
LEDGER = RecordSchema(
    {
        **dict.fromkeys(("update", "generation_batch", "version", "age"), is_whole),
        "rollout_ids": list_of(lambda pair: list_of(is_whole)(pair) and len(pair) == 2),
    }
)
ROLLBACK = RecordSchema(
    {"time": is_number, "from_version": is_whole, "to_version": is_whole, "reason": is_text},
    optional={
        "learning_rate_factor": is_number,
        "halved": is_whole,
        "fresh_from_batch": is_whole,
        "batches": list_of(is_text),
    },
)
_SOURCE = RecordSchema({"directory": is_text, "updates": is_whole})
SOURCES = RecordSchema({"batches": list_of(_SOURCE.accepts)}, optional={"checkpoint": is_text})
LIMITS = RecordSchema({}, optional={"limits": lambda value: list_of(is_real)(value) and len(value) == 2})
_ORIGIN = RecordSchema(
    {"run": is_text, "version": is_whole, "changes": dict_of(lambda pair: isinstance(pair, list) and len(pair) == 2)}
)
FORKED = RecordSchema({**_ORIGIN.required, "ancestors": list_of(_ORIGIN.accepts)})
REFERENCE = RecordSchema({"reference": is_text, "key": is_text})
DIFFICULTY = RecordSchema({"format": is_text, "prompts": is_table, "batches": is_table})
_SCORED = RecordSchema({"sha256": is_text, "rows": is_whole, "shards": list_of(is_text)})
_CHANGED = ("rollouts", "changed", "raised", "lowered", "unscored_before", "unscored_after")
REWARDS = RecordSchema(
    {"format": is_text, "time": is_number, "batches": dict_of(_SCORED.accepts), **dict.fromkeys(_CHANGED, is_whole)},
    optional=dict.fromkeys(("mean_before", "mean_after"), is_number),
)
_CALL = RecordSchema({"rollout": is_whole, "turn": is_whole, "turns": is_text, "answer": is_text})
CALLS = RecordSchema({"calls": list_of(_CALL.accepts)})
HOLDER = RecordSchema({"pid": is_whole, "host": is_text, "since": is_text})
