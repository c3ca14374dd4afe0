"""Policies and shards between a run directory and an object store; more in tests/unit/store/test_object_store.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from stalewise.config import RunConfig
from stalewise.errors import StoreError
from stalewise.rollout.workers.sync import PolicySync, policy_digest, policy_folder
from stalewise.store import atomic, batch_directories, committed_shards
from stalewise.store.checkpoints import checkpoint_directory, write_checkpoint
from stalewise.store.object_store import DirectoryStore


def test_a_policy_comes_without_what_only_a_trainer_needs(tiny_run: RunConfig, tmp_path: Path) -> None:
    sync, checkpoint = PolicySync(DirectoryStore(tmp_path / "there")), checkpoint_directory(tiny_run.directory, 4)
    sync.publish_checkpoints(tiny_run.directory)
    assert sync.published()[4] == policy_folder(4, policy_digest(checkpoint))
    fetched = sync.fetch_policy(4, policy_digest(checkpoint), tmp_path / "cache")
    assert (fetched / "model.safetensors").read_bytes() == (checkpoint / "model.safetensors").read_bytes()
    assert list(checkpoint.glob("optimizer*")) and not list(fetched.glob("optimizer*"))


@pytest.mark.parametrize("written", ["stalewise.checkpoint/1", "stalewise.checkpoint/2"])
def test_a_policy_in_large_files_comes_as_its_format_says(
    written: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    monkeypatch.setattr(atomic, "PIECE", 32 if written.endswith("2") else 1 << 26)
    checkpoint = write_checkpoint(
        run, 1, save=lambda path: save_file({"w": np.ones(64)}, path / "model.safetensors"), state={}
    )
    manifest = atomic.read_json(checkpoint / "manifest.json")
    atomic.write_json_atomic(checkpoint / "manifest.json", {**manifest, "format": written}, sealed=True)
    monkeypatch.setattr(atomic, "PIECE", 32)
    sync = PolicySync(DirectoryStore(tmp_path / "there"))
    sync.publish_checkpoints(run)
    fetched = sync.fetch_policy(1, policy_digest(checkpoint), tmp_path / "cache")
    assert (fetched / "model.safetensors").read_bytes() == (checkpoint / "model.safetensors").read_bytes()


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
