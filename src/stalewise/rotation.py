"""Rotation of queries and keys by one kernel where transformers has a dozen: for a GPU that decodes token by token."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from stalewise.kernels import can_compile

ROTATION = "apply_rotary_pos_emb"  # in transformers' files of models
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # what is computed in float32 and loses nothing by it
PROBE_ROWS = 3
Rotate = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@contextlib.contextmanager
def fused_rotation(model: Any) -> Iterator[None]:
    """Within: queries and keys of one new token a row are rotated by one kernel, if that computes what the model does.

    Attention calls a function of the model's file by its global name, so that is what is replaced, and put back.
    Whether the kernel does the same is tried out: a name says little about which numbers are turned with which.
    """
    home = sys.modules[type(model.base_model).__module__]
    plain, rotate = vars(home).get(ROTATION), _rotate_on(model.device)
    if rotate is None or not isinstance(plain, FunctionType) or not _agree(plain, rotate, model):
        yield
        return
    setattr(home, ROTATION, _stand_in(plain, rotate, model.device))
    try:
        yield
    finally:
        setattr(home, ROTATION, plain)


def _rotate_on(device: torch.device) -> Rotate | None:
    """The kernel, where one can be made."""
    if device.type != "cuda" or not can_compile():
        return None
    from stalewise.kernels.rotate import rotate_on_device  # Triton comes with torch for GPUs alone

    return rotate_on_device


def _stand_in(plain: Callable[..., Any], rotate: Rotate, device: torch.device) -> Callable[..., Any]:
    """`rotate` for calls that it is made for, and `plain` for all others."""

    @wraps(plain)
    def rotation(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 4 and not kwargs and _is_one_token(*args, device=device):
            return rotate(*args)
        return plain(*args, **kwargs)

    return rotation


def _is_one_token(query: Any, key: Any, cos: Any, sin: Any, *, device: torch.device) -> bool:
    """Whether each row has one new token and angles of its own for whole heads, and nobody wants a gradient."""
    tensors = (query, key, cos, sin)
    if not all(isinstance(x, Tensor) and x.device == device and x.dtype is query.dtype for x in tensors):
        return False
    if query.dtype not in DTYPES or query.ndim != 4 or key.ndim != 4:
        return False
    (rows, _, tokens, width), angles = query.shape, (query.shape[0], 1, query.shape[3])
    if tokens != 1 or width % 2 or key.shape != (rows, key.shape[1], 1, width):
        return False
    wants_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    return cos.shape == angles and sin.shape == angles and not wants_gradient


def _agree(plain: Callable[..., Any], rotate: Rotate, model: Any) -> bool:
    """Whether both do the same to random numbers, where every number has an angle of its own."""
    try:
        probe = _probe(model)
        if not _is_one_token(*probe, device=probe[0].device):
            return False
        return all(_is_close(found, x) for found, x in zip(rotate(*probe), plain(*probe), strict=True))
    except Exception:  # other arguments, heads of no known width, a compiler that fails: the model goes on as it was
        return False


def _probe(model: Any) -> list[Tensor]:
    """Queries, keys, cosines and sines of a few rows, of the model's numbers of heads."""
    config = getattr(model.config, "get_text_config", lambda: model.config)()
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    generator = torch.Generator().manual_seed(0)  # the random numbers of others stay what they are
    shapes = [(heads, 1, width), (kv_heads, 1, width), (1, width), (1, width)]
    return [torch.randn(PROBE_ROWS, *shape, generator=generator).to(model.device, model.dtype) for shape in shapes]


def _is_close(found: Tensor, expected: Tensor) -> bool:
    """Up to rounding: of float32 in another order, of shorter numbers after every operator instead of once."""
    if found.dtype is not expected.dtype or found.shape != expected.shape:
        return False
    tolerance = 1e-5 if expected.dtype is torch.float32 else 0.02
    return bool((found - expected).abs().max() <= tolerance * expected.abs().max())
