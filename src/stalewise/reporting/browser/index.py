"""A thin index of all rollouts of a run: what lists, filters and sorting need, and no token.

It is made by reading single columns of the shards, of the ledger and of the token log. Shards that were read before are
not read again, and the whole is kept in the run's `report/` directory where that can be written.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stalewise.errors import StalewiseError, StoreError
from stalewise.reporting.browser.locations import Location, check_shard, find_places, read_shard
from stalewise.store import ShardManifest, read_batch_manifest, read_ledger, shard_path, token_files
from stalewise.store.atomic import write_atomic
from stalewise.store.token_log import read_light
from stalewise.types import FinishReason

CACHE = "rollouts.index.arrow"
FORMAT = "stalewise.index/2"
MOST_PARTS = 32  # names of reward parts that have a filter
LOOK_AGAIN_S = 2.0  # a run directory is not asked more often than this
CHECKED_BYTES = 2**28  # of shards that are hashed while an index is made; the rest is when it is opened
LIGHT = ["rollout_id", "prompt_id", "group", "reward", "reward_parts", "reward_error", "finish_reason"]
LIGHT += ["response_length", "version_first"]
PART = "part:"

Column = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Piece:
    """The rows of the index that come from one shard: all of its rollouts, or those of updates that were taken back."""

    place: int
    shard: ShardManifest
    rows: slice


@dataclass(frozen=True, slots=True)
class Index:
    """All rollouts, one row each, in the order of batches and shards; `group_number` tells groups apart."""

    fingerprint: str
    places: list[Location]
    pieces: list[Piece]
    table: pa.Table
    problems: list[str]  # what could not be read
    making: list[str]  # batches that are being generated
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


class IndexKeeper:
    """Makes the index of a run when it is asked for, and again when the run has changed."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self._lock = threading.Lock()
        self._index: Index | None = None
        self._looked = 0.0
        self._shards: dict[tuple[str, str], dict[str, pa.Array]] = {}

    def index(self) -> Index:
        """The index of what the run directory holds by now."""
        with self._lock:
            if self._index is None or time.monotonic() - self._looked > LOOK_AGAIN_S:
                fingerprint = fingerprint_of(self.run)
                if self._index is None or self._index.fingerprint != fingerprint:
                    self._index = self._load(fingerprint)
                self._looked = time.monotonic()
            return self._index

    def _load(self, fingerprint: str) -> Index:
        path = self.run / "report" / CACHE
        places = find_places(self.run)
        with contextlib.suppress(OSError, pa.ArrowException, ValueError, KeyError, TypeError):
            return _read(path, fingerprint, places)
        index = self._build(fingerprint, places)
        with contextlib.suppress(StoreError):  # a directory that cannot be written is read all the same
            _write(path, index)
        return index

    def _build(self, fingerprint: str, places: list[Location]) -> Index:
        problems: list[str] = []
        pieces: list[Piece] = []
        parts: list[dict[str, pa.Array]] = []
        stop = checked = 0
        for number, place in enumerate(places):
            shards, found = _shards(place)
            problems += found
            kept = _updated_ids(place)
            for shard in shards:
                checked += shard.bytes
                try:
                    columns = self._shard(place, shard, check=checked <= CHECKED_BYTES)
                except StalewiseError as error:
                    problems.append(str(error))
                    continue
                if kept is not None:
                    mask = pa.array(np.isin(columns["rollout_id"].to_numpy(), kept))
                    columns = {name: column.filter(mask) for name, column in columns.items()}
                start, stop = stop, stop + len(columns["rollout_id"])
                pieces.append(Piece(number, shard, slice(start, stop)))
                parts.append({**columns, "place": pa.array(np.full(stop - start, number, dtype=np.int32))})
        table = _joined(parts)
        for name, column in _fates(places, pieces, table, problems).items():
            table = table.append_column(name, pa.array(column))
        group_number, degenerate = _groups(table)
        table = table.append_column("group_number", pa.array(group_number))
        table = table.append_column("degenerate", pa.array(degenerate))
        return _index(fingerprint, places, pieces, table, problems)

    def _shard(self, place: Location, shard: ShardManifest, check: bool) -> dict[str, pa.Array]:
        key = (str(shard_path(place.directory, shard.index)), shard.sha256)
        if key not in self._shards:
            if check:
                check_shard(place, shard)
            table = read_shard(place, shard, LIGHT)
            if table.num_rows != shard.rows:
                raise StoreError(f"{key[0]} is damaged: {table.num_rows} rows, its manifest says {shard.rows}")
            self._shards[key] = _light(table)
        return self._shards[key]


def fingerprint_of(run: Path) -> str:
    """A word that changes when anything does that the index is made of."""
    places = find_places(run)
    files = [place.directory / "manifest.json" for place in places]
    files += [path for place in places for path in sorted(place.directory.glob("shard-*.parquet"))]
    for place in {(place.ledger, place.tokens): place for place in places}.values():
        files += [place.ledger, *token_files(place.tokens)]
    digest = hashlib.sha256(FORMAT.encode())
    for path in files:
        with contextlib.suppress(OSError):
            found = path.stat()
            digest.update(f"{path.relative_to(run) if path.is_relative_to(run) else path}".encode())
            digest.update(f" {found.st_size} {found.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _shards(place: Location) -> tuple[list[ShardManifest], list[str]]:
    """The shards that a batch's manifest lists, and what is wrong with it."""
    if not place.is_committed:
        return [], []
    try:
        return list(read_batch_manifest(place.directory).shards), []
    except StalewiseError as error:
        return [], [str(error)]


def _updated_ids(place: Location) -> Column | None:
    """Of a batch that stands, the rollouts whose updates were taken back; None where all of a batch is shown."""
    if not (place.rollback and place.stands):
        return None
    try:
        ranges = [
            span
            for e in read_ledger(place.ledger)
            if e.generation_batch == place.generation_batch
            for span in e.rollout_ids
        ]
    except StalewiseError:  # said where what became of rollouts is read
        ranges = []
    return np.concatenate([np.empty(0, np.int64), *(np.arange(first, last + 1) for first, last in ranges)])


def _light(table: pa.Table) -> dict[str, pa.Array]:
    columns: dict[str, pa.Array] = {name: _whole(table, name) for name in ("rollout_id", "prompt_id", "group")}
    columns |= {name: _whole(table, name) for name in ("response_length", "version_first")}
    columns["reward"] = pa.array(np.asarray(table.column("reward").to_numpy(), dtype=np.float64))
    columns["truncated"] = pa.array(table.column("finish_reason").to_numpy() == FinishReason.LENGTH.value)
    columns["error"] = pa.array(table.column("reward_error").to_numpy() != "")
    return columns | _parts(_whole(table, "reward_parts"))


def _whole(table: pa.Table, name: str) -> pa.Array:
    column = table.column(name).combine_chunks()
    return column.chunk(0) if isinstance(column, pa.ChunkedArray) else column


def _parts(parts: pa.ListArray) -> dict[str, pa.Array]:
    """The values of each reward part; NaN where a rollout does not have it."""
    pairs = parts.flatten()
    names, values = pairs.field(0).to_numpy(zero_copy_only=False), pairs.field(1).to_numpy(zero_copy_only=False)
    rows = np.repeat(np.arange(len(parts)), np.diff(parts.offsets.to_numpy()))
    found: dict[str, pa.Array] = {}
    for name in sorted(set(names))[:MOST_PARTS]:
        column = np.full(len(parts), np.nan)
        column[rows[names == name]] = values[names == name]
        found[f"{PART}{name}"] = pa.array(column)
    return found


EMPTY = pa.schema(
    [
        *(
            ("rollout_id", pa.int64()),
            ("prompt_id", pa.string()),
            ("group", pa.int64()),
            ("response_length", pa.int32()),
        ),
        *(("version_first", pa.int32()), ("reward", pa.float64()), ("truncated", pa.bool_()), ("error", pa.bool_())),
        ("place", pa.int32()),
    ]
)


def _joined(parts: list[dict[str, pa.Array]]) -> pa.Table:
    """One table of all shards; a reward part that a shard does not know is NaN there."""
    names = [name for name in dict.fromkeys(n for part in parts for n in part) if name.startswith(PART)][:MOST_PARTS]
    schema = pa.schema([*EMPTY, *((name, pa.float64()) for name in names)])
    tables = [
        pa.table({n: part.get(n, pa.array(np.full(len(part["place"]), np.nan))) for n in schema.names}, schema=schema)
        for part in parts
    ]
    return pa.concat_tables([schema.empty_table(), *tables]).combine_chunks()


def _fates(places: list[Location], pieces: list[Piece], table: pa.Table, problems: list[str]) -> dict[str, Column]:
    """Of each rollout: the update that consumed it (−1: none yet), and what that update saw of it."""
    rows = table.num_rows
    update, age = np.full(rows, -1, dtype=np.int32), np.full(rows, -1, dtype=np.int32)
    rollout_id = table.column("rollout_id").to_numpy()
    records = {(place.ledger, place.tokens) for place in places}
    seen: dict[str, Column] = {
        **{name: np.full(rows, np.nan, dtype=np.float32) for name in ("advantage", "worst_log_ratio")},
        **{name: np.full(rows, -1, dtype=np.int32) for name in ("clipped", "vetoed")},
    }
    for ledger, tokens in sorted(records):
        mine = [number for number, place in enumerate(places) if (place.ledger, place.tokens) == (ledger, tokens)]
        rows_of = {places[number].generation_batch: _rows_of(number, pieces) for number in mine}
        ids_of = {batch: rollout_id[here] for batch, here in rows_of.items()}
        try:
            for entry in read_ledger(ledger):
                if entry.generation_batch not in rows_of:
                    continue
                here, ids = rows_of[entry.generation_batch], ids_of[entry.generation_batch]
                for first, last in entry.rollout_ids:  # ids rise through a batch
                    start, stop = np.searchsorted(ids, [first, last + 1])
                    update[here[start:stop]], age[here[start:stop]] = entry.update, entry.age
        except StalewiseError as error:
            problems.append(str(error))
        found = list(_light_tokens(tokens, problems))
        if found:
            _fill(seen, pa.concat_tables(found), np.concatenate(list(rows_of.values())), update, rollout_id)
    return {"update": update, "age": age, **seen}


def _rows_of(place: int, pieces: list[Piece]) -> Column:
    rows = [np.arange(piece.rows.start, piece.rows.stop) for piece in pieces if piece.place == place]
    return np.concatenate([np.empty(0, np.int64), *rows])


def _light_tokens(directory: Path, problems: list[str]) -> Iterator[pa.Table]:
    for path in token_files(directory):
        try:
            yield read_light(path)
        except StalewiseError as error:
            problems.append(str(error))


def _fill(seen: dict[str, Column], found: pa.Table, rows: Column, update: Column, rollout_id: Column) -> None:
    """Put what the token log says where its update and rollout are."""
    updates, ids = found.column("update").to_numpy(), found.column("rollout_id").to_numpy()
    candidates = rows[np.isin(update[rows], np.unique(updates))]
    if not len(candidates) or not len(ids):
        return
    width = max(int(ids.max()), int(rollout_id[candidates].max())) + 1
    keys = updates.astype(np.int64) * width + ids  # rises: the log is sorted by update and rollout
    wanted = update[candidates].astype(np.int64) * width + rollout_id[candidates]
    place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    hit = keys[place] == wanted
    for name, column in seen.items():
        column[candidates[hit]] = found.column(name).to_numpy()[place[hit]]


def _groups(table: pa.Table) -> tuple[Column, Column]:
    """A number for each group of each batch, and whether its rewards are all equal."""
    place, group = table.column("place").to_numpy(), table.column("group").to_numpy()
    reward = table.column("reward").to_numpy()
    if not len(place):
        return np.empty(0, np.int64), np.empty(0, np.bool_)
    order = np.lexsort((group, place))
    is_new = np.r_[True, (np.diff(place[order]) != 0) | (np.diff(group[order]) != 0)]
    number = np.empty(len(order), dtype=np.int64)
    number[order] = np.cumsum(is_new) - 1
    starts = np.flatnonzero(is_new)
    low = np.fmin.reduceat(reward[order], starts)  # fmin passes over NaN
    high = np.fmax.reduceat(reward[order], starts)
    return number, (low == high)[number]


def _index(
    fingerprint: str, places: list[Location], pieces: list[Piece], table: pa.Table, problems: list[str]
) -> Index:
    number = table.column("group_number").to_numpy()
    order = np.argsort(number, kind="stable")
    starts = np.flatnonzero(np.diff(number[order], prepend=-1))
    making = [place.directory.name for place in places if not place.is_committed and not place.rollback]
    return Index(fingerprint, places, pieces, table, problems, making, order, starts)


def _read(path: Path, fingerprint: str, places: list[Location]) -> Index:
    """The index that was kept; a KeyError where it is of another state of the run."""
    table = pa.ipc.open_file(pa.py_buffer(path.read_bytes())).read_all()
    notes = json.loads((table.schema.metadata or {})[b"stalewise"])
    if notes["fingerprint"] != fingerprint:
        raise KeyError(fingerprint)
    shards = {(number, shard.index): shard for number, place in enumerate(places) for shard in _shards(place)[0]}
    pieces = [Piece(place, shards[place, shard], slice(start, stop)) for place, shard, start, stop in notes["pieces"]]
    return _index(fingerprint, places, pieces, table, notes["problems"])


def _write(path: Path, index: Index) -> None:
    pieces = [(piece.place, piece.shard.index, piece.rows.start, piece.rows.stop) for piece in index.pieces]
    notes = {"fingerprint": index.fingerprint, "pieces": pieces, "problems": index.problems}
    table = index.table.replace_schema_metadata({b"stalewise": json.dumps(notes).encode()})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    write_atomic(path, memoryview(sink.getvalue()))
