"""What lies in a run directory besides rollouts and checkpoints: who it belongs to, and what came of it."""

from __future__ import annotations

import platform
from collections.abc import Container
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from stalewise import __version__
from stalewise.config import FORMAT, RunConfig, identity_of, make_config
from stalewise.errors import StoreError
from stalewise.store.atomic import read_json, read_jsonl

# Of a directory that `stalewise export` makes of a run: what says which it is, and the run's settings.
EXPORT_FORMAT = "stalewise.export/1"
EXPORT_RECORD = "stalewise.json"
EXPORT_CONFIG = "training_config.toml"


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a finished run came to."""

    directory: Path
    updates: int
    evaluations: list[dict[str, Any]]  # records of eval.jsonl, oldest first
    seconds: dict[str, float]  # generate, learn, switch, evaluate: over all sittings

    @property
    def accuracy(self) -> float:
        """Held-out accuracy of the final policy."""
        return self.evaluations[-1]["accuracy"]["value"]


def read_result(directory: Path, updates: int) -> RunResult:
    """Sum up a run directory."""
    seconds: dict[str, float] = {"generate": 0.0, "learn": 0.0, "switch": 0.0, "evaluate": 0.0}
    for record in read_jsonl(directory / "journal.jsonl"):
        if record["event"] == "ranks":  # who learns, which takes no time
            continue
        seconds[record["event"]] = seconds.get(record["event"], 0.0) + record["seconds"]
    return RunResult(directory, updates, read_jsonl(directory / "eval.jsonl"), seconds)


def read_config(directory: str | Path) -> RunConfig:
    """The config that a run directory was made by."""
    path = Path(directory) / "config.resolved.json"
    if not path.is_file():
        raise StoreError(f"{directory} is no run directory: it has no config.resolved.json")
    record = read_json(path)
    if record.pop("format", None) != FORMAT:
        raise StoreError(f"{path} has another format than {FORMAT}: use the stalewise release that wrote it")
    return make_config(record, source=str(path))


def is_started(directory: Path) -> bool:
    """Whether a run directory holds a checkpoint or a generation batch, whole or in the making."""
    places = [directory / "checkpoints", directory / "rollouts"]
    return any(not entry.name.startswith(".") for place in places if place.is_dir() for entry in place.iterdir())


def check_identity(config: RunConfig) -> None:
    """Refuse a run directory that was made by another config or another version of the format."""
    path = config.directory / "config.resolved.json"
    if not path.exists():
        return
    found = read_json(path)
    if found.get("format") != FORMAT:
        raise StoreError(f"{path} has format {found.get('format')}; this release reads {FORMAT}: choose another name")
    if not is_started(config.directory):
        return  # a start that failed, on a wrong model for example, does not bind what comes after it
    if differences := identity_differences(config, found):
        raise StoreError(
            f"{config.directory} belongs to another config ({'; '.join(differences[:3])}): choose another name, "
            "or delete the directory to start anew"
        )


def identity_differences(config: RunConfig, found: dict[str, Any], but: Container[str] = ()) -> list[str]:
    """In what a config differs from the resolved one of a run, `but` for these settings."""
    # A setting that is newer than the run had its default.
    old, new = flat(RunConfig().identity()) | flat(identity_of(found)), flat(config.identity())
    # Of both: an option that was taken out of the config is a difference, too.
    return [
        f"{key} was {old.get(key)!r} and is {new.get(key)!r}"
        for key in {**new, **old}
        if old.get(key) != new.get(key) and key not in but
    ]


def flat(record: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, with dotted keys."""
    found: dict[str, Any] = {}
    for key, value in record.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def environment(device: str, threads: int, world_size: int) -> dict[str, Any]:
    """What the numbers of a run may depend on besides its config."""
    packages = ("torch", "transformers", "numpy", "pyarrow")
    return {
        "stalewise": __version__,
        "python": platform.python_version(),
        **{package: version(package) for package in packages},
        "platform": platform.platform(),
        "machine": platform.machine(),
        "device": device,
        "threads": threads,
        "world_size": world_size,
    }
