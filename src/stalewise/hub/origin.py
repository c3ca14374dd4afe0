"""Where a policy comes from, and what makes it again: base model, config, command. No path of this machine gets out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stalewise.checkpoints import read_state
from stalewise.config import RunConfig
from stalewise.files import read_json
from stalewise.gguf import is_gguf
from stalewise.hub.folder import FORMAT, RECORD
from stalewise.rundirectory import flat, read_config
from stalewise.smollm2 import NAME as SMOLLM2
from stalewise.template import toml

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
    from stalewise.models import embedded_policies

    path = config.task.name if config.model.path == "auto" else config.model.path
    if path in embedded_policies():
        return Base(f"the small policy `{path}` that comes with stalewise", license="apache-2.0")
    if path == SMOLLM2:
        words = f"[{SMOLLM2_ON_HUB}](https://huggingface.co/{SMOLLM2_ON_HUB}), dequantized from 4 bits (Q4_1)"
        return Base(words, SMOLLM2_ON_HUB, "apache-2.0")
    directory = Path(path).expanduser()
    if is_gguf(path):
        return Base(f"a model in a GGUF file called `{directory.name}`")
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


def said_settings(config: RunConfig) -> dict[str, Any]:
    """Settings that are not the defaults, with dotted keys."""
    defaults = flat(shareable(RunConfig()))
    said = flat(shareable(config))
    return {key: value for key, value in said.items() if key not in defaults or defaults[key] != value}
