"""Storage that several machines share: a directory or an object store, with the operations that both support.

Object stores have no rename. So a large object is written first, and counts only once a small object names it with its
size and SHA-256. Only the creation of a small object has to be atomic.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from stalewise.errors import ConfigError, StoreError
from stalewise.store.atomic import create_atomic, explain_write_errors, make_directory, temporary_name, write_atomic

# In these stores `mode="create"` is one atomic request. In others fsspec checks and then writes, so we read the object
# back; for a moment two processes may both believe that they were first.
ATOMIC = frozenset({"s3", "s3a", "memory"})
_PACKAGES = {"s3": "stalewise[s3]", "s3a": "stalewise[s3]"}


class ObjectStore(Protocol):
    """Objects by name; a name has folders, as in `rollouts/g000000-v000000/shard-00000.json`."""

    where: str

    def names(self, folder: str) -> list[str]:
        """Names of the objects and folders directly in a folder; empty if there is no such folder."""
        ...

    def read(self, name: str) -> bytes | None:
        """The content of a small object; None if there is none."""
        ...

    def create(self, name: str, content: bytes) -> bool:
        """Write a small object that does not exist yet; False if it does."""
        ...

    def write(self, name: str, content: bytes) -> None:
        """Write or replace a small object."""

    def upload(self, path: Path, name: str) -> None:
        """Write a file to an object."""

    def download(self, name: str, path: Path) -> None:
        """Write an object to a file; the caller compares it with a manifest."""

    def remove(self, name: str) -> None:
        """Remove an object, or a folder with its content, if it exists."""


def open_object_store(url: str, options: dict[str, Any] | None = None) -> ObjectStore:
    """The store at a URL that fsspec opens; a path or a `file://` URL is a directory."""
    if "://" not in url or url.startswith("file://"):
        return DirectoryStore(url.removeprefix("file://"))
    return RemoteStore(url, options or {})


class DirectoryStore:
    """A store in a directory that all machines see. No object is ever seen half written."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self.where = str(root)

    def names(self, folder: str) -> list[str]:
        """Names of files and directories, without temporary ones."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return sorted(entry for entry in os.listdir(self.root / folder) if not entry.startswith("."))
        return []

    def read(self, name: str) -> bytes | None:
        """The content of a file."""
        try:
            return (self.root / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise StoreError(f"cannot read {self.root / name}: {error.strerror}") from error

    def create(self, name: str, content: bytes) -> bool:
        """Create a file with a hard link. Work orders and claims need not survive a power failure: no worker does."""
        return create_atomic(self.root / name, content, durable=False)

    def write(self, name: str, content: bytes) -> None:
        """Write a file with a rename, without waiting for the disk."""
        write_atomic(self.root / name, content, durable=False)

    def upload(self, path: Path, name: str) -> None:
        """Copy a file under a temporary name, and rename it."""
        final = self.root / name
        temporary = temporary_name(final)
        with explain_write_errors(final, path.stat().st_size):
            make_directory(final.parent)
            shutil.copyfile(path, temporary)
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
            os.replace(temporary, final)

    def download(self, name: str, path: Path) -> None:
        """Copy a file."""
        try:
            shutil.copyfile(self.root / name, path)
        except FileNotFoundError:
            raise StoreError(f"{self.root / name} is missing, though a manifest names it") from None

    def remove(self, name: str) -> None:
        """Remove a file, or a directory with its content."""
        path = self.root / name
        try:
            path.unlink(missing_ok=True)
        except (IsADirectoryError, PermissionError) as error:  # a directory; some systems raise the second
            shutil.rmtree(path, ignore_errors=True)  # files that others add meanwhile may stay
            if isinstance(error, PermissionError) and path.is_file():
                raise StoreError(f"cannot remove {path}: {error.strerror}") from error


class RemoteStore:
    """A store under a URL of fsspec. Nothing is cached: recent writes of other machines are seen."""

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        self.where = url.rstrip("/")
        try:
            import fsspec  # imported here: most runs need none

            self._files, self._root = fsspec.core.url_to_fs(self.where, use_listings_cache=False, **options)
        except (ImportError, ValueError, TypeError) as error:
            package = _PACKAGES.get(url.partition("://")[0], "the package that fsspec names")
            raise ConfigError(f"storage.url {url}: {error} (install {package}, or correct storage)") from error
        protocols = {self._files.protocol} if isinstance(self._files.protocol, str) else set(self._files.protocol)
        self._atomic = bool(protocols & ATOMIC)

    def names(self, folder: str) -> list[str]:
        """Names of objects and common prefixes."""
        with self._explained(folder):
            try:
                paths = self._files.ls(self._path(folder), detail=False, refresh=True)
            except FileNotFoundError:
                return []
        names = (str(path).rstrip("/").rpartition("/")[2] for path in paths)
        return sorted({name for name in names if name and not name.startswith(".")})

    def read(self, name: str) -> bytes | None:
        """The content of an object."""
        with self._explained(name):
            try:
                return self._files.cat_file(self._path(name))
            except (FileNotFoundError, IsADirectoryError):
                return None

    def create(self, name: str, content: bytes) -> bool:
        """Create an object with a conditional request (If-None-Match), if the store supports it."""
        with self._explained(name):
            try:
                self._files.pipe_file(self._path(name), content, mode="create")
            except FileExistsError:
                # Perhaps our own request, sent again after its answer was lost.
                return self.read(name) == content
        return self._atomic or self.read(name) == content

    def write(self, name: str, content: bytes) -> None:
        """Write an object with one request."""
        with self._explained(name):
            self._files.pipe_file(self._path(name), content)

    def upload(self, path: Path, name: str) -> None:
        """Upload a file, in parts if it is large; the object exists once the last part has arrived."""
        with self._explained(name):
            self._files.put_file(str(path), self._path(name))

    def download(self, name: str, path: Path) -> None:
        """Download an object into a file."""
        with self._explained(name):
            try:
                self._files.get_file(self._path(name), str(path))
            except FileNotFoundError:
                raise StoreError(f"{self.where}/{name} is missing, though a manifest names it") from None

    def remove(self, name: str) -> None:
        """Remove an object, or all objects under a prefix."""
        with self._explained(name), contextlib.suppress(FileNotFoundError):
            self._files.rm(self._path(name), recursive=True)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    @contextlib.contextmanager
    def _explained(self, name: str) -> Iterator[None]:
        try:
            yield
        except StoreError:
            raise
        except Exception as error:  # every file system of fsspec has its own errors
            message = " ".join(str(error).split()) or type(error).__name__
            raise StoreError(
                f"{self.where}/{name} cannot be reached: {message}; check the network, the bucket and the credentials, "
                "then run the same command again: committed data is kept"
            ) from error
