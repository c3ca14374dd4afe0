"""Episodes: the policy's turns and what an environment says between them, as one sequence of tokens.

Tokens that were sampled are never encoded again. What an environment says is encoded once, by itself, and put behind
them. An episode ends when its environment is done, when it has no tokens or no turns left, or when its environment
fails.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Mapping, Sequence
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
_SAID = "stalewise-said"  # stands for a turn of the policy while the text around turns is found


class TurnEncoder:
    """Encodes what comes from outside: by the chat template, or as it is for prompts without a chat."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._stops = {text for text in (tokenizer.eos_token,) if text}

    def first(self, prompt: Prompt, messages: Sequence[ChatMessage]) -> Prompt:
        """The prompt that shows these messages; `encode_prompts` encodes it."""
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
        """Tokens of messages after a turn, up to where the policy writes again; `ended`: the turn has its end token."""
        is_chat = prompt.metadata.get("format") == "chat"
        text = self._between(prompt, messages, ended) if is_chat else "".join(one["content"] for one in messages)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _between(self, prompt: Prompt, messages: Sequence[ChatMessage], ended: bool) -> str:
        """What the chat template writes between the policy's turn and its next one."""
        variables = dict(json.loads(prompt.metadata.get("template", "[]")))
        said: list[Any] = [{"role": "user", "content": "-"}, {"role": "assistant", "content": _SAID}]
        try:
            text: str = self.tokenizer.apply_chat_template(
                [*said, *messages], tokenize=False, add_generation_prompt=True, **variables
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise self._inexpressible(
                messages, f"it fails: {(str(error) or type(error).__name__).splitlines()[0]}"
            ) from error
        if text.count(_SAID) != 1:
            raise self._inexpressible(messages, "it does not write the policy's turn once")
        between = text.partition(_SAID)[2]
        place = 0
        for message in messages:
            place = between.find(message["content"].strip(), place)
            if place < 0:
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
    """The prompts as episodes begin with them, and their tokens."""
    encoder = TurnEncoder(tokenizer)
    shown = [encoder.first(*both) for both in zip(prompts, environment.first(prompts), strict=True)]
    return shown, encode_prompts(shown, tokenizer)


@dataclass(slots=True)
class OpenEpisode:
    """An episode under way."""

    prompt: Prompt
    request: Request
    ids: list[int] = field(default_factory=list[int])
    logp: list[float] = field(default_factory=list[float])
    segments: list[Segment] = field(default_factory=list[Segment])
    turns: list[str] = field(default_factory=list[str])
    answers: list[tuple[ChatMessage, ...]] = field(default_factory=list[tuple[ChatMessage, ...]])
    ended: bool = True  # the last turn has its end token
    is_open: bool = True  # it may have another turn
    outcome: Reward | TaskScore | None = None
    finish_reason: FinishReason = FinishReason.STOP

    def add(self, by: str, ids: Sequence[int], logp: Sequence[float]) -> None:
        """Append tokens."""
        self.ids += ids
        self.logp += logp
        self.segments.append(Segment(by, len(ids)))

    def as_episode(self) -> Episode:
        """What its environment sees."""
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
    """A line for every call of an environment, on disk before the policy reads the answer.

    Episodes that were not committed are made again. What their environments answered before is in the journal, so an
    environment that answers the same turns differently is noticed.
    """

    def __init__(self, path: Path | None) -> None:
        self.path, self.differing = path, 0
        self._known: dict[tuple[int, str], str] = {}
        if path is not None and path.is_file():
            for call in (call for line in read_records(path, CALLS) for call in line["calls"]):
                self._known[call["rollout"], call["turns"]] = call["answer"]

    def add(self, records: Sequence[tuple[int, OpenEpisode, Outcome]]) -> None:
        """Record outcomes, in one write."""
        lines: list[dict[str, Any]] = []
        for rollout, episode, outcome in records:
            kind = "step" if outcome.score is None else "score"
            turns, answer = _digest([kind, episode.prompt.prompt_id, *episode.turns]), _digest(_said(outcome))
            before = self._known.get((rollout, turns))
            self.differing += before is not None and before != answer
            if before != answer:
                line = {"rollout": rollout, "turn": len(episode.turns), "turns": turns, "answer": answer}
                lines.append({**line, "seconds": round(outcome.seconds, 4), "said": _said(outcome)[:SHOWN]})
        if self.path is not None and lines:
            append_line(self.path, {"calls": lines})


def _digest(what: object) -> str:
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]


def _said(outcome: Outcome) -> str:
    """An answer as text."""
    if isinstance(outcome.score, Reward):
        return f"error: {outcome.score.error}" if outcome.score.error else f"reward {outcome.score.value:g}"
    return "end" if outcome.score is not None else "\n".join(message["content"] for message in outcome.messages)


class Turns:
    """Between an engine and the environments: takes turns that have ended, gives what the next ones follow."""

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
        """A turn of this episode has ended: its environment answers, or scores a turn that was cut."""
        episode = self.episodes[request]
        episode.add(POLICY, response.token_ids.tolist(), response.logp.tolist())
        episode.turns.append(response.text)
        episode.ended = response.finish_reason is FinishReason.STOP
        if not episode.ended:
            episode.finish_reason = FinishReason.LENGTH
        self.environment.submit(Call(request, episode.as_episode(), is_over=not episode.ended))

    def next(self, *, wait: bool) -> list[tuple[int, list[int]]]:
        """Episodes that were answered, and what their next turn follows; `wait`: for all environments under way."""
        going_on: list[tuple[int, list[int]]] = []
        block = False
        while True:
            outcomes = self.environment.collect(block=block)
            self.journal.add([(self.rollouts[one.key], self.episodes[one.key], one) for one in outcomes])
            for outcome in outcomes:
                is_new = self.episodes[outcome.key].is_open
                outside = self._after(outcome)
                if is_new:
                    going_on.append((outcome.key, outside))
            block = wait and self.environment.pending > 0
            if not block:
                return sorted(going_on)

    def _after(self, outcome: Outcome) -> list[int]:
        """Tokens from outside that the next turn follows; none where the episode has ended."""
        episode = self.episodes[outcome.key]
        if outcome.score is not None:
            episode.outcome, episode.is_open = outcome.score, False
            return []
        episode.answers.append(outcome.messages)
        outside = self.encoder.outside(episode.prompt, outcome.messages, ended=episode.ended)
        no_tokens = len(episode.ids) + len(outside) >= self.max_new_tokens
        if no_tokens or len(episode.turns) >= self.environment.max_turns or not outside:
            # What it said cannot be answered, so it is left out: the episode ends with the policy's own turn.
            episode.finish_reason, episode.is_open = FinishReason.LENGTH, False
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
    """Whole episodes, in the order of the requests. `prompts` are as `encode_first` shows them."""
    journal = journal or CallJournal(None)
    episodes = [OpenEpisode(*both) for both in zip(prompts, requests, strict=True)]
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
        environment.close()  # what is under way must not reach the next episodes
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
    """The reward of each episode: its environment's, or the verifier's of its last turn with the parts of both."""
    rewards: list[Reward] = []
    asked = [i for i, one in enumerate(responses) if one.episode is not None and one.episode.reward is None]
    last = [episode.last_turn for one in responses if (episode := one.episode) is not None and episode.reward is None]
    scored = dict(zip(asked, verifier.score([prompts[i] for i in asked], last) if asked else [], strict=True))
    for number, response in enumerate(responses):
        episode = response.episode
        assert episode is not None
        reward = episode.reward or replace(scored[number], parts=_parts(scored[number].parts, episode.parts))
        turns = {"turns": float(max(1, sum(one.by == POLICY for one in episode.segments)))}
        rewards.append(replace(reward, parts=_parts(turns, reward.parts)) if not math.isnan(reward.value) else reward)
    return rewards


def _parts(*several: Mapping[str, float]) -> dict[str, float]:
    return {name: value for parts in several for name, value in parts.items()}
