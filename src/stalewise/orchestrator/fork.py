"""A fork: a new run that begins at a checkpoint of another run, with some settings changed.

Its directory is that of the other run at that version: the checkpoint with its optimizer state, the records of the
updates so far, their rollouts, and rollouts that are not used yet. Files are linked if the file system can, since
committed files never change. Without a change of settings the fork ends in the same weights as the run itself.

A setting that rollouts depend on (`OF_ROLLOUTS`), or a schedule under which the batches so far would have been others,
ends the current stage: the fork generates its first batch with the policy of the checkpoint. `fork.json` records where
the run comes from, what was changed, and the batches before the fork.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stalewise.config import RunConfig, make_config, set_dotted, write_resolved
from stalewise.config.run import with_moved_files
from stalewise.config.run_directory import (
    FORK,
    FORK_FORMAT,
    LIMITS_FILE,
    LIMITS_FORMAT,
    OF_THE_CHECKPOINT,
    REFERENCE_FILE,
    RESOLVED,
    all_changes,
    flatten,
    read_config,
    read_fork,
)
from stalewise.errors import ConfigError, StoreError, nearest
from stalewise.orchestrator.run_log import RunLog
from stalewise.orchestrator.stages import read_schedule
from stalewise.planning.planner import budget_limits
from stalewise.staleness.schedule import PastBatch
from stalewise.staleness.spent import Stage
from stalewise.store import (
    LedgerEntry,
    atomic,
    batch_directories,
    batch_directory,
    checkpoints,
    is_committed,
    ledger_path,
    open_batch,
    parse_batch_name,
    read_ledger,
    token_files,
    token_log_directory,
)
from stalewise.store.json_lines import commit_records, read_jsonl, write_lines
from stalewise.store.token_log import token_manifest_path
from stalewise.tasks.difficulty import COPY as DIFFICULTY
from stalewise.tasks.difficulty import read_table

# Settings that decide what a generation batch holds; `max_unscored` and engines do not.
OF_ROLLOUTS = ("seed", "task.", "batch.", "sampler.", "model.path")
FREE = ("task.max_unscored", "sampler.engine", "sampler.vllm.", "sampler.server.")
OF_EVALUATIONS = ("task.name", "task.options", "task.mixture", "sampler.max_new_tokens")
OF_LIMITS = ("schedule.", "optimizer.", "objective.", "batch.", "plan.")
OF_KINDS = ("stages", "updates_per_generation", "lag", "generator_device", "end", "spent_ess")


def fork(
    run: str | Path,
    *,
    at: int | None = None,
    settings: Mapping[str, Any] | None = None,
    unset: Sequence[str] = (),
    name: str | None = None,
    log: Callable[[str], object] | None = None,
) -> RunConfig:
    """Make a run that begins at version `at` of another one (default: its newest), and return its config.

    `settings` are changes by dotted names; `unset` names settings that get their default. The new directory appears as
    a whole or not at all. `log` gets messages; by default they go to stderr.
    """
    run, log = Path(run), log or _print
    recorded = read_config(run)
    if (run / "sources.json").is_file():
        raise StoreError(
            f"{run} learned from rollouts of other runs and cannot be forked: name a run that `train` made"
        )
    version = checkpoints.pick_version(run, at, "fork")
    checkpoints.read_state(checkpoints.checkpoint_directory(run, version))  # compares checksums
    config = _changed_config(recorded, run, version, dict(settings or {}), unset, name)
    final = config.directory
    if os.path.lexists(final):
        raise StoreError(f"{final} exists: `stalewise train {final}` continues it; or choose another --name")
    atomic.remove_temporaries(final.parent, spare=lambda path: not path.name.startswith(f".{final.name}.tmp-"))
    temporary = atomic.temporary_name(final)
    try:
        with atomic.explain_write_errors(final, 0):
            atomic.make_directory(temporary)
            _Fork(run, recorded, config, version, temporary).fill(log)
            write_resolved(config, temporary / RESOLVED)
        atomic.commit_directory(temporary, final)
    except FileNotFoundError as error:
        raise StoreError(f"{error.filename} was removed while it was linked: the run goes on; try again") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return config


def _print(text: str) -> None:
    print(text, file=sys.stderr)


def _changed_config(
    recorded: RunConfig, run: Path, version: int, settings: dict[str, Any], unset: Sequence[str], name: str | None
) -> RunConfig:
    """The config of the fork; ConfigError for settings that a fork cannot change."""
    before = recorded.model_dump(mode="json")
    record = json.loads(json.dumps(before))
    known = {*flatten(RunConfig().model_dump(mode="json")), *flatten(record)}
    for key in unset:
        if key not in known:
            raise ConfigError(f"--unset {key}: there is no such setting; {nearest(key, known)}")
    for key in [*unset, *settings]:
        if key in ("name", "runs"):
            raise ConfigError(f"{key} is not a change of settings: --name names the fork, which lies beside its run")
        if key.startswith(OF_THE_CHECKPOINT):
            raise ConfigError(
                f"a fork takes {key} from its checkpoint: start a new run with model.path = that checkpoint"
            )
    dropped = [f"schedule.{key}" for key in OF_KINDS if "schedule.kind" in settings or "schedule.end" in settings]
    for key in [*unset, *(key for key in dropped if key not in settings)]:
        _remove(record, key)
    for key, value in settings.items():
        set_dotted(record, key, value)
    record |= {"name": name or f"{run.resolve().name}-v{version}", "runs": str(run.parent)}
    config = make_config(_with_files(record, before), source="fork")
    precisions = {config.model.precision, recorded.model.precision}
    if "bfloat16-only" in precisions and len(precisions) == 2:
        raise ConfigError("a fork cannot change model.precision to or from bfloat16-only: weights are stored so")
    if config.storage.url and config.storage.url == recorded.storage.url:
        raise ConfigError(f"storage.url belongs to {run}: --set storage.url=… another place, or --unset storage.url")
    if config.schedule.updates <= version:
        raise ConfigError(
            f"version {version} is the last of schedule.updates = {config.schedule.updates}: nothing is left to train; "
            f"--set schedule.updates={2 * version or 1} would train on"
        )
    planned = any(key.startswith("schedule.") for key in settings) and "optimizer.learning_rate" not in settings
    if not planned or (config.plan.learning_rate == "given" and config.sampler.engine != "auto"):
        return config  # the engine and the learning rate are known
    from stalewise.orchestrator.setup import resolve_settings  # imports torch, which other forks do not need

    return resolve_settings(config)


def _remove(record: dict[str, Any], key: str) -> None:
    *tables, last = key.split(".")
    for table in tables:
        record = record.get(table) or {}
    record.pop(last, None)


def _with_files(record: dict[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """The record with its files in the run directory (see `with_moved_files`) in the new one."""
    old = {**record, "name": before["name"], "runs": before["runs"]}
    moved = with_moved_files(old, str(Path(record["runs"]) / record["name"]))
    return {**moved, "name": record["name"], "runs": record["runs"]}


class _Fork:
    """Fills the directory of a fork."""

    def __init__(self, run: Path, recorded: RunConfig, config: RunConfig, version: int, target: Path) -> None:
        self.run = run
        self.version = version
        self.target = target
        self.recorded = recorded
        self.config = config
        self.log = RunLog(run)
        self.parent = read_fork(run)
        self.old = read_schedule(recorded.schedule, self.log.stages_path)
        self.changes = all_changes(config.model_dump(mode="json"), recorded.model_dump(mode="json"))
        self.rollbacks, self.dropped = _rollbacks_before(run, version)
        self.ledger = [entry for entry in read_ledger(ledger_path(run)) if entry.update < version]
        if [entry.update for entry in self.ledger] != list(range(version)):
            raise StoreError(f"{ledger_path(run)} does not have all updates before version {version}: cannot fork")

    def fill(self, log: Callable[[str], object]) -> None:
        """Link and write everything but the config."""
        past, ahead = past_batches(self.ledger), self._batches_ahead()
        fits = self._new_schedule_agrees() and self._has_all(ahead)
        self._link_policy(with_earlier=fits and self.config.guard.action != "off")
        used = {batch.generation_batch for batch in past}
        for directory in filter(is_committed, batch_directories(self.run / "rollouts")):
            if parse_batch_name(directory).generation_batch in used or (fits and directory.name in ahead):
                self._link(directory)
        forked = self.parent.get("schedule")
        if not fits:  # of a batch in use, the part that was used belongs to the past
            forked = {"past": [list(asdict(batch).values()) for batch in past], "first_prompt": self._prompt()}
            for name in ahead:
                log(f"{name} does not fit the new settings: version {self.version} generates its own")
        self._write_records()
        if self.config.schedule.end == "spent":
            begun = [line for line in read_jsonl(self.log.stages_path) if line["first_update"] <= self.version]
            lines = begun if fits else self._past_stages(past, self._prompt())
            self._write_lines(self.log.stages_path, lines)
        self._write_lineage(forked, ahead if fits else ())

    def _link_policy(self, *, with_earlier: bool) -> None:
        """Link the checkpoint and the files that belong to it; also earlier checkpoints if a guard may need them."""
        names = {self.version}
        if self.recorded.model.trains_adapters:
            names.add(0)  # the base of the adapters
        if self.config.objective.kl and self.config.objective.reference == "initial":
            if not checkpoints.checkpoint_directory(self.run, 0).is_dir():
                raise ConfigError(
                    f'objective.reference is "initial", but {self.run} no longer has version 0: name a model in '
                    "objective.reference"
                )
            names.add(0)
        if with_earlier:
            names |= {version for version in checkpoints.versions(self.run) if version <= self.version}
        for version in names:
            self._link(checkpoints.checkpoint_directory(self.run, version))
        for path in [
            self.run / "environment.json",
            self.run / "data",
            self.run / "python",
            *self.run.glob("model-*"),
            *self.rollbacks,
        ]:
            self._link(path)
        if self.config.objective.kl and "objective.reference" not in self.changes:
            self._link(self.run / REFERENCE_FILE)
            self._link(self.run / "columns")
        if "task.difficulty" not in self.changes:
            self._link(self.run / DIFFICULTY)
        elif self.config.task.difficulty:
            read_table(self.config.task.difficulty, atomic.read_json)  # raises if it is not a table
            table = atomic.read_json(self.config.task.difficulty)
            atomic.write_json_atomic(self.target / DIFFICULTY, table, sealed=True)
        for path in token_files(token_log_directory(self.run)):
            if int(path.stem.rpartition("u")[2]) < self.version:
                self._link(path)
                self._link(token_manifest_path(path))

    def _link(self, source: Path) -> None:
        if source.exists():
            link_tree(source, self.target / source.relative_to(self.run))

    def _rollouts_change(self) -> bool:
        return any(key.startswith(OF_ROLLOUTS) and not key.startswith(FREE) for key in self.changes)

    def _batches_ahead(self) -> list[str]:
        """Names of the batches that versions up to this one made for updates from here on."""
        if self.version >= self.old.updates:
            return []
        numbers = range(self.old.generation_batches)
        coming = [g for g in numbers if self.old.updates_of(g).stop > self.version and self.old.updates_of(g)]
        made = [g for g in coming if self.old.version_of(g) <= self.version and not self._was_made_again(g)]
        paths = {g: batch_directory("", version=self.old.version_of(g), generation_batch=g) for g in made}
        return [path.name for path in paths.values() if is_committed(self.run / "rollouts" / path.name)]

    def _was_made_again(self, generation_batch: int) -> bool:
        """Whether a rollback that the fork leaves out replaced this batch by one with other seeds."""
        fresh = (record["fresh_from_batch"] for record in self.dropped)
        return any(first is not None and first <= generation_batch for first in fresh)

    def _new_schedule_agrees(self) -> bool:
        """Whether the batches so far, and those ahead, would be the same under the new settings."""
        if self._rollouts_change():
            return False
        if not any(key.startswith("schedule.") for key in self.changes):
            return True
        if self.old.is_open_ended or self.config.schedule.end == "spent":
            only_longer = {key for key in self.changes if key.startswith("schedule.")} <= {"schedule.updates"}
            return self.old.is_open_ended and only_longer
        new, old = self.config.schedule.schedule(), self.old
        steps = [(new.at(update).generation_batch, new.at(update).version) for update in range(len(self.ledger))]
        if steps != [(entry.generation_batch, entry.version) for entry in self.ledger] or self.parent.get("schedule"):
            return False
        batch = new.at(self.version).generation_batch
        is_within = new.updates_of(batch).start < self.version
        return not is_within or new.updates_of(batch) == old.updates_of(batch)

    def _has_all(self, ahead: Iterable[str]) -> bool:
        """Whether all batches exist that only earlier versions can make."""
        if self.version >= self.old.updates:
            return True
        numbers = [g for g in range(self.old.generation_batches) if self.old.updates_of(g).stop > self.version]
        needed = [g for g in numbers if self.old.updates_of(g) and self.old.version_of(g) < self.version]
        return {*needed} <= {parse_batch_name(name).generation_batch for name in ahead}

    def _prompt(self) -> int:
        """The first prompt of the first new batch: after all generated ones, so that rollout ids stay unique."""
        last = max((last for entry in self.ledger for _, last in entry.rollout_ids), default=-1)
        for directory in filter(is_committed, batch_directories(self.run / "rollouts")):
            last = max([last, *(shard.rollout_last for shard in open_batch(directory, verify=False).manifest.shards)])
        return -(-(last + 1) // self.config.batch.group_size)

    def _write_records(self) -> None:
        version = self.version
        evaluated = not any(key.startswith(OF_EVALUATIONS) for key in self.changes)
        for path, key, end in (
            (self.log.metrics_path, "update", version),
            (ledger_path(self.run), "update", version),
            (self.log.evaluations_path, "version", version + 1 if evaluated else 0),
            (self.log.suites_path, "version", version + 1 if evaluated else 0),
        ):
            self._write_lines(path, [line for line in read_jsonl(path) if line[key] < end])
        self._write_lines(self.log.journal_path, _journal_until(read_jsonl(self.log.journal_path), version))
        if (self.run / LIMITS_FILE).is_file():
            if any(key.startswith(OF_LIMITS) for key in self.changes):
                limits = {"format": LIMITS_FORMAT, "limits": budget_limits(self.config)}
                atomic.write_json_atomic(self.target / LIMITS_FILE, limits, sealed=True)
            else:
                shutil.copyfile(self.run / LIMITS_FILE, self.target / LIMITS_FILE)

    def _past_stages(self, past: Sequence[PastBatch], first_prompt: int) -> list[dict[str, Any]]:
        """Past batches as stages. The next stage doubles the last of them; its prompts begin at `first_prompt`."""
        if any(batch.version != batch.first_update for batch in past):
            raise ConfigError('a pipelined run cannot be forked to end = "spent": its batches overlap')
        lines: list[dict[str, Any]] = []
        for batch in past:
            start = first_prompt - batch.planned_updates * self.config.batch.reserved
            stage = Stage(batch.generation_batch, batch.first_update, batch.planned_updates, start)
            lines.append({**asdict(stage), "ended": None})
        return lines

    def _write_lines(self, path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
        if records := list(lines):
            write_lines(self.target / path.relative_to(self.run), records)

    def _write_lineage(self, forked: Mapping[str, Any] | None, kept: Sequence[str]) -> None:
        parent = self.parent
        manifest = checkpoints.checkpoint_directory(self.run, self.version) / "manifest.json"
        record = {
            "format": FORK_FORMAT,
            "time": time.time(),
            "run": str(self.run.resolve()),
            "version": self.version,
            "checkpoint": atomic.sha256_file(manifest),
            "changes": self.changes,
            "rollouts": list(kept),
        }
        ancestors = (
            [{key: parent[key] for key in ("run", "version", "changes")}, *parent["ancestors"]] if parent else []
        )
        atomic.write_json_atomic(
            self.target / FORK, {**record, "ancestors": ancestors, "schedule": forked}, sealed=True
        )
        details = {"version": self.version, "run": self.run.name, "changes": self.changes}
        RunLog(self.target).log_event("fork", 0.0, **details)
        commit_records(self.target)


def past_batches(ledger: Sequence[LedgerEntry]) -> list[PastBatch]:
    """The generation batches of these updates, numbered from 0 in their order."""
    past: list[PastBatch] = []
    for entry in ledger:
        if past and past[-1].generation_batch == entry.generation_batch:
            last = past.pop()
            past.append(PastBatch(last.generation_batch, last.first_update, last.planned_updates + 1, last.made_by))
        else:
            past.append(PastBatch(entry.generation_batch, entry.update, 1, entry.version))
    return past


def _rollbacks_before(run: Path, version: int) -> tuple[list[Path], list[dict[str, Any]]]:
    """The rollbacks from before this checkpoint was written, and the records of later ones."""
    paths = sorted((run / "rollbacks").glob("r[0-9]*"))
    records = [atomic.read_json(path / "rollback.json") for path in paths]
    # A rollback removes what is after its target: a checkpoint after the target was written after the rollback.
    count = max((number for number, record in enumerate(records, start=1) if record["to_version"] < version), default=0)
    return paths[:count], records[count:]


def _journal_until(journal: Sequence[dict[str, Any]], version: int) -> list[dict[str, Any]]:
    """The journal up to the checkpoint of this version."""
    ends = [i for i, line in enumerate(journal) if line["event"] == "learn" and line["stop"] == version]
    return list(journal[: ends[-1] + 1]) if ends else [line for line in journal if line.get("version", 1) == 0]


def link_tree(source: Path, target: Path) -> None:
    """Link a file, or all files under a directory; copy where the file system cannot. Temporary files are left out."""
    files = [path for path in source.rglob("*") if path.is_file()] if source.is_dir() else [source]
    for path in files:
        if any(part.startswith(".") for part in path.relative_to(source).parts):
            continue
        to = target / path.relative_to(source)
        to.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(path, to)
        except FileNotFoundError:
            raise
        except OSError:  # another file system, or one without links
            shutil.copyfile(path, to)
