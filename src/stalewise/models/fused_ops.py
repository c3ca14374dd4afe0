"""Fused operators for GPUs: one norm operator for transformers' eight, one kernel each for gates and rotations.

Norms, gates and the trainer's rotations are replaced in models whose layers are not compiled, other rotations in
decoding steps. The sampler's model also has one product for layers with the same input, and residual sums within
products (`fuse_for_decoding`). Names say little about what a module computes, so all are compared with the original on
test inputs.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial, wraps
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from stalewise.models.fused_norms import added_normed, fuse_norms, is_fused, is_rounded_next
from stalewise.models.kernels import can_compile

ROTATION = "apply_rotary_pos_emb"  # in transformers' modeling files
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # that the kernel computes in float32 without loss
PROBE_ROWS = 3
GATED = ("gate_proj", "up_proj", "down_proj", "act_fn")  # children of a gated layer
# Children of one module with the same input, in the order of their calls: names of the Llama family.
SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
LAYER = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}  # children of a layer with two plain sums
Rotate = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


# ---------------------------------------------------------------- gated layers


def fuse_gates(model: Any) -> int:
    """Let the gated layers of a model compute silu(gate) · up in one kernel; returns their number."""
    if model.device.type != "cuda" or not can_compile():
        return 0
    gated = [module for module in model.modules() if _is_gated(module)]
    for module in gated:
        module.forward = _FusedGate(module)
    return len(gated)


class _FusedGate:
    """Replaces the forward of a gated layer; reads the module's parts at each call."""

    def __init__(self, module: Any) -> None:
        self.module = weakref.ref(module)  # a circle would keep its weights until Python looks for circles

    def __call__(self, x: Tensor) -> Tensor:
        module: Any = self.module()
        if (whole := _whole_product(module)) is not None and (product := whole(x)).dtype is not torch.float32:
            halves: Any = _GatedProduct.apply(product)
            return module.down_proj(halves)
        gate, up = module.gate_proj(x), module.up_proj(x)
        if gate.is_cuda and gate.dtype is up.dtype and gate.dtype is not torch.float32:
            product: Any = _Gated.apply(gate, up)
            return module.down_proj(product)
        return module.down_proj(module.act_fn(gate) * up)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        from stalewise.models.kernels.elementwise import gated_on_device  # Triton comes with torch for GPUs alone

        ctx.save_for_backward(gate, up)
        return gated_on_device(gate.flatten(0, -2), up.flatten(0, -2)).view(gate.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        from stalewise.models.kernels.elementwise import gated_gradients_on_device

        gate, up = ctx.saved_tensors
        rows = (x.flatten(0, -2) for x in (gradients[0].contiguous(), gate, up))
        return gated_gradients_on_device(*rows).unflatten(0, gate.shape[:-1]).chunk(2, dim=-1)


class _GatedProduct(torch.autograd.Function):
    """The same for gate and up as halves of one product: their gradients need not be joined."""

    @staticmethod
    def forward(ctx: Any, product: Tensor) -> Tensor:
        from stalewise.models.kernels.elementwise import gated_on_device

        ctx.save_for_backward(product)
        gate, up = product.flatten(0, -2).chunk(2, dim=1)
        return gated_on_device(gate, up).unflatten(0, product.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        from stalewise.models.kernels.elementwise import gated_gradients_on_device

        (product,) = ctx.saved_tensors
        halves = product.flatten(0, -2).chunk(2, dim=1)
        return gated_gradients_on_device(gradients[0].contiguous().flatten(0, -2), *halves).view(product.shape)


def _whole_product(module: Any) -> Callable[[Tensor], Tensor] | None:
    """Gate and up in one product, where they are one layer of equal halves on a GPU (`trainer/fused_linears.py`)."""
    sizes = getattr(module.gate_proj, "sizes", ())
    if len(sizes) != 2 or sizes[0] != sizes[1] or not module.gate_proj.weight.is_cuda:
        return None
    return module.gate_proj.product


@torch.no_grad()
def _is_gated(module: Any) -> bool:
    """Whether it computes down(silu(gate(x)) · up(x))."""
    if not all(isinstance(getattr(module, name, None), torch.nn.Module) for name in GATED) or not hasattr(
        module.gate_proj, "in_features"
    ):
        return False
    weight = next(module.parameters())
    probe = torch.linspace(-1, 1, 2 * module.gate_proj.in_features, device=weight.device, dtype=weight.dtype)
    probe = probe.view(2, -1)
    try:
        output = module(probe)
        expected = module.down_proj(torch.nn.functional.silu(module.gate_proj(probe)) * module.up_proj(probe))
    except (RuntimeError, TypeError, ValueError):  # other inputs
        return False
    return isinstance(output, Tensor) and torch.equal(output, expected)


# ---------------------------------------------------------------- the sampler's model


@torch.no_grad()
def fuse_for_decoding(model: Any) -> tuple[str, ...]:
    """Let a model that only samples launch fewer kernels; returns what was fused: norms, linears, gates, sums.

    Each kind is tried: if the logits of a few tokens are others than before, the modules get their own forward back.
    State dicts and the values of weights are as before, but weights may be parts of one tensor.
    """
    fused: list[str] = []
    try:
        expected = _some_logits(model)
    except Exception:  # it wants more than tokens
        return ()
    kinds = {"norms": fuse_norms, "linears": fuse_linears, "gates": fuse_gates, "sums": fuse_sums}
    for name, fuse in kinds.items():
        before = {module: vars(module).get("forward") for module in model.modules()}
        try:
            agrees = fuse(model) > 0 and _same_logits(_some_logits(model), expected)
        except Exception:  # of an architecture, of a kernel that does not compile for it, or no memory to join weights
            agrees = False
        fused += [name] if agrees else []
        for module, forward in before.items() if not agrees else ():
            vars(module).pop("forward", None)
            if forward is not None:
                module.forward = forward
    if model.device.type == "cuda":
        torch.cuda.empty_cache()  # of the weights that were joined
    return tuple(fused)


def _some_logits(model: Any) -> Tensor:
    size = model.get_input_embeddings().weight.shape[0]
    ids = torch.arange(PROBE_ROWS * 4, device=model.device).view(PROBE_ROWS, 4) * 7 % size
    both = ids, ids.view(-1, 1)  # as of prompts, and as of a decoding step
    return torch.cat([model(input_ids=x, use_cache=False).logits.flatten(0, 1) for x in both])


def _same_logits(logits: Tensor, expected: Tensor) -> bool:
    """Up to rounding in another order, as in `attention.supports_packing`."""
    tolerance = 1e-4 if expected.dtype is torch.float32 else 0.05
    return bool((logits.float() - expected.float()).abs().max() <= tolerance * expected.float().abs().max())


def fuse_linears(model: Any) -> int:
    """Let linear layers with the same input be one product, without gradients; returns the number of products."""
    uses = Counter(
        id(weight)
        for _, layer in model.named_modules(remove_duplicate=False)
        for weight in layer.parameters(recurse=False)
    )
    return sum(_join(parent, names, uses) for parent in list(model.modules()) for names in SAME_INPUT)


def _join(parent: Any, names: Sequence[str], uses: Counter[int]) -> bool:
    if "q_proj" in names and getattr(getattr(parent, "config", None), "clip_qkv", None) is not None:
        return False  # OLMo changes each of them in place
    layers: list[Any] = [getattr(parent, name, None) for name in names]
    if any(type(layer) is not torch.nn.Linear or "forward" in vars(layer) for layer in layers):
        return False
    if any(uses[id(weight)] > 1 for layer in layers for weight in layer.parameters()):
        return False
    kinds = {(x.in_features, x.bias is None, x.weight.dtype, x.weight.device) for x in layers}
    if len(kinds) > 1:
        return False
    joined = _JoinedLinears(layers)
    for index, layer in enumerate(layers):
        layer.forward = partial(joined.part, index)
    return True


class _JoinedLinears:
    """Linear layers with the same input. Their weights become parts of one tensor, and stay those of the layers."""

    def __init__(self, layers: Sequence[torch.nn.Linear]) -> None:
        self.layers = [weakref.ref(layer) for layer in layers]  # which hold this object
        self.sizes = [layer.out_features for layer in layers]
        self.weight = _joined([layer.weight for layer in layers])
        self.bias = None if layers[0].bias is None else _joined([layer.bias for layer in layers])
        self.places = self._places()
        self.input: Tensor | None = None
        self.parts: tuple[Tensor, ...] = ()

    def _places(self) -> list[int]:
        """Where the layers' weights are in the joined tensors, whose memory may be elsewhere after it was offloaded."""
        named = [one for ref in self.layers if (layer := ref()) for one in layer.named_parameters()]
        return [weight.data_ptr() - getattr(self, name).data_ptr() for name, weight in named]

    def part(self, index: int, x: Tensor) -> Tensor:
        """The output of one of the layers. The first computes all of them, the last releases them."""
        if index == 0:
            self.input, self.parts = None, ()
            # Weights that were moved since are no parts of the tensor any more.
            if not torch.is_grad_enabled() and self._places() == self.places:
                self.input, self.parts = x, linear(x, self.weight, self.bias).split(self.sizes, dim=-1)
        if x is not self.input:
            layer: Any = self.layers[index]()
            return linear(x, layer.weight, layer.bias)
        part = self.parts[index]
        if index + 1 == len(self.sizes):
            self.input, self.parts = None, ()
        return part


def _joined(weights: Sequence[Tensor]) -> Tensor:
    """The weights one after the other, which become views of it."""
    joined = torch.cat([weight.detach() for weight in weights])
    for weight, part in zip(weights, joined.split([len(weight) for weight in weights]), strict=True):
        weight.data = part
    return joined


def fuse_sums(model: Any) -> int:
    """Let the last product of attention and of the gated layer add to the residual in place; returns their number.

    Not with gradients. The residual of the first layer must be a tensor of its own, as embeddings are.
    """
    layers = [layer for layer in model.modules() if _has_plain_sums(layer)]
    for layer in layers:
        layer.forward = _SummingLayer(layer)
    return len(layers)


def _has_parts(layer: Any) -> bool:
    """Whether it has the parts of a layer of the Llama family and no numbers of its own, which might scale the sums."""
    if {name for name, _ in layer.named_children()} != LAYER or "forward" in vars(layer):
        return False
    return not any(isinstance(x, float) for x in vars(layer).values()) and not list(layer.parameters(recurse=False))


def _has_plain_sums(layer: Any) -> bool:
    """Whether both of its sums follow a product without a bias."""
    if not _has_parts(layer):
        return False
    ends = getattr(layer.self_attn, "o_proj", None), getattr(layer.mlp, "down_proj", None)
    return all(type(end) is torch.nn.Linear and end.bias is None and "forward" not in vars(end) for end in ends)


class _SummingLayer:
    """Replaces the forward of a decoder layer: both sums are parts of the products before them."""

    def __init__(self, layer: Any) -> None:
        self.layer = weakref.ref(layer)
        self.ends = _AddingLinear(layer.self_attn.o_proj), _AddingLinear(layer.mlp.down_proj)
        layer.self_attn.o_proj.forward, layer.mlp.down_proj.forward = self.ends

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        layer: Any = self.layer()
        x = hidden_states
        if args or torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type) or not x.is_contiguous():
            return type(layer).forward(layer, x, *args, **kwargs)
        x = self.ends[0].added(x, lambda: layer.self_attn(hidden_states=layer.input_layernorm(x), **kwargs)[0])
        return self.ends[1].added(x, lambda: layer.mlp(layer.post_attention_layernorm(x)))


class _AddingLinear:
    """Replaces the forward of a linear layer: within `added` it adds to the residual and returns that."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        self.layer = weakref.ref(layer)
        self.residual: Tensor | None = None

    def added(self, residual: Tensor, call: Callable[[], Tensor]) -> Tensor:
        """The residual plus what `call` returns, which ends with this layer."""
        self.residual = residual
        try:
            output = call()
            if output is not residual and self.residual is None:
                raise RuntimeError(
                    "a module modifies the output of its last linear layer, so the residual cannot be fused"
                )
            return residual if output is residual else residual + output
        finally:
            self.residual = None

    def __call__(self, x: Tensor) -> Tensor:
        layer: Any = self.layer()
        residual, weight = self.residual, layer.weight
        if residual is None or not x.dtype is residual.dtype is weight.dtype:
            return linear(x, weight)
        residual.view(-1, len(weight)).addmm_(x.reshape(-1, weight.shape[1]), weight.t())
        self.residual = None
        return residual


# ---------------------------------------------------------------- the trainer's layers


@torch.no_grad()
def fuse_training_sums(model: Any) -> int:
    """Let layers make the sum after attention in the kernel of the norm that follows; returns their number.

    The backward pass then has one kernel for the norm, the sum of two gradients, and rounding it for attention. Call it
    after `fuse_norms`. It is tried; if logits are others than before, the layers get their own forward back.
    """
    layers = [layer for layer in model.modules() if _has_parts(layer) and is_fused(layer.post_attention_layernorm)]
    if not layers or not can_compile():
        return 0
    before = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    try:
        with torch.autocast(model.device.type, dtype=torch.bfloat16):
            expected = _some_logits(model)
            for layer in layers:
                layer.forward = _NormingLayer(layer)
            agrees = _same_logits(_some_logits(model), expected)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # of an architecture, or of a kernel that does not compile for it
        agrees = False
    finally:
        model.set_attn_implementation(before)
    for layer in layers if not agrees else ():
        vars(layer).pop("forward", None)
    return len(layers) if agrees else 0


class _NormingLayer:
    """Replaces the forward of a decoder layer whose residual is in float32 and whose products are not."""

    def __init__(self, layer: Any) -> None:
        self.layer = weakref.ref(layer)

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        layer: Any = self.layer()
        if args or not is_rounded_next(hidden_states):
            return type(layer).forward(layer, hidden_states, *args, **kwargs)
        addition = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **kwargs)[0]
        total, normed = added_normed(hidden_states, addition, layer.post_attention_layernorm)
        return total + layer.mlp(normed)


# ---------------------------------------------------------------- rotations


def fuse_training_rotation(model: Any) -> bool:
    """Let the trainer rotate the queries and keys of packed tokens by one kernel, if it computes what the model does.

    It replaces a function of the modeling file for good: layers that are recomputed call it in the backward pass.
    """
    home = sys.modules[type(model.base_model).__module__]
    plain, rotate = vars(home).get(ROTATION), _rotate_on(model.device)
    if getattr(plain, "rotates_packed_tokens", False):
        return True
    if rotate is None or not isinstance(plain, FunctionType) or not _agree_in_training(plain, rotate, model):
        return False

    @wraps(plain)
    def rotation(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 4 and not kwargs and _is_packed_training(*args):
            return _RotatedTokens.apply(rotate, *args)
        return plain(*args, **kwargs)

    vars(rotation)["rotates_packed_tokens"] = True
    setattr(home, ROTATION, rotation)
    return True


def _is_packed_training(query: Any, key: Any, cos: Any, sin: Any) -> bool:
    """One row of tokens in low precision with angles, and a gradient to come."""
    if torch.compiler.is_compiling() or not all(isinstance(x, Tensor) for x in (query, key, cos, sin)):
        return False
    low = query.dtype in (torch.bfloat16, torch.float16) and key.dtype is query.dtype
    shapes = query.ndim == 4 and key.ndim == 4 and query.shape[0] == 1 and query.shape[3] % 2 == 0
    angles = cos.dtype in (torch.float32, query.dtype) and cos.shape == sin.shape == (1, query.shape[2], query.shape[3])
    return low and shapes and angles and torch.is_grad_enabled() and query.requires_grad


class _RotatedTokens(torch.autograd.Function):
    """The gradient is rotated back: the angles of both halves change places, and sines their sign."""

    @staticmethod
    def forward(ctx: Any, rotate: Rotate, *given: Tensor) -> tuple[Tensor, Tensor]:
        query, key, cos, sin = given
        ctx.rotate = rotate
        ctx.save_for_backward(cos, sin)
        return _rotate_tokens(rotate, query, key, cos, sin)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        back = -sin.roll(sin.shape[-1] // 2, dims=-1)
        return (None, *_rotate_tokens(ctx.rotate, gradients[0], gradients[1], cos, back), None, None)


def _rotate_tokens(
    rotate: Rotate, query_1HTD: Tensor, key_1KTD: Tensor, cos_1TD: Tensor, sin_1TD: Tensor
) -> tuple[Tensor, Tensor]:
    """The kernel for one new token of each row, with the tokens of one row as rows."""
    query_TH1D, key_TK1D = (x[0].transpose(0, 1).unsqueeze(2) for x in (query_1HTD, key_1KTD))
    query, key = rotate(query_TH1D, key_TK1D, cos_1TD[0].unsqueeze(1), sin_1TD[0].unsqueeze(1))
    return query.squeeze(2).transpose(0, 1).unsqueeze(0), key.squeeze(2).transpose(0, 1).unsqueeze(0)


def _agree_in_training(plain: Callable[..., Any], rotate: Rotate, model: Any) -> bool:
    """Whether both give the same, and the same gradients, where every number has its own angle."""
    try:
        query, key, cos, sin = _probe(model)  # rows become the tokens of one row
        angles = [x.float().transpose(0, 1) for x in (cos, sin)]
        results: list[list[Tensor]] = []
        for fused in (True, False):
            given = [x.transpose(0, 2).to(torch.bfloat16).requires_grad_() for x in (query, key)]
            with torch.enable_grad():
                turned: Any = _RotatedTokens.apply(rotate, *given, *angles) if fused else plain(*given, *angles)
                turned = [x.to(torch.bfloat16) for x in turned]
                loss = torch.cat([(x.float() * x.detach().float().cos()).flatten() for x in turned]).sum()
            results.append([*turned, *torch.autograd.grad(loss, given)])
        return all(_is_close(one.detach(), other.detach()) for one, other in zip(*results, strict=True))
    except Exception:  # other arguments, heads of unknown width, a compiler that fails: the model stays as it is
        return False


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
