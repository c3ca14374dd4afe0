"""A probe and a sweep made by hand, and configs to plan with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stalewise.config import RunConfig, make_config
from stalewise.planning.calibration import (
    CollapseRule,
    Probe,
    SweepRun,
    UpdateNormPhase,
)
from stalewise.planning.sweep import fit_sweep
from tiny import tiny_record

PROBE = Probe(
    updates=32,
    phases=[UpdateNormPhase(1, 2, 6.0, 1.0), UpdateNormPhase(3, 32, 2.0, 0.1)],
    reward_mean=0.5,
    reward_variance_within=0.2,
    reward_variance_between=0.05,
    teaching_share=0.9,
    tokens_per_second=1000.0,
    generation_sizes=(64, 320),
    seconds_per_generation=3.0,
    seconds_per_rollout=0.01,
    seconds_per_update=0.5,
    tokens_per_update=100.0,
    seconds_per_switch=2.0,
    seconds_to_start=4.0,
    seconds_per_evaluated_response=0.02,
    peak_memory_bytes=2**29,
    bytes_per_rollout=100.0,
    bytes_per_checkpoint=5000,
)


ENVIRONMENT = {"stalewise": "0", "device": "cpu", "threads": 1}


def sweep_run(staleness: int, rate: float, collapsed_at: int | None = None, seed: int = 0, norm: float = 2.0):
    return SweepRun(staleness, rate, 100, seed, collapsed_at, norm, 0.9, 0.9, f"S{staleness}")


def stable_and_not() -> list[SweepRun]:
    """R_batch is near 0.4 (S·η·G) with G = 2: below it runs survive, above it they collapse at any time."""
    points = [(s, drift, seed) for s in (1, 3, 9) for drift in (0.05, 0.1, 0.2, 0.8, 1.6) for seed in (0, 1)]
    return [
        sweep_run(s, drift / (2.0 * s), None if drift < 0.4 else 1 + 37 * i % 100, seed)
        for i, (s, drift, seed) in enumerate(points)
    ]


SWEEP = fit_sweep(stable_and_not(), CollapseRule(), resamples=0)


def config_at(runs: Path, **changes: Any) -> RunConfig:
    settings: dict[str, Any] = {"schedule": {"kind": "staged", "updates": 100, "stages": 10}}
    return make_config(tiny_record(runs, **{**settings, **changes}))
