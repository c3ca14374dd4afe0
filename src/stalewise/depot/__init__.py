"""Where machines meet: a shared directory or an object store, behind the few things that both can do.

There is no rename in an object store, so none is used: what is large is written first and believed only when a small
object names it with its size and SHA-256. The one thing that must be atomic is to create a small object where there is
none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from stalewise.depot.directory import DirectoryDepot


class Depot(Protocol):
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


def open_depot(url: str, options: dict[str, Any] | None = None) -> Depot:
    """The depot at a URL that fsspec knows; a path or a `file://` URL is a directory, which can do more."""
    if "://" not in url or url.startswith("file://"):
        return DirectoryDepot(url.removeprefix("file://"))
    from stalewise.depot.remote import RemoteDepot  # imported here: most runs need no fsspec

    return RemoteDepot(url, options or {})


__all__ = ["Depot", "DirectoryDepot", "open_depot"]
