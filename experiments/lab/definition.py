"""Experiment definitions: a claim, and the arms that test it in each setting.

Read from `experiments/NAME/experiment.toml`; `experiments/bases.toml` holds tables that experiments share.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from stalewise.config import RunConfig, make_config, read_toml
from stalewise.config.sections import Section
from stalewise.errors import ConfigError, nearest

SETTINGS = ("lab", "real")
FILE, BASES = "experiment.toml", "bases.toml"
HALF = 0.5  # of its best evaluation: a run that ends below has collapsed
# What cuts a run down to a few seconds, to try the whole path from definitions to pages. 48 updates suit every lag.
SMOKE: dict[str, Any] = {
    "schedule": {"updates": 48},
    "batch": {"prompts": 6, "group_size": 4},
    "evaluation": {"every": 8, "prompts": 8, "samples": 2},
}
POLICY = "policy:"  # prefix of a path: the last policy of a run of this name in bases.toml

Kind = Literal["train", "evaluate", "policy"]


class Source(Section):
    """Where the claim was published."""

    paper: str = Field(description="Whose claim it is.")
    place: str = Field(description="Figure, table or section.")
    says: str = Field(description="What is said there, with its number.")


class ArmTable(Section):
    """One arm, or one per combination of its axes' values."""

    name: str = Field(description="Name in figures; {axis} is replaced by the axis' value.")
    kind: Literal["train", "evaluate"] = Field(default="train", description="A run, or an evaluation of its start.")
    rate: str = Field(
        default="tuned",
        description="Learning rate: tuned; of ARM: as tuned for that arm; hot of ARM: the smallest at which all tuning "
        "seeds of that arm collapse; set: that of its settings; tuning: all of the grid, for others, and not judged.",
    )
    axes: dict[str, dict[str, dict[str, Any]]] = Field(
        default_factory=dict, description="Axis → value → settings; one arm per combination."
    )
    options: dict[str, Any] = Field(default_factory=dict, description="pass_samples, raw_logprobs: see run_job.")
    set: dict[str, Any] = Field(default_factory=dict, description="Settings of the run.")


class SettingTable(Section):
    """How the claim is tested in one setting."""

    base: str = Field(description="Table of experiments/bases.toml that every run starts from.")
    task: str = Field(description="Description of the task.")
    rates: list[float] = Field(default_factory=list, description="Learning rates that every tuned arm is tried at.")
    seeds: tuple[int, int] = Field(strict=False, description="Fewest and most judged seeds of each arm.")
    verdict: str = Field(default="", description="Rule of this setting, if it is not that of the experiment.")
    hot: float = Field(default=HALF, gt=0, le=HALF, description="A rate is hot where both seeds end below this share.")
    margin: float = Field(default=0.03, gt=0, description="Difference that the number of seeds must find.")
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
    options: dict[str, Any]
    rate: str

    @property
    def is_tuned(self) -> bool:
        """Whether it is tried at every learning rate of the grid."""
        return self.rate in ("tuned", "tuning") and self.kind == "train"

    @property
    def is_judged(self) -> bool:
        """Whether it has seeds besides those of tuning."""
        return self.rate != "tuning"


@dataclass(frozen=True, slots=True)
class Job:
    """One unit of work with a result. Equal jobs of different experiments have the same key."""

    key: str
    kind: Kind
    config: dict[str, Any]  # of the run, without name and directory
    needs: tuple[str, ...] = ()  # keys of policies that must be made first
    options: dict[str, Any] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """The job as sent to a worker."""
        return {"key": self.key, "kind": self.kind, "config": self.config, "needs": self.needs, "options": self.options}


@dataclass(frozen=True, slots=True, eq=False)  # hashed by identity
class Experiment:
    """An experiment as defined by its file."""

    name: str
    directory: Path
    table: ExperimentTable
    bases: dict[str, Any]
    is_smoke: bool = False  # whether its runs are cut down to a few seconds

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

    def rule(self, setting: str) -> str:
        """Name of the rule that decides the verdict in a setting."""
        return self.setting(setting).verdict or self.table.verdict

    def arms(self, setting: str) -> dict[str, Arm]:
        """All arms by name, in file order."""
        table = self.setting(setting)
        if table.base not in self.bases:
            hint = nearest(table.base, self.bases)
            raise ConfigError(f"{self.directory / FILE}: base {table.base} is not in {BASES}; {hint}")
        base = merged(self.bases[table.base], table.set)
        listed = [arm for rows in table.arms for arm in _expand(rows, base)]
        arms = {arm.name: arm for arm in listed}
        if len(arms) < len(listed):
            raise ConfigError(f"{self.directory / FILE}: two arms of the setting {setting} have the same name")
        for arm in listed:
            named = arm.rate.removeprefix("hot of ").removeprefix("of ")
            if named not in ("tuned", "set", "tuning") and not (
                named in arms and arms[named].is_tuned and named != arm.rate
            ):
                hint = nearest(named, [name for name, one in arms.items() if one.is_tuned])
                raise ConfigError(f"{self.directory / FILE}: arm {arm.name} has the rate {arm.rate!r}; {hint}")
        if any(arm.is_tuned for arm in listed) and len(table.rates) < 3:
            raise ConfigError(f"{self.directory / FILE}: {setting}.rates needs three values or more: an inner one wins")
        return arms

    def job(self, arm: Arm, seed: int, rate: float | None, *, judged: bool = True) -> list[Job]:
        """The job of an arm, preceded by the policies it needs. Options are of judged runs alone."""
        return _jobs(self, arm.name, json.dumps(arm.settings), arm.kind, json.dumps(arm.options), seed, rate, judged)


@cache
def _jobs(
    experiment: Experiment,
    name: str,
    settings: str,
    kind: Kind,
    options: str,
    seed: int,
    rate: float | None,
    judged: bool,
) -> list[Job]:
    """Cached: a plan is made again after every job."""
    record = {**json.loads(settings), "seed": seed}
    if rate is not None:
        record = merged(record, {"optimizer": {"learning_rate": rate}})
    chosen: dict[str, Any] = {
        key: value for key, value in json.loads(options).items() if judged or key != "pass_samples"
    }
    if experiment.is_smoke:
        record = merged(record, SMOKE)
        chosen |= {"pass_samples": 4} if "pass_samples" in chosen else {}
    before: list[Job] = []
    path = str(record.get("sampler", {}).get("foreign", {}).get("path", ""))
    if path.startswith(POLICY):
        before = [policy_job(path.removeprefix(POLICY), experiment)]
    config = checked(record, f"{experiment.directory / FILE}, arm {name}")
    needs = tuple(job.key for job in before)
    content = {"kind": kind, "config": config, "options": chosen, "needs": needs}
    return [*before, Job(digest(content), kind, config, needs, chosen)]


def policy_job(name: str, experiment: Experiment) -> Job:
    """The run of this name in `bases.toml` whose last policy others use."""
    bases, found = experiment.bases, experiment.bases.get("policy", {})
    if name not in found:
        raise ConfigError(f"{POLICY}{name}: no such policy in {BASES}; {nearest(name, found)}")
    record = merged(bases[found[name]["base"]], found[name]["set"])
    config = checked(merged(record, SMOKE) if experiment.is_smoke else record, f"{BASES}, policy {name}")
    return Job(digest({"kind": "policy", "config": config}), "policy", config)


def checked(record: Mapping[str, Any], source: str) -> dict[str, Any]:
    """A run's settings with defaults, restricted to those that identify it."""
    return make_config(record, source=source).identity() | {"learner": dict(record.get("learner", {}))}


def run_config(job_config: Mapping[str, Any], *, name: str, runs: Path, foreign: str | None = None) -> RunConfig:
    """Config of a job's run; `foreign` is the path of the second policy."""
    record = {**job_config, "name": name, "runs": str(runs)}
    if foreign is not None:
        record = merged(record, {"sampler": {"foreign": {"path": foreign}}})
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


def _expand(table: ArmTable, base: Mapping[str, Any]) -> Iterator[Arm]:
    settings = merged(base, table.set)
    for values in product(*(axis.items() for axis in table.axes.values())):
        place = dict(zip(table.axes, (name for name, _ in values), strict=True))
        whole, options = settings, dict(table.options)
        for _, over in values:
            options |= over.get("options", {})
            whole = merged(whole, {key: value for key, value in over.items() if key != "options"})
        yield Arm(_filled(table.name, place), table.kind, place, whole, options, _filled(table.rate, place))


def _filled(template: str, place: Mapping[str, str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda match: place.get(match[1], match[0]), template)


def load_experiment(directory: Path, *, smoke: bool = False) -> Experiment:
    """Read one experiment; any problem with its file is a ConfigError."""
    path = directory / FILE
    bases = directory.parent / BASES
    try:
        table = ExperimentTable.model_validate(read_toml(path))
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    return Experiment(directory.name, directory, table, read_toml(bases) if bases.is_file() else {}, smoke)


def load_experiments(root: Path, names: Sequence[str] = (), *, smoke: bool = False) -> list[Experiment]:
    """Experiments under a directory, all or by name, ordered by number."""
    found = {path.parent.name: path.parent for path in sorted(root.glob(f"*/{FILE}"))}
    if not found:
        raise ConfigError(f"{root} holds no experiment: run from a checkout of stalewise, or pass --experiments DIR")
    for name in names:
        if name not in found:
            raise ConfigError(f"there is no experiment {name}; {nearest(name, found)}")
    chosen = [load_experiment(found[name], smoke=smoke) for name in (names or found)]
    return sorted(chosen, key=lambda experiment: experiment.table.number)
