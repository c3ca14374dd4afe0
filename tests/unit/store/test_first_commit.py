"""Of several processes that write one shard or object, the first to commit it wins."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from stalewise.errors import StoreError
from stalewise.store import (
    AlreadyCommitted,
    ShardManifest,
    committed_shards,
    shard_path,
    write_shard,
)
from stalewise.store.atomic import create_atomic
from stalewise.store.object_store import DirectoryStore
from stored_rollouts import make_rollouts

BATCH = "g000000-v000000"


def _fields(one: Any) -> dict[str, Any]:
    return {name: getattr(one, name) for name in one.__dataclass_fields__}


def test_a_shard_that_somebody_put_there_first_is_described_and_not_replaced(tmp_path: Path) -> None:
    directory = tmp_path / BATCH
    asked = make_rollouts(0, 8)
    theirs = [type(one)(**{**_fields(one), "reward": 0.25}) for one in asked]  # as another machine rounds it
    write_shard(directory, 0, theirs)
    (directory / "shard-00000.json").unlink()  # killed between the file and its manifest
    before = shard_path(directory, 0).read_bytes()
    manifest = write_shard(directory, 0, asked)
    assert shard_path(directory, 0).read_bytes() == before
    assert manifest.reward_sum == 2.0 and committed_shards(directory) == [manifest]
    (directory / "shard-00000.json").unlink()
    assert write_shard(directory, 0, make_rollouts(8, 8)).rollout_first == 8  # something else: it is replaced
    (directory / "shard-00000.json").unlink()
    shard_path(directory, 0).write_bytes(b"half")
    assert write_shard(directory, 0, asked).rows == 8


def test_a_shard_that_is_committed_while_we_look_stays_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, exists = tmp_path / BATCH, Path.exists
    committed: list[ShardManifest] = []

    def commit_after_the_first_look(path: Path) -> bool:
        found = exists(path)
        if not committed:
            monkeypatch.setattr(Path, "exists", exists)
            committed.append(write_shard(directory, 0, make_rollouts(0, 8), extra={"worker": "first"}))
        return found

    monkeypatch.setattr(Path, "exists", commit_after_the_first_look)
    with pytest.raises(AlreadyCommitted):
        write_shard(directory, 0, make_rollouts(0, 8), extra={"worker": "second"})
    assert committed_shards(directory) == committed


def test_a_folder_that_others_clean_up_meanwhile_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    object_store = DirectoryStore(tmp_path)
    link, gone = os.link, []

    def clean_up_first(*names: Any) -> None:
        if not gone:
            gone.append(names)
            object_store.remove("work/claims/order")
        link(*names)

    monkeypatch.setattr(os, "link", clean_up_first)
    assert object_store.create("work/claims/order/shard-00000-0", b"a") and gone
    assert object_store.names("work/claims/order") == ["shard-00000-0"]
    monkeypatch.setattr(Path, "is_dir", lambda path: False)  # it was made a moment after somebody looked
    object_store.remove("work/claims/order")
    assert object_store.names("work/claims") == []


@pytest.mark.parametrize("links", [True, False])
def test_first_come_first_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.EPERM, "no hard links here")

    if not links:
        monkeypatch.setattr(os, "link", none)
    assert create_atomic(tmp_path / "new" / "x", b"first")
    assert not create_atomic(tmp_path / "new" / "x", b"second")
    assert (tmp_path / "new" / "x").read_bytes() == b"first"
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["x"]
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="is a file: move it"):
        create_atomic(tmp_path / "file" / "x", b"")
