"""How often runs with SmolLM2 would tell how the threshold of η goes with T: simulated runs, judged by both rules.

    python -m experiments.lab.law_power [--times 40]

The threshold falls as T^-a, with a scatter from run to run, and lies inside the grid of learning rates.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

import numpy as np
from experiments.lab.law import Observed, judge_models, resampled_exponents
from experiments.lab.statistics import ALPHA

LAGS, LENGTHS = ("µ=4", "µ=4, lag 3"), (24, 48, 96, 192)  # of the setting `real`
RATES = 1e-5, 2e-5, 4e-5, 8e-5, 1.6e-4
THRESHOLD, AT = 5e-5, 96  # of η, at so many updates
CLAIMS = 2 * 9  # and opposites: Holm's correction at its strictest


def simulated(a: float, scatter: float, seeds: int, random: np.random.Generator) -> list[Observed]:
    """Runs that collapse where η is above a threshold that falls as T^-a."""
    return [
        Observed(
            lag,
            rate,
            updates,
            seed,
            200.0,
            rate * math.exp(scatter * random.normal()) > THRESHOLD * (AT / updates) ** a,
        )
        for lag in LAGS
        for rate in RATES
        for updates in LENGTHS
        for seed in range(seeds)
    ]


def found(runs: Sequence[Observed], a: float) -> tuple[bool, bool]:
    """Whether the exponent tells the law from displacement, and whether the prediction of long runs does."""
    fitted, scores = resampled_exponents(runs, times=400), judge_models(runs)
    law = max(scores.law_less_displacement.p_above(), scores.law_less_rate.p_above())
    by_exponent, by_prediction = (
        (fitted.p_above(0.5), law) if a == 1 else (fitted.p_below(1.0), scores.law_less_displacement.p_below())
    )
    return by_exponent < ALPHA / CLAIMS, by_prediction < ALPHA / CLAIMS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=40, help="simulations of each kind")
    times, random = parser.parse_args().times, np.random.default_rng(0)
    print("runs  scatter  a    by the exponent  by prediction")
    for seeds in (1, 2):
        for scatter in (0.2, 0.4):
            for a in (1.0, 0.5):
                told = [found(simulated(a, scatter, seeds, random), a) for _ in range(times)]
                shares = [sum(one[way] for one in told) / times for way in (0, 1)]
                runs = len(LAGS) * len(RATES) * len(LENGTHS) * seeds
                print(f"{runs:<5} {scatter:<8} {a:<4} {shares[0]:<16.0%} {shares[1]:.0%}", flush=True)


if __name__ == "__main__":
    main()
