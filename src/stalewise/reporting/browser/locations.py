"""Where the rollouts of a run lie: its own batches, those it learned from, and those that were taken back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from stalewise.errors import StalewiseError, StoreError
from stalewise.reporting.inspection import numbered_batches
from stalewise.store import ShardManifest, batch_directories, ledger_path, parse_batch_name, read_ledger, shard_path
from stalewise.store import token_log_directory as tokens_of_run
from stalewise.store.atomic import sha256_file
from stalewise.store.manifest import BATCH_MANIFEST


@dataclass(frozen=True, slots=True)
class Location:
    """A generation batch, and the records that say what became of its rollouts."""

    key: str  # unique in the run
    directory: Path
    generation_batch: int  # the number under which the ledger knows it
    rollback: str  # the rollback that took it, or updates on it, back; empty where all stands
    ledger: Path
    tokens: Path
    stands: bool = True  # False: the rollback took the batch itself back

    @property
    def is_committed(self) -> bool:
        """Whether the batch has its manifest."""
        return (self.directory / BATCH_MANIFEST).is_file()


def find_places(run: Path) -> list[Location]:
    """All generation batches of a run, those that were taken back last."""
    standing = [
        Location(path.name, path, number, "", ledger_path(run), tokens_of_run(run))
        for number, path in numbered_batches(run)
    ]
    if len({place.key for place in standing}) < len(standing):  # sources of several runs may have one name
        standing = [replace(place, key=f"{place.generation_batch}:{place.key}") for place in standing]
    return [*standing, *_taken_back(run, standing)]


def _taken_back(run: Path, standing: list[Location]) -> Iterator[Location]:
    """Batches that a rollback took back; where it took back updates alone, the standing batches of these."""
    for rollback in sorted((run / "rollbacks").glob("r[0-9]*")):
        ledger, tokens, name = rollback / "updates.jsonl", rollback / "tokens", rollback.name
        gone = {parse_batch_name(path).generation_batch: path for path in batch_directories(rollback / "rollouts")}
        for number, path in gone.items():
            yield Location(f"{name}:{path.name}", path, number, name, ledger, tokens, stands=False)
        updated = _batches_of(ledger, standing)
        for place in standing:
            if place.generation_batch in updated - gone.keys():
                yield replace(place, key=f"{name}:{place.key}", rollback=name, ledger=ledger, tokens=tokens)


def _batches_of(ledger: Path, standing: list[Location]) -> set[int]:
    """The generation batches that a ledger names; any may be where it is damaged, and the index says that it is."""
    try:
        return {entry.generation_batch for entry in read_ledger(ledger)}
    except StalewiseError:
        return {place.generation_batch for place in standing}


def check_shard(place: Location, shard: ShardManifest) -> None:
    """A StoreError where the file of a shard is not the one that its manifest is about; hashed once."""
    path = shard_path(place.directory, shard.index)
    try:
        found = path.stat()
        is_whole = found.st_size == shard.bytes and _sha256(path, found.st_size, found.st_mtime_ns) == shard.sha256
    except OSError as error:
        raise StoreError(f"{path} is damaged: {error}") from error
    if not is_whole:
        raise StoreError(f"{path} is damaged: its content is not what its manifest says")


@lru_cache(maxsize=65536)
def _sha256(path: Path, size: int, mtime_ns: int) -> str:
    """Size and time are there to hash a file again when it has changed."""
    return sha256_file(path)


def read_shard(place: Location, shard: ShardManifest, columns: list[str]) -> pa.Table:
    """Some columns of a shard; one that is damaged is a StoreError that names it."""
    path = shard_path(place.directory, shard.index)
    try:
        if path.stat().st_size != shard.bytes:
            raise StoreError(f"{path} is damaged: it has {path.stat().st_size} bytes, its manifest says {shard.bytes}")
        with pq.ParquetFile(path) as file:
            return file.read(columns=columns, use_threads=False)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise StoreError(f"{path} is damaged: {error}") from error


def read_rows(place: Location, shard: ShardManifest, rollout_ids: npt.NDArray[np.int64]) -> pa.Table:
    """Whole rows of some rollouts, of a shard that is whole; only row groups that can hold one of them are decoded."""
    check_shard(place, shard)
    path = shard_path(place.directory, shard.index)
    try:
        with pq.ParquetFile(path) as file:
            groups = [g for g in range(file.num_row_groups) if _may_hold(file.metadata, g, rollout_ids)]
            table = file.read_row_groups(groups, use_threads=False)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise StoreError(f"{path} is damaged: {error}") from error
    return table.filter(pa.array(np.isin(table.column("rollout_id").to_numpy(), rollout_ids)))


def _may_hold(footer: pq.FileMetaData, row_group: int, rollout_ids: npt.NDArray[np.int64]) -> bool:
    statistics = footer.row_group(row_group).column(0).statistics
    return bool(((rollout_ids >= statistics.min) & (rollout_ids <= statistics.max)).any())
