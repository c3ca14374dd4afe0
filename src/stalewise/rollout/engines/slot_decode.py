"""Decoding in slots: a fixed number of responses at once, and a new request in each slot as soon as one has ended.

Keys and values lie in one block of memory, with room for the longest response in every slot and beside them places for
prompts, so that a decoding step is always the same work on the same addresses: on a GPU it is captured once and
replayed without Python. A step takes the last token of each row, samples the next one and writes it down, all on the
device; the host looks only now and then which responses have ended, and while it does the next steps run. Each distinct
prompt is read once, into a place where all its responses look back to it.

Axes: S slots, R rows of a step (all slots, or fewer at the end when few responses are left), P prompts, M tokens of
prompts, V vocabulary, N new tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stalewise.models.attention import PACKED, SLOTS, needs_grids, packed_arguments
from stalewise.models.graph_capture import recording
from stalewise.models.transfer import send, to_device, to_host
from stalewise.rollout.engines.slot_cache import RequestQueue, SlotCache, one_token
from stalewise.rollout.sampler import Request
from stalewise.rollout.token_sampling import device_uniforms, draw, tempered
from stalewise.types import SamplerSettings

STEPS_BETWEEN_LOOKS = 2
REFILL_SHARE = 0.03125  # of the slots; filling a few at a time costs as much as filling many
PREFILL_TOKENS = 65_536
FEWEST_ROWS = 64
MOST_SLOTS = 8192
MEMORY_SHARE = 0.5  # of the free memory of a GPU may be taken by slots
LOGITS_BYTES = 12  # of each row and token of the vocabulary while it is sampled from


@dataclass(frozen=True, slots=True)
class FinishedResponses:
    """Responses that have ended: which requests, their tokens and log-probabilities [·, N] and lengths."""

    requests: np.ndarray
    ids: np.ndarray
    logp: np.ndarray
    lengths: np.ndarray


@dataclass(slots=True)
class SlotStatus:
    """What the host is told of the slots after some steps. On a GPU it is on its way while the next ones run."""

    alive_S: Tensor
    count_S: Tensor
    filled_S: np.ndarray  # slots that were filled afterwards, of which it does not tell
    ended: FinishedResponses | None = None  # that travel with it
    under_way: torch.cuda.Event | None = None

    def arrive(self) -> tuple[np.ndarray, np.ndarray]:
        """Which slots are alive, and how many tokens each has; now `ended` is whole, too."""
        if self.under_way is not None:
            self.under_way.synchronize()
        if self.ended is not None:
            # Copied out of pinned memory: who reads it is another thread, which must leave the device alone.
            self.ended = replace(self.ended, ids=self.ended.ids.copy(), logp=self.ended.logp.copy())
        return self.alive_S.numpy(), self.count_S.numpy()


class SlotDecoder:
    """Slots with a fixed room, for one model whose weights may change in place."""

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
        """Room for this many `requests`, or as many as the device has memory for, and `prompts` of some tokens.

        `while_capturing` is what steps are captured in.
        """
        self.draw, self.while_capturing = draw, while_capturing
        self.model, self.device, self.settings, self.stop_ids = model, model.device, settings, stop_ids
        self.prompt_room, self.new_tokens = prompt_room, new_tokens
        example = one_token(model)
        token_bytes = sum(x.nbytes for pair in example for x in pair)
        places = _power_of_two(prompts)
        self.most_slots = most_slots(model, token_bytes, new_tokens, places, prompt_room)
        self.slots = slots = max(FEWEST_ROWS, min(_power_of_two(requests), self.most_slots))
        # Responses in so many slots have no more prompts than that: where a slot is free, so is a place, or requests
        # wait whose prompts have been read.
        self.places = min(places, slots)
        self.cache = SlotCache(slots * new_tokens + self.places * prompt_room, example)
        model.set_attn_implementation(SLOTS)

        def zeros(*shape: int, dtype: torch.dtype = torch.long) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=self.device)

        self.token_S, self.count_S, self.seed_S = (zeros(slots) for _ in range(3))
        self.prompt_S, self.prefix_S = zeros(slots), zeros(slots)  # where the prompt begins, and its length there
        self.alive_S = zeros(slots, dtype=torch.bool)
        self.ids_SN, self.logp_SN = zeros(slots, new_tokens, dtype=torch.int32), zeros(slots, new_tokens).float()
        self.stream: torch.cuda.Stream | None = None  # that steps are captured on
        self.rows_of: dict[int, tuple[Tensor, Any]] = {}  # by number of rows: the slots it works on, its graph

    # ------------------------------------------------------------ one step

    def _step(self, slot_R: Tensor) -> None:
        """Sample the next token of each row."""
        alive_R, count_R, prefix_R = self.alive_S[slot_R], self.count_S[slot_R], self.prefix_S[slot_R]
        position_R, own_R = prefix_R + count_R, slot_R * self.new_tokens
        # A slot that is full to the last place must not be written beyond it while it waits.
        self.cache.place_R, self.cache.reads_prompts = own_R + count_R.clamp(max=self.new_tokens - 1), False
        output = self.model(
            input_ids=self.token_S[slot_R].unsqueeze(1),
            position_ids=position_R.unsqueeze(1),
            past_key_values=self.cache,
            use_cache=True,
            prompt_R=self.prompt_S[slot_R],
            prefix_R=prefix_R,
            own_R=own_R,
            length_R=torch.where(alive_R, position_R + 1, 1),  # who has ended need not look back
            room=self.prompt_room + self.new_tokens,
        )
        logits_RV = tempered(output.logits[:, -1], self.settings)
        token_R, logp_R = self.draw(logits_RV, device_uniforms(self.seed_S[slot_R], count_R))
        # A row that has ended does its work again and again, and keeps what it has.
        place_R = (count_R - (~alive_R).long()).clamp(min=0)
        self.ids_SN[slot_R, place_R] = torch.where(alive_R, token_R.int(), self.ids_SN[slot_R, place_R])
        self.logp_SN[slot_R, place_R] = torch.where(alive_R, logp_R, self.logp_SN[slot_R, place_R])
        self.token_S[slot_R] = token_R
        self.count_S[slot_R] = count_R + alive_R
        going_on_R = ~torch.isin(token_R, self.stop_ids) & (count_R + 1 < self.new_tokens)
        self.alive_S[slot_R] = alive_R & going_on_R

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
        """The step as a CUDA graph, None where there is no GPU. Its trial runs leave everything as it was, but for
        the place that each row writes to in its next step.
        """
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
        return self.token_S, self.count_S, self.alive_S

    # ------------------------------------------------------------ all requests

    @torch.inference_mode()
    def decode(
        self, queue: RequestQueue, on_tokens: Callable[[int], object] = lambda count: None
    ) -> Iterator[FinishedResponses]:
        """All responses, in the order in which they end. The host sees the slots as they were one look before."""
        self.alive_S.zero_()  # those of a decoding that was given up would go on for nothing
        request_S = np.full(self.slots, -1)  # −1: the slot is empty
        queue.resolve_learning_rate(self.places)
        nothing_S = np.zeros(self.slots, dtype=bool)
        last = SlotStatus(torch.from_numpy(nothing_S), torch.from_numpy(nothing_S), nothing_S)
        last.filled_S = self._fill(queue, np.arange(self.slots), request_S)
        living_S = last.filled_S  # or not yet known to have ended
        counted, finished = 0, 0
        while living_S.any():
            self._run(*self._rows_for(living_S, whole=bool(queue)), STEPS_BETWEEN_LOOKS)
            look = self._look()
            alive_S, count_S = last.arrive()
            if last.ended is not None:
                yield last.ended
            known_S = (request_S >= 0) & ~last.filled_S
            ended = np.flatnonzero(known_S & ~alive_S)
            living_S = (request_S >= 0) & (alive_S | last.filled_S)
            now = finished + int(count_S[known_S].sum())
            on_tokens(now - counted)
            counted = now
            if len(ended) and (len(ended) >= REFILL_SHARE * self.slots or not living_S.any()):
                look.ended = self._harvest(ended, request_S[ended], count_S[ended])
                finished += int(count_S[ended].sum())
                queue.end(request_S[ended])
                request_S[ended] = -1
            empty = np.flatnonzero(request_S < 0)
            if queue and len(empty) >= REFILL_SHARE * self.slots:
                look.filled_S = self._fill(queue, empty, request_S)
                living_S = living_S | look.filled_S
            if self.device.type == "cuda":
                look.under_way = torch.cuda.Event()
                look.under_way.record()
            last = look
        last.arrive()
        if last.ended is not None:
            yield last.ended

    def _look(self) -> SlotStatus:
        return SlotStatus(to_host(self.alive_S), to_host(self.count_S), filled_S=np.zeros(self.slots, dtype=bool))

    def _rows_for(self, living_S: np.ndarray, *, whole: bool) -> tuple[int, np.ndarray]:
        """How many rows a step has, and which slots they are: all, or where none waits and few live, fewer.

        By fours: rows that have ended cost little, and a step for another number of rows has to be captured.
        """
        rows, alive = self.slots, int(living_S.sum())
        while not whole and rows // 4 >= max(alive, FEWEST_ROWS):
            rows //= 4
        if rows == self.slots:
            return rows, np.arange(self.slots)
        # The living first, others to fill the rows.
        return rows, np.concatenate([np.flatnonzero(living_S), np.flatnonzero(~living_S)])[:rows]

    def _harvest(self, ended: np.ndarray, requests: np.ndarray, lengths: np.ndarray) -> FinishedResponses:
        """What is in slots that have ended; on a GPU it is on its way."""
        index, longest = to_device(ended, self.device), int(lengths.max())
        ids, logp = (to_host(x[index, :longest]).numpy() for x in (self.ids_SN, self.logp_SN))
        return FinishedResponses(requests, ids, logp, lengths)

    def _fill(self, queue: RequestQueue, empty: np.ndarray, request_S: np.ndarray) -> np.ndarray:
        """Put the next requests into empty slots; which were filled."""
        while len(queue.read) < len(empty) and queue.free and self._read_prompts(queue):
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
        """Where in the cache these places of prompts begin: after all slots."""
        return self.slots * self.new_tokens + place * self.prompt_room

    def _read_prompts(self, queue: RequestQueue) -> bool:
        """Write keys and values of the next prompts to their places; False: there are none."""
        prompts, places = queue.next_prompts(PREFILL_TOKENS)
        length_P = np.array([len(prompt) for prompt in prompts])
        if not length_P.any():
            return bool(prompts)  # of one token each, which the first step takes
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
    """The least power of two that is no less.

    >>> [_power_of_two(count) for count in (0, 1, 3, 4, 5)]
    [1, 1, 4, 4, 8]
    """
    return 1 << max(0, least - 1).bit_length()


def most_slots(model: Any, token_bytes: int, new_tokens: int, places: int, prompt_room: int) -> int:
    """The largest power of two for which the device has memory, with as many `places` of prompts or one for each."""
    slots = MOST_SLOTS
    if model.device.type == "cuda":
        slot_bytes = new_tokens * token_bytes + model.get_output_embeddings().weight.shape[0] * LOGITS_BYTES
        free = torch.cuda.mem_get_info(model.device)[0] * MEMORY_SHARE
        while slots > 1 and slots * slot_bytes + min(places, slots) * prompt_room * token_bytes > free:
            slots //= 2
    return slots


def slots_problem(model: Any, **ways: Any) -> str:
    """Why decoding in slots, in these ways, would not give what a plain forward pass does; empty where it does.

    Some caches are more than keys and values, and some attention is more than plain.
    """
    prompt = [3, 1, 2, 4, 2]
    before = model.config._attn_implementation
    try:
        settings, nothing = SamplerSettings(), torch.empty(0, dtype=torch.long, device=model.device)
        decoder = SlotDecoder(
            model, requests=1, prompts=1, prompt_room=5, new_tokens=3, settings=settings, stop_ids=nothing, **ways
        )
        (ended,) = decoder.decode(RequestQueue([Request(prompt, seed=1)]))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of an architecture, or of a kernel that cannot be made for it
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
