"""Log-probabilities of response tokens without holding tokens × vocabulary logits.

The body of the model runs on whole sequences. The output layer runs on the last hidden states that predict response
tokens, chunk by chunk, and recomputes the logits of a chunk in the backward pass. Some models scale or soft-cap the
layer's product (`LogitMap`); logits are the result of that.
Axes: N response tokens, C tokens of one chunk, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from stalewise.errors import ModelError
from stalewise.models.compilation import free_cached
from stalewise.models.kernels import can_compile
from stalewise.models.loading import model_body
from stalewise.trainer.cuda_graphs import GraphedBody, hidden_states
from stalewise.trainer.micro_batch import MicroBatch

# Numbers in the logits of one chunk. A GPU needs large products: 2^28 are 512 MiB in bfloat16, 1 GiB in float32.
CHUNK_ELEMENTS = {"cuda": 1 << 28, "cpu": 1 << 22}
KEPT_LEAST, KEPT_STEP = 256, 4096  # tokens


@dataclass(frozen=True, slots=True)
class LogitMap:
    """Logits as a function of the output layer's product x: scale · x, or with a cap cap · tanh(scale · x / cap)."""

    scale: float = 1.0
    cap: float = 0.0  # 0: none

    def __call__(self, product: Tensor) -> Tensor:
        """The logits, in the precision of the product."""
        scaled = product if self.scale == 1 else product * self.scale
        return (scaled / self.cap).tanh() * self.cap if self.cap else scaled

    def at(self, temperature: float) -> LogitMap:
        """The map to logits that are divided by the temperature."""
        return LogitMap(self.scale / temperature, self.cap / temperature)

    def slope(self, logits: Tensor) -> Tensor | float:
        """The derivative at the product that gave these logits."""
        return self.scale * (1 - (logits / self.cap).square()) if self.cap else self.scale


IDENTITY = LogitMap()
OfEntropy = tuple[Tensor, Tensor]  # entropies [C] and their gradient [C]


def chunk_statistics(
    product_CV: Tensor, target_C: Tensor, *, logit_map: LogitMap = IDENTITY
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-sum-exp, log-probability of the target and entropy, each [C] in float32."""
    logits_CV = logit_map(product_CV.float())
    lse_C = logits_CV.logsumexp(dim=1)
    chosen_C = logits_CV.gather(1, target_C.unsqueeze(1)).squeeze(1)
    # Σ p·(lse − logit), with 0 · (−inf) = 0 for tokens whose logit is −inf.
    surprise_CV = lse_C.unsqueeze(1) - logits_CV
    entropy_C = torch.where(surprise_CV < torch.inf, (-surprise_CV).exp() * surprise_CV, 0.0).sum(dim=1)
    return lse_C, chosen_C - lse_C, entropy_C


def chunk_gradient(
    product_CV: Tensor,
    lse_C: Tensor,
    target_C: Tensor,
    gradient_C: Tensor,
    of_entropy: OfEntropy | None = None,
    *,
    logit_map: LogitMap = IDENTITY,
) -> Tensor:
    """Gradient of the product, [C, V] in its dtype.

    That of the logits is (1 at the target − softmax) · gradient of the log-probability; where the entropy H has a
    gradient, also −softmax · (log softmax + H) · that gradient.
    """
    gradient_C1, logits_CV = gradient_C.unsqueeze(1), logit_map(product_CV.float())
    logp_CV = logits_CV - lse_C.unsqueeze(1)
    gradient_CV = logp_CV.exp().mul(-gradient_C1)
    if of_entropy is not None:
        entropy_C1, its_gradient_C1 = (value_C.unsqueeze(1) for value_C in of_entropy)
        # A token whose logit is −inf has probability 0 and no part in it.
        above_CV = torch.where(logp_CV > -torch.inf, logp_CV + entropy_C1, 0.0)
        gradient_CV -= logp_CV.exp() * above_CV * its_gradient_C1
    gradient_CV = gradient_CV.scatter_add(1, target_C.unsqueeze(1), gradient_C1)
    if logit_map != IDENTITY:
        gradient_CV *= logit_map.slope(logits_CV)
    return gradient_CV.to(product_CV.dtype)


@dataclass(frozen=True, slots=True)
class Kernels:
    """The two functions of the output layer that are not matrix products; `gradient` may overwrite the product."""

    statistics: Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
    gradient: Callable[[Tensor, Tensor, Tensor, Tensor, OfEntropy | None], Tensor]


PLAIN_KERNELS = Kernels(chunk_statistics, chunk_gradient)


def kernels_for(device: torch.device, logit_map: LogitMap = IDENTITY) -> Kernels:
    """Triton kernels that read the product once, where the device has them; else plain torch."""
    if device.type != "cuda" or not can_compile():
        if logit_map == IDENTITY:
            return PLAIN_KERNELS
        return Kernels(partial(chunk_statistics, logit_map=logit_map), partial(chunk_gradient, logit_map=logit_map))
    from stalewise.models.kernels import logits  # Triton is there with a GPU only

    numbers = {"scale": logit_map.scale, "cap": logit_map.cap}
    return Kernels(partial(logits.statistics_on_device, **numbers), partial(logits.gradient_on_device, **numbers))


def kept_rows(tokens: int) -> int:
    """The size of the memory for kept logits, in tokens: the next power of two, or above `KEPT_STEP` its next multiple.

    Micro-batches differ in size, so this memory seldom has to grow.

    >>> [kept_rows(tokens) for tokens in (7, 1000, 4096, 4097)]
    [256, 1024, 4096, 8192]
    """
    if tokens > KEPT_STEP:
        return -(-tokens // KEPT_STEP) * KEPT_STEP
    return max(KEPT_LEAST, 1 << (tokens - 1).bit_length())


class KeptLogits:
    """Memory that keeps the logits of one micro-batch for its backward pass; all micro-batches use the same.

    It stays between them, until rollouts are sampled. If it were freed, the allocator would put something small and
    lasting there, and the next logits, gigabytes, would need memory elsewhere.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.memory: Tensor | None = None
        self.ticket = 0  # identifies the forward pass whose logits are kept

    def fits(self, tokens: int, vocabulary: int, dtype: torch.dtype) -> bool:
        """Whether the logits of this many tokens are kept."""
        return tokens > 0 and kept_rows(tokens) * vocabulary * dtype.itemsize <= self.most_bytes

    def take(self, hidden_NH: Tensor, vocabulary: int) -> tuple[int, Tensor]:
        """Memory [N, V] for the logits of these hidden states, and the ticket with which the backward pass finds it."""
        tokens, like = len(hidden_NH), (hidden_NH.dtype, hidden_NH.device)
        held = self.memory
        if held is None or (held.dtype, held.device) != like or held.numel() < tokens * vocabulary:
            held = None
            self.release()
            if hidden_NH.is_cuda:  # else the old memory is cached, and the new one lies beside it
                free_cached()
            self.memory = hidden_NH.new_empty(kept_rows(tokens) * vocabulary)
        self.ticket += 1
        return self.ticket, self.logits(self.ticket, tokens, vocabulary)

    def logits(self, ticket: int, tokens: int, vocabulary: int) -> Tensor:
        """The logits [N, V] of the forward pass with this ticket; a RuntimeError if they are gone."""
        if self.memory is None or ticket != self.ticket:
            raise RuntimeError(
                "the logits of this forward pass are gone: another forward pass took their memory, or it was freed; "
                "run each backward pass before the next forward pass"
            )
        return self.memory[: tokens * vocabulary].view(tokens, vocabulary)

    def release(self) -> None:
        """Free the memory."""
        self.memory = None


def response_logp(
    model: Any,
    micro_batch: MicroBatch,
    *,
    chunk_elements: int | None = None,
    dtype: torch.dtype = torch.float32,
    kernels: Kernels = PLAIN_KERNELS,
    body: GraphedBody | None = None,
    kept: KeptLogits | None = None,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities [B, T] of the response tokens with a gradient, and the policy's entropy [B, T].

    The entropy has a gradient, too, with `entropy_gradient`.

    `dtype` is that of the output layer's product; everything after it is float32. `kernels` are those of the model's
    `LogitMap`. `body` replaces the model's own. Logits that `kept` has room for are kept for the backward pass, which
    then must come before the next forward pass with a gradient: a quarter of the output layer's time.
    """
    head = model.get_output_embeddings()
    weight_VH, bias_V = head.weight, head.bias
    hidden_TH = hidden_states(model, micro_batch.inputs) if body is None else body(micro_batch)
    hidden_NH = hidden_TH[micro_batch.source_N]
    elements = chunk_elements or CHUNK_ELEMENTS.get(hidden_NH.device.type, 1 << 24)
    rows_at_once = max(1, elements // weight_VH.shape[0])
    if kept is not None and not (torch.is_grad_enabled() and kept.fits(len(hidden_NH), len(weight_VH), dtype)):
        kept = None
    settings = (rows_at_once if kept is None else len(hidden_NH)), dtype, kernels, kept, entropy_gradient
    values: Any = OutputLayerLogp.apply(hidden_NH, weight_VH, bias_V, micro_batch.target_N, *settings)
    return micro_batch.to_response_grid(values[0]), micro_batch.to_response_grid(values[1])


class OutputLayerLogp(torch.autograd.Function):
    """log softmax(map(hidden · Wᵀ + bias)) at the targets, and the entropy of that distribution, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, target_N: Tensor, *settings: Any
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies, each [N]; `settings` are those of `response_logp`."""
        rows_at_once, dtype, kernels, kept, entropy_gradient = settings
        hidden_low, weight_low = hidden_NH.to(dtype), weight_VH.to(dtype)
        if kept is None:
            ticket, out_CV = 0, _chunk_buffer(hidden_low, weight_low, rows_at_once)
        else:
            ticket, out_CV = kept.take(hidden_low, len(weight_low))
        statistics = [
            kernels.statistics(_product(hidden_low[chunk], weight_low, bias_V, out_CV), target_N[chunk])
            for chunk in _chunks(len(hidden_NH), rows_at_once)
        ]
        lse_N, logp_N, entropy_N = map(torch.cat, zip(*statistics, strict=True))
        ctx.entropy_gradient = entropy_gradient
        ctx.save_for_backward(hidden_low, weight_low, bias_V, target_N, lse_N, entropy_N if entropy_gradient else None)
        ctx.rows_at_once, ctx.kernels, ctx.kept, ctx.ticket = rows_at_once, kernels, kept, ticket
        ctx.hidden_dtype, ctx.weight_dtype = hidden_NH.dtype, weight_VH.dtype
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy_N)
        return logp_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of hidden states, weight and bias, from kept or recomputed logits."""
        hidden_NH, weight_VH, bias_V, target_N, lse_N, entropy_N = ctx.saved_tensors
        wants_weight, wants_bias = ctx.needs_input_grad[1], ctx.needs_input_grad[2]
        hidden_grad_NH = torch.empty_like(hidden_NH)
        # Summed in float32, so that the number of chunks changes only rounding.
        several = len(hidden_NH) > ctx.rows_at_once
        weight_grad_VH = torch.zeros_like(weight_VH, dtype=torch.float32) if wants_weight and several else None
        bias_grad_V = torch.zeros_like(bias_V, dtype=torch.float32) if wants_bias else None
        kept, ctx.kept = ctx.kept, None  # their gradient overwrites them
        kept_NV = None if kept is None else kept.logits(ctx.ticket, len(hidden_NH), len(weight_VH))
        out_CV = _chunk_buffer(hidden_NH, weight_VH, ctx.rows_at_once) if kept_NV is None else kept_NV
        for chunk in _chunks(len(hidden_NH), ctx.rows_at_once):
            product_CV = _product(hidden_NH[chunk], weight_VH, bias_V, out_CV) if kept_NV is None else kept_NV
            of_entropy = (entropy_N[chunk], gradients[1][chunk]) if ctx.entropy_gradient else None
            of_token = lse_N[chunk], target_N[chunk], gradients[0][chunk]
            grad_CV = ctx.kernels.gradient(product_CV, *of_token, of_entropy)
            torch.mm(grad_CV, weight_VH, out=hidden_grad_NH[chunk])
            if wants_weight and not several:
                weight_grad_VH = _float32_product(grad_CV.T, hidden_NH)
            elif weight_grad_VH is not None:
                weight_grad_VH += grad_CV.T @ hidden_NH[chunk]
            if bias_grad_V is not None:
                bias_grad_V += grad_CV.sum(dim=0, dtype=torch.float32)
        weight_grad = None if weight_grad_VH is None else weight_grad_VH.to(ctx.weight_dtype)
        return hidden_grad_NH.to(ctx.hidden_dtype), weight_grad, bias_grad_V, *[None] * 6


def _float32_product(left: Tensor, right: Tensor) -> Tensor:
    """The product in float32. A GPU computes it without rounding to the lower precision first."""
    if left.is_cuda and left.dtype is not torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32)
    return torch.mm(left, right).float()


def _chunks(length: int, most: int) -> Iterator[slice]:
    """As few chunks as possible (at least one, which may be empty), of about equal size.

    A small remainder, of another size in every update, would run in kernels for small products and leave a GPU idle.

    >>> list(_chunks(10, 4))
    [slice(0, 4, None), slice(4, 7, None), slice(7, 10, None)]
    """
    count = max(1, -(-length // most))
    return (slice(-(-length * k // count), -(-length * (k + 1) // count)) for k in range(count))


def _chunk_buffer(hidden_NH: Tensor, weight_VH: Tensor, rows_at_once: int) -> Tensor:
    """Memory for the logits of every chunk; with several chunks always of one size, so that the allocator reuses it."""
    return hidden_NH.new_empty(min(rows_at_once, len(hidden_NH)), len(weight_VH))


def _product(hidden_CH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, out_CV: Tensor) -> Tensor:
    product_CV = out_CV[: len(hidden_CH)]
    if bias_V is None:
        return torch.mm(hidden_CH, weight_VH.T, out=product_CV)
    return torch.addmm(bias_V.to(hidden_CH.dtype), hidden_CH, weight_VH.T, out=product_CV)


# Made-up products of an output layer: the first shows the slope of a model's `LogitMap`, the second its limit, and the
# others its shape. Powers of two, since models may round them.
_PROBE = (2.0**-27, 2.0**100, -(2.0**100), 1.0, -1.0, 0.25, -4.0, 8.0, -16.0, 32.0, -64.0, 256.0)


@torch.no_grad()
def measure_logit_map(model: Any) -> LogitMap:
    """The map from the output layer's product to logits, found by trying it; a ModelError if it is none of ours.

    Architectures have different names for the numbers, and some divide where others multiply.
    """
    head, body, name = model.get_output_embeddings(), model_body(model), type(model).__name__
    if type(head) is not torch.nn.Linear or body is model:
        raise _unsupported(name, "has no plain output layer")
    ids = torch.arange(8, device=model.device).unsqueeze(0) % head.weight.shape[0]
    read, product, logits = _probed(model, head, ids)
    hidden = getattr(body(input_ids=ids, use_cache=False), "last_hidden_state", read[:0]).double()
    factor = 1.0
    if is_plain := hidden.shape == read.shape:
        factor = float((read * hidden).sum() / hidden.square().sum())  # some divide the hidden state instead
        factor = 1.0 if abs(factor - 1) < 1e-3 else factor
        is_plain = torch.allclose(factor * hidden, read, rtol=1e-2, atol=1e-3)
    if not is_plain or (factor != 1 and head.bias is not None):
        raise _unsupported(name, "has an output layer that reads something else than the last hidden state")
    slope, limit = logits.flatten()[:2].tolist()
    found = LogitMap(slope / _PROBE[0], limit if abs(limit) < 2.0**50 else 0.0)
    if logits.shape != product.shape or not torch.allclose(found(product), logits, rtol=1e-5, atol=0.0):
        raise _unsupported(name, "changes its logits by more than a factor and a soft cap")
    return LogitMap(factor * found.scale, found.cap)


def _probed(model: Any, head: Any, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The output layer's input, made-up products, and the logits that the model makes of them; all in float64."""
    seen: dict[str, Tensor] = {}

    def give_product(_: Any, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        probe = torch.tensor(_PROBE, dtype=torch.float64, device=output.device)
        seen["product"] = probe.repeat(-(-output.numel() // len(probe)))[: output.numel()].view(output.shape)
        seen["read"] = inputs[0].double()
        return seen["product"].clone()

    hook = head.register_forward_hook(give_product)
    try:
        logits = model(input_ids=ids, use_cache=False).logits.double()
    finally:
        hook.remove()
    if not seen:  # the layer was not called
        seen = dict.fromkeys(("read", "product"), logits.new_empty(0))
    return seen["read"], seen["product"], logits


def _unsupported(name: str, what: str) -> ModelError:
    return ModelError(f"{name} {what}, which training does not support: choose another model")
