"""First come, first served between processes and machines: a file that is put where none is, or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from stalewise.files import explain_write_errors, fsync_directory, make_directory, temporary_name

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
