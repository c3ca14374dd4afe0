"""Drawing tokens, with the log-probability of exactly the distribution they were drawn from.

Convention: logits are divided by the temperature, then cut to the `top_k` most probable tokens, then to the smallest
set with probability `top_p`, then renormalised; `behaviour_logp` is under that final distribution. Axes: R rows, V
tokens of the vocabulary.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stalewise.splitmix import uniform
from stalewise.types import SamplerSettings


def sampling_logp(logits_RV: Tensor, settings: SamplerSettings) -> Tensor:
    """Log-probabilities of the distribution that is sampled from, [R, V]; −inf on tokens that were cut away."""
    logits_RV = logits_RV.float()
    if settings.temperature != 1.0:
        logits_RV = logits_RV / settings.temperature
    if 0 < settings.top_k < logits_RV.shape[1]:
        least_R1 = logits_RV.topk(settings.top_k, dim=1).values[:, -1:]
        logits_RV = logits_RV.masked_fill(logits_RV < least_R1, -torch.inf)
    if settings.top_p < 1.0:
        sorted_logits, order = logits_RV.sort(dim=1, descending=True)
        before = sorted_logits.softmax(dim=1).cumsum(dim=1) - sorted_logits.softmax(dim=1)
        # A token stays if the ones before it do not reach top_p yet: the set is never empty.
        cut = torch.zeros_like(before, dtype=torch.bool).scatter(1, order, before >= settings.top_p)
        logits_RV = logits_RV.masked_fill(cut, -torch.inf)
    return logits_RV.log_softmax(dim=1)


def draw(logp_RV: Tensor, uniform_R: Tensor) -> Tensor:
    """Token of each row by inversion: the first whose cumulative probability exceeds the row's uniform number.

    One number per row and token keeps a rollout's draws its own, whatever else is in the batch.
    """
    cumulative_RV = logp_RV.double().exp().cumsum(dim=1)
    # Scaled by the last value, so that rounding can never leave a number above all of them.
    target_R1 = (uniform_R.double() * cumulative_RV[:, -1]).unsqueeze(1)
    token_R = torch.searchsorted(cumulative_RV, target_R1, right=True).squeeze(1)
    return token_R.clamp(max=logp_RV.shape[1] - 1)


def uniforms(seeds: list[int], count: int) -> npt.NDArray[np.float64]:
    """`count` uniform numbers in [0, 1) for each seed, [R, count]; a row depends on its own seed alone."""
    return uniform(np.array(seeds, dtype=np.uint64)[:, None], np.arange(count, dtype=np.uint64)[None, :])


def rollout_seed(run_seed: int, rollout_id: int, purpose: int = 0) -> int:
    """Seed of one rollout, 63 bits, another for each run seed, rollout and purpose (0 training, 1 evaluation)."""
    digest = hashlib.blake2b(f"{run_seed}/{purpose}/{rollout_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
