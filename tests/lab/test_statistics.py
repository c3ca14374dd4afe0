"""Welch, Holm, Fisher, the number of seeds, and predictions out of sample, against numbers derived by hand."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from experiments.lab.law import Observed, exponents, judge_models
from experiments.lab.statistics import (
    Probit,
    by_cluster,
    fisher,
    fit_probit,
    holm,
    mean_of,
    paired,
    seeds_needed,
    smallest_found,
    welch,
)


def test_means_have_the_interval_of_student() -> None:
    # t(0.975, 2) = 4.3027; the standard error of 0.5, 0.7, 0.9 is 0.2/√3.
    mean = mean_of([0.5, 0.7, 0.9])
    assert mean.high - mean.value == pytest.approx(4.3027 * 0.2 / math.sqrt(3), rel=1e-4)
    assert mean_of([0.5]).seeds == 1 and math.isnan(mean_of([0.5]).low) and mean_of([]).seeds == 0


def test_welch() -> None:
    # (1, 2, 3) has the mean 2 and the variance 1, its mean 1/3; (4, 6, 8, 6) has 6 and 8/3, its mean 2/3.
    # Error √(1/3 + 2/3) = 1. Freedom 1² / ((1/3)²/2 + (2/3)²/3) = 1 / (1/18 + 4/27) = 54/11.
    gap = welch([1, 2, 3], [4, 6, 8, 6])
    assert (gap.value, gap.error, gap.freedom) == (4.0, pytest.approx(1.0), pytest.approx(54 / 11))
    # t = 4 at 4.909 degrees: t(0.975, 4.909) = 2.586.
    assert gap.interval == (pytest.approx(4 - 2.586, abs=2e-3), pytest.approx(4 + 2.586, abs=2e-3))
    assert gap.p_above(4.0) == pytest.approx(0.5) and gap.p_above(4 - 2.586) == pytest.approx(0.025, abs=1e-4)
    assert gap.p_below(4 + 2.586) == pytest.approx(0.025, abs=1e-4)
    assert gap.p_above() + gap.p_below() == pytest.approx(1.0)


def test_samples_without_variance_decide_nothing() -> None:
    same = welch([0.5, 0.5], [0.5, 0.5])
    assert (same.p_above(-0.02), same.p_above(0.0), same.p_below(0.0)) == (1.0, 1.0, 1.0)
    assert same.interval == (0.0, 0.0)
    # Against a constant it is Student's t: the mean of 0.1, 0.2, 0.3 has error 0.1/√3 and two degrees of freedom.
    one = welch([0.0, 0.0], [0.1, 0.2, 0.3])
    assert (one.error, one.freedom) == (pytest.approx(0.1 / math.sqrt(3)), pytest.approx(2.0))
    assert paired([0.1, 0.2, 0.3]).p_above() == pytest.approx(one.p_above())


def test_holm_multiplies_by_the_claims_left_and_never_falls() -> None:
    # 4 · 0.01 = 0.04, 3 · 0.02 = 0.06, 2 · 0.025 = 0.05 but not below 0.06, 1 · 0.5.
    assert holm({"a": 0.5, "b": 0.01, "c": 0.02, "d": 0.025}) == {"b": 0.04, "c": 0.06, "d": 0.06, "a": 0.5}
    assert holm({"a": 0.6, "b": 0.7}) == {"a": 1.0, "b": 1.0} and holm({}) == {}


def test_fisher() -> None:
    # 6 of 6 against 0 of 6: one way out of C(12, 6) = 924. 5 of 6 against 1 of 6: 36 ways, and 1 that is more extreme.
    assert fisher((6, 6), (0, 6)) == pytest.approx(1 / 924)
    assert fisher((5, 6), (1, 6)) == pytest.approx(37 / 924)
    assert fisher((0, 6), (6, 6)) == 1.0 and fisher((3, 6), (3, 6)) > 0.5


def test_seeds_that_a_margin_needs() -> None:
    # (1.6449 + 1.2816)² = 8.564; 8.564 · (0.003² + 0.036²) / 0.03² = 12.4, so 13; at half of the margin 49.7.
    assert seeds_needed(0.003, 0.036, 0.03) == 13
    assert seeds_needed(0.003, 0.036, 0.015) == 50
    assert seeds_needed(0.0, 0.0, 0.03) == 2  # an interval needs two
    # With n = 12.4 the difference that is found is the margin: 2.9264 · √((0.003² + 0.036²) / 12.4) = 0.03.
    gap = welch([0.0, 0.0], [1.0, 1.2])  # error 0.1
    assert smallest_found(gap) == pytest.approx(2.9264 * 0.1, rel=1e-3)


def test_a_probit_is_fitted_and_scored() -> None:
    # Φ(0) = 1/2 at the location; one scale above it Φ(1) = 0.8413.
    model = Probit(location=math.log(2.0), scale=0.5)
    scores = model.log_scores([2.0, 2.0 * math.exp(0.5), 2.0 * math.exp(0.5)], [True, True, False])
    assert scores == pytest.approx([math.log(0.5), math.log(0.8413), math.log(1 - 0.8413)], abs=1e-3)
    assert model.log_scores([1e9], [False]) == pytest.approx([math.log(1e-3)])  # no prediction is certain
    generator = np.random.default_rng(0)
    x = np.exp(generator.uniform(-2, 3, 2000))
    outcome = np.log(x) + 0.5 * generator.normal(size=2000) > math.log(2.0)
    fitted = fit_probit(list(x), list(outcome))
    assert fitted.location == pytest.approx(math.log(2.0), abs=0.06) and fitted.scale == pytest.approx(0.5, abs=0.06)


def test_outcomes_that_a_threshold_separates_have_the_smallest_scale() -> None:
    fitted = fit_probit([1.0, 2.0, 4.0, 8.0], [False, False, True, True])
    assert math.log(2.0) < fitted.location < math.log(4.0) and fitted.scale < 0.3


def test_runs_of_one_cell_are_one_observation() -> None:
    assert by_cluster([1.0, 3.0, 5.0], ["a", "a", "b"]) == [2.0, 5.0]


def runs(power: float) -> list[Observed]:
    """Runs that collapse where η·G·T^power is above 4, with little scatter."""
    generator = np.random.default_rng(1)
    found: list[Observed] = []
    for updates in (64, 128, 256, 512):
        for rate in (3e-4, 6e-4, 1.2e-3, 2.5e-3, 5e-3):
            for lag, seed in product("abcd", (200, 201, 202, 203)):
                norm = float(generator.uniform(180, 220))
                drift = rate * norm * updates**power / (4 if power == 0.5 else 4 * 256**0.5)
                found.append(Observed(lag, rate, updates, seed, norm, math.log(drift) > 0.15 * generator.normal()))
    return found


@pytest.mark.parametrize(("power", "winner", "loser"), [(0.5, "displacement", "law"), (1.0, "law", "displacement")])
def test_long_runs_are_predicted_by_the_model_that_made_them(power: float, winner: str, loser: str) -> None:
    scores = judge_models(runs(power))
    assert scores.per_run[winner] > max(scores.per_run[loser], scores.per_run["rate"]) + 0.1
    gap = scores.law_less_displacement
    assert (gap.p_below() if winner == "displacement" else gap.p_above()) < 0.05


def test_exponents_of_length_and_age_are_found() -> None:
    generator = np.random.default_rng(0)
    x = np.log(generator.uniform(1, 100, size=(40_000, 3)))
    fell = x @ [1.0, 0.5, 0.25] - 5.4 + 0.4 * generator.normal(size=40_000) > 0
    assert exponents(x, fell) == pytest.approx([0.5, 0.25], abs=0.03)
    clear = x @ [1.0, 0.5, 0.25] > 5.4  # without scatter the slopes have no maximum: their ratios have
    assert exponents(x, clear) == pytest.approx([0.5, 0.25], abs=0.03)
