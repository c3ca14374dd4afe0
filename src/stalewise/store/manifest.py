"""Manifests: small JSON files that commit a shard or a generation batch, which do not exist without them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from stalewise.errors import StoreError
from stalewise.store.atomic import RESTORE, check_format, read_json
from stalewise.store.records import RecordSchema, is_real, is_table, is_text, is_whole, list_of
from stalewise.store.schema import FORMAT, FORMATS
from stalewise.types import SamplerSettings

BATCH_MANIFEST = "manifest.json"
_BATCH_NAME = re.compile(r"g(\d{6,})-v(\d{6,})")
_SHARD_MANIFEST_NAME = re.compile(r"shard-(\d{5,})\.json")


class BatchName(NamedTuple):
    """Number of a generation batch and the policy version that generated it."""

    generation_batch: int
    version: int


@dataclass(frozen=True, slots=True)
class ShardManifest:
    """Summary of a shard. Sums, not means: a batch adds up its shards."""

    index: int
    file: str
    bytes: int
    sha256: str
    rows: int
    tokens: int  # response tokens of the policy
    prompt_tokens: int
    rollout_first: int
    rollout_last: int
    version_first: int
    version_last: int
    reward_sum: float
    reward_count: int  # rows whose verifier worked
    truncated: int
    verifier_errors: int
    seconds: float  # spent generating
    samplers: tuple[SamplerSettings, ...]  # the distinct ones, in order of first use
    extra: Mapping[str, Any] = field(default_factory=dict)
    format: str = FORMAT

    @property
    def response_tokens(self) -> int:
        """All tokens after prompts: the policy's, and in episodes those from outside."""
        return self.tokens + self.outside_tokens

    @property
    def outside_tokens(self) -> int:
        """Tokens of episodes that are not the policy's."""
        return int(self.extra.get("outside_tokens", 0))

    @property
    def turns(self) -> int:
        """Turns of the policy; without episodes one per rollout."""
        return int(self.extra.get("turns", self.rows))


@dataclass(frozen=True, slots=True)
class BatchManifest:
    """Summary of a generation batch."""

    generation_batch: int
    version: int  # the policy version the batch was generated with
    task: str
    rows: int
    tokens: int  # response tokens of the policy
    prompt_tokens: int
    reward_mean: float | None  # over the rows whose verifier worked; None where it worked for none
    truncated: int
    verifier_errors: int
    seconds: float  # spent generating, all shards together
    samplers: tuple[SamplerSettings, ...]
    shards: tuple[ShardManifest, ...]
    extra: Mapping[str, Any] = field(default_factory=dict)
    format: str = FORMAT

    @property
    def outside_tokens(self) -> int:
        """Tokens of episodes that are not the policy's."""
        return sum(shard.outside_tokens for shard in self.shards)

    @property
    def turns(self) -> int:
        """Turns of the policy; without episodes one per rollout."""
        return sum(shard.turns for shard in self.shards)


_COUNTS = dict.fromkeys(("rows", "tokens", "prompt_tokens", "truncated", "verifier_errors"), is_whole)
_IDS = ("index", "bytes", "rollout_first", "rollout_last", "version_first", "version_last", "reward_count")
_COMMON = {**_COUNTS, "seconds": is_real, "samplers": list_of(is_table), "extra": is_table, "format": is_text}
_SCHEMAS = {
    ShardManifest: RecordSchema(
        {**_COMMON, **dict.fromkeys(_IDS, is_whole), "file": is_text, "sha256": is_text, "reward_sum": is_real}
    ),
    BatchManifest: RecordSchema(
        {**_COMMON, "generation_batch": is_whole, "version": is_whole, "task": is_text, "shards": list_of(is_table)},
        optional={"reward_mean": is_real},
    ),
}


def batch_directory(root: str | Path, *, version: int, generation_batch: int) -> Path:
    """The directory of a generation batch under `root`, the `rollouts` directory of a run.

    The batch number comes first, since a pipelined schedule may generate several batches from one version.
    """
    return Path(root) / f"g{generation_batch:06d}-v{version:06d}"


def parse_batch_name(directory: str | Path) -> BatchName:
    """Read generation batch and version from a directory's name."""
    match = _BATCH_NAME.fullmatch(Path(directory).name)
    if not match:
        raise StoreError(f"{directory} is not a generation batch: its name should look like g000003-v000064")
    return BatchName(int(match[1]), int(match[2]))


def batch_directories(root: str | Path) -> list[Path]:
    """Directories of generation batches under `root`, committed or not, by batch number."""
    root = Path(root)
    entries = root.iterdir() if root.is_dir() else ()
    return sorted((e for e in entries if e.is_dir() and _BATCH_NAME.fullmatch(e.name)), key=parse_batch_name)


def shard_path(directory: str | Path, index: int) -> Path:
    """The Parquet file of a shard."""
    return Path(directory) / f"shard-{index:05d}.parquet"


def shard_manifest_path(directory: str | Path, index: int) -> Path:
    """The manifest of a shard."""
    return shard_path(directory, index).with_suffix(".json")


def committed_shards(directory: str | Path) -> list[ShardManifest]:
    """Manifests of the committed shards, by index. A shard is committed if both its file and its manifest exist.

    So a damaged shard that was moved away counts as missing, and the same command generates it again.
    """
    directory = Path(directory)
    names = (entry.name for entry in directory.iterdir()) if directory.is_dir() else ()
    indices = sorted(int(match[1]) for match in map(_SHARD_MANIFEST_NAME.fullmatch, names) if match)
    return [read_shard_manifest(directory, i) for i in indices if shard_path(directory, i).is_file()]


def read_shard_manifest(directory: str | Path, index: int) -> ShardManifest:
    """Read the manifest of one shard."""
    path = shard_manifest_path(directory, index)
    return _shard_manifest(read_json(path), path)


def read_batch_manifest(directory: str | Path) -> BatchManifest:
    """Read the manifest of a generation batch; a batch without one is not committed, and a StoreError."""
    path = Path(directory) / BATCH_MANIFEST
    if not path.exists():
        raise StoreError(
            f"{directory} is not a committed generation batch: {BATCH_MANIFEST} is missing; finish generating it"
        )
    record = _checked(read_json(path), path, BatchManifest)
    record["shards"] = tuple(_shard_manifest(shard, path) for shard in record["shards"])
    return BatchManifest(**_with_samplers(record, path))


def is_committed(directory: str | Path) -> bool:
    """Whether a generation batch has its manifest and exactly the shards it lists.

    A shard that was moved away, or regenerated differently, makes it False: the batch must be committed again.
    """
    if not (Path(directory) / BATCH_MANIFEST).exists():
        return False
    listed = {shard.index: shard.sha256 for shard in read_batch_manifest(directory).shards}
    return listed == {shard.index: shard.sha256 for shard in committed_shards(directory)}


def manifest_record(manifest: ShardManifest | BatchManifest) -> dict[str, Any]:
    """The JSON form of a manifest."""
    return asdict(manifest)


def _shard_manifest(record: dict[str, Any], path: Path) -> ShardManifest:
    return ShardManifest(**_with_samplers(_checked(record, path, ShardManifest), path))


def _checked(record: Any, path: Path, kind: type[ShardManifest] | type[BatchManifest]) -> dict[str, Any]:
    """Keep the fields of `kind`; unknown keys (of a later release) are ignored, missing ones are an error."""
    if not isinstance(record, dict):
        raise StoreError(f"{path} is corrupt: it should describe a shard with a JSON object")
    check_format(path, record.get("format"), *FORMATS)
    names = [field.name for field in fields(kind)]
    if problem := _SCHEMAS[kind].problem(record):
        raise StoreError(f"{path} is corrupt: {problem}; {RESTORE}")
    return {name: record.get(name) for name in names}


def _with_samplers(record: dict[str, Any], path: Path) -> dict[str, Any]:
    try:
        samplers = tuple(SamplerSettings(**settings) for settings in record["samplers"])
    except TypeError as error:
        raise StoreError(f"{path} is corrupt: samplers: {error}") from error
    return {**record, "samplers": samplers}
