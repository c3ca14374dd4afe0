"""Reads the rates of a cluster from a TOML file, and compares schedules by formula and by simulation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from stalewise.config import read_toml
from stalewise.errors import ConfigError, nearest
from stalewise.planning.cluster_hardware import Cluster, in_turns
from stalewise.planning.cluster_simulation import ScheduleOutcome, best_splits, predict, simulate


@dataclass(frozen=True, slots=True)
class ScheduleComparison:
    """One schedule by formula and, if requested, by simulation."""

    formula: ScheduleOutcome
    simulated: ScheduleOutcome | None


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """All schedules on one cluster; those that generate beside learning have their fastest split of devices."""

    cluster: Cluster
    schedules: list[ScheduleComparison]

    def speed_up(self, name: str, over: str = "synchronous", simulated: bool = False) -> float:
        """Time of the schedule `over` divided by that of `name`."""
        return self._outcome(over, simulated).seconds / self._outcome(name, simulated).seconds

    def generation_speed_up(self, simulated: bool = False) -> float:
        """Generation time of the synchronous schedule divided by that of the staged one."""
        many, few = (self._outcome(name, simulated) for name in ("synchronous", "staged"))
        return many.generate_seconds / few.generate_seconds

    def _outcome(self, name: str, simulated: bool) -> ScheduleOutcome:
        schedule = next(schedule for schedule in self.schedules if schedule.formula.name == name)
        outcome = schedule.simulated if simulated else schedule.formula
        assert outcome is not None, "nothing was simulated"
        return outcome

    def record(self) -> dict[str, Any]:
        """The plan as JSON values."""
        return {
            **asdict(self),
            "staged_over_synchronous": self.speed_up("staged"),
            "generation_staged_over_synchronous": self.generation_speed_up(),
        }


def plan_cluster(cluster: Cluster, *, simulated: bool = False, seed: int = 0) -> ClusterPlan:
    """Compare the synchronous and staged schedules and, on two devices or more, the pipelined ones."""
    ways = [*in_turns(cluster), *best_splits(cluster)]
    outcomes = [(predict(cluster, way), simulate(cluster, way, seed) if simulated else None) for way in ways]
    return ClusterPlan(cluster, [ScheduleComparison(*pair) for pair in outcomes])


def load_cluster(path: str | Path, overrides: Mapping[str, Any] | None = None) -> Cluster:
    """Read the rates of a cluster from a TOML file; any problem is a ConfigError that names key and value."""
    if not Path(path).is_file():
        raise ConfigError(f"{path} does not exist: docs/cluster.md describes the file")
    record = read_toml(path, overrides)
    try:
        return TypeAdapter(Cluster).validate_python(record)
    except ValidationError as error:
        raise ConfigError(f"{path}: " + "; ".join(map(_explain, error.errors()))) from None


def _explain(problem: Any) -> str:
    key = ".".join(map(str, problem["loc"])) or "the whole"
    message = problem["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    if problem["type"] == "unexpected_keyword_argument":
        *tables, last = problem["loc"]
        kind: Any = get_type_hints(Cluster)[tables[0]] if tables else Cluster
        return f"{key} is not a setting; {nearest(last, [field.name for field in fields(kind)])}"
    is_input_bad = problem["type"] not in ("missing", "missing_argument", "value_error")
    return f"{key} is {problem['input']!r}: {message}" if is_input_bad else f"{key}: {message}"
