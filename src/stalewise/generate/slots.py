"""Decoding in slots: a fixed number of responses at once, and a new request in each slot as soon as one has ended.

Keys and values lie in one block of memory, with room for the longest sequence in every slot, so that a decoding step is
always the same work on the same addresses: on a GPU it is captured once and replayed without Python. A step takes the
last token of each row, samples the next one and writes it down, all on the device; the host looks only now and then
which responses have ended. Each distinct prompt is read once, ahead of time, and copied into the slots of its requests.

Axes: S slots, R rows of a step (all slots, or fewer at the end when few responses are left), L tokens that a slot has
room for, K key-value heads, D numbers per head, V vocabulary, N new tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from stalewise.attention import PACKED, SLOTS, needs_grids, packed_arguments
from stalewise.generate.sampler import Request
from stalewise.generate.sampling import device_uniforms, draw, tempered
from stalewise.generate.waiting import Waiting
from stalewise.recording import recording
from stalewise.transfer import to_device
from stalewise.types import SamplerSettings

STEPS_BETWEEN_LOOKS = 4
REFILL_SHARE = 0.0625  # of the slots; filling a few at a time costs as much as filling many
PREFILL_TOKENS = 65_536
FEWEST_ROWS = 64
MOST_SLOTS = 8192
MEMORY_SHARE = 0.5  # of the free memory of a GPU may be taken by slots
LOGITS_BYTES = 12  # of each row and token of the vocabulary while it is sampled from


@dataclass(frozen=True, slots=True)
class Ended:
    """Responses that have ended: which requests, their tokens and log-probabilities [·, N] and lengths."""

    requests: np.ndarray
    ids: np.ndarray
    logp: np.ndarray
    lengths: np.ndarray


class SlotCache(Cache):
    """Keys and values of all layers; what a model writes to depends on `phase`."""

    def __init__(self, slots: int, room: int, example: list[tuple[Tensor, Tensor]]) -> None:
        """`example` are keys and values of one token in each layer, [1, K, 1, D]."""
        super().__init__(layer_class_to_replicate=object)  # pyright: ignore[reportArgumentType]
        self.keys = [key.new_zeros(slots, room, key.shape[1], key.shape[3]) for key, _ in example]
        self.values = [value.new_zeros(slots, room, value.shape[1], value.shape[3]) for _, value in example]
        self.read_keys: list[Tensor] = []  # of the prompts read last, [tokens, K, D] for each layer
        self.read_values: list[Tensor] = []
        self.place_R: Tensor | None = None  # where a decoding step writes; None: prompts are being read

    @property
    def nbytes(self) -> int:
        """Memory that the slots take."""
        return sum(x.nbytes for x in (*self.keys, *self.values))

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Write the new keys and values; what attention is to read."""
        if self.place_R is None:
            self.read_keys.append(key_states[0].transpose(0, 1))
            self.read_values.append(value_states[0].transpose(0, 1))
            return key_states, value_states
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        keys.flatten(0, 1).index_copy_(0, self.place_R, key_states[:, :, 0])
        values.flatten(0, 1).index_copy_(0, self.place_R, value_states[:, :, 0])
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Not a property of all rows alike; positions are always given."""
        return 0

    def copy_read(self, source_M: Tensor, place_M: Tensor) -> None:
        """Copy tokens of the prompts read last to places of the slots."""
        for stored, read in ((self.keys, self.read_keys), (self.values, self.read_values)):
            for layer, tokens in zip(stored, read, strict=True):
                layer.flatten(0, 1).index_copy_(0, place_M, tokens.index_select(0, source_M))


class SlotDecoder:
    """Slots with a fixed room, for one model whose weights may change in place."""

    def __init__(
        self,
        model: Any,
        *,
        requests: int,
        room: int,
        new_tokens: int,
        settings: SamplerSettings,
        stop_ids: Tensor,
        draw: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = draw,
        while_capturing: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Room for this many `requests`, or as many as the device has memory for; `draw` may come compiled."""
        self.draw, self.while_capturing = draw, while_capturing
        self.model, self.device, self.settings, self.stop_ids = model, model.device, settings, stop_ids
        self.room, self.new_tokens = room, new_tokens
        example = _one_token(model)
        self.most_slots = most_slots(model, room, sum(x.nbytes for pair in example for x in pair))
        self.slots = slots = max(FEWEST_ROWS, min(1 << max(0, requests - 1).bit_length(), self.most_slots))
        self.cache = SlotCache(slots, room, example)
        model.set_attn_implementation(SLOTS)

        def zeros(*shape: int, dtype: torch.dtype = torch.long) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=self.device)

        self.token_S, self.position_S, self.count_S, self.seed_S = (zeros(slots) for _ in range(4))
        self.alive_S = zeros(slots, dtype=torch.bool)
        self.ids_SN, self.logp_SN = zeros(slots, new_tokens, dtype=torch.int32), zeros(slots, new_tokens).float()
        self.stream: torch.cuda.Stream | None = None  # that steps are captured on
        self.rows_of: dict[int, tuple[Tensor, Any]] = {}  # by number of rows: the slots it works on, its graph

    # ------------------------------------------------------------ one step

    def _step(self, slot_R: Tensor) -> None:
        """Sample the next token of each row."""
        position_R, alive_R = self.position_S[slot_R], self.alive_S[slot_R]
        self.cache.place_R = slot_R * self.room + position_R
        output = self.model(
            input_ids=self.token_S[slot_R].unsqueeze(1),
            position_ids=position_R.unsqueeze(1),
            past_key_values=self.cache,
            use_cache=True,
            slot_R=slot_R,
            length_R=torch.where(alive_R, position_R + 1, 1),  # who has ended need not look back
        )
        count_R = self.count_S[slot_R]
        logits_RV = tempered(output.logits[:, -1], self.settings)
        token_R, logp_R = self.draw(logits_RV, device_uniforms(self.seed_S[slot_R], count_R))
        # A row that has ended does its work again and again, and keeps what it has.
        place_R = (count_R - (~alive_R).long()).clamp(min=0)
        self.ids_SN[slot_R, place_R] = torch.where(alive_R, token_R.int(), self.ids_SN[slot_R, place_R])
        self.logp_SN[slot_R, place_R] = torch.where(alive_R, logp_R, self.logp_SN[slot_R, place_R])
        self.token_S[slot_R] = token_R
        self.position_S[slot_R] = position_R + alive_R
        self.count_S[slot_R] = count_R + alive_R
        going_on_R = ~torch.isin(token_R, self.stop_ids) & (count_R + 1 < self.new_tokens)
        self.alive_S[slot_R] = alive_R & going_on_R
        # A slot that is full to the last place must not be written beyond it while it waits.
        self.position_S.clamp_(max=self.room - 1)

    def _run(self, rows: int, slots: np.ndarray, steps: int) -> None:
        """Let these slots take some steps."""
        if rows not in self.rows_of:
            slot_R = to_device(slots, self.device).clone()
            with self.while_capturing():
                self.rows_of[rows] = slot_R, self._capture(slot_R)
        slot_R, graph = self.rows_of[rows]
        slot_R.copy_(to_device(slots, self.device))
        for _ in range(steps):
            if graph is None:
                self._step(slot_R)
            else:
                graph.replay()

    def _capture(self, slot_R: Tensor) -> Any:
        """The step as a CUDA graph, None where there is no GPU. Its trial runs leave everything as it was."""
        if self.device.type != "cuda":
            return None
        state = [x.clone() for x in self._state()]
        self.alive_S.zero_()
        # Always the same one: a library's workspace stays with its stream.
        self.stream = self.stream or torch.cuda.Stream()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for _ in range(2):
                self._step(slot_R)
        torch.cuda.current_stream().wait_stream(self.stream)
        graph = torch.cuda.CUDAGraph()
        pool = next((g.pool() for _, g in self.rows_of.values()), None)
        with recording(graph, self.stream, pool):
            self._step(slot_R)
        for x, before in zip(self._state(), state, strict=True):
            x.copy_(before)
        return graph

    def _state(self) -> tuple[Tensor, ...]:
        return self.token_S, self.position_S, self.count_S, self.alive_S

    # ------------------------------------------------------------ all requests

    @torch.inference_mode()
    def decode(
        self, requests: Sequence[Request], on_tokens: Callable[[int], object] = lambda count: None
    ) -> Iterator[Ended]:
        """All responses, in the order in which they end."""
        self.alive_S.zero_()  # a decoding that was given up may have left some
        self.count_S.zero_()
        request_S = np.full(self.slots, -1)  # −1: the slot is empty
        counted, finished = 0, 0
        queue = Waiting(requests)
        while True:
            alive = self.alive_S.cpu().numpy()
            ended = np.flatnonzero(~alive & (request_S >= 0))
            empty = np.flatnonzero(~alive)
            if len(ended) and (len(ended) >= REFILL_SHARE * self.slots or not alive.any()):
                harvest = self._harvest(ended, request_S)
                finished += int(harvest.lengths.sum())
                request_S[ended] = -1
                yield harvest
            if queue and (len(empty) >= REFILL_SHARE * self.slots or not alive.any()):
                chosen = empty[request_S[empty] < 0]
                self._fill(queue, chosen, request_S)
                continue
            if not alive.any():
                self.cache.read_keys, self.cache.read_values = [], []
                return
            rows = self._rows_for(int(alive.sum())) if not queue else self.slots
            order = np.concatenate([np.flatnonzero(alive), empty])  # the living first, others to fill the rows
            self._run(rows, order[:rows] if rows < self.slots else np.arange(self.slots), STEPS_BETWEEN_LOOKS)
            now = finished + int(self.count_S.sum())
            on_tokens(now - counted)
            counted = now

    def _rows_for(self, alive: int) -> int:
        """By fours: rows that have ended cost little, and a step for another number of rows has to be captured."""
        rows = self.slots
        while rows // 4 >= max(alive, FEWEST_ROWS):
            rows //= 4
        return rows

    def _harvest(self, ended: np.ndarray, request_S: np.ndarray) -> Ended:
        index = to_device(ended, self.device)
        lengths = self.count_S[index]
        longest = int(lengths.max())
        self.count_S[index] = 0
        return Ended(
            requests=request_S[ended].copy(),
            ids=self.ids_SN[index, :longest].cpu().numpy(),
            logp=self.logp_SN[index, :longest].cpu().numpy(),
            lengths=lengths.cpu().numpy(),
        )

    def _fill(self, queue: Waiting, empty: np.ndarray, request_S: np.ndarray) -> None:
        """Put the next requests into empty slots."""
        if not queue.read:
            self._read_prompts(queue)
        taken = queue.take(len(empty))
        slots = empty[: len(taken)]
        request_S[slots] = [index for index, _ in taken]
        prompts = [queue.requests[index].prompt_ids for index, _ in taken]
        prefix = np.array([len(prompt) - 1 for prompt in prompts])
        start = np.array([start for _, start in taken])
        within = np.arange(prefix.sum()) - np.repeat(np.cumsum(prefix) - prefix, prefix)
        if prefix.any():
            source_M, place_M = np.repeat(start, prefix) + within, np.repeat(slots * self.room, prefix) + within
            self.cache.copy_read(to_device(source_M, self.device), to_device(place_M, self.device))
        index = to_device(slots, self.device)
        seeds = np.array([queue.requests[i].seed for i, _ in taken], dtype=np.int64)
        self.token_S[index] = to_device(np.array([prompt[-1] for prompt in prompts]), self.device)
        self.position_S[index] = to_device(prefix, self.device)
        self.seed_S[index] = to_device(seeds, self.device)
        self.count_S[index] = 0
        self.alive_S[index] = True

    def _read_prompts(self, queue: Waiting) -> None:
        """Compute keys and values of the next prompts; each prompt but its last token, which the first step takes."""
        ids, lengths = queue.next_prompts(PREFILL_TOKENS)
        self.cache.place_R = None
        self.cache.read_keys, self.cache.read_values = [], []
        if len(lengths) == 0:
            return
        grids = needs_grids(self.device, self.model.dtype)
        self.model.set_attn_implementation(PACKED)
        try:
            self.model.base_model(
                input_ids=to_device(ids[None], self.device),
                past_key_values=self.cache,
                use_cache=True,
                **packed_arguments(lengths, lengths, np.arange(len(ids)), self.device, grids=grids),
            )
        finally:
            self.model.set_attn_implementation(SLOTS)


def _one_token(model: Any) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of one token in each layer."""
    cache = DynamicCache(config=model.config)
    before = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    with torch.inference_mode():
        model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), past_key_values=cache, use_cache=True)
    model.set_attn_implementation(before)
    layers: list[Any] = cache.layers
    return [(layer.keys, layer.values) for layer in layers]


def most_slots(model: Any, room: int, token_bytes: int) -> int:
    """The largest power of two for which the device has memory."""
    most = MOST_SLOTS
    if model.device.type == "cuda":
        vocabulary = model.get_output_embeddings().weight.shape[0]
        row_bytes = room * token_bytes + vocabulary * LOGITS_BYTES
        most = min(most, int(torch.cuda.mem_get_info(model.device)[0] * MEMORY_SHARE) // row_bytes)
    return 1 << max(0, most.bit_length() - 1)


def slots_problem(model: Any) -> str:
    """Why decoding in slots would not give what a plain forward pass does; empty where it does.

    Some caches are more than keys and values, and some attention is more than plain.
    """
    prompt = [3, 1, 2, 4, 2]
    before = model.config._attn_implementation
    try:
        settings, nothing = SamplerSettings(), torch.empty(0, dtype=torch.long, device=model.device)
        decoder = SlotDecoder(model, requests=1, room=8, new_tokens=3, settings=settings, stop_ids=nothing)
        (ended,) = decoder.decode([Request(prompt, seed=1)])
    except torch.OutOfMemoryError:
        raise
    except (NotImplementedError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        model.set_attn_implementation(before)
    ids = torch.tensor([prompt + ended.ids[0].tolist()], device=model.device)
    with torch.inference_mode():
        logp_TV = model(input_ids=ids, use_cache=False).logits[0].float().log_softmax(dim=-1)
    expected = logp_TV[len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None]).squeeze(1).cpu().numpy()
    difference = float(np.abs(ended.logp[0] - expected).max())
    tolerance = 1e-3 if model.dtype is torch.float32 else 0.2
    return "" if difference < tolerance else f"log-probabilities differ by {difference:g}"
