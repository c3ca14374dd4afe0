"""Gathers keys and values for every segment that attends to them, with its own gradient.

All responses read their prompt's keys, so the gradient is a sum over copies. The backward pass of `index_select` adds
them in half precision and in an order that changes from run to run; here copies are summed in float32, in order.
Axes: T tokens, M keys of all segments, K key-value heads, D numbers per head.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from stalewise.models.kernels import can_compile


def copies_of(key_M: np.ndarray, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys sorted by token, [M], and the start of each token's keys, and the end, [T + 1].

    >>> [x.tolist() for x in copies_of(np.array([0, 1, 0, 1, 2]), 3)]
    [[0, 2, 1, 3, 4], [0, 2, 4, 5]]
    """
    counts = np.bincount(key_M, minlength=tokens)
    return np.argsort(key_M, kind="stable"), np.concatenate([[0], np.cumsum(counts)])


def gather_keys(
    key_TKD: Tensor, value_TKD: Tensor, key_M: Tensor, copy_M: Tensor, copy_start: Tensor
) -> tuple[Tensor, Tensor]:
    """Keys and values of the tokens `key_M`, each [M, K, D]; `copy_M` and `copy_start` come from `copies_of`."""
    if torch.compiler.is_compiling():
        return _gather_keys(key_TKD, value_TKD, key_M, copy_M, copy_start)
    # A registered operator is slower to call, and there is one call per layer.
    return _Gather.apply(key_TKD, value_TKD, key_M, copy_M, copy_start)  # pyright: ignore[reportReturnType]


def sum_copies(
    key_grad_MKD: Tensor, value_grad_MKD: Tensor, copy_M: Tensor, copy_start: Tensor
) -> tuple[Tensor, Tensor]:
    """The sum over each token's copies, for keys and for values, each [T, K, D]."""
    grads = key_grad_MKD.contiguous(), value_grad_MKD.contiguous()
    # The kernel takes keys and values together, which nearly always have one shape.
    if key_grad_MKD.is_cuda and can_compile() and key_grad_MKD.shape == value_grad_MKD.shape:
        from stalewise.models.kernels.elementwise import sum_on_device  # Triton comes with torch for GPUs alone

        return sum_on_device(*grads, copy_M, copy_start)
    key_TKD, value_TKD = (
        torch.segment_reduce(x.index_select(0, copy_M).float(), "sum", offsets=copy_start).to(x.dtype) for x in grads
    )
    return key_TKD, value_TKD


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, key_TKD: Tensor, value_TKD: Tensor, key_M: Tensor, copy_M: Tensor, copy_start: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(copy_M, copy_start)
        return key_TKD.index_select(0, key_M), value_TKD.index_select(0, key_M)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (*sum_copies(*grads, *ctx.saved_tensors), None, None, None)


# The same as registered operators, which a compiler does not trace into.


@torch.library.custom_op("stalewise::gather_keys", mutates_args=())
def _gather_keys(
    key_TKD: Tensor, value_TKD: Tensor, key_M: Tensor, copy_M: Tensor, copy_start: Tensor
) -> tuple[Tensor, Tensor]:
    return key_TKD.index_select(0, key_M), value_TKD.index_select(0, key_M)


_sum_copies = torch.library.custom_op("stalewise::sum_copies", sum_copies, mutates_args=())


@_gather_keys.register_fake
def _(key_TKD: Tensor, value_TKD: Tensor, key_M: Tensor, copy_M: Tensor, copy_start: Tensor) -> tuple[Tensor, Tensor]:
    return _empty(key_TKD, key_M.shape[0]), _empty(value_TKD, key_M.shape[0])


@_sum_copies.register_fake
def _(key_grad_MKD: Tensor, value_grad_MKD: Tensor, copy_M: Tensor, copy_start: Tensor) -> tuple[Tensor, Tensor]:
    return _empty(key_grad_MKD, copy_start.shape[0] - 1), _empty(value_grad_MKD, copy_start.shape[0] - 1)


def _empty(like: Tensor, rows: int) -> Tensor:
    return like.new_empty(rows, *like.shape[1:])


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[3:])


def _backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    return (*_sum_copies(*grads, *ctx.saved_tensors), None, None, None)


_gather_keys.register_autograd(_backward, setup_context=_keep)
