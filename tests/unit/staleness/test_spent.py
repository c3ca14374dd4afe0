"""Stages that end when their rollouts are spent: their sizes and their end."""

from __future__ import annotations

import math

import numpy as np
import pytest

from stalewise.staleness.spent import (
    GROWTH,
    HEADROOM,
    Stage,
    StageSchedule,
    fresh_ess,
    is_spent,
    next_stage,
    remaining_ess,
    useful_share,
)


def test_sizes_of_stages_follow_what_was_used() -> None:
    schedule = StageSchedule(updates=100, updates_per_generation=100)
    first = next_stage(schedule, 0, was_spent=False, per_update=4)
    schedule = StageSchedule(100, 100, stages=(first,))
    grown = next_stage(schedule, first.planned_updates, was_spent=False, per_update=4)
    assert grown.planned_updates == GROWTH * first.planned_updates
    assert grown.first_prompt == 4 * first.planned_updates
    schedule = StageSchedule(100, 100, stages=(first, grown))
    shrunk = next_stage(schedule, grown.first_update + 4, was_spent=True, per_update=4)
    assert shrunk.planned_updates == HEADROOM * 4
    assert shrunk.first_prompt == grown.first_prompt + 4 * grown.planned_updates  # unused prompts are passed over
    assert next_stage(schedule, 98, was_spent=False, per_update=4).planned_updates == 2  # no more than is left


def test_a_stage_serves_the_updates_before_the_next_one_began() -> None:
    schedule = StageSchedule(100, 100, stages=(Stage(0, 0, 8, 0), Stage(1, 5, 6, 32)))
    assert (schedule.updates_of(0), schedule.updates_of(1), schedule.at(7).age) == (range(5), range(5, 11), 2)
    assert remaining_ess([1.0, 0.97, 0.2, 0.95]) == 0.95
    assert next_stage(StageSchedule(100, 100, stages=(Stage(0, 0, 8, 0),)), 5, was_spent=True, per_update=4) == Stage(
        1, 5, 7, 32
    )


def test_a_stage_without_a_begin_has_no_step() -> None:
    with pytest.raises(IndexError, match=r"no stage .* has begun"):
        StageSchedule(updates=4, updates_per_generation=4).at(0)
    assert StageSchedule(10, 10, stages=(Stage(0, 0, 8, 0),)).at(9).age == 9


@pytest.mark.parametrize(
    ("ess", "spent"),
    [
        ([1.0, 0.1, 1.0], False),  # one heavy token is no reason
        ([1.0, 0.1, 0.1], True),
        ([0.1, 0.1], False),  # too few to tell
        ([1.0, 1.0, math.nan], True),  # unknown is not fine
        ([0.8, 0.79, 0.78], False),  # as low as from the start: new rollouts would be no better
        ([0.8, 0.7, 0.6], True),
        ([1.0, 0.9, 0.9], False),  # at the bound, not below it
    ],
)
def test_spent_is_what_the_median_of_the_last_updates_says(ess: list[float], spent: bool) -> None:
    assert is_spent(ess, bound=0.9) == spent


def test_nothing_measured_is_not_known() -> None:
    assert math.isnan(remaining_ess([])) and math.isnan(fresh_ess([]))


def test_a_stage_begins_where_the_last_one_was_used_up_or_spent() -> None:
    schedule = StageSchedule(12, 12)
    begun = schedule.begin_stage(0, was_spent=False, per_update=4)
    assert begun is not None and begun[1] == Stage(0, 0, 8, 0)
    schedule = begun[0]
    assert schedule.is_open_ended
    for version, was_spent in ((0, False), (0, True), (7, False)):
        assert schedule.begin_stage(version, was_spent=was_spent, per_update=4) is None
    for version, was_spent, planned in ((3, True, 4), (8, False, 4)):
        begun = schedule.begin_stage(version, was_spent=was_spent, per_update=4)
        assert begun is not None and begun[1] == Stage(1, version, planned, 32)
        assert begun[0].generation_batches == 2 and begun[0].forget_after(version - 1) == schedule
    assert schedule.begin_stage(12, was_spent=False, per_update=4) == (schedule, Stage(1, 12, 0, 32))  # the end


def test_why_a_stage_ends_is_given_with_its_numbers() -> None:
    schedule = StageSchedule(12, 12, stages=(Stage(0, 0, 8, 0),))
    numbers = {"fresh_ess": 1.0, "bound": 0.9, "planned_updates": 8}
    assert schedule.spent([1.0, 0.95, 0.9], math.nan, 0.9) is None
    assert schedule.spent([1.0, 0.8, 0.7], 2.0, 0.9) == {"reason": "effective sample size", "ess": 0.8, **numbers}
    drifted = {"reason": "drift", "ess": 0.95, **numbers, "batch_budget": 1.0}
    assert schedule.spent([1.0, 0.95, 0.9], 1.0, 0.9) == drifted


def test_the_newest_stage_decides_whether_one_continues() -> None:
    schedule = StageSchedule(100, 100, stages=(Stage(0, 0, 8, 0), Stage(1, 8, 8, 32)))
    assert schedule.begin_stage(10, was_spent=False, per_update=4) is None  # within the second
    begun = schedule.begin_stage(16, was_spent=False, per_update=4)
    assert begun is not None and isinstance(begun[1], Stage) and begun[1].first_update == 16


@pytest.mark.parametrize("deviation", [0.05, 0.3, 0.8])
def test_both_measures_agree_for_log_ratios_of_a_normal_distribution(deviation: float) -> None:
    z = np.linspace(-12, 12, 40_001)
    mass = np.exp(-(z**2) / 2) / np.exp(-(z**2) / 2).sum()
    log_ratio = deviation * z - deviation**2 / 2  # so that the mean ratio is 1
    ess = (mass * np.exp(log_ratio)).sum() ** 2 / (mass * np.exp(2 * log_ratio)).sum()
    kl = (mass * (np.exp(log_ratio) - 1 - log_ratio)).sum()
    assert ess == pytest.approx(math.exp(-2 * kl), rel=1e-9)
    assert useful_share(1.0, kl) == pytest.approx(ess, rel=1e-9) == useful_share(ess, 0.0)


def test_tokens_that_became_rare_count_though_the_weights_hide_them() -> None:
    ratios = np.array([1.0] * 95 + [1e-12] * 5)
    ess = ratios.sum() ** 2 / (len(ratios) * (ratios**2).sum())
    kl = float((ratios - 1 - np.log(ratios)).mean())
    assert ess == pytest.approx(0.95) and useful_share(ess, kl) < 0.1
    assert useful_share(0.5, 0.01) == 0.5  # heavy tokens: the weights decide
    assert useful_share(1.0, 0.0) == 1.0 and useful_share(1.0, math.inf) == 0.0
    assert math.isnan(useful_share(math.nan, 0.0)) and math.isnan(useful_share(1.0, math.nan))
