"""Triton kernels of one pass each: norms, gated products, and sums of keys' gradients over the copies of a token.

Norms return a result in low precision: autocast would round it before every use in a pass of its own, and widen its
gradient in another. Axes: T tokens, H hidden size.
"""

from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

# Programs of a backward pass: enough warps to hide the loads of others. Fixed by the width, so that sums do not depend
# on the device.
FEWEST_PROGRAMS, NUMBERS_AT_ONCE = 512, 1 << 21


def normed_on_device(x_TH: Tensor, weight_H: Tensor, epsilon: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The norm in `dtype`, and the factor of each row [T] in float32."""
    rows, width = x_TH.shape
    y_TH = torch.empty(rows, width, dtype=dtype, device=x_TH.device)
    factor_T = torch.empty(rows, dtype=torch.float32, device=x_TH.device)
    if rows:
        size = triton.next_power_of_2(width)
        _normed[(rows,)](  # pyright: ignore[reportIndexIssue]
            x_TH, weight_H, y_TH, factor_T, epsilon, WIDTH=width, SIZE=size, num_warps=_warps(size)
        )
    return y_TH, factor_T


def added_normed_on_device(
    x_TH: Tensor, addition_TH: Tensor, weight_H: Tensor, epsilon: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """x + addition in the dtype of x, its norm in `dtype`, and the factor of each row [T] in float32."""
    rows, width = x_TH.shape
    sum_TH, y_TH = torch.empty_like(x_TH), torch.empty(rows, width, dtype=dtype, device=x_TH.device)
    factor_T = torch.empty(rows, dtype=torch.float32, device=x_TH.device)
    if rows:
        size = triton.next_power_of_2(width)
        _added_normed[(rows,)](  # pyright: ignore[reportIndexIssue]
            x_TH,
            addition_TH,
            weight_H,
            sum_TH,
            y_TH,
            factor_T,
            epsilon,
            WIDTH=width,
            SIZE=size,
            num_warps=_warps(size),
        )
    return sum_TH, y_TH, factor_T


def norm_gradients_on_device(
    gradient_TH: Tensor,
    x_TH: Tensor,
    weight_H: Tensor,
    factor_T: Tensor,
    others_TH: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, in its dtype, and of the weight, in float32; and that of x in `dtype`, empty for None.

    `others_TH` is what reaches x besides the norm: it is added.
    """
    rows, width = x_TH.shape
    x_grad_TH = torch.empty_like(x_TH)
    low_TH = torch.empty(*((rows, width) if dtype else (0, 0)), dtype=dtype or x_TH.dtype, device=x_TH.device)
    size = triton.next_power_of_2(width)
    programs = min(rows, max(FEWEST_PROGRAMS, NUMBERS_AT_ONCE // size))
    partial = torch.empty(programs, width, dtype=torch.float32, device=x_TH.device)
    if rows:
        _norm_gradients[(programs,)](  # pyright: ignore[reportIndexIssue]
            gradient_TH,
            x_TH,
            weight_H,
            factor_T,
            x_TH if others_TH is None else others_TH,
            x_grad_TH,
            low_TH,
            partial,
            rows,
            programs,
            ADDS=others_TH is not None,
            LOW=dtype is not None,
            WIDTH=width,
            SIZE=size,
            num_warps=_warps(size),
        )
    return x_grad_TH, partial.sum(dim=0), low_TH


def _warps(size: int) -> int:
    return min(16, max(1, size // 512))


@triton.jit
def _normed(x, weight, y, factor, epsilon, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SIZE)
    is_there = column < WIDTH
    value = tl.load(x + row * WIDTH + column, mask=is_there, other=0.0).to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(value * value, axis=0) / WIDTH + epsilon)
    result = value * scale * tl.load(weight + column, mask=is_there, other=0.0).to(tl.float32)
    tl.store(y + row * WIDTH + column, result.to(y.dtype.element_ty), mask=is_there)
    tl.store(factor + row, scale)


@triton.jit
def _added_normed(x, addition, weight, total, y, factor, epsilon, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SIZE)
    is_there = column < WIDTH
    place = row * WIDTH + column
    value = tl.load(x + place, mask=is_there, other=0.0).to(tl.float32)
    value += tl.load(addition + place, mask=is_there, other=0.0).to(tl.float32)
    tl.store(total + place, value.to(total.dtype.element_ty), mask=is_there)
    scale = 1 / tl.sqrt(tl.sum(value * value, axis=0) / WIDTH + epsilon)
    result = value * scale * tl.load(weight + column, mask=is_there, other=0.0).to(tl.float32)
    tl.store(y + place, result.to(y.dtype.element_ty), mask=is_there)
    tl.store(factor + row, scale)


# The code does not depend on these numbers.
@triton.jit(do_not_specialize=["rows", "programs"])
def _norm_gradients(
    gradient,
    x,
    weight,
    factor,
    others,
    x_grad,
    low,
    partial,
    rows,
    programs,
    ADDS: tl.constexpr,
    LOW: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
):
    program = tl.program_id(0)
    column = tl.arange(0, SIZE)
    is_there = column < WIDTH
    scale_of = tl.load(weight + column, mask=is_there, other=0.0).to(tl.float32)
    total = tl.zeros([SIZE], tl.float32)
    place = program.to(tl.int64) * WIDTH + column
    for index in range(program, rows, programs):
        g = tl.load(gradient + place, mask=is_there, other=0.0).to(tl.float32)
        r = tl.load(factor + index)
        unit = tl.load(x + place, mask=is_there, other=0.0).to(tl.float32) * r
        total += g * unit
        scaled = g * scale_of
        value = r * (scaled - unit * (tl.sum(scaled * unit, axis=0) / WIDTH))
        if ADDS:
            value += tl.load(others + place, mask=is_there, other=0.0).to(tl.float32)
        tl.store(x_grad + place, value.to(x_grad.dtype.element_ty), mask=is_there)
        if LOW:
            tl.store(low + place, value.to(low.dtype.element_ty), mask=is_there)
        place += programs * WIDTH
    tl.store(partial + program * WIDTH + column, total, mask=is_there)


BLOCK = 1024


def gated_on_device(gate_TF: Tensor, up_TF: Tensor) -> Tensor:
    """silu(gate) · up, computed in float32 and rounded once; rows may have any stride."""
    tokens, width = gate_TF.shape
    out_TF = torch.empty(tokens, width, dtype=gate_TF.dtype, device=gate_TF.device)
    if tokens:
        _gated[(tokens, triton.cdiv(width, BLOCK))](  # pyright: ignore[reportIndexIssue]
            gate_TF, up_TF, out_TF, gate_TF.stride(0), up_TF.stride(0), WIDTH=width, SIZE=BLOCK, num_warps=4
        )
    return out_TF


def gated_gradients_on_device(gradient_TF: Tensor, gate_TF: Tensor, up_TF: Tensor) -> Tensor:
    """Gradients of gate and up, side by side, [T, 2F]."""
    tokens, width = gate_TF.shape
    both = torch.empty(tokens, 2 * width, dtype=gate_TF.dtype, device=gate_TF.device)
    if tokens:
        _gated_gradients[(tokens, triton.cdiv(width, BLOCK))](  # pyright: ignore[reportIndexIssue]
            gradient_TF,
            gate_TF,
            up_TF,
            both,
            gradient_TF.stride(0),
            gate_TF.stride(0),
            up_TF.stride(0),
            WIDTH=width,
            SIZE=BLOCK,
            num_warps=4,
        )
    return both


@triton.jit
def _gated(gate, up, out, gate_stride, up_stride, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    is_there = column < WIDTH
    x = tl.load(gate + row * gate_stride + column, mask=is_there, other=0.0).to(tl.float32)
    y = tl.load(up + row * up_stride + column, mask=is_there, other=0.0).to(tl.float32)
    value = x / (1 + tl.exp(-x)) * y
    tl.store(out + row * WIDTH + column, value.to(out.dtype.element_ty), mask=is_there)


@triton.jit
def _gated_gradients(
    gradient,
    gate,
    up,
    both_grads,
    gradient_stride,
    gate_stride,
    up_stride,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    is_there = column < WIDTH
    g = tl.load(gradient + row * gradient_stride + column, mask=is_there, other=0.0).to(tl.float32)
    x = tl.load(gate + row * gate_stride + column, mask=is_there, other=0.0).to(tl.float32)
    y = tl.load(up + row * up_stride + column, mask=is_there, other=0.0).to(tl.float32)
    share = 1 / (1 + tl.exp(-x))
    of_gate = g * y * share * (1 + x * (1 - share))
    place = row * 2 * WIDTH + column
    tl.store(both_grads + place, of_gate.to(both_grads.dtype.element_ty), mask=is_there)
    tl.store(both_grads + place + WIDTH, (g * x * share).to(both_grads.dtype.element_ty), mask=is_there)


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
