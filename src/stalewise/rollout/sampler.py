"""The interface of every engine: take a checkpoint, continue prompts, return the log-probability of each token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from stalewise.errors import ModelError
from stalewise.types import FinishReason, SamplerSettings


@dataclass(frozen=True, slots=True)
class Request:
    """One response to sample."""

    prompt_ids: Sequence[int]
    seed: int


@dataclass(frozen=True, slots=True, eq=False)
class Response:
    """One sampled response; its end-of-sequence token, if any, is the last one."""

    token_ids: npt.NDArray[np.int32]
    logp: npt.NDArray[np.float32]
    text: str
    finish_reason: FinishReason

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


def check_lengths(prompt_ids: Sequence[Sequence[int]], *, limit: int | None, max_new_tokens: int) -> None:
    """Refuse prompts that leave no room for a response within `limit` tokens."""
    longest = max(map(len, prompt_ids))
    if limit is not None and longest + max_new_tokens > limit:
        raise ModelError(
            f"the longest prompt has {longest} tokens; with sampler.max_new_tokens = {max_new_tokens} that is over the "
            f"model's context of {limit}: shorten prompts or lower max_new_tokens"
            + (f" to at most {limit - longest}" if limit > longest else "")
            + " (or raise sampler.vllm.max_model_len)"
        )


@runtime_checkable
class OffloadableSampler(Protocol):
    """An engine that can release its device memory while the trainer works."""

    def sleep(self) -> None:
        """Release the memory until the next `load`."""


@runtime_checkable
class LiveSampler(Protocol):
    """An engine in the trainer's process: it can take weights from the trainer's memory."""

    def take(self, weights: Mapping[str, Any], key: object) -> bool:
        """Sample from these weights, which `key` identifies, from now on; False: it must `load` a checkpoint."""
        ...
