from __future__ import annotations

import math
from collections.abc import Iterable
from functools import reduce
from typing import Any

import numpy as np
import pytest

from stalewise.staleness.collapse import (
    Assessment,
    Collapse,
    CollapseDetector,
    Degradation,
    PolicyScore,
    assess,
    scores_from_rewards,
)


def find_collapse(values: Iterable[float], **rule: Any) -> Collapse | None:
    return reduce(CollapseDetector.observe, values, CollapseDetector(**rule)).collapse


def test_collapse_is_dated_at_the_first_update_below_half_of_the_best() -> None:
    # smoothing 1: best .8, line .4; falls to .3 at index 3 and stays for a window of 2 after it.
    assert find_collapse([0.5, 0.8, 0.5, 0.3, 0.3, 0.3], smoothing=1, window=2) == Collapse(
        update=3, reason="below half of best", best=0.8, value=0.3
    )


def test_smoothing_is_a_rolling_mean_over_full_windows_only() -> None:
    # Means of 2: .6 (index 1), .8, .5, .15 (index 4: first below .4), .1, .1.
    found = find_collapse([0.4, 0.8, 0.8, 0.2, 0.1, 0.1, 0.1], smoothing=2, window=2)
    assert found is not None
    assert (found.update, found.best, found.value) == (4, 0.8, pytest.approx(0.15))
    # A lucky first value is not the best: the mean of the first four is .25.
    assert find_collapse([1.0, 0.0, 0.0, 0.0] + [0.2] * 40, smoothing=4, window=4) is None


def test_noise_that_recovers_is_no_collapse() -> None:
    curve = ([0.8] * 8 + [0.1] * 3) * 6 + [0.8] * 8
    assert find_collapse(curve, smoothing=1, window=3) is None
    assert find_collapse(curve, smoothing=1, window=2) is not None  # 3 low values outlast a window of 2


def test_coming_back_exactly_to_the_line_is_a_recovery() -> None:
    assert find_collapse([0.8, 0.3, 0.4, 0.3, 0.4, 0.3], smoothing=1, window=2) is None


def test_prosperity_before_collapse() -> None:
    curve = [min(0.95, 0.4 + 0.01 * i) for i in range(100)] + [max(0.02, 0.95 - 0.05 * i) for i in range(100)]
    found = find_collapse(curve)
    assert found is not None
    assert found.reason == "below half of best"
    assert found.best == pytest.approx(0.95)
    # The raw curve crosses .475 at index 110 (.95 − .05·10 = .45); the mean of 8 values is 3.5 updates late.
    assert found.update == 113


def test_slow_decay_is_found_when_it_crosses_the_line() -> None:
    curve = [0.8 - 0.001 * i for i in range(800)]
    found = find_collapse(curve)
    assert found is not None
    # Best: mean of the first 8 = .8 − .0035; line .39825; the mean of 8 at t is .8 − .001·(t − 3.5) < .39825: t = 406.
    assert found.update == 406


def test_a_slow_climb_and_a_plateau_are_none() -> None:
    assert find_collapse([0.01 * i for i in range(100)] + [0.6] * 100) is None


def test_non_finite_values_are_collapse_at_once() -> None:
    for bad in (math.nan, math.inf):
        found = find_collapse([0.5] * 10 + [bad, 0.5], smoothing=2)
        assert found is not None
        assert (found.update, found.reason, found.best) == (10, "not finite", 0.5)
    found = find_collapse([math.nan])
    assert found is not None
    assert math.isnan(found.best)
    assert CollapseDetector().observe(0.5).observe(math.nan).seen == 2  # the bad value was seen, too


def test_the_floor_is_where_half_is_measured_from() -> None:
    # Rewards from −1 (useless) to 0: best −.2; half way up from −1 is −.6.
    assert find_collapse([-0.2, -0.5, -0.5, -0.5], smoothing=1, window=1, floor=-1.0) is None
    assert find_collapse([-0.2, -0.7, -0.7, -0.7], smoothing=1, window=1, floor=-1.0) is not None
    # Never above the floor: there is nothing to collapse from.
    assert find_collapse([0.0] * 50, smoothing=1, window=1) is None
    assert find_collapse([-0.1] * 50 + [-5.0] * 50, smoothing=1, window=1) is None


def test_smoothing_and_window_are_settings() -> None:
    found = find_collapse([0.4] * 8 + [0.9] * 8 + [0.1] * 8, smoothing=4, window=4)
    assert found is not None and found.update == 18


def test_the_fraction_is_a_setting() -> None:
    assert find_collapse([1.0, 0.6, 0.6, 0.6], smoothing=1, window=1, fraction=0.7) is not None
    assert find_collapse([1.0, 0.6, 0.6, 0.6], smoothing=1, window=1, fraction=0.5) is None


def test_danger_is_visible_before_it_is_certain_and_a_collapse_stays() -> None:
    detector = CollapseDetector(smoothing=1, window=3)
    for value in (0.8, 0.3, 0.3):
        detector = detector.observe(value)
    assert (detector.below_since, detector.below_value, detector.collapse, detector.seen) == (1, 0.3, None, 3)
    assert detector.line == 0.4
    recovered = detector.observe(0.7)
    assert (recovered.below_since, recovered.best) == (None, 0.8)
    assert math.isnan(recovered.below_value)
    collapsed = detector.observe(0.3).observe(0.3)
    assert collapsed.collapse is not None
    assert collapsed.observe(0.9) is collapsed


def test_bad_settings_are_named() -> None:
    for bad in ({"smoothing": 0}, {"window": 0}, {"fraction": 0.0}, {"fraction": 1.0}):
        with pytest.raises(ValueError, match="smoothing, window and fraction are"):
            CollapseDetector(**bad)  # type: ignore[arg-type]
    CollapseDetector(smoothing=1, window=1)


def test_defaults_are_those_of_the_documents() -> None:
    detector = CollapseDetector()
    assert (detector.smoothing, detector.window, detector.fraction, detector.floor) == (8, 32, 0.5, 0.0)
    assert find_collapse([0.8] * 8 + [0.0] * 35) is None  # below since index 12: the window ends at index 44
    found = find_collapse([0.8] * 8 + [0.0] * 37)
    assert found is not None
    assert found.update == 12


# ---------------------------------------------------------------- which policies are good


def test_what_is_not_beyond_doubt_is_no_trouble() -> None:
    def evidence(version: int, value: float, error: float, updates: int = 8, is_last: bool = False) -> PolicyScore:
        return PolicyScore((version,), updates, value, error, is_last)

    def judged(*found: PolicyScore) -> Assessment:
        return assess(found, fraction=0.9, window=8, reason="it fell")

    good = evidence(8, 0.9, 0.01)
    doubtful = judged(good, evidence(16, 0.75, 0.04))
    assert doubtful.degradation is None and doubtful.good == {8} and doubtful.poor == {16}  # nobody goes back to that
    last = judged(good, evidence(16, 0.75, 0.04, is_last=True))
    assert last.degradation is not None  # nothing comes after it that could clear it
    assert judged(good, evidence(16, 0.75, 0.2, is_last=True)).degradation is None
    assert judged(good, evidence(16, 0.5, 0.05, updates=4)).degradation is None  # not for long enough
    in_a_row = judged(good, evidence(16, 0.5, 0.05, updates=4), evidence(20, 0.4, 0.05, updates=4))
    assert in_a_row.degradation is not None and in_a_row.degradation.bad_version == 16
    assert in_a_row.good == in_a_row.best == {8}
    came_back = [evidence(16, 0.5, 0.05, updates=4), evidence(20, 0.9, 0.05), evidence(24, 0.4, 0.05, updates=4)]
    assert judged(good, *came_back).degradation is None
    assert judged(evidence(0, -1.0, 0.1), evidence(8, -2.0, 0.1)).degradation is None  # nothing to lose
    assert judged(good, evidence(16, math.nan, 0.1)).degradation is None


def test_what_one_kind_of_evidence_calls_poor_is_not_good() -> None:
    first = Assessment(None, frozenset({0, 8}), frozenset(), frozenset({8}))
    second = Assessment(Degradation("it fell", 16), frozenset({0}), frozenset({8}), frozenset({0}))
    both = first | second
    assert both.degradation == Degradation("it fell", 16)
    assert both.good == {0} and both.best == {0, 8}
    third = Assessment(Degradation("it broke", 24))
    assert (third | second).degradation == (second | third).degradation == Degradation("it fell", 16)


def test_the_lower_bound_is_that_of_a_95_percent_interval() -> None:
    assert PolicyScore((0,), 8, value=0.5, error=0.1).lower_bound == pytest.approx(0.5 - 1.959964 * 0.1)


@pytest.mark.parametrize(("updates_per_generation", "reward"), [(4, 0.2), (8, 0.2), (4, 0.05), (32, 0.5)])
def test_a_policy_that_stays_as_it_is_is_hardly_ever_called_bad(updates_per_generation: int, reward: float) -> None:
    """128 updates of 32 prompts × 8 rollouts, whose prompts differ in difficulty."""
    alarms = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        found: list[tuple[int, float, float]] = []
        for update in range(128):
            difficulty = rng.beta(reward, 1 - reward, size=32)
            means = rng.binomial(8, difficulty) / 8
            version = update // updates_per_generation * updates_per_generation
            found.append((version, float(means.mean()), float(means.std(ddof=1) / np.sqrt(32))))
        evidence = scores_from_rewards(found, window=8)
        alarms += assess(evidence, fraction=0.9, window=8, reason="it fell").degradation is not None
    assert alarms <= 2


def test_rewards_without_an_error_prove_nothing() -> None:
    assert scores_from_rewards([(0, 0.5, math.nan), (0, math.nan, math.nan)], window=1) == []


def test_a_degradation_is_described_with_its_numbers() -> None:
    scores = [PolicyScore((8,), 8, 0.9, 0.01), PolicyScore((16,), 8, 0.5, 0.02)]
    found = assess(scores, fraction=0.9, window=8, reason="accuracy fell")
    assert found.degradation is not None and found.good == {8}
    assert found.degradation.describe() == "accuracy fell at version 16 (0.500, and it was 0.900)"


def test_rewards_are_pooled_by_version_and_up_to_a_window() -> None:
    found = scores_from_rewards([(0, 0.4, 0.03), (0, 0.6, 0.04), (2, 0.8, 0.0), (4, 0.6, 0.0), (6, 0.5, 0.1)], 2)
    pooled = [(one.versions, one.updates, one.value, round(one.error, 3)) for one in found]
    assert pooled == [((0,), 2, 0.5, 0.025), ((2, 4), 2, 0.7, 0.0), ((6,), 1, 0.5, 0.1)]
