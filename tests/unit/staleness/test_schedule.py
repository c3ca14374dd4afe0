from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stalewise.staleness.schedule import (
    BatchSpan,
    ForkedSchedule,
    ListedSchedule,
    PastBatch,
    Schedule,
    pipelined,
    staged,
    synchronous,
)


def test_synchronous_is_four_updates_a_batch() -> None:
    steps = list(synchronous(updates=10).steps())
    assert [s.generation_batch for s in steps] == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]
    assert [s.version for s in steps] == [0, 0, 0, 0, 4, 4, 4, 4, 8, 8]
    assert [s.age for s in steps] == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert [s.update for s in steps] == list(range(10))
    assert synchronous(10, updates_per_generation=2).at(5).generation_batch == 2


def test_the_headline_setting() -> None:
    schedule = staged(updates=4096, stages=4)
    assert (schedule.updates_per_generation, schedule.generation_batches, schedule.worst_age) == (1024, 4, 1023)
    assert synchronous(4096).generation_batches == 1024
    assert staged(4096).updates_per_generation == 1024  # four stages unless said otherwise


def test_uneven_stages() -> None:
    schedule = staged(updates=10, stages=3)
    assert [list(schedule.updates_of(g)) for g in range(schedule.generation_batches)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9],
    ]


def test_pipelined_is_lag_batches_behind() -> None:
    # µ = 2, lag 1: batch 1 is made beside the learning of batch 0, so by version 0; batch 2 by version 2 …
    assert [pipelined(8, 2).version_of(g) for g in range(4)] == [0, 0, 2, 4]
    assert [pipelined(8, 2, lag=2).version_of(g) for g in range(4)] == [0, 0, 0, 2]
    assert [s.age for s in pipelined(8, 2).steps()] == [0, 1, 2, 3, 2, 3, 2, 3]
    assert pipelined(8, 2).worst_age == 3
    assert pipelined(8, 2, lag=2).worst_age == 5


@given(st.integers(1, 60), st.integers(1, 20), st.integers(0, 4))
def test_the_worst_age_is_known_beforehand(updates: int, per_generation: int, lag: int) -> None:
    schedule = Schedule(updates, per_generation, lag)
    assert schedule.worst_age == max(step.age for step in schedule.steps())


@given(st.integers(1, 60), st.integers(1, 20), st.integers(0, 4))
def test_every_update_belongs_to_one_batch_and_no_policy_is_used_before_it_exists(
    updates: int, per_generation: int, lag: int
) -> None:
    schedule = Schedule(updates, per_generation, lag)
    of_batches = [u for g in range(schedule.generation_batches) for u in schedule.updates_of(g)]
    assert of_batches == list(range(updates))
    for step in schedule.steps():
        assert step.update in schedule.updates_of(step.generation_batch)
        # When batch g is made, the learner has finished the batches before g − lag.
        assert 0 <= step.version <= step.update
        assert step.age == step.update - step.version


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"updates": 0, "updates_per_generation": 1}, "schedule updates is 0; expected at least 1"),
        ({"updates": 1, "updates_per_generation": 0}, "schedule updates_per_generation is 0; expected at least 1"),
        ({"updates": 1, "updates_per_generation": 1, "lag": -1}, "schedule lag is -1; expected at least 0"),
    ],
)
def test_bad_input_is_named(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Schedule(**arguments)


def test_bad_stages_and_updates_out_of_range() -> None:
    for stages in (0, 11):
        with pytest.raises(ValueError, match=f"schedule stages is {stages}; expected 1 to 10"):
            staged(10, stages)
    assert staged(10, 10).updates_per_generation == 1
    assert staged(10, 1).updates_per_generation == 10
    for update in (-1, 10):
        with pytest.raises(IndexError, match=f"update is {update}; expected 0 to 9"):
            synchronous(10).at(update)


def test_a_fixed_schedule_begins_forgets_and_ends_no_stage() -> None:
    schedule = staged(updates=8, stages=2)
    assert not schedule.is_open_ended
    assert schedule.begin_stage(4, was_spent=True, per_update=4) is None
    assert schedule.forget_after(0) is schedule
    assert schedule.spent([1.0, 0.1, 0.1], 2.0, 0.9) is None


def test_a_listed_schedule_follows_its_batches() -> None:
    # Three batches for 12 updates: 4, then 6 of which 5 were used before the third began, then the rest.
    schedule = ListedSchedule(12, 12, stages=(BatchSpan(0, 0, 4), BatchSpan(1, 4, 6), BatchSpan(2, 9, 9)))
    assert schedule.generation_batches == 3
    assert [schedule.updates_of(batch) for batch in range(3)] == [range(4), range(4, 9), range(9, 12)]
    assert [schedule.version_of(batch) for batch in range(3)] == [0, 4, 9]
    assert [schedule.at(update).generation_batch for update in range(12)] == [0] * 4 + [1] * 5 + [2] * 3
    assert [schedule.at(update).age for update in range(12)] == [0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1, 2]
    with pytest.raises(IndexError, match="update is 12"):
        schedule.at(12)


def test_a_forked_schedule_begins_after_the_batches_of_another() -> None:
    past = (PastBatch(0, 0, 2, 0), PastBatch(1, 2, 1, 0))  # three updates, all on rollouts of version 0
    schedule = ForkedSchedule(8, 2, 1, past=past, first_prompt=40)
    assert schedule.begins_at == 3
    assert schedule.generation_batches == 2 + 3  # of 2, 2 and 1 updates
    assert [(s.generation_batch, s.version, s.age) for s in schedule.steps()] == [
        *((0, 0, 0), (0, 0, 1), (1, 0, 2)),
        *((2, 3, 0), (2, 3, 1), (3, 3, 2), (3, 3, 3), (4, 5, 2)),  # one batch ahead: 2 and 3 are of version 3
    ]
    assert [list(schedule.updates_of(g)) for g in range(5)] == [[0, 1], [2], [3, 4], [5, 6], [7]]
    assert [schedule.prompts_of(g, 4) for g in (1, 2, 4)] == [range(0), range(40, 48), range(56, 60)]
    assert schedule.worst_age == 3
    with pytest.raises(IndexError):
        schedule.at(8)
    assert ForkedSchedule(4, 2, first_prompt=8).at(3).version == 2


def test_the_worst_age_of_a_forked_schedule_may_be_of_its_past() -> None:
    past = (PastBatch(0, 0, 2, 0), PastBatch(1, 2, 4, 0), PastBatch(2, 6, 1, 6))
    schedule = ForkedSchedule(10, 1, past=past)
    assert (schedule.begins_at, schedule.worst_age) == (7, 5)  # update 5 learns from rollouts of version 0
