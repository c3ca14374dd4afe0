"""From run directories to tables: pure data, whatever state the runs are in. Opens no shard and no checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stalewise.config import FORMAT, ScheduleSection
from stalewise.errors import StoreError
from stalewise.files import read_json, read_jsonl
from stalewise.staleness.schedule import Schedule
from stalewise.store import BatchManifest, batch_directories, committed_shards, read_batch_manifest
from stalewise.store.manifest import BATCH_MANIFEST

# What a run does, in the order in which it does it first. Time between journal records is `idle`.
ACTIVITIES = ("generate", "learn", "switch", "evaluate")
IDLE = "idle"

Column = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Run:
    """What a run directory says. Empty where the run has not come that far."""

    directory: Path
    label: str  # how the page calls it; unique on the page
    config: dict[str, Any]  # dotted keys
    environment: dict[str, Any]
    schedule: Schedule
    metrics: dict[str, Column]  # by key, one value per recorded update; NaN where a record does not have the key
    evaluations: list[dict[str, Any]]  # by version
    batches: list[BatchManifest]  # committed ones, in order of generation
    seconds: dict[str, float]  # ACTIVITIES, others that the journal knows, and IDLE
    notes: list[str] = field(default_factory=list)  # what was left out while reading

    @property
    def updates(self) -> int:
        """Updates on record."""
        return len(self.metrics.get("update", ()))

    @property
    def total_seconds(self) -> float:
        """Wall-clock from the first thing to the last, so with idle time."""
        return sum(self.seconds.values())

    @property
    def is_complete(self) -> bool:
        """Whether all updates were made and the final policy was evaluated."""
        evaluated = {record["version"] for record in self.evaluations}
        return self.updates == self.schedule.updates and self.schedule.updates in evaluated

    def column(self, key: str) -> Column:
        """The values of one metric; empty where no record has it."""
        return self.metrics.get(key, np.empty(0))

    def finite(self, key: str) -> Column:
        """The finite values of one metric."""
        values = self.column(key)
        return values[np.isfinite(values)]


def read_runs(directories: Sequence[Path]) -> list[Run]:
    """Read several runs and give each a label of its own."""
    if not directories:
        raise StoreError("there is no run directory to report on: name at least one")
    paths = [Path(directory) for directory in directories]
    if len({path.resolve() for path in paths}) < len(paths):
        raise StoreError("a run directory is named twice: " + ", ".join(map(str, paths)))
    return [read_run(path, label) for path, label in zip(paths, unique_labels(paths), strict=True)]


def unique_labels(paths: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart.

    >>> unique_labels([Path("/a/x"), Path("/a/y")])
    ['x', 'y']
    >>> unique_labels([Path("/a/x"), Path("/b/x")])
    ['a/x', 'b/x']
    """
    parts = [path.resolve().parts for path in paths]
    longest = max(map(len, parts))
    for length in range(1, longest + 1):
        labels = ["/".join(part[-length:]) for part in parts]
        if len(set(labels)) == len(labels):
            return labels
    return [str(path) for path in paths]


def read_run(directory: Path, label: str | None = None) -> Run:
    """Read one run directory. Only its config has to be there."""
    directory = Path(directory)
    path = directory / "config.resolved.json"
    if not path.is_file():
        raise StoreError(f"{directory} is no run directory: {path.name} is missing")
    config = read_json(path)
    if config.get("format") != FORMAT:
        raise StoreError(f"{path} has format {config.get('format')}; this release reads {FORMAT}")
    environment = directory / "environment.json"
    notes: list[str] = []
    metrics = metric_columns(read_jsonl(directory / "metrics.jsonl", notes.append))
    journal = read_jsonl(directory / "journal.jsonl", notes.append)
    evaluations = {record["version"]: record for record in read_jsonl(directory / "eval.jsonl", notes.append)}
    batches = read_batches(directory / "rollouts", notes)
    return Run(
        directory=directory,
        label=label or directory.resolve().name,
        config=flatten(config),
        environment=flatten(read_json(environment)) if environment.is_file() else {},
        schedule=ScheduleSection.model_validate(config["schedule"]).schedule(),
        metrics=metrics,
        evaluations=[evaluations[version] for version in sorted(evaluations)],
        batches=batches,
        seconds=time_spent(journal, metrics),
        notes=notes,
    )


def read_batches(rollouts: Path, notes: list[str]) -> list[BatchManifest]:
    """Manifests of the generation batches; one without a manifest does not exist, but is mentioned.

    Shards may have been moved away since: the report is about what happened.
    """
    found: list[BatchManifest] = []
    for directory in batch_directories(rollouts):
        if (directory / BATCH_MANIFEST).is_file():
            found.append(read_batch_manifest(directory))
        else:
            shards = len(committed_shards(directory))
            notes.append(f"generation batch {directory.name} is not complete ({shards} shards so far): left out")
    return found


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


def time_spent(journal: Sequence[Mapping[str, Any]], metrics: Mapping[str, Column]) -> dict[str, float]:
    """Seconds per activity, and those in between: the run was stopped, or lost in a crash what it had not committed.

    A journal record is written when its activity ends, so it began `seconds` before its `time`.
    """
    spent = dict.fromkeys(ACTIVITIES, 0.0)
    idle, end = 0.0, float("inf")
    for record in journal:
        spent[record["event"]] = spent.get(record["event"], 0.0) + record["seconds"]
        idle += max(0.0, record["time"] - record["seconds"] - end)
        end = record["time"] if end == float("inf") else max(end, record["time"])
    # `learn` is journalled at the next checkpoint; the updates since then have only their own records.
    stop = max((record["stop"] for record in journal if record["event"] == "learn"), default=0)
    if "seconds" in metrics:
        spent["learn"] += float(np.nansum(metrics["seconds"][metrics["update"] >= stop]))
    return {**spent, IDLE: idle}


def verifier_errors(run: Run) -> Counter[str]:
    """Kinds of verifier errors in rollouts and evaluations, with how often they occurred."""
    kinds: Counter[str] = Counter()
    found = [(batch.verifier_errors, batch.extra.get("verifier_error_kinds", {})) for batch in run.batches]
    found += [(record["verifier_errors"], record.get("verifier_error_kinds", {})) for record in run.evaluations]
    for count, named in found:
        kinds.update(named)
        kinds["of no recorded kind"] += count - sum(named.values())
    return +kinds


def differing(tables: Sequence[Mapping[str, Any]]) -> list[str]:
    """Keys whose values are not the same in all tables, in order of first appearance.

    >>> differing([{"seed": 0, "name": "a"}, {"seed": 0, "name": "b", "extra": 1}])
    ['name', 'extra']
    """
    keys = dict.fromkeys(key for table in tables for key in table)
    absent = object()
    return [key for key in keys if any(table.get(key, absent) != tables[0].get(key, absent) for table in tables[1:])]
