"""Attention of one new token per row against a cache, as a Triton kernel.

A program takes the few queries that share a key-value head, and loops over the keys that exist: those of the prompt,
which responses share, then the row's own. Kernels for many queries would waste most of a decoding step on padding.
Axes: R rows, H heads, T tokens of the cache, K key-value heads, D numbers per head.
"""

from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

# Keys at a time, warps, and stages of loads. With few keys per row, many small programs hide each other's latency.
SHORT, LONG = (16, 1, 3), (64, 4, 3)
SHORT_ROOM, LONG_WIDTH = 256, 128  # wider heads leave no room for more keys
FEWEST_QUERIES = 16  # the minimum of the matrix units


def decode_attention(
    query_RHD: Tensor,
    key_TKD: Tensor,
    value_TKD: Tensor,
    prompt_R: Tensor,
    prefix_R: Tensor,
    own_R: Tensor,
    length_R: Tensor,
    *,
    room: int,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Row r attends to the last `window` of `length_R[r]` keys, at most `room`; [R, H, D].

    The first `prefix_R[r]` are from token `prompt_R[r]` on, the others from `own_R[r]` on.
    """
    rows, heads, width = query_RHD.shape
    kv_heads = key_TKD.shape[1]
    if value_TKD.shape != key_TKD.shape:
        raise NotImplementedError("decode attention needs keys and values of one shape")
    keys, warps, stages = LONG if room > SHORT_ROOM and width <= LONG_WIDTH else SHORT
    output_RHD = torch.empty_like(query_RHD, memory_format=torch.contiguous_format)
    _decode[(rows, kv_heads)](  # pyright: ignore[reportIndexIssue]
        query_RHD.contiguous(),
        key_TKD,
        value_TKD,
        output_RHD,
        prompt_R,
        prefix_R,
        own_R,
        length_R,
        scale,
        window if window is not None else 1 << 30,
        HEADS=heads,
        KV_HEADS=kv_heads,
        WIDTH=width,
        BLOCK_WIDTH=triton.next_power_of_2(width),
        QUERIES=max(FEWEST_QUERIES, triton.next_power_of_2(heads // kv_heads)),
        KEYS=keys,
        num_warps=warps,
        num_stages=stages,
    )
    return output_RHD


@triton.jit
def _decode(
    query,
    key,
    value,
    output,
    prompt,
    prefix,
    own,
    length,
    scale,
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
    of_prompt = tl.load(prefix + row)
    prompt_start, own_start = tl.load(prompt + row), tl.load(own + row) - of_prompt
    queries, numbers = tl.arange(0, QUERIES), tl.arange(0, BLOCK_WIDTH)
    of_group = (queries[:, None] < group) & (numbers[None, :] < WIDTH)
    query_place = (row * HEADS + head * group + queries[:, None]) * WIDTH + numbers[None, :]
    q = tl.load(query + query_place, mask=of_group, other=0.0)

    largest = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    mixed = tl.zeros([QUERIES, BLOCK_WIDTH], tl.float32)
    for start in range(begin, keys_there, KEYS):
        token = start + tl.arange(0, KEYS)
        is_there = token < keys_there
        place = tl.where(token < of_prompt, prompt_start, own_start) + token
        source = (place * KV_HEADS + head)[:, None] * WIDTH + numbers[None, :]
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
    tl.store(output + query_place, (mixed / total[:, None]).to(output.dtype.element_ty), mask=of_group)
