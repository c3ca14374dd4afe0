"""Summarizes a run directory: the few hundred numbers that figures and verdicts need."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from experiments.lab.downsample import POINTS, downsampled, rounded

from stalewise.planning.calibration import CollapseRule
from stalewise.planning.grid import find_collapse_of_run
from stalewise.reporting.read import ACTIVITIES, Run, read_run

METRICS = (  # curves an experiment may ask for
    *("reward", "ess", "clip_fraction", "veto_fraction", "ratio_mean_negative", "ratio_max_negative", "entropy"),
    *("log_ratio_mean_abs", "response_length", "age_mean", "mismatch_mean"),
)
RULE = CollapseRule(smoothing=2, window=3)  # described by `COLLAPSE_RULE`


def summarize_run(directory: Path, ended: str = "") -> dict[str, Any]:
    """Numbers of a run. `ended` is the reason where it stopped early."""
    run = read_run(directory)
    evaluations = run.evaluations
    collapsed_at = find_collapse_of_run(evaluations, RULE)
    if ended and collapsed_at is None:
        collapsed_at = min(run.updates + 1, run.planned_updates)
    return {
        "ended": ended,
        "updates": run.updates,
        "collapsed_at": collapsed_at,
        "evaluations": {
            "version": [record["version"] for record in evaluations],
            "accuracy": [rounded(record["accuracy"]["value"]) for record in evaluations],
            "seconds": [rounded(run.seconds_at(record["version"])) for record in evaluations],
        },
        "final_interval": [rounded(evaluations[-1]["accuracy"][end]) for end in ("low", "high")] if evaluations else [],
        "seconds": {name: rounded(run.seconds.get(name, 0.0)) for name in ACTIVITIES},
        "training_seconds": rounded(run.training_seconds),
        "generations": len(run.batches) or len(run.sources),
        "rollouts": int(sum(batch.rows for batch in run.batches)),
        "rollbacks": len(run.rollbacks),
        "update_norm_per_lr": _norm_per_rate(run, collapsed_at),
        "series": {key: series(run, key) for key in METRICS if len(run.finite(key))},
        "environment": {key: run.environment.get(key) for key in ("device", "machine", "torch", "python", "threads")},
    }


def _norm_per_rate(run: Run, collapsed_at: int | None) -> float | None:
    """G: drift until the collapse or the end, per update and unit of learning rate."""
    updates, drift = run.column("update"), run.column("drift")
    known = np.flatnonzero(np.isfinite(drift) & (updates < (collapsed_at or math.inf))) if len(drift) else []
    if not len(known):
        return None
    last = known[-1]
    return rounded(float(drift[last]) / (run.config["optimizer.learning_rate"] * (float(updates[last]) + 1)))


def series(run: Run, key: str) -> list[list[float | None]]:
    """A metric by update, averaged over neighbours down to `POINTS` points."""
    x, y = run.column("update"), run.column(key)
    return downsampled(x, y, POINTS)
