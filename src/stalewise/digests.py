"""What files hold, as checksums that all cores compute together: SHA-256, of a large file one for each piece."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from stalewise.files import fsync_directory

PIECE = 64 * 2**20  # bytes
_CHUNK = 2**20  # that are read at a time


def describe_files(paths: Sequence[Path], *, flushing: bool = False) -> list[dict[str, Any]]:
    """Size and checksums of each: `bytes`, and `sha256` or, where a file has several pieces, `sha256_pieces`.

    `flushing` brings them to the disk meanwhile: that takes as long, and a commit then has nothing left to wait for.
    """
    with ThreadPoolExecutor() as threads:
        flushed = [threads.submit(fsync_directory, path) for path in paths] if flushing else []
        sizes = [path.stat().st_size for path in paths]
        digests = [_digests(threads, path, size, PIECE) for path, size in zip(paths, sizes, strict=True)]
        found = [[one.result() for one in of_file] for of_file in digests]
        for each in flushed:
            each.result()
    return [
        {"bytes": size, **({"sha256": own[0]} if len(own) == 1 else {"sha256_pieces": own, "piece_bytes": PIECE})}
        for size, own in zip(sizes, found, strict=True)
    ]


def first_damaged(files: Mapping[Path, Mapping[str, Any]]) -> Path | None:
    """The first of these files that is not what `describe_files` said of it, or not there; None: all are whole."""
    with ThreadPoolExecutor() as threads:
        there = [path for path, said in files.items() if path.is_file() and path.stat().st_size == said["bytes"]]
        digests = {path: _digests(threads, path, files[path]["bytes"], _piece(files[path])) for path in there}
        for path, said in files.items():
            expected = said["sha256_pieces"] if "sha256_pieces" in said else [said["sha256"]]
            if path not in digests or [one.result() for one in digests[path]] != expected:
                return path
    return None


def _piece(said: Mapping[str, Any]) -> int:
    """A file with one checksum is one piece, however large."""
    return said["piece_bytes"] if "sha256_pieces" in said else max(1, said["bytes"])


def _digests(threads: Executor, path: Path, size: int, piece: int) -> list[Future[str]]:
    return [threads.submit(_sha256, path, start, piece) for start in range(0, max(1, size), piece)]


def _sha256(path: Path, start: int, length: int) -> str:
    """Of so many bytes from a place on, or of as many as there are."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(min(length, _CHUNK)))
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while length and (read := file.readinto(buffer[: min(length, _CHUNK)])):
            digest.update(buffer[:read])
            length -= read
    return digest.hexdigest()
