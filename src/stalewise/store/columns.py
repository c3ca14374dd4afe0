"""Rollouts by column, for the trainer: flat token arrays with offsets, no Python object per token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from stalewise.errors import StoreError
from stalewise.store.atomic import write_atomic
from stalewise.store.manifest import ShardManifest, read_shard_manifest, shard_path
from stalewise.types import MOST_PARTS, POLICY, FinishReason

NUMBERS = {"rollout_id": np.int64, "group": np.int64, "reward": np.float64}
NUMBERS |= {"version_first": np.int32, "version_last": np.int32}
TOKENS = {"prompt_ids": np.int32, "response_ids": np.int32, "behaviour_logp": np.float32}
ROW_COLUMNS = (*NUMBERS, *TOKENS, "finish_reason")  # the columns of a shard that `RolloutColumns` needs
COLUMN_FORMAT = "stalewise.column/1"
EPISODE_COLUMNS = (*ROW_COLUMNS, "segments")  # only shards with episodes have the last one
ROW_GROUP_ROWS = 256  # the unit of reading: small enough for scattered reads, large enough for compression


def part_columns(parts: pa.ListArray) -> dict[str, npt.NDArray[np.float64]]:
    """The values of each reward part, from a column `reward_parts`; NaN where a rollout lacks it."""
    pairs = parts.flatten()
    names, values = pairs.field(0).to_numpy(zero_copy_only=False), pairs.field(1).to_numpy(zero_copy_only=False)
    rows = np.repeat(np.arange(len(parts)), np.diff(parts.offsets.to_numpy()))
    columns: dict[str, npt.NDArray[np.float64]] = {}
    for name in sorted(set(names))[:MOST_PARTS]:
        columns[name] = np.full(len(parts), np.nan)
        columns[name][rows[names == name]] = values[names == name]
    return columns


@dataclass(frozen=True, slots=True, eq=False)
class RolloutColumns:
    """R rollouts. Row i has the prompt `prompt_ids[prompt_offsets[i] : prompt_offsets[i + 1]]`, and so on.

    All arrays are owned and writable, so `torch.from_numpy` takes them without a copy. Response tokens that are not
    `trained` came from tools or environments: the policy read them and is not trained on them.
    """

    rollout_id: npt.NDArray[np.int64]  # [R]
    group: npt.NDArray[np.int64]  # [R]
    reward: npt.NDArray[np.float64]  # [R], NaN if the verifier failed
    truncated: npt.NDArray[np.bool_]  # [R]
    version_first: npt.NDArray[np.int32]  # [R]
    version_last: npt.NDArray[np.int32]  # [R]
    prompt_ids: npt.NDArray[np.int32]  # [all prompt tokens]
    prompt_offsets: npt.NDArray[np.int64]  # [R + 1]
    response_ids: npt.NDArray[np.int32]  # [all response tokens]
    behaviour_logp: npt.NDArray[np.float32]  # [all response tokens]
    response_offsets: npt.NDArray[np.int64]  # [R + 1]
    reference_logp: npt.NDArray[np.float32] | None = None  # [all response tokens], where a run has a reference
    trained: npt.NDArray[np.bool_] = field(default_factory=lambda: np.ones(0, np.bool_))  # [all response tokens]

    def __post_init__(self) -> None:
        if not len(self.trained):  # not given: all tokens are the policy's
            object.__setattr__(self, "trained", np.ones(len(self.response_ids), dtype=np.bool_))

    def __len__(self) -> int:
        return len(self.rollout_id)

    @property
    def prompt_lengths(self) -> npt.NDArray[np.int64]:
        """Prompt tokens of each row, [R]."""
        return np.diff(self.prompt_offsets)

    @property
    def response_lengths(self) -> npt.NDArray[np.int64]:
        """Response tokens of each row, [R]."""
        return np.diff(self.response_offsets)

    @property
    def trained_lengths(self) -> npt.NDArray[np.int64]:
        """Response tokens of each row that are the policy's, [R]."""
        ends = np.concatenate([[0], np.cumsum(self.trained, dtype=np.int64)])
        return np.diff(ends[self.response_offsets])

    def prompt(self, row: int) -> npt.NDArray[np.int32]:
        """Prompt tokens of one row (a view)."""
        return self.prompt_ids[self.prompt_offsets[row] : self.prompt_offsets[row + 1]]

    def response(self, row: int) -> npt.NDArray[np.int32]:
        """Response tokens of one row (a view)."""
        return self.response_ids[self.response_offsets[row] : self.response_offsets[row + 1]]

    def logp(self, row: int) -> npt.NDArray[np.float32]:
        """Behaviour log-probabilities of one row (a view), one per response token."""
        return self.behaviour_logp[self.response_offsets[row] : self.response_offsets[row + 1]]

    def is_trained(self, row: int) -> npt.NDArray[np.bool_]:
        """Which response tokens of one row are the policy's (a view)."""
        return self.trained[self.response_offsets[row] : self.response_offsets[row + 1]]

    def take(self, rows: npt.ArrayLike) -> RolloutColumns:
        """The given rows (positions, not rollout ids) in the given order."""
        positions = np.asarray(rows, dtype=np.int64)
        prompt, prompt_offsets = _gather(self.prompt_offsets, positions)
        response, response_offsets = _gather(self.response_offsets, positions)
        return RolloutColumns(
            **{name: getattr(self, name)[positions] for name in (*NUMBERS, "truncated")},
            prompt_ids=self.prompt_ids[prompt],
            prompt_offsets=prompt_offsets,
            response_ids=self.response_ids[response],
            behaviour_logp=self.behaviour_logp[response],
            response_offsets=response_offsets,
            reference_logp=None if self.reference_logp is None else self.reference_logp[response],
            trained=self.trained[response],
        )


def rows_from_table(table: pa.Table) -> RolloutColumns:
    """The rollouts of a table that has at least ROW_COLUMNS."""
    tokens = {name: _flat(table.column(name), dtype) for name, dtype in TOKENS.items()}
    return RolloutColumns(
        **{name: numbers(table.column(name), dtype) for name, dtype in NUMBERS.items()},
        **{name: values for name, (values, _) in tokens.items()},
        truncated=np.asarray(table.column("finish_reason").to_numpy() == FinishReason.LENGTH.value, dtype=np.bool_),
        prompt_offsets=tokens["prompt_ids"][1],
        response_offsets=tokens["response_ids"][1],
        trained=_trained(table, tokens["response_ids"][1]),
    )


def _trained(table: pa.Table, offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Which response tokens are the policy's, according to the segments; without segments all."""
    trained = np.ones(int(offsets[-1]), dtype=np.bool_)
    if "segments" not in table.column_names:
        return trained
    start = 0
    for chunk in table.column("segments").chunks:
        flat = chunk.flatten()
        is_policy = np.asarray(flat.field("by").to_numpy(zero_copy_only=False) == POLICY, dtype=np.bool_)
        lengths, ends = flat.field("tokens").to_numpy(), np.cumsum(np.diff(chunk.offsets.to_numpy()))
        for row, (first, last) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
            if last > first:
                here = slice(offsets[start + row], offsets[start + row + 1])
                trained[here] = np.repeat(is_policy[first:last], lengths[first:last])
        start += len(chunk)
    return trained


def concatenate(parts: Sequence[RolloutColumns]) -> RolloutColumns:
    """The rows of several parts; there must be at least one part."""
    columns: dict[str, Any] = {}
    for name in (column.name for column in fields(RolloutColumns)):
        arrays = [getattr(part, name) for part in parts]
        if arrays[0] is None:
            continue
        if name.endswith("_offsets"):
            starts = np.cumsum([0] + [array[-1] for array in arrays[:-1]])
            shifted = [array[:-1] + start for array, start in zip(arrays, starts, strict=True)]
            arrays = [*shifted, starts[-1:] + arrays[-1][-1]]
        columns[name] = np.concatenate(arrays)
    return RolloutColumns(**columns)


class TokenColumn:
    """A column with one number per response token, computed after the rollouts: one file per shard.

    A file names its shard (by checksum) and a `key` for how the numbers were computed; a file of another shard or key
    counts as missing. It holds one flat array in the order of the shard's tokens, with Parquet's own checksums.
    """

    def __init__(self, directory: Path, key: str) -> None:
        self.directory, self.key = directory, key
        # Checksum and numbers of the last shard that was read.
        self._flat: tuple[str, npt.NDArray[np.float32]] = "", np.empty(0, np.float32)

    def path(self, shard: ShardManifest) -> Path:
        """The file of a shard's numbers."""
        return shard_path(self.directory, shard.index)

    def has(self, shard: ShardManifest) -> bool:
        """Whether the numbers of a shard exist."""
        try:
            metadata = pq.read_schema(self.path(shard)).metadata or {}
        except (OSError, ValueError, pa.ArrowException):
            return False
        return metadata == self._metadata(shard)

    def write(self, shard: ShardManifest, values: npt.NDArray[np.float32]) -> None:
        """Write the numbers of a shard; once this returns they survive a crash."""
        if len(values) != shard.response_tokens or not np.isfinite(values).all():
            raise StoreError(
                f"{self.path(shard)} would hold {int(np.isfinite(values).sum())} finite numbers for the "
                f"{shard.response_tokens} tokens of {shard.file}: each token needs one"
            )
        schema = pa.schema([pa.field("value", pa.float32(), nullable=False)], metadata=self._metadata(shard))
        table, sink = pa.table([pa.array(values)], schema=schema), pa.BufferOutputStream()
        pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
        write_atomic(self.path(shard), memoryview(sink.getvalue()).cast("B"))

    def read(self, shard: ShardManifest, first: int, count: int) -> npt.NDArray[np.float32]:
        """The numbers of `count` tokens of a shard, beginning with token number `first`."""
        if self._flat[0] != shard.sha256:
            try:
                values = _read_values(self.path(shard))
                if len(values) != shard.response_tokens:
                    raise StoreError(f"it has {len(values):,} numbers for {shard.response_tokens:,} tokens")
            except StoreError as error:
                raise StoreError(
                    f"{self.path(shard)} is missing or damaged: {error}; remove it and run the same command again: it "
                    "is computed again"
                ) from error
            self._flat = shard.sha256, values
        return self._flat[1][first : first + count]

    def _metadata(self, shard: ShardManifest) -> dict[bytes, bytes]:
        facts = {"stalewise": COLUMN_FORMAT, "shard": shard.sha256, "key": self.key}
        return {name.encode(): value.encode() for name, value in facts.items()}


def _read_values(path: Path) -> npt.NDArray[np.float32]:
    """The numbers in a file of a column; a damaged file is a StoreError."""
    try:
        table = pq.read_table(path, page_checksum_verification=True)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise StoreError(str(error)) from error
    if table.schema.names != ["value"] or table.schema.field("value").type != pa.float32():
        raise StoreError("it has other columns than one of 32-bit numbers")
    return numbers(table["value"], np.float32)


def column_problem(path: Path, batch: Path) -> str:
    """The problem of a file of a column; empty if there is none. `batch` is the directory of its rollouts, if any."""
    try:
        values, metadata = _read_values(path), pq.read_schema(path).metadata or {}
        if metadata.get(b"stalewise") != COLUMN_FORMAT.encode() or not {b"shard", b"key"} <= metadata.keys():
            return "it does not say what it was computed from"
        manifest = path.with_suffix(".json").name
        if not (batch / manifest).is_file():
            return ""
        shard = read_shard_manifest(batch, int(path.stem.removeprefix("shard-")))
        if metadata[b"shard"].decode("utf-8", "replace") == shard.sha256 and len(values) != shard.response_tokens:
            return f"it has {len(values):,} numbers for {shard.response_tokens:,} tokens"
        return ""
    except (StoreError, ValueError) as error:
        return str(error)


def numbers(column: pa.ChunkedArray, dtype: type) -> npt.NDArray[Any]:
    """Copy a numeric column into a writable numpy array; null becomes NaN."""
    return np.array(column.to_numpy(), dtype=dtype)


def column_range(footer: pq.FileMetaData, row_group: int, column: int) -> tuple[int, int]:
    """Smallest and largest value of a column in a row group, from the footer."""
    statistics = footer.row_group(row_group).column(column).statistics
    return statistics.min, statistics.max


def _flat(column: pa.ChunkedArray, dtype: type) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    values, lengths = [np.empty(0, dtype)], [np.empty(0, np.int64)]
    for chunk in column.chunks:
        values.append(chunk.flatten().to_numpy())
        lengths.append(np.diff(chunk.offsets.to_numpy()).astype(np.int64))
    return np.concatenate(values), np.cumsum(np.concatenate([[0], *lengths]), dtype=np.int64)


def _gather(
    offsets: npt.NDArray[np.int64], rows: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Indices of the tokens of `rows` in the flat array, and the offsets of the gathered tokens."""
    lengths = offsets[rows + 1] - offsets[rows]
    gathered = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(lengths, out=gathered[1:])
    within = np.arange(gathered[-1]) - np.repeat(gathered[:-1], lengths)
    return np.repeat(offsets[rows], lengths) + within, gathered
