"""The interface of every engine: take a checkpoint, continue prompts, return the log-probability of each token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from stalewise.errors import ModelError
from stalewise.types import POLICY, FinishReason, Reward, SamplerSettings, Segment


@dataclass(frozen=True, slots=True)
class Request:
    """One response to sample, or the next turn of one that has `begun`.

    Tokens of earlier turns, those from outside included, count in the token limit, and random numbers go on after them.
    """

    prompt_ids: Sequence[int]
    seed: int
    begun: Sequence[int] = ()

    @property
    def context(self) -> list[int]:
        """All tokens that the next one follows."""
        return [*self.prompt_ids, *self.begun]

    @property
    def turn_seed(self) -> int:
        """For engines that count random numbers from the start of each turn."""
        return (self.seed + len(self.begun) * 0x9E3779B97F4A7C15) & (2**63 - 1)


@dataclass(frozen=True, slots=True)
class PlayedEpisode:
    """What a response of several turns has beside its tokens."""

    segments: tuple[Segment, ...]
    last_turn: str
    reward: Reward | None  # None: the task's verifier scores the last turn
    parts: Mapping[str, float]  # added to the parts of that score


@runtime_checkable
class TurnSource(Protocol):
    """Answers turns while others are sampled. `Turns` of rollout/episodes.py is one."""

    def ended(self, request: int, response: Response) -> None:
        """A turn of this request has ended."""

    def next(self, *, wait: bool) -> list[tuple[int, list[int]]]:
        """What was answered since: requests, and the tokens from outside that their next turn follows.

        No tokens: the episode is over. `wait`: until all that is under way is answered.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Response:
    """One sampled response; its end-of-sequence token, if any, is the last one."""

    token_ids: npt.NDArray[np.int32]
    logp: npt.NDArray[np.float32]
    text: str
    finish_reason: FinishReason
    episode: PlayedEpisode | None = None  # of several turns

    @property
    def policy_tokens(self) -> int:
        """The number of tokens that the policy wrote."""
        outside = (one.tokens for one in self.episode.segments if one.by != POLICY) if self.episode else ()
        return len(self.token_ids) - sum(outside)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Response) and all(map(np.array_equal, astuple(self), astuple(other)))


class Sampler(Protocol):
    """An engine that samples from one policy at a time."""

    settings: SamplerSettings  # for training rollouts
    max_new_tokens: int
    preferred_batch_size: int  # shards are sampled together up to this many requests

    @property
    def tokenizer(self) -> Any:
        """Tokenizer of the loaded policy."""

    def load(self, checkpoint: Path) -> None:
        """Sample from this checkpoint from now on."""

    def check_lengths(self, prompt_ids: Sequence[Sequence[int]]) -> None:
        """Refuse prompts that leave no room for a response."""

    def sample(self, requests: Sequence[Request], settings: SamplerSettings | None = None) -> list[Response]:
        """Responses in the order of the requests, always the same, by `settings` or the sampler's own."""
        ...

    def close(self) -> None:
        """Release processes, connections and device memory; `load` makes it ready again."""


@runtime_checkable
class TurnSampler(Protocol):
    """An engine that goes on with what it has computed of earlier turns."""

    def sample_turns(self, requests: Sequence[Request], settings: SamplerSettings, turns: TurnSource) -> None:
        """Sample the first turn of each request, and each next one as `turns` gives it, until there is none."""


def sample_in_rounds(
    sampler: Sampler,
    requests: Sequence[Request],
    settings: SamplerSettings,
    turns: TurnSource,
    *,
    begun: list[list[int]] | None = None,
    first: Sequence[int] | None = None,
) -> None:
    """`TurnSampler.sample_turns` for other engines: all turns that are open are sampled together.

    What an engine computed of earlier turns is in its prefix cache, if it has one. `begun` and `first`: the tokens of
    all requests so far, and those whose turn it is, where they have been sampled in another way.
    """
    begun = [list(request.begun) for request in requests] if begun is None else begun
    turn = list(range(len(requests)) if first is None else first)
    while True:
        asked = [replace(requests[number], begun=begun[number]) for number in turn]
        for number, response in zip(turn, sampler.sample(asked, settings) if asked else [], strict=True):
            begun[number] += response.token_ids.tolist()
            turns.ended(number, response)
        answered = open_turns(turns.next(wait=False)) or open_turns(turns.next(wait=True))
        for number, outside in answered:
            begun[number] += outside
        turn = [number for number, _ in answered]
        if not turn:
            return


def open_turns(answered: list[tuple[int, list[int]]]) -> list[tuple[int, list[int]]]:
    """Those that go on, in order."""
    return sorted((number, outside) for number, outside in answered if outside)


def check_lengths(
    prompt_ids: Sequence[Sequence[int]],
    *,
    limit: int | None,
    max_new_tokens: int,
    setting: str = "sampler.max_new_tokens",
    more: str = "",
    names: Sequence[str] = (),
) -> None:
    """Refuse prompts that leave no room for a response within `limit` tokens.

    `setting` is what `max_new_tokens` was set by. `more` is said at the end, and where some of the prompts would fit,
    how many do not: `names` are theirs.
    """
    longest = max(map(len, prompt_ids))
    if limit is not None and longest + max_new_tokens > limit:
        over = [name for name, ids in zip(names, prompt_ids, strict=False) if len(ids) + max_new_tokens > limit]
        if 0 < len(over) < len(names):
            more += f"; {len(over)} prompt(s) are too long, such as {over[0]!r}: `exclude_ids` leaves rows out"
        raise ModelError(
            f"the longest prompt has {longest} tokens; with {setting} = {max_new_tokens} that is over the "
            f"model's context of {limit}: shorten prompts or lower max_new_tokens"
            + (f" to at most {limit - longest}" if limit > longest else "")
            + more
        )


@runtime_checkable
class OffloadableSampler(Protocol):
    """An engine that can release its device memory while the trainer works."""

    def sleep(self, *, weights: bool = False, drop: bool = False) -> None:
        """Release memory until the next `load`.

        `weights`: those of an engine in the trainer's process leave the device, too, as the trainer's state does while
        responses are sampled. `drop`: another policy is loaded next, and these need not be kept.
        """


@runtime_checkable
class SchedulingSampler(Protocol):
    """An engine that begins with the requests whose responses will probably be long."""

    schedules: bool  # whether it does so on this device

    def recall(self, prompts: Sequence[tuple[int, ...]], mean_lengths: Sequence[float]) -> None:
        """How long the responses to prompts were that were sampled before this process began, oldest first."""


@runtime_checkable
class StreamingSampler(Protocol):
    """An engine that hands out responses as they end."""

    streams: bool  # whether that pays on this device

    def stream(
        self, requests: Sequence[Request], settings: SamplerSettings, on_ended: Callable[[Mapping[int, Response]], Any]
    ) -> list[Response]:
        """`Sampler.sample`, with `on_ended` called for some responses at a time, by number of their request."""
        ...


@runtime_checkable
class LiveSampler(Protocol):
    """An engine in the trainer's process: it can take weights from the trainer's memory."""

    def take(self, weights: Mapping[str, Any], key: object) -> bool:
        """Sample from these weights, which `key` identifies, from now on; False: it must `load` a checkpoint."""
        ...
