"""The order of requests, what is expected of their lengths, and how many begin."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from stalewise.rollout.engines.paged_cache import SlotBlocks
from stalewise.rollout.engines.request_queue import (
    BegunResponse,
    LengthHistory,
    RequestQueue,
    admitted,
    expected_peak,
    remaining,
)
from stalewise.rollout.sampler import Request

PROMPTS = [[1, 2, 3], [4, 5], [1, 2, 3], [6], [7, 8, 9]]
NONE = np.zeros(0, dtype=np.int64)


def queue_of(prompts: list[list[int]], new_tokens: int = 100, history: LengthHistory | None = None) -> RequestQueue:
    return RequestQueue([Request(prompt, seed) for seed, prompt in enumerate(prompts)], new_tokens, history)


def made_of(count: int) -> BegunResponse:
    return BegunResponse(np.arange(count, dtype=np.int32), np.zeros(count, dtype=np.float32))


def allowed(queue: RequestQueue, blocks: SlotBlocks, expected: float) -> int:
    """How many may begin if all responses are expected to have that length and none runs."""
    expected_P = np.full(len(queue.prompts), expected)
    requests = queue.next(99, expected_P)
    return admitted(queue, blocks, requests, margin=2, running=NONE, tokens=NONE, expected_P=expected_P)


def test_without_knowledge_requests_come_in_order() -> None:
    queue = queue_of(PROMPTS)
    assert queue.prompt_Q.tolist() == [0, 1, 0, 2, 3] and queue.prefix_P.tolist() == [2, 1, 0, 2]
    assert queue.last_P[queue.prompt_Q].tolist() == [prompt[-1] for prompt in PROMPTS]
    assert queue.next(9, queue.expected_lengths(NONE, NONE)).tolist() == [0, 1, 2, 3, 4]
    queue.start(np.array([0, 1, 2]))
    assert queue and queue.next(1, queue.expected_lengths(NONE, NONE)).tolist() == [3]
    queue.start(np.array([3, 4]))
    assert not queue


def test_prompts_whose_earlier_responses_were_long_come_first() -> None:
    history = LengthHistory()
    history.note([(1, 2, 3), (4, 5), (6,)], [10.0, 50.0, 30.0])
    queue = queue_of(PROMPTS, history=history)
    # The last prompt is new: the mean, 30, is expected of it.
    assert queue.expected_lengths(NONE, NONE).tolist() == [10, 50, 30, 30]
    assert queue.next(9, queue.expected_lengths(NONE, NONE)).tolist() == [1, 3, 4, 0, 2]
    history.note([(1, 2, 3)], [90.0])
    assert history.expected([(1, 2, 3), (9,)]).tolist() == pytest.approx([50, np.nan], nan_ok=True)
    assert history.mean == 60


def test_the_oldest_prompts_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stalewise.rollout.engines.request_queue.MOST_REMEMBERED", 2)
    history = LengthHistory()
    history.note([(1,), (2,)], [1.0, 2.0])
    history.note([(1,)], [1.0])
    history.note([(3,)], [3.0])
    assert history.expected([(1,), (2,), (3,)]).tolist() == pytest.approx([1, np.nan, 3], nan_ok=True)
    history.note([], [])


def test_other_responses_to_a_prompt_say_how_long_the_next_is() -> None:
    history = LengthHistory()
    history.note([(1,), (2,), (3,)], [20.0, 20.0, 20.0])
    queue, blocks = queue_of([[1], [1], [2], [2], [3], [3]], history=history), SlotBlocks(6, 9, 99, 4)
    queue.start(np.array([0, 2, 4]))
    queue.leave(np.array([0]))
    queue.end(np.array([0]), np.array([4]), blocks)
    # One ended after 4 tokens: (20 + 4) / 2; one has 60 and goes on: 20 + 60; of the last nothing is known but 20 + 2.
    running, tokens = np.array([2, 4]), np.array([60, 2])
    assert queue.expected_lengths(running, tokens).tolist() == [12, 80, 22]
    assert queue.next(9, queue.expected_lengths(running, tokens)).tolist() == [3, 5, 1]
    assert queue.expected_lengths(running, np.array([99, 2])).max() == 100  # never more than is allowed


def test_what_was_put_back_goes_on_where_it_was() -> None:
    queue = queue_of([[1, 2], [1, 2], [3, 4]])
    queue.start(np.array([0, 1, 2]))
    queue.leave(np.array([1, 2]))
    queue.put_back(1, made_of(40))
    queue.put_back(2, made_of(0))
    assert queue.live_P.tolist() == [1, 0] and queue.made(np.array([1, 2])).tolist() == [40, 0]
    # It has 40 tokens, so 50 are expected of it, whatever the prompt's others say.
    assert queue.next(2, np.array([3.0, 45.0])).tolist() == [1, 2]
    assert queue.next(2, np.array([3.0, 55.0])).tolist() == [2, 1]
    one, other = queue.start(np.array([1, 2]))
    assert one is not None and len(one.ids) == 40 and other is None
    assert not queue and queue.made(np.array([1])).tolist() == [0]


def test_a_prompt_keeps_its_blocks_while_requests_are_open() -> None:
    queue, blocks = queue_of(PROMPTS), SlotBlocks(8, 4, 10, 2)
    for prompt in range(3):
        queue.blocks_of[prompt] = blocks.take(1)
    queue.start(np.array([0, 1]))
    assert queue.missing(np.array([2, 4])).tolist() == [False, True]
    queue.evict(blocks, 8)
    assert list(queue.blocks_of) == [0, 1] and blocks.free == 8  # no slot reads prompt 2
    queue.leave(np.array([0]))
    queue.end(np.array([0]), np.array([5]), blocks)
    assert list(queue.blocks_of) == [0, 1]  # request 2 has the same prompt
    queue.evict(blocks, 10, spared=np.array([2]))
    assert list(queue.blocks_of) == [0, 1]
    queue.start(np.array([2]))
    queue.leave(np.array([1, 2]))
    queue.end(np.array([1, 2]), np.array([5, 7]), blocks)
    assert not queue.blocks_of and blocks.free == 10
    assert queue.mean_lengths().tolist() == [6, 5, 0, 0]


def test_the_peak_is_the_most_that_is_held_at_once() -> None:
    # Before the first ends: 10 + 5 and 0 + 5. Before the second: 20.
    assert expected_peak(np.array([10, 0]), np.array([5, 20])) == 20
    assert expected_peak(np.array([30, 0]), np.array([5, 20])) == 40
    assert expected_peak(NONE, NONE) == 0
    rng = np.random.default_rng(0)
    tokens, left = rng.integers(0, 30, 9), rng.integers(1, 30, 9)
    by_step = [sum(t + step for t, r in zip(tokens, left, strict=True) if r >= step) for step in range(31)]
    assert expected_peak(tokens, left) == max(by_step)


def test_a_response_that_is_longer_than_expected_goes_on_for_a_while() -> None:
    left = remaining(np.array([50.0, 50.0, 50.0]), np.array([10, 80, 98]), 100)
    assert left.tolist() == [40, 20, 2]


def test_as_many_begin_as_will_probably_fit() -> None:
    prompts = [[1, 2, 3, 4, 5]] * 20
    # 4 tokens of the prompt are a block. Each of n ends with 38 tokens and two spare: (38 + 2) n <= 99 × 4, n <= 9.
    assert allowed(queue_of(prompts), SlotBlocks(20, 25, 100, 4), 38) == 9
    assert allowed(queue_of(prompts), SlotBlocks(20, 25, 100, 4), 8) == 20
    # No more than find a block now: 5 - 1.
    assert allowed(queue_of(prompts), SlotBlocks(20, 25, 5, 4), 1) == 4
    # One always, if none runs.
    assert allowed(queue_of(prompts), SlotBlocks(20, 25, 26, 4), 100) == 1
    # All, if there is room for the longest.
    assert allowed(queue_of(prompts), SlotBlocks(20, 25, 20 * 25 + 1, 4), 100) == 20


def test_beside_those_that_run_fewer_begin() -> None:
    queue, blocks = queue_of([[1, 2, 3, 4, 5]] * 20), SlotBlocks(20, 25, 100, 4)
    expected_P, requests = np.array([38.0]), np.arange(6, 20)
    running, tokens = np.arange(6), np.full(6, 18)
    queue.blocks_of[0] = blocks.take(1)
    queue.start(running)
    state: dict[str, Any] = {"running": running, "tokens": tokens, "expected_P": expected_P, "margin": 2}
    # When the six end they hold 6 × 40, and n others 22 each; when the others end, 40 n: 240 + 22 n <= 396, n <= 7.
    assert admitted(queue, blocks, requests, **state) == 7
    state["tokens"] = np.full(6, 60)
    assert admitted(queue, blocks, requests, **state) == 0  # they will be 75


def test_prompts_that_no_slot_reads_make_room_for_the_first() -> None:
    queue, blocks = queue_of([[1, 2, 3, 4, 5], [9, 8, 7, 6, 5]], new_tokens=8), SlotBlocks(2, 2, 3, 4)
    queue.blocks_of = {0: blocks.take(1), 1: blocks.take(1)}
    queue.blocks_of[0], queue.blocks_of[1] = queue.blocks_of[0], np.concatenate([queue.blocks_of[1], blocks.take(1)])
    expected_P = np.array([8.0, 8.0])
    state: dict[str, Any] = {"running": NONE, "tokens": NONE, "expected_P": expected_P, "margin": 2}
    assert admitted(queue, blocks, np.array([0, 1]), **state) == 1
    assert not queue.blocks_of and blocks.free == 3
