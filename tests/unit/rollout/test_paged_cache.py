"""Blocks of keys and values, and how many fit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stalewise.errors import ModelError
from stalewise.rollout.engines import paged_cache
from stalewise.rollout.engines.paged_cache import GIB, CacheSize, PagedCache, SlotBlocks, cache_size

QWEN_8B = 147_456  # bytes of a token's keys and values: 36 layers × 2 × 8 heads × 128 numbers × 2 bytes
LOGITS = 151_936 * 12


def sized(free: float | None, **changes: int) -> CacheSize:
    usual = {"token_bytes": QWEN_8B, "row_bytes": LOGITS, "requests": 4096, "prompts": 512, "prompt_room": 128}
    return cache_size(free, **{**usual, "new_tokens": 512, **changes})


def test_what_is_written_to_the_cache_lies_where_it_was_to_lie() -> None:
    torch.manual_seed(0)
    shapes = [(2, 4, 6), (3, 8, 8)]  # heads, and numbers of a head's keys and values, in each layer
    cache = PagedCache(9, [(torch.empty(1, k, 1, d), torch.empty(1, k, 1, e)) for k, d, e in shapes])
    assert cache.nbytes == 9 * 4 * (2 * 4 + 2 * 6 + 2 * 3 * 8)
    for layer, (k, d, e) in enumerate(shapes):
        prompt = torch.randn(1, k, 3, d), torch.randn(1, k, 3, e)
        cache.place_R, cache.reads_prompts = torch.tensor([7, 4, 5]), True
        assert all(x is y for x, y in zip(cache.update(*prompt, layer), prompt, strict=True))
        new = torch.randn(2, k, 1, d), torch.randn(2, k, 1, e)
        cache.place_R, cache.reads_prompts = torch.tensor([8, 0]), False
        for stored, read, written in zip(cache.update(*new, layer), prompt, new, strict=True):
            expected = torch.zeros_like(stored)
            expected[[7, 4, 5]] = read[0].transpose(0, 1)
            expected[[8, 0]] = written[:, :, 0]
            assert torch.equal(stored, expected)


def test_slots_hold_the_blocks_of_their_tokens() -> None:
    blocks = SlotBlocks(slots=4, columns=5, blocks=9, block_size=3)
    slots = np.array([2, 0, 3])
    slot, column, block = blocks.grow(slots, np.array([4, 0, 3]))  # ⌈4 / 3⌉, 0, 1
    assert (slot.tolist(), column.tolist()) == ([2, 2, 3], [0, 1, 0])
    assert blocks.free == 6 and blocks.held_S.tolist() == [0, 0, 2, 1]
    assert blocks.own_SB[slot, column].tolist() == block.tolist() and 0 not in block
    slot, column, _ = blocks.grow(slots, np.array([6, 1, 9]))
    assert (slot.tolist(), column.tolist()) == ([0, 3, 3], [0, 1, 2])
    blocks.release(np.array([2, 1]))
    assert blocks.free == 5 and blocks.held_S.tolist() == [1, 0, 0, 3]
    blocks.give(blocks.take(5))
    blocks.release(np.array([0, 3]))
    assert sorted(blocks.take(9).tolist()) == list(range(1, 10))
    with pytest.raises(AssertionError, match="1 blocks wanted, 0 free"):
        blocks.take(1)


def test_short_responses_reserve_what_they_may_need() -> None:
    """As before there were blocks: 2,048 slots of 1.5B with 512 tokens on an H200 with 135 GB free."""
    qwen_1b = {"token_bytes": 28_672, "row_bytes": LOGITS}
    size = sized(135e9, **qwen_1b, requests=2048, prompts=256)
    assert (size.slots, size.block_size) == (2048, 64)
    assert size.blocks == 2048 * 8 + 256 * 2 == size.needed(2048, 256)
    assert sized(135e9, **qwen_1b, requests=32_768).slots == 2048  # 4096 × (512 × 28,672 + 1.8 MB) are more than half
    assert sized(None, **qwen_1b, requests=32_768).slots == 8192
    assert sized(135e9, token_bytes=23_040, row_bytes=49_152 * 12, requests=16_384, new_tokens=64).slots == 8192


def test_long_responses_take_what_there_is() -> None:
    size = sized(120e9, new_tokens=16_384, requests=1024)
    assert size.slots == 256  # × 1024 tokens × 147,456 bytes are less than half, twice as many are more
    assert size.blocks == size.most_blocks == int((0.8 * 120e9 - 256 * LOGITS) // (64 * QWEN_8B)) - 1
    assert size.nbytes <= 0.8 * 120e9 < size.needed(1024, 512) * 64 * QWEN_8B
    assert sized(120e9, new_tokens=16_384, requests=1024, expected=8000).slots == 32  # earlier ones were that long


def test_a_few_requests_need_no_more_than_their_own_blocks() -> None:
    size = sized(120e9, new_tokens=32_768, requests=3, prompts=1)
    assert (size.slots, size.blocks) == (64, 4 * 512 + 2)


@pytest.mark.parametrize("free", [1e9, 3e9, 6.1e9])
def test_memory_for_less_than_one_response_is_told_with_what_would_fit(free: float) -> None:
    with pytest.raises(ModelError, match=r"= 32768 .* needs 4\.52 GiB .*144\.0 KiB a token") as told:
        sized(free, new_tokens=32_768, requests=8)
    fitting = int(str(told.value).split("at most sampler.max_new_tokens = ")[1].split()[0])
    assert sized(free, new_tokens=fitting, requests=8).blocks * 64 >= fitting
    with pytest.raises(ModelError):
        sized(free, new_tokens=fitting + 64, requests=8)


def test_no_memory_at_all_is_told() -> None:
    with pytest.raises(ModelError, match=r"0\.00 GiB of the device's memory are there for them: no token would fit"):
        sized(1e6)


def test_a_size_says_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_cache, "MOST_BLOCKS", 16)
    size = sized(None, requests=2, prompts=1, token_bytes=2**20, row_bytes=2**24)
    assert str(size) == "64 responses at once and 1,024 tokens of keys and values (2.06 GiB)"
    assert size.nbytes / GIB == pytest.approx((17 * 64 * 2**20 + 64 * 2**24) / 2**30)
