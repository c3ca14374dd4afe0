"""What micro-batches hold, and how much padding they have."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from stalewise.store import RolloutColumns
from stalewise.trainer.micro_batch import Layout, micro_batches
from stalewise.trainer.trainer import Trainer
from trainer_inputs import (
    CPU,
    POLICY,
    config,
    one_long_among_short,
    rollouts,
    tokens_of,
)


def test_a_shared_prompt_passes_once_and_last_tokens_do_not_pass() -> None:
    rows = rollouts(groups=3, size=4)
    (part,) = micro_batches(rows, Layout(10_000), CPU)
    assert part.tokens == rows.prompt_lengths[::4].sum() + (rows.response_lengths - 1).sum()
    (alone,) = micro_batches(rollouts(groups=3, size=4, shared=False), Layout(10_000), CPU)
    assert alone.tokens == (rollouts(shared=False).prompt_lengths + rows.response_lengths - 1).sum()


@pytest.mark.parametrize("two_halves", [False, True])
@pytest.mark.parametrize(("budget", "usual"), [(16_384, 40), (16_384, 10), (16_384, 300), (4096, 40), (1500, 40)])
def test_no_more_than_one_token_in_twenty_passes_in_vain(budget: int, usual: int, two_halves: bool) -> None:
    layout, more = Layout(budget, grids=False), list[float]()
    for seed in range(4):
        rng = np.random.default_rng(seed)
        lengths = np.clip(rng.lognormal(np.log(usual), 0.6, 256).astype(int), 2, 1024)
        prompts = [rng.integers(3, 18, 40) for _ in range(32)]
        rows = RolloutColumns(
            rollout_id=np.arange(256),
            group=np.arange(256) // 8,
            reward=(np.arange(256) % 2).astype(np.float64),
            truncated=np.zeros(256, dtype=np.bool_),
            version_first=np.zeros(256, dtype=np.int32),
            version_last=np.zeros(256, dtype=np.int32),
            prompt_ids=np.concatenate([prompts[row // 8] for row in range(256)]).astype(np.int32),
            prompt_offsets=40 * np.arange(257),
            response_ids=rng.integers(3, 18, lengths.sum()).astype(np.int32),
            behaviour_logp=np.zeros(lengths.sum(), dtype=np.float32),
            response_offsets=np.r_[0, lengths.cumsum()],
        )
        recorded = micro_batches(rows, replace(layout, common_sizes=True, two_halves=two_halves), CPU)
        for plain, part in zip(micro_batches(rows, layout, CPU), recorded, strict=True):
            if tokens_of(part)[0] >= 640:
                more.append(sum(tokens_of(part)) / plain.tokens)
    # Halves that are unequal, or have a prompt twice, may cost 2% besides; on average all of it is less than 5%.
    assert len(more) >= 4 and max(more) <= (1.05 * 1.02 if two_halves else 1.05) and np.mean(more) <= 1.05


SIZED = ("key_M", "copy_M", "copy_start", "cu_seq_lens_q", "cu_seq_lens_k")


@pytest.mark.parametrize("two_halves", [False, True])
def test_padding_makes_common_sizes(two_halves: bool) -> None:
    sizes = set()
    for seed in range(4):
        rows = rollouts(groups=40, seed=seed)
        layout = Layout(10_000, common_sizes=True, grids=False, two_halves=two_halves)
        (part,) = micro_batches(rows, layout, CPU)
        (plain,) = micro_batches(rows, replace(layout, common_sizes=False), CPU)
        assert len(part.inputs) == len(plain.inputs) == 1 + two_halves
        for padded, exact in zip(part.inputs, plain.inputs, strict=True):
            arguments, tokens = padded, padded["input_ids"].numel()
            assert arguments["cu_seq_lens_q"][-1] == tokens
            assert arguments["cu_seq_lens_k"][-1] == len(arguments["key_M"])
            assert len(arguments["key_M"]) % 32 == tokens % 32 == 0
            assert arguments["cu_seq_lens_q"].diff().max() <= arguments["max_length_q"]
            most, needed = (int(x["copy_start"].diff().max()) for x in (padded, exact))
            assert most <= needed + 2  # padding is spread: one token with all of it would keep the others waiting
            # Padding is never what makes a segment long: the longest decides how much work is planned.
            for name in ("max_length_q", "max_length_k"):
                assert arguments[name] == exact[name]
            assert (arguments["cu_seq_lens_k"].diff() <= arguments["max_length_k"]).all()
            sizes.add((tokens, len(arguments["key_M"]), len(arguments["cu_seq_lens_q"])))
        # One size for both: what is recorded for it is recorded once.
        assert len({tuple(len(x[name]) for name in SIZED) for x in part.inputs}) == 1
    assert len(sizes) <= 4


def test_one_long_response_does_not_make_room_for_all_in_its_length() -> None:
    (part,) = micro_batches(one_long_among_short(short=999, long=1000), Layout(100_000), CPU)
    places = sum(mask_SWL.numel() for _, _, mask_SWL in part.inputs[0]["grids"])
    assert places < 2 * (1000 * 1004 + 999 * 5 * 9)  # of one grid for all: 1000 * 1000 * 1004


def test_padding_takes_places_in_a_micro_batch() -> None:
    rows = rollouts()
    (packed,), (padded,) = (micro_batches(rows, Layout(10_000, packed=packed), CPU) for packed in (True, False))
    assert packed.padded_tokens == packed.tokens
    assert padded.padded_tokens == len(rows) * int((rows.prompt_lengths + rows.response_lengths).max()) > padded.tokens


def test_several_grids_give_the_gradient_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = one_long_among_short(short=7, long=100)
    expected = Trainer(config(), POLICY).gradient(rows)
    monkeypatch.setattr("stalewise.models.attention.ONE_GRID", 0)
    (part,) = micro_batches(rows, Layout(10_000), CPU)
    assert len(part.inputs[0]["grids"]) == 3  # the prompt, the short ones, the long one
    torch.testing.assert_close(Trainer(config(), POLICY).gradient(rows), expected, atol=1e-6, rtol=1e-4)
