"""Log-probabilities of response tokens without holding tokens × vocabulary logits.

The body of the model runs on whole sequences. The output layer runs on the last hidden states that predict response
tokens, chunk by chunk, and recomputes the logits of a chunk in the backward pass.
Axes: N response tokens, C tokens of one chunk, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stalewise.errors import ModelError
from stalewise.models.kernels import can_compile
from stalewise.trainer.cuda_graphs import GraphedBody, hidden_states
from stalewise.trainer.micro_batch import MicroBatch

# Numbers in the logits of one chunk. A GPU needs large products: 2^28 are 512 MiB in bfloat16, 1 GiB in float32.
CHUNK_ELEMENTS = {"cuda": 1 << 28, "cpu": 1 << 22}


def chunk_statistics(logits_CV: Tensor, target_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-sum-exp, log-probability of the target and entropy, each [C] in float32."""
    logits_CV = logits_CV.float()
    lse_C = logits_CV.logsumexp(dim=1)
    chosen_C = logits_CV.gather(1, target_C.unsqueeze(1)).squeeze(1)
    # Σ p·(lse − logit), with 0 · (−inf) = 0 for tokens whose logit is −inf.
    surprise_CV = lse_C.unsqueeze(1) - logits_CV
    entropy_C = torch.where(surprise_CV < torch.inf, (-surprise_CV).exp() * surprise_CV, 0.0).sum(dim=1)
    return lse_C, chosen_C - lse_C, entropy_C


def chunk_gradient(logits_CV: Tensor, lse_C: Tensor, target_C: Tensor, gradient_C: Tensor) -> Tensor:
    """Gradient of the logits, [C, V] in their dtype: (1 at the target − softmax) · gradient of the log-probability."""
    gradient_C1 = gradient_C.unsqueeze(1)
    gradient_CV = (logits_CV.float() - lse_C.unsqueeze(1)).exp().mul(-gradient_C1)
    return gradient_CV.scatter_add(1, target_C.unsqueeze(1), gradient_C1).to(logits_CV.dtype)


@dataclass(frozen=True, slots=True)
class Kernels:
    """The two functions of the output layer that are no matrix products; `gradient` may overwrite the logits."""

    statistics: Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
    gradient: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


PLAIN_KERNELS = Kernels(chunk_statistics, chunk_gradient)


def kernels_for(device: torch.device) -> Kernels:
    """Triton kernels that read the logits once, where the device has them; else plain torch."""
    if device.type != "cuda" or not can_compile():
        return PLAIN_KERNELS
    from stalewise.models.kernels import logits  # Triton is there with a GPU only

    return Kernels(logits.statistics_on_device, logits.gradient_on_device)


def response_logp(
    model: Any,
    micro_batch: MicroBatch,
    *,
    chunk_elements: int | None = None,
    dtype: torch.dtype = torch.float32,
    kernels: Kernels = PLAIN_KERNELS,
    body: GraphedBody | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities [B, T] of the response tokens with a gradient, and the policy's entropy [B, T] without one.

    `dtype` is that of the output layer's product; everything after it is float32. `body` replaces the model's own.
    """
    head = model.get_output_embeddings()
    weight_VH, bias_V = head.weight, head.bias
    hidden_TH = hidden_states(model, micro_batch.inputs) if body is None else body(micro_batch)
    hidden_NH = hidden_TH[micro_batch.source_N]
    elements = chunk_elements or CHUNK_ELEMENTS.get(hidden_NH.device.type, 1 << 24)
    rows_at_once = max(1, elements // weight_VH.shape[0])
    settings = rows_at_once, dtype, kernels
    values: Any = OutputLayerLogp.apply(hidden_NH, weight_VH, bias_V, micro_batch.target_N, *settings)
    return micro_batch.to_response_grid(values[0]), micro_batch.to_response_grid(values[1])


class OutputLayerLogp(torch.autograd.Function):
    """log softmax(hidden · Wᵀ + bias) at the targets, and the entropy of that distribution, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, target_N: Tensor, *settings: Any
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies, each [N]; `settings` are rows of a chunk, dtype and `Kernels`."""
        rows_at_once, dtype, kernels = settings
        hidden_low, weight_low = hidden_NH.to(dtype), weight_VH.to(dtype)
        out_CV = _chunk_buffer(hidden_low, weight_low, rows_at_once)
        statistics = [
            kernels.statistics(_logits(hidden_low[chunk], weight_low, bias_V, out_CV), target_N[chunk])
            for chunk in _chunks(len(hidden_NH), rows_at_once)
        ]
        lse_N, logp_N, entropy_N = map(torch.cat, zip(*statistics, strict=True))
        ctx.save_for_backward(hidden_low, weight_low, bias_V, target_N, lse_N)
        ctx.rows_at_once, ctx.kernels = rows_at_once, kernels
        ctx.hidden_dtype, ctx.weight_dtype = hidden_NH.dtype, weight_VH.dtype
        ctx.mark_non_differentiable(entropy_N)
        return logp_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of hidden states, weight and bias, from recomputed logits."""
        hidden_NH, weight_VH, bias_V, target_N, lse_N = ctx.saved_tensors
        wants_weight, wants_bias = ctx.needs_input_grad[1], ctx.needs_input_grad[2]
        hidden_grad_NH = torch.empty_like(hidden_NH)
        # Summed in float32, so that the number of chunks changes only rounding.
        weight_grad_VH = torch.zeros_like(weight_VH, dtype=torch.float32) if wants_weight else None
        bias_grad_V = torch.zeros_like(bias_V, dtype=torch.float32) if wants_bias else None
        out_CV = _chunk_buffer(hidden_NH, weight_VH, ctx.rows_at_once)
        for chunk in _chunks(len(hidden_NH), ctx.rows_at_once):
            logits_CV = _logits(hidden_NH[chunk], weight_VH, bias_V, out_CV)
            grad_CV = ctx.kernels.gradient(logits_CV, lse_N[chunk], target_N[chunk], gradients[0][chunk])
            torch.mm(grad_CV, weight_VH, out=hidden_grad_NH[chunk])
            if weight_grad_VH is not None:
                weight_grad_VH += grad_CV.T @ hidden_NH[chunk]
            if bias_grad_V is not None:
                bias_grad_V += grad_CV.sum(dim=0, dtype=torch.float32)
        weight_grad = None if weight_grad_VH is None else weight_grad_VH.to(ctx.weight_dtype)
        return hidden_grad_NH.to(ctx.hidden_dtype), weight_grad, bias_grad_V, None, None, None, None


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


def _logits(hidden_CH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, out_CV: Tensor) -> Tensor:
    logits_CV = out_CV[: len(hidden_CH)]
    if bias_V is None:
        return torch.mm(hidden_CH, weight_VH.T, out=logits_CV)
    return torch.addmm(bias_V.to(hidden_CH.dtype), hidden_CH, weight_VH.T, out=logits_CV)


def check_output_layer(model: Any) -> None:
    """Refuse a model for which `response_logp` would be wrong."""
    if not output_layer_is_plain(model):
        raise ModelError(
            f"{type(model).__name__} has no plain output layer, or changes its logits after it, which training does "
            "not support: choose another model"
        )


def output_layer_is_plain(model: Any) -> bool:
    """Whether logits are the output layer of the last hidden state; some architectures scale or squash them after."""
    if type(model.get_output_embeddings()) is not torch.nn.Linear:
        return False
    # Squashing may not show on small logits, so the settings of known architectures are checked as well.
    changes = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
    if any(getattr(model.config, name, None) not in (None, 1, 1.0) for name in changes):
        return False
    ids = torch.arange(8, device=model.device).unsqueeze(0) % model.get_output_embeddings().weight.shape[0]
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits.float()
        hidden = getattr(model.base_model(input_ids=ids, use_cache=False), "last_hidden_state", None)
        if hidden is None:
            return False
        logits = model.get_output_embeddings()(hidden).float()
    return torch.allclose(logits, expected, rtol=1e-3, atol=1e-3)
