"""Terms that are added to any objective: a divergence from a reference policy, an entropy bonus, and shaped rewards.

ℓ is the policy's log-probability of a token, f that of the reference, H the entropy of the policy's distribution at the
token. All are pure functions; a coefficient of 0 adds nothing, and leaves the objective as it is to the last bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from stalewise.objectives.tokens import Tokens

KLEstimator = Literal["k1", "k2", "k3"]


@dataclass(frozen=True, slots=True)
class Regularizers:
    """Coefficients of the terms that are added to every token's loss."""

    kl: float = 0.0  # coefficient of the divergence from the reference
    estimator: KLEstimator = "k3"
    entropy: float = 0.0  # coefficient of the entropy, which is subtracted

    def add_to(self, loss_BT: Tensor, tokens: Tokens, entropy_BT: Tensor | None) -> Tensor:
        """loss + kl · KL(ℓ, f) − entropy · H per token. The terms are reduced with the loss, so no split changes it."""
        if self.kl:
            if tokens.reference_logp_BT is None:
                raise ValueError("reference_logp is None; a KL divergence from a reference expects a tensor [B, T]")
            loss_BT = loss_BT + self.kl * kl_estimate(tokens.logp_BT, tokens.reference_logp_BT, self.estimator)
        if self.entropy:
            if entropy_BT is None:
                raise ValueError("entropy_BT is None; an entropy bonus expects a tensor [B, T] with a gradient")
            loss_BT = loss_BT - self.entropy * torch.where(tokens.mask_BT, entropy_BT, 0.0)
        return loss_BT


NONE = Regularizers()


def kl_estimate(logp: Tensor, reference_logp: Tensor, estimator: KLEstimator = "k3") -> Tensor:
    """KL(policy‖reference) per token, estimated with samples of the policy (Schulman 2020).

    `k1`: ℓ − f, unbiased, of either sign. `k2`: (ℓ − f)² / 2, biased, whose mean gradient is that of the divergence.
    `k3`: exp(f − ℓ) − (f − ℓ) − 1, unbiased, never negative.

    >>> [round(kl_estimate(torch.tensor(-1.0), torch.tensor(-1.5), name).item(), 4) for name in ("k1", "k2", "k3")]
    [0.5, 0.125, 0.1065]
    """
    if estimator not in get_args(KLEstimator):
        raise ValueError(f"estimator is {estimator!r}; expected one of {', '.join(get_args(KLEstimator))}")
    log_ratio = logp - reference_logp
    if estimator == "k1":
        return log_ratio
    return 0.5 * log_ratio.square() if estimator == "k2" else torch.expm1(-log_ratio) + log_ratio


def kl_of_responses(
    logp: np.ndarray, reference_logp: np.ndarray, offsets: np.ndarray, estimator: KLEstimator = "k1"
) -> np.ndarray:
    """Σ_t of the estimate over the tokens of each response [R]; response i has tokens `offsets[i] : offsets[i + 1]`."""
    policy, reference = (torch.as_tensor(values.astype(np.float64)) for values in (logp, reference_logp))
    estimates = kl_estimate(policy, reference, estimator).numpy()
    totals = np.concatenate([[0.0], np.cumsum(estimates)])
    return totals[offsets[1:]] - totals[offsets[:-1]]


def overlong_penalty(length: np.ndarray, *, max_tokens: int, margin: int, factor: float = 1.0) -> np.ndarray:
    """DAPO's soft penalty on long responses, at most 0: it sets in `margin` tokens before the limit.

    0 up to max_tokens − margin; from there it falls linearly to −factor at max_tokens, and stays there. Yu et al. 2025.

    >>> overlong_penalty(np.array([80, 90, 100, 120]), max_tokens=100, margin=20).tolist()
    [0.0, -0.5, -1.0, -1.0]
    """
    return factor * np.clip((max_tokens - margin - np.asarray(length)) / margin, -1.0, 0.0)
