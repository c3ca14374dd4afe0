"""What a calibration belongs to: change any of it, and its radii mean nothing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from stalewise.config import RunConfig
from stalewise.config.run_directory import flat
from stalewise.errors import CalibrationError
from stalewise.planning.costs import Probe
from stalewise.staleness.law import Fit, Observation
from stalewise.store.atomic import read_json, write_json_atomic

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
    from stalewise.models.loading import resolve_model

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

    from stalewise.models.loading import loading_error

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


# The calibration file: what a probe and a sweep found, and what they found it for.

FORMAT = "stalewise.calibration/1"


@dataclass(frozen=True, slots=True)
class SweepRun:
    """One run of a sweep and what became of it. `update_norm_per_lr`: drift until then per update and unit of η."""

    staleness: int
    learning_rate: float
    updates: int
    seed: int
    collapsed_at: int | None
    update_norm_per_lr: float
    best_accuracy: float
    last_accuracy: float
    directory: str
    resolution: int = 1  # updates before the collapse at which it was last seen alive

    @property
    def key(self) -> tuple[int, float, int, int]:
        """What tells it from the other runs of a sweep."""
        return self.staleness, self.learning_rate, self.updates, self.seed

    @property
    def observation(self) -> Observation:
        """What the law is fitted to."""
        return Observation(
            self.staleness,
            self.learning_rate,
            self.updates,
            self.collapsed_at,
            self.update_norm_per_lr,
            self.resolution,
        )


@dataclass(frozen=True, slots=True)
class CollapseRule:
    """How a collapse is found in the held-out accuracy: numbers of evaluations, as `CollapseDetector` takes them."""

    evaluations: int = 32
    smoothing: int = 2
    window: int = 4
    fraction: float = 0.5
    floor: float = 0.0


@dataclass(frozen=True, slots=True)
class Sweep:
    """What a sweep found. `fit` is None where its runs were too few, `update_norm_per_lr` is the G of a stable run."""

    rule: CollapseRule
    runs: list[SweepRun]
    update_norm_per_lr: float
    fit: Fit | None
    problem: str = ""  # why there is no fit


@dataclass(frozen=True, slots=True)
class CalibrationKey:
    """What something was measured on."""

    device: str
    engine: str
    threads: int  # as far as a CPU is concerned

    def __str__(self) -> str:
        on = f"{self.device} with {self.threads} threads" if self.device == "cpu" else self.device
        return f"{on} and the engine {self.engine}"

    def is_as_fast_as(self, other: CalibrationKey) -> bool:
        """Whether times that were measured on one hold on the other, as far as names tell."""
        same = (self.device, self.engine) == (other.device, other.engine)
        return same and (self.device != "cpu" or self.threads == other.threads)


@dataclass(frozen=True, slots=True)
class Calibration:
    """A calibration: of the probe and the sweep either may be missing."""

    identity: CalibrationIdentity
    environment: dict[str, Any]
    probe: Probe | None = None
    sweep: Sweep | None = None
    format: str = FORMAT
    places: dict[str, CalibrationKey] = field(default_factory=dict)  # of the probe and of the sweep, by these names


def calibration_directory(config: RunConfig) -> Path:
    """Where calibrations lie."""
    return Path(config.runs) / "calibrations"


def calibration_path(config: RunConfig, identity: CalibrationIdentity) -> Path:
    """The file of this identity among the calibrations of a config."""
    return calibration_directory(config) / f"{identity.slug}-{identity.digest}.json"


def read_calibration(path: str | Path) -> Calibration:
    """Read a calibration file; one that is missing, corrupt or of another format is a CalibrationError."""
    if not Path(path).is_file():
        raise CalibrationError(f"the calibration file {path} does not exist: `stalewise sweep` makes one")
    record = read_json(path)
    if record.get("format") != FORMAT:
        raise CalibrationError(f"{path} has format {record.get('format')}; this release reads {FORMAT}")
    try:
        return TypeAdapter(Calibration).validate_python(record)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise CalibrationError(f"{path} is corrupt: {place}: {first['msg']}; delete it and calibrate again") from None


def save_calibration(config: RunConfig, environment: dict[str, Any], **parts: Probe | Sweep) -> Path:
    """Put a probe or a sweep into the file of this config's identity; the other part stays."""
    identity = identity_of_config(config)
    path = calibration_path(config, identity)
    before = read_calibration(path) if path.is_file() else Calibration(identity, environment)
    here = CalibrationKey(environment["device"], config.sampler.engine, environment["threads"])
    places = {**before.places, **dict.fromkeys(parts, here)}
    write_json_atomic(path, asdict(replace(before, environment=environment, places=places, **parts)))
    return path


def place_of(config: RunConfig) -> CalibrationKey:
    """What this config runs on, here and now."""
    import torch

    from stalewise.models.loading import device_name

    device = device_name(config.model.device)
    return CalibrationKey(device, config.sampler.engine, config.model.threads or torch.get_num_threads())


def find_calibration(config: RunConfig) -> Calibration | None:
    """The calibration of a config: the file that it names, else the one in `calibrations` of the same identity.

    A named file of another model, task, optimizer, batch, objective or sampler is a CalibrationError that says which.
    """
    if not config.plan.calibration and not any(calibration_directory(config).glob("*.json")):
        return None  # without a look at the model, which may be large, far away or gone
    identity = identity_of_config(config)
    if config.plan.calibration:
        named = read_calibration(Path(config.plan.calibration).expanduser())
        if differences := identity.differences(named.identity):
            raise CalibrationError(
                f"plan.calibration {config.plan.calibration} is for something else ({'; '.join(differences[:4])}): "
                "name the one that fits, or none"
            )
        return named
    path = calibration_path(config, identity)
    return read_calibration(path) if path.is_file() else None
