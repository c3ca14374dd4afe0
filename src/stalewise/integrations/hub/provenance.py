"""Export directories, written as a whole, and the base model and config they name, without paths of this machine."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stalewise import __version__
from stalewise.config import RunConfig
from stalewise.config.run_directory import EXPORT_FORMAT, EXPORT_RECORD, flat, read_config
from stalewise.config.template import toml
from stalewise.errors import StoreError
from stalewise.models.gguf import is_gguf
from stalewise.models.smollm2 import NAME as SMOLLM2
from stalewise.store import atomic
from stalewise.store.checkpoints import read_state

RECORD = EXPORT_RECORD
SMOLLM2_ON_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
MOST_ANCESTORS = 16  # runs that were started from one another's checkpoints


@contextlib.contextmanager
def new_folder(directory: Path, record: Mapping[str, Any], *, force: bool) -> Iterator[Path]:
    """A temporary directory to fill; on success it becomes `directory`, with `record` and the checksums of its files.

    An existing directory is an error, unless `force` is given and it is an earlier export.
    """
    _check_free(directory, force)
    temporary = atomic.temporary_name(directory)
    try:
        with atomic.explain_write_errors(directory, 0):
            atomic.make_directory(temporary)
            yield temporary
        files = {
            path.relative_to(temporary).as_posix(): {"bytes": path.stat().st_size, "sha256": atomic.sha256_file(path)}
            for path in sorted(temporary.rglob("*"))
            if path.is_file()
        }
        head = {"format": EXPORT_FORMAT, "stalewise": __version__}
        atomic.write_json_atomic(temporary / RECORD, {**head, **record, "files": files})
        if not os.path.lexists(directory):
            return atomic.commit_directory(temporary, directory)
        _check_free(directory, force)
        before = atomic.temporary_name(directory)
        directory.rename(before)  # not removed first: at any moment one of the two is whole
        atomic.commit_directory(temporary, directory)
        shutil.rmtree(before)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def place_file(source: Path, target: Path, *, link: bool) -> None:
    """Copy or link one file. The run may continue meanwhile and remove old checkpoints."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        target.symlink_to(source.resolve(strict=True)) if link else shutil.copyfile(source, target)
    except FileNotFoundError:
        raise StoreError(f"{source} was removed while it was copied: the run goes on; name a newer version") from None


def _check_free(directory: Path, force: bool) -> None:
    if not os.path.lexists(directory) or (directory.is_dir() and not any(directory.iterdir())):
        return
    if not force:
        raise StoreError(f"{directory} exists and is not overwritten: name another directory, or use --force")
    if not _export_record(directory):  # only earlier exports are ever removed
        raise StoreError(f"{directory} is no earlier export, so --force does not replace it: name another directory")


def _export_record(directory: Path) -> dict[str, Any] | None:
    record = atomic.read_json(directory / RECORD) if (directory / RECORD).is_file() else {}
    return record if record.get("format") == EXPORT_FORMAT else None


@dataclass(frozen=True, slots=True)
class BasePolicy:
    """The model that training started from."""

    words: str  # a description
    name: str = ""  # on a hub; empty if it is on none
    license: str = ""
    is_itself: bool = True  # False: `name` is an ancestor of the model that was trained


def base_of(model: str, task: str, depth: int = 0) -> BasePolicy:
    """The base of `model.path` and `task.name`. A model trained by stalewise is followed to its own base."""
    from stalewise.models.loading import embedded_policies

    path = task if model == "auto" else model
    if path in embedded_policies():
        return BasePolicy(f"the small policy `{path}` that comes with stalewise", license="apache-2.0")
    if path == SMOLLM2:
        words = f"[{SMOLLM2_ON_HUB}](https://huggingface.co/{SMOLLM2_ON_HUB}), dequantized from 4 bits (Q4_1)"
        return BasePolicy(words, SMOLLM2_ON_HUB, "apache-2.0")
    directory = Path(path).expanduser()
    if is_gguf(path):
        return BasePolicy(f"a model in a GGUF file called `{directory.name}`")
    if not directory.is_dir():
        return BasePolicy(f"[{path}](https://huggingface.co/{path})", path)
    if record := _export_record(directory):
        return _descendant(record["run"], record["version"], BasePolicy(**record["base"]))
    run = directory.resolve().parent.parent
    if depth < MOST_ANCESTORS and (directory / "state.json").is_file() and (run / "config.resolved.json").is_file():
        config = read_config(run)
        base = base_of(config.model.path, config.task.name, depth + 1)
        return _descendant(run.name, read_state(directory)["version"], base)
    return BasePolicy(f"a model in a directory called `{directory.resolve().name}`")


def _descendant(run: str, version: int, base: BasePolicy) -> BasePolicy:
    words = f"version {version} of the run {run}, which started from {base.words}"
    return BasePolicy(words, base.name, base.license, is_itself=False)


def shareable(config: RunConfig) -> dict[str, Any]:
    """The config as nested tables without nulls, addresses of servers and stores, and paths of this machine.

    A planned learning rate is written as given: a rerun elsewhere has no calibration.
    """
    record = config.model_dump(mode="json")
    record |= {"runs": "runs", "trackers": [], "storage": {}}
    record["plan"] |= {"learning_rate": "given", "calibration": ""}
    server = record["sampler"]["server"]
    server |= {"urls": [f"http://localhost:{8000 + i}" for i in range(len(server["urls"]))], "paths": {}}
    return without_paths(record)


def without_paths(value: Any) -> Any:
    """A value without nulls in tables, and with file names instead of absolute paths."""
    if isinstance(value, Mapping):
        return {key: without_paths(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_paths(item) for item in value]
    is_path = isinstance(value, str) and value.startswith(("/", "~")) and not any(map(str.isspace, value))
    return Path(value).name if is_path else value


def config_file(config: RunConfig) -> str:
    """All settings of a run as TOML."""
    record = shareable(config)
    tables = {"": {key: value for key, value in record.items() if not isinstance(value, dict)}}
    tables |= {f"[{key}]\n": value for key, value in record.items() if isinstance(value, dict)}
    lines = {head: [f"{key} = {toml(value)}\n" for key, value in table.items()] for head, table in tables.items()}
    return "\n".join(head + "".join(settings) for head, settings in lines.items())


def explicit_settings(config: RunConfig) -> dict[str, Any]:
    """Settings that differ from the defaults, with dotted keys."""
    defaults, settings = flat(shareable(RunConfig())), flat(shareable(config))
    return {key: value for key, value in settings.items() if key not in defaults or defaults[key] != value}
