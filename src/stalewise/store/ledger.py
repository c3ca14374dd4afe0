"""The ledger: which rollouts each optimizer update consumed, and how old they were then.

One JSON line per update, appended and flushed before the update's checkpoint can exist. The age is never stored with a
rollout; this is the only place where it is written down, as a fact about an update.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stalewise.errors import StoreError
from stalewise.store.atomic import append_line, read_jsonl, truncate_jsonl

Ranges = tuple[tuple[int, int], ...]
"""Rollout ids as sorted, disjoint intervals (first, last), both included."""


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """What one update consumed. `update` counts from 0; `extra` holds numbers worth keeping (ESS, tokens, …)."""

    update: int
    generation_batch: int
    version: int  # the policy version that generated the batch
    age: int  # in updates, when it was consumed
    rollout_ids: Ranges
    extra: Mapping[str, Any] = field(default_factory=dict)


def ledger_path(run_directory: str | Path) -> Path:
    """Where a run keeps its ledger."""
    return Path(run_directory) / "ledger" / "updates.jsonl"


def append_entry(path: str | Path, entry: LedgerEntry) -> None:
    """Add one update to the ledger; it survives a crash once this returns."""
    record = {
        "update": entry.update,
        "generation_batch": entry.generation_batch,
        "version": entry.version,
        "age": entry.age,
        "rollout_ids": entry.rollout_ids,
    }
    clash = record.keys() & entry.extra.keys()
    if clash:
        raise StoreError(f"ledger entry of update {entry.update}: extra may not hold {', '.join(sorted(clash))}")
    append_line(path, {**record, **entry.extra})


def read_ledger(path: str | Path) -> list[LedgerEntry]:
    """Read all entries; updates must rise. No file means that nothing was consumed."""
    entries: list[LedgerEntry] = []
    for number, record in enumerate(read_jsonl(path), start=1):
        try:
            entry = LedgerEntry(
                update=record.pop("update"),
                generation_batch=record.pop("generation_batch"),
                version=record.pop("version"),
                age=record.pop("age"),
                rollout_ids=tuple((first, last) for first, last in record.pop("rollout_ids")),
                extra=record,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise StoreError(f"{path}, line {number} is not a ledger entry: {error!r}") from error
        if entries and entry.update <= entries[-1].update:
            raise StoreError(
                f"{path}, line {number}: update {entry.update} follows update {entries[-1].update}; "
                "two processes wrote to one run"
            )
        entries.append(entry)
    return entries


def truncate_ledger(path: str | Path, before: int) -> int:
    """On resume from the checkpoint of version `before`: drop the updates >= `before`, which will happen again."""
    return truncate_jsonl(path, lambda record: record["update"] < before)


def consumed(entries: Iterable[LedgerEntry], generation_batch: int | None = None) -> Ranges:
    """All rollout ids consumed so far, or those of one generation batch, each once however often it was used."""
    chosen = [e for e in entries if generation_batch is None or e.generation_batch == generation_batch]
    merged: list[tuple[int, int]] = []
    for first, last in sorted(interval for entry in chosen for interval in entry.rollout_ids):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return tuple(merged)


def to_ranges(rollout_ids: npt.ArrayLike) -> Ranges:
    """Write a set of ids as intervals.

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
    """The ids of intervals, one after the other.

    >>> from_ranges([(4, 7), (12, 12)]).tolist()
    [4, 5, 6, 7, 12]
    """
    pieces = [np.arange(first, last + 1, dtype=np.int64) for first, last in ranges]
    return np.concatenate([np.empty(0, np.int64), *pieces])
