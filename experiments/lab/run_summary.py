"""Summarizes a run directory: the few hundred numbers that figures and verdicts need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from experiments.lab.downsample import POINTS, downsampled, rounded

from stalewise.reporting.read import Run, read_run

METRICS = (  # curves an experiment may ask for
    *("reward", "ess", "clip_fraction", "veto_fraction", "ratio_mean_negative", "ratio_max_negative", "entropy"),
    *("log_ratio_mean_abs", "response_length", "age_mean", "mismatch_mean"),
)
EARLY = (4, 20)  # updates over which G is measured, in every run: after the warm-up of the law's runs, before collapses


def summarize_run(directory: Path, ended: str = "") -> dict[str, Any]:
    """Numbers of a run. `ended` is the reason where it stopped early."""
    run = read_run(directory)
    evaluations = run.evaluations
    return {
        "ended": ended,
        "updates": run.updates,
        "evaluations": {
            "version": [record["version"] for record in evaluations],
            "accuracy": [rounded(record["accuracy"]["value"]) for record in evaluations],
        },
        "generations": len(run.batches),
        "rollbacks": len(run.rollbacks),
        "early_norm_per_lr": early_norm_per_rate(run.column("learning_rate"), run.column("drift")),
        "series": {key: series(run, key) for key in METRICS if len(run.finite(key))},
        "environment": {key: run.environment.get(key) for key in ("device", "machine", "torch", "python", "threads")},
    }


def early_norm_per_rate(rate: np.ndarray, drift: np.ndarray) -> float | None:
    """G: Σ‖Δθ‖ / Σ η over the updates `EARLY`, whatever became of the run; None for a run that ended before.

    >>> early_norm_per_rate(np.full(30, 0.5), np.arange(1.0, 31.0))
    2.0
    """
    first, end = EARLY
    if len(drift) < end or not np.isfinite(drift[first - 1 : end]).all():
        return None
    return rounded(float((drift[end - 1] - drift[first - 1]) / rate[first:end].sum()))


def series(run: Run, key: str) -> list[list[float | None]]:
    """A metric by update, averaged over neighbours down to `POINTS` points."""
    x, y = run.column("update"), run.column(key)
    return downsampled(x, y, POINTS)
