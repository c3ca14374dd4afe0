"""Writes a generation batch: shards one by one, each committed by its own manifest, then the batch by `manifest.json`.

A shard's index determines its content (shard k holds the prompts [k·n, (k + 1)·n) of the batch), so interrupted
generation resumes with `next_shard`. Committed data is never rewritten: if two processes make one shard, the first to
commit it wins and the other gets `AlreadyCommitted`.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from stalewise.errors import StoreError
from stalewise.store.atomic import create_atomic, remove_temporaries, sealed_json, write_atomic, write_json_atomic
from stalewise.store.columns import ROW_GROUP_ROWS, rows_from_table
from stalewise.store.manifest import (
    BATCH_MANIFEST,
    BatchManifest,
    ShardManifest,
    committed_shards,
    is_committed,
    manifest_record,
    parse_batch_name,
    read_batch_manifest,
    shard_manifest_path,
    shard_path,
)
from stalewise.store.schema import EPISODES, FORMAT, table_from_rollouts
from stalewise.types import POLICY, FinishReason, Rollout, SamplerSettings


class AlreadyCommitted(StoreError):
    """A shard or batch that another process committed first; nothing was changed."""


def write_shard(
    directory: str | Path,
    index: int,
    rollouts: Sequence[Rollout] | pa.Table,
    *,
    seconds: float = 0.0,
    extra: Mapping[str, Any] | None = None,
) -> ShardManifest:
    """Write and commit shard `index` from records, or from a table of the store's schema; rollout ids must rise.

    `seconds` is the time it took to generate. Once this returns, the shard survives a crash; before, it does not exist.
    """
    path, manifest_path = shard_path(directory, index), shard_manifest_path(directory, index)
    if len(rollouts) == 0:
        raise StoreError(f"{path} would have no rollouts: a shard holds at least one")
    if manifest_path.exists():  # checked before the file, which is always written first
        if path.exists():
            raise _committed(path)
        manifest_path.unlink(missing_ok=True)  # its shard was moved away: it must not commit the new one
    table = rollouts if isinstance(rollouts, pa.Table) else table_from_rollouts(rollouts)
    data = _parquet(table)
    if not create_atomic(path, data):
        data, table = _adopt_or_replace(path, data, table)
    manifest = _describe(index, path.name, data, table, seconds, extra or {})
    if not create_atomic(manifest_path, sealed_json(manifest_record(manifest))):
        raise _committed(path)
    return manifest


def _committed(path: Path) -> AlreadyCommitted:
    return AlreadyCommitted(f"{path} is committed already and is never rewritten: go on with the next missing shard")


def _adopt_or_replace(path: Path, data: memoryview, table: pa.Table) -> tuple[memoryview, pa.Table]:
    """The content of an uncommitted shard file, if it holds the same rollouts; otherwise it is replaced by ours.

    The process that wrote it may still commit it, or may have ended. Files under their final names are complete, so
    both processes write the same manifest.
    """
    existing = memoryview(path.read_bytes())
    if existing == data:
        return data, table
    try:
        theirs = pq.read_table(pa.BufferReader(existing))
        if theirs.schema.equals(table.schema) and _requested_columns(theirs) == _requested_columns(table):
            return existing, theirs
    except (pa.ArrowException, OSError, ValueError, KeyError):
        pass
    write_atomic(path, data)
    return data, table


def _requested_columns(table: pa.Table) -> list[Any]:
    """The columns that the order for a shard determines: two shards with equal ones hold the same rollouts."""
    names = ("rollout_id", "prompt_ids", "version_first", "version_last")
    return [table["sampler"].combine_chunks().field("seed"), *(table[name] for name in names)]


def next_shard(directory: str | Path) -> int:
    """Index of the first missing shard, where interrupted generation resumes."""
    present = {shard.index for shard in committed_shards(directory)}
    return next(index for index in range(len(present) + 1) if index not in present)


def commit_batch(
    directory: str | Path, *, shards: int, task: str, extra: Mapping[str, Any] | None = None
) -> BatchManifest:
    """Commit a generation batch of `shards` shards, all of which must be committed; the first to do so wins."""
    directory = Path(directory)
    name = parse_batch_name(directory)
    if is_committed(directory):
        raise AlreadyCommitted(f"{directory} is committed already and is never rewritten")
    parts = committed_shards(directory)
    _check_parts(directory, parts, shards)
    scored = sum(part.reward_count for part in parts)
    manifest = BatchManifest(
        generation_batch=name.generation_batch,
        version=name.version,
        task=task,
        rows=sum(part.rows for part in parts),
        tokens=sum(part.tokens for part in parts),
        prompt_tokens=sum(part.prompt_tokens for part in parts),
        reward_mean=math.fsum(part.reward_sum for part in parts) / scored if scored else None,
        truncated=sum(part.truncated for part in parts),
        verifier_errors=sum(part.verifier_errors for part in parts),
        seconds=math.fsum(part.seconds for part in parts),
        samplers=tuple(dict.fromkeys(sampler for part in parts for sampler in part.samplers)),
        shards=tuple(parts),
        extra=extra or {},
        format=EPISODES if any(part.format == EPISODES for part in parts) else FORMAT,
    )
    if not create_atomic(directory / BATCH_MANIFEST, sealed_json(manifest_record(manifest))):
        if is_committed(directory):
            return read_batch_manifest(directory)
        # The existing manifest lists shards that no longer exist: replace it.
        write_json_atomic(directory / BATCH_MANIFEST, manifest_record(manifest), sealed=True)
    remove_temporaries(directory)  # left by killed processes; nothing more is written here
    return manifest


def complete_manifests(directory: str | Path, extra: Mapping[str, Any]) -> None:
    """Add `extra` to the manifests of a batch that has a temporary name, so that no other process reads it."""
    directory = Path(directory)
    shards = tuple(replace(shard, extra={**extra, **shard.extra}) for shard in committed_shards(directory))
    for shard in shards:
        write_json_atomic(shard_manifest_path(directory, shard.index), manifest_record(shard), sealed=True)
    if is_committed(directory):  # else it is still being made
        whole = replace(read_batch_manifest(directory), shards=shards)
        write_json_atomic(directory / BATCH_MANIFEST, manifest_record(whole), sealed=True)


def _check_parts(directory: Path, parts: Sequence[ShardManifest], expected: int) -> None:
    present = [part.index for part in parts]
    if present != list(range(expected)) or not parts:
        missing = sorted(set(range(expected)) - set(present))
        surplus = sorted(set(present) - set(range(expected)))
        what = f"missing {missing}" if missing else f"not expected {surplus}"
        raise StoreError(f"{directory} cannot be committed: {expected} shards expected, {what}")
    for before, after in itertools.pairwise(parts):
        if after.rollout_first <= before.rollout_last:
            raise StoreError(
                f"{directory} cannot be committed: {after.file} starts at rollout {after.rollout_first}, "
                f"but {before.file} ends at {before.rollout_last}"
            )


def _parquet(table: pa.Table) -> memoryview:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=ROW_GROUP_ROWS, compression="zstd")
    return memoryview(sink.getvalue()).cast("B")  # pyarrow's bytes are signed and never compare equal to a file's


def _describe(
    index: int, file: str, data: memoryview, table: pa.Table, seconds: float, extra: Mapping[str, Any]
) -> ShardManifest:
    rewards = table["reward"].drop_null().to_pylist()
    names = [field.name for field in fields(SamplerSettings)]
    sampler = table["sampler"].combine_chunks()
    settings = zip(*(sampler.field(name).to_pylist() for name in names), strict=True)
    tokens = int(table["response_length"].to_numpy().sum())
    has_episodes = "segments" in table.column_names
    if has_episodes:
        own = int(rows_from_table(table).trained.sum())
        turns = sum(segment["by"] == POLICY for row in table["segments"].to_pylist() for segment in row)
        turns += sum(not row for row in table["segments"].to_pylist())  # rollouts without segments have one turn
        tokens, extra = own, {**extra, "outside_tokens": tokens - own, "turns": turns}
    return ShardManifest(
        index=index,
        file=file,
        bytes=data.nbytes,
        sha256=hashlib.sha256(data).hexdigest(),
        rows=table.num_rows,
        tokens=tokens,
        prompt_tokens=int(table["prompt_length"].to_numpy().sum()),
        rollout_first=table["rollout_id"][0].as_py(),
        rollout_last=table["rollout_id"][-1].as_py(),
        version_first=int(table["version_first"].to_numpy().min()),
        version_last=int(table["version_last"].to_numpy().max()),
        reward_sum=math.fsum(rewards),
        reward_count=len(rewards),
        truncated=table["finish_reason"].to_pylist().count(FinishReason.LENGTH.value),
        verifier_errors=table.num_rows - len(rewards),
        seconds=seconds,
        samplers=tuple(SamplerSettings(*values) for values in dict.fromkeys(settings)),
        extra=extra,
        format=EPISODES if has_episodes else FORMAT,
    )
