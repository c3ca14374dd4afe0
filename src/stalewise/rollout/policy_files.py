"""The base class of engines in other processes: reads a checkpoint without its weights, and checks answers."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import GenerationConfig

from stalewise.errors import EngineError
from stalewise.models.loading import context_length, load_model_config, load_tokenizer, stop_token_ids
from stalewise.rollout.sampler import Request, Response, check_lengths
from stalewise.types import FinishReason, SamplerSettings

ROUNDING = 1e-3  # by which a log-probability may exceed 0
RAISE_LIMIT = " (or raise sampler.vllm.max_model_len)"  # added to a message if that setting is the limit
MINUS_INFINITY = -9999.0  # servers write this number for −∞, which JSON does not have


@dataclass(frozen=True, slots=True)
class PolicyFiles:
    """A checkpoint without its weights."""

    checkpoint: Path
    tokenizer: Any
    stop_ids: tuple[int, ...]
    context: int | None
    vocabulary: int  # number of logits
    tied: bool  # output layer and embedding have the same weights
    architecture: str  # the same for checkpoints whose weights can replace each other
    weights: str  # identifies the weights by the sizes and times of their files


@dataclass(frozen=True, slots=True)
class Answer:
    """An engine's answer to one request, before it is checked."""

    token_ids: Sequence[int]
    logp: Sequence[float]
    finish_reason: str


class ExternalSampler:
    """Base class of the engines in other processes."""

    policy: PolicyFiles  # `load` sets it

    def __init__(
        self,
        settings: SamplerSettings,
        max_new_tokens: int,
        on_tokens: Callable[[int], object],
        max_length: int | None = None,
    ) -> None:
        self.settings = settings
        self.max_new_tokens = max_new_tokens
        self.on_tokens = on_tokens
        self._max_length = max_length  # the engine's own limit of the context, if any

    @property
    def tokenizer(self) -> Any:
        """Tokenizer of the loaded policy."""
        return self.policy.tokenizer

    def check_lengths(self, prompt_ids: Sequence[Sequence[int]]) -> None:
        """Refuse prompts that leave no room for a response."""
        limits = [limit for limit in (self.policy.context, self._max_length) if limit is not None]
        least = min(limits, default=None)
        more = RAISE_LIMIT if self._max_length is not None and self._max_length == least else ""
        check_lengths(prompt_ids, limit=least, max_new_tokens=self.max_new_tokens, more=more)

    def make_responses(self, answers: Sequence[Answer], requests: Sequence[Request], engine: str) -> list[Response]:
        """Check answers and decode their texts; an unusable answer is an EngineError that names the engine."""
        for answer, request in zip(answers, requests, strict=True):
            if problem := _problem(answer, self.policy, self.max_new_tokens - len(request.begun)):
                raise EngineError(f"{engine} gave a response that cannot be used: {problem}")
        texts = self.tokenizer.batch_decode([list(answer.token_ids) for answer in answers], skip_special_tokens=True)
        return [
            Response(
                token_ids=np.array(answer.token_ids, dtype=np.int32),
                logp=np.array(answer.logp, dtype=np.float32),
                text=text,
                finish_reason=FinishReason(answer.finish_reason),
            )
            for answer, text in zip(answers, texts, strict=True)
        ]


def read_policy_files(checkpoint: Path) -> PolicyFiles:
    """Read a checkpoint without its weights."""
    name = str(checkpoint)
    config = load_model_config(name)
    generation_config = None
    with contextlib.suppress(OSError):  # not every model has this file
        generation_config = GenerationConfig.from_pretrained(name)
    tokenizer = load_tokenizer(name)
    return PolicyFiles(
        checkpoint=checkpoint,
        tokenizer=tokenizer,
        stop_ids=stop_token_ids(config, generation_config, tokenizer),
        context=context_length(config),
        vocabulary=int(config.get_text_config().vocab_size),
        tied=bool(getattr(config.get_text_config(), "tie_word_embeddings", False)),
        architecture=config.to_json_string(),
        weights=_weights_key(checkpoint),
    )


def _weights_key(checkpoint: Path) -> str:
    files = sorted(checkpoint.glob("*.safetensors")) if checkpoint.is_dir() else []
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    # Absolute but not resolved: if a link is redirected to another checkpoint, the times of the files change.
    return hashlib.sha256(repr((str(checkpoint.absolute()), stats)).encode()).hexdigest()


def _problem(answer: Answer, policy: PolicyFiles, max_new_tokens: int) -> str:
    """Why an answer cannot be used, or an empty string."""
    ids, logp = answer.token_ids, answer.logp
    if not 1 <= len(ids) <= max_new_tokens or len(ids) != len(logp):
        return f"{len(ids)} tokens and {len(logp)} log-probabilities, where 1 to {max_new_tokens} of both are expected"
    if not all(0 <= token < policy.vocabulary for token in ids):
        return f"token {max(ids)} of a vocabulary of {policy.vocabulary}"
    # NaN satisfies neither comparison.
    wrong = [x for x in logp if not (isinstance(x, int | float) and MINUS_INFINITY < x <= ROUNDING)]
    if wrong:
        return f"{wrong[0]} as a log-probability"
    if answer.finish_reason not in ("stop", "length"):
        return f"its finish reason is {answer.finish_reason!r}, where stop or length is expected"
    # From a response without its end token, a policy would not learn when to end.
    if answer.finish_reason == "stop" and ids[-1] not in policy.stop_ids:
        return f"it ended by stop, but its last token {ids[-1]} is none of the end tokens {list(policy.stop_ids)}"
    if answer.finish_reason == "length" and len(ids) < max_new_tokens:
        return f"it was cut after {len(ids)} of sampler.max_new_tokens = {max_new_tokens} tokens: the context is full"
    return ""
