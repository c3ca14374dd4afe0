"""The grid of a sweep: runs that differ in staleness, learning rate and seed, and the outcome of each."""

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
from stalewise.store.atomic import write_atomic
from stalewise.store.records import EVALUATION, METRIC, read_records

OUTCOME = "outcome.json"  # in the directory of a run that stopped early
GUARD = "stop"  # a run stops when its guard is certain of a collapse; "off" runs it to the end


@dataclass(frozen=True, slots=True, eq=False)  # compared and hashed by identity
class GridCell:
    """One run of the grid."""

    config: RunConfig
    staleness: int

    @property
    def directory(self) -> Path:
        """Its run directory."""
        return self.config.directory

    @property
    def is_complete(self) -> bool:
        """Whether all updates are done and the last policy is evaluated."""
        evaluated = {record["version"] for record in read_records(self.directory / "eval.jsonl", EVALUATION)}
        return self.config.schedule.updates in evaluated

    @property
    def updates_done(self) -> int:
        """Updates in the metrics file."""
        path = self.directory / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.is_file() else 0

    def write_config(self) -> Path:
        """Write the config as TOML into the run directory."""
        path = self.directory / "config.toml"
        write_atomic(path, "".join(_toml_lines(self.config.model_dump(mode="json"))))
        return path


def _toml_lines(record: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """One line per setting with a dotted key. TOML has no null, so unset settings are omitted."""
    for key, value in record.items():
        name = prefix + json.dumps(key, ensure_ascii=False)
        if isinstance(value, dict):
            yield from _toml_lines(value, f"{name}.")
        elif value is not None:
            yield f"{name} = {toml(value)}\n"


def rate_name(learning_rate: float) -> str:
    """A learning rate with all its digits, as in 1.25e-3."""
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
) -> list[GridCell]:
    """All combinations in order of learning rate, so that the first runs show early where collapse begins."""
    for staleness in stalenesses:
        if not 1 <= staleness <= updates:
            longer = "; --updates makes runs longer" if staleness > updates else ""
            raise ConfigError(
                f"--staleness {staleness}: expected 1 to {updates}, the updates of a run: no rollout gets older{longer}"
            )
    for learning_rate in learning_rates:
        if not 0 < learning_rate < math.inf:
            raise ConfigError(f"--lr {learning_rate:g}: expected a learning rate above 0")
    if not (stalenesses and learning_rates and seeds):
        raise ConfigError("--staleness, --lr and --seeds each need at least one value")
    lags = sorted({min(staleness, updates - 1) for staleness in stalenesses})
    if lags[0] < 1:
        raise ConfigError(f"--updates {updates}: expected at least 2, so that a rollout can get stale")
    record = config.model_dump(mode="json")
    every = max(1, updates // rule.evaluations)
    common = {
        "runs": str(Path(config.runs) / f"{config.name}-sweep"),
        "trackers": [],
        "storage": {},  # the run's own, which these runs must not overwrite
        "workers": {},
        "model": {**record["model"], "threads": config.model.threads or 1},
        "evaluation": {**record["evaluation"], "every": every},
        # A window of as many evaluations as the rule needs, so that a stopped run has shown them.
        "guard": {"action": GUARD, "fraction": rule.fraction, "window": every * (rule.smoothing + rule.window)},
        "plan": {},
        "recipe": "none",
    }
    cells: list[GridCell] = []
    for rate, staleness, seed in product(sorted(set(learning_rates)), lags, sorted(set(seeds))):
        changes = {
            "name": f"S{staleness:04d}-lr{rate_name(rate)}-seed{seed}",
            "seed": seed,
            "schedule": {"kind": "synchronous", "updates": updates, "updates_per_generation": staleness + 1},
            "optimizer": {**record["optimizer"], "learning_rate": rate},
        }
        cells.append(GridCell(make_config({**record, **common, **changes}, source="a config of the sweep"), staleness))
    return cells


def find_collapse_of_run(evaluations: Sequence[Mapping[str, Any]], rule: CollapseRule) -> int | None:
    """The version at which held-out accuracy fell below the threshold and stayed there, however recently, or None."""
    accuracy = {record["version"]: record["accuracy"]["value"] for record in evaluations}
    detector = CollapseDetector(smoothing=rule.smoothing, window=rule.window, fraction=rule.fraction, floor=rule.floor)
    for version in sorted(accuracy):
        detector = detector.observe(accuracy[version])
    index = detector.collapse.update if detector.collapse is not None else detector.below_since
    return None if index is None else sorted(accuracy)[index]


def resolution_of(versions: Sequence[int], collapsed_at: int | None, rule: CollapseRule) -> int:
    """Updates between the last evaluation before a collapse and the collapse; 1 if evaluations did not find it."""
    seen = sorted(versions)
    if collapsed_at is None or collapsed_at not in seen:
        return 1
    return max(collapsed_at - seen[max(seen.index(collapsed_at) - rule.smoothing, 0)], 1)


def outcome(cell: GridCell, rule: CollapseRule) -> SweepRun:
    """Outcome of a run that finished, or stopped early (`OUTCOME`) because of a collapse or a non-finite update."""
    evaluations = read_records(cell.directory / "eval.jsonl", EVALUATION)
    metrics = read_records(cell.directory / "metrics.jsonl", METRIC)
    updates, rate = cell.config.schedule.updates, cell.config.optimizer.learning_rate
    collapsed_at = find_collapse_of_run(evaluations, rule)
    if collapsed_at is None and (cell.directory / OUTCOME).is_file():
        collapsed_at = min(len(metrics) + 1, updates)
    moved = [record for record in metrics if "drift" in record and record["update"] < (collapsed_at or updates)]
    norm = moved[-1]["drift"] / (rate * (moved[-1]["update"] + 1)) if moved else math.nan
    if norm == 0.0:
        raise CalibrationError(f"{cell.directory} never moved: no group has rewards that differ")
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
    """One line on the outcome of a run."""
    fate = "survived" if run.collapsed_at is None else f"collapsed at update {run.collapsed_at} of {run.updates}"
    accuracy = f"accuracy {run.last_accuracy:.3f}, at best {run.best_accuracy:.3f}"
    return f"S {run.staleness}, η {rate_name(run.learning_rate)}, seed {run.seed}: {fate}; {accuracy}"
