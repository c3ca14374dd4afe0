"""Fused operators for GPUs: one norm operator for transformers' eight, and one rotation kernel for its dozen.

Norms are replaced in models whose layers are not compiled, rotations in decoding steps. Names say little about what a
module computes, so both are compared with the original on test inputs first.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from stalewise.models.kernels import can_compile

ROTATION = "apply_rotary_pos_emb"  # in transformers' modeling files
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # that the kernel computes in float32 without loss
PROBE_ROWS = 3
Rotate = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def fuse_norms(model: Any) -> int:
    """Let the plain RMS norms of a model use torch's operator; returns their number. Weights keep their names."""
    norms = [module for module in model.modules() if _is_plain(module)]
    for module in norms:
        module.forward = _FusedNorm(module)
    return len(norms)


class _FusedNorm:
    """Replaces a norm's forward; reads the module's weight at each call."""

    def __init__(self, module: Any) -> None:
        self.module, self.epsilon = module, _epsilon(module)

    def __call__(self, hidden_states: Tensor) -> Tensor:
        weight = self.module.weight
        if hidden_states.dtype is not weight.dtype:  # the module decides the precision of the result
            return type(self.module).forward(self.module, hidden_states)
        return rms_norm(hidden_states, weight.shape, weight, self.epsilon)


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


@contextlib.contextmanager
def fused_rotation(model: Any) -> Iterator[None]:
    """Within: queries and keys of one new token per row are rotated by one kernel, if it computes what the model does.

    Attention calls a function of the modeling file by its global name; that function is replaced and put back.
    """
    home = sys.modules[type(model.base_model).__module__]
    plain, rotate = vars(home).get(ROTATION), _rotate_on(model.device)
    if rotate is None or not isinstance(plain, FunctionType) or not _agree(plain, rotate, model):
        yield
        return
    setattr(home, ROTATION, _dispatch(plain, rotate, model.device))
    try:
        yield
    finally:
        setattr(home, ROTATION, plain)


def _rotate_on(device: torch.device) -> Rotate | None:
    """The kernel, if it can be compiled."""
    if device.type != "cuda" or not can_compile():
        return None
    from stalewise.models.kernels.rope import rotate_on_device  # Triton comes with torch for GPUs alone

    return rotate_on_device


def _dispatch(plain: Callable[..., Any], rotate: Rotate, device: torch.device) -> Callable[..., Any]:
    """`rotate` for the calls that it supports, `plain` for all others."""

    @wraps(plain)
    def rotation(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 4 and not kwargs and _is_one_token(*args, device=device):
            return rotate(*args)
        return plain(*args, **kwargs)

    return rotation


def _is_one_token(query: Any, key: Any, cos: Any, sin: Any, *, device: torch.device) -> bool:
    """Whether each row has one new token with its own angles for whole heads, and no gradient is needed."""
    tensors = (query, key, cos, sin)
    if not all(isinstance(x, Tensor) and x.device == device and x.dtype is query.dtype for x in tensors):
        return False
    if query.dtype not in DTYPES or query.ndim != 4 or key.ndim != 4:
        return False
    (rows, _, tokens, width), angles = query.shape, (query.shape[0], 1, query.shape[3])
    if tokens != 1 or width % 2 or key.shape != (rows, key.shape[1], 1, width):
        return False
    needs_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    return cos.shape == angles and sin.shape == angles and not needs_gradient


def _agree(plain: Callable[..., Any], rotate: Rotate, model: Any) -> bool:
    """Whether both give the same for random inputs in which every number has its own angle."""
    try:
        probe = _probe(model)
        if not _is_one_token(*probe, device=probe[0].device):
            return False
        return all(_is_close(fused, x) for fused, x in zip(rotate(*probe), plain(*probe), strict=True))
    except Exception:  # other arguments, heads of unknown width, a compiler that fails: the model stays as it is
        return False


def _probe(model: Any) -> list[Tensor]:
    """Queries, keys, cosines and sines of a few rows with the model's numbers of heads."""
    config = getattr(model.config, "get_text_config", lambda: model.config)()
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    generator = torch.Generator().manual_seed(0)  # leaves torch's own random state alone
    shapes = [(heads, 1, width), (kv_heads, 1, width), (1, width), (1, width)]
    return [torch.randn(PROBE_ROWS, *shape, generator=generator).to(model.device, model.dtype) for shape in shapes]


def _is_close(output: Tensor, expected: Tensor) -> bool:
    """Up to rounding: float32 in another order; shorter types after every operator instead of once."""
    if output.dtype is not expected.dtype or output.shape != expected.shape:
        return False
    tolerance = 1e-5 if expected.dtype is torch.float32 else 0.02
    return bool((output - expected).abs().max() <= tolerance * expected.abs().max())
