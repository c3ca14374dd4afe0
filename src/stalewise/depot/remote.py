"""A depot in an object store, or in whatever else fsspec reaches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stalewise.errors import ConfigError, StoreError

# Here `mode="create"` is one request that the store itself decides. Elsewhere fsspec looks and then writes: there a
# second look tells who came last, which leaves a moment in which two may both think that they were first.
ATOMIC = frozenset({"s3", "s3a", "memory"})
_PACKAGES = {"s3": "stalewise[s3]", "s3a": "stalewise[s3]"}


class RemoteDepot:
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
