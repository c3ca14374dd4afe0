"""The commit protocol: a file on disk is either complete or absent.

Every file is written under a temporary name in its own directory, flushed to the disk, and renamed; then the directory
is flushed, so that the rename survives a power failure. A reader never sees half a file, and a crash at any point
leaves the previous content.

JSON files that a run depends on end with a checksum of their content (`sealed_json`), which `read_json` verifies. Files
of older releases without checksums are read as they are. JSONL files are in `json_lines.py`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import socket
import stat
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from stalewise.errors import StalewiseError, StoreError

log = logging.getLogger(__name__)

Content = bytes | bytearray | memoryview | str

_DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})  # no space, a quota, a file-size limit
# Errors of file systems without hard links (some FUSE and FAT ones).
_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
_TEMPORARY = ".tmp-"
_TEMPORARY_NAME = re.compile(r"\..+\.tmp-[0-9a-f]{12}")
TRIES = 100
PIECE = 1 << 26  # bytes of a large file that one thread hashes; part of the format of checkpoints
CHECKSUM = "checksum"  # the last key of a record: 64 bits, which detect damage but not forgery
RESTORE = "restore it from a copy; `stalewise verify` says what depends on it"
_ANY_SEAL = re.compile(rb',\n  "[^"\n]{0,12}": "[0-9a-f]{16}"\n\}\s*\Z')
_SEALED_JSON = re.compile(rb',\n  "checksum": "([0-9a-f]{16})"\n\}\s*\Z')


# Whole files.


def write_atomic(path: str | Path, content: Content, *, durable: bool = True) -> None:
    """Write a file, and missing directories, so that a crash leaves either the old content or all of the new.

    Without `durable` a power failure may undo it. In a directory with a temporary name, `commit_directory` flushes it.
    """
    path, data = Path(path), content.encode() if isinstance(content, str) else content
    durable = durable and not _is_temporary(path)
    with explain_write_errors(path, memoryview(data).nbytes):
        make_directory(path.parent)
        with _temporary_file(path, data, durable) as temporary:
            os.replace(temporary, path)
        if durable:
            fsync_directory(path.parent)


def create_atomic(path: str | Path, content: Content, *, durable: bool = True) -> bool:
    """Write a file that does not exist yet; return False and change nothing if it does.

    Among several processes exactly one gets True, and readers see all of the content or none: the file is a hard link
    to a complete file, which is atomic on network file systems, too. `durable` is as for `write_atomic`. Without hard
    links, existence is checked before a rename, which two processes may do at the same instant.
    """
    path, data = Path(path), content.encode() if isinstance(content, str) else content
    durable = durable and not _is_temporary(path)
    with explain_write_errors(path, memoryview(data).nbytes):
        created = False
        for attempt in range(TRIES):
            try:
                make_directory(path.parent)
                with _temporary_file(path, data, durable) as temporary:
                    created = _link(temporary, path)
                break
            except FileNotFoundError:  # another process cleaned up after a batch and removed our file or its directory
                if attempt == TRIES - 1:
                    raise
        if created and durable:
            fsync_directory(path.parent)
        return created


@contextlib.contextmanager
def _temporary_file(path: Path, data: bytes | bytearray | memoryview, durable: bool) -> Iterator[Path]:
    temporary = temporary_name(path)
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        yield temporary
    finally:
        with contextlib.suppress(OSError):  # renamed, or never made
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


def write_json_atomic(path: str | Path, record: Mapping[str, Any], *, sealed: bool = False) -> None:
    """Write one JSON object, indented for people; `sealed` adds a checksum of it, which `read_json` compares.

    NaN and infinities are written as Python, pandas and DuckDB read them (`NaN`, `Infinity`): null would turn
    "diverged" into "unknown".
    """
    write_atomic(path, sealed_json(record) if sealed else json.dumps(record, indent=2, default=json_default) + "\n")


def sealed_json(record: Mapping[str, Any]) -> str:
    """A JSON object, indented, whose last key is a checksum of all before it."""
    text = json.dumps({key: value for key, value in record.items() if key != CHECKSUM}, indent=2, default=json_default)
    head = text.removesuffix("\n}")
    return f'{head},\n  "{CHECKSUM}": "{digest(head.encode())}"\n}}\n'


def read_json(path: str | Path) -> dict[str, Any]:
    """Read one JSON object, without its checksum; a missing, corrupt or changed file is a StoreError that names it."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):  # a device or a pipe may have no end
                raise StoreError(f"{path} is not an ordinary file: name one that holds JSON")
            content = file.read()
    except FileNotFoundError:
        raise StoreError(f"{path} is missing: what it would describe was never committed") from None
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}; it should be a file you may read") from error
    return parse_json(content, str(path))


def parse_json(content: bytes, where: str) -> dict[str, Any]:
    """The JSON object in the content of a file, as `read_json` returns it."""
    try:
        record = json.loads(content)
    except (ValueError, RecursionError) as error:  # ValueError: JSONDecodeError and UnicodeDecodeError
        raise StoreError(f"{where} is corrupt: {error}; {RESTORE}") from error
    if not isinstance(record, dict):
        raise StoreError(f"{where} is corrupt: it should hold a JSON object, not a {type(record).__name__}")
    # A checksum under another key is one whose key was damaged.
    is_sealed = record.pop(CHECKSUM, None) is not None or _ANY_SEAL.search(content, max(0, len(content) - 64))
    if is_sealed and not has_seal(content):
        raise StoreError(f"{where} was changed after it was written: its checksum does not fit; {RESTORE}")
    return record


def has_seal(content: bytes) -> bool:
    """Whether a file of one JSON object ends with a checksum, and it fits."""
    seal = _SEALED_JSON.search(content, max(0, len(content) - 64))
    return seal is not None and seal[1] == digest(content[: seal.start()]).encode()


def sha256_file(path: str | Path) -> str:
    """Hexadecimal SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cached_sha256(path: Path) -> str:
    """`sha256_file`, computed once for each state (size and time of change) of a file."""
    state = path.stat()
    return _sha256_of_state(path, state.st_size, state.st_mtime_ns)


@lru_cache(maxsize=65536)
def _sha256_of_state(path: Path, size: int, mtime_ns: int) -> str:
    return sha256_file(path)


def sha256_of_pieces(path: str | Path) -> str:
    """The checksum of a large file, whose pieces are read and hashed in parallel (`joined_sha256`)."""

    def digest_of_piece(start: int) -> bytes:
        sha256 = hashlib.sha256()
        left = PIECE
        with open(path, "rb") as file:
            file.seek(start)
            while left and (content := file.read(min(left, 1 << 20))):
                sha256.update(content)
                left -= len(content)
        return sha256.digest()

    with ThreadPoolExecutor() as threads:
        return joined_sha256(list(threads.map(digest_of_piece, range(0, max(1, os.path.getsize(path)), PIECE))))


def joined_sha256(digests: Sequence[bytes]) -> str:
    """SHA-256 of a file from the digests of its pieces: the digest of a single piece, or the hash of all digests."""
    return digests[0].hex() if len(digests) == 1 else hashlib.sha256(b"".join(digests)).hexdigest()


def digest(*parts: bytes) -> str:
    """The checksum of a record."""
    return hashlib.blake2b(b"".join(parts), digest_size=8).hexdigest()


def check_format(
    path: object,
    found: object,
    *known: str,
    error: type[StalewiseError] = StoreError,
    advice: str = "use the release that wrote it",
) -> None:
    """Raise `error` for a file or directory whose format is none of the known ones."""
    if found not in known:
        raise error(f"{path} has format {found}; this release reads {' and '.join(known)}: {advice}")


def json_default(value: Any) -> Any:
    """The JSON form of a numpy number or array, or a path."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


# Directories.


def make_directory(path: str | Path) -> None:
    """`mkdir -p` whose new entries survive a power failure."""
    path = Path(path)
    if path.is_dir():
        return
    for lock in list(_held_locks):
        lock.check_not_moved(path)
    make_directory(path.parent)
    try:
        path.mkdir(exist_ok=True)
    except FileExistsError:
        raise StoreError(f"{path} is a file: move it, or name another directory") from None
    if not _is_temporary(path):
        fsync_directory(path.parent)


@contextlib.contextmanager
def remove_if_failed(directory: str | Path) -> Iterator[None]:
    """If the block fails, remove the directory and the parents that were made for it, where they are empty."""
    directory = Path(directory).absolute()
    missing = [path for path in (directory, *directory.parents) if not os.path.exists(path)]
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # it is not empty, or it was moved and may be put back
            for path in missing:
                path.rmdir()
        raise


def fsync_directory(path: str | Path) -> None:
    """Flush a directory's entries (creations, renames) to the disk; also the content of a file."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def temporary_name(path: str | Path) -> Path:
    """A new name beside `path` for an uncommitted file or directory, which `remove_temporaries` recognises."""
    path = Path(path)
    return path.with_name(f".{path.name}{_TEMPORARY}{secrets.token_hex(6)}")


def _is_temporary(path: Path) -> bool:
    """Whether the path or a parent has a temporary name: then a crash may lose the file, and its commit flushes it.

    Flushing each file alone would wait for everything else that is being written, such as a checkpoint.
    """
    return any(map(_TEMPORARY_NAME.fullmatch, path.parts))


def remove_temporaries(directory: str | Path, spare: Callable[[Path], bool] = lambda path: False) -> int:
    """Delete what interrupted writers left under `directory`, except files that `spare` selects; return how many."""
    leftovers = [path for path in Path(directory).rglob(f".*{_TEMPORARY}*") if not spare(path)]
    for leftover in leftovers:
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)
    return len(leftovers)


def commit_directory(temporary: str | Path, final: str | Path) -> None:
    """Flush every file under `temporary` and rename the directory to `final`, which must not exist yet.

    Both must be on the same file system, e.g. by `temporary_name(final)`. If the disk is full, `temporary` is removed.
    """
    temporary, final = Path(temporary), Path(final)
    if final.exists():
        raise StoreError(f"{final} exists already and is never overwritten: move it away first")
    size = sum(file.stat().st_size for file in temporary.rglob("*") if file.is_file())
    try:
        with explain_write_errors(final, size):
            with ThreadPoolExecutor() as threads:  # a disk takes several large files faster in parallel
                list(threads.map(fsync_directory, [temporary, *temporary.rglob("*")]))
            make_directory(final.parent)
            os.rename(temporary, final)
            fsync_directory(final.parent)
    except StoreError as error:
        if is_disk_full(error):
            shutil.rmtree(temporary, ignore_errors=True)
        raise


@contextlib.contextmanager
def explain_write_errors(path: str | Path, size: int) -> Iterator[None]:
    """Turn an operating-system error in the block into a StoreError that names the file and the remedy.

    `size` is the number of bytes needed; 0 if unknown.
    """
    try:
        yield
    except StoreError:
        raise
    except Exception as error:
        number = _system_error(error)
        if number is None:
            raise
        if number in _DISK_FULL:
            space = f"{size:,} bytes" if size else "some space"
            raise StoreError(f"disk full while writing {path}: free {space}; run the same command again") from error
        raise StoreError(f"cannot write {str(path)[:200]}: {os.strerror(number) if number else error}") from error


def is_disk_full(error: StoreError) -> bool:
    """Whether `explain_write_errors` made this of a full disk."""
    return isinstance(error.__cause__, Exception) and _system_error(error.__cause__) in _DISK_FULL


def _system_error(error: Exception) -> int | None:
    """The errno of an error, also if safetensors or tokenizers raised it; None: it is no error of the system."""
    if isinstance(error, OSError):
        return error.errno or 0
    number = re.search(r"\(os error (\d+)\)", str(error))
    return int(number[1]) if number else errno.EINVAL if "embedded null byte" in str(error) else None


# One process at a time.

_held_locks: weakref.WeakSet[RunLock] = weakref.WeakSet()


class RunLock:
    """Exclusive use of a run directory: `with RunLock(directory): ...`.

    The kernel holds the lock (flock) and drops it when the process ends; the file `run.lock` only names the holder. A
    lock is never stale, so there is no option to break one.
    """

    FILE = "run.lock"

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.path = self.directory / self.FILE
        self._descriptor: int | None = None
        self._is_new = False  # whether this lock made its file

    def acquire(self) -> None:
        """Take the lock, or raise a StoreError that names the process which holds it."""
        if self._descriptor is not None:
            raise StoreError(f"{self.directory} is locked already by this very RunLock")
        with explain_write_errors(self.path, 4096):
            for attempt in range(TRIES):
                try:
                    self._descriptor = self._lock_file()
                    break
                except FileNotFoundError:  # another process has taken it back meanwhile
                    if attempt == TRIES - 1:
                        raise
        _held_locks.add(self)

    def _lock_file(self) -> int:
        make_directory(self.directory)
        self._is_new = not os.path.exists(self.path)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StoreError(self._busy_message(descriptor)) from None
            if not os.path.samestat(os.stat(self.path), os.fstat(descriptor)):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.path))
            since = datetime.now(UTC).isoformat(timespec="seconds")
            holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": since}
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, (json.dumps(holder) + "\n").encode(), 0)
            os.fsync(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def release(self) -> None:
        """Release the lock; the file stays, for the next process."""
        if self._descriptor is not None:
            os.ftruncate(self._descriptor, 0)
            self._forget()

    def release_and_remove(self) -> None:
        """Release the lock, and remove its file if this process made it.

        Another process may have opened the file by then. Once it has the lock it finds that the file is gone.
        """
        if self._descriptor is not None and self._is_new and not self.is_gone:
            with contextlib.suppress(OSError):
                self.path.unlink()
        self.release()

    def _forget(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    @property
    def is_gone(self) -> bool:
        """Whether the directory was moved or deleted since it was locked."""
        try:
            return self._descriptor is not None and not os.path.samestat(os.stat(self.path), os.fstat(self._descriptor))
        except OSError:
            return True

    def check_not_moved(self, path: Path) -> None:
        """Raise a StoreError if `path` is in this run directory, and the directory was moved away."""
        own = os.path.abspath(self.directory)
        inside = f"{os.path.abspath(path)}{os.sep}".startswith(f"{own}{os.sep}")
        if inside and self._descriptor is not None and self.is_gone:
            raise StoreError(self._moved_message())

    def _moved_message(self) -> str:
        what = f"{self.directory} was moved or deleted during the run"
        return f"{what}: put it back, or name its new path, and run the same command again; nothing else was written"

    def _busy_message(self, descriptor: int) -> str:
        holder = "another process"
        for _ in range(20):  # the holder writes its name a moment after it got the lock
            with contextlib.suppress(ValueError, KeyError, TypeError):
                record = json.loads(os.pread(descriptor, 4096, 0))
                holder = f"process {record['pid']} on {record['host']} since {record['since']}"
                break
            time.sleep(0.02)
        return f"{self.directory} is in use by {holder}: wait until it ends or stop it, then run the same command again"

    def __enter__(self) -> RunLock:
        self.acquire()
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        is_gone = self.is_gone
        self.release()
        if is_gone and isinstance(error, Exception):  # whichever missing file was noticed first
            raise StoreError(self._moved_message()) from error


def _drop_inherited_locks() -> None:
    # A forked worker inherits the descriptor, and with it the lock: it would outlive a killed parent.
    for lock in list(_held_locks):
        lock._forget()


os.register_at_fork(after_in_child=_drop_inherited_locks)
