"""A sampler that records log-probabilities before temperature, as vLLM does unless told otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from stalewise.errors import ConfigError
from stalewise.rollout.engines.embedded import HFSampler
from stalewise.rollout.sampler import Request, Response
from stalewise.types import SamplerSettings

TOKENS = 8192  # of a pass: their logits take gigabytes


class RawLogprobs(HFSampler):
    """Samples with temperature; the log-probabilities are those of the policy without it."""

    @classmethod
    def like(cls, sampler: object) -> RawLogprobs:
        """A sampler with the settings of this one, on the same device."""
        if not isinstance(sampler, HFSampler):
            raise ConfigError("raw_logprobs needs the engine hf: others have no logits here")
        given = {"device": sampler._device, "dtype": sampler._dtype, "should_compile": sampler._should_compile}
        made = cls(sampler.settings, max_new_tokens=sampler.max_new_tokens, **given)
        made.streams = False  # responses come from `sample` alone
        return made

    def sample(self, requests: Sequence[Request], settings: SamplerSettings | None = None) -> list[Response]:
        """Responses in the order of the requests."""
        responses = super().sample(requests, settings)
        if (settings or self.settings).temperature == 1.0:
            return responses
        longest = max(len(q.context) + len(r.token_ids) for q, r in zip(requests, responses, strict=True))
        rows = max(1, TOKENS // longest)
        raw: list[np.ndarray] = []
        for first in range(0, len(requests), rows):
            raw += self._raw(requests[first : first + rows], responses[first : first + rows])
        return [replace(response, logp=logp) for response, logp in zip(responses, raw, strict=True)]

    @torch.no_grad()
    def _raw(self, requests: Sequence[Request], responses: Sequence[Response]) -> list[np.ndarray]:
        """By one pass over sequences that are padded at their ends, which no earlier token attends to."""
        sequences = [
            torch.tensor([*q.context, *r.token_ids.tolist()]) for q, r in zip(requests, responses, strict=True)
        ]
        ids_BT = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True).to(self._model.device)
        before = self._model.config._attn_implementation
        self._model.set_attn_implementation("sdpa")  # the decoder's own reads its cache
        try:
            logits_BTV = self._model(input_ids=ids_BT, use_cache=False).logits[:, :-1]
        finally:
            self._model.set_attn_implementation(before)
        chosen_BT = logits_BTV.gather(2, ids_BT[:, 1:, None]).squeeze(2).float()
        logp_BT = (chosen_BT - torch.stack([row_TV.float().logsumexp(1) for row_TV in logits_BTV])).cpu().numpy()
        ends = [len(sequence) - 1 for sequence in sequences]
        return [logp_T[end - len(r.token_ids) : end] for logp_T, end, r in zip(logp_BT, ends, responses, strict=True)]
