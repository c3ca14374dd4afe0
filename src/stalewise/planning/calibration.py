"""The calibration file: results of a probe and a sweep, and the settings that they are valid for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from stalewise.config import RunConfig
from stalewise.config.run_directory import flatten
from stalewise.config.sections import ModelSection
from stalewise.errors import CalibrationError
from stalewise.models import resolve_model
from stalewise.staleness.law import Fit, Observation
from stalewise.store.atomic import check_format, read_json, sha256_file, write_json_atomic

FORMAT = "stalewise.calibration/1"
SAMPLING = ("temperature", "top_p", "top_k", "max_new_tokens", "weights", "foreign")
# Settings that some calibrations do not have yet: those were made with the defaults.
NEWER = [
    ("optimizer", "moments"),
    ("task", "difficulty"),
    ("task", "pass_rates"),
    ("task", "by_pass_rate"),
    ("batch", "without_variance"),
    ("batch", "refill_limit"),
    ("objective", "kl"),
    ("objective", "kl_estimator"),
    ("objective", "kl_in"),
    ("objective", "reference"),
    ("objective", "entropy_bonus"),
    ("objective", "reward_weights"),
    ("objective", "overlong_tokens"),
    ("objective", "overlong_penalty"),
    ("objective", "policy_temperature"),
]
PIECES = 16  # of each weights file that the fingerprint reads; training changes all of them
PIECE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class CalibrationIdentity:
    """Settings by dotted key: model, task, optimizer, batch, objective and sampler; not S, T, η and the seed."""

    settings: Mapping[str, Any]

    def differences(self, other: CalibrationIdentity) -> list[str]:
        """Settings that differ, each with this value and the other's: `batch.prompts is 32 and not 64`."""
        ours, theirs = self.settings, other.settings
        return [
            f"{key} is {ours.get(key)!r} and not {theirs.get(key)!r}"
            for key in {**ours, **theirs}
            if ours.get(key) != theirs.get(key)
        ]

    @property
    def file_name(self) -> str:
        """Model, task and objective, and eight hexadecimal digits of the hash of all settings."""
        names = dict.fromkeys(str(self.settings[key]) for key in ("model.path", "task.name", "objective.name"))
        slug = "".join(char if char.isalnum() or char in "-_" else "_" for char in "-".join(names))
        digest = hashlib.sha256(json.dumps(self.settings, sort_keys=True).encode()).hexdigest()[:8]
        return f"{slug}-{digest}.json"


def identity_of_config(config: RunConfig) -> CalibrationIdentity:
    """The identity of what a config trains. Reads the model's files, or asks the hub for its revision."""
    record = config.model_dump(mode="json")
    source = resolve_model(config.model.path, config.task.name)
    # A directory is identified by its files, wherever it is.
    name = Path(source).name if Path(source).is_dir() else source
    model = {"path": name, "fingerprint": fingerprint(source), "precision": config.model.precision}
    if config.model.adapter:
        model["adapter"] = fingerprint_of_files(Path(config.model.adapter).expanduser())
    kept = {key: record[key] for key in ("model", "task", "optimizer", "batch", "objective", "sampler")}
    kept["model"] = {**model, "lora": record["model"]["lora"]}
    del kept["optimizer"]["learning_rate"]
    del kept["task"]["max_unscored"]  # it stops a run, and changes nothing before that
    defaults = type(config)().model_dump(mode="json")
    for table, key in NEWER:
        if kept[table][key] == defaults[table][key]:
            del kept[table][key]
    if config.task.difficulty:  # identified by its content, like the model
        kept["task"]["difficulty"] = sha256_file(config.difficulty_path)[:16]
    if config.objective.reference not in ("initial", "base"):
        kept["objective"]["reference"] = fingerprint(resolve_model(config.objective.reference, config.task.name))
    kept["sampler"] = {key: record["sampler"][key] for key in SAMPLING}
    return CalibrationIdentity(flatten(kept))


def fingerprint(source: str) -> str:
    """Distinguishes models of the same name: by their files, or by their revision on a hub."""
    if Path(source).is_dir():
        return fingerprint_of_files(Path(source))
    from transformers import AutoConfig

    from stalewise.models import loading_error

    try:
        described = AutoConfig.from_pretrained(source, trust_remote_code=False)
        return str(described._commit_hash)  # pyright: ignore[reportPrivateUsage]
    except (OSError, ValueError) as error:
        raise loading_error(source, "has no config that transformers can load", error) from error


def fingerprint_of_files(directory: Path) -> str:
    """SHA-256 of configs and of names, sizes and evenly spread pieces of the weights: fast for any size."""
    digest = hashlib.sha256()
    for path in sorted([*directory.glob("*config.json"), *directory.glob("*.safetensors")]):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with open(path, "rb") as file:
            for piece in range(PIECES):
                file.seek(max(0, size - PIECE_BYTES) * piece // (PIECES - 1))
                digest.update(file.read(PIECE_BYTES))
    return digest.hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class UpdateNormPhase:
    """Mean and standard deviation of G = ‖Δθ‖/η over consecutive updates, counted from 1."""

    first: int
    last: int
    mean: float
    spread: float


@dataclass(frozen=True, slots=True)
class Probe:
    """Measurements of a short run. NaN or None if there was nothing to measure."""

    updates: int
    phases: list[UpdateNormPhase]
    reward_mean: float
    reward_variance_within: float  # mean over groups of the variance within a group
    reward_variance_between: float  # variance of the groups' means
    teaching_share: float  # groups whose rewards differ
    tokens_per_second: float  # of generation
    generation_sizes: tuple[int, int]  # rollouts of the smallest and the largest generation batch that was timed
    seconds_per_generation: float  # fixed cost of a generation: mostly loading the policy
    seconds_per_rollout: float
    seconds_per_update: float
    tokens_per_update: float
    seconds_per_switch: float  # from generating to learning and back: trainer and checkpoint
    seconds_to_start: float
    seconds_per_evaluated_response: float
    peak_memory_bytes: int | None
    bytes_per_rollout: float
    bytes_per_checkpoint: int


@dataclass(frozen=True, slots=True)
class SweepRun:
    """One run of a sweep and its outcome. `update_norm_per_lr` is drift per update and unit of η until the collapse."""

    staleness: int
    learning_rate: float
    updates: int
    seed: int
    collapsed_at: int | None
    update_norm_per_lr: float
    best_accuracy: float
    last_accuracy: float
    directory: str
    resolution: int = 1  # updates between the last evaluation before the collapse and the collapse

    @property
    def key(self) -> tuple[int, float, int, int]:
        """Identifies the run within a sweep."""
        return self.staleness, self.learning_rate, self.updates, self.seed

    @property
    def observation(self) -> Observation:
        """The observation to which the law is fitted."""
        return Observation(**{field.name: getattr(self, field.name) for field in fields(Observation)})


@dataclass(frozen=True, slots=True)
class CollapseRule:
    """How a collapse is detected in held-out accuracy, in numbers of evaluations; see `CollapseDetector`."""

    evaluations: int = 32
    smoothing: int = 2
    window: int = 4
    fraction: float = 0.5
    floor: float = 0.0


@dataclass(frozen=True, slots=True)
class Sweep:
    """Result of a sweep. `fit` is None if there were too few runs; `update_norm_per_lr` is the G of a stable run."""

    rule: CollapseRule
    runs: list[SweepRun]
    update_norm_per_lr: float
    fit: Fit | None
    problem: str = ""  # why there is no fit


@dataclass(frozen=True, slots=True)
class MeasuredOn:
    """The hardware and engine of a probe or a sweep."""

    device: str
    engine: str
    threads: int  # matters on a CPU only

    def __str__(self) -> str:
        device = f"{self.device} with {self.threads} threads" if self.device == "cpu" else self.device
        return f"{device} and the engine {self.engine}"

    def is_as_fast_as(self, other: MeasuredOn) -> bool:
        """Whether times measured on one hold on the other, judging by names; `auto` picks one engine on a device."""
        same = self.device == other.device and (self.engine == other.engine or "auto" in (self.engine, other.engine))
        return same and (self.device != "cpu" or self.threads == other.threads)


@dataclass(frozen=True, slots=True)
class Calibration:
    """Content of a calibration file. The probe or the sweep may be missing."""

    identity: CalibrationIdentity
    environment: dict[str, Any]
    probe: Probe | None = None
    sweep: Sweep | None = None
    format: str = FORMAT
    places: dict[str, MeasuredOn] = field(default_factory=dict)  # by "probe" and "sweep"


def calibration_path(runs: str, identity: CalibrationIdentity) -> Path:
    """File of a calibration below the directory of runs."""
    return Path(runs) / "calibrations" / identity.file_name


def read_calibration(path: str | Path) -> Calibration:
    """Read a calibration file; a missing or corrupt file, or another format, is a CalibrationError."""
    if not Path(path).is_file():
        raise CalibrationError(f"the calibration file {path} does not exist: `stalewise sweep` makes one")
    record = read_json(path)
    check_format(path, record.get("format"), FORMAT, error=CalibrationError)
    try:
        return TypeAdapter(Calibration).validate_python(record)
    except ValidationError as error:
        first = error.errors()[0]
        problem = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise CalibrationError(f"{path} is corrupt: {problem}; delete it and calibrate again") from None


def earlier_calibration(runs: str, identity: CalibrationIdentity) -> Calibration | None:
    """The calibration of this identity below the directory of runs, if there is one."""
    path = calibration_path(runs, identity)
    return read_calibration(path) if path.is_file() else None


def save_calibration(
    config: RunConfig, environment: dict[str, Any], *, engine: str | None = None, **parts: Probe | Sweep
) -> Path:
    """Write a probe or a sweep to the file of this config's identity; the other part stays.

    `engine` is the one that ran, where the config's is `auto`.
    """
    identity = identity_of_config(config)
    before = earlier_calibration(config.runs, identity) or Calibration(identity, environment)
    here = MeasuredOn(environment["device"], engine or config.sampler.engine, environment["threads"])
    places = {**before.places, **dict.fromkeys(parts, here)}
    path = calibration_path(config.runs, identity)
    write_json_atomic(path, asdict(replace(before, environment=environment, places=places, **parts)))
    return path


def measured_here(model: ModelSection, engine: str) -> MeasuredOn:
    """The hardware and engine with which these settings run on this machine."""
    import torch

    from stalewise.models.loading import device_name

    return MeasuredOn(device_name(model.device), engine, model.threads or torch.get_num_threads())


def find_calibration(config: RunConfig) -> Calibration | None:
    """The calibration of a config: the file it names, which must have its identity, or the one of it below `runs`."""
    named = config.plan.calibration
    if not named and not any((Path(config.runs) / "calibrations").glob("*.json")):
        return None  # without reading the model, which may be large, remote or gone
    identity = identity_of_config(config)
    if not named:
        return earlier_calibration(config.runs, identity)
    calibration = read_calibration(Path(named).expanduser())
    if differences := identity.differences(calibration.identity):
        raise CalibrationError(
            f"plan.calibration {named} is for other settings ({'; '.join(differences[:4])}): name a calibration of "
            "these settings, or none"
        )
    return calibration
