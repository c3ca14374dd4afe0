"""Draws tokens, with the log-probability of the distribution they were drawn from.

Logits are divided by the temperature, cut to the `top_k` most probable tokens, then to the smallest set with
probability `top_p`, then renormalised; `behaviour_logp` is under that final distribution. Axes: R rows, V tokens of the
vocabulary.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stalewise.statistics import uniform
from stalewise.types import SamplerSettings

# Probabilities are summed in blocks of this many tokens: a draw reads the sums, then the tokens of one block.
BLOCK = 128


def tempered(logits_RV: Tensor, settings: SamplerSettings) -> Tensor:
    """Logits after temperature and truncation; −inf for truncated tokens."""
    if settings.temperature != 1.0:
        logits_RV = logits_RV.float() / settings.temperature
    if 0 < settings.top_k < logits_RV.shape[1]:
        least_R1 = logits_RV.topk(settings.top_k, dim=1).values[:, -1:]
        logits_RV = logits_RV.masked_fill(logits_RV < least_R1, -torch.inf)
    if settings.top_p < 1.0:
        sorted_logits, order = logits_RV.float().sort(dim=1, descending=True)
        before = sorted_logits.softmax(dim=1).cumsum(dim=1) - sorted_logits.softmax(dim=1)
        # A token stays if the tokens before it do not reach top_p, so the first one always stays.
        cut = torch.zeros_like(before, dtype=torch.bool).scatter(1, order, before >= settings.top_p)
        logits_RV = logits_RV.masked_fill(cut, -torch.inf)
    return logits_RV


def draw(logits_RV: Tensor, uniform_R: Tensor) -> tuple[Tensor, Tensor]:
    """Draw a token for each row by inversion; returns the tokens and their log-probabilities.

    The token is the first one whose cumulative probability exceeds the row's uniform number. Each row and token has its
    own number, so a rollout does not depend on the rest of the batch. Axes: K blocks of the vocabulary, J tokens of one
    block.
    """
    vocabulary = logits_RV.shape[1]
    block = min(BLOCK, vocabulary)
    probability_RV = logits_RV.softmax(dim=1, dtype=torch.float32)  # one pass over logits of any precision
    if vocabulary % block:
        probability_RV = torch.nn.functional.pad(probability_RV, (0, block - vocabulary % block))
    probability_RKJ = probability_RV.unflatten(1, (-1, block))
    block_R1, rest_R1 = _invert(probability_RKJ.sum(dim=2).double(), uniform_R.double().unsqueeze(1))
    chosen_RJ = probability_RKJ.gather(1, block_R1.unsqueeze(2).expand(-1, 1, block)).squeeze(1).double()
    offset_R1, _ = _invert(chosen_RJ, rest_R1)
    # Clamped for logits that are not finite, whose log-probability is NaN.
    token_R1 = (block_R1 * block + offset_R1).clamp(max=vocabulary - 1)
    return token_R1.squeeze(1), probability_RV.gather(1, token_R1).log().squeeze(1)


def _invert(mass_RK: Tensor, uniform_R1: Tensor) -> tuple[Tensor, Tensor]:
    """The first index whose cumulative mass exceeds the uniform fraction of the total, and the remainder of that.

    The remainder is relative to the mass at that index.
    """
    cumulative_RK = mass_RK.cumsum(dim=1)
    # Below the total, so that rounding never leads to an index without mass.
    target_R1 = uniform_R1.clamp(max=1 - 2**-52) * cumulative_RK[:, -1:]
    index_R1 = torch.searchsorted(cumulative_RK, target_R1, right=True).clamp(max=mass_RK.shape[1] - 1)
    mass_R1 = mass_RK.gather(1, index_R1)
    rest_R1 = (target_R1 - (cumulative_RK.gather(1, index_R1) - mass_R1)) / mass_R1
    return index_R1, rest_R1.clamp(min=0)


def uniforms(seeds: list[int], count: int) -> npt.NDArray[np.float64]:
    """`count` uniform numbers in [0, 1) for each seed, [R, count]; a row depends on its own seed alone."""
    return uniform(np.array(seeds, dtype=np.uint64)[:, None], np.arange(count, dtype=np.uint64)[None, :])


def device_uniforms(seed_R: Tensor, position_R: Tensor) -> Tensor:
    """The numbers of `uniforms`, computed on the device: SplitMix64 in 64-bit integers that wrap around."""
    z_R = seed_R + (position_R + 1) * _signed(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z_R = (z_R ^ _shifted(z_R, shift)) * _signed(factor)
    return _shifted(z_R ^ _shifted(z_R, 31), 11).double() * 2.0**-53


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _shifted(value_R: Tensor, bits: int) -> Tensor:
    """Logical shift to the right."""
    return (value_R >> bits) & ((1 << (64 - bits)) - 1)


def rollout_seed(run_seed: int, rollout_id: int, purpose: int = 0) -> int:
    """63-bit seed of one rollout, distinct for each run seed, rollout and purpose (0 training, 1 evaluation)."""
    digest = hashlib.blake2b(f"{run_seed}/{purpose}/{rollout_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
