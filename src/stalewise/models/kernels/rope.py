"""Rotates queries and keys of one new token per row, and writes keys and values to a cache, as Triton kernels.

Both are limited by memory bandwidth if loads are wide and one launch covers both tensors. A program works on some heads
of consecutive rows of one tensor, so numbers of heads need not be powers of two. Axes: R rows, H heads, K key-value
heads, D numbers per head, T tokens of a cache.
"""

from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

# Numbers that a program loads from each tensor at once: with 128 threads, one or two loads of 16 bytes each.
ROTATED_AT_ONCE = 1024
WRITTEN_AT_ONCE = 2048


def rotate_on_device(query_RH1D: Tensor, key_RK1D: Tensor, cos_R1D: Tensor, sin_R1D: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate both by halves, as most of transformers' models do; computed in float32 and rounded once."""
    (rows, heads, _, width), kv_heads = query_RH1D.shape, key_RK1D.shape[1]
    if width % 2:
        raise ValueError(f"rotation needs an even number of numbers per head, not {width}")
    query_RH1D, key_RK1D = _with_whole_heads(query_RH1D), _with_whole_heads(key_RK1D)
    new_query, new_key = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query_RH1D, key_RK1D))
    block = triton.next_power_of_2(width // 2)
    units = max(1, ROTATED_AT_ONCE // block)
    if rows:
        _rotate[(triton.cdiv(rows * heads, units) + triton.cdiv(rows * kv_heads, units),)](  # pyright: ignore[reportIndexIssue]
            query_RH1D,
            key_RK1D,
            new_query,
            new_key,
            cos_R1D.contiguous(),
            sin_R1D.contiguous(),
            rows,
            query_RH1D.stride(0),
            query_RH1D.stride(1),
            key_RK1D.stride(0),
            key_RK1D.stride(1),
            HEADS=heads,
            KV_HEADS=kv_heads,
            HALF=width // 2,
            BLOCK=block,
            UNITS=units,
            num_warps=4,
        )
    return new_query, new_key


def write_on_device(key_TKD: Tensor, value_TKD: Tensor, place_R: Tensor, key_RKD: Tensor, value_RKD: Tensor) -> None:
    """Write row r to token `place_R[r]` of the caches; places are distinct, and not checked.

    Keys and values may differ in heads and widths.
    """
    if not (key_TKD.is_contiguous() and value_TKD.is_contiguous()):
        raise ValueError("the cache must be contiguous")
    rows, kv_heads, width = key_RKD.shape
    value_heads, value_width = value_RKD.shape[1:]
    key_RKD, value_RKD = _with_whole_heads(key_RKD), _with_whole_heads(value_RKD)
    block = triton.next_power_of_2(max(width, value_width))
    units = max(1, WRITTEN_AT_ONCE // block)
    if rows:
        _write[(triton.cdiv(rows * kv_heads, units) + triton.cdiv(rows * value_heads, units),)](  # pyright: ignore[reportIndexIssue]
            key_RKD,
            value_RKD,
            key_TKD,
            value_TKD,
            place_R.contiguous(),
            rows,
            key_RKD.stride(0),
            key_RKD.stride(1),
            value_RKD.stride(0),
            value_RKD.stride(1),
            HEADS=kv_heads,
            VALUE_HEADS=value_heads,
            WIDTH=width,
            VALUE_WIDTH=value_width,
            BLOCK=block,
            UNITS=units,
            num_warps=4,
        )


def _with_whole_heads(x: Tensor) -> Tensor:
    """Make the numbers of each head contiguous; rows and heads may have any stride."""
    return x if x.stride(-1) == 1 else x.contiguous()


# The code does not depend on the number of rows.
@triton.jit(do_not_specialize=["rows"])
def _rotate(
    query,
    key,
    new_query,
    new_key,
    cos,
    sin,
    rows,
    query_row_stride,
    query_head_stride,
    key_row_stride,
    key_head_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    UNITS: tl.constexpr,
):
    program = tl.program_id(0)
    of_query = tl.cdiv(rows * HEADS, UNITS)
    if program < of_query:
        unit = program * UNITS + tl.arange(0, UNITS)
        _turn(query, new_query, cos, sin, unit, rows, query_row_stride, query_head_stride, HEADS, HALF, BLOCK)
    else:
        unit = (program - of_query) * UNITS + tl.arange(0, UNITS)
        _turn(key, new_key, cos, sin, unit, rows, key_row_stride, key_head_stride, KV_HEADS, HALF, BLOCK)


@triton.jit
def _turn(
    source,
    target,
    cos,
    sin,
    unit,
    rows,
    row_stride,
    head_stride,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # Units are the heads of all rows, row by row.
    row, head = (unit // HEADS).to(tl.int64), (unit % HEADS).to(tl.int64)
    number = tl.arange(0, BLOCK)[None, :]
    is_there = (unit < rows * HEADS)[:, None] & (number < HALF)
    # Neighbouring heads of a row load the same angles, from the nearest cache.
    angle = row[:, None] * (2 * HALF) + number
    here = (row * row_stride + head * head_stride)[:, None] + number
    there = unit.to(tl.int64)[:, None] * (2 * HALF) + number
    first = tl.load(source + here, mask=is_there).to(tl.float32)
    second = tl.load(source + here + HALF, mask=is_there).to(tl.float32)
    first_cos = tl.load(cos + angle, mask=is_there).to(tl.float32)
    first_sin = tl.load(sin + angle, mask=is_there).to(tl.float32)
    second_cos = tl.load(cos + angle + HALF, mask=is_there).to(tl.float32)
    second_sin = tl.load(sin + angle + HALF, mask=is_there).to(tl.float32)
    new_first = first * first_cos - second * first_sin
    new_second = second * second_cos + first * second_sin
    tl.store(target + there, new_first.to(target.dtype.element_ty), mask=is_there)
    tl.store(target + there + HALF, new_second.to(target.dtype.element_ty), mask=is_there)


@triton.jit(do_not_specialize=["rows"])
def _write(
    key,
    value,
    key_cache,
    value_cache,
    place,
    rows,
    key_row_stride,
    key_head_stride,
    value_row_stride,
    value_head_stride,
    HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    UNITS: tl.constexpr,
):
    program = tl.program_id(0)
    of_key = tl.cdiv(rows * HEADS, UNITS)
    if program < of_key:
        unit = program * UNITS + tl.arange(0, UNITS)
        _put(key, key_cache, place, unit, rows, key_row_stride, key_head_stride, HEADS, WIDTH, BLOCK)
    else:
        unit = (program - of_key) * UNITS + tl.arange(0, UNITS)
        _put(
            value, value_cache, place, unit, rows, value_row_stride, value_head_stride, VALUE_HEADS, VALUE_WIDTH, BLOCK
        )


@triton.jit
def _put(
    source,
    target,
    place,
    unit,
    rows,
    row_stride,
    head_stride,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, head = (unit // HEADS).to(tl.int64), (unit % HEADS).to(tl.int64)
    number = tl.arange(0, BLOCK)[None, :]
    is_row = unit < rows * HEADS
    is_there = is_row[:, None] & (number < WIDTH)
    x = tl.load(source + (row * row_stride + head * head_stride)[:, None] + number, mask=is_there)
    token = tl.load(place + row, mask=is_row).to(tl.int64)  # a cache may have more than 2³² numbers
    tl.store(target + ((token * HEADS + head) * WIDTH)[:, None] + number, x, mask=is_there)
