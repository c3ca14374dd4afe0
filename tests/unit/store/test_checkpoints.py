"""Checkpoints: committed as a whole, checked when read, and pruned."""

from __future__ import annotations

import errno
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from stalewise.errors import StoreError
from stalewise.store import atomic, checkpoints
from stalewise.store.checkpoints import (
    checkpoint_directory,
    prune,
    read_state,
    remove_after,
    versions,
    write_checkpoint,
)


def write(run: Path, version: int) -> Path:
    weights = {"b": np.ones(2, np.float32), "a": np.zeros(3, np.float32)}
    return write_checkpoint(
        run, version, save=lambda path: save_file(weights, path / "model.safetensors"), state={"drift": 0.5}
    )


def test_a_checkpoint_has_its_state_and_an_index_of_its_weights(tmp_path: Path) -> None:
    notes: dict[str, float] = {}
    weights = {"w": np.ones(2, np.float32)}
    directory = write_checkpoint(
        tmp_path, 8, save=lambda path: save_file(weights, path / "model.safetensors"), state={"x": 1}, notes=notes
    )
    assert directory == checkpoint_directory(tmp_path, 8)
    assert read_state(directory) == {"version": 8, "x": 1}
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {"w": "model.safetensors"}
    manifest = json.loads((directory / "manifest.json").read_text())
    assert notes["bytes"] == sum(file["bytes"] for file in manifest["files"].values())
    assert notes.keys() == {"bytes", "writing_s", "checksums_s", "committing_s"}


def test_damage_is_named(tmp_path: Path) -> None:
    directory = write(tmp_path, 1)
    with open(directory / "model.safetensors", "r+b") as file:
        file.seek(-1, 2)
        file.write(b"x")
    with pytest.raises(StoreError, match=r"model\.safetensors is damaged or missing; move .* away"):
        read_state(directory)
    (directory / "model.safetensors").unlink()
    with pytest.raises(StoreError, match=r"model\.safetensors is damaged or missing"):
        read_state(directory)


def test_large_files_are_checked_in_pieces_and_those_of_the_first_format_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic, "PIECE", 32)
    directory = write(tmp_path, 1)
    content = (directory / "model.safetensors").read_bytes()
    path = directory / "manifest.json"
    manifest = atomic.read_json(path)
    pieces = [hashlib.sha256(content[start : start + 32]).digest() for start in range(0, len(content), 32)]
    assert manifest["files"]["model.safetensors"]["sha256"] == hashlib.sha256(b"".join(pieces)).hexdigest()
    assert read_state(directory)["version"] == 1
    manifest["format"] = "stalewise.checkpoint/1"
    atomic.write_json_atomic(path, manifest, sealed=True)
    with pytest.raises(StoreError, match="is damaged or missing"):
        read_state(directory)
    for name, file in manifest["files"].items():
        file["sha256"] = hashlib.sha256((directory / name).read_bytes()).hexdigest()
    atomic.write_json_atomic(path, manifest, sealed=True)
    assert read_state(directory)["version"] == 1
    manifest["format"] = "stalewise.checkpoint/3"
    atomic.write_json_atomic(path, manifest, sealed=True)
    with pytest.raises(StoreError, match=r"has format stalewise\.checkpoint/3; this release reads \S+/1 and \S+/2"):
        read_state(directory)


def test_a_file_that_vanished_is_not_committed(tmp_path: Path) -> None:
    def save(path: Path) -> dict[str, str]:
        (path / "x").write_text("y")
        return {"model.safetensors": "0" * 64}

    with pytest.raises(StoreError, match=r"model\.safetensors disappeared after it was written"):
        write_checkpoint(tmp_path, 1, save=save, state={})
    assert not versions(tmp_path)


def test_the_checksums_of_pieces_in_place_of_the_pieces_are_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic, "PIECE", 64)
    content = bytes(range(128))
    write_checkpoint(tmp_path, 1, save=lambda path: (path / "x").write_bytes(content), state={})
    path = checkpoint_directory(tmp_path, 1) / "x"
    path.write_bytes(b"".join(hashlib.sha256(content[start : start + 64]).digest() for start in (0, 64)))
    with pytest.raises(StoreError, match="x is damaged or missing"):
        read_state(path.parent)


def test_a_save_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail(path: Path) -> None:
        (path / "half").write_text("x")
        raise OSError(28, "No space left on device")

    with pytest.raises(StoreError, match="disk full"):
        write_checkpoint(tmp_path, 3, save=fail, state={})
    assert versions(tmp_path) == [] and list((tmp_path / "checkpoints").iterdir()) == []


def test_a_disk_that_is_full_when_files_are_flushed_is_told_with_the_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(checkpoints, "fsync_directory", full)  # quotas of network file systems come as late as this
    with pytest.raises(StoreError, match=r"^disk full while writing .*v000008: free 7 bytes; run the") as caught:
        write_checkpoint(tmp_path, 8, save=lambda path: (path / "x").write_text("x"), state={}, size=7)
    assert atomic.is_disk_full(caught.value) and list((tmp_path / "checkpoints").iterdir()) == []


def test_prune_keeps_the_newest_and_the_needed(tmp_path: Path) -> None:
    for version in (0, 2, 4, 6, 8):
        write(tmp_path, version)
    assert prune(tmp_path, keep=2, needed=[0]) == [2, 4]
    assert versions(tmp_path) == [0, 6, 8]
    assert prune(tmp_path, keep=1, newest=6) == [0] and versions(tmp_path) == [6, 8]
    write(tmp_path, 0)
    remove_after(tmp_path, 6)
    assert versions(tmp_path) == [0, 6]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["v000000", "v000006"]


def test_prune_spares_a_checkpoint_that_is_committed_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in (2, 4):
        write(tmp_path, version)

    def looked(run: Path) -> list[int]:
        found = versions(run)
        if 6 not in found:
            write(tmp_path, 6)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "versions", looked)
        assert prune(tmp_path, keep=1) == [2]
    assert versions(tmp_path) == [4, 6]


@pytest.mark.parametrize("step", ["rename", "rmtree"])
def test_a_checkpoint_that_cannot_be_removed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    for version in (2, 4):
        write(tmp_path, version)

    def refuse(path: Path, *to: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(*((Path, "rename") if step == "rename" else (checkpoints.shutil, "rmtree")), refuse)
    with pytest.raises(StoreError, match=r"^cannot remove .*v000002.*: Permission denied; see to it that it "):
        prune(tmp_path, keep=1)
    assert 4 in versions(tmp_path)
