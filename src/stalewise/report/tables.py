"""Records as tables: columns of metrics, dotted keys, and where tables differ. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from stalewise.report.clock import Column

UNIMPORTANT = frozenset({"format", "name", "runs", "trackers"})  # of a config: where a run lies and who watches it


def flatten(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as dotted keys.

    >>> flatten({"seed": 0, "task": {"name": "jsonl", "options": {}}})
    {'seed': 0, 'task.name': 'jsonl', 'task.options': {}}
    """
    flat: dict[str, Any] = {}
    for key, value in record.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return flat


def metric_columns(records: Iterable[Mapping[str, Any]]) -> dict[str, Column]:
    """Records as columns, sorted by update. An update that is on record twice counts as it was last recorded."""
    last = {record["update"]: record for record in records}
    rows = [last[update] for update in sorted(last)]
    keys = list(dict.fromkeys(key for row in rows for key in row))
    return {key: np.array([_number(row.get(key)) for row in rows]) for key in keys}


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else float("nan")


def differing(tables: Sequence[Mapping[str, Any]]) -> list[str]:
    """Keys whose values are not the same in all tables, in order of first appearance.

    >>> differing([{"seed": 0, "name": "a"}, {"seed": 0, "name": "b", "extra": 1}])
    ['name', 'extra']
    """
    keys = dict.fromkeys(key for table in tables for key in table)
    absent = object()
    return [key for key in keys if any(table.get(key, absent) != tables[0].get(key, absent) for table in tables[1:])]
