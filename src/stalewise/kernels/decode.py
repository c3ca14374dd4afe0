"""Attention of one new token per row against the slots of a cache, as a Triton kernel.

Attention kernels made for many queries at once spend most of a decoding step on queries that are not there. Here a
program takes the few that share one key-value head and walks over the keys that exist. Axes: R rows, H heads, S slots,
L room of a slot, K key-value heads, D numbers per head.
"""

from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

BLOCK_KEYS = 64
FEWEST_QUERIES = 16  # the matrix units take no fewer


def decode_attention(
    query_RHD: Tensor,
    key_SLKD: Tensor,
    value_SLKD: Tensor,
    slot_R: Tensor,
    length_R: Tensor,
    *,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Row r attends to the first `length_R[r]` keys of slot `slot_R[r]`, to the last `window` of them; [R, H, D]."""
    rows, heads, width = query_RHD.shape
    kv_heads = key_SLKD.shape[2]
    if value_SLKD.shape != key_SLKD.shape:
        raise NotImplementedError("decode attention wants keys and values of one shape")
    output_RHD = torch.empty_like(query_RHD, memory_format=torch.contiguous_format)
    _decode[(rows, kv_heads)](  # pyright: ignore[reportIndexIssue]
        query_RHD.contiguous(),
        key_SLKD,
        value_SLKD,
        output_RHD,
        slot_R,
        length_R,
        scale,
        key_SLKD.shape[1],
        window if window is not None else 1 << 30,
        HEADS=heads,
        KV_HEADS=kv_heads,
        WIDTH=width,
        BLOCK_WIDTH=triton.next_power_of_2(width),
        QUERIES=max(FEWEST_QUERIES, triton.next_power_of_2(heads // kv_heads)),
        KEYS=BLOCK_KEYS,
        num_warps=2,
    )
    return output_RHD


@triton.jit
def _decode(
    query,
    key,
    value,
    output,
    slot,
    length,
    scale,
    room,
    window,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    group: tl.constexpr = HEADS // KV_HEADS
    keys_there = tl.load(length + row)
    begin = tl.maximum(keys_there - window, 0)
    base = tl.load(slot + row).to(tl.int64) * room
    queries, numbers = tl.arange(0, QUERIES), tl.arange(0, BLOCK_WIDTH)
    of_group = (queries[:, None] < group) & (numbers[None, :] < WIDTH)
    place = (row * HEADS + head * group + queries[:, None]) * WIDTH + numbers[None, :]
    q = tl.load(query + place, mask=of_group, other=0.0)

    largest = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    mixed = tl.zeros([QUERIES, BLOCK_WIDTH], tl.float32)
    for start in range(begin, keys_there, KEYS):
        token = start + tl.arange(0, KEYS)
        is_there = token < keys_there
        source = ((base + token) * KV_HEADS + head)[:, None] * WIDTH + numbers[None, :]
        readable = is_there[:, None] & (numbers[None, :] < WIDTH)
        k = tl.load(key + source, mask=readable, other=0.0)
        score = tl.where(is_there[None, :], tl.dot(q, tl.trans(k)) * scale, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(score, axis=1))
        weight = tl.exp(score - new_largest[:, None])
        shrink = tl.exp(largest - new_largest)
        v = tl.load(value + source, mask=readable, other=0.0)
        total = total * shrink + tl.sum(weight, axis=1)
        mixed = mixed * shrink[:, None] + tl.dot(weight.to(v.dtype), v)
        largest = new_largest
    tl.store(output + place, (mixed / total[:, None]).to(output.dtype.element_ty), mask=of_group)
