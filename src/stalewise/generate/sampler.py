"""What every engine does: take a checkpoint, continue prompts, say how probable each token was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

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

    settings: SamplerSettings

    def load(self, checkpoint: Path) -> None:
        """Sample from this checkpoint from now on."""
        ...

    def sample(self, requests: Sequence[Request]) -> list[Response]:
        """Responses in the order of the requests; the same requests give the same responses."""
        ...
