"""The journal as seconds by stage and as a clock."""

from __future__ import annotations

import numpy as np
import pytest

from stalewise.reporting.read import (
    add_uncommitted,
    committed_updates,
    seconds_by_stage,
    total_seconds,
    update_clock,
)

JOURNAL = [
    {"time": 104.0, "event": "switch", "seconds": 4.0},  # 100 to 104
    {"time": 110.0, "event": "generate", "seconds": 5.0, "generation_batch": 0},  # 105 to 110, after 1 s of nothing
    {"time": 120.0, "event": "learn", "seconds": 10.0, "first": 0, "stop": 2},  # at once
    {"time": 150.0, "event": "evaluate", "seconds": 3.0},  # 147 to 150, after 27 s
    {"time": 152.0, "event": "generate", "seconds": 2.0, "generation_batch": 1},
]


# Updates 0 and 1 are in the journal; 2 and 3 are not yet: 0.5 + 0.25.
LEARNED = {"update": np.arange(4.0), "seconds": np.array([2.0, 6.0, 0.5, 0.25])}


def stage_of(update: int) -> int:
    return update // 2


def test_time_is_split_by_stage_and_the_rest_is_idle() -> None:
    spent = seconds_by_stage(JOURNAL, stage_of)
    assert sum(total_seconds(spent).values()) == pytest.approx(152 - 100)
    add_uncommitted(spent, LEARNED, 2, stage_of)
    assert spent[0] == pytest.approx({"switch": 4.0, "generate": 5.0, "learn": 10.0, "evaluate": 3.0, "idle": 28.0})
    assert spent[1] == pytest.approx({"generate": 2.0, "learn": 0.75})
    assert total_seconds(spent) == pytest.approx(
        {"generate": 7, "learn": 10.75, "switch": 4, "evaluate": 3, "idle": 28}
    )


def test_the_clock_of_updates_leaves_out_evaluating_and_idle_time() -> None:
    # 4 + 5 s before learning; its 10 s are dealt 2 : 6; then 2 s of generating, and what is not journalled.
    np.testing.assert_allclose(update_clock(JOURNAL, LEARNED, 2), [11.5, 19, 21.5, 21.75])
    # Without times of its own an update gets an equal share.
    np.testing.assert_allclose(update_clock(JOURNAL, {"update": np.arange(3.0)}, 2), [14, 19, np.nan])


def test_after_a_rollback_the_journal_is_ahead_of_the_run() -> None:
    assert committed_updates(JOURNAL, []) == 2
    assert committed_updates(JOURNAL, [{"time": 119.0, "to_version": 0}]) == 2
    assert committed_updates(JOURNAL, [{"time": 121.0, "to_version": 1}]) == 1
    assert committed_updates([], []) == 0
