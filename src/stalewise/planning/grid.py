"""The grid of a sweep: run directories that differ in staleness, learning rate and seed, and what became of each."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import product
from pathlib import Path
from typing import Any

from stalewise.config import RunConfig, make_config
from stalewise.config.template import toml
from stalewise.errors import CalibrationError, ConfigError
from stalewise.planning.calibration import CollapseRule, SweepRun
from stalewise.staleness.collapse import CollapseDetector
from stalewise.store.atomic import read_jsonl, write_atomic

OUTCOME = "outcome.json"  # in the directory of a run that ended before its time
GUARD = "stop"  # a run ends once its guard is sure of a collapse; "off": every run goes on to its end


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of the grid: its config, and where that is written for the process that trains it."""

    config: RunConfig
    staleness: int

    @property
    def directory(self) -> Path:
        """Its run directory."""
        return self.config.directory

    @property
    def is_complete(self) -> bool:
        """Whether all its updates were made and the last policy was evaluated."""
        evaluated = {record["version"] for record in read_jsonl(self.directory / "eval.jsonl")}
        return self.config.schedule.updates in evaluated

    @property
    def updates_done(self) -> int:
        """Updates on record."""
        path = self.directory / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.is_file() else 0

    def write_config(self) -> Path:
        """Write the config as TOML into the run directory."""
        path = self.directory / "config.toml"
        write_atomic(path, "".join(_toml_lines(self.config.model_dump(mode="json"))))
        return path


def _toml_lines(record: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Every setting on a line of its own, with a dotted key; TOML has no null, so unset ones are left out."""
    for key, value in record.items():
        name = prefix + json.dumps(key, ensure_ascii=False)
        if isinstance(value, dict):
            yield from _toml_lines(value, f"{name}.")
        elif value is not None:
            yield f"{name} = {toml(value)}\n"


def sweep_directory(config: RunConfig) -> Path:
    """Where the runs of a config's sweep lie."""
    return Path(config.runs) / f"{config.name}-sweep"


def rate_name(learning_rate: float) -> str:
    """A learning rate with all its digits and no more.

    >>> rate_name(0.0003), rate_name(1e-5), rate_name(0.00125)
    ('3e-4', '1e-5', '1.25e-3')
    """
    _, digits, exponent = Decimal(repr(learning_rate)).normalize().as_tuple()
    mantissa = "".join(map(str, digits))
    assert isinstance(exponent, int)
    return f"{mantissa[0]}{'.' if mantissa[1:] else ''}{mantissa[1:]}e{exponent + len(digits) - 1}"


def make_grid(
    config: RunConfig,
    *,
    stalenesses: Sequence[int],
    learning_rates: Sequence[float],
    seeds: Sequence[int],
    updates: int,
    rule: CollapseRule,
) -> list[Cell]:
    """All combinations, in order of learning rate, so that the first runs tell soonest where the border is."""
    for staleness in stalenesses:
        if not 1 <= staleness <= updates:
            longer = "; --updates makes runs longer" if staleness > updates else ""
            raise ConfigError(
                f"--staleness {staleness}: expected 1 to {updates}, the updates of a run: no rollout gets older{longer}"
            )
    for learning_rate in learning_rates:
        if not 0 < learning_rate < math.inf:
            raise ConfigError(f"--lr {learning_rate:g}: a learning rate is above 0")
    if not (stalenesses and learning_rates and seeds):
        raise ConfigError("--staleness, --lr and --seeds each need at least one value")
    lags = sorted({min(staleness, updates - 1) for staleness in stalenesses})
    if lags[0] < 1:
        raise ConfigError(f"--updates {updates}: a run needs at least 2 for a rollout to get stale")
    combinations = product(sorted(set(learning_rates)), lags, sorted(set(seeds)))
    threads = config.model.threads or 1
    return [
        Cell(_cell_config(config, staleness, rate, seed, updates, rule, threads), staleness)
        for rate, staleness, seed in combinations
    ]


def _cell_config(
    config: RunConfig, staleness: int, rate: float, seed: int, updates: int, rule: CollapseRule, threads: int
) -> RunConfig:
    record = config.model_dump(mode="json")
    schedule = {"kind": "synchronous", "updates": updates, "updates_per_generation": staleness + 1}
    every = max(1, updates // rule.evaluations)
    # As many evaluations as the rule wants to see, so that a run which is stopped has shown them.
    guard = {"action": GUARD, "fraction": rule.fraction, "window": every * (rule.smoothing + rule.window)}
    changes = {
        "name": f"S{staleness:04d}-lr{rate_name(rate)}-seed{seed}",
        "runs": str(sweep_directory(config)),
        "seed": seed,
        "trackers": [],
        "storage": {},  # the run's own, which these must not replace
        "workers": {},
        "schedule": schedule,
        "optimizer": {**record["optimizer"], "learning_rate": rate},
        "model": {**record["model"], "threads": threads},
        "evaluation": {**record["evaluation"], "every": every},
        "guard": guard,
        "plan": {},
        "recipe": "none",
    }
    return make_config({**record, **changes}, source="a config of the sweep")


def find_collapse_of_run(evaluations: Sequence[Mapping[str, Any]], rule: CollapseRule) -> int | None:
    """The version at which held-out accuracy fell below the line for good, or None.

    Unlike a run that goes on, one that ends below the line has collapsed, however short a time it has been there: the
    policy that it hands over is worth less than half of its best.
    """
    accuracy = {record["version"]: record["accuracy"]["value"] for record in evaluations}
    detector = CollapseDetector(smoothing=rule.smoothing, window=rule.window, fraction=rule.fraction, floor=rule.floor)
    for version in sorted(accuracy):
        detector = detector.observe(accuracy[version])
    index = detector.collapse.update if detector.collapse is not None else detector.below_since
    return None if index is None else sorted(accuracy)[index]


def resolution_of(versions: Sequence[int], collapsed_at: int | None, rule: CollapseRule) -> int:
    """How many updates before a collapse the run was last seen alive: it is seen in a mean of several evaluations.

    1 where it was not found by evaluations.

    >>> resolution_of([0, 16, 32, 48], 48, CollapseRule(smoothing=2)), resolution_of([0, 16], 7, CollapseRule())
    (32, 1)
    """
    seen = sorted(versions)
    if collapsed_at is None or collapsed_at not in seen:
        return 1
    return max(collapsed_at - seen[max(seen.index(collapsed_at) - rule.smoothing, 0)], 1)


def outcome(cell: Cell, rule: CollapseRule) -> SweepRun:
    """What became of a run that has ended: at its end, or before it because an update was not finite (`OUTCOME`)."""
    evaluations = read_jsonl(cell.directory / "eval.jsonl")
    metrics = read_jsonl(cell.directory / "metrics.jsonl")
    updates, rate = cell.config.schedule.updates, cell.config.optimizer.learning_rate
    collapsed_at = find_collapse_of_run(evaluations, rule)
    if collapsed_at is None and (cell.directory / OUTCOME).is_file():
        collapsed_at = min(len(metrics) + 1, updates)
    moved = [record for record in metrics if "drift" in record and record["update"] < (collapsed_at or updates)]
    norm = moved[-1]["drift"] / (rate * (moved[-1]["update"] + 1)) if moved else math.nan
    if norm == 0.0:
        raise CalibrationError(f"{cell.directory} never moved: none of its groups has rewards that differ")
    accuracy = [record["accuracy"]["value"] for record in evaluations]
    return SweepRun(
        staleness=cell.staleness,
        learning_rate=rate,
        updates=updates,
        seed=cell.config.seed,
        collapsed_at=collapsed_at,
        update_norm_per_lr=norm,
        best_accuracy=max(accuracy, default=math.nan),
        last_accuracy=accuracy[-1] if accuracy else math.nan,
        directory=cell.directory.name,
        resolution=resolution_of([record["version"] for record in evaluations], collapsed_at, rule),
    )


def describe_run(run: SweepRun) -> str:
    """One line on what became of a run."""
    what = "survived" if run.collapsed_at is None else f"collapsed at update {run.collapsed_at} of {run.updates}"
    accuracy = f"accuracy {run.last_accuracy:.3f}, at best {run.best_accuracy:.3f}"
    return f"S {run.staleness}, η {rate_name(run.learning_rate)}, seed {run.seed}: {what}; {accuracy}"
