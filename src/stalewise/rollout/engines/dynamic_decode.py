"""Decoding with a growing cache: for CPUs, and for architectures whose cache is more than keys and values.

Requests are padded on the left; rows that have ended leave the batch. On a GPU as many rows are decoded together as
memory holds, by an estimate; where that was too many, half as many from there on. Axes: R rows, V vocabulary, N new
tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from stalewise.errors import ModelError
from stalewise.rollout.sampler import Request
from stalewise.rollout.token_sampling import draw, tempered, uniforms
from stalewise.types import SamplerSettings

DROP_SHARE = 0.25  # of the batch that must have ended before rows are dropped, which copies the cache
GROWTH = 1.5  # of the length needed, when the memory of a cache is too small
SHARE = 0.8  # of the free memory that a batch may take by the estimate
LOGITS = 16  # bytes per row and token of the vocabulary: logits, their float32 copies and a sum
ACTIVATIONS = 16  # numbers that a prefill holds per token and unit of width
GIB = 2**30
Decoded = tuple[np.ndarray, np.ndarray, np.ndarray]  # token ids and log-probabilities [R, N], lengths [R]


class PreallocatedLayer(DynamicLayer):
    """Keys and values of a layer in memory with room to grow: most steps write one token and copy nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.buffers: tuple[Tensor | None, Tensor | None] = (None, None)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append the new tokens; all keys and values so far."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        key_buffer, self.keys = _append(self.buffers[0], self.keys, key_states)
        value_buffer, self.values = _append(self.buffers[1], self.values, value_states)
        self.buffers = key_buffer, value_buffer
        return self.keys, self.values


def _append(buffer: Tensor | None, held: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """`held` [R, K, L, D] followed by `new`: in the buffer, or in a larger one if `held` is elsewhere or too long."""
    before = held.shape[-2] if held.numel() else 0
    length = before + new.shape[-2]
    # Dropping rows copies the others out of the buffer.
    is_in_buffer = buffer is not None and held.data_ptr() == buffer.data_ptr() and len(held) == len(buffer)
    if buffer is None or not is_in_buffer or length > buffer.shape[-2]:
        buffer = new.new_empty(*new.shape[:-2], int(GROWTH * length) + 1, new.shape[-1])
        if before:
            buffer[..., :before, :] = held
    buffer[..., before:length, :] = new
    return buffer, buffer[..., :length, :]


def row_bytes(model: Any, prompt: int, new_tokens: int) -> int:
    """Memory of one row at most: a cache that has just grown beside the one before, prefill and logits."""
    config, itemsize = model.config.get_text_config(), model.dtype.itemsize
    heads = int(getattr(config, "num_attention_heads", 1))
    keys = int(getattr(config, "num_key_value_heads", None) or heads)
    head = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    cache = int((GROWTH + 1) * (prompt + new_tokens) * config.num_hidden_layers * 2 * keys * head * itemsize)
    prefill = prompt * (prompt + ACTIVATIONS * config.hidden_size * itemsize)
    return cache + prefill + LOGITS * config.vocab_size


def rows_that_fit(model: Any, requests: Sequence[Request], new_tokens: int) -> int:
    """Rows that may be decoded together: all of them on a CPU; at least 1."""
    device = model.device
    if device.type != "cuda":
        return len(requests)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0] + cached
    longest = max(len(request.context) for request in requests)
    return max(1, min(len(requests), int(SHARE * free) // row_bytes(model, longest, new_tokens)))


def decode_within_memory(
    model: Any,
    requests: Sequence[Request],
    settings: SamplerSettings,
    *,
    rows: int,
    on_tokens: Callable[[int], object],
    log: Callable[[str], object],
    **options: Any,
) -> Iterator[tuple[range, Decoded]]:
    """Decode at most `rows` requests together, and half as many from where memory runs out; positions and results."""
    start = 0
    while start < len(requests):
        part, counted = requests[start : start + rows], [0]

        def count(tokens: int, counted: list[int] = counted) -> None:
            counted[0] += tokens
            on_tokens(tokens)

        try:
            yield range(start, start + len(part)), decode_dynamic(model, part, settings, on_tokens=count, **options)
            start += len(part)
            continue
        except torch.OutOfMemoryError:
            pass  # handled below: within the handler, the traceback would keep the memory
        on_tokens(-counted[0])
        longest, new_tokens = max(len(request.context) for request in part), options["new_tokens"]
        if len(part) == 1:
            raise ModelError(
                f"out of memory while sampling one response: a prompt of {longest} tokens with sampler.max_new_tokens "
                f"= {new_tokens} needs about {row_bytes(model, longest, new_tokens) / GIB:.2f} GiB beside the model: "
                "lower max_new_tokens, or choose a smaller model or a larger device"
            )
        rows = len(part) // 2
        log(f"out of memory with {len(part)} responses at a time: from here on at most {rows}")
        if model.device.type == "cuda":
            torch.cuda.empty_cache()


@torch.inference_mode()
def decode_dynamic(
    model: Any,
    requests: Sequence[Request],
    settings: SamplerSettings,
    *,
    new_tokens: int,
    stop_ids: Tensor,
    pad_id: int,
    on_tokens: Callable[[int], object],
    kept: dict[int, RowCache] | None = None,
) -> Decoded:
    """Token ids (int32) and log-probabilities [R, N] and lengths [R] of all responses, in the order of `requests`.

    With `kept` the keys and values of each row are put there when it ends, by its place in `requests`; and rows that
    have some there, of earlier turns, go on from those.
    """
    rows, device = len(requests), model.device
    uniform_RN = torch.from_numpy(uniforms([request.seed for request in requests], new_tokens)).to(device)
    begun_R = torch.tensor([len(request.begun) for request in requests], device=device)  # tokens of earlier turns
    ids_RN = torch.zeros(rows, new_tokens, dtype=torch.long, device=device)
    logp_RN = torch.zeros(rows, new_tokens, device=device)
    length_R = torch.zeros(rows, dtype=torch.long, device=device)
    active_R = torch.arange(rows, device=device)  # rows still in the batch
    alive_R = torch.ones(rows, dtype=torch.bool, device=device)

    if kept:
        logits_RV, cache, attention, positions = _go_on(model, requests, kept)
    else:
        logits_RV, cache, attention, positions = _prefill(model, requests, pad_id)
    for step in range(new_tokens - int(begun_R.min())):
        position_R = (begun_R[active_R] + step).clamp(max=new_tokens - 1)
        token_R, logp_R = draw(tempered(logits_RV, settings), uniform_RN[active_R, position_R])
        ids_RN[active_R, step], logp_RN[active_R, step] = token_R, logp_R
        length_R[active_R] += alive_R.long()
        on_tokens(int(alive_R.sum()))
        alive_R = alive_R & ~torch.isin(token_R, stop_ids) & (position_R + 1 < new_tokens)
        ended = 1 - alive_R.float().mean().item()
        if kept is not None:
            _keep_rows(kept, cache, attention, active_R, ~alive_R)
        if ended == 1:
            break
        if ended > DROP_SHARE:
            keep = alive_R.nonzero().squeeze(1)
            cache.reorder_cache(keep)  # unlike `batch_select_indices`, all states of a layer
            active_R, token_R, attention = active_R[keep], token_R[keep], attention[keep]
            positions, alive_R = positions[keep], alive_R[keep]
        attention = torch.cat([attention, attention.new_ones(len(attention), 1)], dim=1)
        positions = positions[:, -1:] + 1
        logits_RV = _forward(model, token_R.unsqueeze(1), cache, attention, positions)
    return ids_RN.cpu().numpy().astype(np.int32), logp_RN.cpu().numpy(), length_R.cpu().numpy()


@dataclass(frozen=True, slots=True)
class RowCache:
    """Keys and values of one row in each layer, [K, L, D] each: of all its tokens but the last."""

    layers: list[tuple[Tensor, Tensor]]

    @property
    def length(self) -> int:
        """Its tokens."""
        return self.layers[0][0].shape[1]


def keeps_rows(model: Any) -> bool:
    """Whether rows can be taken out of a model's cache: it must be nothing but keys and values of all tokens."""
    cache: Any = DynamicCache(config=model.config)
    return not takes_state(model) and bool(cache.layers) and all(type(layer) is DynamicLayer for layer in cache.layers)


def _keep_rows(kept: dict[int, RowCache], cache: Any, attention: Tensor, active_R: Tensor, ended_R: Tensor) -> None:
    """Copy the rows that have just ended out of the cache."""
    for row in ended_R.nonzero().flatten().tolist():
        number = int(active_R[row])
        if number not in kept:
            own = attention[row].bool()
            kept[number] = RowCache([(layer.keys[row][:, own], layer.values[row][:, own]) for layer in cache.layers])


def _go_on(model: Any, requests: Sequence[Request], kept: dict[int, RowCache]) -> tuple[Tensor, Any, Tensor, Tensor]:
    """Logits, cache, attention mask and positions after the context, of which only what is new is computed."""
    rows = [kept.pop(number) for number in range(len(requests))]
    new = [request.context[row.length :] for request, row in zip(requests, rows, strict=True)]
    longest, width = max(row.length for row in rows), max(map(len, new))
    device = model.device
    cache: Any = DynamicCache(config=model.config)
    cache.layers = [PreallocatedLayer() for _ in cache.layers]
    for number, layer in enumerate(cache.layers):
        sides = ([row.layers[number][side] for row in rows] for side in (0, 1))
        # On the left, as prompts are padded.
        keys, values = (torch.stack([pad(x, (0, 0, longest - x.shape[1], 0)) for x in side]) for side in sides)
        layer.update(keys, values)
    input_ids, attention_new = _padded([tuple(ids) for ids in new], 0, device)
    attention = torch.zeros(len(rows), longest + width, dtype=torch.long, device=device)
    for number, row in enumerate(rows):
        attention[number, longest - row.length : longest] = 1
    attention[:, longest:] = attention_new
    positions = (attention.cumsum(dim=1) - 1).clamp(min=0)[:, longest:]
    logits = _forward(model, input_ids, cache, attention, positions)
    return logits, cache, attention, positions


def _forward(model: Any, input_ids: Tensor, cache: DynamicCache, attention: Tensor, positions: Tensor) -> Tensor:
    """Logits [R, V] after the last of these tokens; the cache grows by them."""
    inputs: dict[str, Any] = {"attention_mask": attention, "past_key_values": cache}
    if takes_state(model):  # which holds no padding, so that a mask is for the prompt alone
        inputs = {"attention_mask": attention if input_ids.shape[1] > 1 else None, "cache_params": cache}
    output = model(input_ids=input_ids, position_ids=positions, use_cache=True, logits_to_keep=1, **inputs)
    return output.logits[:, -1]


def takes_state(model: Any) -> bool:
    """Whether the cache of a model is a state alone; such models ignore a cache of the usual name."""
    names = signature(model.forward).parameters
    return "cache_params" in names and "past_key_values" not in names


def _prefill(model: Any, requests: Sequence[Request], pad_id: int) -> tuple[Tensor, Any, Tensor, Tensor]:
    """Logits, cache, attention mask and positions after the prompts. Each distinct prompt is computed once."""
    index_of: dict[tuple[int, ...], int] = {}
    distinct_R = [index_of.setdefault(tuple(request.context), len(index_of)) for request in requests]
    input_ids, attention = _padded(list(index_of), pad_id, model.device)
    cache: Any = DynamicCache(config=model.config)
    cache.layers = [PreallocatedLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    positions = (attention.cumsum(dim=1) - 1).clamp(min=0)
    logits = _forward(model, input_ids, cache, attention, positions)
    spread = torch.tensor(distinct_R, device=model.device)
    cache.reorder_cache(spread)
    return logits[spread], cache, attention[spread], positions[spread]


def _padded(prompts: list[tuple[int, ...]], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    width = max(map(len, prompts))
    ids = np.full((len(prompts), width), pad_id, dtype=np.int64)
    mask = np.zeros((len(prompts), width), dtype=np.int64)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = prompt
        mask[row, width - len(prompt) :] = 1
    return torch.from_numpy(ids).to(device), torch.from_numpy(mask).to(device)
