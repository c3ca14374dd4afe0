"""What a run writes down as it goes: journal, metrics and ledger; and what it must remember of them to go on."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stalewise.staleness.schedule import Step
from stalewise.store import LedgerEntry, TokenLog, append_entry, ledger_path, to_ranges, truncate_ledger
from stalewise.store.atomic import append_line, read_jsonl, truncate_jsonl


@dataclass(frozen=True, slots=True)
class UpdateSummary:
    """Of one update, what later decisions rest on; NaN where it was not measured."""

    update: int
    generation_batch: int
    reward: float
    reward_error: float
    ess: float
    drift: float
    batch_budget: float
    horizon_budget: float
    taken: bool


class RunLog:
    """The files of one run directory; `remembered` holds all updates on record, oldest first."""

    def __init__(self, directory: Path, journal: str = "journal.jsonl") -> None:
        self.directory = directory
        self.journal_path = directory / journal
        self.metrics_path = directory / "metrics.jsonl"
        self.evaluations_path = directory / "eval.jsonl"
        self.stages_path = directory / "ledger" / "stages.jsonl"
        self.tokens = TokenLog(directory)
        self.read_again()

    def read_again(self) -> None:
        """Look at what is on disk."""
        self.remembered = [_remember(record) for record in read_jsonl(self.metrics_path)]
        self.evaluations = read_jsonl(self.evaluations_path)

    def journal(self, event: str, seconds: float, **notes: Any) -> None:
        """Say what was done and how long it took."""
        append_line(self.journal_path, {"time": time.time(), "event": event, "seconds": seconds, **notes})

    def log_world_size(self, world_size: int, parallel: str) -> str:
        """Say how many ranks learn from here on, and how; a sentence where it was another number so far.

        One process that was always one is not worth a line.
        """
        said = [one["world_size"] for one in read_jsonl(self.journal_path) if one["event"] == "ranks"]
        if world_size == 1 and not said:
            return ""
        before = said[-1] if said else 1 if self.remembered else world_size
        change = f"world size {before} → {world_size}" if before != world_size else ""
        self.journal("ranks", 0.0, world_size=world_size, parallel=parallel, **({"change": change} if change else {}))
        return change and f"{change}: updates from here on are the same to float32 rounding, not to the bit"

    @contextlib.contextmanager
    def timed(self, event: str, **notes: Any) -> Iterator[dict[str, Any]]:
        """Journal the block; it may add notes."""
        more: dict[str, Any] = {}
        start = time.perf_counter()
        yield more
        self.journal(event, time.perf_counter() - start, **notes, **more)

    def update(self, step: Step, rollout_ids: npt.NDArray[np.int64], metrics: dict[str, Any]) -> None:
        """Write down an update: what it consumed, and what happened."""
        entry = LedgerEntry(step.update, step.generation_batch, step.version, step.age, to_ranges(rollout_ids))
        append_entry(ledger_path(self.directory), entry)
        append_line(self.metrics_path, metrics)
        self.remembered.append(_remember(metrics))

    def evaluation(self, record: dict[str, Any]) -> None:
        """Write down an evaluation."""
        append_line(self.evaluations_path, record)
        self.evaluations.append(record)

    def forget_updates(self, before: int) -> None:
        """Drop the updates from this one on: they happen again."""
        truncate_jsonl(self.metrics_path, lambda record: record["update"] < before)
        truncate_ledger(ledger_path(self.directory), before=before)
        self.tokens.truncate(before=before)
        self.remembered = [one for one in self.remembered if one.update < before]

    def taken_on(self, generation_batch: int) -> list[UpdateSummary]:
        """The updates on the present generation batch that were taken, oldest first."""
        recent = takewhile(lambda one: one.generation_batch == generation_batch, reversed(self.remembered))
        return [one for one in recent if one.taken][::-1]

    def budget_used(self) -> dict[str, float]:
        """The largest share of each budget that an update on record reached; 0 where none was measured."""
        names = ("batch_budget", "horizon_budget")
        return {name: max([0.0, *(getattr(one, name) for one in self.remembered)]) for name in names}

    def drift_at(self, version: int) -> float:
        """Cumulative drift of the policy of a version."""
        before = (one.drift for one in reversed(self.remembered) if one.update < version and one.taken)
        return next(before, 0.0)


def _remember(record: dict[str, Any]) -> UpdateSummary:
    keys = ("reward", "reward_error", "ess", "drift", "batch_budget", "horizon_budget")
    values = {key: float(record.get(key, math.nan)) for key in keys}
    return UpdateSummary(record["update"], record["generation_batch"], taken="drift" in record, **values)
