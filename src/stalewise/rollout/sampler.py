"""The interface of every engine: load a checkpoint, sample responses, return the log-probability of each token."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from stalewise.errors import ModelError
from stalewise.types import POLICY, FinishReason, Reward, SamplerSettings, Segment


@dataclass(frozen=True, slots=True)
class Request:
    """One response to sample, or the next turn of an episode; `begun` are the tokens of its earlier turns.

    These include the environment's. They count towards the token limit, and random numbers continue after them.
    """

    prompt_ids: Sequence[int]
    seed: int
    begun: Sequence[int] = ()

    @property
    def context(self) -> list[int]:
        """All tokens before the next one: the prompt's and those of earlier turns."""
        return [*self.prompt_ids, *self.begun]

    @property
    def turn_seed(self) -> int:
        """A seed of this turn, for engines that count random numbers from the start of each turn."""
        return (self.seed + len(self.begun) * 0x9E3779B97F4A7C15) & (2**63 - 1)


@dataclass(frozen=True, slots=True)
class PlayedEpisode:
    """What a response of several turns has besides its tokens."""

    segments: tuple[Segment, ...]
    last_turn: str
    reward: Reward | None  # None: the task's verifier scores the last turn
    parts: Mapping[str, float]  # added to the parts of that score


@runtime_checkable
class TurnSource(Protocol):
    """Gives the environments' answers while other turns are sampled, as `Turns` of rollout/episodes.py does."""

    def ended(self, request: int, response: Response) -> None:
        """Take a finished turn of this request; its environment answers in the background."""

    def next(self, *, wait: bool) -> list[tuple[int, list[int]]]:
        """New answers: pairs of a request and the environment's tokens, after which its next turn is sampled.

        An answer without tokens ends the episode. `wait`: until all turns are answered.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Response:
    """One sampled response; its end-of-sequence token, if any, is the last one."""

    token_ids: npt.NDArray[np.int32]
    logp: npt.NDArray[np.float32]
    text: str
    finish_reason: FinishReason
    episode: PlayedEpisode | None = None  # for tasks with an environment

    @property
    def policy_tokens(self) -> int:
        """The number of tokens that the policy wrote."""
        segments = self.episode.segments if self.episode is not None else ()
        return len(self.token_ids) - sum(segment.tokens for segment in segments if segment.by != POLICY)

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
        """Load a checkpoint; the next responses are sampled from it."""

    def check_lengths(self, prompt_ids: Sequence[Sequence[int]]) -> None:
        """Refuse prompts that leave no room for a response."""

    def sample(self, requests: Sequence[Request], settings: SamplerSettings | None = None) -> list[Response]:
        """Responses in the order of the requests. They are reproducible. `settings` defaults to the sampler's own."""
        ...

    def close(self) -> None:
        """Release processes, connections and device memory; `load` makes it ready again."""


@contextlib.contextmanager
def token_limit(sampler: Sampler, max_new_tokens: int) -> Iterator[None]:
    """Within the context, responses of this sampler have at most `max_new_tokens` tokens."""
    before = sampler.max_new_tokens
    sampler.max_new_tokens = max_new_tokens
    try:
        yield
    finally:
        sampler.max_new_tokens = before


@runtime_checkable
class TurnSampler(Protocol):
    """An engine that reuses the keys and values of earlier turns."""

    def sample_turns(self, requests: Sequence[Request], settings: SamplerSettings, turns: TurnSource) -> None:
        """Sample the first turn of each request, then each further turn that `turns` asks for, until none is left."""


def sample_in_rounds(
    sampler: Sampler,
    requests: Sequence[Request],
    settings: SamplerSettings,
    turns: TurnSource,
    *,
    begun: list[list[int]] | None = None,
    first: Sequence[int] | None = None,
) -> None:
    """`TurnSampler.sample_turns` for other engines: all open turns are sampled together, round after round.

    An engine with a prefix cache has the keys and values of earlier turns there. To continue episodes that were begun
    in another way, pass `begun`, the tokens of all requests so far, and `first`, the requests of the first round.
    """
    begun = [list(request.begun) for request in requests] if begun is None else begun
    open_requests = list(range(len(requests)) if first is None else first)
    while True:
        batch = [replace(requests[number], begun=begun[number]) for number in open_requests]
        for number, response in zip(open_requests, sampler.sample(batch, settings) if batch else [], strict=True):
            begun[number] += response.token_ids.tolist()
            turns.ended(number, response)
        answered = open_turns(turns.next(wait=False)) or open_turns(turns.next(wait=True))
        for number, outside in answered:
            begun[number] += outside
        open_requests = [number for number, _ in answered]
        if not open_requests:
            return


def open_turns(answered: list[tuple[int, list[int]]]) -> list[tuple[int, list[int]]]:
    """The answers that another turn follows, in the order of their requests."""
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

    The message names `setting`, which set `max_new_tokens`, and ends with `more`. Given the `names` of the prompts, it
    also counts those that are too long, unless all are.
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

        `weights`: an engine in the trainer's process also moves its weights to host memory. `drop`: the next `load` is
        of another policy, so these weights need not be kept.
        """


@runtime_checkable
class SchedulingSampler(Protocol):
    """An engine that samples the responses first that will probably be long."""

    schedules: bool  # whether it does so on this device

    def recall(self, prompts: Sequence[tuple[int, ...]], mean_lengths: Sequence[float]) -> None:
        """Record mean response lengths per prompt from before this process started, oldest first."""


@runtime_checkable
class StreamingSampler(Protocol):
    """An engine that returns responses as they end."""

    streams: bool  # whether that is worthwhile on this device

    def stream(
        self, requests: Sequence[Request], settings: SamplerSettings, on_ended: Callable[[Mapping[int, Response]], Any]
    ) -> list[Response]:
        """`Sampler.sample`; `on_ended` is called with a few responses at a time, keyed by the number of the request."""
        ...


@runtime_checkable
class LiveSampler(Protocol):
    """An engine in the trainer's process that can copy weights from the trainer's memory."""

    def take(self, weights: Mapping[str, Any], key: object) -> bool:
        """Copy these weights, which `key` identifies; the next responses are sampled from them.

        False: only `load` can change the weights.
        """
        ...
