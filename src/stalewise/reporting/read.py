"""Records as tables: columns of metrics, dotted keys, and where tables differ. Pure."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from stalewise.config import FORMAT, ScheduleSection
from stalewise.errors import StoreError
from stalewise.reporting.checks import EVALUATION, JOURNAL, METRIC, ROLLBACK, STAGE, Shape, is_counts, is_sources
from stalewise.reporting.timeline import (
    NOT_TRAINING,
    Column,
    Spent,
    add_uncommitted,
    clock_of,
    committed_updates,
    spent_by_stage,
    total,
)
from stalewise.staleness.schedule import Schedule
from stalewise.store import BatchManifest, batch_directories, committed_shards, read_batch_manifest
from stalewise.store.atomic import read_json, read_jsonl
from stalewise.store.manifest import BATCH_MANIFEST

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


# From run directories to tables: pure data, whatever state the runs are in. Opens no shard and no checkpoint.


@dataclass(frozen=True, slots=True)
class Rollback:
    """Updates that were made and taken back, since the run had collapsed."""

    record: dict[str, Any]  # rollback.json: why, from which version, to which
    metrics: dict[str, Column]
    evaluations: list[dict[str, Any]]
    batches: list[BatchManifest]  # what was generated and is not used any more
    clock: Column


@dataclass(frozen=True, slots=True)
class Run:
    """What a run directory says. Empty where the run has not come that far."""

    directory: Path
    label: str  # how the page calls it; unique on the page
    config: dict[str, Any]  # dotted keys
    environment: dict[str, Any]
    schedule: Schedule  # as far as it is known before the run
    planned_updates: int  # those of the schedule, or of the rollouts that `stalewise learn` was given
    metrics: dict[str, Column]  # by key, one value per recorded update; NaN where a record does not have the key
    evaluations: list[dict[str, Any]]  # by version
    batches: list[BatchManifest]  # committed ones, in order of generation
    sources: list[dict[str, Any]]  # generation batches of other runs that `stalewise learn` learned from
    unfinished: dict[str, int]  # generation batches that are not committed, by the name of their directory: rollouts
    stages: dict[int, dict[str, Any]]  # by generation batch, of a run whose stages end when their data is spent
    rollbacks: list[Rollback]
    spent: Spent
    generator: Spent  # of the second process of a pipelined run
    clock: Column  # seconds of training until the end of each recorded update
    committed: int  # updates that the newest checkpoint has, as far as the journal tells
    notes: list[str] = field(default_factory=list)  # what was left out while reading

    @property
    def updates(self) -> int:
        """Updates on record."""
        return len(self.metrics.get("update", ()))

    @property
    def updates_taken_back(self) -> int:
        """Updates that were made, cost their time, and do not count any more."""
        return sum(len(rollback.metrics.get("update", ())) for rollback in self.rollbacks)

    @property
    def rollouts_taken_back(self) -> int:
        """Rollouts that were generated and then given up, in the same way."""
        return sum(batch.rows for rollback in self.rollbacks for batch in rollback.batches)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by activity, over all stages."""
        return total(self.spent)

    @property
    def total_seconds(self) -> float:
        """Wall-clock from the first thing to the last, so with idle time."""
        return sum(self.seconds.values())

    @property
    def training_seconds(self) -> float:
        """What the method costs: without evaluating and idle time."""
        return sum(seconds for name, seconds in self.seconds.items() if name not in NOT_TRAINING)

    @property
    def is_complete(self) -> bool:
        """Whether all updates were made and the final policy was evaluated."""
        evaluated = {record["version"] for record in self.evaluations}
        return self.updates == self.planned_updates and self.planned_updates in evaluated

    @property
    def is_open_ended(self) -> bool:
        """Whether stages end when their data is spent, so that nobody knows their number before."""
        return self.config.get("schedule.end") == "spent"

    @property
    def stage_starts(self) -> list[int]:
        """First updates on a new generation batch, as they happened; without that of the first."""
        batch, update = self.column("generation_batch"), self.column("update")
        return update[1:][np.diff(batch) != 0].astype(int).tolist() if len(batch) else []

    def column(self, key: str) -> Column:
        """The values of one metric; empty where no record has it."""
        return self.metrics.get(key, np.empty(0))

    def finite(self, key: str) -> Column:
        """The finite values of one metric."""
        values = self.column(key)
        return values[np.isfinite(values)]

    def seconds_at(self, version: int) -> float:
        """Seconds of training until a version was there; NaN where that is not known."""
        return version_clock(self.metrics, self.clock, version)


def version_clock(metrics: Mapping[str, Column], clock: Column, version: int) -> float:
    """Version v is there when update v − 1 is over."""
    if version == 0:
        return 0.0
    place = np.flatnonzero(metrics.get("update", np.empty(0)) == version - 1)
    return float(clock[place[0]]) if len(place) else float("nan")


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
    """Read one run directory. Only its config has to be there; what is damaged is left out and mentioned."""
    directory = Path(directory)
    config = read_resolved(directory)
    notes: list[str] = []
    metrics = metric_columns(read_records(directory / "metrics.jsonl", METRIC, notes))
    journal = read_records(directory / "journal.jsonl", JOURNAL, notes)
    rollbacks = read_rollbacks(directory / "rollbacks", journal, notes)
    committed = committed_updates(journal, [rollback.record for rollback in rollbacks])
    schedule = _schedule(config, directory)
    known = dict(zip(metrics.get("update", ()), metrics.get("generation_batch", ()), strict=False))

    def stage_of(update: int) -> int:
        found = known.get(update, np.nan)
        return (
            int(found) if np.isfinite(found) else min(update, schedule.updates - 1) // schedule.updates_per_generation
        )

    spent = spent_by_stage(journal, stage_of)
    add_uncommitted(spent, metrics, committed, stage_of)
    generator = read_records(directory / "journal-generator.jsonl", JOURNAL, notes)
    stages = read_records(directory / "ledger" / "stages.jsonl", STAGE, notes)
    batches, unfinished = read_batches(directory / "rollouts", notes)
    sources = read_sources(directory / "sources.json", notes)
    return Run(
        directory=directory,
        label=label or directory.resolve().name,
        config=flatten(config),
        environment=flatten(_json_or_nothing(directory / "environment.json", notes)),
        schedule=schedule,
        planned_updates=sum(batch["updates"] for batch in sources) or schedule.updates,
        metrics=metrics,
        evaluations=read_evaluations(directory / "eval.jsonl", notes),
        batches=batches,
        sources=sources,
        unfinished=unfinished,
        stages={record["generation_batch"]: record for record in stages},
        rollbacks=rollbacks,
        spent=spent,
        generator=spent_by_stage(generator, stage_of),
        clock=clock_of(journal, metrics, committed),
        committed=committed,
        notes=notes,
    )


def read_resolved(directory: Path) -> dict[str, Any]:
    """The config of a run directory as it lies there; what has none is no run directory."""
    path = directory / "config.resolved.json"
    try:
        if not path.is_file():
            raise StoreError(f"{directory} is no run directory: it has no {path.name}; name the directory of a run")
        config = read_json(path)
    except OSError as error:
        raise StoreError(f"{unreadable(path, error)}: ask its owner for leave to read it") from error
    if config.get("format") != FORMAT:
        raise StoreError(f"{path} has format {config.get('format')}; this release reads {FORMAT}")
    return config


def _schedule(config: Mapping[str, Any], directory: Path) -> Schedule:
    try:
        return ScheduleSection.model_validate(config["schedule"]).schedule()
    except (KeyError, ValueError) as error:
        raise StoreError(
            f"{directory / 'config.resolved.json'} has no usable schedule ({' '.join(str(error).split())}): restore it "
            "from a copy"
        ) from error


def read_records(path: Path, shape: Shape, notes: list[str]) -> list[dict[str, Any]]:
    """Records of a JSONL file that have the right shape. Damage is mentioned, and the rest is used."""
    try:
        found = read_jsonl(path, notes.append)
    except StoreError as error:
        found = list(_readable_lines(path))
        notes.append(f"{error}; here the {len(found):,} lines that can be read are used.")
    whole = [record for record in found if shape.fits(record)]
    if len(whole) < len(found):
        what = f"{len(found) - len(whole)} of {len(found)} records lack what they need, or have it in a wrong form"
        notes.append(f"{path}: {what} ({', '.join(shape.needed)}): left out")
    return whole


def _readable_lines(path: Path) -> Iterable[dict[str, Any]]:
    with contextlib.suppress(OSError):
        for line in path.read_bytes().split(b"\n"):
            with contextlib.suppress(ValueError, RecursionError):
                if isinstance(record := json.loads(line), dict):
                    yield record


def _json_or_nothing(path: Path, notes: list[str]) -> dict[str, Any]:
    try:
        return read_json(path) if path.is_file() else {}
    except StoreError as error:
        notes.append(str(error))
    except OSError as error:
        notes.append(f"{unreadable(path, error)}: left out")
    return {}


def unreadable(path: Path, error: OSError) -> str:
    """What the system says of a file that it does not give."""
    return f"cannot read {path}: {error.strerror or error}"


def read_sources(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """Generation batches of other runs, as `stalewise learn` lists them."""
    sources = _json_or_nothing(path, notes).get("batches", [])
    if is_sources(sources):
        return sources
    notes.append(f"{path}: the updates of its batches cannot be read: left out")
    return []


def read_evaluations(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """Evaluations by version; one that was made again counts as it came out last."""
    found = {record["version"]: record for record in read_records(path, EVALUATION, notes)}
    return [found[version] for version in sorted(found)]


def read_rollbacks(root: Path, journal: Sequence[Mapping[str, Any]], notes: list[str]) -> list[Rollback]:
    """What was taken back, oldest first, with the records that tell of it."""
    found: list[Rollback] = []
    for place in sorted(root.glob("r[0-9]*")) if root.is_dir() else ():
        record = _json_or_nothing(place / "rollback.json", notes)
        if not ROLLBACK.fits(record):
            notes.append(f"{place} is no whole rollback: left out")
            continue
        metrics = metric_columns(read_records(place / "metrics.jsonl", METRIC, notes))
        before = [entry for entry in journal if entry["time"] <= record["time"]]
        committed = committed_updates(before, [earlier.record for earlier in found])
        clock = clock_of(before, metrics, committed)
        batches, _ = read_batches(place / "rollouts", notes)
        found.append(Rollback(record, metrics, read_evaluations(place / "eval.jsonl", notes), batches, clock))
    return found


def read_batches(rollouts: Path, notes: list[str]) -> tuple[list[BatchManifest], dict[str, int]]:
    """Manifests of the generation batches, and rollouts so far of those that are not complete. Damage is mentioned.

    Shards may have been moved away since: the report is about what happened.
    """
    found: list[BatchManifest] = []
    unfinished: dict[str, int] = {}
    try:
        directories = batch_directories(rollouts)
    except OSError as error:
        notes.append(f"{unreadable(rollouts, error)}: its generation batches are left out")
        return found, unfinished
    for directory in directories:
        try:
            if (directory / BATCH_MANIFEST).is_file():
                found.append(read_batch_manifest(directory))
                notes.extend(damaged_shards(directory, found[-1]))
            else:
                unfinished[directory.name] = sum(shard.rows for shard in committed_shards(directory))
        except (StoreError, OSError) as error:
            notes.append(f"generation batch {directory.name} is left out: {error}")
    return found, unfinished


def damaged_shards(directory: Path, manifest: BatchManifest) -> list[str]:
    """Shards whose length is not that of their manifest: what can be seen without reading them."""
    sizes = [(shard, directory / shard.file) for shard in manifest.shards]
    return [
        f"{path} is damaged: it has {path.stat().st_size:,} bytes and should have {shard.bytes:,}; move it away, and "
        "the same command makes it again"
        for shard, path in sizes
        if path.is_file() and path.stat().st_size != shard.bytes
    ]


def verifier_errors(run: Run) -> Counter[str]:
    """Kinds of verifier errors in rollouts and evaluations, with how often they occurred."""
    kinds: Counter[str] = Counter()
    found = [(batch.verifier_errors, batch.extra.get("verifier_error_kinds", {})) for batch in run.batches]
    found += [(record["verifier_errors"], record.get("verifier_error_kinds", {})) for record in run.evaluations]
    for count, listed in found:
        named = listed if is_counts(listed) else {}
        kinds.update(named)
        kinds["of no recorded kind"] += count - sum(named.values())
    return +kinds
