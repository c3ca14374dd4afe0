"""Finds the rollouts of a run: its own batches, those it learned from, and those that were rolled back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from stalewise.errors import StalewiseError, StoreError
from stalewise.reporting.inspection import numbered_batches, rewards_used
from stalewise.store import ShardManifest, batch_directories, ledger_path, parse_batch_name, read_ledger, shard_path
from stalewise.store import token_log_directory as tokens_of_run
from stalewise.store.atomic import cached_sha256
from stalewise.store.manifest import BATCH_MANIFEST
from stalewise.store.reward_versions import FIRST


@dataclass(frozen=True, slots=True)
class BatchLocation:
    """A generation batch, with the ledger and the token log of its updates."""

    key: str  # unique in the run
    directory: Path
    generation_batch: int  # its number in the ledger
    rollback: str  # the rollback of the batch or of updates on it; empty if there is none
    ledger: Path
    tokens: Path
    is_kept: bool = True  # False: the batch itself was rolled back
    rewards: str = FIRST  # the version of its rewards that the run learned from

    @property
    def is_committed(self) -> bool:
        """Whether the batch has its manifest; its shards may be damaged or missing."""
        return (self.directory / BATCH_MANIFEST).is_file()


def find_batches(run: Path) -> list[BatchLocation]:
    """All generation batches of a run, those of rollbacks last."""
    used = rewards_used(run)
    kept = [
        BatchLocation(
            path.name, path, number, "", ledger_path(run), tokens_of_run(run), rewards=used.get(number, FIRST)
        )
        for number, path in numbered_batches(run)
    ]
    if len({batch.key for batch in kept}) < len(kept):  # batches of several source runs may share a name
        kept = [replace(batch, key=f"{batch.generation_batch}:{batch.key}") for batch in kept]
    return [*kept, *_rolled_back(run, kept)]


def _rolled_back(run: Path, kept: list[BatchLocation]) -> Iterator[BatchLocation]:
    """Batches that were rolled back; if only updates were rolled back, the kept batches of these updates."""
    for rollback in sorted((run / "rollbacks").glob("r[0-9]*")):
        ledger, tokens, name = rollback / "updates.jsonl", rollback / "tokens", rollback.name
        removed = {parse_batch_name(path).generation_batch: path for path in batch_directories(rollback / "rollouts")}
        for number, path in removed.items():
            yield BatchLocation(f"{name}:{path.name}", path, number, name, ledger, tokens, is_kept=False)
        try:
            updated = {entry.generation_batch for entry in read_ledger(ledger)}
        except StalewiseError:  # any batch may have been updated; the index reports the damage
            updated = {batch.generation_batch for batch in kept}
        for batch in kept:
            if batch.generation_batch in updated - removed.keys():
                yield replace(batch, key=f"{name}:{batch.key}", rollback=name, ledger=ledger, tokens=tokens)


def check_shard(batch: BatchLocation, shard: ShardManifest) -> None:
    """Raise a StoreError if a shard differs from its manifest. A file is hashed again only if it has changed."""
    path = shard_path(batch.directory, shard.index)
    try:
        is_whole = path.stat().st_size == shard.bytes and cached_sha256(path) == shard.sha256
    except OSError as error:
        raise StoreError(f"{path} is damaged: {error}") from error
    if not is_whole:
        raise StoreError(f"{path} is damaged: its content differs from its manifest")


@contextlib.contextmanager
def _open(batch: BatchLocation, shard: ShardManifest) -> Iterator[pq.ParquetFile]:
    """Open the file of a shard; errors while reading it are StoreErrors."""
    path = shard_path(batch.directory, shard.index)
    try:
        if (size := path.stat().st_size) != shard.bytes:
            raise StoreError(f"{path} is damaged: it has {size} bytes, its manifest says {shard.bytes}")
        with pq.ParquetFile(path) as file:
            yield file
    except (pa.ArrowException, OSError, ValueError) as error:
        raise StoreError(f"{path} is damaged: {error}") from error


def read_shard(batch: BatchLocation, shard: ShardManifest, columns: list[str]) -> pa.Table:
    """Some columns of a shard."""
    with _open(batch, shard) as file:
        return file.read(columns=columns, use_threads=False)


def read_rows(batch: BatchLocation, shard: ShardManifest, rollout_ids: npt.NDArray[np.int64]) -> pa.Table:
    """Whole rows of some rollouts. Checks the shard, and decodes only row groups that can hold one of them."""
    check_shard(batch, shard)
    with _open(batch, shard) as file:
        ranges = [file.metadata.row_group(group).column(0).statistics for group in range(file.num_row_groups)]
        may_hold = [((rollout_ids >= ids.min) & (rollout_ids <= ids.max)).any() for ids in ranges]
        table = file.read_row_groups(np.flatnonzero(may_hold).tolist(), use_threads=False)
    return table.filter(pa.array(np.isin(table.column("rollout_id").to_numpy(), rollout_ids)))
