"""Reads run directories into plain records, in any state of a run. Opens no shard and no checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stalewise.config import ScheduleSection
from stalewise.config.run_directory import FORK, NOTES, RESOLVED, flatten, read_fork, read_resolved, schedule_of
from stalewise.errors import StoreError
from stalewise.staleness.schedule import Schedule
from stalewise.store import BatchManifest, batch_directories, committed_shards, read_batch_manifest
from stalewise.store.manifest import BATCH_MANIFEST
from stalewise.store.records import (
    ANY,
    EVALUATION,
    FORKED,
    JOURNAL,
    METRIC,
    ROLLBACK,
    SOURCES,
    STAGE,
    SUITE,
    RecordSchema,
    is_counts,
    read_record,
    read_records,
)

# In the order in which they are drawn. Time between journal records is `idle`.
ACTIVITIES = ("generate", "learn", "switch", "wait", "evaluate")
IDLE = "idle"
NOT_TRAINING = frozenset({"evaluate", IDLE})  # not a cost of the method

Column = npt.NDArray[np.float64]
Record = Mapping[str, Any]
StageOf = Callable[[int], int]
StageSeconds = dict[int, dict[str, float]]  # by stage (generation batch), then by activity


def seconds_by_stage(journal: Sequence[Record], stage_of: StageOf) -> StageSeconds:
    """Seconds per activity in each stage. Gaps are idle: the run was stopped, or lost work in a crash.

    Switching and evaluating belong to no stage and count to the stage last generated or learned.
    """
    spent: StageSeconds = {}
    stage, end = 0, float("inf")
    for record in journal:
        if (gap := record["time"] - record["seconds"] - end) > 0:
            _add(spent, stage, IDLE, gap)
        end = record["time"] if end == float("inf") else max(end, record["time"])
        if record["event"] == "generate":
            stage = record.get("generation_batch", stage)
        elif "first" in record:
            stage = stage_of(record["first"])
        _add(spent, stage, record["event"], record["seconds"])
    return spent


def add_uncommitted(spent: StageSeconds, metrics: Mapping[str, Column], committed: int, stage_of: StageOf) -> None:
    """Add the updates since the last checkpoint, which the journal records only with the next checkpoint."""
    for update, seconds in _uncommitted(metrics, committed):
        _add(spent, stage_of(update), "learn", seconds)


def committed_updates(journal: Iterable[Record], rollbacks: Iterable[Record]) -> int:
    """Updates covered by the journal: up to its last `learn`, or to the version of a later rollback."""
    marks = [(record["time"], record["stop"]) for record in journal if record["event"] == "learn"]
    marks += [(record["time"], record["to_version"]) for record in rollbacks]
    return max(marks, default=(0.0, 0))[1]


def update_clock(journal: Sequence[Record], metrics: Mapping[str, Column], committed: int) -> Column:
    """Seconds of training until the end of each recorded update; NaN where the journal has no record of it.

    Evaluation and idle time are left out: frequent evaluations or an overnight stop do not make a run slower.
    """
    updates = [int(update) for update in metrics.get("update", ())]
    lasted = dict(zip(updates, metrics.get("seconds", ()), strict=False))
    clock: dict[int, float] = {}
    now = 0.0
    for record in journal:
        if record["event"] in NOT_TRAINING:
            continue
        if record["event"] == "learn" and record["stop"] > record["first"]:
            learned = range(record["first"], record["stop"])
            weights = np.array([lasted.get(update, np.nan) for update in learned])
            if not (np.isfinite(weights).all() and weights.sum() > 0):
                weights = np.ones(len(learned))
            ends = now + record["seconds"] * np.cumsum(weights) / weights.sum()
            clock.update(zip(learned, ends.tolist(), strict=True))
        now += record["seconds"]
    for update, seconds in _uncommitted(metrics, committed):
        now += seconds
        clock[update] = now
    return np.array([clock.get(update, np.nan) for update in updates])


def total_seconds(spent: StageSeconds) -> dict[str, float]:
    """Seconds per activity over all stages, in the order of ACTIVITIES; `wait` only where it occurs."""
    waits = any("wait" in row for row in spent.values())
    totals: dict[str, float] = {name: 0.0 for name in ACTIVITIES if name != "wait" or waits}
    for row in spent.values():
        for name, seconds in row.items():
            totals[name] = totals.get(name, 0.0) + seconds
    idle = totals.pop(IDLE, 0.0)
    return {**totals, IDLE: idle}


def _add(spent: StageSeconds, stage: int, event: str, seconds: float) -> None:
    row = spent.setdefault(stage, {})
    row[event] = row.get(event, 0.0) + seconds


def _uncommitted(metrics: Mapping[str, Column], committed: int) -> list[tuple[int, float]]:
    if "seconds" not in metrics:
        return []
    pairs = zip(metrics["update"].tolist(), np.nan_to_num(metrics["seconds"]).tolist(), strict=True)
    return [(int(update), seconds) for update, seconds in pairs if update >= committed]


MOST_NOTES = 3  # notes about the damage of one file
# Config keys that do not change the results.
UNIMPORTANT = frozenset({"format", "name", "runs", "trackers", "task.max_unscored", "evaluation.suite"})


@dataclass(frozen=True, slots=True)
class Rollback:
    """Updates that the collapse guard rolled back."""

    record: dict[str, Any]  # rollback.json: reason and versions
    metrics: dict[str, Column]
    evaluations: list[dict[str, Any]]
    batches: list[BatchManifest]  # generated and no longer used
    clock: Column


@dataclass(frozen=True, slots=True)
class Run:
    """The records of a run directory. Fields are empty if the run has not got that far."""

    directory: Path
    label: str  # unique on the page
    config: dict[str, Any]  # dotted keys
    environment: dict[str, Any]
    schedule: Schedule  # as planned
    planned_updates: int  # from the schedule, or from the rollouts given to `stalewise learn`
    metrics: dict[str, Column]  # by key, one value per recorded update; NaN where a record lacks the key
    evaluations: list[dict[str, Any]]  # by version
    batches: list[BatchManifest]  # committed, in order of generation
    sources: list[dict[str, Any]]  # batches of other runs, given to `stalewise learn`
    unfinished: dict[str, int]  # rollouts so far of uncommitted batches, by directory name
    stages: dict[int, dict[str, Any]]  # by generation batch, where stages end when their data is spent
    rollbacks: list[Rollback]
    spent: StageSeconds
    generator: StageSeconds  # time of the second process of a pipelined run
    clock: Column  # seconds of training until the end of each recorded update
    committed: int  # updates covered by the newest checkpoint, according to the journal
    notes: list[str] = field(default_factory=list)  # what was left out while reading
    suites: list[dict[str, Any]] = field(default_factory=list)  # evaluations on suites, by suite and version
    fork: dict[str, Any] = field(default_factory=dict)  # fork.json: what the run was forked from
    config_changes: list[dict[str, Any]] = field(default_factory=list)  # journal records of settings changed in place

    @property
    def updates(self) -> int:
        """Updates on record."""
        return len(self.metrics.get("update", ()))

    @property
    def updates_rolled_back(self) -> int:
        """Updates that were made and later rolled back."""
        return sum(len(rollback.metrics.get("update", ())) for rollback in self.rollbacks)

    @property
    def rollouts_rolled_back(self) -> int:
        """Rollouts that were generated and later rolled back."""
        return sum(batch.rows for rollback in self.rollbacks for batch in rollback.batches)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by activity, over all stages."""
        return total_seconds(self.spent)

    @property
    def total_seconds(self) -> float:
        """Wall-clock time, including idle time."""
        return sum(self.seconds.values())

    @property
    def training_seconds(self) -> float:
        """Wall-clock time without evaluation and idle time."""
        return sum(seconds for name, seconds in self.seconds.items() if name not in NOT_TRAINING)

    @property
    def is_complete(self) -> bool:
        """Whether all updates were made and the final policy was evaluated."""
        evaluated = {record["version"] for record in self.evaluations}
        return self.updates == self.planned_updates and self.planned_updates in evaluated

    @property
    def is_open_ended(self) -> bool:
        """Whether stages end when their data is spent, so that their number is not planned."""
        return self.config.get("schedule.end") == "spent"

    @property
    def stage_starts(self) -> list[int]:
        """First updates on each generation batch but the first."""
        batch, update = self.column("generation_batch"), self.column("update")
        return update[1:][np.diff(batch) != 0].astype(int).tolist() if len(batch) else []

    @property
    def tasks(self) -> list[str]:
        """Labels of the tasks of a mixture; none for another task."""
        named = [key.removeprefix("reward/") for key in self.metrics if key.startswith("reward/")]
        return list(
            dict.fromkeys([*named, *(task for record in self.evaluations for task in record.get("by_task") or ())])
        )

    def task_rewards(self, task: str) -> tuple[float, float]:
        """Mean reward of a task of a mixture over the first and the last tenth of the updates; NaN where unknown."""
        values = self.column(f"reward/{task}")
        count = max(1, len(values) // 10)
        known = [part[np.isfinite(part)] for part in (values[:count], values[len(values) - count :])]
        first, last = (float(part.mean()) if len(part) else float("nan") for part in known)
        return first, last

    def column(self, key: str) -> Column:
        """The values of one metric; empty where no record has it."""
        return self.metrics.get(key, np.empty(0))

    def finite(self, key: str) -> Column:
        """The finite values of one metric."""
        values = self.column(key)
        return values[np.isfinite(values)]

    def seconds_at(self, version: int) -> float:
        """Seconds of training until a version existed; NaN if unknown."""
        return version_clock(self.metrics, self.clock, version)


def version_clock(metrics: Mapping[str, Column], clock: Column, version: int) -> float:
    """Seconds of training until a version existed, at the end of update `version - 1`; NaN if unknown."""
    if version == 0:
        return 0.0
    rows = np.flatnonzero(metrics.get("update", np.empty(0)) == version - 1)
    return float(clock[rows[0]]) if len(rows) else float("nan")


def read_runs(directories: Sequence[Path]) -> list[Run]:
    """Read several runs and give each a unique label."""
    if not directories:
        raise StoreError("there is no run directory to report on: name at least one")
    paths = [Path(directory) for directory in directories]
    if len({path.resolve() for path in paths}) < len(paths):
        raise StoreError("a run directory is named twice: " + ", ".join(map(str, paths)))
    return [read_run(path, label) for path, label in zip(paths, unique_labels(paths), strict=True)]


def unique_labels(paths: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that are unique."""
    parts = [path.resolve().parts for path in paths]
    for length in range(1, max(map(len, parts)) + 1):
        labels = ["/".join(part[-length:]) for part in parts]
        if len(set(labels)) == len(labels):
            return labels
    return [str(path) for path in paths]


def read_run(directory: Path, label: str | None = None) -> Run:
    """Read one run directory. Only its config is required; damaged records are left out and listed in `notes`."""
    directory = Path(directory)
    config = read_resolved(directory)
    notes: list[str] = []
    metrics = metric_columns(usable_records(directory / "metrics.jsonl", METRIC, notes))
    journal = usable_records(directory / "journal.jsonl", JOURNAL, notes)
    rollbacks = read_rollbacks(directory / "rollbacks", journal, notes)
    committed = committed_updates(journal, [rollback.record for rollback in rollbacks])
    schedule = _schedule(config, directory)
    batch_of = dict(zip(metrics.get("update", ()), metrics.get("generation_batch", ()), strict=False))

    def stage_of(update: int) -> int:
        batch = batch_of.get(update, np.nan)
        planned = min(update, schedule.updates - 1) // schedule.updates_per_generation
        return int(batch) if np.isfinite(batch) else planned

    config_changes = [line for line in journal if line["event"] == "config" and isinstance(line.get("changes"), dict)]
    journal = [line for line in journal if line["event"] not in NOTES]
    spent = seconds_by_stage(journal, stage_of)
    add_uncommitted(spent, metrics, committed, stage_of)
    generator = usable_records(directory / "journal-generator.jsonl", JOURNAL, notes)
    stages = usable_records(directory / "ledger" / "stages.jsonl", STAGE, notes)
    batches, unfinished = read_batches(directory / "rollouts", notes)
    sources = _json_or_empty(directory / "sources.json", notes, SOURCES).get("batches", [])
    return Run(
        directory=directory,
        label=label or directory.resolve().name,
        config=_without_place(flatten(config, keep_empty=True)),
        environment=flatten(_json_or_empty(directory / "environment.json", notes), keep_empty=True),
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
        generator=seconds_by_stage(generator, stage_of),
        clock=update_clock(journal, metrics, committed),
        committed=committed,
        notes=notes,
        suites=read_suites(directory / "suites.jsonl", notes),
        fork=_fork(directory, notes),
        config_changes=config_changes,
    )


def _fork(directory: Path, notes: list[str]) -> dict[str, Any]:
    try:
        record = read_fork(directory)
        if record and not FORKED.accepts(record):
            raise StoreError(f"{directory / FORK} lacks {', '.join(FORKED.required)}")
        return record
    except (StoreError, OSError) as error:
        notes.append(f"what the run was forked from is unknown: {error}")
        return {}


def _schedule(config: Mapping[str, Any], directory: Path) -> Schedule:
    try:
        return schedule_of(ScheduleSection.model_validate(config["schedule"]), directory)
    except (KeyError, ValueError) as error:
        what = f"{directory / RESOLVED} has no usable schedule ({' '.join(str(error).split())})"
        raise StoreError(f"{what}: restore it from a copy") from error


def usable_records(path: Path, schema: RecordSchema, notes: list[str]) -> list[dict[str, Any]]:
    """The usable records of a JSONL file. Damage goes to `notes`."""
    damage: list[str] = []
    records = read_records(path, schema, damage.append)
    notes += damage[:MOST_NOTES]
    if len(damage) > MOST_NOTES:
        notes.append(f"{path}: {len(damage) - MOST_NOTES:,} more lines are damaged; {len(records):,} are used")
    return records


def _json_or_empty(path: Path, notes: list[str], schema: RecordSchema = ANY) -> dict[str, Any]:
    try:
        return read_record(path, schema) if path.is_file() else {}
    except StoreError as error:
        notes.append(str(error))
    except OSError as error:
        notes.append(f"{unreadable(path, error)}: left out")
    return {}


def unreadable(path: Path, error: OSError) -> str:
    """Error message for a file that cannot be read."""
    return f"cannot read {path}: {error.strerror or error}"


def read_evaluations(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """Evaluations by version; the last record of a version counts."""
    by_version = {record["version"]: record for record in usable_records(path, EVALUATION, notes)}
    return [by_version[version] for version in sorted(by_version)]


def read_suites(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """Evaluations on suites, in the order in which suites appear, then by version; the last record of both counts."""
    records = usable_records(path, SUITE, notes)
    last = {(record["suite"], record["version"]): record for record in records}
    names = list(dict.fromkeys(record["suite"] for record in records))
    return [last[key] for key in sorted(last, key=lambda key: (names.index(key[0]), key[1]))]


def read_rollbacks(root: Path, journal: Sequence[Mapping[str, Any]], notes: list[str]) -> list[Rollback]:
    """The rollbacks of a run, oldest first, with the records they removed."""
    rollbacks: list[Rollback] = []
    for directory in sorted(root.glob("r[0-9]*")) if root.is_dir() else ():
        record = _json_or_empty(directory / "rollback.json", notes)
        if not ROLLBACK.accepts(record):
            notes.append(f"{directory} has no complete rollback.json: left out")
            continue
        metrics = metric_columns(usable_records(directory / "metrics.jsonl", METRIC, notes))
        before = [entry for entry in journal if entry["time"] <= record["time"]]
        committed = committed_updates(before, [earlier.record for earlier in rollbacks])
        clock = update_clock(before, metrics, committed)
        batches, _ = read_batches(directory / "rollouts", notes)
        evaluations = read_evaluations(directory / "eval.jsonl", notes)
        rollbacks.append(Rollback(record, metrics, evaluations, batches, clock))
    return rollbacks


def read_batches(rollouts: Path, notes: list[str]) -> tuple[list[BatchManifest], dict[str, int]]:
    """Manifests of committed generation batches, and the rollouts so far of the others. Shards may be missing."""
    manifests: list[BatchManifest] = []
    unfinished: dict[str, int] = {}
    try:
        directories = batch_directories(rollouts)
    except OSError as error:
        notes.append(f"{unreadable(rollouts, error)}: its generation batches are left out")
        return manifests, unfinished
    for directory in directories:
        try:
            if (directory / BATCH_MANIFEST).is_file():
                manifests.append(read_batch_manifest(directory))
                notes.extend(_damaged_shards(directory, manifests[-1]))
            else:
                unfinished[directory.name] = sum(shard.rows for shard in committed_shards(directory))
        except (StoreError, OSError) as error:
            notes.append(f"generation batch {directory.name} is left out: {error}")
    return manifests, unfinished


def _damaged_shards(directory: Path, manifest: BatchManifest) -> Iterable[str]:
    """Shards whose size differs from their manifest. Their content is not read."""
    for shard in manifest.shards:
        path = directory / shard.file
        if path.is_file() and (size := path.stat().st_size) != shard.bytes:
            what = f"it has {size:,} bytes and should have {shard.bytes:,}"
            yield f"{path} is damaged: {what}; move it away, and the same command generates it again"


def verifier_errors(run: Run) -> Counter[str]:
    """Verifier errors in rollouts and evaluations, counted by kind."""
    kinds: Counter[str] = Counter()
    counts = [(batch.verifier_errors, batch.extra.get("verifier_error_kinds", {})) for batch in run.batches]
    counts += [(record["verifier_errors"], record.get("verifier_error_kinds", {})) for record in run.evaluations]
    for count, by_kind in counts:
        named = by_kind if is_counts(by_kind) else {}
        kinds.update(named)
        kinds["of no recorded kind"] += count - sum(named.values())
    return +kinds


def _without_place(config: dict[str, Any]) -> dict[str, Any]:
    """Shorten paths of copied data and models to names made of their content, which are equal in all runs."""
    own = f"{config.get('runs')}/{config.get('name')}/"
    copies = (f"{own}data/", f"{own}model-")
    return {k: v.removeprefix(own) if isinstance(v, str) and v.startswith(copies) else v for k, v in config.items()}


def metric_columns(records: Iterable[Mapping[str, Any]]) -> dict[str, Column]:
    """Records as columns, sorted by update; the last record of an update counts."""
    by_update = {record["update"]: record for record in records}
    rows = [by_update[update] for update in sorted(by_update)]
    keys = list(dict.fromkeys(key for row in rows for key in row))
    table = [[row.get(key) for row in rows] for key in keys]
    numbers = [[float(value) if isinstance(value, int | float) else np.nan for value in column] for column in table]
    return {key: np.array(column) for key, column in zip(keys, numbers, strict=True)}


def differing_keys(tables: Sequence[Mapping[str, Any]]) -> list[str]:
    """Keys whose values differ between tables, in order of first appearance."""
    keys = dict.fromkeys(key for table in tables for key in table)
    absent = object()
    return [key for key in keys if any(table.get(key, absent) != tables[0].get(key, absent) for table in tables[1:])]
