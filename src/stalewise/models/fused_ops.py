"""Root-mean-square norms as one operator where transformers has eight: for a GPU whose layers are not compiled."""

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


# Rotation of queries and keys by one kernel where transformers has a dozen: for a GPU that decodes token by token.

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
    from stalewise.models.kernels.rope import rotate_on_device  # Triton comes with torch for GPUs alone

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
