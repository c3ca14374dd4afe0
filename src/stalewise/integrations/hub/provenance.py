"""A directory to be handed on: filled under a temporary name, with a record of its files, and renamed as a whole."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stalewise import __version__
from stalewise.config import RunConfig
from stalewise.config.run_directory import EXPORT_FORMAT, EXPORT_RECORD, flat, read_config
from stalewise.config.template import toml
from stalewise.errors import StoreError
from stalewise.models.smollm2 import NAME as SMOLLM2
from stalewise.store.atomic import (
    commit_directory,
    explain_write_errors,
    make_directory,
    read_json,
    sha256_file,
    temporary_name,
    write_json_atomic,
)
from stalewise.store.checkpoints import read_state

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


# Where a policy comes from, and what makes it again: base model, config, command. No path of this machine gets out.

SMOLLM2_ON_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
FARTHEST = 16  # runs that were started from one another's checkpoints


@dataclass(frozen=True, slots=True)
class Base:
    """The model that training started from."""

    words: str  # for people
    name: str = ""  # on a hub; empty where it has none
    license: str = ""
    is_itself: bool = True  # and not only the beginning of a line of models that ends in the one that was trained

    def record(self) -> dict[str, Any]:
        """What an export remembers of it."""
        return asdict(self)


def base_of(config: RunConfig, depth: int = 0) -> Base:
    """The base of a config's policy. One that was trained by stalewise before is followed to where it began."""
    from stalewise.models.loading import embedded_policies

    path = config.task.name if config.model.path == "auto" else config.model.path
    if path in embedded_policies():
        return Base(f"the small policy `{path}` that comes with stalewise", license="apache-2.0")
    if path == SMOLLM2:
        words = f"[{SMOLLM2_ON_HUB}](https://huggingface.co/{SMOLLM2_ON_HUB}), dequantized from 4 bits (Q4_1)"
        return Base(words, SMOLLM2_ON_HUB, "apache-2.0")
    directory = Path(path).expanduser()
    if not directory.is_dir():
        return Base(f"[{path}](https://huggingface.co/{path})", path)
    return _base_of_directory(directory, depth)


def _base_of_directory(directory: Path, depth: int) -> Base:
    if (directory / RECORD).is_file() and (record := read_json(directory / RECORD)).get("format") == FORMAT:
        return _later(record["run"], record["version"], Base(**record["base"]))
    run = directory.resolve().parent.parent
    if depth < FARTHEST and (directory / "state.json").is_file() and (run / "config.resolved.json").is_file():
        return _later(run.name, read_state(directory)["version"], base_of(read_config(run), depth + 1))
    return Base(f"a model in a directory called `{directory.resolve().name}`")


def _later(run: str, version: int, base: Base) -> Base:
    words = f"version {version} of the run {run}, which began as {base.words}"
    return Base(words, base.name, base.license, is_itself=False)


def shareable(config: RunConfig) -> dict[str, Any]:
    """The config as nested tables that others can use: without nulls, and without the addresses of
    servers and stores and the paths of this machine.

    A learning rate that was planned is given: whoever repeats the run has no calibration.
    """
    record = config.model_dump(mode="json")
    record |= {"runs": "runs", "trackers": [], "storage": {}}
    record["plan"] |= {"learning_rate": "given", "calibration": ""}
    server = record["sampler"]["server"]
    server |= {"urls": [f"http://localhost:{8000 + place}" for place in range(len(server["urls"]))], "paths": {}}
    return _without_places(record)


def _without_places(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_places(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_places(item) for item in value]
    is_place = isinstance(value, str) and value.startswith(("/", "~")) and not any(map(str.isspace, value))
    return Path(value).name if is_place else value


def config_file(config: RunConfig) -> str:
    """All settings of a run as TOML, in tables."""
    record = shareable(config)
    plain = [f"{key} = {toml(value)}" for key, value in record.items() if not isinstance(value, dict)]
    tables = [
        "\n".join([f"[{key}]", *(f"{name} = {toml(item)}" for name, item in value.items())])
        for key, value in record.items()
        if isinstance(value, dict)
    ]
    return "\n\n".join(["\n".join(plain), *tables]) + "\n"


def explicit_settings(config: RunConfig) -> dict[str, Any]:
    """Settings that are not the defaults, with dotted keys."""
    defaults = flat(shareable(RunConfig()))
    said = flat(shareable(config))
    return {key: value for key, value in said.items() if key not in defaults or defaults[key] != value}
