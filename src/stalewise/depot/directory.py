"""A depot in a directory that all machines see."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from stalewise.errors import StoreError
from stalewise.exclusive import create_atomic
from stalewise.files import explain_write_errors, make_directory, temporary_name


class DirectoryDepot:
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
