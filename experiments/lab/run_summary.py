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
        "seconds": {name: round(seconds, 1) for name, seconds in run.seconds.items()},
        "environment": {key: run.environment.get(key) for key in ("device", "machine", "torch", "python", "threads")},
    }


def early_norm_per_rate(rate: np.ndarray, drift: np.ndarray) -> float | None:
    """G: Σ‖Δθ‖ / Σ η over the updates `EARLY`, whatever became of the run; None for a run that ended before.

    Updates without any advantage take no step: they have neither drift nor rate (NaN) and do not count.

    >>> nan = np.nan
    >>> early_norm_per_rate(np.array([*[0.5] * 10, nan, *[0.5] * 19]), np.array([*range(1, 11), nan, *range(11, 30)]))
    2.0
    """
    first, end = EARLY
    before, within = (part[np.isfinite(part)] for part in (drift[:first], drift[first:end]))
    if len(drift) < end or not len(within):
        return None
    start = float(before[-1]) if len(before) else 0.0
    return rounded((float(within[-1]) - start) / float(np.nansum(rate[first:end])))


def series(run: Run, key: str) -> list[list[float | None]]:
    """A metric by update, averaged over neighbours down to `POINTS` points."""
    x, y = run.column("update"), run.column(key)
    return downsampled(x, y, POINTS)
