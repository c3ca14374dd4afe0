"""Verifies the files of a run directory, with consequences and remedies of damage: `stalewise verify`.

Every file is compared with a checksum: weights and optimizer with their checkpoint's manifest; shards, token logs and
versions of rewards with their manifests; JSON files with the checksum at their end; JSONL files line by line and with
`records.json`; columns with the checksums of their pages; a program's rows with the digest in their path. Files that an
older release wrote without checksums are "not covered": neither damaged nor verified.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stalewise.config.run_directory import RESOLVED, is_started, not_a_run, read_config
from stalewise.errors import StalewiseError, StoreError
from stalewise.store import LedgerEntry, ShardManifest, batch_directories, parse_batch_name, read_ledger, verify_shard
from stalewise.store.atomic import has_seal, read_json, sha256_file
from stalewise.store.checkpoints import STATE, checkpoint_directory, damaged_files, read_manifest, versions
from stalewise.store.columns import column_problem
from stalewise.store.json_lines import RECORDS, committed_ends, scan_lines
from stalewise.store.manifest import (
    BATCH_MANIFEST,
    committed_shards,
    read_batch_manifest,
    read_shard_manifest,
    shard_manifest_path,
)
from stalewise.store.records import (
    CALLS,
    DIFFICULTY,
    EVALUATION,
    FORKED,
    JOURNAL,
    LEDGER,
    LIMITS,
    METRIC,
    REFERENCE,
    ROLLBACK,
    SOURCES,
    STAGE,
    SUITE,
    RecordSchema,
    read_record,
    read_records,
)
from stalewise.store.reward_versions import read_version, versions_directory
from stalewise.store.token_log import check_token_file, token_files, token_manifest_path

# Each record of a run: its schema, what depends on it, and how it can be made again.
_AGAIN = "only from a copy: the updates before the newest checkpoint are not taken again"
RECORD_FILES: dict[str, tuple[RecordSchema, str, str]] = {
    "metrics.jsonl": (METRIC, "report, compare, the collapse guard and drift budgets", _AGAIN),
    "ledger/updates.jsonl": (LEDGER, "which rollouts each update used: inspect, serve, learn --unused", _AGAIN),
    "ledger/stages.jsonl": (STAGE, "where stages begin, and so what is trained next", _AGAIN),
    "eval.jsonl": (
        EVALUATION,
        "accuracies in report, compare and model card; the collapse guard",
        "by `stalewise eval` of a version whose checkpoint exists",
    ),
    "suites.jsonl": (
        SUITE,
        "accuracies on suites in report and model card",
        "by `stalewise eval --suite` of a version whose checkpoint exists",
    ),
    "journal.jsonl": (
        JOURNAL,
        "times in report and compare; no weight",
        "only from a copy: times are not measured twice",
    ),
    "journal-generator.jsonl": (JOURNAL, "times of the second process; no weight", "only from a copy"),
}
DOCUMENTS: dict[str, tuple[RecordSchema, str, str]] = {
    "environment.json": (
        RecordSchema({}),
        "what the report says about the machine",
        "`stalewise train` writes it anew",
    ),
    "limits.json": (LIMITS, "the drift budgets", "only from a copy: a later calibration may differ"),
    "fork.json": (FORKED, "what a forked run started from, and its schedule", "only from a copy"),
    "sources.json": (SOURCES, "which rollouts of other runs this one learned from", "only from a copy"),
    "difficulty.json": (DIFFICULTY, "which prompts are trained on", "only from a copy of the table"),
    "reference.json": (
        REFERENCE,
        "which weights the reference has",
        "delete it, and `columns/`: `stalewise train` computes both again",
    ),
}
OF_A_PROGRAM = "what a program gave; not read once there is a checkpoint"
_OLD = "written by a release without checksums: a change would not be noticed"
_CHECKPOINT = re.compile(r"v\d{6,}")


@dataclass(frozen=True, slots=True)
class Damage:
    """A file that is missing or changed."""

    file: str  # relative to the run directory
    problem: str
    depends: str  # what depends on it
    again: str  # how it can be made again
    stops: bool = True  # whether `train` and `export` must not go on


@dataclass(slots=True)
class Verification:
    """The result of verifying a run directory."""

    directory: Path
    damaged: list[Damage] = field(default_factory=list[Damage])
    not_covered: list[str] = field(default_factory=list[str])
    files: dict[str, int] = field(default_factory=dict[str, int])  # compared with a checksum, by kind
    bytes: int = 0
    seconds: float = 0.0

    def count(self, kind: str, *paths: Path) -> None:
        """Note files that are compared with checksums."""
        self.files[kind] = self.files.get(kind, 0) + len(paths)
        self.bytes += sum(path.stat().st_size for path in paths if path.is_file())

    def record(self) -> dict[str, Any]:
        """The result as plain values, for `--json`."""
        damaged = [{name: getattr(damage, name) for name in Damage.__slots__} for damage in self.damaged]
        parts = {"files": self.files, "bytes": self.bytes, "seconds": round(self.seconds, 3)}
        return {"directory": str(self.directory), "damaged": damaged, "not_covered": self.not_covered, **parts}


def verify_run(directory: str | Path, *, thorough: bool = True) -> Verification:
    """Compare all files with their checksums; without `thorough` only records and manifests."""
    began = time.perf_counter()
    found = Verification(Path(directory))
    run = found.directory
    _verify_config(found)
    ledger = _verify_lines(found, run)
    for name, (schema, depends, again) in DOCUMENTS.items():
        if (run / name).is_file():
            _verify_document(found, run / name, schema, depends, again)
        elif _is_lost(found, name, ledger):
            _add(found, run / name, "missing", depends, again, stops=name != "environment.json")
    _verify_checkpoints(found, thorough)
    _verify_updates(found, ledger)
    _verify_batches(found, run / "rollouts", ledger, thorough)
    _verify_tokens(found, run / "ledger" / "tokens", thorough)
    _verify_rewards(found, thorough)
    _verify_columns(found, thorough)
    _verify_data(found, thorough)
    for rollback in sorted((run / "rollbacks").glob("r[0-9]*")):
        _verify_rollback(found, rollback, thorough)
    others = [path.name for path in (run / "python", *sorted(run.glob("model-*"))) if path.is_dir()]
    found.not_covered += [f"{name}/: {OF_A_PROGRAM}" for name in others]
    found.seconds = time.perf_counter() - began
    return found


def check_run(directory: str | Path, *, everything: bool = False) -> Verification:
    """Raise a StoreError if a file is damaged that the run needs to continue; hashes no weights and no rollouts.

    With `everything` it also raises for damaged files that the run does not need any more.
    """
    found = verify_run(directory, thorough=False)
    if stops := [damage for damage in found.damaged if damage.stops or everything]:
        first, more = stops[0], f" and {len(stops) - 1} more" if len(stops) > 1 else ""
        what = f"{found.directory / first.file}{more} is damaged: {first.problem}"
        raise StoreError(f"{what}; made again: {first.again}; `stalewise verify {directory}` has all of it")
    return found


def _verify_config(found: Verification) -> None:
    path = found.directory / RESOLVED
    if not path.is_file() and not is_started(found.directory):
        raise StoreError(not_a_run(found.directory))
    found.count("config", path)
    try:
        read_config(found.directory)
        _note_coverage(found, path)
    except StalewiseError as error:
        depends = "what the run is: a later command could go on with other settings"
        _add(found, path, error, depends, "only from a copy, or by hand from the TOML file of the run")


def _verify_document(found: Verification, path: Path, schema: RecordSchema, depends: str, again: str) -> bool:
    found.count("json", path)
    try:
        read_record(path, schema)
    except StoreError as error:
        stops = path.name != "environment.json"  # which is written anew by every start
        _add(found, path, error, depends, again, stops=stops)
        return False
    _note_coverage(found, path)
    return True


def _is_lost(found: Verification, name: str, ledger: list[LedgerEntry]) -> bool:
    """Whether a missing document must have existed; runs of older releases had fewer documents."""
    run = found.directory
    if name == "fork.json":
        journal = read_records(run / "journal.jsonl", JOURNAL, on_damage=lambda problem: None)
        return any(line["event"] == "fork" for line in journal)
    if not (run / RECORDS).is_file() or not ledger:
        return False
    if name in ("environment.json", "limits.json"):
        return True
    with contextlib.suppress(StalewiseError):  # a damaged config is reported separately
        config = read_config(run)
        wanted = {
            "difficulty.json": bool(config.task.difficulty),
            # A fork that was given a reference computes it when it goes on.
            "reference.json": config.objective.kl != 0
            and ((run / "columns").is_dir() or not (run / "fork.json").is_file()),
            # Rollouts may have stayed elsewhere.
            "sources.json": not batch_directories(run / "rollouts") and not config.storage.url,
        }
        return wanted[name]
    return False


def _verify_lines(found: Verification, run: Path) -> list[LedgerEntry]:
    """Verify JSONL files; return the ledger if it is intact."""
    try:
        ends = committed_ends(run)
        if not ends and is_started(run):
            found.not_covered.append(f"the ends of the records: {_name(found, run / RECORDS)} does not exist")
    except StoreError as error:
        again = "delete it: the next `stalewise train` writes it anew, and lost ends are unnoticed until then"
        _add(found, run / RECORDS, error, "that no record is cut off", again)
        return []
    for name, (schema, depends, again) in RECORD_FILES.items():
        if name in ends or (run / name).is_file():
            _verify_line_file(found, run / name, schema, depends, again)
    try:
        return read_ledger(run / "ledger" / "updates.jsonl")
    except StoreError as error:
        if not any(damage.file == "ledger/updates.jsonl" for damage in found.damaged):
            _add(found, run / "ledger" / "updates.jsonl", error, *RECORD_FILES["ledger/updates.jsonl"][1:])
        return []


def _verify_line_file(
    found: Verification,
    path: Path,
    schema: RecordSchema,
    depends: str,
    again: str,
    *,
    stops: bool = True,
    is_whole: bool = False,
) -> None:
    """Verify the lines of a file; a torn end is damage only if the file is complete (`is_whole`)."""
    found.count("records", path)
    try:
        torn: list[str] = []
        lines = scan_lines(path, torn.append)
        if torn and is_whole:
            raise StoreError(torn[0].removeprefix(f"{path}: "))
        found.not_covered += [f"{_name(found, path)}: its end is torn, as by a crash; it is left out" for _ in torn]
    except StoreError as error:
        return _add(found, path, error, depends, again, stops=stops)
    problems = [(line.number, line.problem or schema.problem(line.record)) for line in lines]
    wrong = [f"line {number}: {problem}" for number, problem in problems if problem]
    if wrong:
        more = f" (and {len(wrong) - 1} more lines)" if len(wrong) > 1 else ""
        return _add(found, path, f"{wrong[0]}{more}", depends, again, stops=stops)
    if old := sum(not line.is_sealed for line in lines):
        found.not_covered.append(f"{_name(found, path)}: {old:,} of {len(lines):,} lines, {_OLD}")
    return None


def _verify_checkpoints(found: Verification, thorough: bool) -> None:
    root = found.directory / "checkpoints"
    made = versions(found.directory)
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        if not _CHECKPOINT.fullmatch(path.name):
            continue
        version = int(path.name[1:])
        depends, again = _of_checkpoint(version, made)
        try:
            files = read_manifest(path)
            _note_coverage(found, path / "manifest.json")
            if thorough:  # `train` hashes the newest one itself
                found.count("checkpoints", *(path / name for name in files))
                for file in damaged_files(path):
                    _add(found, file, "missing" if not file.exists() else "its SHA-256 differs", depends, again)
            elif problem := _state_problem(path / "state.json"):
                _add(found, path / "state.json", problem, depends, again)
        except StoreError as error:
            _add(found, path / "manifest.json", error, depends, again)


def _state_problem(path: Path) -> str:
    try:
        return STATE.problem(read_json(path))
    except StoreError as error:
        return str(error)


def _of_checkpoint(version: int, made: list[int]) -> tuple[str, str]:
    """The consequences of a damaged checkpoint, and how it can be made again."""
    before = [other for other in made if other < version]
    depends = "what was generated by this version cannot be generated again"
    if not made or version >= made[-1]:
        depends = "the final policy, or what the run resumes from"
    again = "only from a copy: there is no checkpoint before it"
    if version == 0:
        again = "from model.path, in a new run"
    elif before and (not made or version >= made[-1]):
        again = f"move the checkpoint away: `stalewise train` goes on from version {before[-1]}"
    return depends, again


def _verify_updates(found: Verification, ledger: list[LedgerEntry]) -> None:
    """Verify that the ledger has every update that led to the newest checkpoint."""
    made, updates = versions(found.directory), [entry.update for entry in ledger]
    path = found.directory / "ledger" / "updates.jsonl"
    if not made or {RECORDS, _name(found, path)} & {damage.file for damage in found.damaged}:
        return
    first = updates[0] if updates else 0
    missing = sorted(set(range(first, made[-1])) - set(updates))
    if missing:
        what = f"update {missing[0]} is missing, and version {made[-1]} comes after it"
        _add(found, path, what, *RECORD_FILES["ledger/updates.jsonl"][1:])


def _verify_batches(found: Verification, root: Path, ledger: list[LedgerEntry], thorough: bool) -> None:
    names = batch_directories(root)
    for directory in names:
        number, version = parse_batch_name(directory)
        used = [entry.update for entry in ledger if entry.generation_batch == number]
        depends = f"updates {used[0]} to {used[-1]} learned from it" if used else "no update yet"
        exists = checkpoint_directory(found.directory, version).is_dir()
        again = f"only from a copy: the checkpoint of version {version} is gone"
        if exists:
            again = "move it away: `stalewise train` or `generate` makes it again from its seeds, where it is needed"
        _verify_batch(found, directory, depends, again, thorough, is_used=bool(used))
    if names or not (found.directory / "sources.json").is_file():
        there = {parse_batch_name(directory).generation_batch for directory in names}
        newest = (versions(found.directory) or [0])[-1]
        for number in sorted({e.generation_batch for e in ledger if e.update < newest} - there):
            _add(found, root, f"generation batch {number} is missing", "updates that learned from it", "", stops=False)


def _verify_batch(
    found: Verification, directory: Path, depends: str, again: str, thorough: bool, *, is_used: bool = False
) -> None:
    path, listed = directory / BATCH_MANIFEST, dict[int, ShardManifest]()
    try:
        if path.is_file():
            found.count("manifests", path)
            listed = {shard.index: shard for shard in read_batch_manifest(directory).shards}
            _note_coverage(found, path)
        elif is_used:
            _add(found, path, "missing", depends, "`stalewise generate` writes it anew from the shards", stops=False)
    except StoreError as error:
        _add(found, path, error, depends, "delete it: `stalewise train` or `generate` writes it anew from the shards")
    try:
        present = {shard.index: shard for shard in committed_shards(directory)}
    except StoreError:
        present = dict(_readable_shards(found, directory, depends, again))
    for index, shard in {**listed, **present}.items():
        manifest, file = shard_manifest_path(directory, index), directory / f"shard-{index:05d}.parquet"
        found.count("shards", file)
        if not file.is_file() or not manifest.is_file():  # the batch counts as not committed, as when it was moved away
            gone = file if not file.is_file() else manifest
            _add(found, gone, "missing", depends, again.removeprefix("move it away: "), stops=False)
            continue
        _note_coverage(found, manifest)
        if index in listed and index in present and listed[index] != present[index]:
            _add(found, manifest, f"it differs from its entry in {BATCH_MANIFEST}", depends, again)
        try:
            verify_shard(directory, shard, checksum=thorough)
        except StoreError as error:
            _add(found, file, error, depends, again, stops=False)  # opened only after its checksum was compared
    for path in sorted(directory.glob("calls-*.jsonl")):
        what = "whether environments answer again what they answered before"
        again, is_whole = "delete it: nothing else depends on it", (directory / BATCH_MANIFEST).is_file()
        _verify_line_file(found, path, CALLS, what, again, stops=not is_whole, is_whole=is_whole)


def _readable_shards(
    found: Verification, directory: Path, depends: str, again: str
) -> Iterator[tuple[int, ShardManifest]]:
    for path in sorted(directory.glob("shard-*.json")):
        try:
            index = int(path.stem.removeprefix("shard-"))
            yield index, read_shard_manifest(directory, index)
        except (StoreError, ValueError) as error:
            _add(found, path, error, depends, again)


def _verify_tokens(found: Verification, directory: Path, thorough: bool) -> None:
    depends, again = "token colours and filters in `stalewise serve`; no weight", "only from a copy"
    files = token_files(directory)
    for path in files:
        if not token_manifest_path(path).is_file():
            found.not_covered.append(f"{_name(found, path)}: {_OLD}")
            continue
        found.count("token logs", path)
        try:
            check_token_file(path, checksum=thorough)
        except StoreError as error:
            _add(found, path, error, depends, again, stops=False)
    for orphan in sorted({*directory.glob("u*.json")} - {token_manifest_path(path) for path in files}):
        _add(found, orphan.with_suffix(".parquet"), "missing", depends, again, stops=False)


def _verify_rewards(found: Verification, thorough: bool) -> None:
    root = versions_directory(found.directory)
    for directory in sorted(root.iterdir()) if root.is_dir() else ():
        if directory.name.startswith("."):  # being written
            continue
        depends = f"inspect, serve and learn with the rewards {directory.name}; no weight of this run"
        again = f"remove rewards/{directory.name}: `stalewise rescore` gives them again"
        path = directory / "manifest.json"
        try:
            version = read_version(directory)
            found.count("rewards", path)
            _note_coverage(found, path)
        except StoreError as error:
            _add(found, path, error, depends, again, stops=False)
            continue
        for batch in version.record["batches"] if thorough else ():
            file = version.path(batch)
            found.count("rewards", file)
            if version.is_damaged(batch):
                problem = "its SHA-256 differs" if file.is_file() else "missing"
                _add(found, file, problem, depends, again, stops=False)


def _verify_columns(found: Verification, thorough: bool) -> None:
    """Verify columns by the checksums of their pages; missing columns are computed again, so they are no damage."""
    root = found.directory / "columns" / "reference"
    depends, again = "the distance from the reference", "delete it: `stalewise train` computes it again"
    for path in sorted(root.glob("*/*.parquet")) if thorough else ():
        found.count("columns", path)
        if problem := column_problem(path, found.directory / "rollouts" / path.parent.name):
            _add(found, path, problem, depends, again, stops=False)


def _verify_data(found: Verification, thorough: bool) -> None:
    """Verify rows that a program passed: the name of their directory is the beginning of their SHA-256."""
    depends = "prompts and answers, and so everything that is generated from here on"
    again = "`stalewise.train` with the same rows writes it again once it is deleted"
    for path in sorted(found.directory.glob("data/*/*.jsonl")) if thorough else ():
        found.count("data", path)
        if not sha256_file(path).startswith(path.parent.name):
            _add(found, path, "its SHA-256 differs", depends, again)
    with contextlib.suppress(StalewiseError):  # a damaged config is reported separately
        options, own = read_config(found.directory).task.options, found.directory / "data"
        for name in ("path", "evaluation_path"):
            path = Path(str(options.get(name) or "."))
            if path.is_relative_to(own) and not path.is_file():
                _add(found, path, "missing", depends, again)


def _verify_rollback(found: Verification, rollback: Path, thorough: bool) -> None:
    depends, again = "what the report says of updates that were rolled back", "only from a copy"
    if (rollback / "rollback.json").is_file():
        _verify_document(found, rollback / "rollback.json", ROLLBACK, "the learning rate and seeds since", again)
    else:
        _add(found, rollback / "rollback.json", "missing", "the learning rate and seeds since", again)
    if (rollback / "done.json").is_file():
        _verify_document(found, rollback / "done.json", RecordSchema({}), depends, "`stalewise train` writes it")
    else:
        _add(found, rollback / "done.json", "missing", depends, "`stalewise train` finishes the rollback", stops=False)
    for name, (schema, _, _) in RECORD_FILES.items():
        path = rollback / Path(name).name
        if path.is_file() or path.name in _ends_or_none(rollback):
            _verify_line_file(found, path, schema, depends, again)
    used = _batches_used(rollback / "updates.jsonl")
    for directory in batch_directories(rollback / "rollouts"):
        is_used = parse_batch_name(directory).generation_batch in used
        _verify_batch(found, directory, depends, again, thorough, is_used=is_used)
    _verify_tokens(found, rollback / "tokens", thorough)


def _batches_used(ledger: Path) -> set[int]:
    try:
        return {entry.generation_batch for entry in read_ledger(ledger)}
    except StoreError:  # reported already
        return set()


def _ends_or_none(directory: Path) -> dict[str, tuple[int, str]]:
    try:
        return committed_ends(directory)
    except StoreError:
        return {}


def _note_coverage(found: Verification, path: Path) -> None:
    if not has_seal(path.read_bytes()):
        found.not_covered.append(f"{_name(found, path)}: {_OLD}")


def _add(
    found: Verification, path: Path, problem: Exception | str, depends: str, again: str, *, stops: bool = True
) -> None:
    text = str(problem).removeprefix(f"{path} ").removeprefix("is damaged: ").removesuffix(f"; {again}")
    found.damaged.append(Damage(_name(found, path), text, depends, again, stops))


def _name(found: Verification, path: Path) -> str:
    return path.relative_to(found.directory).as_posix()
