"""What every engine does: take a checkpoint, continue prompts, say how probable each token was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from stalewise.types import FinishReason, SamplerSettings


@dataclass(frozen=True, slots=True)
class Request:
    """One response to sample."""

    prompt_ids: Sequence[int]
    seed: int


@dataclass(frozen=True, slots=True)
class Response:
    """One sampled response; an end-of-sequence token, where there is one, is its last."""

    token_ids: tuple[int, ...]
    logp: tuple[float, ...]
    text: str
    finish_reason: FinishReason


class Sampler(Protocol):
    """An engine that samples from one policy at a time."""

    settings: SamplerSettings  # what training rollouts are sampled with
    max_new_tokens: int
    preferred_batch_size: int  # requests that it likes to get at once: shards are sampled together up to this many

    @property
    def tokenizer(self) -> Any:
        """Tokenizer of the loaded policy."""
        ...

    def load(self, checkpoint: Path) -> None:
        """Sample from this checkpoint from now on."""
        ...

    def check_lengths(self, prompt_ids: Sequence[Sequence[int]]) -> None:
        """Refuse prompts that leave no room for a response."""
        ...

    def sample(self, requests: Sequence[Request], settings: SamplerSettings | None = None) -> list[Response]:
        """Responses in the order of the requests; the same requests give the same responses.

        Evaluation gives its own `settings`; the sampler's are used where none are given.
        """
        ...

    def close(self) -> None:
        """Let go of processes, connections and device memory; `load` makes it ready again."""
        ...


@runtime_checkable
class OffloadableSampler(Protocol):
    """An engine that holds much device memory and can lend it to the learner."""

    def sleep(self) -> None:
        """Give the memory back until the next `load`."""
        ...
