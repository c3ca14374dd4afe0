"""Planning for a cluster that is not there: rates from a TOML file, schedules compared on paper and by simulation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from stalewise.config import read_toml
from stalewise.errors import ConfigError, nearest
from stalewise.planning.cluster.hardware import Cluster, in_turns
from stalewise.planning.cluster.makespan import Outcome, best_splits, predict
from stalewise.planning.cluster.simulation import simulate


@dataclass(frozen=True, slots=True)
class Comparison:
    """One schedule by formula and, where that was asked for, as it went in a simulation."""

    formula: Outcome
    simulated: Outcome | None


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """All schedules on one cluster; those that generate beside learning have the split of devices that ends first."""

    cluster: Cluster
    schedules: list[Comparison]

    def speed_up(self, name: str, over: str = "synchronous", simulated: bool = False) -> float:
        """How many times sooner one schedule ends than another."""
        return self._outcome(over, simulated).seconds / self._outcome(name, simulated).seconds

    def generation_speed_up(self, simulated: bool = False) -> float:
        """How many times less time generating takes in the staged schedule than in the synchronous one."""
        many, few = (self._outcome(name, simulated) for name in ("synchronous", "staged"))
        return many.generate_seconds / few.generate_seconds

    def _outcome(self, name: str, simulated: bool) -> Outcome:
        found = next(one for one in self.schedules if one.formula.name == name)
        if not simulated:
            return found.formula
        assert found.simulated is not None, "nothing was simulated"
        return found.simulated

    def record(self) -> dict[str, Any]:
        """All of it for JSON."""
        return {
            **asdict(self),
            "staged_over_synchronous": self.speed_up("staged"),
            "generation_staged_over_synchronous": self.generation_speed_up(),
        }


def plan_cluster(cluster: Cluster, *, simulated: bool = False, seed: int = 0) -> ClusterPlan:
    """Compare the synchronous, the staged and, on two devices or more, the pipelined schedules."""
    arrangements = [*in_turns(cluster), *best_splits(cluster)]
    return ClusterPlan(
        cluster,
        [
            Comparison(predict(cluster, one), simulate(cluster, one, seed) if simulated else None)
            for one in arrangements
        ],
    )


def load_cluster(path: str | Path, overrides: Mapping[str, Any] | None = None) -> Cluster:
    """Read the rates of a cluster from a TOML file; every problem is a ConfigError that names key and value."""
    if not Path(path).is_file():
        raise ConfigError(f"{path} does not exist: docs/cluster.md says what belongs into such a file")
    record = read_toml(path, overrides)
    try:
        return TypeAdapter(Cluster).validate_python(record)
    except ValidationError as error:
        raise ConfigError(f"{path}: " + "; ".join(map(_explain, error.errors()))) from None


def _explain(problem: Any) -> str:
    *tables, key = problem["loc"] or ("the whole",)
    place = ".".join(map(str, [*tables, key]))
    if problem["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        kind: Any = get_type_hints(Cluster)[str(tables[0])] if tables else Cluster
        known = [one.name for one in fields(kind)] if is_dataclass(kind) else []
        return f"{place} is no setting; {nearest(str(key), known)}"
    if problem["type"] == "missing":
        return f"{place} is missing"
    if problem["type"] == "value_error":
        return f"{place}: {problem['msg'].removeprefix('Value error, ')}"
    return f"{place} is {problem['input']!r}: {problem['msg'][0].lower()}{problem['msg'][1:]}"
