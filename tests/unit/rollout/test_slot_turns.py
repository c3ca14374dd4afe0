"""Turns in slots: answers may come late and in any order."""

from __future__ import annotations

import pytest
import torch

from stalewise.models.loading import EMBEDDED
from stalewise.rollout.engines.embedded import HFSampler
from stalewise.rollout.engines.slot_turns import MOST_GIVEN
from stalewise.rollout.sampler import Request, Response
from stalewise.types import SamplerSettings

ANSWER = [4, 5, 14]
assert len(ANSWER) < MOST_GIVEN  # so that it goes through decoding steps


class Slow:
    """Answers each turn twice, the requests in reverse order and after `polls` calls that were not told to wait."""

    def __init__(self, polls: int) -> None:
        self.polls, self.said, self.waiting, self.left = polls, dict[int, list[str]](), list[int](), polls

    def ended(self, request: int, response: Response) -> None:
        self.said.setdefault(request, []).append(response.text)
        self.waiting.append(request)

    def next(self, *, wait: bool) -> list[tuple[int, list[int]]]:
        if self.left > 0 and not wait:
            self.left -= 1
            return []
        self.left, answered = self.polls, self.waiting[::-1]
        self.waiting = []
        return [(request, ANSWER if len(self.said[request]) < 3 else []) for request in answered]


@pytest.mark.parametrize("polls", [1, 7])
def test_late_answers_change_no_turn(polls: int) -> None:
    said = []
    for patience in (0, polls):
        sampler = HFSampler(
            SamplerSettings(), max_new_tokens=40, device=torch.device("cpu"), dtype=torch.float32, slots=True
        )
        sampler.load(EMBEDDED / "arithmetic")
        requests = [Request(sampler.tokenizer(f"{i}+{i + 7}=")["input_ids"], i) for i in range(10, 40)]
        turns = Slow(patience)
        sampler.sample_turns(requests, sampler.settings, turns)
        assert {len(texts) for texts in turns.said.values()} == {3} and len(turns.said) == len(requests)
        said.append(turns.said)
    assert said[0] == said[1]
