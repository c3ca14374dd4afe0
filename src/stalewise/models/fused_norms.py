"""RMS norms of a model as one operator each, also with the sum before them, and with a result in low precision.

Names say little about what a module computes, so each norm is compared with the operator on test inputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from stalewise.models.kernels import can_compile

WIDEST_NORM = 16384  # numbers of a row that the kernel takes


def fuse_norms(model: Any) -> int:
    """Let the plain RMS norms of a model be one operator each; returns their number. Weights keep their names."""
    norms = [module for module in model.modules() if _is_plain(module)]
    for module in norms:
        module.forward = _FusedNorm(module)
    return len(norms)


def is_fused(norm: Any) -> bool:
    """Whether `fuse_norms` has replaced its forward."""
    return isinstance(vars(norm).get("forward"), _FusedNorm)


def added_normed(x: Tensor, addition: Tensor, norm: Any) -> tuple[Tensor, Tensor]:
    """x + addition, and its norm as autocast rounds it, where `is_rounded_next(x)`."""
    low = torch.get_autocast_dtype("cuda")
    both: Any = _AddedNormed.apply(x, addition, norm.weight, _epsilon(norm), low)
    return both


class _FusedNorm:
    """Replaces a norm's forward; reads the module's weight at each call."""

    def __init__(self, module: Any) -> None:
        epsilon: Any = _epsilon(module)  # `_is_plain` has seen that there is one
        self.module, self.epsilon = module, epsilon

    def __call__(self, hidden_states: Tensor) -> Tensor:
        weight = self.module.weight
        if hidden_states.dtype is not weight.dtype:  # the module decides the precision of the result
            return type(self.module).forward(self.module, hidden_states)
        if is_rounded_next(hidden_states):
            normed: Any = _Normed.apply(hidden_states, weight, self.epsilon, torch.get_autocast_dtype("cuda"))
            return normed
        if _is_decoding(hidden_states):
            from stalewise.models.kernels.elementwise import normed_on_device

            rows = hidden_states.view(-1, hidden_states.shape[-1])
            return normed_on_device(rows, weight, self.epsilon, rows.dtype)[0].view(hidden_states.shape)
        return rms_norm(hidden_states, weight.shape, weight, self.epsilon)


def _is_decoding(x: Tensor) -> bool:
    """Whether these are the rows of a decoding step, of one token each, for which torch's kernel is slow."""
    low = x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and not torch.is_grad_enabled()
    return low and x.shape[-2] == 1 and x.is_contiguous() and x.shape[-1] <= WIDEST_NORM and can_compile()


def is_rounded_next(x: Tensor) -> bool:
    """Whether autocast rounds the norm of these numbers at its first use, and a kernel can do it at once."""
    low = x.is_cuda and x.dtype is torch.float32 and torch.is_autocast_enabled("cuda")
    return low and x.shape[-1] <= WIDEST_NORM and can_compile()


class _Normed(torch.autograd.Function):
    """The norm in low precision."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
        from stalewise.models.kernels.elementwise import normed_on_device  # Triton comes with torch for GPUs alone

        rows = x.contiguous().view(-1, x.shape[-1])
        y, factor = normed_on_device(rows, weight, epsilon, dtype)
        ctx.save_for_backward(x, weight, factor)
        return y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        from stalewise.models.kernels.elementwise import norm_gradients_on_device

        x, weight, factor = ctx.saved_tensors
        gradient_TH, x_TH = (one.contiguous().view(-1, x.shape[-1]) for one in (gradients[0], x))
        x_grad, weight_grad, _ = norm_gradients_on_device(gradient_TH, x_TH, weight, factor)
        return x_grad.view(x.shape), weight_grad.to(weight.dtype), None, None


class _AddedNormed(torch.autograd.Function):
    """A sum, and its norm in low precision."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, addition: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        from stalewise.models.kernels.elementwise import added_normed_on_device

        x_TH, addition_TH = (one.contiguous().view(-1, x.shape[-1]) for one in (x, addition))
        total, y, factor = added_normed_on_device(x_TH, addition_TH, weight, epsilon, dtype)
        ctx.save_for_backward(total, weight, factor)
        ctx.dtype = addition.dtype
        return total.view(x.shape), y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        from stalewise.models.kernels.elementwise import norm_gradients_on_device

        total, weight, factor = ctx.saved_tensors
        along, down = (one.contiguous().view(total.shape) for one in gradients)
        x_grad, weight_grad, low = norm_gradients_on_device(down, total, weight, factor, along, ctx.dtype)
        shape = gradients[0].shape
        return x_grad.view(shape), low.view(shape), weight_grad.to(weight.dtype), None, None


def _epsilon(module: Any) -> float | None:
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


@torch.no_grad()
def _is_plain(module: Any) -> bool:
    """Whether it has one weight of one axis and computes what the operator does."""
    names = [name for name, _ in module.named_parameters()]
    if not type(module).__name__.endswith("RMSNorm") or names != ["weight"] or _epsilon(module) is None:
        return False
    if (weight := module.weight).ndim != 1:
        return False
    # Small, so that epsilon matters.
    probe = torch.linspace(-0.02, 0.03, 2 * len(weight), device=weight.device).view(2, -1).to(weight.dtype)
    exact = rms_norm(probe.float(), weight.shape, weight.float(), _epsilon(module))
    output = module(probe)
    tolerance = 1e-5 if weight.dtype is torch.float32 else 0.02  # bfloat16 rounds twice
    return output.dtype is probe.dtype and torch.allclose(output.float(), exact, rtol=tolerance, atol=tolerance)
