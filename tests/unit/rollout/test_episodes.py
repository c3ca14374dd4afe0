"""Episodes: tokens in, tokens out; every way of sampling gives the same; limits; what is said of bad templates."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.tool_gsm8k import TEMPLATE as CHATML
from benchmarks.tool_gsm8k import chat_tokenizer

from sampling import steps_sampler
from stalewise.errors import ModelError
from stalewise.models import EMBEDDED
from stalewise.models.loading import load_model
from stalewise.rollout.engines import paged_cache, slot_turns
from stalewise.rollout.engines.embedded import HFSampler
from stalewise.rollout.episodes import CallJournal, TurnEncoder, encode_first, episode_rewards, play_episodes
from stalewise.rollout.sampler import Request, Response, sample_in_rounds
from stalewise.tasks import make_task
from stalewise.tasks.base import CHAT
from stalewise.tasks.environments import ChatMessage, Episode
from stalewise.tasks.environments.play import EnvironmentPool, TaskScore
from stalewise.types import POLICY, FinishReason, Prompt, SamplerSettings, Segment

TURNS = 4
CPU = torch.device("cpu")


class Echo:
    """Answers each turn with digits that depend on it, for some turns."""

    local = True

    def __init__(self, turns: int = TURNS, length: int = 3) -> None:
        self.turns, self.length, self.heard = turns, length, list[str]()

    def reset(self, row: Prompt) -> list[ChatMessage]:
        return [{"role": "user", "content": row.text}]

    def step(self, response: str) -> list[ChatMessage] | None:
        self.heard.append(response)
        if len(self.heard) == self.turns:
            return None
        return [{"role": "tool", "content": f"{sum(map(ord, response)) % 10**self.length:0{self.length}d}="}]

    def score(self, episode: Episode) -> dict[str, float]:
        return {"reward": float(len(episode.turns)), "heard": float(len(self.heard))}


def sampler_of(*, slots: bool, new_tokens: int = 40) -> HFSampler:
    sampler = HFSampler(SamplerSettings(), max_new_tokens=new_tokens, device=CPU, dtype=torch.float32, slots=slots)
    sampler.load(EMBEDDED / "arithmetic")
    return sampler


def play(sampler: Any, count: int = 24, rounds: bool = False, **options: Any) -> list[Response]:
    task = make_task("arithmetic")
    pool = EnvironmentPool(f"{__name__}:Echo", options)
    prompts, ids = encode_first(pool, task.prompts(0, count), sampler.tokenizer)
    requests = [Request(one, seed) for seed, one in enumerate(ids)]
    if rounds:
        sampler = _Plain(sampler)
    return play_episodes(pool, prompts, requests, range(count), sampler=sampler, settings=SamplerSettings())


class _Plain:
    """A sampler without turns of its own, as vLLM and servers are: prompts and earlier turns go in as tokens."""

    def __init__(self, own: HFSampler) -> None:
        self.max_new_tokens, self.tokenizer, self._own = own.max_new_tokens, own.tokenizer, own

    def sample(self, requests: Any, settings: Any) -> list[Response]:
        return self._own.sample(requests, settings)


def check_tokens(responses: list[Response], prompts: list[list[int]]) -> None:
    """Behaviour log-probabilities are those of a plain forward pass over the same tokens; 0 for those from outside."""
    model = load_model(str(EMBEDDED / "arithmetic"), device=CPU)
    for response, prompt in zip(responses, prompts, strict=True):
        ids = torch.tensor([[*prompt, *response.token_ids.tolist()]])
        with torch.no_grad():
            logp = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        logp = logp.gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()
        assert response.episode is not None
        segments = response.episode.segments or (Segment(POLICY, len(response.token_ids)),)
        own = np.repeat([one.by == POLICY for one in segments], [one.tokens for one in segments])
        np.testing.assert_allclose(response.logp[own], logp[own], atol=2e-4)
        assert not response.logp[~own].any()


def test_every_way_of_sampling_gives_the_same_episodes(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, slots = sampler_of(slots=False), sampler_of(slots=True)
    assert not slots.slots_problem
    expected = play(plain)
    assert {len(one.episode.segments) for one in expected if one.episode} >= {2 * TURNS - 1}
    prompts = [plain.tokenizer(prompt.text)["input_ids"] for prompt in make_task("arithmetic").prompts(0, 24)]
    check_tokens(expected, prompts)
    monkeypatch.setattr(slot_turns, "MOST_GIVEN", 0)  # answers are prefilled with all tokens before them
    prefilled = play(sampler_of(slots=True))
    monkeypatch.undo()
    for found in (play(slots), play(plain, rounds=True), play(slots, rounds=True), prefilled):
        for one, other in zip(expected, found, strict=True):
            assert one.token_ids.tolist() == other.token_ids.tolist() and one.episode == other.episode
            np.testing.assert_allclose(one.logp, other.logp, atol=2e-4)


def test_slots_keep_what_was_computed_and_only_the_answers_are_filled_in(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = sampler_of(slots=True)
    prefilled = list[int]()
    real = sampler._slot_decoder

    def spy(*arguments: Any) -> Any:
        decoder = real(*arguments)
        prefill = decoder._prefill
        decoder._prefill = lambda texts: (prefilled.append(sum(len(ids) for ids, _ in texts)), prefill(texts))[1]
        return decoder

    monkeypatch.setattr(sampler, "_slot_decoder", spy)
    play(sampler)
    prompts = {prompt.text for prompt in make_task("arithmetic").prompts(0, 24)}
    assert sum(prefilled) == sum(len(text) - 1 for text in prompts)  # prompts alone, each once


def test_the_cpu_prefills_only_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = sampler_of(slots=False)
    widths = list[int]()
    forward = sampler.model.forward

    def spy(input_ids: Any, **more: Any) -> Any:
        widths.append(input_ids.shape[1])
        return forward(input_ids=input_ids, **more)

    monkeypatch.setattr(sampler.model, "forward", spy)
    play(sampler, length=3)
    # The prompts (6 characters), then per turn the end token of the last one and an answer of 4 characters.
    assert sorted(width for width in widths if width > 1) == [5, 5, 5, 6]


def test_few_blocks_change_no_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = play(sampler_of(slots=True), count=20)
    monkeypatch.setattr(paged_cache, "MOST_BLOCKS", 14)
    found = play(sampler_of(slots=True), count=20)
    for one, other in zip(expected, found, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist() and one.episode == other.episode


def test_an_episode_that_outgrows_its_tokens_ends_with_length() -> None:
    for slots in (False, True):
        responses = play(sampler_of(slots=slots, new_tokens=14), length=5)
        cut = [one for one in responses if one.finish_reason is FinishReason.LENGTH]
        assert cut and all(len(one.token_ids) <= 14 for one in responses)
        for one in cut:  # it ends with the policy's own tokens, and is scored
            assert one.episode is not None and one.episode.reward is not None and one.episode.reward.value >= 1
            assert not one.episode.segments or one.episode.segments[-1].by == POLICY


def test_turns_are_limited() -> None:
    sampler, task = sampler_of(slots=False), make_task("arithmetic")
    pool = EnvironmentPool(f"{__name__}:Echo", {"turns": 9}, max_turns=2)
    prompts, ids = encode_first(pool, task.prompts(0, 4), sampler.tokenizer)
    requests = [Request(one, seed) for seed, one in enumerate(ids)]
    options = {"sampler": sampler, "settings": SamplerSettings()}
    for response in play_episodes(pool, prompts, requests, range(4), **options):
        assert response.finish_reason is FinishReason.LENGTH
        assert response.episode is not None and response.episode.reward is not None
        assert dict(response.episode.reward.parts) == {"heard": 2.0} and response.episode.reward.value == 2


class Merging:
    """A tokenizer for which re-encoding differs: it merges pairs that a policy may sample as two tokens."""

    eos_token, name_or_path, chat_template = "~", "merging", ""
    tokens = ("~", "a", "b", "ab", "c")

    def __call__(self, text: Any, **_: Any) -> dict[str, Any]:
        if not isinstance(text, str):
            return {"input_ids": [self(one)["input_ids"] for one in text]}
        ids = list[int]()
        while text:
            best = max((token for token in self.tokens if text.startswith(token)), key=len)
            ids.append(self.tokens.index(best))
            text = text[len(best) :]
        return {"input_ids": ids}

    def batch_decode(self, several: Any, **_: Any) -> list[str]:
        return ["".join(self.tokens[token] for token in ids if token) for ids in several]


class Spelling:
    """Says "a" then "b" as two tokens, and remembers what it was given."""

    max_new_tokens, tokenizer = 20, Merging()

    def __init__(self) -> None:
        self.contexts = defaultdict[int, list[list[int]]](list)

    def sample(self, requests: Any, settings: Any) -> list[Response]:
        made = []
        for request in requests:
            self.contexts[request.seed].append(request.context)
            ids = np.array([1, 2, 0], dtype=np.int32)
            made.append(Response(ids, np.full(3, -0.5, np.float32), "ab", FinishReason.STOP))
        return made


class Says:
    local = True

    def reset(self, row: Prompt) -> list[ChatMessage]:
        self.left = 2
        return [{"role": "user", "content": row.text}]

    def step(self, response: str) -> list[ChatMessage] | None:
        assert response == "ab"
        self.left -= 1
        return [{"role": "tool", "content": "abc"}] if self.left else None

    def score(self, episode: Episode) -> TaskScore:
        return TaskScore({"said": 1.0})


def test_what_was_sampled_is_never_encoded_again() -> None:
    assert Merging()("ab")["input_ids"] == [3] != [1, 2]  # re-encoding would differ
    sampler, pool = Spelling(), EnvironmentPool(f"{__name__}:Says")
    prompts, ids = encode_first(pool, [Prompt("p", "ab", "x")], sampler.tokenizer)
    made = play_episodes(pool, prompts, [Request(ids[0], 7)], [0], sampler=sampler, settings=SamplerSettings())  # pyright: ignore[reportArgumentType]
    assert sampler.contexts[7] == [[3], [3, 1, 2, 0, 3, 4]]  # a, b, end as sampled; the tool's text encoded by itself
    assert made[0].token_ids.tolist() == [1, 2, 0, 3, 4, 1, 2, 0]
    assert made[0].episode is not None
    assert [tuple(one) for one in made[0].episode.segments] == [("policy", 3), ("tool", 2), ("policy", 3)]
    task = make_task("arithmetic")
    (reward,) = episode_rewards([Prompt("p", "ab", "ab")], made, task.verifier)
    assert (reward.value, dict(reward.parts)) == (1.0, {"turns": 2.0, "correct": 1.0, "format": 0.0, "said": 1.0})


NO_TOOL = CHATML.replace("{{ '<|im_start|>'", "{% if m['role'] != 'tool' %}{{ '<|im_start|>'", 1).replace(
    "'<|im_end|>\n' }}", "'<|im_end|>\n' }}{% endif %}", 1
)
REFUSES = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ m['content'] }}{% endfor %}"
)


def test_a_chat_template_writes_what_stands_between_turns() -> None:
    encoder, prompt = TurnEncoder(chat_tokenizer(CHATML)), Prompt("p", "hi", "", CHAT)
    ids = encoder.outside(prompt, [{"role": "tool", "content": "42"}], ended=True)
    text = encoder.tokenizer.decode(ids)
    assert text == "\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n"
    cut = encoder.outside(prompt, [{"role": "user", "content": "42"}], ended=False)
    assert encoder.tokenizer.decode(cut).startswith("<|im_end|>\n<|im_start|>user")


@pytest.mark.parametrize(("template", "why"), [(NO_TOOL, "leaves out"), (REFUSES, "no tools")])
def test_a_template_without_tools_is_refused_with_what_to_do(template: str, why: str) -> None:
    encoder, prompt = TurnEncoder(chat_tokenizer(template)), Prompt("p", "hi", "", CHAT)
    with pytest.raises(ModelError, match=rf'(?s)cannot express messages of the role tool.*{why}.*role = "user"'):
        encoder.outside(prompt, [{"role": "tool", "content": "42"}], ended=True)


def test_the_journal_has_every_call_and_notices_other_answers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sampler, task, path = sampler_of(slots=False), make_task("arithmetic"), tmp_path / "calls.jsonl"

    def once(length: int) -> None:
        pool = EnvironmentPool(f"{__name__}:Echo", {"length": length})
        prompts, ids = encode_first(pool, task.prompts(0, 3), sampler.tokenizer)
        requests = [Request(one, seed) for seed, one in enumerate(ids)]
        options = {"sampler": sampler, "settings": SamplerSettings(), "journal": CallJournal(path)}
        play_episodes(pool, prompts, requests, range(100, 103), **options)

    once(length=2)
    calls = [call for line in path.read_text().splitlines() for call in json.loads(line)["calls"]]
    assert {call["rollout"] for call in calls} == {100, 101, 102}
    assert {call["turn"] for call in calls} >= {1, 2}
    once(length=2)  # the same answers: nothing is said
    assert "differently" not in caplog.text
    once(length=3)
    assert "answered differently than before the run was interrupted" in caplog.text


def test_the_sampler_of_the_steps_policy_is_unchanged_by_turns() -> None:  # one turn, as before
    sampler = steps_sampler()
    requests = [Request(sampler.tokenizer("7+8-5=")["input_ids"], seed) for seed in range(8)]
    texts = [response.text for response in sampler.sample(requests)]
    heard = dict[int, Response]()

    class Once:
        def ended(self, request: int, response: Response) -> None:
            heard[request] = response

        def next(self, *, wait: bool) -> list[tuple[int, list[int]]]:
            return []

    sample_in_rounds(sampler, requests, sampler.settings, Once())
    assert [heard[number].text for number in range(8)] == texts


class Reciting:
    """Says what it is told to, one text after the other, in tokens of its own."""

    max_new_tokens = 4000

    def __init__(self, tokenizer: Any, *turns: str) -> None:
        self.tokenizer, self.turns, self.heard = tokenizer, turns, list[str]()

    def sample(self, requests: Any, settings: Any) -> list[Response]:
        made = list[Response]()
        for request in requests:
            context = self.tokenizer.decode(request.context)
            self.heard.append(context)
            text = self.turns[context.count("<|im_start|>assistant") - 1]
            ids = [*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id]
            made.append(Response(np.array(ids, np.int32), np.full(len(ids), -0.5, np.float32), text, FinishReason.STOP))
        return made


def test_a_python_tool_answers_from_the_sandbox_and_the_verifier_scores_the_last_turn(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"problem": "What is 6*7?", "answer": "42"}) + "\n")
    options = {"environment": "python", "environment_options": {"workers": 1}, "held_out": 0.0}
    task = make_task("jsonl", path=str(rows), chat=True, **options)
    pool: Any = task.environment  # pyright: ignore[reportAttributeAccessIssue]
    hostile = f"```python\nprint(open({str(rows)!r}).read())\n```"
    sampler = Reciting(chat_tokenizer(CHATML), hostile, "```python\nprint(6*7)\n```", "So it is 42.")
    try:
        prompts, ids = encode_first(pool, task.prompts(0, 1), sampler.tokenizer)
        (made,) = play_episodes(
            pool,
            prompts,
            [Request(ids[0], 0)],
            [0],
            sampler=sampler,  # pyright: ignore[reportArgumentType]
            settings=SamplerSettings(),
        )
        (reward,) = episode_rewards(prompts, [made], task.verifier)
    finally:
        pool.close()
    assert "You can run Python" in sampler.heard[0]
    assert "<|im_start|>tool\nerror: " in sampler.heard[1] and "<|im_start|>tool\n42<|im_end|>" in sampler.heard[2]
    assert reward.value == 1 and reward.parts["calls"] == 2 and reward.parts["call_errors"] == 1
    assert made.episode is not None and [one.by for one in made.episode.segments][1::2] == ["tool", "tool"]


MANY = """
import os, time

class Many:
    def reset(self, row):
        self.number = int(row.prompt_id)
        return [{"role": "user", "content": row.text}]

    def step(self, response):
        if self.number == 170:
            os._exit(9)
        if self.number == 220:
            time.sleep(60)
        return None if len(response) % 2 else [{"role": "tool", "content": "7;"}]

    def score(self, episode):
        return {"reward": float(len(episode.turns))}
"""


@pytest.mark.slow
@pytest.mark.parametrize("count", [256, pytest.param(4096, marks=pytest.mark.nightly)])
def test_many_episodes_are_in_flight_and_a_dead_and_a_slow_one_cost_themselves_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    (tmp_path / "many_environment.py").write_text(MANY)
    monkeypatch.syspath_prepend(tmp_path)
    sampler, task = sampler_of(slots=False, new_tokens=16), make_task("arithmetic")
    pool = EnvironmentPool("many_environment:Many", workers=2, limit_s=2.0, max_turns=3)
    prompts = [replace(prompt, prompt_id=str(number)) for number, prompt in enumerate(task.prompts(0, count))]
    ids = [sampler.tokenizer(prompt.text)["input_ids"] for prompt in prompts]
    requests = [Request(one, seed) for seed, one in enumerate(ids)]
    in_flight = list[int]()
    submit = pool.submit
    monkeypatch.setattr(pool, "submit", lambda call: (submit(call), in_flight.append(pool.pending))[0])
    try:
        options = {"sampler": sampler, "settings": SamplerSettings()}
        responses = play_episodes(pool, prompts, requests, range(count), **options)
    finally:
        pool.close()
    errors = {number: one.episode.reward.error for number, one in enumerate(responses) if one.episode.reward.error}  # pyright: ignore[reportOptionalMemberAccess]
    assert set(errors) == {170, 220}
    assert errors[170].startswith("worker died") and errors[220].startswith("timeout")
    assert max(in_flight) >= 0.97 * count
    assert {len(one.episode.segments) for one in responses if one.episode} >= {0, 3}
