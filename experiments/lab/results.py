"""Kept results of an experiment in one setting: one JSON file, small enough for the repository."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from experiments.lab.definition import Experiment
from experiments.lab.downsample import POINTS, downsample_record
from experiments.lab.job_pool import failed_path
from experiments.lab.plan import Kept, Tuning, is_collapsed, judged_jobs, score, seeds_of, tune
from experiments.lab.statistics import Mean, mean_of

from stalewise.errors import StoreError
from stalewise.store.atomic import read_json, write_atomic

FORMAT = "stalewise.results/2"
SUPERSEDED = "stalewise.results/1"  # of an earlier design: its files stay until there are new ones
LARGEST_BYTES = 300_000


def results_name(setting: str) -> str:
    """File name of a setting's results."""
    return f"results-{setting}.json"


def collect(
    experiment: Experiment, setting: str, out: Path, kept: Kept, machine: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Results of the finished jobs, with as many points per curve as the size limit allows."""
    tuning, tuning_jobs = tune(experiment, setting, kept)
    arms: dict[str, dict[str, Any]] = {}
    problems: dict[str, str] = {}
    wanted = {job.key: f"tuning {job.key}" for job in tuning_jobs}
    for arm, seed, chain in judged_jobs(experiment, setting, tuning):
        rate = tuning.rate_of(arm)
        rate = arm.settings.get("optimizer", {}).get("learning_rate") if rate is None else rate
        head = {"name": arm.name, "kind": arm.kind, "axes": arm.axes, "rate": rate, "rate_is": arm.rate, "seeds": {}}
        entry = arms.setdefault(arm.name, head)
        wanted |= {job.key: f"{arm.name}, seed {seed}" for job in chain}
        if (result := kept(chain[-1].key)) is not None:
            entry["seeds"][str(seed)] = {"key": chain[-1].key, **result}
    missing = [key for key in wanted if kept(key) is None]
    for key in missing:
        if failed_path(out, key).is_file():
            problems[wanted[key]] = read_json(failed_path(out, key))["problem"]
    record = {
        "format": FORMAT,
        "experiment": experiment.name,
        "setting": setting,
        "machine": [dict(one) for one in machine],
        "planned": len(wanted),
        "done": len(wanted) - len(missing),
        "cpu_seconds": round(sum((kept(key) or {}).get("cpu_seconds", 0.0) for key in wanted)),
        "wall_seconds": round(sum((kept(key) or {}).get("wall_seconds", 0.0) for key in wanted)),
        "failed": problems,
        "tuning": tuning_record(experiment, setting, tuning, {job.key: kept(job.key) for job in tuning_jobs}),
        "arms": list(arms.values()),
    }
    return _thinned(record, experiment.table.metrics)


def tuning_record(
    experiment: Experiment, setting: str, tuning: Tuning, trials: Mapping[str, Mapping[str, Any] | None]
) -> dict[str, Any]:
    """The trials, and what followed from them."""
    if not tuning.scores:
        return {}
    kept = ("kind", "ended", "evaluations", "wall_seconds", "cpu_seconds")
    record: dict[str, Any] = {
        "rates": list(tuning.rates),
        "widened": tuning.widened,
        "is_complete": tuning.is_complete,
        "scores": {
            arm: {f"{rate:g}": [round(value, 4) for value in values] for rate, values in by_rate.items()}
            for arm, by_rate in tuning.scores.items()
        },
        "trials": {
            key: {name: trial[name] for name in kept if name in trial} for key, trial in trials.items() if trial
        },
    }
    if tuning.is_complete:
        asked, run = seeds_of(experiment, setting, tuning)
        record |= {
            "best": {arm: tuning.best(arm) for arm in tuning.scores},
            "edges": list(tuning.edges()),
            "spread": {arm: round(tuning.spread(arm), 4) for arm in tuning.scores},
            "margin": experiment.setting(setting).margin,
            "seeds_asked": asked,
            "seeds_run": run,
        }
    return record


def _thinned(record: dict[str, Any], metrics: Sequence[str]) -> dict[str, Any]:
    points = POINTS
    while True:
        arms = [
            {**arm, "seeds": {seed: downsample_record(one, metrics, points) for seed, one in arm["seeds"].items()}}
            for arm in record["arms"]
        ]
        thin = {**record, "arms": arms}
        if points <= 4 or len(text_of(thin)) <= LARGEST_BYTES:
            return thin
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
class ArmResult:
    """The judged runs of one arm."""

    name: str
    kind: str
    axes: dict[str, str]
    rate: float | None
    runs: dict[int, dict[str, Any]]

    @property
    def first(self) -> dict[str, Any]:
        """The run of the first seed."""
        return next(iter(self.runs.values()))

    @property
    def scores(self) -> list[float]:
        """Score of each seed."""
        return [score(run) for run in self.runs.values()]

    @property
    def best(self) -> list[float]:
        """Best held-out accuracy on the way, of each seed."""
        return [max(run["evaluations"]["accuracy"]) for run in self.runs.values()]

    @property
    def mean(self) -> Mean:
        """Mean score."""
        return mean_of(self.scores)

    @property
    def collapses(self) -> tuple[int, int]:
        """How many of its runs collapsed, and how many there are."""
        return sum(map(is_collapsed, self.runs.values())), len(self.runs)

    def curve(self, key: str = "accuracy") -> list[tuple[float, float, float, float]]:
        """(x, mean, min, max) over seeds where every run has a value: accuracy by version, or a metric by update."""
        pairs: list[Any] = []
        for run in self.runs.values():
            found = run["evaluations"]
            pairs.append(
                (found["version"], found["accuracy"]) if key == "accuracy" else run["series"].get(key, [[], []])
            )
        points: list[tuple[float, float, float, float]] = []
        for place in range(min((len(values) for values, _ in pairs), default=0)):
            values = [y for _, ys in pairs if (y := ys[place]) is not None]
            if values:
                x = float(np.mean([xs[place] for xs, _ in pairs]))
                points.append((x, float(np.mean(values)), min(values), max(values)))
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
    def tuning(self) -> Mapping[str, Any]:
        """The trials; empty where nothing was tuned."""
        return self.record["tuning"]

    @property
    def arms(self) -> list[ArmResult]:
        """Arms with at least one run."""
        return [
            ArmResult(arm["name"], arm["kind"], arm["axes"], arm["rate"], {int(s): r for s, r in arm["seeds"].items()})
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
        """Values of an axis in the order of the arms, also of arms without a run."""
        return list(dict.fromkeys(arm["axes"][axis] for arm in self.record["arms"] if axis in arm["axes"]))


def read_results(path: Path) -> Results | None:
    """Read a results file; None if there is none or it is of the superseded design, StoreError for other formats."""
    if not path.is_file() or (record := read_json(path)).get("format") == SUPERSEDED:
        return None
    if record.get("format") != FORMAT:
        raise StoreError(
            f"{path} has format {record.get('format')}; this release reads {FORMAT}: run the experiment again"
        )
    return Results(record)
