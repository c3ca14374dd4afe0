"""Places of prompts and tokens in the cache of a slot decoder."""

from __future__ import annotations

import numpy as np
import torch

from stalewise.rollout.engines.slot_cache import RequestQueue, SlotCache
from stalewise.rollout.sampler import Request


def test_what_is_written_to_the_cache_lies_where_it_was_to_lie() -> None:
    torch.manual_seed(0)
    shapes = [(2, 4, 6), (3, 8, 8)]  # heads, and numbers of a head's keys and values, in each layer
    cache = SlotCache(9, [(torch.empty(1, k, 1, d), torch.empty(1, k, 1, e)) for k, d, e in shapes])
    assert cache.nbytes == 9 * 4 * (2 * 4 + 2 * 6 + 2 * 3 * 8)
    for layer, (k, d, e) in enumerate(shapes):
        prompt = torch.randn(1, k, 3, d), torch.randn(1, k, 3, e)
        cache.place_R, cache.reads_prompts = torch.tensor([7, 4, 5]), True
        assert all(x is y for x, y in zip(cache.update(*prompt, layer), prompt, strict=True))
        new = torch.randn(2, k, 1, d), torch.randn(2, k, 1, e)
        cache.place_R, cache.reads_prompts = torch.tensor([8, 0]), False
        for stored, read, written in zip(cache.update(*new, layer), prompt, new, strict=True):
            expected = torch.zeros_like(stored)
            expected[[7, 4, 5]] = read[0].transpose(0, 1)
            expected[[8, 0]] = written[:, :, 0]
            assert torch.equal(stored, expected)


def test_a_place_is_free_when_the_last_response_to_its_prompt_has_ended() -> None:
    prompts = [[1, 2, 3], [4, 5], [1, 2, 3], [6], [7, 8, 9]]
    waiting = RequestQueue([Request(prompt, seed) for seed, prompt in enumerate(prompts)])
    waiting.set_places(3)
    read, places = waiting.next_prompts(2)  # tokens: the first prompt has them, but for its last
    assert read == [(1, 2)] and len(set(places.tolist())) == 1
    read, more = waiting.next_prompts(100)
    assert read == [(4,), ()] and waiting.free == []  # room for three
    assert waiting.next_prompts(100)[0] == []
    assert waiting.take(3).tolist() == [0, 2, 1]
    waiting.end(np.array([0]))
    assert waiting.free == []  # request 2 has the same prompt
    waiting.end(np.array([1, 2]))
    assert sorted(waiting.free) == sorted([*places.tolist(), more[0]])
    assert waiting.next_prompts(100)[0] == [(7, 8)]
    assert waiting.take(9).tolist() == [3, 4] and not waiting
    assert waiting.last_P[waiting.prompt_Q].tolist() == [prompt[-1] for prompt in prompts]


def test_a_prompt_that_is_longer_than_what_is_read_at_once_is_read_alone() -> None:
    waiting = RequestQueue([Request([1] * 50, 0), Request([2] * 5, 1)])
    waiting.set_places(2)
    assert [len(prompt) for prompt in waiting.next_prompts(10)[0]] == [49]
    assert [len(prompt) for prompt in waiting.next_prompts(10)[0]] == [4]
