"""Continuous batching: a fixed number of slots, each refilled with a new request when its response has ended.

Keys and values are in one block of memory, with room for the longest response in every slot and separate places for
prompts. A decoding step is thus the same work on the same addresses, and on a GPU it is captured once as a CUDA graph.
A step samples the next token of each row on the device. The host checks every few steps which responses have ended,
while the next steps run. Each distinct prompt is prefilled once and shared by its responses.

Axes: S slots, R rows of a step (all slots, or fewer when few responses are left), Q requests, P distinct prompts,
M tokens of prompts, V vocabulary, N new tokens, T tokens of the cache, K key-value heads, D numbers per head.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from stalewise.models.attention import PACKED, SLOTS, needs_grids, packed_arguments
from stalewise.models.graph_capture import recording
from stalewise.models.kernels import can_compile
from stalewise.models.transfer import send, to_device, to_host
from stalewise.rollout.sampler import Request
from stalewise.rollout.token_sampling import device_uniforms, draw, tempered
from stalewise.types import SamplerSettings

STEPS_PER_CHECK = 2
REFILL_SHARE = 0.03125  # of the slots; filling a few costs as much as filling many
PREFILL_TOKENS = 65_536
FEWEST_ROWS = 64
MOST_SLOTS = 8192
MEMORY_SHARE = 0.5  # of a GPU's free memory that slots may take
LOGITS_BYTES = 12  # per row and token of the vocabulary during sampling


class SlotCache(Cache):
    """Keys and values of all layers. The caller of the model sets `place_R` and `reads_prompts` first."""

    def __init__(self, tokens: int, example: list[tuple[Tensor, Tensor]]) -> None:
        """`example` holds keys and values of one token in each layer, [1, K, 1, D]."""
        super().__init__(layer_class_to_replicate=object)  # pyright: ignore[reportArgumentType]
        self.keys = [key.new_zeros(tokens, key.shape[1], key.shape[3]) for key, _ in example]
        self.values = [value.new_zeros(tokens, value.shape[1], value.shape[3]) for _, value in example]
        self.place_R = torch.empty(0, dtype=torch.long)  # where the next tokens are written
        self.reads_prompts = False

    @property
    def nbytes(self) -> int:
        """Memory of the cache."""
        return sum(x.nbytes for x in (*self.keys, *self.values))

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Write the new keys and values; returns what attention reads: the whole cache, or a prompt's own tokens."""
        keys_TKD, values_TKD = self.keys[layer_idx], self.values[layer_idx]
        new = [x[0].transpose(0, 1) if self.reads_prompts else x[:, :, 0] for x in (key_states, value_states)]
        if keys_TKD.is_cuda and can_compile():
            from stalewise.models.kernels.rope import write_on_device  # Triton comes with torch for GPUs alone

            write_on_device(keys_TKD, values_TKD, self.place_R, *new)
        else:
            for stored_TKD, new_RKD in zip((keys_TKD, values_TKD), new, strict=True):
                stored_TKD.index_copy_(0, self.place_R, new_RKD)
        return (key_states, value_states) if self.reads_prompts else (keys_TKD, values_TKD)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Rows differ in length; positions are always given."""
        return 0


def one_token_states(model: Any) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of one token in each layer."""
    cache = DynamicCache(config=model.config)
    before = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    with torch.inference_mode():
        model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), past_key_values=cache, use_cache=True)
    model.set_attn_implementation(before)
    layers: list[Any] = cache.layers
    return [(layer.keys, layer.values) for layer in layers]


class RequestQueue:
    """Requests waiting for a slot, grouped by prompt, and where the prompts lie in the cache.

    A prompt is prefilled but for its last token, which is the input of each response's first step.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        by_prompt: dict[tuple[int, ...], list[int]] = {}
        for index, request in enumerate(requests):
            by_prompt.setdefault(tuple(request.prompt_ids), []).append(index)
        self.prompts = list(by_prompt)
        self.members = list(by_prompt.values())
        self.seed_Q = np.array([request.seed for request in requests], dtype=np.int64)
        self.prompt_Q = np.empty(len(requests), dtype=np.int64)
        for prompt, members in enumerate(self.members):
            self.prompt_Q[members] = prompt
        self.prefix_P = np.array([len(prompt) - 1 for prompt in self.prompts])
        self.last_P = np.array([prompt[-1] for prompt in self.prompts])
        self.place_P = np.full(len(self.prompts), -1)
        self.open_P = np.array([len(members) for members in self.members])  # requests that have not ended
        self.unread = 0  # the first prompt that is not prefilled
        self.read: deque[int] = deque()  # requests whose prompts are prefilled
        self.free: list[int] = []  # places for prompts

    def __bool__(self) -> bool:
        return bool(self.read) or self.unread < len(self.prompts)

    def set_places(self, places: int) -> None:
        """The number of prompts that the cache has room for."""
        self.free = list(range(places))

    def next_prompts(self, most_tokens: int) -> tuple[list[tuple[int, ...]], np.ndarray]:
        """The next prompts without their last tokens, and their places; their requests count as `read` from now on.

        As many as free places and `most_tokens` allow, but at least one if a place is free.
        """
        first, tokens = self.unread, 0
        while self.unread < len(self.prompts) and self.free:
            tokens += int(self.prefix_P[self.unread])
            if tokens > most_tokens and self.unread > first:
                break
            self.place_P[self.unread] = self.free.pop()
            self.read.extend(self.members[self.unread])
            self.unread += 1
        return [prompt[:-1] for prompt in self.prompts[first : self.unread]], self.place_P[first : self.unread]

    def take(self, most: int) -> np.ndarray:
        """The next requests whose prompts are prefilled."""
        return np.array([self.read.popleft() for _ in range(min(most, len(self.read)))], dtype=np.int64)

    def end(self, requests: np.ndarray) -> None:
        """These requests have ended; the places of prompts without open requests become free."""
        prompts, counts = np.unique(self.prompt_Q[requests], return_counts=True)
        self.open_P[prompts] -= counts
        self.free.extend(self.place_P[prompts[self.open_P[prompts] == 0]].tolist())


@dataclass(frozen=True, slots=True)
class FinishedResponses:
    """Responses that have ended: their requests, tokens and log-probabilities [·, N], and lengths."""

    requests: np.ndarray
    ids: np.ndarray
    logp: np.ndarray
    lengths: np.ndarray


@dataclass(slots=True)
class SlotStatus:
    """State of the slots after some steps; on a GPU it is copied to the host while the next steps run."""

    alive_S: Tensor
    count_S: Tensor
    filled_S: np.ndarray  # slots that were refilled since
    ended: FinishedResponses | None = None  # copied along with it
    copied: torch.cuda.Event | None = None

    def wait(self) -> tuple[np.ndarray, np.ndarray]:
        """Wait for the copies; which slots are alive, and how many tokens each has."""
        if self.copied is not None:
            self.copied.synchronize()
        if self.ended is not None:
            # Out of pinned memory: another thread reads it, which must not touch the device.
            self.ended = replace(self.ended, ids=self.ended.ids.copy(), logp=self.ended.logp.copy())
        return self.alive_S.numpy(), self.count_S.numpy()


class SlotDecoder:
    """Decodes in slots of a fixed size, for one model whose weights may change in place."""

    def __init__(
        self,
        model: Any,
        *,
        requests: int,
        prompts: int,
        prompt_room: int,
        new_tokens: int,
        settings: SamplerSettings,
        stop_ids: Tensor,
        draw: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = draw,
        while_capturing: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Room for `requests` slots, or as many as fit the device's memory, and for `prompts` of `prompt_room` tokens.

        Steps are captured within the context `while_capturing`.
        """
        self.draw, self.while_capturing = draw, while_capturing
        self.model, self.device, self.settings, self.stop_ids = model, model.device, settings, stop_ids
        self.prompt_room, self.new_tokens = prompt_room, new_tokens
        example = one_token_states(model)
        token_bytes = sum(x.nbytes for pair in example for x in pair)
        places = _power_of_two(prompts)
        self.most_slots = most_slots(model, token_bytes, new_tokens, places, prompt_room)
        self.slots = slots = max(FEWEST_ROWS, min(_power_of_two(requests), self.most_slots))
        # No more prompts than slots are in use at once: with a free slot there is a free place or a prefilled request.
        self.places = min(places, slots)
        self.cache = SlotCache(slots * new_tokens + self.places * prompt_room, example)
        model.set_attn_implementation(SLOTS)

        def zeros(*shape: int, dtype: torch.dtype = torch.long) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=self.device)

        self.token_S, self.count_S, self.seed_S = (zeros(slots) for _ in range(3))
        self.prompt_S, self.prefix_S = (
            zeros(slots),
            zeros(slots),
        )  # where the prompt begins in the cache, and its length
        self.alive_S = zeros(slots, dtype=torch.bool)
        self.ids_SN, self.logp_SN = zeros(slots, new_tokens, dtype=torch.int32), zeros(slots, new_tokens).float()
        self.stream: torch.cuda.Stream | None = None  # for capturing
        self.graphs: dict[int, tuple[Tensor, Any]] = {}  # by number of rows: the slots of a step, and its graph

    def _step(self, slot_R: Tensor) -> None:
        """Sample the next token of each row."""
        alive_R, count_R, prefix_R = self.alive_S[slot_R], self.count_S[slot_R], self.prefix_S[slot_R]
        position_R, own_R = prefix_R + count_R, slot_R * self.new_tokens
        # A full slot must not be written beyond its end while it waits.
        self.cache.place_R, self.cache.reads_prompts = own_R + count_R.clamp(max=self.new_tokens - 1), False
        output = self.model(
            input_ids=self.token_S[slot_R].unsqueeze(1),
            position_ids=position_R.unsqueeze(1),
            past_key_values=self.cache,
            use_cache=True,
            prompt_R=self.prompt_S[slot_R],
            prefix_R=prefix_R,
            own_R=own_R,
            length_R=torch.where(alive_R, position_R + 1, 1),  # rows that have ended attend to one key
            room=self.prompt_room + self.new_tokens,
        )
        logits_RV = tempered(output.logits[:, -1], self.settings)
        token_R, logp_R = self.draw(logits_RV, device_uniforms(self.seed_S[slot_R], count_R))
        # A row that has ended computes on, and keeps its tokens.
        place_R = (count_R - (~alive_R).long()).clamp(min=0)
        self.ids_SN[slot_R, place_R] = torch.where(alive_R, token_R.int(), self.ids_SN[slot_R, place_R])
        self.logp_SN[slot_R, place_R] = torch.where(alive_R, logp_R, self.logp_SN[slot_R, place_R])
        self.token_S[slot_R] = token_R
        self.count_S[slot_R] = count_R + alive_R
        going_on_R = ~torch.isin(token_R, self.stop_ids) & (count_R + 1 < self.new_tokens)
        self.alive_S[slot_R] = alive_R & going_on_R

    def _run(self, rows: int, slots: np.ndarray, steps: int) -> None:
        """Run some steps on these slots."""
        if rows not in self.graphs:
            slot_R = to_device(slots, self.device).clone()
            with self.while_capturing():
                self.graphs[rows] = slot_R, self._capture(slot_R)
        slot_R, graph = self.graphs[rows]
        slot_R.copy_(to_device(slots, self.device))
        for _ in range(steps):
            if graph is None:
                self._step(slot_R)
            else:
                graph.replay()

    def _capture(self, slot_R: Tensor) -> Any:
        """The step as a CUDA graph; None without a GPU. Trial runs change nothing but what the next step overwrites."""
        if self.device.type != "cuda":
            return None
        state = [x.clone() for x in self._state()]
        self.alive_S.zero_()
        # Always the same stream: libraries keep a workspace for each.
        self.stream = self.stream or torch.cuda.Stream()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for _ in range(2):
                self._step(slot_R)
        torch.cuda.current_stream().wait_stream(self.stream)
        graph = torch.cuda.CUDAGraph()
        pool = next((g.pool() for _, g in self.graphs.values()), None)
        with recording(graph, self.stream, pool):
            self._step(slot_R)
        for x, before in zip(self._state(), state, strict=True):
            x.copy_(before)
        return graph

    def _state(self) -> tuple[Tensor, ...]:
        return self.token_S, self.count_S, self.alive_S

    @torch.inference_mode()
    def decode(
        self, queue: RequestQueue, on_tokens: Callable[[int], object] = lambda count: None
    ) -> Iterator[FinishedResponses]:
        """All responses, in the order in which they end. The host sees the slots as they were one check before."""
        self.alive_S.zero_()  # left over if an earlier decoding was abandoned
        request_S = np.full(self.slots, -1)  # −1: the slot is empty
        queue.set_places(self.places)
        nothing_S = np.zeros(self.slots, dtype=bool)
        last = SlotStatus(torch.from_numpy(nothing_S), torch.from_numpy(nothing_S), nothing_S)
        last.filled_S = self._fill(queue, np.arange(self.slots), request_S)
        living_S = last.filled_S  # as far as the host knows
        counted, finished = 0, 0
        while living_S.any():
            self._run(*self._rows_for(living_S, whole=bool(queue)), STEPS_PER_CHECK)
            status = self._status()
            alive_S, count_S = last.wait()
            if last.ended is not None:
                yield last.ended
            known_S = (request_S >= 0) & ~last.filled_S
            ended = np.flatnonzero(known_S & ~alive_S)
            living_S = (request_S >= 0) & (alive_S | last.filled_S)
            now = finished + int(count_S[known_S].sum())
            on_tokens(now - counted)
            counted = now
            if len(ended) and (len(ended) >= REFILL_SHARE * self.slots or not living_S.any()):
                status.ended = self._collect(ended, request_S[ended], count_S[ended])
                finished += int(count_S[ended].sum())
                queue.end(request_S[ended])
                request_S[ended] = -1
            empty = np.flatnonzero(request_S < 0)
            if queue and len(empty) >= REFILL_SHARE * self.slots:
                status.filled_S = self._fill(queue, empty, request_S)
                living_S = living_S | status.filled_S
            if self.device.type == "cuda":
                status.copied = torch.cuda.Event()
                status.copied.record()
            last = status
        last.wait()
        if last.ended is not None:
            yield last.ended

    def _status(self) -> SlotStatus:
        return SlotStatus(to_host(self.alive_S), to_host(self.count_S), filled_S=np.zeros(self.slots, dtype=bool))

    def _rows_for(self, living_S: np.ndarray, *, whole: bool) -> tuple[int, np.ndarray]:
        """Number of rows of a step, and their slots: all, or fewer if no request waits and few are alive.

        By factors of 4: rows that have ended cost little, and each number of rows is captured once.
        """
        rows, alive = self.slots, int(living_S.sum())
        while not whole and rows // 4 >= max(alive, FEWEST_ROWS):
            rows //= 4
        if rows == self.slots:
            return rows, np.arange(self.slots)
        return rows, np.concatenate([np.flatnonzero(living_S), np.flatnonzero(~living_S)])[:rows]

    def _collect(self, ended: np.ndarray, requests: np.ndarray, lengths: np.ndarray) -> FinishedResponses:
        """Start copying the responses of slots that have ended to the host."""
        index, longest = to_device(ended, self.device), int(lengths.max())
        ids, logp = (to_host(x[index, :longest]).numpy() for x in (self.ids_SN, self.logp_SN))
        return FinishedResponses(requests, ids, logp, lengths)

    def _fill(self, queue: RequestQueue, empty: np.ndarray, request_S: np.ndarray) -> np.ndarray:
        """Put the next requests into empty slots; returns which were filled."""
        while len(queue.read) < len(empty) and queue.free and self._prefill(queue):
            pass
        taken = queue.take(len(empty))
        slots, prompt = empty[: len(taken)], queue.prompt_Q[taken]
        request_S[slots] = taken
        arrays = {
            "slots": slots,
            "token": queue.last_P[prompt],
            "prompt": self._prompt_start(queue.place_P[prompt]),
            "prefix": queue.prefix_P[prompt],
            "seed": queue.seed_Q[taken],
        }
        _, there = send(arrays, self.device)
        index = there["slots"]
        self.token_S[index], self.seed_S[index] = there["token"], there["seed"]
        self.prompt_S[index], self.prefix_S[index] = there["prompt"], there["prefix"]
        self.count_S[index] = 0
        self.alive_S[index] = True
        filled_S = np.zeros(self.slots, dtype=bool)
        filled_S[slots] = True
        return filled_S

    def _prompt_start(self, place: np.ndarray) -> np.ndarray:
        """Where these places for prompts begin in the cache: after all slots."""
        return self.slots * self.new_tokens + place * self.prompt_room

    def _prefill(self, queue: RequestQueue) -> bool:
        """Write keys and values of the next prompts to their places; False if there are none."""
        prompts, places = queue.next_prompts(PREFILL_TOKENS)
        length_P = np.array([len(prompt) for prompt in prompts])
        if not length_P.any():
            return bool(prompts)  # of one token each, the input of the first step
        start_P = np.cumsum(length_P) - length_P
        place_M = np.arange(length_P.sum()) + np.repeat(self._prompt_start(places) - start_P, length_P)
        self.cache.place_R, self.cache.reads_prompts = to_device(place_M, self.device), True
        ids = np.concatenate([np.array(prompt, dtype=np.int64) for prompt in prompts])
        lengths = length_P[length_P > 0]
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
        return True


def _power_of_two(least: int) -> int:
    """The least power of two that is at least `least`.

    >>> [_power_of_two(count) for count in (0, 1, 3, 4, 5)]
    [1, 1, 4, 4, 8]
    """
    return 1 << max(0, least - 1).bit_length()


def most_slots(model: Any, token_bytes: int, new_tokens: int, places: int, prompt_room: int) -> int:
    """The largest power of two that fits the device's memory, with `places` for prompts (at most one per slot)."""
    slots = MOST_SLOTS
    if model.device.type == "cuda":
        slot_bytes = new_tokens * token_bytes + model.get_output_embeddings().weight.shape[0] * LOGITS_BYTES
        free = torch.cuda.mem_get_info(model.device)[0] * MEMORY_SHARE
        while slots > 1 and slots * slot_bytes + min(places, slots) * prompt_room * token_bytes > free:
            slots //= 2
    return slots


def slots_problem(model: Any, **kernels: Any) -> str:
    """Why decoding in slots would not reproduce a plain forward pass, or an empty string; found by trying it.

    Some caches are more than keys and values, and some architectures have special attention.
    """
    prompt = [3, 1, 2, 4, 2]
    before = model.config._attn_implementation
    try:
        settings, nothing = SamplerSettings(), torch.empty(0, dtype=torch.long, device=model.device)
        decoder = SlotDecoder(
            model, requests=1, prompts=1, prompt_room=5, new_tokens=3, settings=settings, stop_ids=nothing, **kernels
        )
        (ended,) = decoder.decode(RequestQueue([Request(prompt, seed=1)]))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of an architecture, or of a kernel that does not compile for it
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
