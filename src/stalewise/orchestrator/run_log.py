"""The records of a run (journal, metrics, ledger, evaluations), and the part of them on which decisions depend."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stalewise.staleness.schedule import Step
from stalewise.staleness.spent import useful_share
from stalewise.store import LedgerEntry, TokenLog, append_entry, ledger_path, to_ranges, truncate_ledger
from stalewise.store.json_lines import append_line, commit_records, record_ends, truncate_jsonl
from stalewise.store.records import EVALUATION, JOURNAL, METRIC, SUITE, SUMMARY, RecordSchema, is_whole, read_records

METRIC_OF_STAGE = RecordSchema({**METRIC.required, "generation_batch": is_whole}, METRIC.optional)


@dataclass(frozen=True, slots=True)
class UpdateSummary:
    """The metrics of one update that later decisions use; NaN where one was not measured."""

    update: int
    generation_batch: int
    reward: float
    reward_error: float
    ess: float
    kl_behaviour_policy: float
    drift: float
    batch_budget: float
    horizon_budget: float
    taken: bool

    @property
    def useful_share(self) -> float:
        """The share of the rollouts that is still useful."""
        return useful_share(self.ess, self.kl_behaviour_policy)


class RunLog:
    """Reads and appends the records of one run directory; `updates` and `evaluations` are oldest first."""

    def __init__(self, directory: Path, journal: str = "journal.jsonl") -> None:
        self.directory = directory
        self.journal_path = directory / journal
        self.metrics_path = directory / "metrics.jsonl"
        self.evaluations_path = directory / "eval.jsonl"
        self.suites_path = directory / "suites.jsonl"
        self.stages_path = directory / "ledger" / "stages.jsonl"
        self.tokens = TokenLog(directory)
        self._within: list[tuple[str, float, dict[str, Any]]] | None = None  # timed blocks within the present one
        self.reload()

    def reload(self) -> None:
        """Read the files again."""
        self.updates = [_summary(record) for record in read_records(self.metrics_path, METRIC_OF_STAGE)]
        self.evaluations = read_records(self.evaluations_path, EVALUATION)
        self.suites = read_records(self.suites_path, SUITE)

    def log_event(self, event: str, seconds: float, **notes: Any) -> None:
        """Append a line to the journal."""
        self._append({"time": time.time(), "event": event, "seconds": seconds, **notes})

    @contextlib.contextmanager
    def timed(self, event: str, **notes: Any) -> Iterator[dict[str, Any]]:
        """Log the block with its duration. The block may add notes to the mapping that it gets.

        Time is counted once: a timed block within another is logged as if it had come before the rest of that one.
        """
        more: dict[str, Any] = {}
        outer, self._within = self._within, []
        began, start = time.time(), time.perf_counter()
        try:
            yield more
        finally:
            inner, self._within = self._within or [], outer
        seconds = time.perf_counter() - start
        if outer is not None:
            outer.append((event, seconds, {**notes, **more}))
            return
        for inner_event, inner_seconds, inner_notes in inner:
            began += inner_seconds
            seconds -= inner_seconds
            self._append({"time": began, "event": inner_event, "seconds": inner_seconds, **inner_notes})
        self.log_event(event, seconds, **notes, **more)

    def _append(self, record: dict[str, Any]) -> None:
        # Not flushed, as updates are not: a flush would wait for the checkpoint that is being written. The next
        # checkpoint commits these lines before itself.
        append_line(self.journal_path, record, durable=False)

    def log_world_size(self, world_size: int, parallel: str) -> str:
        """Log the number of ranks, unless it was always one. Returns a message if it changed, else an empty string."""
        journal = read_records(self.journal_path, JOURNAL)
        logged = [line["world_size"] for line in journal if line["event"] == "ranks"]
        if world_size == 1 and not logged:
            return ""
        before = logged[-1] if logged else 1 if self.updates else world_size
        change = f"world size {before} → {world_size}" if before != world_size else ""
        self.log_event("ranks", 0.0, world_size=world_size, parallel=parallel, **({"change": change} if change else {}))
        return change and f"{change}: updates from here on are the same to float32 rounding, not to the bit"

    def log_update(self, step: Step, rollout_ids: npt.NDArray[np.int64], metrics: dict[str, Any]) -> None:
        """Append an update to ledger and metrics."""
        entry = LedgerEntry(step.update, step.generation_batch, step.version, step.age, to_ranges(rollout_ids))
        append_entry(ledger_path(self.directory), entry)
        append_line(self.metrics_path, metrics, durable=False)
        self.updates.append(_summary(metrics))

    def log_evaluation(self, record: dict[str, Any]) -> None:
        """Append an evaluation."""
        append_line(self.evaluations_path, record)
        self.evaluations.append(record)

    def log_suite(self, record: dict[str, Any]) -> None:
        """Append an evaluation on a suite."""
        append_line(self.suites_path, record)
        self.suites.append(record)

    def forget_evaluations(self) -> None:
        """Drop all evaluations, which another reward scored."""
        for path in (self.evaluations_path, self.suites_path):
            truncate_jsonl(path, lambda record: False)
        self.evaluations, self.suites = [], []

    def drop_updates(self, first: int) -> None:
        """Drop the records of updates from `first` on, which will be taken again."""
        truncate_jsonl(self.metrics_path, lambda record: record["update"] < first)
        truncate_ledger(ledger_path(self.directory), before=first)
        self.tokens.truncate(before=first)
        self.updates = [update for update in self.updates if update.update < first]

    def ends(self) -> dict[str, tuple[int, str]]:
        """The present ends of the records, for `commit`."""
        return record_ends(self.directory)

    def commit(self, ends: Mapping[str, tuple[int, str]] | None = None) -> None:
        """Flush the records and store their ends, so that a later loss of lines is noticed."""
        commit_records(self.directory, ends)

    def taken_on(self, generation_batch: int) -> list[UpdateSummary]:
        """The updates on the current generation batch that changed the weights."""
        recent = takewhile(lambda update: update.generation_batch == generation_batch, reversed(self.updates))
        return [update for update in recent if update.taken][::-1]

    def budget_used(self) -> dict[str, float]:
        """The largest fraction of each drift budget that an update reached; 0 where none was measured."""
        names = ("batch_budget", "horizon_budget")
        return {name: max([0.0, *(getattr(update, name) for update in self.updates)]) for name in names}

    def drift_at(self, version: int) -> float:
        """Cumulative drift of the policy of a version."""
        before = (update.drift for update in reversed(self.updates) if update.update < version and update.taken)
        return next(before, 0.0)


def _summary(record: dict[str, Any]) -> UpdateSummary:
    values = {key: float(math.nan if record.get(key) is None else record[key]) for key in SUMMARY}
    return UpdateSummary(record["update"], record["generation_batch"], taken="drift" in record, **values)
