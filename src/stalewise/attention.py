"""Attention over packed sequences, as one of transformers' attention implementations.

Several sequences lie one after the other in a single row [1, T], without padding; a token sees the earlier tokens of
its own sequence. On a GPU in half precision this is torch's built-in variable-length attention. Elsewhere queries, keys
and values (and nothing else of the model) are put into a padded grid for causal attention, and its output taken out.

Axes: T tokens of all sequences, B sequences, W tokens of the longest, H heads, K key-value heads, D numbers per head.
"""

from __future__ import annotations

from typing import Any, TypedDict

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

PACKED = "stalewise_packed"


class PackedArguments(TypedDict):
    """What a model's forward takes beside the ids [1, T]; the first two names are those of transformers."""

    position_ids: Tensor  # [1, T], from 0 in each sequence
    cu_seq_lens_q: Tensor  # [B + 1] int32, where each sequence begins, and the end
    max_length_q: int
    grid_BW: Tensor  # token at each place of the padded grid; any token of the sequence where there is none
    place_T: Tensor  # place of each token in the flattened grid


def packed_arguments(length_B: np.ndarray, device: torch.device) -> PackedArguments:
    """Arguments for sequences of these lengths."""
    start_B = np.cumsum(length_B) - length_B
    width = int(length_B.max())
    row_T = np.repeat(np.arange(len(length_B)), length_B)
    column_T = np.arange(len(row_T)) - start_B[row_T]
    grid_BW = start_B[:, None] + np.minimum(np.arange(width), length_B[:, None] - 1)
    return PackedArguments(
        position_ids=to_device(column_T[None], device),
        cu_seq_lens_q=to_device(np.append(start_B, len(row_T)).astype(np.int32), device),
        # Rounded up, so that a compiled layer meets few different values.
        max_length_q=1 << (width - 1).bit_length(),
        grid_BW=to_device(grid_BW, device),
        place_T=to_device(row_T * width + column_T, device),
    )


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """A tensor with the numbers of `array`; the copy to a GPU is enqueued, not waited for."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def packed_attention(
    module: Any,
    query_1HTD: Tensor,
    key_1KTD: Tensor,
    value_1KTD: Tensor,
    attention_mask: None,
    *,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    grid_BW: Tensor,
    place_T: Tensor,
    scaling: float | None = None,
    sliding_window: int | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence, [1, T, H, D]."""
    refuse_unknown(others)
    query_THD, key_TKD, value_TKD = (x[0].transpose(0, 1) for x in (query_1HTD, key_1KTD, value_1KTD))
    if query_THD.is_cuda and query_THD.dtype is not torch.float32:
        window = (-1 if sliding_window is None else sliding_window - 1, 0)
        gqa = query_THD.shape[1] != key_TKD.shape[1]
        length = (cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)
        output: Any = varlen_attn(
            query_THD, key_TKD, value_TKD, *length, scale=scaling, window_size=window, enable_gqa=gqa
        )
        return output.unsqueeze(0), None
    return _grid_attention(query_THD, key_TKD, value_TKD, grid_BW, place_T, scaling, sliding_window), None


def _grid_attention(
    query_THD: Tensor,
    key_TKD: Tensor,
    value_TKD: Tensor,
    grid_BW: Tensor,
    place_T: Tensor,
    scaling: float | None,
    sliding_window: int | None,
) -> Tensor:
    # Padding is on the right, so causal attention never lets a token see it.
    query, key, value = (x[grid_BW].transpose(1, 2) for x in (query_THD, key_TKD, value_TKD))
    width, mask = grid_BW.shape[1], None
    if sliding_window is not None and sliding_window < width:
        mask = torch.ones(width, width, dtype=torch.bool, device=query.device).tril()
        mask = mask & ~mask.tril(-sliding_window)
    output_BHWD = scaled_dot_product_attention(
        query, key, value, mask, is_causal=mask is None, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
    return output_BHWD.transpose(1, 2).flatten(0, 1)[place_T].unsqueeze(0)


def refuse_unknown(others: dict[str, Any]) -> None:
    """An architecture that asks for more than plain attention (soft caps, sinks, other masks) must not be packed."""
    asked = sorted(name for name in ("softcap", "s_aux", "position_bias") if others.get(name) is not None)
    if asked:
        raise NotImplementedError(f"packed attention has no {', '.join(asked)}")


@torch.no_grad()
def packs(model: Any) -> bool:
    """Whether two sequences in one row come out as they do alone: some architectures mix tokens in other ways, too."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = [torch.arange(n, device=model.device).unsqueeze(0) * 7 % vocabulary for n in (5, 9)]
    before = model.config._attn_implementation
    expected = torch.cat([model(input_ids=x, use_cache=False).logits for x in ids], dim=1).float()
    try:
        model.set_attn_implementation(PACKED)
        arguments = packed_arguments(np.array([5, 9]), model.device)
        found = model(input_ids=torch.cat(ids, dim=1), use_cache=False, **arguments).logits.float()
    except (NotImplementedError, ValueError, TypeError, RuntimeError):
        return False
    finally:
        model.set_attn_implementation(before)
    scale = expected.abs().max()
    return bool((found - expected).abs().max() <= (1e-4 if model.dtype is torch.float32 else 0.05) * scale)


AttentionInterface.register(PACKED, packed_attention)
