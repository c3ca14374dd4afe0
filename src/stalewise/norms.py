"""Root-mean-square norms as one operator where transformers has eight: for a GPU whose layers are not compiled."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm


def fuse_norms(model: Any) -> int:
    """Let the norms of a model compute with torch's own operator; how many do. Names of weights do not change.

    Which modules those are is tried out: a name says little about what is done with the weight.
    """
    fused = [module for module in model.modules() if _is_plain(module)]
    for module in fused:
        module.forward = _Fused(module)
    return len(fused)


class _Fused:
    """Stands in for a norm's forward; the weight is the one that the module has when it is called."""

    def __init__(self, module: Any) -> None:
        self.module, self.epsilon = module, _epsilon(module)

    def __call__(self, hidden_states: Tensor) -> Tensor:
        weight = self.module.weight
        if hidden_states.dtype is not weight.dtype:  # whose precision comes out is the module's business
            return type(self.module).forward(self.module, hidden_states)
        return rms_norm(hidden_states, weight.shape, weight, self.epsilon)


def _epsilon(module: Any) -> float | None:
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


@torch.no_grad()
def _is_plain(module: Any) -> bool:
    """Whether it has one weight, of one axis, and does with it what the operator does."""
    names = [name for name, _ in module.named_parameters()]
    if not type(module).__name__.endswith("RMSNorm") or names != ["weight"] or _epsilon(module) is None:
        return False
    weight = module.weight
    if weight.ndim != 1:
        return False
    # Small, so that epsilon shows, and with a weight that shows what is done with it.
    probe = torch.linspace(-0.02, 0.03, 2 * len(weight), device=weight.device).view(2, -1).to(weight.dtype)
    exact = rms_norm(probe.float(), weight.shape, weight.float(), _epsilon(module))
    found = module(probe)
    tolerance = 1e-5 if weight.dtype is torch.float32 else 0.02  # bfloat16 rounds twice
    return found.dtype is probe.dtype and torch.allclose(found.float(), exact, rtol=tolerance, atol=tolerance)
