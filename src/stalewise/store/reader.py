"""Reading a committed generation batch: streamed, by rollout id, or column by column."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from stalewise.errors import StoreError, nearest
from stalewise.store.atomic import check_format, sha256_file
from stalewise.store.columns import (
    EPISODE_COLUMNS,
    RolloutColumns,
    TokenColumn,
    column_range,
    concatenate,
    numbers,
    part_columns,
    rows_from_table,
)
from stalewise.store.manifest import (
    BatchManifest,
    ShardManifest,
    committed_shards,
    parse_batch_name,
    read_batch_manifest,
    shard_path,
)
from stalewise.store.schema import EPISODE_SCHEMA, FORMAT_KEY, FORMATS, LIGHT_COLUMNS, SCHEMA, rollouts_from_table
from stalewise.types import Rollout

_OF_REWARDS = ("reward", "reward_parts")


def open_batch(directory: str | Path, verify: bool = True) -> Batch:
    """Open a committed generation batch.

    Format and file sizes are always checked; `verify` also compares the checksums. A caller that has verified the batch
    before may pass False.
    """
    directory = Path(directory)
    manifest = read_batch_manifest(directory)
    if (manifest.generation_batch, manifest.version) != parse_batch_name(directory):
        raise StoreError(
            f"{directory} holds generation batch {manifest.generation_batch} of version {manifest.version}: "
            "the directory was renamed; give it its name back"
        )
    for shard in manifest.shards:
        verify_shard(directory, shard, checksum=verify)
    return Batch(directory, manifest)


def open_shards(directory: str | Path, count: int) -> Batch:
    """The first shards of a generation batch that is being generated."""
    shards = tuple(committed_shards(directory)[:count])
    name = parse_batch_name(directory)
    summed = ("rows", "tokens", "prompt_tokens", "truncated", "verifier_errors", "seconds")
    totals: dict[str, Any] = {key: sum(getattr(shard, key) for shard in shards) for key in summed}
    others: dict[str, Any] = {"task": "", "reward_mean": None, "samplers": (), "shards": shards}
    return Batch(Path(directory), BatchManifest(name.generation_batch, name.version, **totals, **others))


def verify_shard(directory: str | Path, shard: ShardManifest, checksum: bool = True) -> None:
    """Compare a shard's file with its manifest."""
    path = shard_path(directory, shard.index)
    if not path.is_file():
        raise StoreError(f"{path} is missing: run the same command again, it is generated again from its seeds")
    if path.stat().st_size != shard.bytes or (checksum and sha256_file(path) != shard.sha256):
        raise _damaged(path, "its content is not what its manifest says")


@dataclass(frozen=True, slots=True)
class Selection:
    """How groups with variance are divided among updates."""

    updates: int  # among which the groups with variance are divided
    # Added to rewards, as a function of response lengths.
    penalty: Callable[[npt.NDArray[Any]], npt.NDArray[Any] | float] = lambda lengths: 0.0


class Batch:
    """A committed generation batch. Made by `open_batch`.

    Streaming needs the memory of one row group, for any number of rollouts. `take` keeps the shards' footers (a few
    kilobytes per row group), since every optimizer update reads them again.
    """

    def __init__(self, directory: Path, manifest: BatchManifest) -> None:
        self.directory = directory
        self.manifest = manifest
        self.rollouts_by_update: dict[int, list[npt.NDArray[np.int64]]] = {}  # a cache of `rollouts_of_updates`
        # See `with_columns`.
        self.reward_weights: Mapping[str, float] = {}
        self.selection: Selection | None = None
        self.reference: TokenColumn | None = None
        self._footers: dict[int, pq.FileMetaData] = {}
        self._first = np.array([shard.rollout_first for shard in manifest.shards], np.int64)  # increasing

    def with_columns(
        self,
        *,
        reward_weights: Mapping[str, float],
        selection: Selection | None = None,
        reference: TokenColumn | None = None,
    ) -> Self:
        """The same batch with what learning reads besides its shards.

        Args:
            reward_weights: weights of the parts of rewards; the reward is then their weighted sum. Empty: the reward
                in the shards.
            selection: how informative groups are found and dealt to updates; None: all groups are dealt alike.
            reference: log-probabilities under a reference policy.
        """
        batch = copy(self)
        batch.rollouts_by_update = {}
        batch.reward_weights = reward_weights
        batch.selection = selection
        batch.reference = reference
        return batch

    def __len__(self) -> int:
        return self.manifest.rows

    def iter_tables(self, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Stream Arrow tables, one row group each, by rollout id."""
        wanted = _known(columns)
        for shard in self.manifest.shards:
            with self._open(shard) as file:
                for row_group in range(file.num_row_groups):
                    yield _decode(file, row_group, wanted)

    def iter_rollouts(self) -> Iterator[Rollout]:
        """Stream `Rollout` records by rollout id."""
        for table in self.iter_tables():
            yield from rollouts_from_table(table)

    def iter_records(self, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Stream the given columns as dictionaries; the reward of a failed verifier is None."""
        for table in self.iter_tables(columns):
            yield from table.to_pylist()

    def iter_rows(self) -> Iterator[RolloutColumns]:
        """Stream `RolloutColumns`, one row group each, by rollout id."""
        for table in self.iter_tables(EPISODE_COLUMNS):
            yield rows_from_table(table)

    def rows_of(self, shard: ShardManifest) -> RolloutColumns:
        """All rollouts of one shard, in their order."""
        with self._open(shard) as file:
            groups = range(file.num_row_groups)
            return concatenate([rows_from_table(_decode(file, group, list(EPISODE_COLUMNS))) for group in groups])

    def column(self, name: str) -> npt.NDArray[Any]:
        """One light column of all rollouts as a numpy array, without reading tokens (null rewards are NaN)."""
        if name not in LIGHT_COLUMNS:
            raise StoreError(f"{name} is not a light column ({nearest(name, LIGHT_COLUMNS)}): use take or iter_tables")
        if name == "reward" and self.reward_weights:
            return np.concatenate([self._weighted(table) for table in self.iter_tables(_OF_REWARDS)])
        column = pa.chunked_array([c for t in self.iter_tables([name]) for c in t.column(name).chunks])
        if pa.types.is_string(column.type):
            return column.to_numpy()
        return numbers(column, SCHEMA.field(name).type.to_pandas_dtype())

    def reward_parts(self) -> tuple[npt.NDArray[np.int64], dict[str, npt.NDArray[np.float64]]]:
        """Ids of all rollouts, and the values of each part of their rewards; NaN where one lacks it."""
        return parts_of(self.iter_tables(["rollout_id", "reward_parts"]))

    def informative(self) -> npt.NDArray[np.bool_]:
        """Whether each rollout is of a group whose rewards differ, with the penalty of the selection."""
        reward = self.column("reward")
        if self.selection is not None:
            reward = reward + self.selection.penalty(self.column("response_length"))
        return has_variance(reward, self.column("group"))

    def take(self, rollout_ids: npt.ArrayLike) -> RolloutColumns:
        """The given rollouts in the given order; only row groups that hold one of them are decoded."""
        asked = np.asarray(rollout_ids, dtype=np.int64).reshape(-1)
        wanted = np.unique(asked)
        parts = list(self._parts(wanted))
        found = np.concatenate([part.rollout_id for part in parts]) if parts else np.empty(0, np.int64)
        if len(found) != len(wanted):
            missing = np.setdiff1d(wanted, found)
            more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            raise StoreError(f"{self.directory} has no rollout {', '.join(map(str, missing[:5]))}{more}")
        if not parts:
            return rows_from_table(SCHEMA.empty_table())
        return concatenate(parts).take(np.searchsorted(found, asked))

    def _parts(self, wanted: npt.NDArray[np.int64]) -> Iterator[RolloutColumns]:
        """The rows of `wanted` (sorted), row group by row group, so that only one is in memory."""
        # By bisection: reading every shard in every update would take longer with every shard.
        indices = np.unique(np.searchsorted(self._first, wanted, side="right") - 1)
        for shard in (self.manifest.shards[index] for index in indices.tolist() if index >= 0):
            with self._open(shard) as file:
                self._footers[shard.index] = file.metadata
                for row_group in range(file.num_row_groups):
                    first, last = column_range(file.metadata, row_group, SCHEMA.get_field_index("rollout_id"))
                    here = wanted[np.searchsorted(wanted, first) : np.searchsorted(wanted, last, side="right")]
                    if len(here):
                        rows = self._read_rows(file, row_group, shard)
                        yield rows.take(np.flatnonzero(np.isin(rows.rollout_id, here, assume_unique=True)))

    def _read_rows(self, file: pq.ParquetFile, row_group: int, shard: ShardManifest) -> RolloutColumns:
        """The rows of a row group, with the columns that this batch has besides its shards'."""
        table = _decode(file, row_group, [*EPISODE_COLUMNS, *(_OF_REWARDS if self.reward_weights else ())])
        rows = rows_from_table(table)
        if self.reward_weights:
            rows = replace(rows, reward=self._weighted(table))
        if self.reference is not None:
            before = (_decode(file, group, ["response_length"]) for group in range(row_group))
            first = sum(int(numbers(one["response_length"], np.int64).sum()) for one in before)
            rows = replace(rows, reference_logp=self.reference.read(shard, first, len(rows.response_ids)).copy())
        return rows

    def _weighted(self, table: pa.Table) -> npt.NDArray[np.float64]:
        """The weighted sums of the parts of rewards; NaN where the verifier failed.

        A part that only some rewards have adds nothing to the others. A part that no reward of the table has is an
        error: its name may be misspelled.
        """
        reward = numbers(table["reward"], np.float64)
        scored = np.flatnonzero(~np.isnan(reward)).tolist()
        parts = table["reward_parts"].to_pylist()
        named = {row: {part["name"]: part["value"] for part in parts[row]} for row in scored}
        found = sorted({name for values in named.values() for name in values})
        if missing := [name for name in self.reward_weights if scored and name not in found]:
            raise StoreError(
                f"{self.directory}: a reward has no part {missing[0]!r}, which objective.reward_weights names; "
                f"its parts are {', '.join(found) or 'none'}"
            )
        for row, values in named.items():
            reward[row] = sum(weight * values.get(name, 0.0) for name, weight in self.reward_weights.items())
        return reward

    @contextlib.contextmanager
    def _open(self, shard: ShardManifest) -> Iterator[pq.ParquetFile]:
        path = shard_path(self.directory, shard.index)
        try:
            with pq.ParquetFile(path, metadata=self._footers.get(shard.index)) as file:
                if shard.index not in self._footers:
                    metadata = file.schema_arrow.metadata or {}
                    check_format(path, metadata.get(FORMAT_KEY, b"unknown").decode(), *FORMATS)
                yield file
        except FileNotFoundError:
            raise StoreError(f"{path} is missing: run the same command again, it is generated again") from None
        except (pa.ArrowException, OSError) as error:
            raise _damaged(path, str(error)) from error


def parts_of(tables: Iterable[pa.Table]) -> tuple[npt.NDArray[np.int64], dict[str, npt.NDArray[np.float64]]]:
    """Ids and reward parts of rollouts, from tables with `rollout_id` and `reward_parts`."""
    table = pa.concat_tables(tables).combine_chunks()
    column = table["reward_parts"]
    return table["rollout_id"].to_numpy(), part_columns(column.chunk(0)) if column.num_chunks else {}


def _damaged(path: Path, why: str) -> StoreError:
    return StoreError(
        f"{path} is damaged: {why}; move the shard away and run the same command again: "
        "it is generated again from its seeds"
    )


def _decode(file: pq.ParquetFile, row_group: int, columns: list[str] | None) -> pa.Table:
    # Threads are no faster on so few rows, and may hold the previous row group longer than we do.
    return file.read_row_group(row_group, columns=columns, use_threads=False)


def _known(columns: Sequence[str] | None) -> list[str] | None:
    # pyarrow ignores a column it does not know, so a misspelt name would read as "no such data".
    for name in columns or ():
        if name not in EPISODE_SCHEMA.names:
            raise StoreError(f"the store has no column {name}: {nearest(name, EPISODE_SCHEMA.names)}")
    return None if columns is None else list(columns)


def split_into_updates(group_column: npt.ArrayLike, per_update: int) -> list[npt.NDArray[np.int64]]:
    """Positions of the rows of each update: `per_update` whole groups by group id; the last update gets the rest.

    Rows of one group need not be adjacent in `group_column`.

    >>> [rows.tolist() for rows in split_into_updates([7, 7, 5, 5, 9, 7], per_update=2)]
    [[2, 3, 0, 1, 5], [4]]
    """
    if per_update < 1:
        raise ValueError(f"per_update is {per_update}: an optimizer batch has at least one group")
    groups = np.asarray(group_column, dtype=np.int64)
    order = np.argsort(groups, kind="stable")
    firsts = np.flatnonzero(np.diff(groups[order], prepend=groups[order][:1] - 1))  # index of each group's first row
    return np.split(order, firsts[per_update::per_update]) if len(order) else []


def split_informative(
    group_column: npt.ArrayLike, informative: npt.NDArray[np.bool_], per_update: int, updates: int
) -> list[npt.NDArray[np.int64]]:
    """Positions of the rows of each update: equally many informative groups each, and equally many of the others.

    An update gets `per_update` informative groups; further ones stay unused. If there are too few, they are divided
    evenly. All other groups are divided, too, so that an update reports metrics of a fair sample.

    >>> rows = split_informative([0, 1, 2, 3, 4, 5], np.array([1, 0, 0, 1, 1, 0], bool), per_update=1, updates=2)
    >>> [positions.tolist() for positions in rows]
    [[0, 1, 2], [3, 5]]
    """
    groups = np.asarray(group_column, dtype=np.int64)
    numbers_of, inverse = np.unique(groups, return_inverse=True)
    is_informative = np.zeros(len(numbers_of), np.bool_)
    is_informative[inverse[informative]] = True
    chosen, others = np.flatnonzero(is_informative), np.flatnonzero(~is_informative)
    chosen = chosen[: updates * per_update]
    update_of = np.full(len(numbers_of), -1)
    for kind in (chosen, others):
        update_of[kind] = np.arange(len(kind)) * updates // max(len(kind), 1)
    of_row = update_of[inverse]
    return [
        np.flatnonzero(of_row == update)[np.argsort(groups[of_row == update], kind="stable")]
        for update in range(updates)
    ]


def has_variance(reward: npt.NDArray[np.floating], group: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
    """Whether each row's group has known rewards that differ."""
    _, inverse = np.unique(group, return_inverse=True)
    count, known = int(inverse.max(initial=-1)) + 1, ~np.isnan(reward)
    low, high = np.full(count, np.inf), np.full(count, -np.inf)
    np.minimum.at(low, inverse[known], reward[known])
    np.maximum.at(high, inverse[known], reward[known])
    return (high > low)[inverse]


def positions_of_updates(batch: Batch, per_update: int) -> list[npt.NDArray[np.int64]]:
    """Positions of the rows of each update on a generation batch."""
    group = batch.column("group")
    if batch.selection is None:
        return split_into_updates(group, per_update)
    return split_informative(group, batch.informative(), per_update, batch.selection.updates)


def rollouts_of_updates(batch: Batch, per_update: int) -> list[npt.NDArray[np.int64]]:
    """Rollout ids of each update on a generation batch; cached, since training reads a stage in pieces."""
    if per_update not in batch.rollouts_by_update:
        rollout_ids = batch.column("rollout_id")
        batch.rollouts_by_update[per_update] = [rollout_ids[rows] for rows in positions_of_updates(batch, per_update)]
    return batch.rollouts_by_update[per_update]


def rewards_of_updates(batch: Batch, per_update: int) -> list[tuple[float, float]]:
    """Mean reward of each update on a generation batch, and its standard error."""
    reward, group = batch.column("reward"), batch.column("group")
    return [mean_reward(reward[rows], group[rows]) for rows in positions_of_updates(batch, per_update)]


def mean_reward(reward: npt.NDArray[np.floating], group: npt.NDArray[np.integer]) -> tuple[float, float]:
    """Mean of the known rewards, and its standard error over groups, since rollouts of one prompt are correlated.

    NaN if no reward is known; the error also if there is only one group.

    >>> mean_reward(np.array([1.0, 1.0, 0.0, 0.0]), np.array([0, 0, 1, 1]))
    (0.5, 0.5)
    """
    known = ~np.isnan(reward)
    if not known.any():
        return float("nan"), float("nan")
    _, group = np.unique(group[known], return_inverse=True)
    means = np.bincount(group, weights=reward[known]) / np.bincount(group)
    error = means.std(ddof=1) / np.sqrt(len(means)) if len(means) > 1 else np.nan
    return float(reward[known].mean(dtype=np.float64)), float(error)
