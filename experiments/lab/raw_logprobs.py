"""A sampler that records log-probabilities before temperature, as vLLM does unless told otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from stalewise.errors import ConfigError
from stalewise.models.plain_forward import plain_logits
from stalewise.rollout.engines.embedded import HFSampler
from stalewise.rollout.sampler import Request, Response
from stalewise.types import SamplerSettings


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
        return [replace(r, logp=self._raw(q, r)) for q, r in zip(requests, responses, strict=True)]

    def _raw(self, request: Request, response: Response) -> np.ndarray:
        logp_NV = plain_logits(self._model, request.context, response.token_ids.tolist()).log_softmax(dim=1)
        tokens = torch.from_numpy(response.token_ids.astype(np.int64)).to(logp_NV.device)
        return logp_NV.gather(1, tokens.unsqueeze(1)).squeeze(1).cpu().numpy()
