"""How an update is split over ranks, and put together again."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

from stalewise.distributed import Message
from stalewise.store import RolloutColumns
from stalewise.trainer.batch import UpdateBatch
from stalewise.trainer.micro_batch import Layout
from stalewise.trainer.rank_batch import RankBatch, ranks_of_rows, split_over_ranks, unpack_rank_batch

PACKED, PADDED = Layout(token_budget=100), Layout(token_budget=100, packed=False)


def update(groups: int, size: int = 4, seed: int = 0) -> UpdateBatch:
    random = np.random.default_rng(seed)
    prompts = np.repeat(random.integers(3, 9, groups), size)
    responses = random.integers(1, 20, groups * size)
    total = int(responses.sum())
    rows = RolloutColumns(
        rollout_id=np.arange(100, 100 + groups * size),
        group=np.repeat(np.arange(groups), size),
        reward=random.random(groups * size),
        truncated=np.zeros(groups * size, dtype=bool),
        version_first=np.zeros(groups * size, dtype=np.int32),
        version_last=np.zeros(groups * size, dtype=np.int32),
        prompt_ids=np.concatenate([np.full(n, place // size, dtype=np.int32) for place, n in enumerate(prompts)]),
        prompt_offsets=np.r_[0, prompts.cumsum()],
        response_ids=np.arange(total, dtype=np.int32),
        behaviour_logp=-np.ones(total, dtype=np.float32),
        response_offsets=np.r_[0, responses.cumsum()],
    )
    advantage_B, keep_B = random.normal(size=len(rows)), np.ones(len(rows), dtype=np.bool_)
    return UpdateBatch({}, rows.version_first, rows, advantage_B, keep_B, denominator=7.0)


def split(batch: UpdateBatch, layout: Layout, world: int, lockstep: bool = False) -> list[RankBatch]:
    columns = batch.rows, batch.advantage_B, batch.keep_B, batch.denominator
    return split_over_ranks(*columns, layout, world=world, lockstep=lockstep)


@pytest.mark.parametrize("layout", [PACKED, PADDED], ids=["packed", "padded"])
@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_every_row_is_on_one_rank_and_ranks_have_about_as_many_tokens(world: int, layout: Layout) -> None:
    batch = update(groups=16)
    ranks = split(batch, layout, world)
    assert sorted(np.concatenate([one.position_B for one in ranks])) == list(range(len(batch.rows)))
    for one in ranks:
        assert one.rows.rollout_id.tolist() == batch.rows.rollout_id[one.position_B].tolist()
        assert one.advantage_B.tolist() == batch.advantage_B[one.position_B].tolist()
        assert sorted(np.concatenate(one.plan)) == list(range(len(one.position_B)))
        assert one.own_micro_batches == len(one.plan) <= one.most_micro_batches
        assert one.denominator == 7.0
    tokens = [int((one.rows.response_lengths + one.rows.prompt_lengths).sum()) for one in ranks]
    if layout is PADDED:  # a row costs what it holds
        assert max(tokens) - min(tokens) <= 2 * int((batch.rows.response_lengths + batch.rows.prompt_lengths).max())
    rank_B = ranks_of_rows(batch.rows, layout, world)
    if layout is PACKED:  # those of one prompt stay together, but for the one at each cut
        divided = [group for group in range(16) if len(set(rank_B[batch.rows.group == group])) > 1]
        assert len(divided) < world


def test_ranks_keep_pace_with_rows_that_have_no_weight() -> None:
    batch = update(groups=1, size=2)
    ranks = split(batch, PACKED, world=4, lockstep=True)
    assert [one.own_micro_batches for one in ranks].count(0) == 2
    shortest = batch.rows.rollout_id[np.argmin(batch.rows.response_lengths)]
    for one in ranks:
        assert len(one.plan) == one.most_micro_batches == 1
        if one.own_micro_batches == 0:
            assert one.rows.rollout_id.tolist() == [shortest]
            assert not one.keep_B.any() and not one.advantage_B.any()
    uneven = split(update(groups=9), Layout(token_budget=24), world=4, lockstep=True)
    assert len({len(one.plan) for one in uneven}) == 1 < len({one.own_micro_batches for one in uneven})


def test_a_batch_comes_out_of_a_message_as_it_went_in() -> None:
    sent = split(update(groups=3), PACKED, world=2, lockstep=True)[1]
    record, arrays = sent.pack()
    again = unpack_rank_batch(Message("update", record, arrays))
    for field in fields(RolloutColumns):
        mine, theirs = getattr(sent.rows, field.name), getattr(again.rows, field.name)
        assert mine.dtype == theirs.dtype and mine.tolist() == theirs.tolist()
    assert [part.tolist() for part in again.plan] == [part.tolist() for part in sent.plan]
    for field in fields(RankBatch):
        if field.name not in ("rows", "plan"):
            assert np.array_equal(getattr(again, field.name), getattr(sent, field.name)), field.name


@pytest.mark.parametrize("layout", [PACKED, PADDED], ids=["packed", "padded"])
def test_token_values_are_recorded_in_the_order_of_rows(layout: Layout) -> None:
    batch = update(groups=5)
    batch = replace(batch, ranks=split(batch, layout, world=3, lockstep=True))
    logp = np.full((3, batch.ranks[0].most_tokens), 255, dtype=np.float32)
    for rank, one in enumerate(batch.ranks):
        values = [one.rows.response(int(row)) for part in one.plan[: one.own_micro_batches] for row in part]
        logp[rank, : sum(map(len, values))] = np.concatenate(values)
    record = batch.token_record(logp, logp.astype(np.uint8))
    expected = np.concatenate([batch.rows.response(int(row)) for row in record.order])
    assert record.logp.tolist() == expected.tolist()
    assert sorted(record.order) == list(range(len(batch.rows)))
    second = batch.ranks[1]
    assert second.token_at(0, 2) == (second.rows.rollout_id[int(second.plan[0][0])], 2)
