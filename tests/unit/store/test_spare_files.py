"""Files of a removed checkpoint are overwritten by the next one, and never while somebody reads them."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from stalewise.store import checkpoints as module
from stalewise.store.atomic import remove_temporaries, temporary_name
from stalewise.store.checkpoints import SpareFiles, is_unused, prune, versions, write_checkpoint

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells who reads a file")
NAME = "model.safetensors"


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever file system the tests are on: it is this machine's."""
    monkeypatch.setattr(module, "_is_local", lambda directory: True)


def spare_directory(root: Path, content: bytes = b"old weights") -> Path:
    directory = temporary_name(root / "v000001")
    directory.mkdir()
    (directory / NAME).write_bytes(content)
    (directory / "config.json").write_text("{}")
    return directory


def new_directory(root: Path) -> Path:
    directory = root / "new"
    directory.mkdir()
    return directory


@pytest.mark.usefixtures("local")
def test_a_file_moves_to_the_next_checkpoint_and_the_rest_goes(tmp_path: Path) -> None:
    old, new, spare = spare_directory(tmp_path), new_directory(tmp_path), SpareFiles()
    inode = (old / NAME).stat().st_ino
    assert spare.offer(old) and spare
    spare.move_to(new, [NAME, "missing.safetensors"])
    assert not spare and [path.name for path in new.iterdir()] == [NAME]
    assert (new / NAME).stat().st_ino == inode
    assert not old.exists()
    spare.move_to(new, [NAME])  # nothing is left to be moved


@contextmanager
def opened(path: Path) -> Iterator[object]:
    with open(path, "rb") as file:
        yield file


@contextmanager
def mapped(path: Path) -> Iterator[object]:
    with open(path, "rb") as file:
        content = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    yield content
    content.close()


@contextmanager
def read_by_another_process(path: Path) -> Iterator[object]:
    script = f"file = open({str(path)!r}, 'rb'); print('open', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:
        assert reader.stdin is not None and reader.stdout is not None
        assert reader.stdout.readline() == b"open\n"
        yield reader
        reader.stdin.close()


@contextmanager
def linked(path: Path) -> Iterator[object]:
    copy = path.parent.parent / "a copy that shares its blocks"
    os.link(path, copy)
    yield copy
    copy.unlink()


@pytest.mark.usefixtures("local")
@pytest.mark.parametrize("used", [opened, mapped, read_by_another_process, linked])
def test_a_file_that_somebody_uses_is_not_overwritten(
    tmp_path: Path, used: Callable[[Path], AbstractContextManager[object]]
) -> None:
    old, new, spare = spare_directory(tmp_path), new_directory(tmp_path), SpareFiles()
    with used(old / NAME):
        assert not is_unused(old / NAME)
        assert not spare.offer(old) and old.is_dir()  # the caller removes it
    assert spare.offer(old)
    with used(old / NAME):
        spare.move_to(new, [NAME])
        assert list(new.iterdir()) == []
    assert not old.exists()


@pytest.mark.usefixtures("local")
def test_a_link_or_a_directory_is_not_overwritten(tmp_path: Path) -> None:
    target = tmp_path / "weights of somebody else"
    target.write_bytes(b"precious")
    old = temporary_name(tmp_path / "v000001")
    old.mkdir()
    (old / NAME).symlink_to(target)
    assert not SpareFiles().offer(old)
    assert not is_unused(tmp_path) and not is_unused(tmp_path / "missing") and is_unused(target)


def mounts_of(kinds: Sequence[str], directory: Path) -> str:
    """As the kernel lists mounts: that of the directory as each of these kinds, between others."""
    device = directory.stat().st_dev
    numbers = ["0:999999", *[f"{os.major(device)}:{os.minor(device)}"] * len(kinds), "0:999998"]
    listed = zip(numbers, ["nfs4", *kinds, "ext4"], strict=True)
    return "".join(f"27 1 {number} / {directory} rw shared:1 - {kind} /dev/x rw\n" for number, kind in listed)


@pytest.mark.parametrize(
    ("kinds", "is_kept"),
    [(["ext4"], True), (["xfs", "xfs"], True), (["nfs4"], False), (["overlay"], False), (["fuse.sshfs"], False)],
)
def test_a_file_system_that_does_not_know_its_readers_keeps_nothing(
    kinds: list[str], is_kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts, old, spare = tmp_path / "mountinfo", spare_directory(tmp_path), SpareFiles()
    mounts.write_text(mounts_of(kinds, tmp_path))  # one on top of another has the same place, and another device
    monkeypatch.setattr(module, "MOUNTS", mounts)
    assert spare.offer(old) == bool(spare) == is_kept


@pytest.mark.parametrize("listed", ["", "22 27 0:999999 / /proc rw - proc proc rw\n", None])
def test_where_no_mount_is_known_a_checkpoint_is_removed(
    listed: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts, spare = tmp_path / "mountinfo", SpareFiles()
    if listed is not None:
        mounts.write_text(listed)  # in another root directory (chroot) that is no mount
    monkeypatch.setattr(module, "MOUNTS", mounts)
    for version in (1, 2):
        write_checkpoint(tmp_path, version, save=lambda place: (place / NAME).write_bytes(_empty()), state={})
    assert prune(tmp_path, keep=1, spare=spare) == [1] and not spare
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["v000002"]


@pytest.mark.usefixtures("local")
def test_files_behind_a_link_to_a_directory_are_not_overwritten(tmp_path: Path) -> None:
    theirs, old = tmp_path / "another run's v000010", temporary_name(tmp_path / "v000001")
    theirs.mkdir()
    (theirs / NAME).write_bytes(b"precious")
    old.symlink_to(theirs)
    assert not SpareFiles().offer(old)
    old.unlink()
    inner = spare_directory(tmp_path)
    (inner / "adapter").symlink_to(theirs)
    assert not SpareFiles().offer(inner)


@pytest.mark.usefixtures("local")
def test_who_has_the_directory_open_never_reads_what_overwrites_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new, spare, rename, read = spare_directory(tmp_path), new_directory(tmp_path), SpareFiles(), os.rename, []
    assert spare.offer(old)
    directory = os.open(old, os.O_RDONLY)

    def rename_late(source: Path, target: Path) -> None:
        read.append(os.open(NAME, os.O_RDONLY, dir_fd=directory))  # at the last moment
        rename(source, target)

    monkeypatch.setattr(module.os, "rename", rename_late)
    spare.move_to(new, [NAME])
    assert list(new.iterdir()) == [] and os.read(read[0], 100) == b"old weights"
    for descriptor in (directory, *read):
        os.close(descriptor)


@pytest.mark.usefixtures("local")
def test_a_file_that_cannot_be_moved_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new, spare = spare_directory(tmp_path), new_directory(tmp_path), SpareFiles()
    assert spare.offer(old)

    def rename(source: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module.os, "rename", rename)
    spare.move_to(new, [NAME])
    assert list(new.iterdir()) == [] and not old.exists() and not spare


@pytest.mark.usefixtures("local")
def test_one_directory_is_kept_and_a_killed_run_leaves_none(tmp_path: Path) -> None:
    spare, first = SpareFiles(), spare_directory(tmp_path)
    assert spare.offer(first)
    second = spare_directory(tmp_path)
    assert spare.offer(second)
    assert not first.exists() and second.is_dir()
    assert remove_temporaries(tmp_path) == 1 and not second.exists()
    spare.move_to(new_directory(tmp_path), [NAME])
    third = spare_directory(tmp_path)
    assert spare.offer(third)
    spare.remove()
    assert not spare and not third.exists()


@pytest.mark.usefixtures("local")
def test_a_checkpoint_without_weights_of_ours_is_removed(tmp_path: Path) -> None:
    old = spare_directory(tmp_path)
    (old / NAME).unlink()
    assert not SpareFiles().offer(old)


@pytest.mark.usefixtures("local")
def test_a_pruned_checkpoint_is_kept_under_a_temporary_name(tmp_path: Path) -> None:
    spare = SpareFiles()
    for version in (1, 2):
        write_checkpoint(tmp_path, version, save=lambda place: (place / NAME).write_bytes(_empty()), state={})
    inode = (tmp_path / "checkpoints/v000001" / NAME).stat().st_ino
    assert prune(tmp_path, keep=1, spare=spare) == [1]
    assert versions(tmp_path) == [2] and spare

    def save(place: Path) -> None:
        spare.move_to(place, [NAME])
        assert (place / NAME).stat().st_ino == inode

    write_checkpoint(tmp_path, 3, save=save, state={})
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["v000002", "v000003"]
    shutil.rmtree(tmp_path / "checkpoints")


def _empty() -> bytes:
    """A safetensors file without tensors."""
    return (8).to_bytes(8, "little") + b"{}      "
