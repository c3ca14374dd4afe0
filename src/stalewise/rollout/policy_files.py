"""What an engine outside of this process needs of a checkpoint here: tokenizer, end tokens, lengths; and its answers
turned into responses, after a look at whether they are whole.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, GenerationConfig

from stalewise.errors import EngineError, ModelError
from stalewise.models.loading import context_length, load_tokenizer, loading_error, stop_token_ids
from stalewise.rollout.sampler import Response
from stalewise.types import FinishReason

# A log-probability may come out above 0 by rounding; above this it is no log-probability.
ROUNDING = 1e-3
# What servers write for minus infinity, which JSON does not have.
MINUS_INFINITY = -9999.0


@dataclass(frozen=True, slots=True)
class PolicyFiles:
    """All of a checkpoint but its weights."""

    checkpoint: Path
    tokenizer: Any
    stop_ids: tuple[int, ...]
    context: int | None
    vocabulary: int  # width of the model's logits
    tied: bool  # the output layer is the embedding
    architecture: str  # equal for checkpoints whose weights can take each other's place
    weights: str  # another for other weights, as far as sizes and times of files tell


class HasPolicy:
    """An engine outside of this process, as far as it has a policy: its `load` sets `_policy`."""

    _policy: PolicyFiles | None = None

    @property
    def policy(self) -> PolicyFiles:
        """Files of the loaded policy."""
        assert self._policy is not None, "load comes first"
        return self._policy

    @property
    def tokenizer(self) -> Any:
        """Tokenizer of the loaded policy."""
        return self.policy.tokenizer


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine gave for one request."""

    token_ids: Sequence[int]
    logp: Sequence[float]
    finish_reason: str


def read_policy_files(checkpoint: Path) -> PolicyFiles:
    """Everything about a policy that can be known without its weights."""
    name = str(checkpoint)
    try:
        config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        raise loading_error(name, "has no config that transformers can load", error) from error
    try:
        generation_config = GenerationConfig.from_pretrained(name)
    except OSError:  # not every model has one
        generation_config = None
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
    # Absolute, and not resolved: a link that is turned to another checkpoint has other times.
    return hashlib.sha256(repr((str(checkpoint.absolute()), stats)).encode()).hexdigest()


def check_lengths(prompt_ids: Sequence[Sequence[int]], *, limit: int | None, max_new_tokens: int) -> None:
    """Refuse prompts that leave no room for a response."""
    longest = max(map(len, prompt_ids))
    if limit is not None and longest + max_new_tokens > limit:
        raise ModelError(
            f"the longest prompt has {longest} tokens; with sampler.max_new_tokens = {max_new_tokens} that is over the "
            f"context of {limit}: shorten prompts, lower max_new_tokens, or raise sampler.vllm.max_model_len"
        )


def make_responses(answers: Sequence[Answer], policy: PolicyFiles, *, max_new_tokens: int, who: str) -> list[Response]:
    """Responses with their texts; an answer that cannot be learned from is an EngineError that names `who` gave it."""
    for answer in answers:
        if problem := _problem(answer, policy, max_new_tokens):
            raise EngineError(f"{who} gave a response that cannot be used: {problem}")
    texts = policy.tokenizer.batch_decode([list(answer.token_ids) for answer in answers], skip_special_tokens=True)
    return [
        Response(
            token_ids=tuple(answer.token_ids),
            logp=tuple(answer.logp),
            text=text,
            finish_reason=FinishReason(answer.finish_reason),
        )
        for answer, text in zip(answers, texts, strict=True)
    ]


def _problem(answer: Answer, policy: PolicyFiles, max_new_tokens: int) -> str:
    ids, logp = answer.token_ids, answer.logp
    if not 1 <= len(ids) <= max_new_tokens or len(ids) != len(logp):
        return f"{len(ids)} tokens and {len(logp)} log-probabilities, where 1 to {max_new_tokens} of both are expected"
    if not all(0 <= token < policy.vocabulary for token in ids):
        return f"token {max(ids)} of a vocabulary of {policy.vocabulary}"
    wrong = [x for x in logp if not (isinstance(x, int | float) and MINUS_INFINITY < x <= ROUNDING)]  # NaN is neither
    if wrong:
        return f"{wrong[0]} as a log-probability"
    if answer.finish_reason not in ("stop", "length"):
        return f"it ended by {answer.finish_reason!r}, where stop or length is expected"
    # Without its end token the response would teach nothing about when to end.
    if answer.finish_reason == "stop" and ids[-1] not in policy.stop_ids:
        return f"it ended by stop, but its last token {ids[-1]} is none of the end tokens {list(policy.stop_ids)}"
    if answer.finish_reason == "length" and len(ids) < max_new_tokens:
        return (
            f"it was cut after {len(ids)} tokens, before sampler.max_new_tokens = {max_new_tokens}: the context is over"
        )
    return ""
