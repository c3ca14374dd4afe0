"""A depot in a directory that all machines see."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from stalewise.errors import ConfigError, StoreError
from stalewise.store.atomic import create_atomic, explain_write_errors, make_directory, temporary_name


class DirectoryStore:
    """Objects are files; none is ever seen half written."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self.where = str(root)

    def names(self, folder: str) -> list[str]:
        """Files and directories, without the temporary ones."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return sorted(entry for entry in os.listdir(self.root / folder) if not entry.startswith("."))
        return []

    def read(self, name: str) -> bytes | None:
        """The bytes of a file."""
        try:
            return (self.root / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise StoreError(f"cannot read {self.root / name}: {error.strerror}") from error

    def create(self, name: str, content: bytes) -> bool:
        """By a hard link. Orders and claims need not survive a power cut: nobody who works by them does."""
        return create_atomic(self.root / name, content, durable=False)

    def write(self, name: str, content: bytes) -> None:
        """By a rename, without waiting for the disk."""
        path = self.root / name
        temporary = temporary_name(path)
        with explain_write_errors(path, len(content)):
            make_directory(path.parent)
            temporary.write_bytes(content)
            os.replace(temporary, path)

    def upload(self, path: Path, name: str) -> None:
        """By a copy under a temporary name."""
        final = self.root / name
        temporary = temporary_name(final)
        with explain_write_errors(final, path.stat().st_size):
            make_directory(final.parent)
            shutil.copyfile(path, temporary)
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
            os.replace(temporary, final)

    def download(self, name: str, path: Path) -> None:
        """By a copy."""
        try:
            shutil.copyfile(self.root / name, path)
        except FileNotFoundError:
            raise StoreError(f"{self.root / name} is missing, though a manifest names it") from None

    def remove(self, name: str) -> None:
        """A file, or a directory with all that is in it."""
        path = self.root / name
        try:
            path.unlink(missing_ok=True)
        except (IsADirectoryError, PermissionError) as error:  # a directory; some systems say it in the second way
            shutil.rmtree(path, ignore_errors=True)  # whoever puts something there meanwhile keeps it
            if isinstance(error, PermissionError) and path.is_file():
                raise StoreError(f"cannot remove {path}: {error.strerror}") from error


# A depot in an object store, or in whatever else fsspec reaches.

# Here `mode="create"` is one request that the store itself decides. Elsewhere fsspec looks and then writes: there a
# second look tells who came last, which leaves a moment in which two may both think that they were first.
ATOMIC = frozenset({"s3", "s3a", "memory"})
_PACKAGES = {"s3": "stalewise[s3]", "s3a": "stalewise[s3]"}


class RemoteStore:
    """Objects under a URL. Nothing is cached: what others wrote a moment ago is seen."""

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
        """Objects and common prefixes."""
        with self._explained(folder):
            try:
                found = self._files.ls(self._path(folder), detail=False, refresh=True)
            except FileNotFoundError:
                return []
        names = (str(path).rstrip("/").rpartition("/")[2] for path in found)
        return sorted({name for name in names if name and not name.startswith(".")})

    def read(self, name: str) -> bytes | None:
        """The bytes of an object."""
        with self._explained(name):
            try:
                return self._files.cat_file(self._path(name))
            except (FileNotFoundError, IsADirectoryError):
                return None

    def create(self, name: str, content: bytes) -> bool:
        """By a conditional request (If-None-Match), where the store has that."""
        with self._explained(name):
            try:
                self._files.pipe_file(self._path(name), content, mode="create")
            except FileExistsError:
                # Perhaps our own, whose answer was lost on the way and which was sent again.
                return self.read(name) == content
        return self._atomic or self.read(name) == content

    def write(self, name: str, content: bytes) -> None:
        """By one request."""
        with self._explained(name):
            self._files.pipe_file(self._path(name), content)

    def upload(self, path: Path, name: str) -> None:
        """In parts, where it is large; the object is there when the last one is."""
        with self._explained(name):
            self._files.put_file(str(path), self._path(name))

    def download(self, name: str, path: Path) -> None:
        """Into a file."""
        with self._explained(name):
            try:
                self._files.get_file(self._path(name), str(path))
            except FileNotFoundError:
                raise StoreError(f"{self.where}/{name} is missing, though a manifest names it") from None

    def remove(self, name: str) -> None:
        """An object, or all under a prefix."""
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
        except Exception as error:  # every file system of fsspec raises errors of its own
            words = " ".join(str(error).split()) or type(error).__name__
            raise StoreError(
                f"{self.where}/{name} cannot be reached: {words}; see to the network, the bucket and the credentials, "
                "then run the same command again: what is committed stays"
            ) from error


# Where machines meet: a shared directory or an object store, behind the few things that both can do.
# There is no rename in an object store, so none is used: what is large is written first and believed only when a small
# object names it with its size and SHA-256. The one thing that must be atomic is to create a small object where there is
# none.


class ObjectStore(Protocol):
    """Objects by name; a name has folders, as in `rollouts/g000000-v000000/shard-00000.json`."""

    where: str

    def names(self, folder: str) -> list[str]:
        """What lies directly in a folder, objects and folders; nothing where there is no such folder."""
        ...

    def read(self, name: str) -> bytes | None:
        """A small object; None where there is none."""
        ...

    def create(self, name: str, content: bytes) -> bool:
        """Put a small object where there is none; False where there is one."""
        ...

    def write(self, name: str, content: bytes) -> None:
        """Put a small object, in the place of another one where there is one."""
        ...

    def upload(self, path: Path, name: str) -> None:
        """Put a file."""
        ...

    def download(self, name: str, path: Path) -> None:
        """Get an object into a file; what came is for the caller to compare with a manifest."""
        ...

    def remove(self, name: str) -> None:
        """Remove an object or a folder with all that is in it; nothing happens where there is none."""
        ...


def open_object_store(url: str, options: dict[str, Any] | None = None) -> ObjectStore:
    """The depot at a URL that fsspec knows; a path or a `file://` URL is a directory, which can do more."""
    if "://" not in url or url.startswith("file://"):
        return DirectoryStore(url.removeprefix("file://"))

    return RemoteStore(url, options or {})
