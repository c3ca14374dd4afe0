"""A directory to be handed on: filled under a temporary name, with a record of its files, and renamed as a whole."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stalewise import __version__
from stalewise.errors import StoreError
from stalewise.files import (
    commit_directory,
    explain_write_errors,
    make_directory,
    read_json,
    sha256_file,
    temporary_name,
    write_json_atomic,
)
from stalewise.rundirectory import EXPORT_FORMAT, EXPORT_RECORD

FORMAT, RECORD = EXPORT_FORMAT, EXPORT_RECORD


@contextlib.contextmanager
def new_folder(directory: Path, record: Mapping[str, Any], *, force: bool) -> Iterator[Path]:
    """A directory to fill; when the block ends well, it is at `directory` with `record` and its files' checksums in it.

    What is there already stays, unless `force` says otherwise and it is an earlier export.
    """
    _check_free(directory, force)
    temporary = temporary_name(directory)
    with explain_write_errors(directory, 0):
        make_directory(temporary)
    try:
        with explain_write_errors(directory, 0):
            yield temporary
        files = {
            path.relative_to(temporary).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
            for path in sorted(temporary.rglob("*"))
            if path.is_file()
        }
        whole = {"format": FORMAT, "stalewise": __version__, **record, "files": files}
        write_json_atomic(temporary / RECORD, whole)
        _put_in_place(temporary, directory, force)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def place_file(source: Path, target: Path, *, link: bool) -> None:
    """Copy one file, or point to it; the run may go on meanwhile and remove what is old."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        target.symlink_to(source.resolve(strict=True)) if link else shutil.copyfile(source, target)
    except FileNotFoundError:
        raise StoreError(f"{source} went away while it was copied: the run goes on; say a newer version") from None


def _check_free(directory: Path, force: bool) -> None:
    if not os.path.lexists(directory) or (directory.is_dir() and not any(directory.iterdir())):
        return
    if not force:
        raise StoreError(f"{directory} exists already and is not overwritten: name another directory, or say --force")
    # Only what we made ourselves is ever removed.
    if not (directory / RECORD).is_file() or read_json(directory / RECORD).get("format") != FORMAT:
        raise StoreError(f"{directory} is no earlier export, so --force leaves it alone: name another directory")


def _put_in_place(temporary: Path, directory: Path, force: bool) -> None:
    before = None
    if os.path.lexists(directory):
        _check_free(directory, force)
        before = temporary_name(directory)
        directory.rename(before)  # and not removed first: whatever happens now, one of the two is whole
    commit_directory(temporary, directory)
    if before is not None:
        shutil.rmtree(before)
