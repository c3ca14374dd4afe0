"""Small grids of a sweep, and runs that the law itself drew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from stalewise.config import RunConfig, make_config
from stalewise.planning.calibration import CollapseRule, SweepRun
from stalewise.planning.grid import GridCell, make_grid
from stalewise.staleness.law import Law, simulate
from tiny import tiny_record

RULE = CollapseRule(evaluations=4)


def tiny_config(runs: Path, **changes: Any) -> RunConfig:
    return make_config(tiny_record(runs, **{"evaluation": {"prompts": 4, "samples": 2}, **changes}))


def grid(
    config: RunConfig, stalenesses: list[int], rates: list[float], updates: int = 64, seeds: tuple[int, ...] = (0,)
) -> list[GridCell]:
    return make_grid(
        config, stalenesses=stalenesses, learning_rates=rates, seeds=seeds, updates=updates, rule=CollapseRule()
    )


def simulated_runs() -> list[SweepRun]:
    law, generator = Law(0.25, 1.0, 0.15), np.random.default_rng(0)
    drawn = [
        simulate(law, staleness=s, learning_rate=float(r), updates=512, update_norm_per_lr=1.0, generator=generator)
        for s in (4, 16, 64, 256)
        for r in np.geomspace(2e-4, 2e-2, 10)
    ]
    return [SweepRun(o.staleness, o.learning_rate, 512, 0, o.collapsed_at, 1.0, 0.9, 0.5, "x") for o in drawn]
