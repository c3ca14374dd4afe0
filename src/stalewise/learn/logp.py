"""Log-probabilities of response tokens without ever holding tokens × vocabulary.

The body of the model runs on whole sequences; its last hidden states at the positions that predict response tokens then
pass through the output layer in chunks, and each chunk's logits are recomputed in the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from stalewise.errors import ModelError
from stalewise.learn.batching import MicroBatch

# Logits of one chunk: 2^24 float32 numbers are 64 MiB.
CHUNK_ELEMENTS = 1 << 24


def response_logp(
    model: Any, micro_batch: MicroBatch, *, chunk_elements: int = CHUNK_ELEMENTS
) -> tuple[Tensor, Tensor]:
    """Log-probabilities [B, T] of the response tokens with a gradient, and the policy's entropy [B, T] without one.

    Rows are padded on the right and attention is causal, so padding never reaches a response token and needs no mask.
    """
    hidden_BWH = model.base_model(input_ids=micro_batch.input_ids_BW, use_cache=False).last_hidden_state
    hidden_NH = hidden_BWH[micro_batch.row_N, micro_batch.source_N]
    head = model.get_output_embeddings()
    vocabulary = head.weight.shape[0]
    rows_at_once = max(1, chunk_elements // vocabulary)
    pieces: list[tuple[Tensor, Tensor]] = []
    for start in range(0, len(hidden_NH), rows_at_once):
        chunk = slice(start, start + rows_at_once)
        if len(hidden_NH) > rows_at_once and torch.is_grad_enabled():
            piece = checkpoint(_chunk_logp, head, hidden_NH[chunk], micro_batch.target_N[chunk], use_reentrant=False)
        else:
            piece = _chunk_logp(head, hidden_NH[chunk], micro_batch.target_N[chunk])
        pieces.append(piece)  # pyright: ignore[reportArgumentType]
    logp_N = torch.cat([logp for logp, _ in pieces])
    entropy_N = torch.cat([entropy for _, entropy in pieces])
    return micro_batch.to_response_grid(logp_N), micro_batch.to_response_grid(entropy_N)


def _chunk_logp(head: Any, hidden_NH: Tensor, target_N: Tensor) -> tuple[Tensor, Tensor]:
    logp_NV = head(hidden_NH).float().log_softmax(dim=1)
    with torch.no_grad():
        entropy_N = torch.special.entr(logp_NV.exp()).sum(dim=1)
    return logp_NV.gather(1, target_N.unsqueeze(1)).squeeze(1), entropy_N


def check_output_layer(model: Any) -> None:
    """Refuse a model whose log-probabilities `response_logp` would get wrong."""
    if not output_layer_is_plain(model):
        name = type(model).__name__
        raise ModelError(f"{name} changes its logits after the output layer, which the learner cannot follow yet")


def output_layer_is_plain(model: Any) -> bool:
    """Whether logits are just the output layer of the last hidden state.

    Some architectures scale or squash their logits afterwards; for those `response_logp` would be wrong.
    """
    # Squashing may not show on small logits, so the settings of the known architectures are looked at as well.
    changes = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
    if any(getattr(model.config, name, None) not in (None, 1, 1.0) for name in changes):
        return False
    ids = torch.arange(8, device=model.device).unsqueeze(0) % model.get_output_embeddings().weight.shape[0]
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits.float()
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        found = model.get_output_embeddings()(hidden).float()
    return torch.allclose(found, expected, rtol=1e-3, atol=1e-3)
