"""Run directories: their config, whether they match another config, and the result of a finished run."""

from __future__ import annotations

import os
import platform
from collections.abc import Container
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from stalewise import __version__
from stalewise.config.run import FORMAT, HERE, RunConfig, identity_of, make_config, with_moved_files
from stalewise.errors import StoreError
from stalewise.store.atomic import read_json
from stalewise.store.checkpoints import checkpoint_directory, versions
from stalewise.store.manifest import batch_directories, is_committed, read_batch_manifest
from stalewise.store.records import EVALUATION, JOURNAL, SUITE, read_records

RESOLVED = "config.resolved.json"
# Files of a directory that `stalewise export` makes: the record that identifies it, and the run's settings.
EXPORT_FORMAT = "stalewise.export/1"
EXPORT_RECORD = "stalewise.json"
EXPORT_CONFIG = "training_config.toml"
# Settings that stand for objects of a program.
_OF_PROGRAMS = {
    "task.options.verifier_options.function": "reward function (the run's own is in python/reward.py)",
    "task.options.path": "data set (the run's own is in data/)",
    "task.options.evaluation_path": "evaluation data set (the run's own is in data/)",
    "task.options.task": "task (the run's own is in python/task.py)",
    "objective.name": "objective (the run's own is in python/objective.py)",
    "model.path": "model",
}
_WAY_ON = "restore it to continue, or choose another name=… for a new run"


@dataclass(frozen=True, slots=True)
class RunResult:
    """The result of a finished run."""

    directory: Path
    updates: int
    evaluations: list[dict[str, Any]]  # records of eval.jsonl, oldest first
    seconds: dict[str, float]  # generate, learn, switch, evaluate: summed over all resumes

    @property
    def accuracy(self) -> float:
        """Held-out accuracy of the final policy."""
        return self.evaluations[-1]["accuracy"]["value"]

    @property
    def suites(self) -> dict[str, dict[str, Any]]:
        """The last evaluation on each suite, by its name: records of suites.jsonl."""
        return {record["suite"]: record for record in read_records(self.directory / "suites.jsonl", SUITE)}

    @property
    def unscored(self) -> float:
        """Fraction of the rollouts that could not be scored and were left out; 0 where there are none."""
        batches = filter(is_committed, batch_directories(self.directory / "rollouts"))
        manifests = [read_batch_manifest(batch) for batch in batches]
        return sum(one.verifier_errors for one in manifests) / (sum(one.rows for one in manifests) or 1)

    @property
    def checkpoint(self) -> Path:
        """The directory of the final policy, which transformers loads."""
        return checkpoint_directory(self.directory, self.updates)


def read_result(directory: Path, updates: int) -> RunResult:
    """Read the result of a finished run from its directory."""
    seconds: dict[str, float] = {"generate": 0.0, "learn": 0.0, "switch": 0.0, "evaluate": 0.0}
    for record in read_records(directory / "journal.jsonl", JOURNAL):
        if record["event"] != "ranks":  # a record of the world size, without a duration
            seconds[record["event"]] = seconds.get(record["event"], 0.0) + record["seconds"]
    return RunResult(directory, updates, read_records(directory / "eval.jsonl", EVALUATION), seconds)


def read_config(directory: str | Path) -> RunConfig:
    """The config of a run directory."""
    record = read_resolved(directory)
    del record["format"]
    return make_config(with_moved_files(record, str(Path(directory))), source=str(Path(directory) / RESOLVED))


def read_resolved(directory: str | Path) -> dict[str, Any]:
    """The config of a run directory as it is stored."""
    path = Path(directory) / RESOLVED
    if not os.path.isfile(path) and (os.access(directory, os.X_OK) or not os.path.exists(directory)):
        raise StoreError(f"{directory} is no run directory: it has no {RESOLVED}; name the directory of a run")
    record = read_json(path)
    if record.get("format") != FORMAT:
        raise StoreError(f"{path} has format {record.get('format')}; this release reads {FORMAT}")
    return record


def is_started(directory: Path) -> bool:
    """Whether a run directory holds a checkpoint or a generation batch, complete or not."""
    parents = [directory / "checkpoints", directory / "rollouts"]
    return any(not entry.name.startswith(".") for parent in parents if parent.is_dir() for entry in parent.iterdir())


def check_identity(config: RunConfig) -> None:
    """Refuse a run directory that was made with another config or another format."""
    path = config.directory / RESOLVED
    if not path.exists():
        if versions(config.directory):
            raise StoreError(f"{path} is missing, though the run has begun: restore it, or choose another name")
        return
    recorded = read_json(path)
    if (written := recorded.get("format")) != FORMAT:
        raise StoreError(f"{path} has format {written}; this release reads {FORMAT}: choose another name")
    if not is_started(config.directory):
        return  # after a failed start, e.g. with a wrong model path, the config may still change
    differences = identity_differences(config, recorded)
    if differences and not reward_was_repaired(config):
        if changed := _changed_in_program(differences):
            raise StoreError(f"{config.directory} was begun with {changed}: {_WAY_ON}")
        raise StoreError(
            f"{config.directory} belongs to another config ({'; '.join(differences[:3])}): choose another name, "
            "or delete the directory to start anew"
        )


def reward_was_repaired(config: RunConfig) -> bool:
    """Whether a run that has no rollouts yet differs from this config in its verifier alone.

    That is so after a reward that failed: it is repaired under the same name, and only evaluations are made again.
    """
    directory = config.directory
    path = directory / "config.resolved.json"
    if not path.is_file() or any((directory / "rollouts").glob("[!.]*")) or versions(directory) != [0]:
        return False
    differences = identity_differences(config, read_json(path))
    return bool(differences) and all(text.startswith("task.options.verifier") for text in differences)


def _changed_in_program(differences: list[str]) -> str:
    """Which object of a program differs from that of the run, if nothing else does; see `stalewise.train`."""
    keys = {text.partition(" ")[0] for text in differences if "@" in text or HERE in text}
    found = [what for key, what in _OF_PROGRAMS.items() if key in keys]
    return f"another {' and another '.join(found)}" if len(found) == len(differences) else ""


def identity_differences(config: RunConfig, recorded: dict[str, Any], but: Container[str] = ()) -> list[str]:
    """How a config differs from the resolved one of a run, except in the settings `but`."""
    # A setting that is newer than the run had its default; an option that was removed is a difference, too.
    old, new = flat(RunConfig().identity()) | flat(identity_of(recorded)), flat(config.identity())
    return [
        f"{key} was {old.get(key)!r} and is {new.get(key)!r}"
        for key in {**new, **old}
        if old.get(key) != new.get(key) and key not in but
    ]


def flat(record: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, with dotted keys."""
    merged: dict[str, Any] = {}
    for key, value in record.items():
        merged |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return merged


def environment(device: str, threads: int, world_size: int) -> dict[str, Any]:
    """What the numbers of a run may depend on besides its config."""
    return {
        "stalewise": __version__,
        "python": platform.python_version(),
        **{package: version(package) for package in ("torch", "transformers", "numpy", "pyarrow")},
        "platform": platform.platform(),
        "machine": platform.machine(),
        "device": device,
        "threads": threads,
        "world_size": world_size,
    }
