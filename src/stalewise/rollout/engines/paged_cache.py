"""Memory of decoding in slots: a cache in blocks, its size, the blocks of each slot, and the slots' state in a step.

A slot takes a block when its response grows into it, so memory follows the tokens that exist. Axes: S slots, B blocks
of a slot, R rows of a step, T tokens of the cache, K key-value heads, D numbers per head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from stalewise.errors import ModelError
from stalewise.models.kernels import SlotState, StepRows, can_compile

BLOCK_SIZE, SMALLEST_BLOCK = 64, 16  # tokens of a block; the smallest for responses of a few tokens
FEWEST_ROWS = 64
MOST_SLOTS = 8192
MOST_BLOCKS = 1 << 40  # tests set it lower
FIRST_GUESS = 1024  # tokens of a response, before any response is known
SLOT_SHARE = 0.5  # of a GPU's free memory: filled by responses of the expected length in all slots
CACHE_SHARE = 0.8  # of a GPU's free memory: limit for logits, keys and values together
SLEEP_SHARE = 0.1  # of a GPU's memory: larger slot caches are freed while the trainer works
LOGITS_BYTES = 12  # per row and token of the vocabulary during sampling
RECORD_BYTES = 8  # per token of a response: its id and its log-probability
GIB = 2**30


class PagedCache(Cache):
    """Keys and values of all layers. Before a forward pass, the caller sets `place_R` and `reads_prompts`."""

    def __init__(self, tokens: int, example: list[tuple[Tensor, Tensor]]) -> None:
        """`example`: keys and values of one token in each layer, [1, K, 1, D]."""
        super().__init__(layer_class_to_replicate=object)  # pyright: ignore[reportArgumentType]
        self.keys = [key.new_zeros(tokens, key.shape[1], key.shape[3]) for key, _ in example]
        self.values = [value.new_zeros(tokens, value.shape[1], value.shape[3]) for _, value in example]
        self.place_R = torch.empty(0, dtype=torch.long)  # positions in the cache of the next tokens
        self.reads_prompts = False  # attention reads the tokens of this forward pass, not the cache

    @property
    def nbytes(self) -> int:
        """Memory of the cache."""
        return sum(x.nbytes for x in (*self.keys, *self.values))

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Write new keys and values; returns those that attention reads: the whole cache, or a prompt's own."""
        keys_TKD, values_TKD = self.keys[layer_idx], self.values[layer_idx]
        new = [x[0].transpose(0, 1) if self.reads_prompts else x[:, :, 0] for x in (key_states, value_states)]
        if keys_TKD.is_cuda and can_compile():
            from stalewise.models.kernels.rope import write_on_device  # Triton comes with torch for GPUs alone

            write_on_device(keys_TKD, values_TKD, self.place_R, *new)
        else:
            for stored_TKD, new_RKD in zip((keys_TKD, values_TKD), new, strict=True):
                stored_TKD.index_copy_(0, self.place_R, new_RKD)
        return (key_states, value_states) if self.reads_prompts else (keys_TKD, values_TKD)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: rows differ in length, and positions are always given."""
        return 0


def one_token_states(model: Any) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of one token in each layer."""
    cache = DynamicCache(config=model.config)
    before = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    with torch.inference_mode():
        model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), past_key_values=cache, use_cache=True)
    model.set_attn_implementation(before)
    layers: list[Any] = cache.layers
    return [(layer.keys, layer.values) for layer in layers]


def free_for_slots(device: torch.device, share: float, most: float) -> float | None:
    """A share of a GPU's free memory, of which at most `most` bytes count; None: no limit, as on a CPU."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else math.inf
    return None if math.isinf(least := min(free, most)) else least * share


def slot_bytes(model: Any, example: list[tuple[Tensor, Tensor]], room: int, new_tokens: int) -> int:
    """Memory of a slot besides its blocks: logits, tokens and log-probabilities, copies of keys for plain attention."""
    layer = max(sum(x.nbytes for x in pair) for pair in example)
    copies = 2 * room * layer if model.dtype is torch.float32 else 0
    return model.get_output_embeddings().weight.shape[0] * LOGITS_BYTES + new_tokens * RECORD_BYTES + copies


def blocks_for(tokens: Any, block_size: int) -> Any:
    """Number of blocks for this number of tokens; a number or an array.

    >>> [blocks_for(tokens, 64) for tokens in (0, 1, 64, 65)]
    [0, 1, 1, 2]
    """
    return -(-tokens // block_size)


def read_slots(slot_R: Tensor, state: SlotState) -> StepRows:
    """The inputs of a step for rows in these slots."""
    alive_R, size = state.alive_S[slot_R], state.block_size
    token_R, count_R, seed_R, prefix_R, limit_R, forced_R = state.numbers[:, slot_R]
    position_R, own_R = prefix_R + count_R, count_R.clamp(max=state.new_tokens - 1)
    block_R = state.block_SB[slot_R, state.prompt_blocks + own_R // size]
    # An ended row has no blocks: it writes to block 0, which is never read, and attends to one key.
    place_R = torch.where(alive_R, block_R, 0).long() * size + own_R % size
    length_R = torch.where(alive_R, position_R + 1, 1)
    return StepRows(
        token_R, position_R, count_R, seed_R, prefix_R, length_R, place_R, limit_R, forced_R, alive_R.long()
    )


def advance_slots(slot_R: Tensor, rows: StepRows, token_R: Tensor, logp_R: Tensor, state: SlotState) -> None:
    """Write the drawn or given tokens of these rows to the state, and which rows continue."""
    count_R, alive_R = rows.count_R, rows.alive_R.bool()
    given_R, own_R = count_R < rows.forced_R, count_R.clamp(max=state.new_tokens - 1)
    token_R = torch.where(given_R, state.all_ids[slot_R, own_R].to(token_R.dtype), token_R)
    place_R = torch.where(alive_R, own_R, state.new_tokens)
    state.all_ids[slot_R, place_R] = token_R.int()
    state.all_logp[slot_R, place_R] = torch.where(given_R, 0.0, logp_R)
    state.numbers[0, slot_R] = token_R
    state.numbers[1, slot_R] = count_R + alive_R
    # Not `torch.isin`: for many tokens it sorts, which cannot be captured as a graph.
    stops_R = (token_R.unsqueeze(1) == state.stop_ids).any(dim=1)
    state.alive_S[slot_R] = alive_R & (given_R | ~stops_R) & (count_R + 1 < rows.limit_R)


class SlotBlocks:
    """The blocks of a cache: which are free, and which each slot has for its response.

    Block 0 is never given to a slot: ended rows write there.
    """

    def __init__(self, slots: int, columns: int, blocks: int, block_size: int) -> None:
        self.block_size, self.blocks = block_size, blocks
        self._stack = np.arange(blocks, 0, -1, dtype=np.int32)
        self.free = blocks
        self.held_S = np.zeros(slots, dtype=np.int64)
        self.own_SB = np.zeros((slots, columns), dtype=np.int32)

    def take(self, count: int) -> np.ndarray:
        """Take this number of free blocks."""
        assert 0 <= count <= self.free, f"{count} blocks wanted, {self.free} free"
        self.free -= count
        return self._stack[self.free : self.free + count].copy()

    def give(self, blocks: np.ndarray) -> None:
        """Free these blocks."""
        self._stack[self.free : self.free + len(blocks)] = blocks
        self.free += len(blocks)

    def lacking(self, slots: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """How many more blocks each of these slots needs for its number of tokens."""
        return np.maximum(blocks_for(tokens, self.block_size) - self.held_S[slots], 0)

    def grow(self, slots: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Give these slots the blocks that they lack; returns the slot, column and number of each new block."""
        lacking = self.lacking(slots, tokens)
        slot, first = np.repeat(slots, lacking), np.repeat(np.cumsum(lacking) - lacking, lacking)
        column = self.held_S[slot] + np.arange(len(slot)) - first
        block = self.own_SB[slot, column] = self.take(len(slot))
        self.held_S[slots] += lacking
        return slot, column, block

    def release(self, slots: np.ndarray) -> None:
        """Free the blocks of these slots."""
        is_held = np.arange(self.own_SB.shape[1]) < self.held_S[slots, None]
        self.give(self.own_SB[slots][is_held])
        self.held_S[slots] = 0


@dataclass(frozen=True, slots=True)
class CacheSize:
    """How many responses are decoded at once, and the blocks for their keys and values."""

    slots: int
    most_slots: int  # limit by memory
    blocks: int
    most_blocks: int
    block_size: int
    prompt_room: int
    new_tokens: int
    token_bytes: int  # of keys and values
    row_bytes: int  # memory of a slot besides its keys and values

    @property
    def prompt_blocks(self) -> int:
        """Blocks of the longest prompt."""
        return blocks_for(self.prompt_room, self.block_size)

    @property
    def own_blocks(self) -> int:
        """Blocks of the longest response."""
        return blocks_for(self.new_tokens, self.block_size)

    def needed(self, requests: int, prompts: int) -> int:
        """Blocks that suffice for responses and prompts of any length."""
        return min(requests, self.slots) * self.own_blocks + min(prompts, self.slots) * self.prompt_blocks

    @property
    def nbytes(self) -> int:
        """Memory of the cache and of the slots."""
        return (self.blocks + 1) * self.block_size * self.token_bytes + self.slots * self.row_bytes

    def too_small(self) -> str:
        """A message that not even one response fits, with the number of tokens that would."""
        needed, there = (
            max(0, blocks) * self.block_size * self.token_bytes / GIB
            for blocks in (self.own_blocks + self.prompt_blocks, self.blocks)
        )
        fitting = (self.blocks - self.prompt_blocks) * self.block_size
        return (
            f"one response of sampler.max_new_tokens = {self.new_tokens} after a prompt of {self.prompt_room} tokens "
            f"needs {needed:.2f} GiB of keys and values ({self.token_bytes / 1024:.1f} KiB a token), and "
            f"{there:.2f} GiB of the device's memory are there for them: "
            + (f"at most sampler.max_new_tokens = {fitting} would fit" if fitting > 0 else "no token would fit")
            + "; lower it, free memory on the device, or choose a smaller model"
        )

    def __str__(self) -> str:
        return (
            f"{self.slots} responses at once and {self.blocks * self.block_size:,} tokens of keys and values "
            f"({self.nbytes / GIB:.2f} GiB)"
        )


def cache_size(
    free: float | None,
    *,
    token_bytes: int,
    row_bytes: int,
    requests: int,
    prompts: int,
    prompt_room: int,
    new_tokens: int,
    expected: float | None = None,
) -> CacheSize:
    """Slots and blocks for these requests in `free` bytes (None: no limit); ModelError if not even one response fits.

    The number of slots is a power of two, such that responses of the `expected` length fill half of the memory. The
    number of blocks suffices for the longest responses in all slots, or is limited by memory.
    """
    block_size = min(BLOCK_SIZE, max(SMALLEST_BLOCK, power_of_two(new_tokens)))
    likely = blocks_for(min(new_tokens, max(FIRST_GUESS, int(expected or 0))), block_size)
    block_bytes, of_prompt = block_size * token_bytes, blocks_for(prompt_room, block_size)

    def memory(slots: int) -> int:
        places = min(power_of_two(prompts), slots)
        return slots * (row_bytes + likely * block_bytes) + places * of_prompt * block_bytes

    most_slots = MOST_SLOTS
    while free is not None and most_slots > 1 and memory(most_slots) > SLOT_SHARE * free:
        most_slots //= 2
    slots = min(max(FEWEST_ROWS, power_of_two(requests)), most_slots)
    most_blocks = MOST_BLOCKS
    if free is not None:
        most_blocks = min(MOST_BLOCKS, int((CACHE_SHARE * free - slots * row_bytes) // block_bytes) - 1)
    sizes = {"prompt_room": prompt_room, "new_tokens": new_tokens, "token_bytes": token_bytes, "row_bytes": row_bytes}
    size = CacheSize(slots, most_slots, most_blocks, most_blocks, block_size, **sizes)
    if most_blocks < size.own_blocks + size.prompt_blocks:
        raise ModelError(size.too_small())
    return replace(size, blocks=min(most_blocks, size.needed(power_of_two(requests), power_of_two(prompts))))


def power_of_two(least: int) -> int:
    """The smallest power of two that is at least `least`.

    >>> [power_of_two(count) for count in (0, 1, 3, 4, 5)]
    [1, 1, 4, 4, 8]
    """
    return 1 << max(0, least - 1).bit_length()
