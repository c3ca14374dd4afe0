"""Checkpoints: Hugging Face directories with the trainer's state beside the policy, manifest last.

`checkpoints/v000064/` holds the policy after 64 updates. It is written under a temporary name and renamed as a whole,
so it is either complete or absent.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

from safetensors import safe_open

from stalewise.errors import StoreError
from stalewise.store.atomic import (
    check_format,
    commit_directory,
    explain_write_errors,
    fsync_directory,
    make_directory,
    sha256_file,
    sha256_of_pieces,
    temporary_name,
    write_json_atomic,
)
from stalewise.store.records import RecordSchema, dict_of, is_real, is_table, is_text, is_whole, read_record

FORMAT = "stalewise.checkpoint/2"
SHA256 = {FORMAT: sha256_of_pieces, "stalewise.checkpoint/1": sha256_file}  # the checksum of a file, by format
LOCAL = frozenset({"ext4", "xfs"})  # file systems on which the kernel knows every reader of a file
MOUNTS = Path("/proc/self/mountinfo")
_NAME = re.compile(r"v(\d{6,})")
MANIFEST = RecordSchema(
    {"format": is_text, "files": dict_of(lambda file: is_table(file) and is_text(file.get("sha256")))}
)
STATE = RecordSchema({"version": is_whole}, optional={"steps": is_whole, "drift": is_real, "spent": is_table})


def checkpoint_directory(run: str | Path, version: int) -> Path:
    """The directory of a version's checkpoint."""
    return Path(run) / "checkpoints" / f"v{version:06d}"


def versions(run: str | Path) -> list[int]:
    """Committed versions, oldest first."""
    root = Path(run) / "checkpoints"
    entries = root.iterdir() if root.is_dir() else ()
    names = (_NAME.fullmatch(entry.name) for entry in entries if (entry / "manifest.json").is_file())
    return sorted(int(match[1]) for match in names if match)


def write_checkpoint(
    run: str | Path,
    version: int,
    *,
    save: Callable[[Path], object],
    state: Mapping[str, Any],
    notes: dict[str, Any] | None = None,
    size: int = 0,
) -> Path:
    """Let `save` fill a directory, add `state` and the manifest, and commit it.

    `save` may return the SHA-256 of files that it knows, in the form of `sha256_of_pieces`. `size` is the number of
    bytes that it will write, for the message about a full disk. `notes` receives the bytes written and the seconds of
    writing, of checksums with flushing, and of the commit.
    """
    final = checkpoint_directory(run, version)
    temporary = temporary_name(final)
    with explain_write_errors(temporary, size):
        make_directory(temporary)
    marks = [time.perf_counter()]
    try:
        with explain_write_errors(final, size):
            known = save(temporary)
            _write_index(temporary)
            write_json_atomic(temporary / "state.json", {"version": version, **state}, sealed=True)
            marks.append(time.perf_counter())
            files = _describe_files(temporary, known if isinstance(known, Mapping) else {})
        manifest = {"format": FORMAT, "version": version, "files": files}
        write_json_atomic(temporary / "manifest.json", manifest, sealed=True)
        marks.append(time.perf_counter())
        commit_directory(temporary, final)
        marks.append(time.perf_counter())
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if notes is not None:
        notes["bytes"] = sum(file["bytes"] for file in files.values())
        for name, (start, end) in zip(("writing_s", "checksums_s", "committing_s"), pairwise(marks), strict=True):
            notes[name] = round(end - start, 3)
    return final


def _describe_files(directory: Path, known: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Flush all files to the disk; return the bytes and SHA-256 of each."""
    paths = {path.relative_to(directory).as_posix(): path for path in sorted(directory.rglob("*")) if path.is_file()}
    if gone := sorted(known.keys() - paths.keys()):
        raise StoreError(f"{directory / gone[0]} disappeared after it was written: is another process working there?")
    with ThreadPoolExecutor() as threads:
        flushed = [threads.submit(fsync_directory, path) for path in paths.values()]
        new = [name for name in paths if name not in known]
        digests = {**known, **dict(zip(new, _digests([paths[name] for name in new]), strict=True))}
        for future in flushed:
            future.result()
    return {name: {"bytes": path.stat().st_size, "sha256": digests[name]} for name, path in paths.items()}


def _digests(paths: list[Path], sha256: Callable[[Path], str] = SHA256[FORMAT]) -> list[str]:
    """SHA-256 of each file, in parallel; empty for a missing one."""
    with ThreadPoolExecutor() as threads:
        return list(threads.map(lambda path: sha256(path) if path.is_file() else "", paths))


def _write_index(directory: Path) -> None:
    """Write an index that names the policy's file: vLLM would also load the trainer's *.safetensors as weights."""
    weights, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if weights.is_file() and not index.exists():
        with safe_open(weights, framework="numpy") as file:
            weight_map = dict.fromkeys(sorted(file.keys()), weights.name)
        write_json_atomic(index, {"metadata": {"total_size": weights.stat().st_size}, "weight_map": weight_map})


def read_state(directory: str | Path) -> dict[str, Any]:
    """The trainer's state in a committed checkpoint, after its files were checked against the manifest."""
    directory = Path(directory)
    if damaged := damaged_files(directory):
        raise StoreError(
            f"{damaged[0]} is damaged or missing; move {directory} away and run the same command again: "
            "it resumes from the checkpoint before"
        )
    return read_record(directory / "state.json", STATE)


def pick_version(run: str | Path, version: int | None, purpose: str) -> int:
    """This version of a run, or its newest; a StoreError if there is no such checkpoint. `purpose` is a verb."""
    existing = versions(run)
    if not existing:
        raise StoreError(f"{run} has no checkpoint yet: there is nothing to {purpose}")
    if version is not None and (isinstance(version, bool) or not isinstance(version, int)):
        raise StoreError(f"version {version!r} is not a whole number; {run} has {', '.join(map(str, existing))}")
    if version is not None and version not in existing:
        raise StoreError(f"{run} has no checkpoint of version {version}; it has {', '.join(map(str, existing))}")
    return existing[-1] if version is None else version


def read_manifest(directory: str | Path) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of the files of a checkpoint, by name."""
    return _read_manifest(directory)["files"]


def _read_manifest(directory: str | Path) -> dict[str, Any]:
    path = Path(directory) / "manifest.json"
    manifest = read_record(path, MANIFEST)
    check_format(directory, manifest["format"], *sorted(SHA256))
    if bad := [name for name in manifest["files"] if name.startswith("/") or ".." in Path(name).parts]:
        raise StoreError(f"{path} names {bad[0]}, which is outside of the checkpoint: restore it from a copy")
    return manifest


def damaged_files(directory: str | Path) -> list[Path]:
    """Files of a checkpoint that are missing or differ from its manifest."""
    manifest = _read_manifest(directory)
    files = manifest["files"]
    paths = [Path(directory) / name for name in files]
    pairs = zip(paths, _digests(paths, SHA256[manifest["format"]]), files.values(), strict=True)
    return [
        path
        for path, digest, expected in pairs
        if digest != expected["sha256"] or path.stat().st_size != expected.get("bytes", path.stat().st_size)
    ]


def prune(
    run: str | Path,
    *,
    keep: int,
    needed: Iterable[int] = (),
    newest: int | None = None,
    spare: SpareFiles | None = None,
) -> list[int]:
    """Remove all but the `keep` newest checkpoints and the `needed` ones; return the removed versions.

    Versions after `newest` are ignored and stay: they may be committed at any moment. `spare` may take the files of a
    removed checkpoint, for the next checkpoint to overwrite.
    """
    found = [version for version in versions(run) if newest is None or version <= newest]
    kept = {*found[-keep:], *needed}
    gone = [version for version in found if version not in kept]
    _remove(run, gone, spare)
    return gone


def remove_after(run: str | Path, version: int) -> None:
    """Remove the checkpoints of later versions, the latest first, so that the run can be resumed at any moment."""
    _remove(run, [later for later in reversed(versions(run)) if later > version])


def _remove(run: str | Path, gone: Iterable[int], spare: SpareFiles | None = None) -> None:
    for version in gone:
        directory = checkpoint_directory(run, version)
        # Renamed first: a crash during the removal must not leave half a checkpoint under its name.
        doomed = temporary_name(directory)
        try:
            directory.rename(doomed)
            if spare is None or not spare.offer(doomed):
                shutil.rmtree(doomed)
        except OSError as error:
            why = f"cannot remove {error.filename or directory}: {error.strerror or error}"
            raise StoreError(f"{why}; see to it that it can be removed, then run the same command again") from error


class SpareFiles:
    """Files of a checkpoint that is no longer needed, for the next checkpoint to overwrite. Thread-safe.

    On a file system mounted with `discard`, freeing a checkpoint takes as long as writing it, and new blocks take
    longer to write than old ones: a run with frequent checkpoints would wait for its disk.

    Files that are being read are never overwritten: a policy may be mapped into memory, by this or another process. The
    kernel tells, by granting a lease only to the sole user of a file. Where it cannot, on network file systems and
    outside of Linux, checkpoints are removed. It knows about clients of NFS version 4, but not of version 3.
    """

    def __init__(self) -> None:
        self._directory: Path | None = None
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        return self._directory is not None

    def offer(self, directory: Path) -> bool:
        """Keep a directory that was just renamed to a temporary name; False: it is to be removed."""
        paths = [directory, *directory.rglob("*")]
        large = [path for path in paths if path.suffix == ".safetensors"]
        if any(path.is_symlink() for path in paths):  # the files behind a link belong to somebody else
            return False
        if not large or not _is_local(directory) or not all(map(is_unused, large)):
            return False
        fsync_directory(directory.parent)  # no power failure may bring its name back once it is overwritten
        self._replace(directory)
        return True

    def move_to(self, directory: Path, names: Iterable[str]) -> None:
        """Move those of these files that exist and are unused to `directory`; remove all others."""
        with self._lock:
            spare, self._directory = self._directory, None
        if spare is None:
            return
        try:
            for name in names:
                with contextlib.suppress(OSError):  # it is not there, or cannot be moved: it is written anew
                    os.rename(spare / name, directory / name)
                # Checked under the new name: a process that has the old directory open could open the file there.
                if not is_unused(directory / name):
                    (directory / name).unlink(missing_ok=True)
        finally:
            shutil.rmtree(spare, ignore_errors=True)

    def remove(self) -> None:
        """Free the space."""
        self._replace(None)

    def _replace(self, directory: Path | None) -> None:
        with self._lock:
            before, self._directory = self._directory, directory
        if before is not None:
            shutil.rmtree(before, ignore_errors=True)  # it has a temporary name: the next start removes what is left


def _is_local(directory: Path) -> bool:
    """Whether the kernel of this machine knows every process that reads files there."""
    device = directory.stat().st_dev
    try:  # by its device: mounts may hide each other, and a process in another root directory sees few of them
        mounts = [line.partition(b" - ") for line in MOUNTS.read_bytes().splitlines()]
    except OSError:  # not Linux
        return False
    number = f"{os.major(device)}:{os.minor(device)}".encode()
    kinds = {kind.split()[0].decode() for mount, _, kind in mounts if mount.split()[2] == number}
    return bool(kinds) and kinds <= LOCAL


def is_unused(path: Path) -> bool:
    """Whether this is an ordinary file with one name that no process, this one included, has open or mapped."""
    try:
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)  # a lease of another process is no wait
    except OSError:
        return False
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
            return False
        # Should somebody open it now, the kernel sends a signal; the usual one would end this process.
        fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        return False
    finally:
        os.close(file)
    return True
