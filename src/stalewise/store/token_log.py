"""The token log: each response token's log-probability at its update, and what the objective did to it.

`ledger/tokens/u000000-u000031.parquet` holds the rows of the updates 0 to 31, between two checkpoints. It is written
just before the second checkpoint, so it exists whenever that checkpoint does; a file that a crash left behind begins at
or after the newest checkpoint, and `truncate` removes it on resume. `u000000-u000031.json` has its size and SHA-256.

The ratio of a token is exp(logp − behaviour_logp); the second is stored with the rollout. Lists and filters read
columns per response (worst log-ratio, numbers of clipped and vetoed tokens) without decoding tokens.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from stalewise.errors import StoreError
from stalewise.store.atomic import (
    cached_sha256,
    check_format,
    fsync_directory,
    make_directory,
    write_atomic,
    write_json_atomic,
)
from stalewise.store.columns import ROW_GROUP_ROWS, RolloutColumns, column_range, concatenate
from stalewise.store.records import RecordSchema, is_text, is_whole, read_record
from stalewise.types import TokenFlag

FORMAT = "stalewise.tokens/1"
SCHEMA = pa.schema(
    [
        pa.field("rollout_id", pa.int64(), nullable=False),
        pa.field("update", pa.int32(), nullable=False),
        pa.field("advantage", pa.float32(), nullable=False),
        pa.field("worst_log_ratio", pa.float32(), nullable=False),  # the token's log-ratio that is farthest from 0
        pa.field("clipped", pa.int32(), nullable=False),
        pa.field("vetoed", pa.int32(), nullable=False),
        pa.field("logp", pa.list_(pa.field("element", pa.float32(), nullable=False)), nullable=False),
        pa.field("flags", pa.list_(pa.field("element", pa.uint8(), nullable=False)), nullable=False),
    ],
    metadata={b"stalewise.format": FORMAT.encode()},
)
LIGHT_COLUMNS = tuple(name for name in SCHEMA.names if name not in ("logp", "flags"))
MANIFEST = RecordSchema({"file": is_text, "bytes": is_whole, "sha256": is_text})
_NAME = re.compile(r"u(\d{6,})-u(\d{6,})\.parquet")


@dataclass(frozen=True, slots=True, eq=False)
class TokenRecord:
    """The tokens of one update; those of row `order[0]` come first, then those of `order[1]`, …"""

    rows: RolloutColumns  # R rollouts with N response tokens
    order: npt.NDArray[np.int64]  # [R] positions in `rows`
    advantage: npt.NDArray[np.float32]  # [R], in the order of `rows`
    logp: npt.NDArray[np.float32]  # [N], under the policy that was updated
    flags: npt.NDArray[np.uint8]  # [N], bits of TokenFlag


class TokenLog:
    """The token records of a run: collected update by update, committed with each checkpoint."""

    def __init__(self, run: str | Path) -> None:
        self.directory = token_log_directory(run)
        self._waiting: dict[int, TokenRecord] = {}

    def add(self, update: int, record: TokenRecord | None) -> None:
        """Keep the record of an update until the next commit; None: the update has nothing to record."""
        if record is not None:
            self._waiting[update] = record

    def commit(self, stop: int) -> Path | None:
        """Write the added records; `stop` is the version whose checkpoint is written next."""
        return self.detach(stop)()

    def detach(self, stop: int) -> Callable[[], Path | None]:
        """A function that writes the records added so far, which may run in another thread."""
        records, self._waiting = self._waiting, {}

        def write() -> Path | None:
            if not records:
                return None
            path = self.directory / f"u{min(records):06d}-u{stop - 1:06d}.parquet"
            data = _parquet(_table(records))
            write_atomic(path, data)
            sums = {"bytes": data.nbytes, "sha256": hashlib.sha256(data).hexdigest()}
            write_json_atomic(token_manifest_path(path), {"format": FORMAT, "file": path.name, **sums}, sealed=True)
            return path

        return write

    def truncate(self, before: int, keep: Path | None = None) -> int:
        """Drop the files from version `before` on, or move them to `keep`; return how many. Used on resume."""
        self._waiting = {}
        dropped = [path for path in token_files(self.directory) if _updates_of(path).start >= before]
        if not dropped:
            return 0
        if keep is not None:
            make_directory(keep)
        for file in dropped:
            for path in (token_manifest_path(file), file):  # a checksum without its file would look like a loss
                if path.exists():
                    path.unlink() if keep is None else os.replace(path, keep / path.name)
        for directory in {self.directory, keep or self.directory}:
            fsync_directory(directory)
        return len(dropped)


def token_log_directory(run: str | Path) -> Path:
    """The directory of a run's token log."""
    return Path(run) / "ledger" / "tokens"


def token_files(directory: str | Path) -> list[Path]:
    """The files of a token log, by update."""
    directory = Path(directory)
    entries = directory.iterdir() if directory.is_dir() else ()
    return sorted((entry for entry in entries if _NAME.fullmatch(entry.name)), key=lambda path: _updates_of(path).start)


def token_manifest_path(path: Path) -> Path:
    """The file with the checksum of a file of the token log."""
    return path.with_suffix(".json")


def check_token_file(path: Path, checksum: bool = True) -> None:
    """Compare a file with its checksum, once for each state of the file; files of older releases have none."""
    if not token_manifest_path(path).is_file():
        return
    manifest = read_record(token_manifest_path(path), MANIFEST)
    try:
        is_whole = path.stat().st_size == manifest["bytes"]
        is_whole = is_whole and (not checksum or cached_sha256(path) == manifest["sha256"])
    except OSError as error:
        raise _damaged(path, error) from error
    if not is_whole or manifest["file"] != path.name:
        raise _damaged(path, f"its content differs from {token_manifest_path(path).name}")


def read_light(path: str | Path) -> pa.Table:
    """The LIGHT_COLUMNS of all rows of one file."""
    with _open(Path(path)) as file:
        return _read(Path(path), file, range(file.num_row_groups), list(LIGHT_COLUMNS))


def read_tokens(directory: str | Path, update: int, rollout_ids: npt.ArrayLike | None = None) -> pa.Table:
    """The rows of one update, or of some of its rollouts; empty if nothing was recorded.

    Only row groups that can hold one of them are decoded.
    """
    wanted = None if rollout_ids is None else np.unique(np.asarray(rollout_ids, dtype=np.int64))
    parts = [SCHEMA.empty_table()]
    for path in token_files(directory):
        if update not in _updates_of(path):
            continue
        with _open(path) as file:
            table = _read(path, file, _row_groups(file.metadata, update, wanted), None)
        chosen = table.column("update").to_numpy() == update
        if wanted is not None:
            chosen &= np.isin(table.column("rollout_id").to_numpy(), wanted)
        parts.append(table.filter(pa.array(chosen)))
    return pa.concat_tables(parts)


def _updates_of(path: Path) -> range:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return range(int(match[1]), int(match[2]) + 1)


def _table(records: Mapping[int, TokenRecord]) -> pa.Table:
    """All rows of the given updates, by update and rollout."""
    parts = list(records.values())
    bases = np.cumsum([0] + [len(part.rows) for part in parts[:-1]])
    order = np.concatenate([part.order + base for part, base in zip(parts, bases, strict=True)])
    rows = concatenate([part.rows for part in parts]).take(order)
    update = np.repeat(np.array(list(records), dtype=np.int32), [len(part.rows) for part in parts])[order]
    logp, flags = (np.concatenate([getattr(part, name) for part in parts]) for name in ("logp", "flags"))
    starts, offsets = rows.response_offsets[:-1], pa.array(rows.response_offsets.astype(np.int32))
    columns = {
        "rollout_id": pa.array(rows.rollout_id),
        "update": pa.array(update),
        "advantage": pa.array(np.concatenate([part.advantage for part in parts])[order]),
        "worst_log_ratio": pa.array(_worst(logp - rows.behaviour_logp, starts)),
        "clipped": pa.array(_count(flags, TokenFlag.CLIPPED, starts)),
        "vetoed": pa.array(_count(flags, TokenFlag.VETOED, starts)),
        "logp": pa.ListArray.from_arrays(offsets, pa.array(logp), type=SCHEMA.field("logp").type),
        "flags": pa.ListArray.from_arrays(offsets, pa.array(flags), type=SCHEMA.field("flags").type),
    }
    table = pa.Table.from_arrays([columns[name] for name in SCHEMA.names], schema=SCHEMA)
    return table.take(pa.array(np.lexsort((rows.rollout_id, update))))


def _count(flags_N: npt.NDArray[np.uint8], flag: int, starts: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    return np.add.reduceat((flags_N & flag) != 0, starts, dtype=np.int32)


def _worst(log_ratio_N: npt.NDArray[np.float32], starts: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """The log-ratio of each response that is farthest from 0, with its sign."""
    high, low = np.maximum.reduceat(log_ratio_N, starts), np.minimum.reduceat(log_ratio_N, starts)
    return np.where(high > -low, high, low)


def _parquet(table: pa.Table) -> memoryview:
    sink = pa.BufferOutputStream()
    options: dict[str, Any] = {
        "use_dictionary": ["flags.list.element", "update"],
        "column_encoding": {"logp.list.element": "BYTE_STREAM_SPLIT"},  # floats compress by byte position
    }
    pq.write_table(table, sink, row_group_size=ROW_GROUP_ROWS, compression="zstd", **options)
    return memoryview(sink.getvalue()).cast("B")


def _open(path: Path) -> pq.ParquetFile:
    check_token_file(path)
    try:
        file = pq.ParquetFile(path)
        schema = file.schema_arrow
    except (pa.ArrowException, OSError) as error:
        raise _damaged(path, error) from error
    found = (schema.metadata or {}).get(b"stalewise.format", b"unknown").decode(errors="replace")
    check_format(path, found, FORMAT)
    if not schema.equals(SCHEMA):
        raise _damaged(path, f"its columns are not those of {FORMAT}")
    return file


def _read(path: Path, file: pq.ParquetFile, row_groups: range | list[int], columns: list[str] | None) -> pa.Table:
    try:
        return file.read_row_groups(list(row_groups), columns=columns, use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception | str) -> StoreError:
    return StoreError(f"{path} is damaged: {error}; the token records of its updates are lost, all else is intact")


def _row_groups(footer: pq.FileMetaData, update: int, wanted: npt.NDArray[np.int64] | None) -> list[int]:
    def holds(row_group: int) -> bool:
        first, last = column_range(footer, row_group, SCHEMA.get_field_index("update"))
        if wanted is None or not first <= update <= last:
            return first <= update <= last
        first, last = column_range(footer, row_group, SCHEMA.get_field_index("rollout_id"))
        return bool(((wanted >= first) & (wanted <= last)).any())

    return [row_group for row_group in range(footer.num_row_groups) if holds(row_group)]
