"""The staleness law: likelihood by hand, recovery and coverage on simulated sweeps, and what a sweep cannot say."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest
import scipy.optimize
from scipy.stats import norm

from stalewise.errors import CalibrationError
from stalewise.staleness.law import Domain, Estimate, Fit, Law, Observation, fit, log_likelihood, simulate
from stalewise.staleness.likelihood import draw, log_mass


def run(staleness: int = 8, learning_rate: float = 0.01, updates: int = 100, collapsed_at: int | None = None):
    return Observation(staleness, learning_rate, updates, collapsed_at, update_norm_per_lr=1.0)


def sweep(
    law: Law,
    seed: int = 0,
    stalenesses: tuple[int, ...] = (4, 16, 64, 256),
    rates: tuple[float, float, int] = (2e-4, 2e-2, 10),
    updates: int = 512,
) -> list[Observation]:
    generator = np.random.default_rng(seed)
    return [
        simulate(
            law,
            staleness=staleness,
            learning_rate=float(rate),
            updates=updates,
            update_norm_per_lr=1.0,
            generator=generator,
        )
        for staleness in stalenesses
        for rate in np.geomspace(*rates)
    ]


# --- records ---------------------------------------------------------------------------------------------------------


def test_drifts_of_an_observation() -> None:
    observation = Observation(8, 0.5, 100, 40, 0.25)
    assert observation.batch_drift == 1.0  # 8 · 0.5 · 0.25
    assert observation.horizon_drift == 12.5  # 100 · 0.5 · 0.25
    assert observation.collapse_drift == 5.0  # 40 · 0.5 · 0.25
    assert replace(observation, collapsed_at=None).collapse_drift is None


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("staleness", 0, "staleness must be a whole number >= 1, got 0"),
        ("staleness", 1.5, "staleness must be a whole number >= 1, got 1.5"),
        ("updates", 0, "updates must be a whole number >= 1, got 0"),
        ("learning_rate", 0.0, "learning_rate must be positive and finite, got 0.0"),
        ("learning_rate", math.inf, "learning_rate must be positive and finite, got inf"),
        ("learning_rate", math.nan, "learning_rate must be positive and finite, got nan"),
        ("update_norm_per_lr", -1.0, "update_norm_per_lr must be positive and finite, got -1.0"),
        ("collapsed_at", 0, "collapsed_at must be in 1..updates = 1..100, got 0"),
        ("collapsed_at", 101, "collapsed_at must be in 1..updates = 1..100, got 101"),
    ],
)
def test_an_observation_refuses_what_cannot_be(field: str, value: float, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        replace(run(), **{field: value})
    assert str(caught.value) == message


def test_the_edges_of_an_observation_are_allowed() -> None:
    assert run(staleness=1, updates=1, collapsed_at=1).collapsed_at == 1
    assert run(collapsed_at=100).collapsed_at == 100


@pytest.mark.parametrize("field", ["batch_radius", "critical_radius", "scatter"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan])
def test_a_law_refuses_what_cannot_be(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field} must be positive.*{value}"):
        replace(Law(1.0, 1.0, 0.1), **{field: value})


def assert_immutable(record: object) -> None:
    assert not hasattr(record, "__dict__")
    with pytest.raises(FrozenInstanceError):
        setattr(record, next(iter(type(record).__annotations__)), 1)


def test_records_are_immutable() -> None:
    found = fit([run(4, rate) for rate in (0.01, 0.02, 0.03, 0.04, 0.05, 0.06)])
    for record in (run(), Law(1.0, 1.0, 0.1), found, found.domain):
        assert_immutable(record)
    assert_immutable(found.batch_radius)


# --- likelihood ------------------------------------------------------------------------------------------------------


def test_likelihood_of_a_survivor() -> None:
    # S·η·G = 8 · 0.01 = 0.08 = R_batch·e^-σ: z = -1, so the batch holds with Φ(1) = 0.8413447
    # T·η·G = 100 · 0.01 = 1 = R_crit·e^-2σ:  z = -2, so R_crit holds with Φ(2) = 0.9772499
    law = Law(0.08 * math.exp(0.3), math.exp(0.6), 0.3)
    # log 0.8413447 + log 0.9772499 = -0.1727538 - 0.0230129
    assert log_likelihood(law, [run()]) == pytest.approx(-0.1957667, abs=1e-7)


def test_likelihood_of_a_collapsed_run() -> None:
    # The batch: z = 1, so it breaks with Φ(1) = 0.8413447, and then at any of 100 updates alike: 0.008413447.
    # It holds with 0.1586553, and then R_crit = 0.4 is crossed in update 40, between drifts 0.39 and 0.40:
    # Φ(0) - Φ(log(0.39/0.40)/0.3) = 0.5 - Φ(-0.0843927) = 0.0336279; times 0.1586553 is 0.0053352.
    law = Law(0.08 * math.exp(-0.3), 0.4, 0.3)
    assert log_likelihood(law, [run(collapsed_at=40)]) == pytest.approx(math.log(0.008413447 + 0.0053352), abs=1e-5)


def test_likelihood_of_a_collapse_in_the_first_update() -> None:
    # The batch cannot break (R_batch = ∞). R_crit = 0.01 is crossed by drift 0.01 with Φ(0) = 1/2.
    assert log_likelihood(Law(math.inf, 0.01, 0.3), [run(collapsed_at=1)]) == pytest.approx(math.log(0.5), abs=1e-12)


def test_likelihood_without_a_horizon_constraint() -> None:
    # R_crit = ∞ and z_batch = 0: breaks with 1/2, in this one of 100 updates with 1/200; survives with 1/2.
    law = Law(0.08, math.inf, 0.3)
    assert log_likelihood(law, [run(collapsed_at=40)]) == pytest.approx(math.log(1 / 200), abs=1e-12)
    assert log_likelihood(law, [run()]) == pytest.approx(math.log(1 / 2), abs=1e-12)


def test_likelihood_is_the_density_in_t_where_updates_are_small_steps() -> None:
    # In 100 000 updates a step is 1e-5 of the drift: the mass of update t is φ(z)/(σ·t), z = log(t·η·G/R_crit)/σ.
    time, rate, scatter = 60_000, 1e-5, 0.2
    observation = Observation(4, rate, 100_000, time, 1.0)
    law = Law(4 * rate, 0.5, scatter)  # z_batch = 0: P = 1/2
    density = norm.pdf(math.log(time * rate / 0.5) / scatter) / (scatter * time)
    expected = math.log(0.5 / 100_000 + 0.5 * density)
    assert log_likelihood(law, [observation]) == pytest.approx(expected, abs=1e-4)


def test_likelihood_adds_over_runs() -> None:
    law, runs = Law(0.1, 0.7, 0.3), [run(), run(collapsed_at=40), run(16, 0.02, 50, 3)]
    assert log_likelihood(law, runs) == pytest.approx(sum(log_likelihood(law, [one]) for one in runs), abs=1e-12)


def test_what_a_run_may_do_adds_up_to_one() -> None:
    law = Law(0.1, 0.7, 0.4)
    outcomes = [run(), *(run(collapsed_at=update) for update in range(1, 101))]
    assert sum(math.exp(log_likelihood(law, [one])) for one in outcomes) == pytest.approx(1.0, abs=1e-12)


def test_likelihood_of_a_collapse_that_is_seen_later() -> None:
    # Alive at update 24, seen at 40: the batch broke (Φ(1) = 0.8413447) in 16 of 100 updates: 0.1346152. Or it held
    # and R_crit = 0.4 was crossed between drifts 0.24 and 0.40: Φ(0) - Φ(log(0.6)/0.3) = 0.5 - 0.0442994 = 0.4557006,
    # times 0.1586553 is 0.0722993.
    law = Law(0.08 * math.exp(-0.3), 0.4, 0.3)
    seen = replace(run(collapsed_at=40), resolution=16)
    assert log_likelihood(law, [seen]) == pytest.approx(math.log(0.1346152 + 0.0722993), abs=1e-5)
    # The same as all the updates in between together; and a look that reaches back beyond the start begins there.
    each = [math.exp(log_likelihood(law, [run(collapsed_at=update)])) for update in range(25, 41)]
    assert math.exp(log_likelihood(law, [seen])) == pytest.approx(sum(each), abs=1e-12)
    early = [math.exp(log_likelihood(law, [run(collapsed_at=update)])) for update in range(1, 9)]
    whole = log_likelihood(law, [replace(run(collapsed_at=8), resolution=32)])
    assert math.exp(whole) == pytest.approx(sum(early), abs=1e-12)


def test_who_looks_rarely_finds_the_same_constants_less_sharply() -> None:
    runs = sweep(Law(0.25, 1.0, 0.15), seed=3)
    coarse = [
        replace(one, resolution=128, collapsed_at=one.collapsed_at and -(-one.collapsed_at // 128) * 128)
        for one in runs
    ]
    sharp, seen = fit(runs, resamples=10), fit(coarse, resamples=10)
    naive = fit([replace(one, resolution=1) for one in coarse], resamples=10)
    truth = 1.0
    assert seen.critical_radius.low <= truth <= seen.critical_radius.high
    assert seen.critical_radius.value == pytest.approx(sharp.critical_radius.value, rel=0.1)
    assert abs(naive.critical_radius.value - truth) > abs(seen.critical_radius.value - truth)
    assert naive.critical_radius.low > truth  # sure of a wrong number


def test_runs_that_all_fell_before_the_first_look_only_bound_what_broke_them() -> None:
    runs = [Observation(4, rate, 64, 8, 1.0, resolution=8) for rate in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)]
    found = fit(runs, resamples=10)
    assert not found.critical_radius.known and not found.batch_radius.known
    assert "R_crit is not determined: every run collapsed, so at most 0.8 if" in found.describe()  # 8 · 0.1


def test_likelihood_far_in_both_tails_is_finite_and_right() -> None:
    # Mass between 30 and 31 standard deviations: φ-tail ratio says it is the upper tail at 30, log = -454.3212.
    assert log_mass(np.array([30.0]), np.array([31.0]))[0] == pytest.approx(-454.3212440, abs=1e-6)
    assert log_mass(np.array([-31.0]), np.array([-30.0]))[0] == pytest.approx(-454.3212440, abs=1e-6)
    value = log_likelihood(Law(1e6, 1e6, 0.02), [run(collapsed_at=1), run(collapsed_at=100)])
    assert -1e7 < value < -1e5


# --- simulation ------------------------------------------------------------------------------------------------------


def test_a_simulated_run_obeys_the_law_where_there_is_no_scatter() -> None:
    def collapsed_at(staleness: int, rate: float) -> int | None:
        generator = np.random.default_rng(0)
        law = Law(0.5, 1.005, 1e-9)
        return simulate(
            law,
            staleness=staleness,
            learning_rate=rate,
            updates=100,
            update_norm_per_lr=0.5,
            generator=generator,
        ).collapsed_at

    assert collapsed_at(10, 0.0200) is None  # T·η·G = 1.0, R_crit = 1.005
    assert collapsed_at(10, 0.0202) == 100  # crossed at 1.005/0.0101 = 99.5, so in update 100
    assert collapsed_at(10, 0.0800) == 26  # 1.005/0.04 = 25.1
    assert collapsed_at(1, 4.0) is not None  # S·η·G = 2 > 0.5: broken
    assert collapsed_at(1, 0.9) == 3  # S·η·G = 0.45 holds; 1.005/0.45 = 2.2


def test_simulated_runs_follow_the_likelihood() -> None:
    # What is drawn for one point, against what the likelihood says of it: survival, and each third of the horizon.
    law, draws, updates = Law(0.1, 0.9, 0.3), 20_000, 60
    columns = np.full(draws, 8.0), np.full(draws, 0.0125), np.full(draws, float(updates))
    drawn = draw(law.parameters(), *columns, np.random.default_rng(1))
    for first, last in ((0, 0), (1, 20), (21, 40), (41, 60)):
        share = float(np.mean((drawn >= first) & (drawn <= last)))
        expected = sum(
            math.exp(log_likelihood(law, [run(8, 0.0125, updates, time or None)])) for time in range(first, last + 1)
        )
        assert share == pytest.approx(expected, abs=4 * math.sqrt(0.25 / draws))


# --- fit -------------------------------------------------------------------------------------------------------------


def test_fit_recovers_the_constants() -> None:
    law = Law(0.25, 1.0, 0.15)
    found = fit(sweep(law, stalenesses=(4, 8, 16, 32, 64, 128, 256), rates=(2e-4, 2e-2, 40)), resamples=0)
    # 280 runs: the standard errors of the logarithms are near 0.05, 0.02 and 0.08; four of them are allowed.
    assert found.batch_radius.value == pytest.approx(0.25, rel=0.2)
    assert found.critical_radius.value == pytest.approx(1.0, rel=0.08)
    assert found.scatter == pytest.approx(0.15, rel=0.35)
    assert found.batch_radius.known and found.critical_radius.known and found.scatter_known


def profile_fall(runs: list[Observation], index: int, value: float, best: float) -> float:
    """How far the likelihood falls where one radius is held, by a search that shares nothing with the fit's."""

    def loss(free: np.ndarray) -> float:
        other = math.exp(free[0])
        batch, critical = (value, other) if index == 0 else (other, value)
        return -log_likelihood(Law(batch, critical, math.exp(free[1])), runs)

    starts = [(math.log(other), math.log(0.2)) for other in (0.1, 0.3, 1.0)]
    return best + min(scipy.optimize.minimize(loss, start, method="Nelder-Mead").fun for start in starts)


def test_the_fit_is_the_maximum_and_its_interval_where_the_profile_has_fallen() -> None:
    runs = sweep(Law(0.25, 1.0, 0.15), seed=3)
    found = fit(runs, confidence=0.9, resamples=0)
    law = Law(found.batch_radius.value, found.critical_radius.value, found.scatter)
    assert found.log_likelihood == pytest.approx(log_likelihood(law, runs), abs=1e-9)
    # Half the 90% quantile of χ² with one degree of freedom: 1.6448536² / 2 = 1.3527717
    for index, radius in enumerate((found.batch_radius, found.critical_radius)):
        assert radius.low < radius.value < radius.high
        assert profile_fall(runs, index, radius.value, found.log_likelihood) == pytest.approx(0.0, abs=1e-4)
        for end in (radius.low, radius.high):
            assert profile_fall(runs, index, end, found.log_likelihood) == pytest.approx(1.3527717, abs=5e-3)


def test_a_bootstrap_may_widen_the_interval_and_never_narrows_it() -> None:
    runs = sweep(Law(0.25, 1.0, 0.4), seed=1, stalenesses=(16, 256), rates=(4e-4, 1e-2, 6))
    plain, bootstrapped = fit(runs, resamples=0), fit(runs, resamples=40)
    assert bootstrapped.critical_radius.value == plain.critical_radius.value
    assert bootstrapped.critical_radius.low < plain.critical_radius.low
    assert bootstrapped.critical_radius.high > plain.critical_radius.high
    assert fit(runs, resamples=1).critical_radius.low <= plain.critical_radius.low


def test_more_confidence_is_a_wider_interval() -> None:
    runs = sweep(Law(0.25, 1.0, 0.15))
    narrow, wide = fit(runs, confidence=0.5, resamples=0), fit(runs, confidence=0.95, resamples=0)
    assert wide.batch_radius.low < narrow.batch_radius.low < narrow.batch_radius.high < wide.batch_radius.high


# A true 90% interval covers fewer than 48 of 60 sets 0.6% of the time.
@pytest.mark.nightly
def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    law, sets, least = Law(0.25, 1.0, 0.15), 60, 48
    found = [fit(sweep(law, seed=seed), confidence=0.9, resamples=20) for seed in range(100, 100 + sets)]
    for truth, name in ((0.25, "batch_radius"), (1.0, "critical_radius")):
        covered = sum(getattr(one, name).low <= truth <= getattr(one, name).high for one in found)
        assert covered >= least, f"{name}: {covered} of {sets}"
        # and a width that says something: ends within a factor of 4 of each other
        assert np.median([getattr(one, name).high / getattr(one, name).low for one in found]) < 4.0


def test_order_and_seed() -> None:
    runs = sweep(Law(0.25, 1.0, 0.15), rates=(2e-4, 2e-2, 6))
    shuffled = [runs[index] for index in np.random.default_rng(0).permutation(len(runs))]
    assert fit(runs, resamples=5, seed=1) == fit(shuffled, resamples=5, seed=1)
    # One resample, whose fall is the threshold where it is above 0.0079, as it nearly always is at 10% confidence.
    seeds = {fit(runs, confidence=0.1, resamples=1, seed=seed).critical_radius.low for seed in range(4)}
    assert len(seeds) > 1  # the bootstrap is used, and by this seed


def test_only_the_product_of_learning_rate_and_norm_matters() -> None:
    # A factor of 2 is exact in floating point, so the results are equal and not only close.
    runs = sweep(Law(0.25, 1.0, 0.15), rates=(2e-4, 2e-2, 6))
    scaled = [replace(one, learning_rate=one.learning_rate * 2, update_norm_per_lr=0.5) for one in runs]
    first, second = fit(runs, resamples=10), fit(scaled, resamples=10)
    assert (first.batch_radius, first.critical_radius) == (second.batch_radius, second.critical_radius)
    assert second.domain.learning_rate == tuple(2 * rate for rate in first.domain.learning_rate)


def test_radii_scale_with_drift() -> None:
    # Drifts that are all 8 times larger move both radii by 8 and leave the scatter.
    runs = sweep(Law(0.25, 1.0, 0.15), rates=(2e-4, 2e-2, 6))
    first, second = fit(runs, resamples=0), fit([replace(one, update_norm_per_lr=8.0) for one in runs], resamples=0)
    assert second.batch_radius.value == pytest.approx(8 * first.batch_radius.value, rel=1e-3)
    assert second.critical_radius.low == pytest.approx(8 * first.critical_radius.low, rel=1e-3)
    assert second.scatter == pytest.approx(first.scatter, rel=1e-3)


def test_the_domain_is_what_was_tried() -> None:
    runs = [
        run(4, 0.01, 100, 50),
        run(8, 0.02, 200),
        run(16, 0.04, 50, 3),
        run(4, 0.02, 100),
        run(8, 0.01, 100),
        run(4, 0.04, 100, 60),
    ]
    found = fit(runs, resamples=0)
    assert found.observations == 6
    assert found.domain == Domain(
        staleness=(4, 16),
        learning_rate=(0.01, 0.04),
        updates=(50, 200),
        batch_drift=(0.04, 0.64),  # 4 · 0.01 and 16 · 0.04
        horizon_drift=(1.0, 4.0),  # 100 · 0.01 and 200 · 0.02, also 100 · 0.04
        runs=6,
        collapsed=3,
    )


# --- what a sweep cannot say -----------------------------------------------------------------------------------------


def test_nothing_collapsed_gives_lower_bounds_only() -> None:
    found = fit([run(staleness, rate) for staleness in (4, 8) for rate in (0.01, 0.02, 0.04)])
    for radius, bound in ((found.batch_radius, 0.32), (found.critical_radius, 4.0)):  # 8 · 0.04 and 100 · 0.04
        assert math.isnan(radius.value) and not radius.known
        assert (radius.low, radius.high) == (pytest.approx(bound), math.inf)
    assert (found.scatter, found.scatter_known, found.log_likelihood) == (0.5, False, 0.0)
    assert found.describe() == (
        "6 runs, 0 collapsed. R_batch is not determined: at least 0.32, the largest drift that survived. "
        "R_crit is not determined: at least 4, the largest drift that survived. Scatter 0.5, assumed: not determined."
    )


def test_everything_collapsed_at_once_gives_upper_bounds_only() -> None:
    generator = np.random.default_rng(0)
    runs = [
        run(staleness, rate, 100, int(generator.integers(1, 101))) for staleness in (4, 8) for rate in (1, 2, 4, 8, 16)
    ]
    found = fit(runs, resamples=10)
    smallest = min(one.collapse_drift or math.inf for one in runs)
    for radius, bound in ((found.batch_radius, 4.0), (found.critical_radius, smallest)):  # S·η·G = 4 · 1
        assert math.isnan(radius.value) and not radius.known
        assert (radius.low, radius.high) == (0.0, bound)
    assert not found.scatter_known
    assert "R_batch is not determined: every run collapsed, so at most 4 if it is what broke them." in found.describe()


def test_everything_collapsed_at_one_drift_gives_that_radius_and_nothing_of_the_other() -> None:
    found = fit(sweep(Law(math.inf, 0.05, 0.15)), resamples=10)
    assert found.critical_radius.known
    assert found.critical_radius.low < 0.05 < found.critical_radius.high
    assert (found.batch_radius.low, found.batch_radius.high, found.batch_radius.known) == (0.0, math.inf, False)
    assert "R_batch is not determined: no run survived, and none broke it." in found.describe()


def test_only_horizon_collapses_leave_the_batch_radius_open() -> None:
    runs = sweep(Law(math.inf, 1.0, 0.15), seed=1, stalenesses=(4, 8, 16))
    found = fit(runs, resamples=10)
    assert found.critical_radius.known and found.scatter_known
    assert found.critical_radius.low < 1.0 < found.critical_radius.high
    assert not found.batch_radius.known and math.isnan(found.batch_radius.value)
    assert found.batch_radius.low == max(one.batch_drift for one in runs if one.collapsed_at is None)
    assert found.batch_radius.high == math.inf


def test_only_batch_collapses_leave_the_critical_radius_open() -> None:
    runs = sweep(Law(0.1, math.inf, 0.3), rates=(2e-4, 2e-2, 20))
    found = fit(runs, resamples=10)
    assert found.batch_radius.known
    assert found.batch_radius.low < 0.1 < found.batch_radius.high
    assert not found.critical_radius.known and math.isnan(found.critical_radius.value)
    assert found.critical_radius.low == max(one.horizon_drift for one in runs if one.collapsed_at is None)
    assert found.critical_radius.high == math.inf


def test_runs_that_are_told_apart_cleanly_do_not_say_their_scatter() -> None:
    # Every S·η·G <= 0.1 survives, every one >= 0.2 breaks, at updates that tell nothing.
    times = iter((7, 93, 41, 66, 12, 80, 29, 55))
    rates = (0.0125, 0.025, 0.05, 0.1)
    runs = [run(s, r / s * 4, 100, next(times) if 4 * r > 0.15 else None) for s in (4, 16, 32, 64) for r in rates]
    found = fit(runs, resamples=0)
    assert found.batch_radius.known and not found.scatter_known
    assert found.scatter == 0.5
    assert found.batch_radius.low < 0.2 and found.batch_radius.high > 0.1


def test_description_of_what_is_known() -> None:
    domain = Domain((1, 2), (0.1, 0.2), (9, 9), (0.1, 0.4), (0.9, 1.8), runs=12, collapsed=5)
    known = Fit(Estimate(0.25, 0.2, 0.3125, True), Estimate(1.0, 0.9, 1.1, True), 0.15, True, domain, 12, 0.9, -3.0)
    assert known.describe() == (
        "12 runs, 5 collapsed. R_batch = 0.25 (90% interval 0.2 to 0.312). "
        "R_crit = 1 (90% interval 0.9 to 1.1). Scatter 0.15."
    )


def test_too_few_runs_are_refused() -> None:
    runs = [run(4, rate) for rate in (0.01, 0.02, 0.03, 0.04, 0.05)]
    with pytest.raises(CalibrationError, match="5 runs cannot calibrate the law: at least 6 are needed"):
        fit(runs)
    assert fit([*runs, run(8)]).observations == 6


def test_runs_at_one_point_are_refused() -> None:
    with pytest.raises(CalibrationError, match=r"all 6 runs are at one point \(S = 8, η = 0.01, T = 100\)"):
        fit([run(collapsed_at=time) for time in (None, 5, 6, 7, 8, 9)])


@pytest.mark.parametrize("confidence", [0.0, 1.0, math.nan])
def test_a_confidence_that_is_none_is_refused(confidence: float) -> None:
    with pytest.raises(ValueError, match="confidence must be between 0 and 1"):
        fit(sweep(Law(0.25, 1.0, 0.15)), confidence=confidence)


def test_negative_resamples_are_refused() -> None:
    with pytest.raises(ValueError, match="resamples must not be negative, got -1"):
        fit(sweep(Law(0.25, 1.0, 0.15)), resamples=-1)


def test_the_defaults_are_the_documented_ones() -> None:
    assert fit.__kwdefaults__ == {"confidence": 0.9, "resamples": 200, "seed": 0}
