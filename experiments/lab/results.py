"""Kept results of an experiment in one setting: one JSON file, small enough for the repository."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from experiments.lab.definition import Experiment
from experiments.lab.downsample import POINTS, downsample_record
from experiments.lab.job_pool import failed_path, kept_path

from stalewise.errors import StoreError
from stalewise.store.atomic import read_json, write_atomic

FORMAT = "stalewise.results/1"
LARGEST_BYTES = 300_000
CONFIDENCE = 0.95


def results_name(setting: str) -> str:
    """File name of a setting's results."""
    return f"results-{setting}.json"


def collect(experiment: Experiment, setting: str, out: Path, machine: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Results of the finished jobs, with as many points per curve as the size limit allows."""
    arms: dict[str, dict[str, Any]] = {}
    problems: dict[str, str] = {}
    planned = 0
    for arm, seed, chain in experiment.jobs(setting):
        entry = arms.setdefault(arm.name, {"name": arm.name, "kind": arm.kind, "axes": arm.axes, "seeds": {}})
        key = chain[-1].key
        planned += 1
        if kept_path(out, key).is_file():
            entry["seeds"][str(seed)] = read_json(kept_path(out, key))
        elif failed_path(out, key).is_file():
            problems[f"{arm.name}, seed {seed}"] = read_json(failed_path(out, key))["problem"]
    done = sum(len(entry["seeds"]) for entry in arms.values())
    head = {
        "format": FORMAT,
        "experiment": experiment.name,
        "setting": setting,
        "machine": [dict(one) for one in machine],
        "planned": planned,
        "done": done,
        "failed": problems,
    }
    points, metrics = POINTS, experiment.table.metrics
    while True:
        thin = [
            {**entry, "seeds": {seed: downsample_record(one, metrics, points) for seed, one in entry["seeds"].items()}}
            for entry in arms.values()
        ]
        record = {**head, "arms": thin}
        if points <= 4 or len(text_of(record)) <= LARGEST_BYTES:
            return record
        points //= 2


def text_of(record: Mapping[str, Any]) -> str:
    """File content, with one line per seed of an arm so that diffs are readable."""
    head = {key: value for key, value in record.items() if key != "arms"}
    lines = [json.dumps(head, ensure_ascii=False)[:-1] + ', "arms": [']
    for place, arm in enumerate(record["arms"]):
        seeds = [f"{json.dumps(seed)}: {json.dumps(one, ensure_ascii=False)}" for seed, one in arm["seeds"].items()]
        about = json.dumps({key: value for key, value in arm.items() if key != "seeds"}, ensure_ascii=False)[:-1]
        comma = "," if place + 1 < len(record["arms"]) else ""
        lines.append(about + ', "seeds": {\n' + ",\n".join(seeds) + "}}" + comma)
    return "\n".join([*lines, "]}\n"])


def write_results(record: Mapping[str, Any], path: Path) -> None:
    """Write the results atomically."""
    write_atomic(path, text_of(record))


@dataclass(frozen=True, slots=True)
class Mean:
    """Mean over seeds with its 95% interval (Student's t); NaN interval for one seed."""

    value: float
    low: float
    high: float
    seeds: int

    def __str__(self) -> str:
        if self.seeds == 0 or math.isnan(self.value):
            return "–"
        if self.seeds == 1:
            return f"{self.value:.3f} (one seed)"
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def mean_of(values: Iterable[float | None]) -> Mean:
    """Mean and interval of the finite values.

    >>> str(mean_of([0.5, 0.7, 0.9]))
    '0.700 [0.203, 1.197]'
    """
    known = np.array([value for value in values if value is not None and math.isfinite(value)], np.float64)
    if not len(known):
        return Mean(math.nan, math.nan, math.nan, 0)
    value = float(known.mean())
    if len(known) == 1:
        return Mean(value, math.nan, math.nan, 1)
    half = student(len(known) - 1) * float(known.std(ddof=1)) / math.sqrt(len(known))
    return Mean(value, value - half, value + half, len(known))


def student(freedom: int) -> float:
    """Half-width of the interval in standard errors."""
    from scipy.stats import t

    return float(t.ppf((1 + CONFIDENCE) / 2, freedom))


Measure = Callable[[Mapping[str, Any]], float | None]


def final(run: Mapping[str, Any]) -> float | None:
    """Held-out accuracy of the last evaluated policy."""
    accuracy = run.get("evaluations", {}).get("accuracy", [])
    return accuracy[-1] if accuracy else None


def best(run: Mapping[str, Any]) -> float | None:
    """Best held-out accuracy during the run."""
    return max(run.get("evaluations", {}).get("accuracy", []), default=None)


def collapsed(run: Mapping[str, Any]) -> float:
    """1 if the run collapsed, else 0."""
    return float(run.get("collapsed_at") is not None)


def seconds(run: Mapping[str, Any]) -> float | None:
    """Seconds of training without evaluation."""
    return run.get("training_seconds")


def not_learning(run: Mapping[str, Any]) -> float | None:
    """Share of the training time spent generating, switching or waiting."""
    total = run.get("training_seconds")
    return 1 - run["seconds"]["learn"] / total if total else None


def switches(run: Mapping[str, Any]) -> float | None:
    """Number of generations, each a switch to generating and back."""
    return run.get("generations")


@dataclass(frozen=True, slots=True)
class ArmResult:
    """The runs of one arm."""

    name: str
    kind: str
    axes: dict[str, str]
    runs: dict[int, dict[str, Any]]

    def mean(self, measure: Measure) -> Mean:
        """Mean of a measure over the seeds."""
        return mean_of(measure(run) for run in self.runs.values())

    def count(self, measure: Measure) -> tuple[int, int]:
        """Number of seeds where the measure is 1, and number of seeds."""
        return sum(measure(run) == 1 for run in self.runs.values()), len(self.runs)

    def curve(self, key: str = "accuracy", x: str = "version") -> list[tuple[float, float, float, float]]:
        """(x, mean, min, max) over seeds: accuracy by version or seconds, or a metric by update."""
        return curve_of(list(self.runs.values()), key, x)


def curve_of(runs: Sequence[Mapping[str, Any]], key: str, x: str) -> list[tuple[float, float, float, float]]:
    """Points where every run has a value; the shortest run ends the curve."""
    pairs: list[tuple[Sequence[float], Sequence[float | None]]] = []
    for run in runs:
        if key == "accuracy":
            found = run.get("evaluations", {})
            pairs.append((found.get(x, []), found.get("accuracy", [])))
        else:
            pairs.append(tuple(run.get("series", {}).get(key, [[], []])))
    length = min((len(values) for values, _ in pairs), default=0)
    points: list[tuple[float, float, float, float]] = []
    for place in range(length):
        at = [xs[place] for xs, _ in pairs if xs[place] is not None]
        values = [value for _, ys in pairs if (value := ys[place]) is not None]
        if at and values:
            points.append((float(np.mean(at)), float(np.mean(values)), min(values), max(values)))
    return points


@dataclass(frozen=True, slots=True)
class Results:
    """Results of one experiment in one setting."""

    record: Mapping[str, Any]

    @property
    def done(self) -> int:
        """Number of jobs with a result."""
        return int(self.record["done"])

    @property
    def arms(self) -> list[ArmResult]:
        """Arms with at least one run."""
        return [
            ArmResult(arm["name"], arm["kind"], arm["axes"], {int(seed): run for seed, run in arm["seeds"].items()})
            for arm in self.record["arms"]
            if arm["seeds"]
        ]

    def arm(self, name: str) -> ArmResult | None:
        """The arm of this name, or None if it has no runs."""
        return next((arm for arm in self.arms if arm.name == name), None)

    def where(self, **axes: str) -> list[ArmResult]:
        """Arms with these axis values."""
        return [arm for arm in self.arms if all(arm.axes.get(axis) == value for axis, value in axes.items())]

    def values(self, axis: str) -> list[str]:
        """Values of an axis in the order of the arms."""
        return list(dict.fromkeys(arm.axes[axis] for arm in self.arms if axis in arm.axes))

    @property
    def fewest_seeds(self) -> int:
        """Smallest number of seeds of any arm."""
        return min((len(arm.runs) for arm in self.arms), default=0)


def difference(a: ArmResult, b: ArmResult, measure: Measure = final) -> Mean:
    """b − a, paired by seed."""
    pairs = [(measure(a.runs[seed]), measure(b.runs[seed])) for seed in a.runs if seed in b.runs]
    return mean_of(second - first for first, second in pairs if first is not None and second is not None)


def read_results(path: Path) -> Results:
    """Read a results file; a StoreError if its format is not supported."""
    record = read_json(path)
    if record.get("format") != FORMAT:
        raise StoreError(
            f"{path} has format {record.get('format')}; this release reads {FORMAT}: run the experiment again"
        )
    return Results(record)
