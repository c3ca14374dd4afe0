"""The ledger: which rollouts each optimizer update consumed, and their age at that update.

One JSON line per update, appended and flushed before the update's checkpoint can exist. Ages are recorded only here,
never with the rollouts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stalewise.errors import StoreError
from stalewise.store.json_lines import append_line, truncate_jsonl
from stalewise.store.records import LEDGER, read_records

Ranges = tuple[tuple[int, int], ...]
"""Rollout ids as sorted, disjoint intervals (first, last), both included."""


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """The rollouts of one update. `update` counts from 0; `extra` holds further numbers (ESS, tokens, …)."""

    update: int
    generation_batch: int
    version: int  # the policy version that generated the batch
    age: int  # in updates, when it was consumed
    rollout_ids: Ranges
    extra: Mapping[str, Any] = field(default_factory=dict)


FIELDS = ("update", "generation_batch", "version", "age", "rollout_ids")


def ledger_path(run_directory: str | Path) -> Path:
    """The path of a run's ledger."""
    return Path(run_directory) / "ledger" / "updates.jsonl"


def append_entry(path: str | Path, entry: LedgerEntry) -> None:
    """Add one update to the ledger; it survives a power failure once `commit_records` has returned."""
    record = {name: getattr(entry, name) for name in FIELDS}
    if clash := record.keys() & entry.extra.keys():
        raise StoreError(f"ledger entry of update {entry.update}: extra may not hold {', '.join(sorted(clash))}")
    append_line(path, {**record, **entry.extra}, durable=False)


def read_ledger(path: str | Path) -> list[LedgerEntry]:
    """Read all entries; updates must increase. Without a file there are none."""
    entries: list[LedgerEntry] = []
    for number, record in enumerate(read_records(path, LEDGER), start=1):
        known = {name: record.pop(name) for name in FIELDS}
        known["rollout_ids"] = tuple((first, last) for first, last in known["rollout_ids"])
        entry = LedgerEntry(**known, extra=record)
        if entries and entry.update <= entries[-1].update:
            raise StoreError(
                f"{path}, line {number}: update {entry.update} follows update {entries[-1].update}; "
                "two processes wrote to one run"
            )
        entries.append(entry)
    return entries


def truncate_ledger(path: str | Path, before: int) -> int:
    """Drop the updates from `before` on, which a run resumed from that version takes again; return how many."""
    return truncate_jsonl(path, lambda record: record["update"] < before)


def consumed(entries: Iterable[LedgerEntry], generation_batch: int | None = None) -> Ranges:
    """The rollout ids consumed so far, of one generation batch or of all, each once."""
    chosen = [entry for entry in entries if generation_batch in (None, entry.generation_batch)]
    merged: list[tuple[int, int]] = []
    for first, last in sorted(interval for entry in chosen for interval in entry.rollout_ids):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return tuple(merged)


def to_ranges(rollout_ids: npt.ArrayLike) -> Ranges:
    """A set of ids as intervals.

    >>> to_ranges([7, 4, 5, 6, 12])
    ((4, 7), (12, 12))
    """
    ids = np.unique(np.asarray(rollout_ids, dtype=np.int64))
    if not len(ids):
        return ()
    breaks = np.flatnonzero(np.diff(ids) > 1)
    firsts, lasts = ids[np.r_[0, breaks + 1]], ids[np.r_[breaks, len(ids) - 1]]
    return tuple(zip(firsts.tolist(), lasts.tolist(), strict=True))


def from_ranges(ranges: Iterable[tuple[int, int]]) -> npt.NDArray[np.int64]:
    """The ids of intervals."""
    pieces = [np.arange(first, last + 1, dtype=np.int64) for first, last in ranges]
    return np.concatenate([np.empty(0, np.int64), *pieces])
