"""Attention over packed segments and over slots of a cache, as two of transformers' attention implementations.

Segments of tokens lie one after the other in a single row [1, T], without padding. A segment has its own queries and a
list of keys that ends with its own tokens: a prompt sees itself, each of its responses sees the prompt (which is there
once for all of them) and then itself. On a GPU in half precision this is torch's built-in variable-length attention.
Elsewhere queries, keys and values (and nothing else of the model) are put into padded grids, and the output taken out:
one grid, or where that would be large, one for segments of about the same lengths.

Axes: T tokens of all segments, S segments (of a grid), W queries and L keys of the longest, M keys of all segments,
H heads, K key-value heads, D numbers per head.
"""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import Any, TypedDict

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
ONE_GRID = 1 << 20  # places (segments × queries × keys) of a grid for all segments, be they padding: two take longer
# torch 2.11 takes fewer key-value heads than query heads as they are, later releases want to be told.
GQA: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}


class PackedArguments(TypedDict):
    """What a model's forward takes beside the ids [1, T]; names without axes are those of transformers."""

    position_ids: Tensor  # [1, T]
    cu_seq_lens_q: Tensor  # [S + 1] int32, where the queries of each segment begin, and the end
    cu_seq_lens_k: Tensor  # [S + 1] int32, the same for keys
    max_length_q: int
    max_length_k: int
    key_M: Tensor  # token of each key
    copy_M: Tensor  # keys by token: which are copies of token 0, of token 1, …; empty with grids
    copy_start: Tensor  # [T + 1] where the copies of each token begin, and the end; empty with grids
    grids: tuple[Grid, ...]  # for where there is no variable-length attention; empty elsewhere
    place_T: Tensor  # place of each token in the flattened grids of queries, one after the other; likewise


# query_SW, the token of each query (any token of the segment where there is none), key_SL, and mask_SWL, which keys a
# query sees (one that is not there sees some, so that nothing is NaN).
Grid = tuple[Tensor, Tensor, Tensor]
GRID = ("query_SW", "key_SL", "mask_SWL")


def packed_arguments(
    query_S: np.ndarray, key_S: np.ndarray, key_M: np.ndarray, device: torch.device, *, grids: bool
) -> PackedArguments:
    """Arguments for segments with so many queries and keys; `key_M` says which tokens the keys are of."""
    arrays, longest = segment_arrays(query_S, key_S, key_M, grids=grids)
    made: Any = {**with_grids(send(arrays, device)[1]), **longest}
    return PackedArguments(**made)


def with_grids(there: Mapping[str, Tensor]) -> dict[str, Any]:
    """What `segment_arrays` gave, on its device: the arrays of each grid together."""
    count = sum(name.endswith(GRID[0]) for name in there)
    grids = tuple(tuple(there[f"grid {number} {part}"] for part in GRID) for number in range(count))
    return {name: tensor for name, tensor in there.items() if not name.startswith("grid ")} | {"grids": grids}


def segment_arrays(
    query_S: np.ndarray, key_S: np.ndarray, key_M: np.ndarray, *, grids: bool
) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """What `PackedArguments` holds, before it goes to a device: arrays, and lengths of the longest segments."""
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
    # Rounded up, so that a compiled layer meets few different values.
    longest = {"max_length_q": 1 << (width - 1).bit_length(), "max_length_k": 1 << (depth - 1).bit_length()}
    if not grids:
        copy_M, copy_start = copies_of(key_M, len(segment_T))
        return arrays | {"copy_M": copy_M, "copy_start": copy_start, "place_T": np.zeros(0, dtype=np.int64)}, longest
    arrays |= {"copy_M": np.zeros(0, dtype=np.int64), "copy_start": np.zeros(0, dtype=np.int64)}
    first_place_S, places = np.zeros(len(query_S), dtype=np.int64), 0
    for number, chosen in enumerate(_alike(query_S, key_S)):
        grid = _grid(query_S[chosen], key_S[chosen], query_start[chosen], key_start[chosen], key_M)
        arrays |= {f"grid {number} {part}": array for part, array in zip(GRID, grid, strict=True)}
        size, width = grid[0].shape
        first_place_S[chosen] = places + np.arange(size) * width
        places += size * width
    return arrays | {"place_T": first_place_S[segment_T] + column_T}, longest


def _alike(query_S: np.ndarray, key_S: np.ndarray) -> list[np.ndarray]:
    """Segments by grid: all in one, or where that is too large, those together whose lengths differ by less than half.

    >>> [chosen.tolist() for chosen in _alike(np.array([3, 1000, 4]), np.array([5, 1000, 4000]))]
    [[0], [2], [1]]
    """
    if len(query_S) * int(query_S.max()) * int(key_S.max()) <= ONE_GRID:
        return [np.arange(len(query_S))]
    queries, keys = (np.ceil(np.log2(np.maximum(length_S, 1))) for length_S in (query_S, key_S))
    _, kind_S = np.unique(np.stack([queries, keys]), axis=1, return_inverse=True)
    return [np.flatnonzero(kind_S == kind) for kind in range(kind_S.max() + 1)]


def _grid(
    query_S: np.ndarray, key_S: np.ndarray, query_start: np.ndarray, key_start: np.ndarray, key_M: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens of queries and of keys, and which of these those see."""
    queries, keys = np.arange(max(1, query_S.max())), np.arange(max(1, key_S.max()))
    # The last query of a segment sees its last key, the one before it all but that one, and so on.
    last_seen_SW = queries + (key_S - query_S)[:, None]
    return (
        query_start[:, None] + np.minimum(queries, query_S[:, None] - 1),
        key_M[key_start[:, None] + np.minimum(keys, key_S[:, None] - 1)],
        (keys <= last_seen_SW[:, :, None]) & (keys < key_S[:, None])[:, None, :],
    )


def needs_grids(device: torch.device, precision: torch.dtype) -> bool:
    """Whether attention goes through padded grids there."""
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
        # Under autocast, values have the low precision while rotated queries and keys do not.
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
    """Keys that are less than `window` places before the last one that a query sees."""
    seen_SW1 = mask_SWL.sum(dim=2, keepdim=True)
    return torch.arange(mask_SWL.shape[2], device=mask_SWL.device) >= seen_SW1 - window


def slot_attention(
    module: Any,
    query_RH1D: Tensor,
    key_TKD: Tensor,
    value_TKD: Tensor,
    attention_mask: None,
    *,
    prompt_R: Tensor,
    prefix_R: Tensor,
    own_R: Tensor,
    length_R: Tensor,
    room: int,
    scaling: float | None = None,
    sliding_window: int | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """One new token of each row against the keys of its prompt and its own, [R, 1, H, D].

    Row r sees `length_R[r]` keys, at most `room`: the first `prefix_R[r]` of them lie at token `prompt_R[r]` and after
    it, where other rows may look, too, and the others at `own_R[r]` and after it.
    """
    refuse_unknown(module, attention_mask, others)
    if query_RH1D.is_cuda and value_TKD.dtype is not torch.float32 and can_compile():
        from stalewise.models.kernels.decode_attention import decode_attention  # Triton comes with torch for GPUs alone

        scale = query_RH1D.shape[-1] ** -0.5 if scaling is None else scaling
        places = prompt_R, prefix_R, own_R, length_R
        output_RHD = decode_attention(
            query_RH1D.squeeze(2), key_TKD, value_TKD, *places, room=room, scale=scale, window=sliding_window
        )
        return output_RHD.unsqueeze(1), None
    number_RL = torch.arange(room, device=own_R.device).expand(len(own_R), room)
    seen_RL = number_RL < length_R.unsqueeze(1)
    prompt_R1, prefix_R1, own_R1 = (x.unsqueeze(1) for x in (prompt_R, prefix_R, own_R))
    place_RL = torch.where(number_RL < prefix_R1, prompt_R1 + number_RL, own_R1 + number_RL - prefix_R1)
    # What is not seen is read all the same: the row's first key, so that no row's NaN becomes another's.
    place_RL = torch.where(seen_RL, place_RL, place_RL[:, :1])
    key_RKLD, value_RKLD = (x[place_RL].transpose(1, 2) for x in (key_TKD, value_TKD))
    if sliding_window is not None:
        seen_RL = seen_RL & (number_RL >= length_R.unsqueeze(1) - sliding_window)
    output_RH1D = scaled_dot_product_attention(
        query_RH1D, key_RKLD, value_RKLD, seen_RL[:, None, None, :], scale=scaling, enable_gqa=True
    )
    return output_RH1D.transpose(1, 2), None


def refuse_unknown(module: Any, attention_mask: Any, others: dict[str, Any]) -> None:
    """An architecture that asks for more than plain attention (masks, chunks, soft caps, sinks) must not be packed."""
    asked = sorted(name for name in ("softcap", "s_aux", "position_bias") if others.get(name) is not None)
    asked += ["attention_mask"] if attention_mask is not None else []
    # A mask of chunks would be made for attention that transformers knows, and is not made for this.
    asked += ["attention_chunk_size"] if getattr(module.config, "attention_chunk_size", None) else []
    if asked:
        raise NotImplementedError(f"packed attention has no {', '.join(asked)}")


@torch.no_grad()
def packs(model: Any, precision: torch.dtype = torch.float32) -> bool:
    """Whether a prompt and two responses in one row come out as they do alone.

    Some architectures mix tokens in other ways, too, or ask for more than plain attention.
    """
    grids = needs_grids(model.device, precision)
    with torch.autocast(model.device.type, dtype=precision, enabled=precision is not torch.float32):
        return _packs(model, grids, tolerance=1e-4 if precision is torch.float32 else 0.05)


def _packs(model: Any, grids: bool, tolerance: float) -> bool:
    vocabulary = model.get_input_embeddings().weight.shape[0]
    prompt, *responses = (
        torch.arange(n, device=model.device) * step % vocabulary for n, step in ((5, 7), (4, 3), (8, 5))
    )
    alone = [model(input_ids=torch.cat([prompt, x]).unsqueeze(0), use_cache=False).logits[0] for x in responses]
    expected = torch.cat([alone[0][:5], *(logits[5:] for logits in alone)]).float()
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation(PACKED)
        keys = np.r_[0:5, 0:9, 0:5, 9:17]
        arguments = packed_arguments(np.array([5, 4, 8]), np.array([5, 9, 13]), keys, model.device, grids=grids)
        ids = torch.cat([prompt, *responses]).unsqueeze(0)
        found = model(input_ids=ids, use_cache=False, **arguments).logits[0].float()
    except torch.OutOfMemoryError:
        raise
    except (NotImplementedError, ValueError, TypeError, RuntimeError):
        return False
    finally:
        model.set_attn_implementation(before)
    return bool((found - expected).abs().max() <= tolerance * expected.abs().max())


AttentionInterface.register(PACKED, packed_attention)
AttentionInterface.register(SLOTS, slot_attention)
