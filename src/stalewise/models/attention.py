"""Attention over packed segments and over cache slots, as two of transformers' attention implementations.

Segments are packed without padding in a single row [1, T]. The keys of a segment end with its own tokens: a prompt
attends to itself, each response to its prompt (packed once for all of them) and to itself. On a GPU in half precision
this is torch's variable-length attention. Elsewhere only queries, keys and values are copied into padded grids: one
grid, or several for segments of similar lengths if one would be large.

Axes: T tokens of all segments, S segments (of a grid), W queries and L keys of the longest, M keys of all segments,
H heads, K key-value heads, D numbers per head.
"""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import Any, TypedDict, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from stalewise.models.kernels import can_compile
from stalewise.models.kernels.gather import copies_of, gather_keys
from stalewise.models.transfer import send

PACKED = "stalewise_packed"
SLOTS = "stalewise_slots"
ONE_GRID = 1 << 20  # up to this size (segments × queries × keys) one grid is faster than two
# torch 2.11 accepts fewer key-value heads than query heads; later releases need a flag.
GQA: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}


class PackedArguments(TypedDict):
    """Arguments of a model's forward besides the ids [1, T]; names without axes are those of transformers."""

    position_ids: Tensor  # [1, T]
    cu_seq_lens_q: Tensor  # [S + 1] int32, start of each segment's queries, and the end
    cu_seq_lens_k: Tensor  # [S + 1] int32, the same for keys
    max_length_q: int
    max_length_k: int
    key_M: Tensor  # token of each key
    copy_M: Tensor  # keys sorted by token; empty with grids
    copy_start: Tensor  # [T + 1] start of each token's copies in copy_M, and the end; empty with grids
    grids: tuple[Grid, ...]  # empty with variable-length attention
    place_T: Tensor  # place of each token in the flattened grids of queries; likewise


# Tokens of the queries and of the keys (padding repeats a token), and which keys each query attends to (padding queries
# attend to some, so that nothing is NaN).
Grid = tuple[Tensor, Tensor, Tensor]
GRID = ("query_SW", "key_SL", "mask_SWL")


def packed_arguments(
    query_S: np.ndarray, key_S: np.ndarray, key_M: np.ndarray, device: torch.device, *, grids: bool
) -> PackedArguments:
    """Arguments for segments with these numbers of queries and keys; `key_M` holds the tokens of the keys."""
    arrays, longest = segment_arrays(query_S, key_S, key_M, grids=grids)
    return cast(PackedArguments, with_grids(send(arrays, device)[1]) | longest)


def with_grids(there: Mapping[str, Tensor]) -> dict[str, Any]:
    """The arrays of `segment_arrays`, on a device, with those of each grid as a tuple."""
    count = sum(name.endswith(GRID[0]) for name in there)
    grids = tuple(tuple(there[f"grid {number} {part}"] for part in GRID) for number in range(count))
    return {name: tensor for name, tensor in there.items() if not name.startswith("grid ")} | {"grids": grids}


def segment_arrays(
    query_S: np.ndarray, key_S: np.ndarray, key_M: np.ndarray, *, grids: bool
) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """The content of `PackedArguments` on the host: arrays, and the lengths of the longest segments."""
    query_start, key_start = np.cumsum(query_S) - query_S, np.cumsum(key_S) - key_S
    segment_T = np.repeat(np.arange(len(query_S)), query_S)
    column_T = np.arange(len(segment_T)) - query_start[segment_T]
    width, depth = int(query_S.max()), int(key_S.max())
    arrays = {
        "position_ids": (column_T + (key_S - query_S)[segment_T])[None],
        "cu_seq_lens_q": np.append(query_start, query_S.sum()).astype(np.int32),
        "cu_seq_lens_k": np.append(key_start, key_S.sum()).astype(np.int32),
        "key_M": key_M,
    }
    # Rounded up, so that compiled layers see few different values.
    longest = {"max_length_q": 1 << (width - 1).bit_length(), "max_length_k": 1 << (depth - 1).bit_length()}
    empty = np.zeros(0, dtype=np.int64)
    arrays["copy_M"], arrays["copy_start"] = (empty, empty) if grids else copies_of(key_M, len(segment_T))
    if not grids:
        return arrays | {"place_T": empty}, longest
    first_place_S, places = np.zeros(len(query_S), dtype=np.int64), 0
    for number, chosen in enumerate(_similar(query_S, key_S)):
        grid = _grid(query_S[chosen], key_S[chosen], query_start[chosen], key_start[chosen], key_M)
        arrays |= {f"grid {number} {part}": array for part, array in zip(GRID, grid, strict=True)}
        size, width = grid[0].shape
        first_place_S[chosen] = places + np.arange(size) * width
        places += size * width
    return arrays | {"place_T": first_place_S[segment_T] + column_T}, longest


def _similar(query_S: np.ndarray, key_S: np.ndarray) -> list[np.ndarray]:
    """Segments of each grid: all, or if that is too large, those whose lengths round up to the same powers of two."""
    if len(query_S) * int(query_S.max()) * int(key_S.max()) <= ONE_GRID:
        return [np.arange(len(query_S))]
    queries, keys = (np.ceil(np.log2(np.maximum(length_S, 1))) for length_S in (query_S, key_S))
    _, kind_S = np.unique(np.stack([queries, keys]), axis=1, return_inverse=True)
    return [np.flatnonzero(kind_S == kind) for kind in range(kind_S.max() + 1)]


def _grid(
    query_S: np.ndarray, key_S: np.ndarray, query_start: np.ndarray, key_start: np.ndarray, key_M: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens of queries and keys, and the mask."""
    queries, keys = np.arange(max(1, query_S.max())), np.arange(max(1, key_S.max()))
    # The last query of a segment attends up to its last key, the one before it to one key less, and so on.
    last_seen_SW = queries + (key_S - query_S)[:, None]
    return (
        query_start[:, None] + np.minimum(queries, query_S[:, None] - 1),
        key_M[key_start[:, None] + np.minimum(keys, key_S[:, None] - 1)],
        (keys <= last_seen_SW[:, :, None]) & (keys < key_S[:, None])[:, None, :],
    )


def needs_grids(device: torch.device, precision: torch.dtype) -> bool:
    """Whether attention uses padded grids there."""
    return device.type != "cuda" or precision is torch.float32


def packed_attention(
    module: Any,
    query_1HTD: Tensor,
    key_1KTD: Tensor,
    value_1KTD: Tensor,
    attention_mask: None,
    *,
    cu_seq_lens_q: Tensor,
    cu_seq_lens_k: Tensor,
    max_length_q: int,
    max_length_k: int,
    key_M: Tensor,
    copy_M: Tensor,
    copy_start: Tensor,
    grids: tuple[Grid, ...],
    place_T: Tensor,
    scaling: float | None = None,
    sliding_window: int | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention within each segment, [1, T, H, D]."""
    refuse_unknown(module, attention_mask, others)
    query_THD, key_TKD, value_TKD = (x[0].transpose(0, 1) for x in (query_1HTD, key_1KTD, value_1KTD))
    if query_THD.is_cuda and value_TKD.dtype is not torch.float32:
        # Under autocast, values have low precision, but rotated queries and keys do not.
        low = value_TKD.dtype
        key_MKD, value_MKD = gather_keys(key_TKD.to(low), value_TKD, key_M, copy_M, copy_start)
        output: Any = varlen_attn(
            query_THD.to(low),
            key_MKD,
            value_MKD,
            cu_seq_lens_q,
            cu_seq_lens_k,
            max_length_q,
            max_length_k,
            scale=scaling,
            window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
            **GQA,
        )
        return output.unsqueeze(0), None
    outputs: list[Tensor] = []
    for query_SW, key_SL, mask_SWL in grids:
        if sliding_window is not None and sliding_window < key_SL.shape[1]:
            mask_SWL = mask_SWL & _within(mask_SWL, sliding_window)
        output_SHWD = scaled_dot_product_attention(
            query_THD[query_SW].transpose(1, 2),
            key_TKD[key_SL].transpose(1, 2),
            value_TKD[key_SL].transpose(1, 2),
            mask_SWL.unsqueeze(1),
            scale=scaling,
            enable_gqa=query_THD.shape[1] != key_TKD.shape[1],
        )
        outputs.append(output_SHWD.transpose(1, 2).flatten(0, 1))
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs))[place_T].unsqueeze(0), None


def _within(mask_SWL: Tensor, window: int) -> Tensor:
    """Keys less than `window` places before the last one that a query attends to."""
    seen_SW1 = mask_SWL.sum(dim=2, keepdim=True)
    return torch.arange(mask_SWL.shape[2], device=mask_SWL.device) >= seen_SW1 - window


def slot_attention(
    module: Any,
    query_RH1D: Tensor,
    key_TKD: Tensor,
    value_TKD: Tensor,
    attention_mask: None,
    *,
    slot_R: Tensor,
    block_SB: Tensor,
    prefix_R: Tensor,
    length_R: Tensor,
    block_size: int,
    prompt_blocks: int,
    room: int,
    scaling: float | None = None,
    sliding_window: int | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """One new token of each row against the keys of its prompt and its own, [R, 1, H, D].

    Row r has `length_R[r]` keys, at most `room`: the first `prefix_R[r]` in the first `prompt_blocks` blocks of its
    slot's row of `block_SB`, which slots may share, the others in the blocks after those. A block has `block_size`
    tokens of the cache.
    """
    refuse_unknown(module, attention_mask, others)
    if query_RH1D.is_cuda and value_TKD.dtype is not torch.float32 and can_compile():
        from stalewise.models.kernels.decode_attention import decode_attention  # Triton comes with torch for GPUs alone

        scale = query_RH1D.shape[-1] ** -0.5 if scaling is None else scaling
        places = slot_R, block_SB, prefix_R, length_R
        sizes = {"block_size": block_size, "prompt_blocks": prompt_blocks, "room": room}
        output_RHD = decode_attention(
            query_RH1D.squeeze(2), key_TKD, value_TKD, *places, **sizes, scale=scale, window=sliding_window
        )
        return output_RHD.unsqueeze(1), None
    number_RL = torch.arange(room, device=slot_R.device).expand(len(slot_R), room)
    seen_RL = number_RL < length_R.unsqueeze(1)
    # Places of a slot, counted over its blocks: the response's begin after all of the prompt's blocks.
    own_R1 = (prompt_blocks * block_size - prefix_R).unsqueeze(1)
    place_RL = torch.where(number_RL < prefix_R.unsqueeze(1), number_RL, own_R1 + number_RL)
    # Masked keys are read, too: as the row's first key, so that no row's NaN reaches another.
    place_RL = torch.where(seen_RL, place_RL, place_RL[:, :1])
    place_RL = block_SB[slot_R].gather(1, place_RL // block_size) * block_size + place_RL % block_size
    key_RKLD, value_RKLD = (x[place_RL].transpose(1, 2) for x in (key_TKD, value_TKD))
    if sliding_window is not None:
        seen_RL = seen_RL & (number_RL >= length_R.unsqueeze(1) - sliding_window)
    output_RH1D = scaled_dot_product_attention(
        query_RH1D, key_RKLD, value_RKLD, seen_RL[:, None, None, :], scale=scaling, enable_gqa=True
    )
    return output_RH1D.transpose(1, 2), None


def refuse_unknown(module: Any, attention_mask: Any, others: dict[str, Any]) -> None:
    """Raise if an architecture needs more than plain attention: masks, chunks, soft caps, sinks."""
    asked = sorted(name for name in ("softcap", "s_aux", "position_bias") if others.get(name) is not None)
    asked += ["attention_mask"] if attention_mask is not None else []
    # transformers makes the mask of chunks only for attention that it knows.
    asked += ["attention_chunk_size"] if getattr(module.config, "attention_chunk_size", None) else []
    if asked:
        raise NotImplementedError(f"packed attention has no {', '.join(asked)}")


@torch.no_grad()
def supports_packing(model: Any, precision: torch.dtype = torch.float32) -> bool:
    """Whether the model computes the same for packed segments as for separate rows, found by trying it."""
    size, before = model.get_input_embeddings().weight.shape[0], model.config._attn_implementation
    prompt, *responses = (torch.arange(n, device=model.device) * step % size for n, step in ((5, 7), (4, 3), (8, 5)))
    with torch.autocast(model.device.type, dtype=precision, enabled=precision is not torch.float32):
        alone = [model(input_ids=torch.cat([prompt, x]).unsqueeze(0), use_cache=False).logits[0] for x in responses]
        try:
            model.set_attn_implementation(PACKED)
            lengths, keys = (np.array([5, 4, 8]), np.array([5, 9, 13])), np.r_[0:5, 0:9, 0:5, 9:17]
            arguments = packed_arguments(*lengths, keys, model.device, grids=needs_grids(model.device, precision))
            ids = torch.cat([prompt, *responses]).unsqueeze(0)
            packed = model(input_ids=ids, use_cache=False, **arguments).logits[0].float()
        except torch.OutOfMemoryError:
            raise
        except (NotImplementedError, ValueError, TypeError, RuntimeError):  # as architectures refuse our attention
            return False
        finally:
            model.set_attn_implementation(before)
    expected = torch.cat([alone[0][:5], *(logits[5:] for logits in alone)]).float()
    tolerance = 1e-4 if precision is torch.float32 else 0.05
    return bool((packed - expected).abs().max() <= tolerance * expected.abs().max())


AttentionInterface.register(PACKED, packed_attention)
AttentionInterface.register(SLOTS, slot_attention)
