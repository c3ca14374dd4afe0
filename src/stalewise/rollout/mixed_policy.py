"""Rollouts of another policy: an engine for two policies, and what they must have in common.

A token has to be the same token for both, since the learner asks its own policy how probable the other one's tokens
are. And a response has to end alike, or the learner would be taught an end that it has not.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stalewise.errors import ModelError
from stalewise.models.loading import encode_prompts, resolve_model
from stalewise.rollout.engines.embedded import HFSampler
from stalewise.rollout.policy_files import PolicyFiles, read_policy_files
from stalewise.rollout.sampler import Request, Response
from stalewise.types import Prompt, SamplerSettings


class MixedPolicySampler:
    """Samples from the run's own policy, or from another one where the settings name it.

    The other one never changes. It is loaded when it is asked for, and let go of while the learner works.
    """

    def __init__(self, own: HFSampler, foreign: HFSampler) -> None:
        self.settings, self.max_new_tokens, self.preferred_batch_size = (
            own.settings,
            own.max_new_tokens,
            own.preferred_batch_size,
        )
        self._own, self._foreign = own, foreign
        self._loaded = ""  # the other policy that is in memory

    @property
    def tokenizer(self) -> Any:
        """Tokenizer of both."""
        return self._own.tokenizer

    def load(self, checkpoint: Path) -> None:
        """The run's own policy is this checkpoint from now on."""
        self._own.load(checkpoint)

    def check_lengths(self, prompt_ids: Sequence[Sequence[int]]) -> None:
        """Refuse prompts that leave the run's own policy no room for a response."""
        self._own.check_lengths(prompt_ids)

    def sample(self, requests: Sequence[Request], settings: SamplerSettings | None = None) -> list[Response]:
        """Responses in the order of the requests, all of the policy that the settings name."""
        settings = settings or self.settings
        engine = self._foreign if settings.policy else self._own
        if settings.policy and settings.policy != self._loaded:
            self._foreign.load(Path(resolve_model(settings.policy)))
            self._loaded = settings.policy
        engine.max_new_tokens = self.max_new_tokens
        return engine.sample(requests, settings)

    def sleep(self) -> None:
        """Give memory to the learner: all of the other policy's, and what the run's own can spare."""
        self._own.sleep()
        self._foreign.close()
        self._loaded = ""

    def close(self) -> None:
        """Let go of both."""
        self.sleep()
        self._own.close()


def check_foreign(path: str, own: Path, prompts: Sequence[Prompt]) -> None:
    """Refuse a policy at `path` whose tokens are not those of the policy at `own`; only small files are read."""
    try:
        theirs = read_policy_files(Path(resolve_model(path)))
    except ModelError as error:
        raise ModelError(f"sampler.foreign.path: {error}") from error
    ours = read_policy_files(own)
    if problem := _difference(theirs, ours) or _other_prompt(theirs, ours, prompts):
        raise ModelError(
            f"sampler.foreign.path is {path}, {problem}: the learner could not tell how probable its tokens are under "
            "its own policy; choose a policy with the same tokenizer"
        )


def _difference(theirs: PolicyFiles, ours: PolicyFiles) -> str:
    """What is another in the vocabularies, or an empty string."""
    their_tokens, our_tokens = theirs.tokenizer.get_vocab(), ours.tokenizer.get_vocab()
    if their_tokens != our_tokens:
        token = min(key for key, _ in their_tokens.items() ^ our_tokens.items())
        ids = (their_tokens.get(token, "no token"), our_tokens.get(token, "no token"))
        return (
            f"which has another vocabulary than the policy of the run ({token!r} is {ids[0]} there and {ids[1]} here)"
        )
    special = [sorted(policy.tokenizer.all_special_ids) for policy in (theirs, ours)]
    if special[0] != special[1]:
        return f"whose special tokens are {special[0]} and those of the policy of the run {special[1]}"
    if theirs.stop_ids != ours.stop_ids:
        return f"which ends responses with {theirs.stop_ids}, and the policy of the run with {ours.stop_ids}"
    if theirs.vocabulary > ours.vocabulary:
        return f"which has {theirs.vocabulary} logits, more than the {ours.vocabulary} of the policy of the run"
    return ""


def _other_prompt(theirs: PolicyFiles, ours: PolicyFiles, prompts: Sequence[Prompt]) -> str:
    """Which prompt the tokenizers read differently, or an empty string."""
    encoded = [encode_prompts(list(prompts), policy.tokenizer) for policy in (theirs, ours)]
    for prompt, their_ids, our_ids in zip(prompts, *encoded, strict=True):
        if their_ids != our_ids:
            return f"whose tokenizer makes other tokens of prompt {prompt.prompt_id} than that of the run's policy"
    return ""
