"""Records and protocols that several rooms share. Frozen, plain Python, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntFlag, StrEnum
from typing import Any, NamedTuple, Protocol


class FinishReason(StrEnum):
    """Why a response ended."""

    STOP = "stop"  # the policy ended it: an end-of-sequence token or a stop string
    LENGTH = "length"  # the token limit cut it: the response is truncated


class TokenFlag(IntFlag):
    """How an objective treated a response token; docs/notation.md defines the terms."""

    CLIPPED = 1
    VETOED = 2
    TRIGGER = 4  # its ratio is below the veto's threshold; the first one in a response triggers the veto


MOST_PARTS = 100  # named parts of a reward
POLICY = "policy"


class Segment(NamedTuple):
    """Consecutive response tokens of one source: `policy` (trained on), or the name of an outside source."""

    by: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question of a task.

    `prompt_id` identifies the question permanently, in evaluations, ledgers and overlaps with training data. `text`
    goes to the tokenizer. The verifier compares responses with `answer`.
    """

    prompt_id: str
    text: str
    answer: str
    metadata: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class Reward:
    """A verifier's score of one response.

    `error` is empty if the verifier worked. If it raised, hung or returned no finite number, `error` says so and
    `value` is NaN: such a rollout is counted and left out of training, never scored 0.
    """

    value: float
    parts: Mapping[str, float] = field(default_factory=dict[str, float])
    error: str = ""
    # The traceback of a verifier that raised, and the response's answer for majority votes. Neither is stored.
    traceback: str = field(default="", compare=False, repr=False)
    answer: str | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class SamplerSettings:
    """The sampling settings that behaviour log-probabilities depend on."""

    name: str = "hf"
    precision: str = "float32"
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    weights: str = "exact"  # or the format that the linear layers were quantized to: fp8, int8
    policy: str = ""  # the second policy, if it sampled; empty: the run's own, in the rollout's version


@dataclass(frozen=True, slots=True)
class Rollout:
    """One response with everything that training on it needs.

    `behaviour_logp[i]` is the log-probability of `response_ids[i]` under the distribution it was drawn from, with the
    sampler's precision, temperature and truncation. `version_first` and `version_last` are the policy versions (numbers
    of optimizer updates) that made the first and the last token; the age is computed at use, never stored.

    In an episode, `response_ids` are all tokens after the prompt. `segments` says which are the policy's. The others,
    from tools and environments, are not trained on, and their `behaviour_logp` is 0. Without segments there is one turn
    and all tokens are the policy's.
    """

    rollout_id: int  # index of the prompt in the task's order × group size + index in the group
    prompt_id: str
    group: int  # rollouts of a group answer the same prompt and share a baseline
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    behaviour_logp: tuple[float, ...]
    reward: float  # NaN if the verifier failed
    reward_parts: Mapping[str, float]
    reward_error: str
    finish_reason: FinishReason
    version_first: int
    version_last: int
    sampler: SamplerSettings
    seed: int
    text: str
    segments: tuple[Segment, ...] = ()

    @property
    def sources(self) -> tuple[str, ...]:
        """Who wrote each response token."""
        segments = self.segments or (Segment(POLICY, len(self.response_ids)),)
        return tuple(segment.by for segment in segments for _ in range(segment.tokens))

    @property
    def mask(self) -> tuple[bool, ...]:
        """Which response tokens are the policy's."""
        return tuple(by == POLICY for by in self.sources)

    @property
    def truncated(self) -> bool:
        """Whether the token limit cut the response."""
        return self.finish_reason is FinishReason.LENGTH


class ProgressCallback(Protocol):
    """Receives the progress of a run: a progress bar, a tracker, a test."""

    def begin(self, what: str, total: int) -> None:
        """`what` (generate, learn, evaluate) starts, with `total` rollouts or updates."""

    def advance(self, amount: int, note: str = "") -> None:
        """`amount` more of them are done."""

    def metrics(self, update: int, record: dict[str, Any]) -> None:
        """An update was taken."""

    def evaluation(self, record: dict[str, Any]) -> None:
        """A policy was evaluated; `record` is the line in `eval.jsonl`, or for a suite in `suites.jsonl`.

        A callback may lack this method.
        """

    def log(self, message: str) -> None:
        """A message for the user."""


class NullCallback(ProgressCallback):
    """Ignores all progress."""


def report_evaluation(callback: ProgressCallback, record: dict[str, Any]) -> None:
    """Call `evaluation` of a callback that has it."""
    if hasattr(callback, "evaluation"):
        callback.evaluation(record)
