"""Episodes: the policy's turns and an environment's messages between them, as one sequence of tokens.

Sampled tokens are never encoded again. The messages after a turn are encoded once, by themselves, and appended. An
episode ends when its environment ends it or fails, or when it has no tokens or no turns left.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError

from stalewise.errors import ModelError
from stalewise.models.loading import encode_prompts
from stalewise.rollout.sampler import PlayedEpisode, Request, Response, Sampler, TurnSampler, sample_in_rounds
from stalewise.store.json_lines import append_line
from stalewise.store.records import CALLS, read_records
from stalewise.tasks.environments import ChatMessage, Episode
from stalewise.tasks.environments.play import Call, EnvironmentPool, Outcome, TaskScore
from stalewise.types import POLICY, FinishReason, Prompt, Reward, SamplerSettings, Segment

log = logging.getLogger(__name__)
SHOWN = 200  # characters of an answer in the journal
_MARKER = "stalewise-said"  # stands for the policy's turn, to find the text that the chat template writes after it


class TurnEncoder:
    """Encodes an environment's messages: by the chat template, or as plain text for prompts without a chat."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._stops = {text for text in (tokenizer.eos_token,) if text}

    def first(self, prompt: Prompt, messages: Sequence[ChatMessage]) -> Prompt:
        """The prompt with these first messages; `encode_prompts` encodes it."""
        if prompt.metadata.get("format") != "chat":
            return replace(prompt, text="".join(message["content"] for message in messages))
        *before, last = messages
        if last["role"] != "user":
            raise ModelError(
                f"the environment's first messages end with the role {last['role']}: the last one must be the user's"
            )
        system = "\n\n".join(message["content"] for message in before if message["role"] == "system")
        history = [message for message in before if message["role"] != "system"]
        metadata = {key: value for key, value in prompt.metadata.items() if key not in ("system", "history")}
        metadata |= {"system": system} if system else {}
        metadata |= {"history": json.dumps(history, ensure_ascii=False)} if history else {}
        return replace(prompt, text=last["content"], metadata=metadata)

    def outside(self, prompt: Prompt, messages: Sequence[ChatMessage], *, ended: bool) -> list[int]:
        """Tokens between a turn of the policy and its next one; `ended`: the turn ends with the end token."""
        is_chat = prompt.metadata.get("format") == "chat"
        plain = "".join(message["content"] for message in messages)
        text = self._between(prompt, messages, ended) if is_chat else plain
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _between(self, prompt: Prompt, messages: Sequence[ChatMessage], ended: bool) -> str:
        """The text that the chat template writes between a turn of the policy and its next one."""
        variables = dict(json.loads(prompt.metadata.get("template", "[]")))
        before: list[Any] = [{"role": "user", "content": "-"}, {"role": "assistant", "content": _MARKER}]
        try:
            text: str = self.tokenizer.apply_chat_template(
                [*before, *messages], tokenize=False, add_generation_prompt=True, **variables
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise self._inexpressible(
                messages, f"it fails: {(str(error) or type(error).__name__).splitlines()[0]}"
            ) from error
        if text.count(_MARKER) != 1:
            raise self._inexpressible(messages, "it does not write the policy's turn once")
        between = text.partition(_MARKER)[2]
        position = 0
        for message in messages:
            position = between.find(message["content"].strip(), position)
            if position < 0:
                raise self._inexpressible(messages, f"it leaves out messages of the role {message['role']}")
        if ended:
            for stop in self._stops:
                between = between.removeprefix(stop)
        return between

    def _inexpressible(self, messages: Sequence[ChatMessage], why: str) -> ModelError:
        roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
        return ModelError(
            f"the chat template of {self.tokenizer.name_or_path} cannot express messages of the role {roles} after a "
            f'reply ({why}): set role = "user" in task.options.environment_options, or use another template '
            "(chat_template.jinja) or model"
        )


def encode_first(
    environment: EnvironmentPool, prompts: Sequence[Prompt], tokenizer: Any
) -> tuple[list[Prompt], list[list[int]]]:
    """The prompts with the environment's first messages, and their tokens."""
    encoder = TurnEncoder(tokenizer)
    first_messages = environment.first(prompts)
    shown = [encoder.first(prompt, messages) for prompt, messages in zip(prompts, first_messages, strict=True)]
    return shown, encode_prompts(shown, tokenizer)


@dataclass(slots=True)
class OpenEpisode:
    """The state of one episode."""

    prompt: Prompt
    request: Request
    ids: list[int] = field(default_factory=list[int])
    logp: list[float] = field(default_factory=list[float])
    segments: list[Segment] = field(default_factory=list[Segment])
    turns: list[str] = field(default_factory=list[str])
    answers: list[tuple[ChatMessage, ...]] = field(default_factory=list[tuple[ChatMessage, ...]])
    ended: bool = True  # the last turn ends with the end token
    is_open: bool = True  # the episode may have another turn
    outcome: Reward | TaskScore | None = None
    finish_reason: FinishReason = FinishReason.STOP

    def add(self, by: str, ids: Sequence[int], logp: Sequence[float]) -> None:
        """Append tokens."""
        self.ids += ids
        self.logp += logp
        self.segments.append(Segment(by, len(ids)))

    def as_episode(self) -> Episode:
        """The episode as its environment sees it."""
        return Episode(self.prompt, tuple(self.turns), tuple(self.answers), str(self.finish_reason))

    def response(self, text: str) -> Response:
        """The whole episode as one response."""
        outcome = self.outcome
        assert outcome is not None
        reward, parts = (outcome, {}) if isinstance(outcome, Reward) else (None, outcome.parts)
        segments = tuple(self.segments) if len(self.segments) > 1 else ()
        episode = PlayedEpisode(segments, self.turns[-1], reward, parts)
        ids, logp = np.array(self.ids, dtype=np.int32), np.array(self.logp, dtype=np.float32)
        return Response(ids, logp, text, self.finish_reason, episode)


class CallJournal:
    """Records every call of an environment on disk, before the policy reads the answer.

    Episodes that were not committed are made again. The journal has the answers of their environments from before, so
    that an environment which answers the same turns differently is noticed.
    """

    def __init__(self, path: Path | None) -> None:
        self.path, self.differing = path, 0
        self._known: dict[tuple[int, str], str] = {}
        if path is not None and path.is_file():
            calls = (call for line in read_records(path, CALLS) for call in line["calls"])
            self._known = {(call["rollout"], call["turns"]): call["answer"] for call in calls}

    def add(self, records: Sequence[tuple[int, OpenEpisode, Outcome]]) -> None:
        """Record the outcomes of some calls in one write."""
        lines: list[dict[str, Any]] = []
        for rollout, episode, outcome in records:
            kind = "step" if outcome.score is None else "score"
            turns = _digest([kind, episode.prompt.prompt_id, *episode.turns])
            answer = _digest(_answer_text(outcome))
            before = self._known.get((rollout, turns))
            self.differing += before is not None and before != answer
            if before != answer:
                line = {"rollout": rollout, "turn": len(episode.turns), "turns": turns, "answer": answer}
                lines.append({**line, "seconds": round(outcome.seconds, 4), "said": _answer_text(outcome)[:SHOWN]})
        if self.path is not None and lines:
            append_line(self.path, {"calls": lines})


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def _answer_text(outcome: Outcome) -> str:
    """An environment's answer as text."""
    if isinstance(outcome.score, Reward):
        return f"error: {outcome.score.error}" if outcome.score.error else f"reward {outcome.score.value:g}"
    return "end" if outcome.score is not None else "\n".join(message["content"] for message in outcome.messages)


class Turns:
    """Passes finished turns from an engine to the environments, and their answers back; a `TurnSource`."""

    def __init__(
        self,
        environment: EnvironmentPool,
        episodes: Sequence[OpenEpisode],
        rollouts: Sequence[int],
        *,
        encoder: TurnEncoder,
        max_new_tokens: int,
        journal: CallJournal,
    ) -> None:
        self.environment, self.episodes, self.rollouts = environment, episodes, rollouts
        self.encoder, self.max_new_tokens, self.journal = encoder, max_new_tokens, journal

    def ended(self, request: int, response: Response) -> None:
        """Take a finished turn: the environment answers it, or scores the episode if the turn was truncated."""
        episode = self.episodes[request]
        episode.add(POLICY, response.token_ids.tolist(), response.logp.tolist())
        episode.turns.append(response.text)
        episode.ended = response.finish_reason is FinishReason.STOP
        if not episode.ended:
            episode.finish_reason = FinishReason.LENGTH
        self.environment.submit(Call(request, episode.as_episode(), is_over=not episode.ended))

    def next(self, *, wait: bool) -> list[tuple[int, list[int]]]:
        """New answers: episodes, and the environment's tokens for each; `wait`: until no environment is running."""
        answered: list[tuple[int, list[int]]] = []
        block = False
        while True:
            outcomes = self.environment.collect(block=block)
            records = [(self.rollouts[outcome.key], self.episodes[outcome.key], outcome) for outcome in outcomes]
            self.journal.add(records)
            for outcome in outcomes:
                was_open = self.episodes[outcome.key].is_open
                outside = self._after(outcome)
                if was_open:
                    answered.append((outcome.key, outside))
            block = wait and self.environment.pending > 0
            if not block:
                return sorted(answered)

    def _after(self, outcome: Outcome) -> list[int]:
        """The environment's tokens before the next turn; none if the episode has ended."""
        episode = self.episodes[outcome.key]
        if outcome.score is not None:
            episode.outcome = outcome.score
            episode.is_open = False
            return []
        episode.answers.append(outcome.messages)
        outside = self.encoder.outside(episode.prompt, outcome.messages, ended=episode.ended)
        no_tokens = len(episode.ids) + len(outside) >= self.max_new_tokens
        if no_tokens or len(episode.turns) >= self.environment.max_turns or not outside:
            # The policy cannot reply to the answer, so it is left out: the episode ends with the policy's own turn.
            episode.finish_reason = FinishReason.LENGTH
            episode.is_open = False
            self.environment.submit(Call(outcome.key, episode.as_episode(), is_over=True))
            return []
        by = "+".join(dict.fromkeys(_speaker(message) for message in outcome.messages))
        episode.add(by, outside, [0.0] * len(outside))
        return outside


def _speaker(message: ChatMessage) -> str:
    return message["role"] if message["role"] != POLICY else "environment"


def play_episodes(
    environment: EnvironmentPool,
    prompts: Sequence[Prompt],
    requests: Sequence[Request],
    rollouts: Sequence[int],
    *,
    sampler: Sampler,
    settings: SamplerSettings,
    journal: CallJournal | None = None,
) -> list[Response]:
    """Sample whole episodes, in the order of the requests. `prompts` are those that `encode_first` returns."""
    journal = journal or CallJournal(None)
    episodes = [OpenEpisode(prompt, request) for prompt, request in zip(prompts, requests, strict=True)]
    turns = Turns(
        environment,
        episodes,
        rollouts,
        encoder=TurnEncoder(sampler.tokenizer),
        max_new_tokens=sampler.max_new_tokens,
        journal=journal,
    )
    try:
        if isinstance(sampler, TurnSampler):
            sampler.sample_turns(requests, settings, turns)
        else:
            sample_in_rounds(sampler, requests, settings, turns)
        while environment.pending:
            turns.next(wait=True)
    except BaseException:
        environment.close()  # calls under way must not be answered to the next episodes
        raise
    if journal.differing:
        log.warning(
            "%d calls were answered differently than before the run was interrupted: the environment is not "
            "deterministic, so these episodes differ from the lost ones",
            journal.differing,
        )
    texts = sampler.tokenizer.batch_decode([episode.ids for episode in episodes], skip_special_tokens=True)
    return [episode.response(text) for episode, text in zip(episodes, texts, strict=True)]


def episode_rewards(prompts: Sequence[Prompt], responses: Sequence[Response], verifier: Any) -> list[Reward]:
    """The reward of each episode: from its environment, or from the verifier, which scores the last turn.

    A verifier's reward has its parts and those of the environment. Every reward that is known has the part `turns`.
    """
    rewards: list[Reward] = []
    episodes = dict(enumerate(response.episode for response in responses))
    last_turns = {
        number: episode.last_turn
        for number, episode in episodes.items()
        if episode is not None and episode.reward is None
    }
    scored: dict[int, Reward] = {}
    if last_turns:
        scores = verifier.score([prompts[number] for number in last_turns], list(last_turns.values()))
        scored = dict(zip(last_turns, scores, strict=True))
    for number, episode in episodes.items():
        assert episode is not None
        reward = episode.reward or replace(scored[number], parts={**scored[number].parts, **episode.parts})
        turns = float(max(1, sum(segment.by == POLICY for segment in episode.segments)))
        known = not math.isnan(reward.value)
        rewards.append(replace(reward, parts={"turns": turns, **reward.parts}) if known else reward)
    return rewards
