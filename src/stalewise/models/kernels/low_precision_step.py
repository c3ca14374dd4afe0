"""One step of AdamW with moments in bfloat16 or in 8 bits, as a Triton kernel that reads and writes everything once.

`trainer/moments.py` has the same step in plain torch, and says what is rounded how. A program works on some blocks of a
matrix and leaves the squared length of its change. Axes: R rows, C columns, J blocks of a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

BLOCKS_AT_ONCE = 8


def step_on_device(
    weight_RC: Tensor, gradient_RC: Tensor, moments: Mapping[str, Tensor], numbers: Any, block: int
) -> Tensor:
    """Step in place; returns ‖Δ weight‖², float64. `numbers` are `StepNumbers`."""
    rows, columns = weight_RC.shape
    blocks = triton.cdiv(columns, block)
    programs = triton.cdiv(rows * blocks, BLOCKS_AT_ONCE)
    square = torch.zeros(max(1, programs), dtype=torch.float32, device=weight_RC.device)
    in_codes = "exp_avg_scale" in moments
    first, second = moments["exp_avg"], moments["exp_avg_sq"]
    scales = (moments["exp_avg_scale"], moments["exp_avg_sq_scale"]) if in_codes else (square, square)
    if programs:
        _step[(programs,)](  # pyright: ignore[reportIndexIssue]
            weight_RC,
            gradient_RC,
            first,
            second,
            *scales,
            numbers.scalars,
            square,
            rows * blocks,
            columns,
            blocks,
            numbers.key - (1 << 32) if numbers.key >= 1 << 31 else numbers.key,  # as a signed number of 32 bits
            numbers.beta1,
            1 - numbers.beta1,  # here, since 1 − β in float32 would be another number
            numbers.beta2,
            1 - numbers.beta2,
            numbers.epsilon,
            numbers.weight_decay,
            IN_CODES=in_codes,
            UNITS=BLOCKS_AT_ONCE,
            BLOCK=block,
            num_warps=4,
        )
    return square.sum(dtype=torch.float64)


# The code depends on none of these numbers.
@triton.jit(do_not_specialize=["units", "key", "beta1", "rest1", "beta2", "rest2", "epsilon", "decay"])
def _step(
    weight,
    gradient,
    first_moment,
    second_moment,
    first_scale,
    second_scale,
    scalars,
    square,
    units,
    columns,
    blocks,
    key,
    beta1,
    rest1,
    beta2,
    rest2,
    epsilon,
    decay,
    IN_CODES: tl.constexpr,
    UNITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if tl.load(scalars + 3) == 0.0:  # the step is not to be taken; `square` is 0
        return
    unit = tl.program_id(0) * UNITS + tl.arange(0, UNITS)
    is_unit = unit < units
    column = (unit % blocks)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    is_there = is_unit[:, None] & (column < columns)
    place = (unit // blocks).to(tl.int64)[:, None] * columns + column
    rate = tl.load(scalars)
    before = tl.load(weight + place, mask=is_there, other=0.0).to(tl.float32)
    grad = tl.load(gradient + place, mask=is_there, other=0.0).to(tl.float32)
    first = tl.load(first_moment + place, mask=is_there, other=0).to(tl.float32)
    second = tl.load(second_moment + place, mask=is_there, other=0).to(tl.float32)
    if IN_CODES:
        first = _of_first_code(first) * tl.load(first_scale + unit, mask=is_unit, other=0.0)[:, None]
        second = _of_second_code(second) * tl.load(second_scale + unit, mask=is_unit, other=0.0)[:, None]
    first = beta1 * first + rest1 * grad
    second = beta2 * second + rest2 * (grad * grad)
    after = before * (1 - rate * decay)
    after -= (rate / tl.load(scalars + 1)) * first / (tl.sqrt(second) / tl.load(scalars + 2) + epsilon)
    after = after.to(weight.dtype.element_ty)
    tl.store(weight + place, after, mask=is_there)
    change = tl.where(is_there, after.to(tl.float32) - before, 0.0)
    tl.store(square + tl.program_id(0), tl.sum(tl.sum(change * change, axis=1), axis=0))
    bits = _random_bits(place, key)
    low = (bits & 0xFFFF).to(tl.int32)
    high = (bits >> 16).to(tl.int32)
    if IN_CODES:
        first_largest = tl.max(tl.abs(first), axis=1)
        second_largest = tl.max(second, axis=1)
        tl.store(first_moment + place, _first_code(first, first_largest, high), mask=is_there)
        tl.store(second_moment + place, _second_code(second, second_largest, low), mask=is_there)
        tl.store(first_scale + unit, first_largest, mask=is_unit)
        tl.store(second_scale + unit, second_largest, mask=is_unit)
    else:
        tl.store(first_moment + place, _to_bfloat16(first, high), mask=is_there)
        tl.store(second_moment + place, _to_bfloat16(second, low), mask=is_there)


@triton.jit
def _random_bits(place, key):
    x = place.to(tl.uint32) * 0x9E3779B1 + key.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _to_bfloat16(x, bits16):
    cut = (x.to(tl.int32, bitcast=True) + bits16) & -65536
    return cut.to(tl.float32, bitcast=True).to(tl.bfloat16)


@triton.jit
def _of_first_code(code):
    root = code / 127.0
    return root * tl.abs(root)


@triton.jit
def _of_second_code(code):
    fourth = code / 255.0
    share = fourth * fourth
    return share * share


@triton.jit
def _first_code(x, largest, bits16):
    code = _below_or_above(tl.abs(x), largest, bits16, 127.0, False)
    return tl.where(x < 0, -code, code).to(tl.int8)


@triton.jit
def _second_code(x, largest, bits16):
    code = _below_or_above(x, largest, bits16, 255.0, True)
    return tl.where((x > 0) & (code < 1.0), 1.0, code).to(tl.uint8)


@triton.jit
def _below_or_above(size, scale, bits16, MOST: tl.constexpr, FOURTH: tl.constexpr):
    share = size / tl.where(scale > 0, scale, 1.0)[:, None]
    root = tl.sqrt(tl.sqrt(share)) if FOURTH else tl.sqrt(share)
    below = tl.minimum(tl.floor(root * MOST), MOST - 1)
    low = below / MOST
    high = (below + 1) / MOST
    low *= low
    high *= high
    if FOURTH:
        low *= low
        high *= high
    return below + ((share - low) * 65536.0 > (bits16.to(tl.float32) + 0.5) * (high - low)).to(tl.float32)
