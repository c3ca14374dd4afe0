"""Continuous batching: a fixed number of slots, each refilled with a new request when its response has ended.

Keys and values are in blocks (`paged_cache.py`). A response takes another block when its last one is full, and frees
all of them when it ends. The table of blocks is on the device, at a fixed address, so every decoding step is the same
work on the same addresses; on a GPU it is captured once as a CUDA graph. A step samples the next token of each row on
the device. Every few steps the host checks which responses have ended, while the next steps run. Each distinct prompt
is prefilled once and shared by its responses. When blocks run out, the responses with the fewest tokens are put back
into the queue; later their tokens are prefilled, and they continue with the same random numbers.

Axes: S slots, R rows of a step (all slots, or fewer when few responses are alive), Q requests, P distinct prompts, M
tokens that are prefilled, V vocabulary, N new tokens, B blocks of a slot (those of its prompt first).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stalewise.errors import ModelError
from stalewise.models.attention import PACKED, SLOTS, needs_grids, packed_arguments
from stalewise.models.compilation import recording
from stalewise.models.kernels import SlotState, StepRows
from stalewise.models.transfer import send, to_device, to_host
from stalewise.rollout.engines import paged_cache
from stalewise.rollout.engines.paged_cache import (
    CacheSize,
    PagedCache,
    SlotBlocks,
    advance_slots,
    cache_size,
    free_for_slots,
    one_token_states,
    read_slots,
    slot_bytes,
)
from stalewise.rollout.engines.request_queue import BegunResponse, RequestQueue, admitted
from stalewise.rollout.sampler import Request
from stalewise.rollout.token_sampling import device_uniforms, draw, tempered
from stalewise.types import SamplerSettings

log = logging.getLogger(__name__)
STEPS_PER_CHECK, LONG_STEPS_PER_CHECK = 2, 8  # the latter for long responses: a check costs more than a late refill
REFILL_SHARE = 0.03125  # of the running responses must have ended before slots are refilled: few cost as much as many
PREFILL_TOKENS, FEWEST_PREFILL_TOKENS = 65_536, 2048
PREFILL_SHARE = 0.05  # of a GPU's free memory that a prefill's activations may take
FINE_ROWS = 1024  # from this many new tokens on, a step is captured for every power of two of rows
FEWEST_FINE_ROWS = 8  # of a step: a step with fewer rows is hardly faster
# From this product of rows and parameters on, this is worthwhile for short responses, too. On an idle H200 it gave 21%
# more tokens a second for drawn lengths with 1.5B and 2,048 rows, 27% with 7B and 1,024; for fixed lengths 7% and 6%.
FINE_WORK = 5e11
# When responses are put back, keep one extra free block per this many slots, so that the next step evicts no others.
SLACK = 8
NEW_IN_TRIAL = 3  # tokens that the trial of `slots_problem` samples


def steps_per_check(new_tokens: int) -> int:
    """Steps between two checks of the slots, for responses of at most `new_tokens` tokens."""
    return LONG_STEPS_PER_CHECK if new_tokens >= FINE_ROWS else STEPS_PER_CHECK


@dataclass(frozen=True, slots=True)
class FinishedResponses:
    """Responses that have ended: their requests, tokens and log-probabilities [·, N], and lengths."""

    requests: np.ndarray
    ids: np.ndarray
    logp: np.ndarray
    lengths: np.ndarray


def last_turns(finished: FinishedResponses, begun: np.ndarray) -> FinishedResponses:
    """These responses without their first `begun` tokens, which are those of earlier turns."""
    if not begun.any():
        return finished
    column = np.minimum(np.arange(finished.ids.shape[1]) + begun[:, None], finished.ids.shape[1] - 1)
    ids, logp = (np.take_along_axis(x, column, axis=1) for x in (finished.ids, finished.logp))
    return FinishedResponses(finished.requests, ids, logp, finished.lengths - begun)


@dataclass(frozen=True, slots=True)
class PutBack:
    """Responses that were put back to free blocks; on a GPU the copies are complete when those of the status are."""

    requests: np.ndarray
    alive: Tensor
    count: Tensor
    ids: Tensor
    logp: Tensor

    def resolve(self, queue: RequestQueue, blocks: SlotBlocks) -> FinishedResponses | None:
        """Queue the responses that were alive; returns the others, which had ended unseen by the host."""
        alive, count = self.alive.numpy(), self.count.numpy()
        for row in np.flatnonzero(alive):
            ids, logp = (x[row, : count[row]].numpy().copy() for x in (self.ids, self.logp))
            queue.put_back(int(self.requests[row]), BegunResponse(ids, logp))
        ended = np.flatnonzero(~alive)
        if not len(ended):
            return None
        queue.end(self.requests[ended], count[ended], blocks)
        ids, logp = self.ids.numpy()[ended], self.logp.numpy()[ended]
        return FinishedResponses(self.requests[ended], ids, logp, count[ended].copy())


@dataclass(slots=True)
class SlotStatus:
    """The state of the slots after some steps; on a GPU it is copied to the host while the next steps run."""

    alive_S: Tensor
    count_S: Tensor
    filled_S: np.ndarray  # slots that were refilled after these steps
    ended: FinishedResponses | None = None  # copied at the same time
    put_back: PutBack | None = None  # copied at the same time
    copied: torch.cuda.Event | None = None

    def wait(self) -> tuple[np.ndarray, np.ndarray]:
        """Wait for the copies; returns which slots are alive, and the number of tokens of each."""
        if self.copied is not None:
            self.copied.synchronize()
        if self.ended is not None:
            # Copied from pinned memory: another thread reads them, which must not use the device.
            self.ended = replace(self.ended, ids=self.ended.ids.copy(), logp=self.ended.logp.copy())
        return self.alive_S.numpy(), self.count_S.numpy()


class SlotBoard:
    """The host's state of the slots. A running response gets one token in each step, so its count is exact."""

    def __init__(self, size: CacheSize) -> None:
        self.blocks = SlotBlocks(size.slots, size.own_blocks, size.blocks, size.block_size)
        self.request_S = np.full(size.slots, -1)  # −1: the slot is empty
        self.ended_S = np.zeros(size.slots, dtype=bool)  # its response has ended, and was not read yet
        self.tokens_S = np.zeros(size.slots, dtype=np.int64)  # including those of steps that are running

    @property
    def living(self) -> np.ndarray:
        """Slots whose responses have not ended, as far as the host knows."""
        return np.flatnonzero((self.request_S >= 0) & ~self.ended_S)

    def end(self, slots: np.ndarray, count_S: np.ndarray, queue: RequestQueue) -> None:
        """Mark the responses in these slots as ended, and free their blocks; their tokens are read later."""
        self.ended_S[slots] = True
        self.tokens_S[slots] = count_S[slots]
        self.blocks.release(slots)
        queue.leave(self.request_S[slots])
        queue.end(self.request_S[slots], count_S[slots], self.blocks)

    def clear(self, slots: np.ndarray) -> None:
        """Mark these slots as empty."""
        self.request_S[slots] = -1
        self.ended_S[slots] = False
        self.tokens_S[slots] = 0


@dataclass(frozen=True, slots=True)
class StepKernels:
    """The parts of a step besides the model, by default in torch, and a context in which steps are captured."""

    draw: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = draw
    uniforms: Callable[[Tensor, Tensor], Tensor] = device_uniforms
    read: Callable[[Tensor, SlotState], StepRows] = read_slots
    advance: Callable[[Tensor, StepRows, Tensor, Tensor, SlotState], None] = advance_slots
    while_capturing: Callable[[], AbstractContextManager[None]] = nullcontext


class SlotDecoder:
    """Decodes in slots. It belongs to one model, whose weights may change in place."""

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
        expected: float | None = None,
        memory: float = 1.0,
        most_bytes: float = math.inf,
        kernels: StepKernels | None = None,
    ) -> None:
        """Make slots for `requests`, and blocks for them and for `prompts` of `prompt_room` tokens, as memory allows.

        `free_for_slots` gives the memory from `memory` and `most_bytes`; `expected` is the probable response length.
        """
        self.kernels = kernels or StepKernels()
        self.model, self.device, self.settings = model, model.device, settings
        example = one_token_states(model)
        free = free_for_slots(self.device, memory, most_bytes)
        self.size = size = cache_size(
            free,
            token_bytes=sum(x.nbytes for pair in example for x in pair),
            row_bytes=slot_bytes(model, example, prompt_room + new_tokens, new_tokens),
            requests=requests,
            prompts=prompts,
            prompt_room=prompt_room,
            new_tokens=new_tokens,
            expected=expected,
        )
        self.requests, self.prompts, self.prompt_room = requests, prompts, prompt_room  # as it was made for
        self.slots, self.new_tokens, self.steps_per_check = size.slots, new_tokens, steps_per_check(new_tokens)
        self.prefill_tokens = _prefill_tokens(model, free)
        self.cache = PagedCache((size.blocks + 1) * size.block_size, example)
        self.board = SlotBoard(size)
        model.set_attn_implementation(SLOTS)

        def zeros(*shape: int, dtype: torch.dtype = torch.long) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=self.device)

        self.state = SlotState(
            numbers=zeros(6, size.slots),
            alive_S=zeros(size.slots, dtype=torch.bool),
            block_SB=zeros(size.slots, size.prompt_blocks + size.own_blocks, dtype=torch.int32),
            all_ids=zeros(size.slots, new_tokens + 1, dtype=torch.int32),
            all_logp=zeros(size.slots, new_tokens + 1, dtype=torch.float32),
            stop_ids=stop_ids,
            block_size=size.block_size,
            prompt_blocks=size.prompt_blocks,
        )
        # The first `forced_S` tokens are given in `ids_SN`, not sampled (slot_turns.py).
        self.token_S, self.count_S, self.seed_S, self.prefix_S, self.limit_S, self.forced_S = self.state.numbers
        self.alive_S, self.block_SB = self.state.alive_S, self.state.block_SB
        self.ids_SN, self.logp_SN = self.state.all_ids[:, :new_tokens], self.state.all_logp[:, :new_tokens]
        self.stream: torch.cuda.Stream | None = None  # for captures
        self.captures = self.device.type == "cuda"  # False after a capture has failed
        self.graphs: dict[int, tuple[Tensor, Any]] = {}  # by number of rows: a tensor of slots, and the step's graph

    def _step(self, slot_R: Tensor) -> None:
        """Sample the next token of each row."""
        state, kernels = self.state, self.kernels
        rows = kernels.read(slot_R, state)
        self.cache.place_R = rows.place_R
        self.cache.reads_prompts = False
        output = self.model(
            input_ids=rows.token_R.unsqueeze(1),
            position_ids=rows.position_R.unsqueeze(1),
            past_key_values=self.cache,
            use_cache=True,
            slot_R=slot_R,
            block_SB=state.block_SB,
            prefix_R=rows.prefix_R,
            length_R=rows.length_R,
            block_size=state.block_size,
            prompt_blocks=state.prompt_blocks,
            room=self.prompt_room + self.new_tokens,
        )
        logits_RV = tempered(output.logits[:, -1], self.settings)
        kernels.advance(slot_R, rows, *kernels.draw(logits_RV, kernels.uniforms(rows.seed_R, rows.count_R)), state)

    def run(self, rows: int, slots: np.ndarray, steps: int) -> None:
        """Run some steps on these slots."""
        if rows not in self.graphs:
            slot_R = to_device(slots, self.device).clone()
            with self.kernels.while_capturing():
                self.graphs[rows] = slot_R, self._capture(slot_R)
        slot_R, graph = self.graphs[rows]
        slot_R.copy_(to_device(slots, self.device))
        for _ in range(steps):
            if graph is None:
                self._step(slot_R)
            else:
                graph.replay()

    def _capture(self, slot_R: Tensor) -> Any:
        """The step as a CUDA graph; None if steps are launched, without a GPU or after a capture has failed."""
        if not self.captures:
            return None
        state = [x.clone() for x in self._state()]
        self.alive_S.zero_()  # so that the warm-up changes only what the next step overwrites
        try:
            self._warm_up(slot_R)
            return self._record(slot_R)
        finally:
            for x, before in zip(self._state(), state, strict=True):
                x.copy_(before)

    def _warm_up(self, slot_R: Tensor) -> None:
        """Run the step twice: the first runs allocate and compile what must not be part of a graph."""
        self.stream = self.stream or _capturing_stream(torch.cuda.current_device())
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for _ in range(2):
                self._step(slot_R)
        torch.cuda.current_stream().wait_stream(self.stream)

    def _record(self, slot_R: Tensor) -> Any:
        """Capture a step as a graph; None if that fails."""
        try:
            graph = torch.cuda.CUDAGraph()
            pool = next((g.pool() for _, g in self.graphs.values() if g is not None), None)
            assert self.stream is not None
            with recording(graph, self.stream, pool):
                self._step(slot_R)
            return graph
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # an operator that cannot be captured: it can still be launched
            self.captures = False
            reason = str(error).splitlines()[0]
            log.warning("CUDA graphs are off for sampling, since a step could not be captured: %s", reason)
            return None

    def _state(self) -> tuple[Tensor, ...]:
        return self.token_S, self.count_S, self.alive_S

    @torch.inference_mode()
    def decode(
        self, queue: RequestQueue, on_tokens: Callable[[int], object] = lambda count: None
    ) -> Iterator[FinishedResponses]:
        """All responses, in the order in which they end. The host sees the slots as they were one check before."""
        self.alive_S.zero_()  # an earlier call may have been abandoned
        self.board = board = SlotBoard(self.size)
        nothing_S = np.zeros(self.slots, dtype=bool)
        last = SlotStatus(torch.from_numpy(nothing_S), torch.from_numpy(nothing_S), nothing_S)
        last.filled_S = self.fill(queue)
        counted = 0  # tokens that `on_tokens` was told
        finished = 0  # tokens of responses that have ended
        while len(board.living) or last.put_back is not None:
            put_back = self.make_room(queue)
            living = board.living
            self.run(*self.rows_for(living), self.steps_per_check)
            board.tokens_S[living] = np.minimum(board.tokens_S[living] + self.steps_per_check, self.new_tokens)
            status = self.status(put_back)
            alive_S, count_S = last.wait()
            known_S = (board.request_S >= 0) & ~last.filled_S & ~board.ended_S
            board.end(np.flatnonzero(known_S & ~alive_S), count_S, queue)
            for responses in (last.ended, last.put_back and last.put_back.resolve(queue, board.blocks)):
                if responses is not None:
                    finished += int(responses.lengths.sum())
                    yield responses
            # Responses that were put back are not counted while they wait, so `now` may be lower for a while.
            now = finished + int(count_S[known_S | board.ended_S].sum())
            if now > counted:
                on_tokens(now - counted)
                counted = now
            self._refill(queue, status, count_S)
            if self.device.type == "cuda":
                status.copied = torch.cuda.Event()
                status.copied.record()
            last = status
        last.wait()
        if last.ended is not None:
            on_tokens(finished + int(last.ended.lengths.sum()) - counted)
            yield last.ended

    def _refill(self, queue: RequestQueue, status: SlotStatus, count_S: np.ndarray) -> None:
        """Read the responses that have ended and fill empty slots, if there are enough of them."""
        board = self.board
        ended = np.flatnonzero(board.ended_S)
        living = len(board.living)
        if len(ended) and (len(ended) >= REFILL_SHARE * living or not living):
            status.ended = self.collect(ended, board.request_S[ended], count_S[ended])
            board.clear(ended)
        if queue and (status.ended is not None or not living):
            status.filled_S = self.fill(queue)

    def status(self, put_back: PutBack | None) -> SlotStatus:
        """Start copying the state of the slots to the host."""
        nothing_S = np.zeros(self.slots, dtype=bool)
        return SlotStatus(to_host(self.alive_S), to_host(self.count_S), filled_S=nothing_S, put_back=put_back)

    @cached_property
    def parameters(self) -> int:
        """Number of parameters of the model."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def rows_for(self, living: np.ndarray) -> tuple[int, np.ndarray]:
        """Number of rows of a step, and their slots: all slots, or fewer if few are alive.

        A step is captured once for each number of rows. These are all slots divided by powers of 4, or of 2 if
        responses are long or many rows of a large model are computed. Long responses use fewer rows at the end.
        """
        are_long = self.new_tokens >= FINE_ROWS
        fewest = min(paged_cache.FEWEST_ROWS, FEWEST_FINE_ROWS) if are_long else paged_cache.FEWEST_ROWS
        rows = self.slots
        while rows > 1:
            factor = 2 if are_long or rows * self.parameters >= FINE_WORK else 4
            if rows // factor < max(len(living), fewest):
                break
            rows //= factor
        if rows == self.slots:
            return rows, np.arange(self.slots)
        others = np.ones(self.slots, dtype=bool)
        others[living] = False
        return rows, np.concatenate([living, np.flatnonzero(others)])[:rows]

    def collect(self, ended: np.ndarray, requests: np.ndarray, lengths: np.ndarray) -> FinishedResponses:
        """Start copying the responses of ended slots to the host."""
        index = to_device(ended, self.device)
        longest = int(lengths.max())
        ids, logp = (to_host(x[index, :longest]).numpy() for x in (self.ids_SN, self.logp_SN))
        return FinishedResponses(requests, ids, logp, lengths)

    def make_room(self, queue: RequestQueue) -> PutBack | None:
        """Give each running response the blocks for its next steps; returns responses that were put back for that."""
        board, blocks, living = self.board, self.board.blocks, self.board.living
        wanted = np.minimum(board.tokens_S[living] + self.steps_per_check, self.new_tokens)
        lacking = blocks.lacking(living, wanted)
        put_back = None
        if lacking.sum() > blocks.free:
            queue.evict(blocks, int(lacking.sum()))
        if lacking.sum() > blocks.free:
            # Those with the most tokens are kept, so that at least one always ends.
            order = np.argsort(-wanted, kind="stable")
            kept = order[: self._kept(living[order], lacking[order])]
            put_back = self._put_back(queue, np.delete(living, kept))
            living, wanted = living[kept], wanted[kept]
            queue.evict(blocks, int(lacking[kept].sum()))
        slot, column, block = blocks.grow(living, wanted)
        if len(slot):
            _, there = send({"slot": slot, "column": column + self.size.prompt_blocks, "block": block}, self.device)
            self.block_SB[there["slot"], there["column"]] = there["block"]
        return put_back

    def _kept(self, living: np.ndarray, lacking: np.ndarray) -> int:
        """How many of these responses keep their slots, so that there are blocks for them and their next steps."""
        free = self.board.blocks.free + self.board.blocks.held_S[living][::-1].cumsum()[::-1]
        kept = max(1, len(living) - 1)
        while kept > 1 and free[kept] < lacking[:kept].sum() + kept // SLACK:
            kept -= 1
        return kept

    def _put_back(self, queue: RequestQueue, slots: np.ndarray) -> PutBack:
        """Stop these responses, and start copying them to the host."""
        board, index = self.board, to_device(slots, self.device)
        longest = max(1, int(board.tokens_S[slots].max()))
        ids, logp = (to_host(x[index, :longest]) for x in (self.ids_SN, self.logp_SN))
        alive, count = (to_host(x[index]) for x in (self.alive_S, self.count_S))
        made = PutBack(board.request_S[slots].copy(), alive, count, ids, logp)
        self.alive_S[index] = False
        board.blocks.release(slots)
        queue.leave(board.request_S[slots])
        board.clear(slots)
        return made

    def fill(self, queue: RequestQueue) -> np.ndarray:
        """Put the next requests into empty slots; returns which slots were filled."""
        board, living = self.board, self.board.living
        filled_S = np.zeros(self.slots, dtype=bool)
        empty = np.flatnonzero(board.request_S < 0)
        running, tokens = board.request_S[living], board.tokens_S[living]
        expected_P = queue.expected_lengths(running, tokens)
        requests = queue.next(len(empty), expected_P)
        state = {"running": running, "tokens": tokens, "expected_P": expected_P}
        count = admitted(queue, board.blocks, requests, margin=self.steps_per_check, **state)
        if count == 0 or (count < REFILL_SHARE * len(living) and count < min(len(requests), len(empty))):
            return filled_S
        # Sorted: if all requests fit at once, the batch does not depend on expected lengths, to the last bit.
        requests, slots = np.sort(requests[:count]), empty[:count]
        filled_S[slots] = True
        new_prompts = queue.prompt_Q[requests[queue.missing(requests)]]
        for prompt in new_prompts.tolist():
            needed = -(-int(queue.prefix_P[prompt]) // self.size.block_size)
            queue.blocks_of[prompt] = board.blocks.take(needed)
        begun = queue.start(requests)
        made = np.array([0 if response is None else len(response.ids) for response in begun], dtype=np.int64)
        board.request_S[slots], board.tokens_S[slots] = requests, made
        board.blocks.grow(slots, np.minimum(made + self.steps_per_check, self.new_tokens))
        self._set_slots(queue, slots, requests, begun)
        texts = [(queue.prompts[prompt][:-1], self._places(queue.blocks_of[prompt])) for prompt in new_prompts.tolist()]
        texts += [
            self._begun_text(queue.prompts[queue.prompt_Q[request]], slot, response)
            for request, slot, response in zip(requests, slots, begun, strict=True)
            if response is not None
        ]
        self._prefill([text for text in texts if len(text[0])])
        return filled_S

    def _places(self, blocks: np.ndarray) -> np.ndarray:
        """The positions of these blocks' tokens in the cache."""
        return (blocks[:, None].astype(np.int64) * self.size.block_size + np.arange(self.size.block_size)).reshape(-1)

    def _begun_text(
        self, prompt: tuple[int, ...], slot: int, response: BegunResponse
    ) -> tuple[Sequence[int], np.ndarray]:
        """Tokens to prefill for a response that continues, all but the last, and their positions in the cache.

        The prompt is in the cache already: its tokens are written to block 0, which is never read.
        """
        prefix, made = len(prompt) - 1, len(response.ids)
        own = self._places(self.board.blocks.own_SB[slot, : self.board.blocks.held_S[slot]])
        return [*prompt, *response.ids[:-1].tolist()], np.concatenate([np.zeros(prefix, dtype=np.int64), own[:made]])

    def _set_slots(
        self, queue: RequestQueue, slots: np.ndarray, requests: np.ndarray, begun: list[BegunResponse | None]
    ) -> None:
        """Write the state of newly filled slots to the device."""
        board = self.board
        prompt = queue.prompt_Q[requests]
        block = np.zeros((len(slots), self.block_SB.shape[1]), dtype=np.int32)
        for row, number in enumerate(prompt.tolist()):
            prompt_blocks = queue.blocks_of[number]
            block[row, : len(prompt_blocks)] = prompt_blocks
        block[:, self.size.prompt_blocks :] = board.blocks.own_SB[slots]
        token = queue.last_P[prompt]
        for row, response in enumerate(begun):
            if response is not None:
                token[row] = response.ids[-1]
                for target, source in ((self.ids_SN, response.ids), (self.logp_SN, response.logp)):
                    target[int(slots[row]), : len(source)] = to_device(source, self.device)
        arrays = {"slots": slots, "token": token, "count": board.tokens_S[slots], "prefix": queue.prefix_P[prompt]}
        arrays |= {"seed": queue.seed_Q[requests], "limit": queue.limit_Q[requests], "block": block}
        _, there = send(arrays, self.device)
        index = there["slots"]
        self.token_S[index] = there["token"]
        self.seed_S[index] = there["seed"]
        self.count_S[index] = there["count"]
        self.prefix_S[index] = there["prefix"]
        self.limit_S[index] = there["limit"]
        self.block_SB[index] = there["block"]
        self.forced_S[index] = 0
        self.alive_S[index] = True

    def _prefill(self, texts: list[tuple[Sequence[int], np.ndarray]]) -> None:
        """Write keys and values of these tokens to their positions in the cache, some texts at a time."""
        while texts:
            total = np.cumsum([len(ids) for ids, _ in texts])
            count = max(1, int(np.searchsorted(total, self.prefill_tokens, side="right")))
            self._prefill_at_once(texts[:count])
            texts = texts[count:]

    def _prefill_at_once(self, texts: list[tuple[Sequence[int], np.ndarray]]) -> None:
        length_P = np.array([len(ids) for ids, _ in texts])
        ids = np.concatenate([np.array(ids, dtype=np.int64) for ids, _ in texts])
        place_M = np.concatenate([places[: len(ids)] for ids, places in texts])
        self.cache.place_R = to_device(place_M, self.device)
        self.cache.reads_prompts = True
        grids = needs_grids(self.device, self.model.dtype)
        self.model.set_attn_implementation(PACKED)
        try:
            self.model.base_model(
                input_ids=to_device(ids[None], self.device),
                past_key_values=self.cache,
                use_cache=True,
                **packed_arguments(length_P, length_P, np.arange(len(ids)), self.device, grids=grids),
            )
        finally:
            self.model.set_attn_implementation(SLOTS)


@cache
def _capturing_stream(device: int) -> torch.cuda.Stream:
    """The same stream for all decoders of a device, since libraries keep a workspace for each stream."""
    return torch.cuda.Stream(device)


def _prefill_tokens(model: Any, free: float | None) -> int:
    """Tokens that are prefilled at once, fewer for models with large activations."""
    if free is None:
        return PREFILL_TOKENS
    config = getattr(model.config, "get_text_config", lambda: model.config)()
    hidden = int(getattr(config, "hidden_size", 0)) or model.get_output_embeddings().weight.shape[1]
    inner = int(getattr(config, "intermediate_size", None) or 4 * hidden)
    token_bytes = (8 * hidden + 4 * inner) * model.dtype.itemsize
    return min(PREFILL_TOKENS, max(FEWEST_PREFILL_TOKENS, int(PREFILL_SHARE * free / token_bytes)))


def slots_problem(model: Any, kernels: StepKernels | None = None) -> str:
    """Why decoding in slots does not reproduce a plain forward pass, found by a trial; an empty string if it does.

    Some caches hold more than keys and values, and some architectures have special attention.
    """
    prompt = [3, 1, 2, 4, 2]
    before = model.config._attn_implementation
    try:
        no_stops = torch.empty(0, dtype=torch.long, device=model.device)
        sizes = {"requests": 1, "prompts": 1, "prompt_room": 5, "new_tokens": NEW_IN_TRIAL}
        decoder = SlotDecoder(model, **sizes, settings=SamplerSettings(), stop_ids=no_stops, kernels=kernels)
        (ended,) = decoder.decode(RequestQueue([Request(prompt, seed=1)], new_tokens=NEW_IN_TRIAL))
    except torch.OutOfMemoryError:
        raise
    except ModelError as error:  # the cache is too small: that is no reason to decode without slots
        raise torch.OutOfMemoryError(f"beside the weights no response of {NEW_IN_TRIAL} tokens fits") from error
    except Exception as error:  # an architecture without slots, or a kernel that does not compile for it
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
