"""What a calibration belongs to: change any of it, and its radii mean nothing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stalewise.config import RunConfig
from stalewise.rundirectory import flat

SAMPLING = ("temperature", "top_p", "top_k", "max_new_tokens", "weights", "foreign")
PIECES = 16  # of each weights file that the fingerprint reads; a trained model differs in all of them
PIECE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class CalibrationIdentity:
    """Settings by dotted key: model, task, optimizer, batch, objective and sampler; not S, T, η and the seed."""

    settings: Mapping[str, Any]

    def differences(self, other: CalibrationIdentity) -> list[str]:
        """Say what differs, each with both values: this one's, then the other's.

        >>> mine = CalibrationIdentity({"batch.prompts": 32, "batch.group_size": 8})
        >>> mine.differences(CalibrationIdentity({"batch.prompts": 64, "batch.group_size": 8}))
        ['batch.prompts is 32 and not 64']
        """
        ours, theirs = self.settings, other.settings
        return [
            f"{key} is {ours.get(key)!r} and not {theirs.get(key)!r}"
            for key in {**ours, **theirs}
            if ours.get(key) != theirs.get(key)
        ]

    @property
    def digest(self) -> str:
        """Eight hexadecimal digits that name it."""
        return hashlib.sha256(json.dumps(self.settings, sort_keys=True).encode()).hexdigest()[:8]

    @property
    def slug(self) -> str:
        """The start of a file name, for people."""
        words = [str(self.settings[key]) for key in ("model.path", "task.name", "objective.name")]
        text = "-".join(dict.fromkeys(words))
        return "".join(character if character.isalnum() or character in "-_" else "_" for character in text)

    def __str__(self) -> str:
        names = ("model.path", "task.name", "objective.name", "batch.prompts", "batch.group_size")
        return ", ".join(f"{name} {self.settings.get(name)}" for name in names)


def identity_of_config(config: RunConfig) -> CalibrationIdentity:
    """The identity of what a config trains. Reads the model's files, or asks the hub which revision it has."""
    from stalewise.models import resolve_model

    record = config.model_dump(mode="json")
    source = resolve_model(config.model.path, config.task.name)
    # Where a directory lies does not matter: its files tell what it is.
    name = Path(source).name if Path(source).is_dir() else source
    model = {"path": name, "fingerprint": fingerprint(source), "precision": config.model.precision}
    if config.model.adapter:
        model["adapter"] = fingerprint_of_files(Path(config.model.adapter).expanduser())
    kept = {
        "model": {**model, "lora": record["model"]["lora"]},
        "task": record["task"],
        "optimizer": {key: value for key, value in record["optimizer"].items() if key != "learning_rate"},
        "batch": record["batch"],
        "objective": record["objective"],
        "sampler": {key: record["sampler"][key] for key in SAMPLING},
    }
    return CalibrationIdentity(flat(kept))


def fingerprint(source: str) -> str:
    """Tell a model from another one of the same name: by its files, or by its revision on a hub."""
    if Path(source).is_dir():
        return fingerprint_of_files(Path(source))
    from transformers import AutoConfig

    from stalewise.models import loading_error

    try:
        return str(AutoConfig.from_pretrained(source)._commit_hash)  # pyright: ignore[reportPrivateUsage]
    except (OSError, ValueError) as error:
        raise loading_error(source, "has no config that transformers can load", error) from error


def fingerprint_of_files(directory: Path) -> str:
    """SHA-256 of the config and of the names, sizes and evenly spread pieces of the weights: quick for any size."""
    found = hashlib.sha256()
    for path in sorted([*directory.glob("*config.json"), *directory.glob("*.safetensors")]):
        size = path.stat().st_size
        found.update(f"{path.name} {size}\n".encode())
        with open(path, "rb") as file:
            for piece in range(PIECES):
                file.seek(max(0, size - PIECE_BYTES) * piece // (PIECES - 1))
                found.update(file.read(PIECE_BYTES))
    return found.hexdigest()[:16]
