"""Rollouts of a second policy (`sampler.foreign`): a sampler for two policies, and the check that their tokens agree.

Tokens must agree, since the trainer computes the probability of the second policy's tokens under its own policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stalewise.errors import ModelError
from stalewise.models import resolve_model
from stalewise.models.loading import encode_prompts
from stalewise.rollout.engines.embedded import HFSampler
from stalewise.rollout.policy_files import PolicyFiles, read_policy_files
from stalewise.rollout.sampler import Request, Response
from stalewise.types import Prompt, SamplerSettings


class MixedPolicySampler:
    """Samples from the run's own policy, or from a second one if the settings name it; that is loaded at first use."""

    def __init__(self, own: HFSampler, second: HFSampler) -> None:
        self.own = own
        self._second = second
        self.max_new_tokens = own.max_new_tokens
        self.settings = own.settings
        self.preferred_batch_size = own.preferred_batch_size
        self.load = own.load
        self.take = own.take
        self.check_lengths = own.check_lengths
        self._loaded = ""  # path of the second policy in memory

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of both policies."""
        return self.own.tokenizer

    def sample(self, requests: Sequence[Request], settings: SamplerSettings | None = None) -> list[Response]:
        """Responses in the order of the requests, all from the policy that the settings name."""
        settings = settings or self.settings
        engine = self._second if settings.policy else self.own
        if settings.policy and settings.policy != self._loaded:
            self._second.load(Path(resolve_model(settings.policy)))
            self._loaded = settings.policy
        engine.max_new_tokens = self.max_new_tokens  # `token_limit` may have changed it
        return engine.sample(requests, settings)

    def sleep(self, *, weights: bool = False, drop: bool = False) -> None:
        """Release memory for the trainer: unload the second policy, and call `sleep` of the run's own."""
        self.own.sleep(weights=weights, drop=drop)
        self._second.close()
        self._loaded = ""

    def close(self) -> None:
        """Unload both policies."""
        self.sleep()
        self.own.close()


def check_tokenizers(path: str, own: Path, prompts: Sequence[Prompt]) -> None:
    """Refuse a policy at `path` whose tokens differ from those of the policy at `own`; no weights are read."""
    try:
        theirs = read_policy_files(Path(resolve_model(path)))
    except ModelError as error:
        raise ModelError(f"sampler.foreign.path: {error}") from error
    ours = read_policy_files(own)
    if problem := _difference(theirs, ours, prompts):
        raise ModelError(
            f"sampler.foreign.path is {path}, {problem}: the probability of its tokens under the run's policy would be "
            "undefined; choose a policy with the same tokenizer"
        )


def _difference(theirs: PolicyFiles, ours: PolicyFiles, prompts: Sequence[Prompt]) -> str:
    their_tokens, our_tokens = theirs.tokenizer.get_vocab(), ours.tokenizer.get_vocab()
    if their_tokens != our_tokens:
        token = min(key for key, _ in their_tokens.items() ^ our_tokens.items())
        there, here = their_tokens.get(token, "no token"), our_tokens.get(token, "no token")
        return f"which has another vocabulary than the policy of the run ({token!r} is {there} there and {here} here)"
    special = [sorted(policy.tokenizer.all_special_ids) for policy in (theirs, ours)]
    if special[0] != special[1]:
        return f"whose special tokens are {special[0]} and those of the policy of the run {special[1]}"
    if theirs.stop_ids != ours.stop_ids:
        return f"which ends responses with {theirs.stop_ids}, and the policy of the run with {ours.stop_ids}"
    if theirs.vocabulary > ours.vocabulary:
        return f"which has {theirs.vocabulary} logits, more than the {ours.vocabulary} of the policy of the run"
    encoded = [encode_prompts(list(prompts), policy.tokenizer) for policy in (theirs, ours)]
    for prompt, their_ids, our_ids in zip(prompts, *encoded, strict=True):
        if their_ids != our_ids:
            return f"whose tokenizer makes other tokens of prompt {prompt.prompt_id} than that of the run's policy"
    return ""
