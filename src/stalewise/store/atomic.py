"""The commit protocol: what is on disk is either whole or not there.

Every file is written under a temporary name in its own directory, flushed to the disk, and renamed; then the directory
is flushed, so that the rename itself survives a power cut. A reader never sees half a file, and a crash at any point
leaves the previous content. Line-by-line records (JSONL) are appended with one write each; there a crash can leave one
torn last line, which readers drop and report.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import secrets
import shutil
import socket
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from stalewise.errors import StoreError

log = logging.getLogger(__name__)

# EFBIG and EDQUOT are a full disk in other words: a file-size limit and a quota.
_DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_TEMPORARY = ".tmp-"


# ---------------------------------------------------------------- whole files


def write_atomic(path: str | Path, content: bytes | bytearray | memoryview | str) -> None:
    """Put `content` at `path` so that a crash leaves either what was there before or all of it. Makes directories."""
    path = Path(path)
    data = content.encode() if isinstance(content, str) else content
    temporary = temporary_name(path)
    try:
        with explain_write_errors(path, memoryview(data).nbytes):
            make_directory(path.parent)
            with open(temporary, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            fsync_directory(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):  # it may never have been made; the first error is the one to tell
            temporary.unlink()
        raise


def write_json_atomic(path: str | Path, record: Mapping[str, Any]) -> None:
    """Write one JSON object, indented for people, by the commit protocol.

    NaN and infinities are written as Python, pandas and DuckDB read them (`NaN`, `Infinity`): turning them into null
    would make "unknown" out of "diverged".
    """
    write_atomic(path, json.dumps(record, indent=2, default=_plain) + "\n")


def read_json(path: str | Path) -> dict[str, Any]:
    """Read one JSON object; a missing or corrupt file is a StoreError that names it."""
    try:
        record = json.loads(Path(path).read_bytes())
    except FileNotFoundError:
        raise StoreError(f"{path} is missing: what it would describe was never committed") from None
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}; it should be a file you may read") from error
    except (ValueError, RecursionError) as error:  # ValueError: JSONDecodeError and UnicodeDecodeError
        raise StoreError(f"{path} is corrupt: {error}; restore it from a copy or move it away") from error
    if not isinstance(record, dict):
        raise StoreError(f"{path} is corrupt: it should hold a JSON object, not a {type(record).__name__}")
    return record


def sha256_file(path: str | Path) -> str:
    """Hexadecimal SHA-256 of a file, read in pieces."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---------------------------------------------------------------- lines


def append_line(path: str | Path, record: Mapping[str, Any]) -> None:
    """Append one record to a JSONL file: one write, then fsync. The newline is what commits it.

    A torn tail that an earlier crash left is cut off first, or it would turn into a corrupt line in the middle.
    """
    path = Path(path)
    line = (json.dumps(record, default=_plain) + "\n").encode()
    with explain_write_errors(path, len(line)):
        is_new = not path.exists()
        make_directory(path.parent)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            end = _end_of_last_line(descriptor)
            try:
                rest = line
                while rest:  # one write, unless the disk fills up within the line: then the second one says so
                    rest = rest[os.write(descriptor, rest) :]
                os.fsync(descriptor)
            except OSError:
                os.ftruncate(descriptor, end)
                raise
        finally:
            os.close(descriptor)
        if is_new:
            fsync_directory(path.parent)


def read_jsonl(path: str | Path, on_torn: Callable[[str], object] = log.warning) -> list[dict[str, Any]]:
    """Read the records of a JSONL file; no file means no records.

    The last line may be torn by a crash in the middle of an append: it is left out and `on_torn` is told. A corrupt
    line anywhere else is damage, and a StoreError that names the line.
    """
    return [record for _, record in _read_lines(Path(path), on_torn)[0]]


def truncate_jsonl(path: str | Path, keep: Callable[[dict[str, Any]], bool]) -> int:
    """Drop the records for which `keep` is false, and a torn tail, in one atomic rewrite; say how many were dropped.

    On resume this removes what was recorded after the last checkpoint and is going to happen again.
    """
    path = Path(path)
    lines, torn = _read_lines(path, log.info)
    kept = [line for line, record in lines if keep(record)]
    if torn or len(kept) < len(lines):
        write_atomic(path, b"".join(kept))
    return len(lines) - len(kept)


def _read_lines(path: Path, on_torn: Callable[[str], object]) -> tuple[list[tuple[bytes, dict[str, Any]]], bool]:
    try:
        *lines, tail = path.read_bytes().split(b"\n")  # not splitlines: that would cut at a stray \r as well
    except FileNotFoundError:
        return [], False
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}") from error
    lines = [line + b"\n" for line in lines] + ([tail] if tail else [])
    records: list[tuple[bytes, dict[str, Any]]] = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            # Without its newline a line was not committed, even where the cut left valid JSON: `12` of `123`.
            problem = "" if line.endswith(b"\n") and isinstance(record, dict) else "not a whole JSON object"
        except (ValueError, RecursionError) as error:
            record, problem = {}, str(error)
        if problem and number < len(lines):
            raise StoreError(f"{path}, line {number} is corrupt: {problem}; restore the file from a copy")
        if problem:
            on_torn(f"{path}: the last line ({number}) is torn, as by a crash while it was written: left out")
            return records, True
        records.append((line, record))
    return records, False


def _end_of_last_line(descriptor: int) -> int:
    """Cut a torn tail off an open file; return where the next line starts."""
    size = end = os.fstat(descriptor).st_size
    block = 4096
    while end > 0:
        start = max(0, end - block)
        newline = os.pread(descriptor, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end < size:
        os.ftruncate(descriptor, end)
    return end


def _plain(value: Any) -> Any:
    """What JSON writes for a numpy number or array, or a path."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


# ---------------------------------------------------------------- directories


def make_directory(path: str | Path) -> None:
    """`mkdir -p` whose new entries survive a power cut."""
    path = Path(path)
    if path.is_dir():
        return
    make_directory(path.parent)
    path.mkdir(exist_ok=True)
    fsync_directory(path.parent)


def fsync_directory(path: str | Path) -> None:
    """Flush a directory's entries (creations, renames) to the disk; a file's content likewise."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def temporary_name(path: str | Path) -> Path:
    """Name a not-yet-committed file or directory beside `path`; `remove_temporaries` knows such names."""
    path = Path(path)
    return path.with_name(f".{path.name}{_TEMPORARY}{secrets.token_hex(6)}")


def remove_temporaries(directory: str | Path, spare: Callable[[Path], bool] = lambda path: False) -> int:
    """Delete what interrupted writers left under `directory`; say how many. `spare` knows what others still write."""
    leftovers = [path for path in Path(directory).rglob(f".*{_TEMPORARY}*") if not spare(path)]
    for leftover in leftovers:
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)
    return len(leftovers)


def commit_directory(temporary: str | Path, final: str | Path) -> None:
    """Flush every file under `temporary` and rename the whole directory to `final`, which must not exist yet.

    Both have to lie in the same file system; `temporary_name(final)` makes a good name. Where the disk is full the
    temporary directory is removed.
    """
    temporary, final = Path(temporary), Path(final)
    if final.exists():
        raise StoreError(f"{final} exists already and is never overwritten: move it away first")
    size = sum(file.stat().st_size for file in temporary.rglob("*") if file.is_file())
    try:
        with explain_write_errors(final, size):
            paths = [temporary, *temporary.rglob("*")]
            with ThreadPoolExecutor() as threads:  # a disk takes several large files faster side by side
                list(threads.map(fsync_directory, paths))
            make_directory(final.parent)
            os.rename(temporary, final)
            fsync_directory(final.parent)
    except StoreError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno in _DISK_FULL:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


@contextlib.contextmanager
def explain_write_errors(path: str | Path, size: int) -> Iterator[None]:
    """Turn an OSError of the block into a StoreError that says what could not be written and what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in _DISK_FULL:
            message = f"disk full while writing {path}: free {size:,} bytes; run the same command again"
            raise StoreError(message) from error
        raise StoreError(f"cannot write {path}: {error.strerror or error}") from error


# ---------------------------------------------------------------- one process at a time

_held_locks: weakref.WeakSet[RunLock] = weakref.WeakSet()


class RunLock:
    """Exclusive use of a run directory: `with RunLock(directory): ...`.

    The kernel holds the lock (flock) and drops it when the process ends, however it ends; the file `run.lock` only says
    who has it. Nothing is ever stale, so there is no option to break a lock.
    """

    FILE = "run.lock"

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.path = self.directory / self.FILE
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Take the lock, or raise a StoreError that names the process which has it."""
        if self._descriptor is not None:
            raise StoreError(f"{self.directory} is locked already by this very RunLock")
        with explain_write_errors(self.path, 4096):
            make_directory(self.directory)
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            with explain_write_errors(self.path, 4096):
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise StoreError(self._busy_message(descriptor)) from None
                since = datetime.now(UTC).isoformat(timespec="seconds")
                holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": since}
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, (json.dumps(holder) + "\n").encode(), 0)
                os.fsync(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        _held_locks.add(self)

    def release(self) -> None:
        """Give the lock back; the file stays, since deleting it would let two processes lock two files."""
        if self._descriptor is not None:
            os.ftruncate(self._descriptor, 0)
            self._forget()

    def _forget(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _busy_message(self, descriptor: int) -> str:
        for _ in range(20):  # its holder writes who it is a moment after it got the lock
            with contextlib.suppress(ValueError, KeyError, TypeError):
                holder = json.loads(os.pread(descriptor, 4096, 0))
                who = f"process {holder['pid']} on {holder['host']} since {holder['since']}"
                break
            time.sleep(0.02)
        else:
            who = "another process"
        return f"{self.directory} is in use by {who}: wait until it ends or stop it, then run the same command again"

    def __enter__(self) -> RunLock:
        self.acquire()
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


def _leave_locks_to_the_parent() -> None:
    # A forked worker inherits the descriptor, and with it the lock: it would outlive a parent that was killed.
    for lock in list(_held_locks):
        lock._forget()


os.register_at_fork(after_in_child=_leave_locks_to_the_parent)


# First come, first served between processes and machines: a file that is put where none is, or not at all.

# File systems without hard links (some FUSE and FAT ones) say it in one of these ways.
_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
TRIES = 100


def create_atomic(path: str | Path, content: bytes | memoryview | str, *, durable: bool = True) -> bool:
    """Put `content` at `path` where nothing is there yet; False, and nothing is changed, where something is.

    Of several processes exactly one gets True, and readers see the whole content or none: a hard link to a file that is
    complete, which is atomic on network file systems, too. Without `durable` a power cut may undo it. A file system
    without hard links is asked first and renamed upon, which two processes can do in the same instant.
    """
    path = Path(path)
    data = content.encode() if isinstance(content, str) else content
    with explain_write_errors(path, memoryview(data).nbytes):
        done = _try_again(path, data, durable)
        if done and durable:
            fsync_directory(path.parent)
        return done


def _try_again(path: Path, data: bytes | memoryview, durable: bool) -> bool:
    """Try until nobody removes the temporary file or its folder meanwhile: others clean up when a batch is done."""
    for _ in range(TRIES - 1):
        with contextlib.suppress(FileNotFoundError):
            make_directory(path.parent)
            return _try(path, data, durable)
    return _try(path, data, durable)


def _try(path: Path, data: bytes | memoryview, durable: bool) -> bool:
    temporary = temporary_name(path)
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        return _link(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _link(temporary: Path, path: Path) -> bool:
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if path.exists():
            return False
        os.replace(temporary, path)
    return True
