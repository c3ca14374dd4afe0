"""Sums the copies of each token as a Triton kernel, with one program per token."""

from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor


def sum_on_device(key_MKD: Tensor, value_MKD: Tensor, copy_M: Tensor, copy_start: Tensor) -> tuple[Tensor, Tensor]:
    """The sum over each token's copies in float32, rounded once; both [T, K, D]. Inputs: contiguous, one shape."""
    tokens, (_, heads, width) = copy_start.shape[0] - 1, key_MKD.shape
    key_TKD, value_TKD = (
        torch.empty(tokens, heads, width, dtype=x.dtype, device=x.device) for x in (key_MKD, value_MKD)
    )
    numbers = heads * width
    _sum[(tokens,)](  # pyright: ignore[reportIndexIssue]
        key_MKD,
        value_MKD,
        key_TKD,
        value_TKD,
        copy_M,
        copy_start,
        NUMBERS=numbers,
        BLOCK=triton.next_power_of_2(numbers),
        num_warps=2,
    )
    return key_TKD, value_TKD


@triton.jit
def _sum(key, value, key_sum, value_sum, copy, start, NUMBERS: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    is_there = place < NUMBERS
    key_total = tl.zeros([BLOCK], tl.float32)
    value_total = tl.zeros([BLOCK], tl.float32)
    for i in range(tl.load(start + token), tl.load(start + token + 1)):
        source = tl.load(copy + i) * NUMBERS + place
        key_total += tl.load(key + source, mask=is_there, other=0.0).to(tl.float32)
        value_total += tl.load(value + source, mask=is_there, other=0.0).to(tl.float32)
    tl.store(key_sum + token * NUMBERS + place, key_total.to(key_sum.dtype.element_ty), mask=is_there)
    tl.store(value_sum + token * NUMBERS + place, value_total.to(value_sum.dtype.element_ty), mask=is_there)
