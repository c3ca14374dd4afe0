"""Requests that wait for a slot: which is next, how long its response will probably be, and where its prompt is.

All requests of a pool are known beforehand. Those whose responses will probably be long come first, so that the last
responses to end are not long ones that run alone. How long is learned from the prompt's other responses and from those
to earlier policies. The order changes no response: each draws its own random numbers. Axes: Q requests, P distinct
prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stalewise.rollout.engines.paged_cache import FIRST_GUESS, SlotBlocks, blocks_for
from stalewise.rollout.sampler import Request

PRIOR_RESPONSES = 8  # the mean length of earlier pools has the weight of this many responses
MOST_REMEMBERED = 1 << 18  # prompts
NO_BLOCKS = np.zeros(0, dtype=np.int32)
OVERTIME = 0.25  # a response already longer than expected is assumed to need at least this fraction of its length again


class LengthHistory:
    """Mean length of the responses to each prompt, by the policies so far."""

    def __init__(self) -> None:
        self.mean: float | None = None
        self._mean_of: dict[int, float] = {}  # by hash: a prompt may have thousands of tokens

    def expected(self, prompts: Sequence[tuple[int, ...]]) -> np.ndarray:
        """Expected lengths; NaN for prompts that were never asked."""
        return np.array([self._mean_of.get(hash(prompt), np.nan) for prompt in prompts])

    def note(self, prompts: Sequence[tuple[int, ...]], means: Sequence[float]) -> None:
        """The mean lengths of new responses; a prompt's newest count as much as all before."""
        if not len(prompts):
            return
        mean = float(np.mean(means))
        self.mean = mean if self.mean is None else (self.mean + mean) / 2
        for prompt, new in zip(prompts, means, strict=True):
            before = self._mean_of.pop(hash(prompt), new)  # popped: the newest are last
            self._mean_of[hash(prompt)] = (before + new) / 2
        for oldest in list(self._mean_of)[: max(0, len(self._mean_of) - MOST_REMEMBERED)]:
            del self._mean_of[oldest]


@dataclass(frozen=True, slots=True)
class BegunResponse:
    """Tokens and log-probabilities of a response that had to make room."""

    ids: np.ndarray
    logp: np.ndarray


class RequestQueue:
    """Requests waiting for a slot, grouped by prompt.

    A prompt is prefilled but for its last token, which is the input of each response's first step. It keeps its blocks
    while requests for it are open, unless others need them and no slot reads them.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        new_tokens: int,
        history: LengthHistory | None = None,
        limits: Sequence[int] | None = None,
    ) -> None:
        """`limits`: the most tokens of each response, if fewer than `new_tokens`; nothing is scheduled by them."""
        by_prompt: dict[tuple[int, ...], list[int]] = {}
        for index, request in enumerate(requests):
            by_prompt.setdefault(tuple(request.prompt_ids), []).append(index)
        history = history or LengthHistory()
        self.prompts, self.new_tokens = list(by_prompt), new_tokens
        self.seed_Q = np.array([request.seed for request in requests], dtype=np.int64)
        self.prompt_Q = np.empty(len(requests), dtype=np.int64)
        for prompt, members in enumerate(by_prompt.values()):
            self.prompt_Q[members] = prompt
        self.prefix_P = np.array([len(prompt) - 1 for prompt in self.prompts])
        self.last_P = np.array([prompt[-1] for prompt in self.prompts])
        self.open_P = np.array([len(members) for members in by_prompt.values()])  # requests that have not ended
        self.live_P = np.zeros(len(self.prompts), dtype=np.int64)  # slots that read the prompt
        self.blocks_of: dict[int, np.ndarray] = {}  # of prompts that are prefilled
        self.begun: dict[int, BegunResponse] = {}  # by request: to be continued
        self.waiting_Q = np.ones(len(requests), dtype=bool)
        self.limit_Q = np.array([new_tokens] * len(requests) if limits is None else limits, dtype=np.int64)
        self._guess = history.mean or FIRST_GUESS
        self._prior_P = history.expected(self.prompts)
        self._ended_P = np.zeros(len(self.prompts), dtype=np.int64)
        self._tokens_P = np.zeros(len(self.prompts), dtype=np.int64)  # of ended and of begun responses
        for index, request in enumerate(requests):
            if request.begun:  # its earlier turns
                ids = np.array(request.begun, dtype=np.int32)
                self.put_back(index, BegunResponse(ids, np.zeros(len(ids), dtype=np.float32)))

    def __bool__(self) -> bool:
        return bool(self.waiting_Q.any())

    def expected_lengths(self, running: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Probable length of a response to each prompt, given those requests with so many tokens so far, [P].

        Tokens made per response ended, which counts the unfinished ones rightly if any token may be the last.
        """
        made_P = self._tokens_P + np.bincount(self.prompt_Q[running], tokens, minlength=len(self.prompts))
        usual = (PRIOR_RESPONSES * self._guess + made_P.sum()) / (PRIOR_RESPONSES + self._ended_P.sum())
        prior_P = np.where(np.isnan(self._prior_P), min(usual, self.new_tokens), self._prior_P)
        return np.clip((prior_P + made_P) / (1 + self._ended_P), 1, self.new_tokens)

    def next(self, most: int, expected_P: np.ndarray) -> np.ndarray:
        """The next requests: longest expected first, those of one prompt together, else in order."""
        waiting = np.flatnonzero(self.waiting_Q)
        expected = expected_P[self.prompt_Q[waiting]]
        if self.begun:  # they are at least as long as they are
            begun = np.array(list(self.begun))
            of_waiting = np.searchsorted(waiting, begun)
            expected[of_waiting] = np.maximum(expected[of_waiting], (1 + OVERTIME) * self.made(begun))
        return waiting[np.argsort(-expected, kind="stable")][:most]

    def made(self, requests: np.ndarray) -> np.ndarray:
        """Tokens that these requests have from before."""
        if not self.begun:
            return np.zeros(len(requests), dtype=np.int64)
        begun = (self.begun.get(int(request)) for request in requests)
        return np.array([0 if response is None else len(response.ids) for response in begun], dtype=np.int64)

    def start(self, requests: np.ndarray) -> list[BegunResponse | None]:
        """These requests get slots; what they have from before."""
        self.waiting_Q[requests] = False
        np.add.at(self.live_P, self.prompt_Q[requests], 1)
        begun: list[BegunResponse | None] = [self.begun.pop(int(request), None) for request in requests]
        for request, response in zip(requests, begun, strict=True):
            if response is not None:
                self._tokens_P[self.prompt_Q[request]] -= len(response.ids)
        return begun

    def leave(self, requests: np.ndarray) -> None:
        """The slots of these requests read their prompts no more."""
        np.subtract.at(self.live_P, self.prompt_Q[requests], 1)

    def put_back(self, request: int, response: BegunResponse) -> None:
        """This request waits again, to go on where it was."""
        self.waiting_Q[request] = True
        if len(response.ids):
            self.begun[request] = response
            self._tokens_P[self.prompt_Q[request]] += len(response.ids)

    def end(self, requests: np.ndarray, lengths: np.ndarray, blocks: SlotBlocks) -> None:
        """The responses have ended; prompts without open requests free their blocks."""
        prompts = self.prompt_Q[requests]
        np.subtract.at(self.open_P, prompts, 1)
        np.add.at(self._ended_P, prompts, 1)
        np.add.at(self._tokens_P, prompts, lengths)
        for prompt in set(prompts[self.open_P[prompts] == 0].tolist()):
            blocks.give(self.blocks_of.pop(prompt, NO_BLOCKS))

    def evict(self, blocks: SlotBlocks, wanted: int, spared: np.ndarray = NO_BLOCKS) -> None:
        """Free blocks of prompts that no slot reads, until so many are free; they are prefilled again when needed.

        Prompts of the `spared` requests are left.
        """
        spare = set(self.prompt_Q[spared].tolist())
        for prompt in [p for p in self.blocks_of if self.live_P[p] == 0 and p not in spare]:
            if blocks.free >= wanted:
                return
            blocks.give(self.blocks_of.pop(prompt))

    def missing(self, requests: np.ndarray) -> np.ndarray:
        """Which of these requests are the first of a prompt that is not prefilled."""
        is_there = [prompt in self.blocks_of for prompt in self.prompt_Q[requests].tolist()]
        return self.firsts(requests) & ~np.array(is_there, dtype=bool)

    def firsts(self, requests: np.ndarray) -> np.ndarray:
        """Which of these requests are the first of their prompt."""
        is_first = np.zeros(len(requests), dtype=bool)
        is_first[np.unique(self.prompt_Q[requests], return_index=True)[1]] = True
        return is_first

    def mean_lengths(self) -> np.ndarray:
        """Mean length of the responses to each prompt, all of which have ended."""
        return self._tokens_P / np.maximum(self._ended_P, 1)


def remaining(expected: np.ndarray, tokens: np.ndarray, new_tokens: int) -> np.ndarray:
    """Tokens that responses with so many tokens probably still get."""
    return np.minimum(np.maximum(expected - tokens, OVERTIME * tokens), new_tokens - tokens)


def expected_peak(tokens: np.ndarray, left: np.ndarray) -> float:
    """Most tokens that will be held at once by responses that have `tokens` and get `left` more, one in each step.

    >>> expected_peak(np.array([10, 0]), np.array([5, 20]))
    20.0
    """
    order = np.argsort(left)
    tokens, left = tokens[order], left[order]
    # Just before each response ends, those that have not ended hold what they have now and as many new tokens.
    return float(np.max(tokens[::-1].cumsum()[::-1] + left * np.arange(len(left), 0, -1), initial=0))


def admitted(
    queue: RequestQueue,
    blocks: SlotBlocks,
    requests: np.ndarray,
    *,
    margin: int,
    running: np.ndarray,
    tokens: np.ndarray,
    expected_P: np.ndarray,
) -> int:
    """How many of these requests, in order, can begin beside those running; at least one if none runs.

    There must be free blocks for their prompts, for the tokens they have and `margin` more; and probably there will be
    for all to end.
    """
    made, size, prefix_P = queue.made(requests), blocks.block_size, queue.prefix_P
    fitting = _fitting(queue, blocks, requests, made + margin)
    now, prompt = np.concatenate([tokens, made]), queue.prompt_Q[np.concatenate([running, requests])]
    left = remaining(expected_P[prompt], now, queue.new_tokens)
    # Of the last block of each, half is empty on average.
    now = np.minimum(now + size / 2, blocks_for(queue.new_tokens, size) * size - left)
    read = blocks_for(prefix_P[queue.live_P > 0], size).sum()
    of_prompt = np.where(queue.firsts(requests) & (queue.live_P[prompt[len(running) :]] == 0), 1, 0)
    of_prompt *= blocks_for(prefix_P[prompt[len(running) :]], size)

    def fits(count: int) -> bool:
        these = len(running) + count
        return expected_peak(now[:these], left[:these]) <= (blocks.blocks - read - of_prompt[:count].sum()) * size

    least, most = min(fitting, 0 if len(running) else 1), fitting
    if fits(most):
        return most
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if fits(middle) else (least, middle)
    return least


def _fitting(queue: RequestQueue, blocks: SlotBlocks, requests: np.ndarray, tokens: np.ndarray) -> int:
    """How many of these requests, in order, find blocks now; at least one if no slot reads a prompt."""
    if not len(requests):
        return 0

    def needed() -> np.ndarray:
        prefix = np.where(queue.missing(requests), queue.prefix_P[queue.prompt_Q[requests]], 0)
        both = (blocks_for(x, blocks.block_size) for x in (prefix, np.minimum(tokens, queue.new_tokens)))
        return np.cumsum(sum(both))

    before = needed()
    if before[-1] > blocks.free:
        queue.evict(blocks, int(before[-1]), requests)
    fitting = int(np.searchsorted(before, blocks.free, side="right"))
    if fitting or queue.live_P.any():
        return fitting
    queue.evict(blocks, blocks.blocks)  # prompts of requests that are not the first make room, too
    return int(np.searchsorted(needed(), blocks.free, side="right"))
