"""An index of all rollouts of a run for lists, filters and sorting, from columns of shards, ledger and token log.

Shards are read once, and the index is cached in the run's `report/` directory if that is writable.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stalewise.errors import StalewiseError, StoreError
from stalewise.reporting.browser.locations import BatchLocation, check_shard, find_batches, read_shard
from stalewise.store import ShardManifest, read_batch_manifest, read_ledger, shard_path, token_files
from stalewise.store.atomic import write_atomic
from stalewise.store.columns import part_columns
from stalewise.store.reader import has_variance
from stalewise.store.reward_versions import FIRST, find_version
from stalewise.store.token_log import read_light
from stalewise.types import MOST_PARTS, FinishReason

CACHE = "rollouts.index.arrow"
FORMAT = "stalewise.index/4"
_SEAL = 32  # bytes of the SHA-256 before the table
REFRESH_S = 2.0  # a run directory is checked at most this often
CHECKED_BYTES = 2**28  # shards hashed while the index is built; others are hashed when they are opened
PART = "part:"
SHARD_COLUMNS = ["rollout_id", "prompt_id", "group", "reward", "reward_parts", "reward_error", "finish_reason"]
SHARD_COLUMNS += ["response_length", "version_first"]
INDEX_COLUMNS: dict[str, pa.DataType] = {
    **dict.fromkeys(("rollout_id", "group"), pa.int64()),
    **dict.fromkeys(("response_length", "version_first", "place"), pa.int32()),  # place: in `RolloutIndex.batches`
    **dict.fromkeys(("truncated", "error"), pa.bool_()),
    "prompt_id": pa.string(),
    "reward": pa.float64(),
}

Column = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class ShardRows:
    """The rows of the index that come from one shard: all its rollouts, or those of updates that were rolled back."""

    batch: int
    shard: ShardManifest
    rows: slice


@dataclass(frozen=True, slots=True)
class RolloutIndex:
    """All rollouts, one row each, in the order of batches and shards; `group_number` is unique over batches."""

    fingerprint: str
    batches: list[BatchLocation]
    shards: list[ShardRows]
    table: pa.Table
    problems: list[str]  # what could not be read
    generating: list[str]  # batches that are not committed
    order: Column  # rows, group by group
    starts: Column  # where each group begins in `order`
    _columns: dict[str, Column] = field(default_factory=dict, compare=False, repr=False)

    def column(self, name: str) -> Column:
        """One column as a numpy array."""
        if name not in self._columns:
            self._columns[name] = self.table.column(name).to_numpy()
        return self._columns[name]

    @property
    def parts(self) -> list[str]:
        """Names of reward parts."""
        return [name.removeprefix(PART) for name in self.table.column_names if name.startswith(PART)]


class IndexCache:
    """Builds the index of a run on request, and again when the run has changed."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self._lock = threading.Lock()
        self._index: RolloutIndex | None = None
        self._checked_at = 0.0
        self._shards: dict[tuple[str, str], dict[str, pa.Array]] = {}

    def index(self) -> RolloutIndex:
        """The index of the run as it is now."""
        with self._lock:
            if self._index is None or time.monotonic() - self._checked_at > REFRESH_S:
                fingerprint = fingerprint_of(self.run)
                if self._index is None or self._index.fingerprint != fingerprint:
                    self._index = self._load(fingerprint)
                self._checked_at = time.monotonic()
            return self._index

    def _load(self, fingerprint: str) -> RolloutIndex:
        path = self.run / "report" / CACHE
        batches = find_batches(self.run)
        with contextlib.suppress(OSError, pa.ArrowException, ValueError, KeyError, TypeError):
            return _read(path, fingerprint, batches)
        index = self._build(fingerprint, batches)
        with contextlib.suppress(StoreError):  # the directory may be read-only
            _write(path, index)
        return index

    def _build(self, fingerprint: str, batches: list[BatchLocation]) -> RolloutIndex:
        problems: list[str] = []
        shard_rows: list[ShardRows] = []
        tables: list[dict[str, pa.Array]] = []
        stop = checked = 0
        for number, batch in enumerate(batches):
            kept = _updated_ids(batch)
            for shard in _shards(batch, problems):
                checked += shard.bytes
                try:
                    columns = self._shard(batch, shard, check=checked <= CHECKED_BYTES)
                except StalewiseError as error:
                    problems.append(str(error))
                    continue
                if batch.rewards != FIRST:
                    columns = _with_rewards(batch, columns, problems)
                if kept is not None:
                    mask = pa.array(np.isin(columns["rollout_id"].to_numpy(), kept))
                    columns = {name: column.filter(mask) for name, column in columns.items()}
                start, stop = stop, stop + len(columns["rollout_id"])
                shard_rows.append(ShardRows(number, shard, slice(start, stop)))
                tables.append({**columns, "place": pa.array(np.full(stop - start, number, dtype=np.int32))})
        table = _concatenate(tables)
        for name, column in _update_columns(batches, shard_rows, table, problems).items():
            table = table.append_column(name, pa.array(column))
        group_number, degenerate = _groups(table)
        table = table.append_column("group_number", pa.array(group_number))
        table = table.append_column("degenerate", pa.array(degenerate))
        return _index(fingerprint, batches, shard_rows, table, problems)

    def _shard(self, batch: BatchLocation, shard: ShardManifest, check: bool) -> dict[str, pa.Array]:
        key = (str(shard_path(batch.directory, shard.index)), shard.sha256)
        if key not in self._shards:
            if check:
                check_shard(batch, shard)
            table = read_shard(batch, shard, SHARD_COLUMNS)
            if table.num_rows != shard.rows:
                raise StoreError(f"{key[0]} is damaged: {table.num_rows} rows, its manifest says {shard.rows}")
            self._shards[key] = _index_columns(table)
        return self._shards[key]


def fingerprint_of(run: Path) -> str:
    """A digest of the sizes and times of all files that the index is built from."""
    batches = find_batches(run)
    paths = [batch.directory / "manifest.json" for batch in batches]
    paths += [path for batch in batches for path in sorted(batch.directory.glob("shard-*.parquet"))]
    for batch in {(batch.ledger, batch.tokens): batch for batch in batches}.values():
        paths += [batch.ledger, *token_files(batch.tokens)]
    paths += [run / "sources.json"] if any(batch.rewards != FIRST for batch in batches) else []
    digest = hashlib.sha256(FORMAT.encode())
    for path in paths:
        with contextlib.suppress(OSError):
            stat = path.stat()
            digest.update(f"{path.relative_to(run) if path.is_relative_to(run) else path}".encode())
            digest.update(f" {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _shards(batch: BatchLocation, problems: list[str]) -> list[ShardManifest]:
    """The shards in the manifest of a batch; empty if it is not committed or damaged."""
    try:
        return list(read_batch_manifest(batch.directory).shards) if batch.is_committed else []
    except StalewiseError as error:
        problems.append(str(error))
        return []


def _with_rewards(batch: BatchLocation, columns: dict[str, pa.Array], problems: list[str]) -> dict[str, pa.Array]:
    """The columns with the rewards that the run learned from."""
    try:
        manifest, run = read_batch_manifest(batch.directory), batch.directory.resolve().parent.parent
        found = find_version(run, batch.rewards).rewards_of(manifest, batch.directory)
    except StalewiseError as error:
        problems.append(f"{error}; the first rewards are shown")
        return columns
    values = found.values(columns["rollout_id"].to_numpy())
    return {**columns, "reward": pa.array(values), "error": pa.array(np.isnan(values))}


def _updated_ids(batch: BatchLocation) -> Column | None:
    """Ids of rollouts in a kept batch whose updates were rolled back; None if the whole batch is listed."""
    if not (batch.rollback and batch.is_kept):
        return None
    ids = [np.empty(0, np.int64)]
    with contextlib.suppress(StalewiseError):  # `_update_columns` reports it
        entries = [entry for entry in read_ledger(batch.ledger) if entry.generation_batch == batch.generation_batch]
        ids += [np.arange(first, last + 1) for entry in entries for first, last in entry.rollout_ids]
    return np.concatenate(ids)


def _index_columns(table: pa.Table) -> dict[str, pa.Array]:
    names = ("rollout_id", "prompt_id", "group", "response_length", "version_first")
    columns: dict[str, pa.Array] = {name: _array(table, name) for name in names}
    columns["reward"] = pa.array(np.asarray(table.column("reward").to_numpy(), dtype=np.float64))
    columns["truncated"] = pa.array(table.column("finish_reason").to_numpy() == FinishReason.LENGTH.value)
    columns["error"] = pa.array(table.column("reward_error").to_numpy() != "")
    parts = part_columns(_array(table, "reward_parts"))
    return columns | {f"{PART}{name}": pa.array(values) for name, values in parts.items()}


def _array(table: pa.Table, name: str) -> pa.Array:
    column = table.column(name).combine_chunks()
    return column.chunk(0) if isinstance(column, pa.ChunkedArray) else column


def _concatenate(tables: list[dict[str, pa.Array]]) -> pa.Table:
    """One table of all shards; a reward part that a shard lacks is NaN there."""
    names = [name for name in dict.fromkeys(n for table in tables for n in table) if name.startswith(PART)]
    schema = pa.schema(INDEX_COLUMNS | dict.fromkeys(names[:MOST_PARTS], pa.float64()))
    complete = [
        pa.table({n: table.get(n, pa.array(np.full(len(table["place"]), np.nan))) for n in schema.names}, schema=schema)
        for table in tables
    ]
    return pa.concat_tables([schema.empty_table(), *complete]).combine_chunks()


def _update_columns(
    batches: list[BatchLocation], shards: list[ShardRows], table: pa.Table, problems: list[str]
) -> dict[str, Column]:
    """For each rollout the update that consumed it (−1: none yet), its age, and its values in the token log."""
    rows = table.num_rows
    update, age = np.full(rows, -1, dtype=np.int32), np.full(rows, -1, dtype=np.int32)
    rollout_id = table.column("rollout_id").to_numpy()
    logged: dict[str, Column] = {
        **{name: np.full(rows, np.nan, dtype=np.float32) for name in ("advantage", "worst_log_ratio")},
        **{name: np.full(rows, -1, dtype=np.int32) for name in ("clipped", "vetoed")},
    }
    for ledger, tokens in sorted({(batch.ledger, batch.tokens) for batch in batches}):
        numbers = [i for i, batch in enumerate(batches) if (batch.ledger, batch.tokens) == (ledger, tokens)]
        rows_of = {batches[number].generation_batch: _rows_of(number, shards) for number in numbers}
        ids_of = {batch: rollout_id[here] for batch, here in rows_of.items()}
        try:
            for entry in read_ledger(ledger):
                if entry.generation_batch not in rows_of:
                    continue
                here, ids = rows_of[entry.generation_batch], ids_of[entry.generation_batch]
                for first, last in entry.rollout_ids:  # ids increase within a batch
                    start, stop = np.searchsorted(ids, [first, last + 1])
                    update[here[start:stop]], age[here[start:stop]] = entry.update, entry.age
        except StalewiseError as error:
            problems.append(str(error))
        logs: list[pa.Table] = []
        for path in token_files(tokens):
            try:
                logs.append(read_light(path))
            except StalewiseError as error:
                problems.append(str(error))
        if logs:
            _fill(logged, pa.concat_tables(logs), np.concatenate(list(rows_of.values())), update, rollout_id)
    return {"update": update, "age": age, **logged}


def _rows_of(batch: int, shards: list[ShardRows]) -> Column:
    rows = [np.arange(shard.rows.start, shard.rows.stop) for shard in shards if shard.batch == batch]
    return np.concatenate([np.empty(0, np.int64), *rows])


def _fill(logged: dict[str, Column], log: pa.Table, rows: Column, update: Column, rollout_id: Column) -> None:
    """Copy the token log's values to the rows with the same update and rollout."""
    updates, ids = log.column("update").to_numpy(), log.column("rollout_id").to_numpy()
    candidates = rows[np.isin(update[rows], np.unique(updates))]
    if not len(candidates) or not len(ids):
        return
    width = max(int(ids.max()), int(rollout_id[candidates].max())) + 1
    keys = updates.astype(np.int64) * width + ids  # sorted, as the log is by update and rollout
    wanted = update[candidates].astype(np.int64) * width + rollout_id[candidates]
    position = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    hit = keys[position] == wanted
    for name, column in logged.items():
        column[candidates[hit]] = log.column(name).to_numpy()[position[hit]]


def _groups(table: pa.Table) -> tuple[Column, Column]:
    """A number for each group of each batch, and whether it is degenerate: no two of its rewards differ."""
    batch, group, reward = (table.column(name).to_numpy() for name in ("place", "group", "reward"))
    if not len(batch):
        return np.empty(0, np.int64), np.empty(0, np.bool_)
    order = np.lexsort((group, batch))
    is_new = np.r_[True, (np.diff(batch[order]) != 0) | (np.diff(group[order]) != 0)]
    number = np.empty(len(order), dtype=np.int64)
    number[order] = np.cumsum(is_new) - 1
    return number, ~has_variance(reward, number)


def _index(
    fingerprint: str, batches: list[BatchLocation], shards: list[ShardRows], table: pa.Table, problems: list[str]
) -> RolloutIndex:
    number = table.column("group_number").to_numpy()
    order = np.argsort(number, kind="stable")
    starts = np.flatnonzero(np.diff(number[order], prepend=-1))
    generating = [batch.directory.name for batch in batches if not batch.is_committed and not batch.rollback]
    return RolloutIndex(fingerprint, batches, shards, table, problems, generating, order, starts)


def _read(path: Path, fingerprint: str, batches: list[BatchLocation]) -> RolloutIndex:
    """The cached index; raises a KeyError if it is of another state of the run."""
    content = path.read_bytes()
    if hashlib.sha256(content[_SEAL:]).digest() != content[:_SEAL]:
        raise ValueError(f"{path} is damaged")
    table = pa.ipc.open_file(pa.py_buffer(content[_SEAL:])).read_all()
    notes = json.loads((table.schema.metadata or {})[b"stalewise"])
    if notes["fingerprint"] != fingerprint:
        raise KeyError(fingerprint)
    manifests = {(number, shard.index): shard for number, batch in enumerate(batches) for shard in _shards(batch, [])}
    rows = [ShardRows(batch, manifests[batch, shard], slice(*span)) for batch, shard, *span in notes["pieces"]]
    return _index(fingerprint, batches, rows, table, notes["problems"])


def _write(path: Path, index: RolloutIndex) -> None:
    pieces = [(shard.batch, shard.shard.index, shard.rows.start, shard.rows.stop) for shard in index.shards]
    notes = {"fingerprint": index.fingerprint, "pieces": pieces, "problems": index.problems}
    table = index.table.replace_schema_metadata({b"stalewise": json.dumps(notes).encode()})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    content = sink.getvalue().to_pybytes()
    write_atomic(path, hashlib.sha256(content).digest() + content)
