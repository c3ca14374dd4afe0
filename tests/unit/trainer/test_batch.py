"""Which rollouts an update learns from, what its loss is divided by, and how it is split over ranks."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from stalewise.distributed import Message
from stalewise.errors import StoreError
from stalewise.store import RolloutColumns
from stalewise.trainer.batch import RankBatch, UpdateBatch, ranks_of_rows, split_over_ranks, unpack_rank_batch
from stalewise.trainer.micro_batch import Layout
from stalewise.trainer.trainer import Trainer
from trainer_inputs import (
    POLICY,
    config,
    rollouts,
)


def test_rollouts_without_a_reward_are_left_out_and_counted() -> None:
    rows = rollouts()
    rows.reward[5] = math.nan
    metrics = Trainer(config(), POLICY).update(rows)
    assert metrics["verifier_error_fraction"] == pytest.approx(1 / 12)
    kept = [row for row in range(12) if row != 5]
    assert metrics["loss"] == pytest.approx(Trainer(config(), POLICY).update(rows.take(kept))["loss"], rel=1e-4)
    assert metrics["reward"] == pytest.approx(np.nanmean(rows.reward))


def test_a_batch_that_teaches_nothing_changes_nothing() -> None:
    trainer = Trainer(config(objective={"name": "p3o"}), POLICY)
    before = [parameter.detach().clone() for parameter in trainer.names]
    rows = rollouts()
    rows.reward[:] = 1.0
    assert trainer.update(rows)["taken"] == 0.0
    rows.reward[:] = math.nan
    assert trainer.update(rows)["taken"] == 0.0
    assert trainer.version == 2
    assert all(torch.equal(p, b) for p, b in zip(trainer.names, before, strict=True))


def test_dapo_drops_groups_without_variance_from_the_denominator() -> None:
    rows = rollouts()
    rows.reward[:4] = 1.0
    dapo = Trainer(config(objective={"name": "dapo"}), POLICY).update(rows)
    grpo = Trainer(config(objective={"name": "grpo"}), POLICY).update(rows)
    assert dapo["tokens"] == rows.response_lengths[4:].sum()
    assert grpo["tokens"] == rows.response_lengths.sum()
    assert dapo["degenerate_fraction"] == grpo["degenerate_fraction"] == pytest.approx(1 / 3)


def test_truncated_responses_can_be_masked() -> None:
    rows = rollouts()
    metrics = Trainer(config(objective={"truncated": "mask"}), POLICY).update(rows)
    assert metrics["tokens"] == rows.response_lengths[~rows.truncated].sum()


def test_dr_grpo_divides_by_a_constant() -> None:
    rows = rollouts(drift=0.0)
    trainer = Trainer(config(objective={"name": "dr_grpo"}), POLICY)
    metrics = trainer.update(rows)
    centred = rows.reward - np.repeat(rows.reward.reshape(3, 4).mean(axis=1), 4)
    # Fresh data: r = 1, so the loss is −Σ_tokens A / (12 · 64).
    assert metrics["loss"] == pytest.approx(-(centred * rows.response_lengths).sum() / (12 * 64), abs=1e-5)


def test_an_empty_response_is_named() -> None:
    rows = rollouts()
    lengths = rows.response_lengths
    lengths[5] = 0
    keep = np.repeat(np.arange(len(rows)) != 5, rows.response_lengths)
    empty = replace(
        rows,
        response_ids=rows.response_ids[keep],
        behaviour_logp=rows.behaviour_logp[keep],
        response_offsets=np.r_[0, lengths.cumsum()],
    )
    with pytest.raises(StoreError, match="rollout 5 has no prompt or no response tokens"):
        Trainer(config(), POLICY).update(empty)


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
    return split_over_ranks(batch, layout, world=world, lockstep=lockstep)


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
    whole = update(groups=3)
    whole = replace(whole, rows=replace(whole.rows, reference_logp=whole.rows.behaviour_logp - np.float32(1.0)))
    sent = split(whole, PACKED, world=2, lockstep=True)[1]
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


def test_rows_without_a_reference_have_none_after_a_message() -> None:
    record, arrays = split(update(groups=3), PACKED, world=2, lockstep=True)[1].pack()
    assert unpack_rank_batch(Message("update", record, arrays)).rows.reference_logp is None
