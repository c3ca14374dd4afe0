"""Versions of the rewards of existing rollouts: `rewards/NAME/` in a run directory; the first is in the shards.

A version has one Parquet file per generation batch and a `manifest.json`, which says how it was scored. It is committed
as a whole and never changed; the rewards in the shards stay as they are.
"""

from __future__ import annotations

import fcntl
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from stalewise.errors import StoreError, nearest
from stalewise.store.atomic import (
    check_format,
    commit_directory,
    explain_write_errors,
    make_directory,
    read_json,
    remove_temporaries,
    sha256_file,
    temporary_name,
    write_json_atomic,
)
from stalewise.store.manifest import BatchManifest
from stalewise.store.records import REWARDS
from stalewise.store.schema import REWARD_PARTS
from stalewise.types import Reward

FORMAT = "stalewise.rewards/1"
FIRST = "first"  # the rewards in the shards
SCHEMA = pa.schema(
    [
        pa.field("rollout_id", pa.int64(), nullable=False),
        pa.field("reward", pa.float64()),  # null where the verifier failed
        pa.field("reward_parts", REWARD_PARTS, nullable=False),
        pa.field("reward_error", pa.string(), nullable=False),
    ],
    metadata={b"stalewise.format": FORMAT.encode()},
)
_NAME = re.compile(r"\w[\w.\-]*")


@dataclass(frozen=True, slots=True)
class RewardVersion:
    """One version of the rewards of a run, as its manifest describes it."""

    directory: Path
    record: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The version's name."""
        return self.directory.name

    def rewards_of(self, batch: BatchManifest, directory: Path) -> BatchRewards:
        """The rewards of a generation batch; StoreError if other rollouts were scored, or the file is damaged."""
        entry = self.record["batches"].get(directory.name)
        if entry is None:
            raise StoreError(f"{self.directory} has no rewards of {directory.name}: rescore the run again")
        if entry["shards"] != [shard.sha256 for shard in batch.shards]:
            raise StoreError(f"{self.directory} has rewards of other rollouts than those in {directory}: rescore again")
        path = self.path(directory.name)
        if self.is_damaged(directory.name):
            raise StoreError(f"{path} is damaged or missing: remove {self.directory} and rescore again")
        return BatchRewards(self.name, entry["sha256"], pq.read_table(path, use_threads=False))

    def path(self, batch: str) -> Path:
        """The file of a generation batch's rewards."""
        return self.directory / f"{batch}.parquet"

    def is_damaged(self, batch: str) -> bool:
        """Whether the file of a batch is missing or changed."""
        path = self.path(batch)
        return not path.is_file() or sha256_file(path) != self.record["batches"][batch]["sha256"]


class BatchRewards:
    """The rewards of one generation batch in another version."""

    def __init__(self, name: str, sha256: str, table: pa.Table) -> None:
        self.name, self.sha256, self.table = name, sha256, table
        self._ids = table["rollout_id"].to_numpy()
        self._values = np.array(table["reward"].to_numpy(), dtype=np.float64)

    def values(self, rollout_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """The rewards of these rollouts; NaN where the verifier failed."""
        return self._values[np.searchsorted(self._ids, rollout_ids)]

    def reward(self, rollout_id: int) -> Reward:
        """The reward of one rollout."""
        row = self.table.slice(int(np.searchsorted(self._ids, rollout_id)), 1).to_pylist()[0]
        value = math.nan if row["reward"] is None else row["reward"]
        return Reward(value, {part["name"]: part["value"] for part in row["reward_parts"]}, row["reward_error"])


def versions_directory(run: str | Path) -> Path:
    """The directory of a run's reward versions."""
    return Path(run) / "rewards"


def reward_versions(run: str | Path) -> list[RewardVersion]:
    """The committed versions of a run's rewards, oldest first."""
    root = versions_directory(run)
    paths = [path for path in (root.iterdir() if root.is_dir() else ()) if (path / "manifest.json").is_file()]
    versions = [read_version(path) for path in paths if not path.name.startswith(".")]
    return sorted(versions, key=lambda version: (version.record["time"], version.name))


def read_version(directory: Path) -> RewardVersion:
    """Read the manifest of a version."""
    record = read_json(directory / "manifest.json")
    check_format(directory, record.get("format"), FORMAT)
    if problem := REWARDS.problem(record):
        raise StoreError(f"{directory / 'manifest.json'} is damaged: {problem}; remove {directory} and rescore again")
    return RewardVersion(directory, record)


def find_version(run: str | Path, name: str) -> RewardVersion:
    """The version with this name; for an unknown name a StoreError that lists the known ones."""
    directory = versions_directory(run) / name
    if not (directory / "manifest.json").is_file():
        known = [version.name for version in reward_versions(run)]
        advice = nearest(name, known) if known else "it has only its first; `stalewise rescore` makes others"
        raise StoreError(f"{run} has no rewards {name!r}; {advice}")
    return read_version(directory)


def check_new_name(run: str | Path, name: str) -> None:
    """Raise a StoreError for a name that exists or that no directory should have."""
    if not _NAME.fullmatch(name) or name == FIRST:
        raise StoreError(f"rewards cannot be called {name!r}: use letters, digits, - and _, and not {FIRST!r}")
    if (versions_directory(run) / name).exists():
        raise StoreError(f"{versions_directory(run) / name} exists and is never overwritten: choose another name")


@contextmanager
def new_version(run: str | Path, name: str) -> Iterator[VersionWriter]:
    """A writer of a new version, which is committed when the block ends without an error."""
    check_new_name(run, name)
    final = versions_directory(run) / name
    temporary = temporary_name(final)
    with explain_write_errors(final, 0):
        make_directory(final.parent)
    with _alone(final.parent):
        try:
            with explain_write_errors(final, 0):
                make_directory(temporary)
                writer = VersionWriter(temporary)
                yield writer
                write_json_atomic(temporary / "manifest.json", {"format": FORMAT, **writer.record}, sealed=True)
            commit_directory(temporary, final)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Lock the directory against other writers, and remove files of writers that were killed."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StoreError(f"another process is scoring {directory.parent}: wait until it has ended") from None
            remove_temporaries(directory)
        yield
    finally:
        os.close(descriptor)


class VersionWriter:
    """Writes the batches of a version; `record` becomes its manifest."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.record: dict[str, Any] = {"batches": {}}

    def add(self, name: str, batch: BatchManifest, rollout_ids: Sequence[int], rewards: Sequence[Reward]) -> None:
        """Write the rewards of a generation batch, in the order of rollout ids."""
        columns = [
            pa.array(rollout_ids, pa.int64()),
            pa.array([None if math.isnan(reward.value) else reward.value for reward in rewards], pa.float64()),
            pa.array([[{"name": k, "value": v} for k, v in reward.parts.items()] for reward in rewards], REWARD_PARTS),
            pa.array([reward.error.encode("utf-8", "replace").decode() for reward in rewards], pa.string()),
        ]
        path = self.directory / f"{name}.parquet"
        pq.write_table(pa.Table.from_arrays(columns, schema=SCHEMA), path, compression="zstd")
        self.record["batches"][name] = {
            "sha256": sha256_file(path),
            "rows": len(rewards),
            "shards": [shard.sha256 for shard in batch.shards],
        }
