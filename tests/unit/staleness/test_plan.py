"""Planning from a fit: limits by hand, proportionality, safety on simulated runs, and refusals by name."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stalewise.errors import CalibrationError
from stalewise.staleness.law import Domain, Estimate, Fit, Law, fit, simulate
from stalewise.staleness.likelihood import draw
from stalewise.staleness.plan import Plan, budget_used, largest_learning_rate, largest_staleness

DOMAIN = Domain(
    staleness=(4, 256),
    learning_rate=(1e-4, 0.05),
    updates=(100, 1000),
    batch_drift=(4e-4, 12.8),
    horizon_drift=(0.01, 50.0),
    runs=40,
    collapsed=20,
)
FIT = Fit(
    batch_radius=Estimate(0.25, 0.2, 0.3, known=True),
    critical_radius=Estimate(1.2, 1.0, 1.5, known=True),
    scatter=0.2,
    scatter_known=True,
    domain=DOMAIN,
    observations=40,
    confidence=0.9,
    log_likelihood=-50.0,
)
TIGHT = replace(FIT, batch_radius=Estimate(0.002, 0.001, 0.003, known=True))
MARGIN = math.exp(-1.6448536269514722 * 0.2)  # z(95%) = 1.6448536, σ = 0.2: 0.7196642


def plan(fitted: Fit = FIT, staleness: int = 128, updates: int = 500, norm: float = 2.0, risk: float = 0.05) -> Plan:
    return largest_learning_rate(fitted, staleness=staleness, updates=updates, update_norm_per_lr=norm, risk=risk)


def plan_staleness(
    fitted: Fit = FIT, learning_rate: float = 5e-4, updates: int = 500, norm: float = 2.0, risk: float = 0.05
) -> Plan:
    return largest_staleness(fitted, learning_rate=learning_rate, updates=updates, update_norm_per_lr=norm, risk=risk)


# --- the largest learning rate ---------------------------------------------------------------------------------------


def test_where_the_batch_binds() -> None:
    found = plan(staleness=128)
    assert found.batch_limit == pytest.approx(0.2 * 0.7196642 / (128 * 2), rel=1e-6)  # 0.000562238
    assert found.horizon_limit == pytest.approx(1.0 * 0.7196642 / (500 * 2), rel=1e-6)  # 0.000719664
    assert (found.learning_rate, found.binding) == (found.batch_limit, "batch")
    assert (found.staleness, found.updates, found.notes) == (128, 500, ())


def test_where_the_horizon_binds() -> None:
    found = plan(staleness=64)  # the batch allows twice as much as at 128: 0.001124 > 0.000720
    assert (found.learning_rate, found.binding) == (found.horizon_limit, "horizon")


def test_where_both_bind_the_batch_is_named() -> None:
    even = replace(FIT, batch_radius=Estimate(0.25, 0.25, 0.3, True))
    found = plan(even, staleness=125, updates=500)  # 0.25/125 = 1/500
    assert found.batch_limit == found.horizon_limit
    assert found.binding == "batch"


def test_the_batch_limit_goes_as_one_over_staleness() -> None:
    assert plan(staleness=128).learning_rate == pytest.approx(2 * plan(staleness=256).learning_rate, rel=1e-12)


def test_the_horizon_limit_does_not_know_staleness_and_goes_as_one_over_updates() -> None:
    assert plan(staleness=4).learning_rate == plan(staleness=64).learning_rate
    assert plan(staleness=4, updates=500).learning_rate == pytest.approx(
        2 * plan(staleness=4, updates=1000).learning_rate, rel=1e-12
    )


def test_nothing_beyond_the_largest_learning_rate_tried() -> None:
    found = plan(staleness=4, updates=100, norm=0.01)  # the horizon would allow 0.72/(100 · 0.01) = 0.72
    assert (found.learning_rate, found.binding) == (0.05, "domain")
    assert found.horizon_limit == pytest.approx(0.7196642, rel=1e-6)


def test_a_limit_that_is_the_largest_learning_rate_tried_is_a_constraint_and_not_the_domain() -> None:
    at_edge = replace(FIT, domain=replace(DOMAIN, learning_rate=(1e-4, plan(staleness=64).horizon_limit)))
    assert plan(at_edge, staleness=64).binding == "horizon"


def test_risk_is_the_margin() -> None:
    assert plan(risk=0.5).batch_limit == pytest.approx(0.2 / 256, rel=1e-12)  # z = 0: no margin
    assert plan(risk=0.01).batch_limit == pytest.approx(0.2 * math.exp(-2.3263479 * 0.2) / 256, rel=1e-7)
    assert largest_learning_rate(FIT, staleness=128, updates=500, update_norm_per_lr=2.0) == plan(risk=0.05)


@pytest.mark.parametrize("risk", [0.0, 0.51, -0.1, math.nan])
def test_a_risk_that_is_none_is_refused(risk: float) -> None:
    with pytest.raises(ValueError, match=r"risk must be above 0 and at most 0.5, got"):
        plan(risk=risk)


def test_the_planned_rate_is_safe_on_simulated_runs() -> None:
    law = Law(0.25, 1.0, 0.15)
    generator = np.random.default_rng(5)
    runs = [
        simulate(law, staleness=s, learning_rate=float(r), updates=512, update_norm_per_lr=1.0, generator=generator)
        for s in (4, 16, 64, 256)
        for r in np.geomspace(2e-4, 2e-2, 15)
    ]
    fitted, draws = fit(runs, resamples=10), 4000
    for staleness in (4, 64, 256):
        found = largest_learning_rate(fitted, staleness=staleness, updates=512, update_norm_per_lr=1.0, risk=0.1)
        columns = np.full(draws, float(staleness)), np.full(draws, found.learning_rate), np.full(draws, 512.0)
        collapsed = np.mean(draw(law.parameters(), *columns, generator) > 0)
        assert collapsed <= 0.1 + 4 * math.sqrt(0.1 * 0.9 / draws)
        # and not by planning nothing: four times the rate breaks nearly every run
        fourfold = columns[0], 4 * columns[1], columns[2]
        assert np.mean(draw(law.parameters(), *fourfold, generator) > 0) > 0.9


@given(
    first=st.integers(4, 256),
    second=st.integers(4, 256),
    updates=st.tuples(st.integers(100, 1000), st.integers(100, 1000)),
    norm=st.floats(0.01, 100.0),
    risks=st.tuples(st.floats(1e-4, 0.5), st.floats(1e-4, 0.5)),
)
def test_more_of_anything_is_never_a_larger_rate(
    first: int, second: int, updates: tuple[int, int], norm: float, risks: tuple[float, float]
) -> None:
    small, large = sorted((first, second))
    short, long = sorted(updates)
    careful, bold = sorted(risks)
    assert plan(staleness=large, updates=long, norm=norm, risk=careful).learning_rate <= (
        plan(staleness=small, updates=short, norm=norm, risk=bold).learning_rate
    )
    assert plan(staleness=small, updates=short, norm=norm).learning_rate <= DOMAIN.learning_rate[1]


def test_plans_and_budgets_are_immutable() -> None:
    for record in (plan(), budget_used(FIT, batch_drift=0.1, cumulative_drift=0.1)):
        assert not hasattr(record, "__dict__")
        with pytest.raises(FrozenInstanceError):
            setattr(record, next(iter(type(record).__annotations__)), 1)


# --- the largest staleness -------------------------------------------------------------------------------------------


def test_the_largest_staleness() -> None:
    found = plan_staleness(learning_rate=6e-4)
    # 0.2 · 0.7196642 / (6e-4 · 2) = 119.94
    assert (found.staleness, found.binding) == (119, "batch")
    assert (found.learning_rate, found.updates) == (6e-4, 500)
    assert found.batch_limit == pytest.approx(0.2 * MARGIN / (119 * 2), rel=1e-12)
    assert found.horizon_limit == pytest.approx(MARGIN / (500 * 2), rel=1e-12)
    assert found == largest_staleness(FIT, learning_rate=6e-4, updates=500, update_norm_per_lr=2.0)


def test_the_largest_staleness_is_capped_where_the_sweep_ends() -> None:
    found = plan_staleness(learning_rate=1e-4)  # 0.2 · 0.72 / 2e-4 = 719 > 256
    assert (found.staleness, found.binding) == (256, "domain")


@pytest.mark.parametrize("staleness", [101, 128, 200, 255, 256])
def test_a_planned_rate_asked_back_gives_its_staleness(staleness: int) -> None:
    there = plan(staleness=staleness)
    assert there.binding == "batch"
    back = plan_staleness(learning_rate=there.learning_rate)
    assert (back.staleness, back.binding) == (staleness, "batch")


def test_a_planned_rate_at_the_horizon_is_allowed() -> None:
    assert plan_staleness(learning_rate=plan(staleness=64).learning_rate).staleness == 100  # 0.2/1.0 · 500


def test_only_rounding_is_forgiven() -> None:
    limit = plan(staleness=64).horizon_limit
    assert plan_staleness(learning_rate=limit * (1 + 0.9e-9)).horizon_limit == limit
    with pytest.raises(CalibrationError, match="breaks the horizon constraint"):
        plan_staleness(learning_rate=limit * (1 + 1.2e-9))


def test_a_rate_that_breaks_the_horizon_is_refused_by_name() -> None:
    with pytest.raises(CalibrationError) as caught:
        plan_staleness(learning_rate=1e-3)
    assert str(caught.value) == (
        "learning rate 0.001 breaks the horizon constraint at any staleness: T·η·G = 1 with T = 500, "
        "and R_crit allows η <= 0.00072; lower the learning rate or the updates"
    )


def test_a_rate_that_no_staleness_makes_safe_is_refused_by_name() -> None:
    with pytest.raises(CalibrationError) as caught:
        plan_staleness(TIGHT, learning_rate=5e-4)
    # S·η·G = 4 · 5e-4 · 2 = 0.004; R_batch allows 0.001 · 0.72/(4 · 2) = 9e-5
    assert str(caught.value) == (
        "learning rate 0.0005 breaks the batch constraint even at S = 4, the smallest tried: "
        "S·η·G = 0.004, and R_batch allows η <= 9e-05 there"
    )


def test_the_smallest_staleness_is_found_where_just_it_is_safe() -> None:
    tight = replace(FIT, batch_radius=Estimate(0.01, 0.0055, 0.02, known=True))
    # 0.0055 · 0.7196642/(4.5e-4 · 2) = 4.398
    assert plan_staleness(tight, learning_rate=4.5e-4).staleness == 4


def test_a_rate_larger_than_any_tried_is_refused_and_a_smaller_one_is_not() -> None:
    with pytest.raises(CalibrationError, match=r"learning rate η = 0.06 is outside the calibration"):
        plan_staleness(learning_rate=0.06)
    assert plan_staleness(learning_rate=1e-6).staleness == 256
    assert plan_staleness(learning_rate=0.05, norm=0.02).staleness == 143  # 0.2 · 0.72/(0.05 · 0.02)


# --- refusals and notes ----------------------------------------------------------------------------------------------


def test_staleness_above_the_sweep_is_refused() -> None:
    assert plan(staleness=256).staleness == 256
    with pytest.raises(CalibrationError) as caught:
        plan(staleness=257)
    assert str(caught.value) == (
        "staleness S = 257 is outside the calibration: the sweep covers 4 to 256; run a sweep that covers it"
    )


def test_updates_above_the_sweep_are_refused() -> None:
    message = "updates T = 1001 is outside the calibration: the sweep covers 100 to 1000; run a sweep"
    with pytest.raises(CalibrationError, match=message):
        plan(updates=1001)
    with pytest.raises(CalibrationError, match=message):
        plan_staleness(updates=1001)
    assert CalibrationError.exit_code == 3


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_less_staleness_than_was_tried_is_planned_as_the_smallest_tried(staleness: int) -> None:
    found, smallest = plan(TIGHT, staleness=staleness), plan(TIGHT, staleness=4)
    assert (found.learning_rate, found.binding) == (smallest.learning_rate, "batch")
    assert (found.staleness, smallest.notes) == (staleness, ())
    assert found.notes == (
        f"staleness S = {staleness} is less than was ever tried; planned as for 4, which drifts more",
    )


def test_fewer_updates_than_were_tried_are_planned_as_the_fewest_tried() -> None:
    found, fewest = plan(staleness=4, updates=50), plan(staleness=4, updates=100)
    assert (found.learning_rate, found.binding) == (fewest.learning_rate, "horizon")
    note = "updates T = 50 is less than was ever tried; planned as for 100, which drifts more"
    (bold,) = fewest.notes
    bold = bold.replace("for 100:", "for 50:")
    assert (found.updates, found.notes) == (50, (note, bold))
    back = plan_staleness(learning_rate=fewest.learning_rate, updates=50)
    assert back.notes == (note, bold)
    assert back.horizon_limit == fewest.horizon_limit
    with pytest.raises(CalibrationError, match="breaks the horizon constraint"):
        plan_staleness(learning_rate=1.01 * fewest.learning_rate, updates=50)


def test_a_plan_for_far_fewer_updates_than_the_longest_run_says_that_it_may_be_too_bold() -> None:
    assert plan(updates=500).notes == ()  # half of 1000
    assert plan(updates=499).notes == (
        "the sweep has runs of up to 1000 updates; if collapses depend less on T than the law says, this plan is too "
        "bold for 499: sweep with the T that you train with",
    )


def test_input_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="staleness must be a whole number >= 1, got -1"):
        plan(staleness=-1)
    with pytest.raises(ValueError, match="updates must be a whole number >= 1, got 0"):
        plan(updates=0)
    with pytest.raises(ValueError, match=r"update_norm_per_lr must be positive and finite, got 0\.0"):
        plan(norm=0.0)
    with pytest.raises(ValueError, match="updates must be a whole number >= 1, got 0"):
        plan_staleness(updates=0)
    with pytest.raises(ValueError, match=r"learning_rate must be positive and finite, got 0\.0"):
        plan_staleness(learning_rate=0.0)
    with pytest.raises(ValueError, match="update_norm_per_lr must be positive and finite, got nan"):
        plan_staleness(norm=math.nan)


def test_a_plan_on_lower_bounds_says_so() -> None:
    open_batch = replace(FIT, batch_radius=Estimate(math.nan, 0.1, math.inf, known=False))
    found = plan(open_batch)
    assert found.batch_limit == pytest.approx(0.1 * MARGIN / (128 * 2), rel=1e-12)
    note = "R_batch is not determined; planned with its lower bound 0.1, the largest drift that survived"
    assert found.notes == (note,)
    assert plan_staleness(open_batch, learning_rate=1e-4).notes == (note,)
    nothing = replace(
        open_batch,
        critical_radius=Estimate(math.nan, 0.5, math.inf, known=False),
        scatter=0.5,
        scatter_known=False,
    )
    assert plan(nothing).notes == (
        note,
        "R_crit is not determined; planned with its lower bound 0.5, the largest drift that survived",
        "the scatter between runs is not determined; 0.5 is assumed",
    )


@pytest.mark.parametrize(("field", "name"), [("batch_radius", "R_batch"), ("critical_radius", "R_crit")])
def test_a_radius_without_a_lower_bound_plans_nothing(field: str, name: str) -> None:
    nothing = replace(FIT, **{field: Estimate(math.nan, 0.0, 0.1, known=False)})
    message = (
        rf"{name} is unknown: no run survived \(20 of 40 collapsed\), so nothing bounds it from below; run a sweep"
    )
    with pytest.raises(CalibrationError, match=message):
        plan(nothing)
    with pytest.raises(CalibrationError, match=message):
        plan_staleness(nothing)
    with pytest.raises(CalibrationError, match=message):
        budget_used(nothing, batch_drift=0.1, cumulative_drift=0.1)


# --- watching a run --------------------------------------------------------------------------------------------------


def test_the_budget_that_is_used() -> None:
    used = budget_used(FIT, batch_drift=0.05, cumulative_drift=0.5)
    assert used.batch == pytest.approx(0.25, rel=1e-12)  # 0.05/0.2
    assert used.horizon == pytest.approx(0.5, rel=1e-12)  # 0.5/1.0
    assert used.nearer == "horizon"
    assert budget_used(FIT, batch_drift=0.15, cumulative_drift=0.5).nearer == "batch"  # 0.75 > 0.5
    assert budget_used(FIT, batch_drift=0.0, cumulative_drift=0.0).nearer == "batch"  # even: the batch is named


@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf])
@pytest.mark.parametrize("name", ["batch_drift", "cumulative_drift"])
def test_a_drift_that_is_none_is_refused(name: str, value: float) -> None:
    drifts = {"batch_drift": 0.1, "cumulative_drift": 0.1} | {name: value}
    with pytest.raises(ValueError, match=f"{name} must be finite and not negative, got {value}"):
        budget_used(FIT, **drifts)
