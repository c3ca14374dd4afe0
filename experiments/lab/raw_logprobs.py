"""A sampler that records log-probabilities before temperature, as vLLM does unless told otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from stalewise.models.plain_forward import plain_logits
from stalewise.rollout.engines.embedded import HFSampler
from stalewise.rollout.sampler import Request, Response
from stalewise.types import SamplerSettings


class RawLogprobs(HFSampler):
    """Samples with temperature; the log-probabilities are those of the policy without it."""

    def sample(self, requests: Sequence[Request], settings: SamplerSettings | None = None) -> list[Response]:
        """Responses in the order of the requests."""
        responses = super().sample(requests, settings)
        if (settings or self.settings).temperature == 1.0:
            return responses
        return [replace(r, logp=self._raw(q, r)) for q, r in zip(requests, responses, strict=True)]

    def _raw(self, request: Request, response: Response) -> np.ndarray:
        tokens = torch.from_numpy(response.token_ids.astype(np.int64))
        logp_NV = plain_logits(self._model, request.context, response.token_ids.tolist()).log_softmax(dim=1)
        return logp_NV.gather(1, tokens.unsqueeze(1)).squeeze(1).numpy()
