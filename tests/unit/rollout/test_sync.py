"""Policies and shards between a run directory and an object store; more in tests/unit/store/test_object_store.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from stalewise.config import RunConfig
from stalewise.errors import StoreError
from stalewise.rollout.workers.sync import PolicySync, policy_digest, policy_folder
from stalewise.store import batch_directories, committed_shards
from stalewise.store.checkpoints import checkpoint_directory
from stalewise.store.object_store import DirectoryStore


def test_a_policy_comes_without_what_only_a_trainer_needs(tiny_run: RunConfig, tmp_path: Path) -> None:
    sync, checkpoint = PolicySync(DirectoryStore(tmp_path / "there")), checkpoint_directory(tiny_run.directory, 4)
    sync.publish_checkpoints(tiny_run.directory)
    assert sync.published()[4] == policy_folder(4, policy_digest(checkpoint))
    fetched = sync.fetch_policy(4, policy_digest(checkpoint), tmp_path / "cache")
    assert (fetched / "model.safetensors").read_bytes() == (checkpoint / "model.safetensors").read_bytes()
    assert list(checkpoint.glob("optimizer*")) and not list(fetched.glob("optimizer*"))


def test_a_shard_comes_back_byte_by_byte_and_a_damaged_one_is_refused(tiny_run: RunConfig, tmp_path: Path) -> None:
    sync, directory = (
        PolicySync(DirectoryStore(tmp_path / "there")),
        batch_directories(tiny_run.directory / "rollouts")[0],
    )
    assert sync.publish_shard(directory, 0) and sync.shards(directory.name) == {0}
    sync.fetch_shard(tmp_path / directory.name, 0)
    assert committed_shards(tmp_path / directory.name) == committed_shards(directory)[:1]
    (file,) = (tmp_path / "there" / "rollouts" / directory.name).glob("*.parquet")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(StoreError, match="half written or damaged"):
        sync.fetch_shard(tmp_path / "again" / directory.name, 0)
