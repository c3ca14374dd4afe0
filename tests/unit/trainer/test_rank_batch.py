"""How an update is dealt to ranks, how many there are, and how the policy lies on them."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from stalewise.config import make_config
from stalewise.distributed import VARIABLES, Launch, Message, environment_of_a_child, launched
from stalewise.errors import ConfigError
from stalewise.planning.memory import GIB, ModelShape, check_memory, estimate, pick_parallel
from stalewise.store import RolloutColumns
from stalewise.trainer.batch import UpdateBatch
from stalewise.trainer.micro_batch import Layout
from stalewise.trainer.rank_batch import deal_update, ranks_of_rows, unpack_share

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
    return UpdateBatch(rows, torch.from_numpy(random.normal(size=len(rows))), torch.ones(len(rows), dtype=torch.bool))


@pytest.mark.parametrize("layout", [PACKED, PADDED], ids=["packed", "padded"])
@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_every_row_is_dealt_once_and_ranks_have_about_as_many_tokens(world: int, layout: Layout) -> None:
    batch = update(groups=16)
    dealt = deal_update(batch, layout, 7.0, world=world)
    assert sorted(np.concatenate(dealt.rows)) == list(range(len(batch.rows)))
    for mine, share in zip(dealt.rows, dealt.shares, strict=True):
        assert share.batch.rows.rollout_id.tolist() == batch.rows.rollout_id[mine].tolist()
        assert torch.equal(share.batch.advantage, batch.advantage[torch.from_numpy(mine)])
        assert sorted(np.concatenate(share.plan)) == list(range(len(mine)))
        assert share.own == len(share.plan) <= share.whole.passes
    tokens = [int((part.batch.rows.response_lengths + part.batch.rows.prompt_lengths).sum()) for part in dealt.shares]
    if layout is PADDED:  # a row costs what it holds
        assert max(tokens) - min(tokens) <= 2 * int((batch.rows.response_lengths + batch.rows.prompt_lengths).max())
    rank_B = ranks_of_rows(batch.rows, layout, world)
    if layout is PACKED:  # those of one prompt stay together, but for the one at each cut
        split = [group for group in range(16) if len(set(rank_B[batch.rows.group == group])) > 1]
        assert len(split) < world


def test_ranks_keep_in_step_with_rows_that_have_no_weight() -> None:
    batch = update(groups=1, size=2)
    dealt = deal_update(batch, PACKED, 7.0, world=4, in_step=True)
    assert [share.own for share in dealt.shares].count(0) == 2
    shortest = batch.rows.rollout_id[np.argmin(batch.rows.response_lengths)]
    for share in dealt.shares:
        assert len(share.plan) == share.whole.passes == 1
        if share.own == 0:
            assert share.batch.rows.rollout_id.tolist() == [shortest]
            assert not share.batch.keep.any() and not share.batch.advantage.any()
    uneven = deal_update(update(groups=9), Layout(token_budget=24), 7.0, world=4, in_step=True).shares
    assert len({len(share.plan) for share in uneven}) == 1 < len({share.own for share in uneven})


def test_a_share_comes_out_of_a_message_as_it_went_in() -> None:
    share = deal_update(update(groups=3), PACKED, 7.0, world=2, in_step=True).shares[1]
    record, arrays = share.pack()
    again = unpack_share(Message("update", record, arrays))
    for field in fields(RolloutColumns):
        mine, theirs = getattr(share.batch.rows, field.name), getattr(again.batch.rows, field.name)
        assert mine.dtype == theirs.dtype and mine.tolist() == theirs.tolist()
    assert [part.tolist() for part in again.plan] == [part.tolist() for part in share.plan]
    assert (again.own, again.whole) == (share.own, share.whole)
    assert torch.equal(again.batch.keep, share.batch.keep)


@pytest.mark.parametrize("layout", [PACKED, PADDED], ids=["packed", "padded"])
def test_what_was_seen_of_tokens_comes_home_in_the_order_of_rows(layout: Layout) -> None:
    batch = update(groups=5)
    dealt = deal_update(batch, layout, 7.0, world=3, in_step=True)
    logp = np.full((3, dealt.shares[0].whole.tokens), 255, dtype=np.float32)
    for rank, share in enumerate(dealt.shares):
        seen = [share.batch.rows.response(int(row)) for part in share.plan[: share.own] for row in part]
        logp[rank, : sum(map(len, seen))] = np.concatenate(seen)
    record = dealt.token_record(lambda: (logp, logp.astype(np.uint8)))
    expected = np.concatenate([batch.rows.response(int(row)) for row in record.order])
    assert record.logp.tolist() == expected.tolist()
    assert sorted(record.order) == list(range(len(batch.rows)))
    row, part = int(dealt.shares[1].plan[0][0]), dealt.shares[1]
    assert dealt.first_of(1, 0, 2) == (part.batch.rows.rollout_id[row], 2)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_the_environment_says_how_many_there_are(environment: pytest.MonkeyPatch) -> None:
    assert launched() == Launch() and launched().is_first
    place = {"WORLD_SIZE": "4", "RANK": "3", "MASTER_ADDR": "here", "MASTER_PORT": "1", "LOCAL_RANK": "1"}
    for name, value in place.items():
        environment.setenv(name, value)
    assert launched() == Launch(3, 4, 1, 4) and not launched().is_first
    assert not set(VARIABLES) & environment_of_a_child().keys()
    environment.setenv("RANK", "three")
    with pytest.raises(ConfigError, match=r"the environment names no ranks .*RANK=three"):
        launched()
    environment.delenv("MASTER_PORT")
    with pytest.raises(ConfigError, match="WORLD_SIZE is 4 but MASTER_PORT is not set: start several processes with"):
        launched()


def test_a_policy_is_sharded_where_a_device_does_not_hold_it(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = ModelShape(2**28, 2**28, layers=2, hidden=8, inner=8, keys=8, vocabulary=10)
    monkeypatch.setattr("stalewise.planning.memory.model_shape", lambda source, config: shape)
    needed = estimate(make_config({}), "model")
    assert needed is not None and 5 * GIB < needed.least < needed.total < 7 * GIB

    def on(gib: float, world: int, **sections: Any) -> str:
        memory = SimpleNamespace(total=int(gib * GIB), available=int(gib * GIB))
        monkeypatch.setattr("stalewise.planning.memory.psutil.virtual_memory", lambda: memory)
        return pick_parallel(make_config(sections), "model", world, local_world=1)

    assert on(16, world=1) == "alone"
    assert on(16, world=2) == "replicated"
    assert on(7, world=2) == "sharded"
    assert on(7, world=2, model={"lora": {"rank": 4}}) == "replicated"
    assert on(7, world=2, learner={"parallel": "replicated"}) == "replicated"
    assert on(16, world=2, learner={"parallel": "sharded"}) == "sharded"
    on(4, world=2)
    assert "memory may run out" not in check_memory(make_config({}), "model", world=16, local_world=1)
    half = estimate(make_config({}), "model", shards=2)
    assert half is not None
    assert half.certain["moments"] * 2 == needed.certain["moments"]
    assert half.certain["sampler's weights"] == needed.certain["sampler's weights"]


def test_adapters_are_not_sharded_and_the_setting_may_change_on_the_way() -> None:
    with pytest.raises(ConfigError, match=r'learner\.parallel is "sharded", but adapters'):
        make_config({"learner": {"parallel": "sharded"}, "model": {"lora": {"rank": 4}}})
    one, other = (make_config({"learner": {"parallel": kind}}) for kind in ("replicated", "sharded"))
    assert one.identity() == other.identity()
