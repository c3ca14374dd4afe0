"""Experiment definitions: a claim, the arms that test it in each setting, and the jobs of these arms.

Read from `experiments/NAME/experiment.toml`; `experiments/bases.toml` holds tables that experiments share.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from stalewise.config import RunConfig, make_config, read_toml
from stalewise.config.sections import Section
from stalewise.errors import ConfigError, nearest

SETTINGS = ("lab", "real")
FILE, BASES = "experiment.toml", "bases.toml"
FIRST_SEED = 1  # seed 0 was used to choose settings, so it is in no result
WARM = "warm:"  # prefix of model.path for a policy made by a warm start, as in warm:chains

Kind = Literal["train", "learn", "evaluate", "bias", "warm"]


class Source(Section):
    """Where the claim was published."""

    paper: str = Field(description="Whose claim it is.")
    place: str = Field(description="Figure, table or section.")
    says: str = Field(description="What is said there, with its number.")


class ArmTable(Section):
    """One arm, or one per combination of its axes' values."""

    name: str = Field(description="Name in figures; {axis} is replaced by the axis' value.")
    kind: Literal["train", "learn", "evaluate", "bias"] = Field(default="train", description="What its jobs do.")
    of: str = Field(default="", description="For learn and evaluate: the arm whose rollouts or policy is used.")
    seeds: int | None = Field(default=None, ge=1, description="Number of seeds, if not that of the setting.")
    late: bool = Field(default=False, description="Run its jobs after other arms of the same seed.")
    axes: dict[str, dict[str, dict[str, Any]]] = Field(
        default_factory=dict, description="Axis → value → settings; one arm per combination."
    )
    options: dict[str, Any] = Field(default_factory=dict, description="Options of a job that is not a training run.")
    set: dict[str, Any] = Field(default_factory=dict, description="Settings of the run.")

    @model_validator(mode="after")
    def _no_contradiction(self) -> Self:
        if (self.kind in ("learn", "evaluate")) != bool(self.of):
            raise ValueError(f"arm {self.name}: `of` goes with the kinds learn and evaluate, and only with them")
        return self


class SettingTable(Section):
    """How the claim is tested in one setting."""

    base: str = Field(description="Table of experiments/bases.toml that every run starts from.")
    seeds: int = Field(ge=1, description="Number of seeds of every arm, from seed 1.")
    task: str = Field(default="", description="Description of the task.")
    set: dict[str, Any] = Field(default_factory=dict, description="Settings of every run; override the base.")
    arms: list[ArmTable] = Field(min_length=1)


class ExperimentTable(Section):
    """Content of experiment.toml."""

    number: int = Field(ge=1)
    title: str
    claim: str
    sources: list[Source] = Field(min_length=1)
    verdict: str = Field(description="Function of `experiments.lab.verdicts`; its docstring is the rule.")
    metrics: list[str] = Field(default_factory=list, description="Metrics whose curves are kept.")
    words: str = Field(default="", description="Further notes for the reader.")
    reading: str = Field(default="", description="Interpretation, written after the results.")
    lab: SettingTable | None = None
    real: SettingTable | None = None


@dataclass(frozen=True, slots=True)
class Arm:
    """One arm of an experiment: its name, axis values and settings."""

    name: str
    kind: Kind
    axes: dict[str, str]
    settings: dict[str, Any]
    of: str
    options: dict[str, Any]
    seeds: int
    late: bool


@dataclass(frozen=True, slots=True)
class Job:
    """One unit of work with a result. Equal jobs of different experiments have the same key."""

    key: str
    kind: Kind
    config: dict[str, Any]  # of the run, without name and directory
    needs: tuple[str, ...] = ()  # keys of jobs that must be done first
    options: dict[str, Any] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """The job as sent to a worker."""
        return {"key": self.key, "kind": self.kind, "config": self.config, "needs": self.needs, "options": self.options}


@dataclass(frozen=True, slots=True)
class Experiment:
    """An experiment as defined by its file."""

    name: str
    directory: Path
    table: ExperimentTable
    bases: dict[str, Any]

    @property
    def settings(self) -> list[str]:
        """Names of its settings, lab first."""
        return [name for name in SETTINGS if getattr(self.table, name) is not None]

    def setting(self, name: str) -> SettingTable:
        """One setting; a ConfigError if it is not defined."""
        found = getattr(self.table, name)
        if found is None:
            raise ConfigError(f"experiment {self.name} has no setting {name}; it has {', '.join(self.settings)}")
        return found

    def arms(self, setting: str) -> list[Arm]:
        """All arms in file order."""
        table = self.setting(setting)
        base = merged(self._base(table.base), table.set)
        return [arm for rows in table.arms for arm in _expand(rows, base, table.seeds)]

    def _base(self, name: str) -> dict[str, Any]:
        if name not in self.bases:
            raise ConfigError(f"{self.directory / FILE}: base {name} is not in {BASES}; {nearest(name, self.bases)}")
        return self.bases[name]

    def jobs(self, setting: str, seeds: int | None = None) -> Iterator[tuple[Arm, int, list[Job]]]:
        """For each arm and seed its job, preceded by the jobs it needs."""
        arms = {arm.name: arm for arm in self.arms(setting)}
        if len(arms) < len(self.arms(setting)):
            raise ConfigError(f"{self.directory / FILE}: two arms of the setting {setting} have the same name")
        for arm in arms.values():
            if arm.of and arm.of not in arms:
                raise ConfigError(f"{self.directory / FILE}: arm {arm.name} is of {arm.of}; {nearest(arm.of, arms)}")
            for seed in range(FIRST_SEED, FIRST_SEED + min(arm.seeds, seeds or arm.seeds)):
                yield arm, seed, self._chain(arm, seed, arms)

    def _chain(self, arm: Arm, seed: int, arms: Mapping[str, Arm]) -> list[Job]:
        before = self._chain(arms[arm.of], seed, arms) if arm.of else []
        config = checked({**arm.settings, "seed": seed}, f"{self.directory / FILE}, arm {arm.name}")
        path = str(config["model"]["path"])
        if path.startswith(WARM):
            before = [warm_job(path.removeprefix(WARM), self.bases), *before]
        needs = tuple(dict.fromkeys(job.key for job in before))
        content = {"kind": arm.kind, "config": config, "options": arm.options, "needs": needs}
        return [*before, Job(digest(content), arm.kind, config, needs, arm.options)]


def warm_job(name: str, bases: Mapping[str, Any]) -> Job:
    """The supervised warm start of this name in `bases.toml`."""
    warm = bases.get("warm", {})
    if name not in warm:
        raise ConfigError(f"model.path {WARM}{name}: no such warm start in {BASES}; {nearest(name, warm)}")
    return Job(digest({"kind": "warm", "options": warm[name]}), "warm", {}, (), {"name": name, **warm[name]})


def checked(record: Mapping[str, Any], source: str) -> dict[str, Any]:
    """A run's settings with defaults, restricted to those that identify it."""
    return make_config(record, source=source).identity() | {"learner": dict(record.get("learner", {}))}


def run_config(job_config: Mapping[str, Any], *, name: str, runs: Path, model: str | None = None) -> RunConfig:
    """Config of a job's run; `model` is the path of its warm start."""
    record = {**job_config, "name": name, "runs": str(runs)}
    if model is not None:
        record["model"] = {**record["model"], "path": model}
    return make_config(record, source=name)


def digest(content: Mapping[str, Any]) -> str:
    """A short hash of some content, the same on every machine."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested tables; values of the second win. An empty table in the second clears nothing.

    >>> merged({"a": {"x": 1, "y": 2}}, {"a": {"y": 3}, "b": 4})
    {'a': {'x': 1, 'y': 3}, 'b': 4}
    """
    found = dict(base)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(found.get(key), Mapping)
        found[key] = merged(found[key], value) if both else value
    return found


def _expand(table: ArmTable, base: Mapping[str, Any], seeds: int) -> Iterator[Arm]:
    settings = merged(base, table.set)
    for values in product(*(axis.items() for axis in table.axes.values())):
        place = dict(zip(table.axes, (name for name, _ in values), strict=True))
        whole = settings
        for _, over in values:
            whole = merged(whole, over)
        name, of = (_filled(text, place) for text in (table.name, table.of))
        yield Arm(name, table.kind, place, whole, of, table.options, table.seeds or seeds, table.late)


def _filled(template: str, place: Mapping[str, str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda match: place.get(match[1], match[0]), template)


def load_experiment(directory: Path) -> Experiment:
    """Read one experiment; any problem with its file is a ConfigError."""
    path = directory / FILE
    bases = directory.parent / BASES
    try:
        table = ExperimentTable.model_validate(read_toml(path))
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    return Experiment(directory.name, directory, table, read_toml(bases) if bases.is_file() else {})


def load_experiments(root: Path, names: Sequence[str] = ()) -> list[Experiment]:
    """Experiments under a directory, all or by name, ordered by number."""
    found = {path.parent.name: path.parent for path in sorted(root.glob(f"*/{FILE}"))}
    if not found:
        raise ConfigError(f"{root} holds no experiment: run from a checkout of stalewise, or pass --experiments DIR")
    for name in names:
        if name not in found:
            raise ConfigError(f"there is no experiment {name}; {nearest(name, found)}")
    chosen = [load_experiment(found[name]) for name in (names or found)]
    return sorted(chosen, key=lambda experiment: experiment.table.number)
