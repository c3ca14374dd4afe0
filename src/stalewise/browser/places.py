"""Where the rollouts of a run lie: its own batches, those it learned from, and those that were taken back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from stalewise.errors import StoreError
from stalewise.inspection import numbered_batches
from stalewise.store import ShardManifest, batch_directories, ledger_path, parse_batch_name, shard_path
from stalewise.store import token_log_directory as tokens_of_run
from stalewise.store.manifest import BATCH_MANIFEST


@dataclass(frozen=True, slots=True)
class Place:
    """A generation batch, and the records that say what became of its rollouts."""

    key: str  # unique in the run
    directory: Path
    generation_batch: int  # the number under which the ledger knows it
    rollback: str  # the rollback that took it back; empty where it stands
    ledger: Path
    tokens: Path

    @property
    def is_committed(self) -> bool:
        """Whether the batch has its manifest."""
        return (self.directory / BATCH_MANIFEST).is_file()


def find_places(run: Path) -> list[Place]:
    """All generation batches of a run, those that were taken back last."""
    standing = [
        Place(path.name, path, number, "", ledger_path(run), tokens_of_run(run))
        for number, path in numbered_batches(run)
    ]
    if len({place.key for place in standing}) < len(standing):  # sources of several runs may have one name
        standing = [replace(place, key=f"{place.generation_batch}:{place.key}") for place in standing]
    return [*standing, *_taken_back(run)]


def _taken_back(run: Path) -> Iterator[Place]:
    for rollback in sorted((run / "rollbacks").glob("r[0-9]*")):
        for path in batch_directories(rollback / "rollouts"):
            number = parse_batch_name(path).generation_batch
            ledger, tokens = rollback / "updates.jsonl", rollback / "tokens"
            yield Place(f"{rollback.name}:{path.name}", path, number, rollback.name, ledger, tokens)


def read_shard(place: Place, shard: ShardManifest, columns: list[str]) -> pa.Table:
    """Some columns of a shard; one that is damaged is a StoreError that names it."""
    path = shard_path(place.directory, shard.index)
    try:
        if path.stat().st_size != shard.bytes:
            raise StoreError(f"{path} is damaged: it has {path.stat().st_size} bytes, its manifest says {shard.bytes}")
        with pq.ParquetFile(path) as file:
            return file.read(columns=columns, use_threads=False)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise StoreError(f"{path} is damaged: {error}") from error


def read_rows(place: Place, shard: ShardManifest, rollout_ids: npt.NDArray[np.int64]) -> pa.Table:
    """Whole rows of some rollouts; only row groups that can hold one of them are decoded."""
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
