"""Diagnostics of an update, from sums that merge exactly over micro-batches and ranks (docs/metrics.md)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from stalewise.objectives.batch_statistics import WeightSums, behaviour_weights, harmful, sequence_weights
from stalewise.objectives.regularizers import kl_estimate
from stalewise.objectives.tokens import Tokens, host_list

# For each mean, by name: the sum, and the count that it is divided by.
MEANS = {
    "ratio_mean_positive": ("ratio_positive", "tokens_positive"),
    "ratio_mean_negative": ("ratio_negative", "tokens_negative"),
    "m2_harmful": ("square_harmful", "tokens_harmful"),
    "clip_fraction": ("clipped", "tokens"),
    "veto_fraction": ("vetoed", "tokens"),
    "veto_response_fraction": ("vetoed_responses", "responses"),
    "kl_behaviour_policy": ("kl_behaviour_policy", "tokens_finite"),
    "kl_policy_behaviour": ("kl_policy_behaviour", "tokens_finite"),
    "log_ratio_mean_abs": ("log_ratio_abs", "tokens_finite"),
    "kl_reference": ("kl_reference", "tokens_reference"),
    "entropy": ("entropy", "tokens_entropy"),
    "response_length": ("tokens", "responses"),
}
COUNTS = ("tokens", "responses", "nonfinite")
SUMS = tuple(sorted({*COUNTS, *(name for pair in MEANS.values() for name in pair)}))
MAXIMA = ("ratio_max_positive", "ratio_max_negative", "log_ratio_max_abs")


@dataclass(frozen=True, slots=True)
class TokenSums:
    """The sums and maxima that the diagnostics of an update are computed from, as float64 vectors."""

    sums: Tensor  # in the order of SUMS
    maxima: Tensor  # in the order of MAXIMA; −inf if there was nothing
    token_weights: WeightSums
    sequence_weights: WeightSums

    def merge(self, other: TokenSums) -> TokenSums:
        """Sums of both parts together."""
        return TokenSums(
            self.sums + other.sums,
            torch.maximum(self.maxima, other.maxima),
            self.token_weights.merge(other.token_weights),
            self.sequence_weights.merge(other.sequence_weights),
        )

    def pack(self) -> Tensor:
        """One flat float64 tensor, to be gathered over ranks."""
        return torch.cat([self.sums, self.maxima, self.token_weights.pack(), self.sequence_weights.pack()])

    @classmethod
    def unpack(cls, packed: Tensor) -> TokenSums:
        """The inverse of `pack`."""
        maxima_end = len(SUMS) + len(MAXIMA)
        sums, maxima = packed[: len(SUMS)], packed[len(SUMS) : maxima_end]
        token_weights, sequence_weights = packed[maxima_end:].chunk(2)
        return cls(sums, maxima, WeightSums.unpack(token_weights), WeightSums.unpack(sequence_weights))

    def summary(self) -> dict[str, float]:
        """The diagnostics by name, with one read from the device; NaN for a mean of nothing.

        `kl_reference` is there only with a reference.
        """
        on_host = TokenSums.unpack(self.pack().cpu())
        sums = dict(zip(SUMS, host_list(on_host.sums), strict=True))
        maxima = dict(zip(MAXIMA, host_list(on_host.maxima), strict=True))
        means = {name: sums[a] / sums[b] if sums[b] else math.nan for name, (a, b) in MEANS.items()}
        if not sums["tokens_reference"]:
            del means["kl_reference"]  # most runs have no reference
        return {
            "ess": on_host.token_weights.effective_sample_size().item(),
            "ess_sequence": on_host.sequence_weights.effective_sample_size().item(),
            **means,
            **{name: value if value > -math.inf else math.nan for name, value in maxima.items()},
            **{name: sums[name] for name in COUNTS},
        }


def token_sums(
    tokens: Tokens,
    *,
    clipped_BT: Tensor | None = None,
    vetoed_BT: Tensor | None = None,
    entropy_BT: Tensor | None = None,
) -> TokenSums:
    """Sums of one micro-batch.

    Both divergences are estimated with samples of the behaviour policy b, with r = policy / b:
    KL(b‖policy) = E_b[r − 1 − log r] and KL(policy‖b) = E_b[r log r − r + 1]; neither estimator is ever negative.
    Entropy of the policy: exact if `entropy_BT` is given, else the unbiased estimate E_b[−r·ℓ].
    """
    log_ratio_BT = tokens.log_ratio_BT.detach()
    ratio_BT = log_ratio_BT.exp()
    # An infinite ratio would make every mean infinite: such tokens count only as `nonfinite`, in no other sum.
    finite_BT = tokens.mask_BT & ratio_BT.isfinite() & log_ratio_BT.isfinite()
    log_ratio_BT = log_ratio_BT.where(finite_BT, 0.0)
    excess_BT = torch.expm1(log_ratio_BT)  # r − 1 without cancellation
    positive_BT = finite_BT & (tokens.advantage_BT > 0)
    negative_BT = finite_BT & (tokens.advantage_BT < 0)
    harmful_BT = finite_BT & harmful(tokens)
    nothing_BT = torch.zeros_like(finite_BT)
    clipped_BT = nothing_BT if clipped_BT is None else clipped_BT
    vetoed_BT = nothing_BT if vetoed_BT is None else vetoed_BT
    entropy_BT = -ratio_BT * tokens.logp_BT.detach() if entropy_BT is None else entropy_BT.detach()
    entropy_finite_BT = finite_BT & entropy_BT.isfinite()

    amounts: dict[str, Tensor] = {
        "tokens": _count(tokens.mask_BT),
        "responses": _count(tokens.mask_BT.any(dim=1)),
        "nonfinite": _count(tokens.mask_BT) - _count(finite_BT),
        "tokens_finite": _count(finite_BT),
        "ratio_positive": _total(ratio_BT, positive_BT),
        "tokens_positive": _count(positive_BT),
        "ratio_negative": _total(ratio_BT, negative_BT),
        "tokens_negative": _count(negative_BT),
        "square_harmful": _total(log_ratio_BT.square(), harmful_BT),
        "tokens_harmful": _count(harmful_BT),
        "clipped": _count(clipped_BT),
        "vetoed": _count(vetoed_BT),
        "vetoed_responses": _count(vetoed_BT.any(dim=1)),
        "kl_behaviour_policy": _total(excess_BT - log_ratio_BT, finite_BT),
        "kl_policy_behaviour": _total(ratio_BT * log_ratio_BT - excess_BT, finite_BT),
        "log_ratio_abs": _total(log_ratio_BT.abs(), finite_BT),
        **_divergence(tokens),
        "entropy": _total(entropy_BT, entropy_finite_BT),
        "tokens_entropy": _count(entropy_finite_BT),
    }
    maxima: dict[str, Tensor] = {
        "ratio_max_positive": ratio_BT.where(positive_BT, -math.inf).max(),
        "ratio_max_negative": ratio_BT.where(negative_BT, -math.inf).max(),
        "log_ratio_max_abs": log_ratio_BT.abs().where(finite_BT, -math.inf).max(),
    }
    return TokenSums(
        sums=torch.stack([amounts[name] for name in SUMS]),
        maxima=torch.stack([maxima[name] for name in MAXIMA]).double(),
        token_weights=behaviour_weights(tokens),
        sequence_weights=sequence_weights(tokens),
    )


def _divergence(tokens: Tokens) -> dict[str, Tensor]:
    """KL(policy‖reference) by the estimator k3, without weights: the sum over tokens, and their number."""
    if tokens.reference_logp_BT is None:
        nothing = tokens.log_ratio_BT.new_zeros((), dtype=torch.float64)
        return {"kl_reference": nothing, "tokens_reference": nothing}
    divergence_BT = kl_estimate(tokens.logp_BT.detach(), tokens.reference_logp_BT)
    known_BT = tokens.mask_BT & divergence_BT.isfinite()
    return {"kl_reference": _total(divergence_BT, known_BT), "tokens_reference": _count(known_BT)}


def _count(where: Tensor) -> Tensor:
    return where.sum().double()


def _total(value: Tensor, where: Tensor) -> Tensor:
    return value.where(where, 0.0).sum(dtype=torch.float64)


def drift_statistics(update_norm: float, learning_rate: float, drift_before: float) -> dict[str, float]:
    """‖Δθ‖ of this update, G_upd = ‖Δθ‖ / η, and the cumulative drift Σ‖Δθ‖.

    G_upd is NaN at a learning rate of 0: nothing was measured.
    """
    return {
        "update_norm": update_norm,
        "update_norm_per_lr": update_norm / learning_rate if learning_rate > 0 else math.nan,
        "drift": drift_before + update_norm,
    }


def age_statistics(update: int, versions: Tensor) -> dict[str, float]:
    """Mean and largest age, in updates, of the rollouts used at `update`; `versions` [B] made their first tokens."""
    age_B = update - versions.double()
    if bool((age_B < 0).any()):
        raise ValueError(f"versions go up to {versions.max().item()}; expected none after update {update}")
    return {"age_mean": age_B.mean().item(), "age_max": age_B.max().item()}
