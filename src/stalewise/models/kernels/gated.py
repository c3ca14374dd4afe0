"""silu(gate) · up and its gradients as Triton kernels of one pass each; in torch they take seven.

Axes: T tokens, F inner width. Both inputs may be halves of one product.
"""

from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

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
        strides = gradient_TF.stride(0), gate_TF.stride(0), up_TF.stride(0)
        _gated_gradients[(tokens, triton.cdiv(width, BLOCK))](  # pyright: ignore[reportIndexIssue]
            gradient_TF, gate_TF, up_TF, both, *strides, WIDTH=width, SIZE=BLOCK, num_warps=4
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
