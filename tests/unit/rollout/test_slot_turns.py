"""Turns in slots: answers may come late and in any order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from stalewise.models import EMBEDDED
from stalewise.rollout.engines import paged_cache, slot_decode
from stalewise.rollout.engines.embedded import HFSampler
from stalewise.rollout.engines.paged_cache import SlotBlocks
from stalewise.rollout.engines.slot_turns import MOST_GIVEN, SlotTurns
from stalewise.rollout.sampler import Request, Response
from stalewise.types import SamplerSettings

ANSWER = [4, 5, 14]
assert len(ANSWER) < MOST_GIVEN  # so that it goes through decoding steps


class Slow:
    """Answers each request twice if there is room, in reverse order and after `polls` calls that were not to wait."""

    def __init__(self, polls: int, room: int) -> None:
        self.polls, self.said, self.waiting, self.left = polls, dict[int, list[str]](), list[int](), polls
        self.whole, self.room = room, dict[int, int]()

    def ended(self, request: int, response: Response) -> None:
        self.said.setdefault(request, []).append(response.text)
        self.room[request] = self.room.get(request, self.whole) - len(response.token_ids) - len(ANSWER)
        self.waiting.append(request)

    def next(self, *, wait: bool) -> list[tuple[int, list[int]]]:
        if self.left > 0 and not wait:
            self.left -= 1
            return []
        self.left, answered = self.polls, self.waiting[::-1]
        self.waiting = []
        return [(i, ANSWER if len(self.said[i]) < 3 and self.room[i] > 0 else []) for i in answered]


@pytest.mark.parametrize(("polls", "steps"), [(1, 2), (7, 2), (2, 8)])
def test_late_answers_change_no_turn(polls: int, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    said, at_once, run = [], set[int](), slot_decode.SlotDecoder.run

    def watched_run(decoder: Any, rows: int, slots: Any, steps: int) -> None:
        at_once.add(steps)
        run(decoder, rows, slots, steps)

    monkeypatch.setattr(slot_decode.SlotDecoder, "run", watched_run)
    for patience in (0, polls):
        if patience and steps > 2:  # as many as between two checks of long responses
            monkeypatch.setattr(slot_decode, "FINE_ROWS", 1)
            monkeypatch.setattr(paged_cache, "BLOCK_SIZE", 4)  # so that every run of steps needs more blocks
        tokens, policy = (40, "arithmetic") if steps == 2 else (60, "arithmetic-steps")  # the latter has longer turns
        sampler = HFSampler(
            SamplerSettings(), max_new_tokens=tokens, device=torch.device("cpu"), dtype=torch.float32, slots=True
        )
        sampler.load(EMBEDDED / policy)
        requests = [Request(sampler.tokenizer(f"{i}+{i + 7}=")["input_ids"], i) for i in range(10, 40)]
        turns = Slow(patience, tokens)
        at_once.clear()
        sampler.sample_turns(requests, sampler.settings, turns)
        assert at_once == {2}  # however long responses may be
        assert sampler._decoder is not None and sampler._decoder.steps_per_check == (steps if patience else 2)
        assert len(turns.said) == len(requests)
        assert steps > 2 or {len(texts) for texts in turns.said.values()} == {3}
        said.append(turns.said)
    assert said[0] == said[1]


def test_slots_that_wait_for_an_answer_are_given_up_where_blocks_run_short(monkeypatch: pytest.MonkeyPatch) -> None:
    given_up, lacking, steps, give_up = [], SlotBlocks.lacking, SlotTurns._steps, SlotTurns._give_up
    short: list[SlotTurns] = []

    def scarce(self: SlotBlocks, slots: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        is_short = short and short[0].slot_of
        return np.array([self.blocks + 1]) if is_short else lacking(self, slots, wanted)

    def steps_with_few_blocks(self: SlotTurns) -> Any:
        short[:] = [self]
        try:
            return steps(self)
        finally:
            short.clear()

    def watched(self: SlotTurns, request: int) -> None:
        given_up.extend([request] * len(short))
        give_up(self, request)

    said: list[dict[int, list[str]]] = []
    for patience in (0, 7):
        sampler = HFSampler(
            SamplerSettings(), max_new_tokens=40, device=torch.device("cpu"), dtype=torch.float32, slots=True
        )
        sampler.load(EMBEDDED / "arithmetic")
        requests = [Request(sampler.tokenizer(f"{i}+{i + 7}=")["input_ids"], i) for i in range(10, 40)]
        turns = Slow(patience, 40)
        sampler.sample_turns(requests, sampler.settings, turns)
        said.append(turns.said)
        monkeypatch.setattr(SlotBlocks, "lacking", scarce)
        monkeypatch.setattr(SlotTurns, "_steps", steps_with_few_blocks)
        monkeypatch.setattr(SlotTurns, "_give_up", watched)
    assert len(given_up) > len(requests)  # in the second round, several turns each
    assert said[0] == said[1]
