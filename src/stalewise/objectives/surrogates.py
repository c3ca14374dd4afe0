"""The objectives, one pure function each.

    name(tokens, batch, *, parameters) -> TokenLoss

`tokens` is a micro-batch [B, T]; `batch` holds the statistics of the whole optimizer batch from phase one (None if the
objective needs none), as constants; the result is an unreduced loss per token, with the tokens it clipped or vetoed.
ℓ is `logp`, b `behaviour_logp`, p `proximal_logp`, r = exp(ℓ − b), A the advantage, sg stop-gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from stalewise.objectives.batch_statistics import AnchorSums, SecondMomentSums, WeightSums, harmful
from stalewise.objectives.tokens import Tokens

M2POVariant = Literal["paper", "released"]
VetoScope = Literal["suffix", "post", "trigger", "sequence"]
Anchors = Literal["separate", "mixture"]

LEAST_WEIGHT = 1e-30  # smallest weight of a policy in a mixture: the log of 0 has no gradient


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Loss of each token [B, T], and which tokens had their ratio bounded or their loss vetoed (bool [B, T])."""

    loss_BT: Tensor
    clipped_BT: Tensor
    vetoed_BT: Tensor
    trigger_BT: Tensor | None = None  # tokens that trigger a veto, if the objective has one


def grpo(tokens: Tokens, batch: None, *, clip_low: float = 0.8, clip_high: float = 1.2) -> TokenLoss:
    """−min(r·A, clip(r, clip_low, clip_high)·A). Shao et al. 2024, without its KL term."""
    return _clipped(tokens, tokens.log_ratio_BT, clip_low, clip_high)


def dapo(tokens: Tokens, batch: None, *, clip_low: float = 0.8, clip_high: float = 1.28) -> TokenLoss:
    """GRPO with a higher upper bound. Yu et al. 2025; groups without variance are dropped before this."""
    return _clipped(tokens, tokens.log_ratio_BT, clip_low, clip_high)


def dr_grpo(tokens: Tokens, batch: None, *, clip_low: float = 0.8, clip_high: float = 1.2) -> TokenLoss:
    """GRPO on advantages without division by the standard deviation, with a constant denominator. Liu et al. 2025."""
    return _clipped(tokens, tokens.log_ratio_BT, clip_low, clip_high)


def gspo(tokens: Tokens, batch: None, *, clip_low: float = 1 - 3e-4, clip_high: float = 1 + 4e-4) -> TokenLoss:
    """−min(s·A, clip(s)·A) with one ratio s = exp(mean_t(ℓ − b)) per response. Zheng et al. 2025."""
    log_ratio_B = tokens.sequence_log_ratio_B() / tokens.length_B
    return _clipped(tokens, log_ratio_B.unsqueeze(1).expand_as(tokens.log_ratio_BT), clip_low, clip_high)


def cispo(tokens: Tokens, batch: None, *, cap: float = 5.0) -> TokenLoss:
    """−sg(min(r, cap))·A·ℓ. MiniMax 2025; the cap is absolute: a bound on the ratio itself, not an ε above 1."""
    return _weighted(tokens, tokens.log_ratio_BT, cap)


def tis(tokens: Tokens, batch: None, *, cap: float = 2.0) -> TokenLoss:
    """−sg(min(r, cap))·A·ℓ: truncated importance sampling. Yao et al. 2025."""
    return _weighted(tokens, tokens.log_ratio_BT, cap)


def decoupled_ppo(
    tokens: Tokens, batch: None, *, clip_low: float = 0.8, clip_high: float = 1.2, cap: float = 2.0
) -> TokenLoss:
    """sg(min(exp(p − b), cap)) times the PPO clip on exp(ℓ − p). Hilton et al. 2022, Fu et al. 2025."""
    proximal_logp_BT = _proximal(tokens)
    weight_BT = _capped(proximal_logp_BT - tokens.behaviour_logp_BT, cap)
    clipped = _clipped(tokens, tokens.logp_BT - proximal_logp_BT, clip_low, clip_high)
    return TokenLoss(weight_BT * clipped.loss_BT, clipped.clipped_BT, clipped.vetoed_BT)


def topr(tokens: Tokens, batch: None) -> TokenLoss:
    """−w·A·ℓ; w = 1 where A ≥ 0, else the whole response's ratio cut to [0, 1]. Le Roux et al. 2025, sequence level."""
    log_ratio_BT = tokens.sequence_log_ratio_B().unsqueeze(1).expand_as(tokens.log_ratio_BT)
    negative_BT = tokens.advantage_BT < 0
    return _weighted(tokens, torch.where(negative_BT, log_ratio_BT, 0.0), cap=1.0)


def m2po(
    tokens: Tokens, batch: SecondMomentSums, *, variant: M2POVariant = "paper", threshold: float = 0.04
) -> TokenLoss:
    """−r·A; if the mean of v = (ℓ − b)² over harmful tokens exceeds the threshold, the largest are taken out.

    Zheng et al. 2025. `paper` drops them (loss 0); `released` clips all tokens to [e^−τ, e^τ], as the authors' code.
    """
    log_ratio_BT = tokens.log_ratio_BT
    square_BT = log_ratio_BT.detach().square()
    harmful_BT = harmful(tokens)
    if variant == "paper":
        clipped_BT = harmful_BT & ~(square_BT < batch.drop_from())
        bound_BT = torch.zeros_like(square_BT)
    else:
        clip_above = batch.clip_above()
        clipped_BT = harmful_BT & ~(square_BT <= clip_above)
        # The token that determines τ is exactly on the kink of the clip: it gets the mean of both slopes, ½.
        kink_BT = harmful_BT & (square_BT == clip_above)
        log_ratio_BT = torch.where(kink_BT, (log_ratio_BT + log_ratio_BT.detach()) / 2, log_ratio_BT)
        # If nothing is clipped, τ is inf and e^τ · 0 would be NaN; then no token uses the bound.
        tau = torch.where(clip_above.isfinite(), clip_above.sqrt(), 0.0).to(square_BT.dtype)
        bound_BT = (tau * tokens.advantage_BT.sign()).exp()
    return _bounded(tokens, log_ratio_BT, clipped_BT, bound_BT)


def mu_grpo(
    tokens: Tokens,
    batch: None,
    *,
    clip_low: float = 0.0,
    clip_high: float = 5.0,
    kappa: float = 1e-4,
    scope: VetoScope = "suffix",
) -> TokenLoss:
    """Relaxed clip −min(r·A, clip(r, clip_low, clip_high)·A) with the negative-advantage veto.

    In a response with A < 0 a trigger is a token with r < kappa: the policy hardly ever samples this prefix any more,
    and what follows is off its support. `scope` selects the tokens whose loss is dropped: the first trigger and all
    after it (`suffix`), only those after it (`post`), triggers alone (`trigger`), or the whole response (`sequence`).
    """
    relaxed = _clipped(tokens, tokens.log_ratio_BT, clip_low, clip_high)
    trigger_BT = tokens.mask_BT & (tokens.advantage_BT < 0) & (tokens.log_ratio_BT < math.log(kappa))
    vetoed_BT = _vetoed(tokens, trigger_BT, scope)
    return TokenLoss(
        relaxed.loss_BT.where(~vetoed_BT, 0.0),
        clipped_BT=relaxed.clipped_BT & ~vetoed_BT,
        vetoed_BT=vetoed_BT,
        trigger_BT=trigger_BT,
    )


def p3o(tokens: Tokens, batch: WeightSums, *, k3_clamp: float = 0.0) -> TokenLoss:
    """−sg(min(r, ESS))·A·ℓ + (1 − ESS)·k3, the ESS of the whole optimizer batch a constant.

    k3 = exp(b − ℓ) − (b − ℓ) − 1, with the gradient through ℓ. `k3_clamp` > 0 bounds the exponent's absolute value.
    """
    ess = batch.effective_sample_size().to(tokens.logp_BT.dtype)
    policy = _weighted(tokens, tokens.log_ratio_BT, ess)
    regularizer_BT = (1 - ess) * _k3(-tokens.log_ratio_BT, k3_clamp)
    return TokenLoss(policy.loss_BT + regularizer_BT, policy.clipped_BT, policy.vetoed_BT)


def p3o_two_anchor(
    tokens: Tokens, batch: AnchorSums, *, anchors: Anchors = "separate", k3_clamp: float = 0.0
) -> TokenLoss:
    """P3O with a second ESS, relative to the proximal policy; the smaller ESS is the cap on r.

    `separate`: each policy has a trust region, (1 − ESS_b)·k3(b) + (1 − ESS_p)·k3(p). `mixture`: one region around the
    mixture of both, weighted by 1 − ESS of each, (1 − min(ESS_b, ESS_p))·k3(mixture).
    """
    behaviour_logp_BT, proximal_logp_BT = tokens.behaviour_logp_BT, _proximal(tokens)
    ess_behaviour = batch.behaviour.effective_sample_size().to(tokens.logp_BT.dtype)
    ess_proximal = batch.proximal.effective_sample_size().to(tokens.logp_BT.dtype)
    least = torch.minimum(ess_behaviour, ess_proximal)
    policy = _weighted(tokens, tokens.log_ratio_BT, least)
    if anchors == "mixture":
        weight_b, weight_p = 1 - ess_behaviour + LEAST_WEIGHT, 1 - ess_proximal + LEAST_WEIGHT
        mixture_logp_BT = torch.logaddexp(weight_b.log() + behaviour_logp_BT, weight_p.log() + proximal_logp_BT)
        mixture_logp_BT = mixture_logp_BT - (weight_b + weight_p).log()
        regularizer_BT = (1 - least) * _k3(mixture_logp_BT - tokens.logp_BT, k3_clamp)
    else:
        regularizer_BT = (1 - ess_behaviour) * _k3(-tokens.log_ratio_BT, k3_clamp)
        regularizer_BT = regularizer_BT + (1 - ess_proximal) * _k3(proximal_logp_BT - tokens.logp_BT, k3_clamp)
    return TokenLoss(policy.loss_BT + regularizer_BT, policy.clipped_BT, policy.vetoed_BT)


def _clipped(tokens: Tokens, log_ratio_BT: Tensor, low: float, high: float) -> TokenLoss:
    """−min(r·A, clip(r, low, high)·A), decided on the log-ratio."""
    positive_BT = tokens.advantage_BT > 0
    negative_BT = tokens.advantage_BT < 0
    log_low = math.log(low) if low > 0 else -math.inf
    too_high_BT = positive_BT & (log_ratio_BT > math.log(high))
    too_low_BT = negative_BT & (log_ratio_BT < log_low)
    # Python numbers alone would make a float32 tensor for any dtype of the batch; `new_tensor` synchronises with the
    # GPU.
    bound_BT = torch.where(positive_BT, log_ratio_BT.new_full((), high), low)
    return _bounded(tokens, log_ratio_BT, too_high_BT | too_low_BT, bound_BT)


def _bounded(tokens: Tokens, log_ratio_BT: Tensor, clipped_BT: Tensor, bound_BT: Tensor) -> TokenLoss:
    """−r·A, with the constant `bound` in place of r on clipped tokens.

    The clipped log-ratio is replaced before exp: an overflow in a branch not taken would still give NaN gradients.
    """
    ratio_BT = log_ratio_BT.where(~clipped_BT, 0.0).exp()
    loss_BT = -tokens.advantage_BT * torch.where(clipped_BT, bound_BT, ratio_BT)
    return TokenLoss(loss_BT, clipped_BT & tokens.mask_BT, torch.zeros_like(clipped_BT))


def _capped(log_weight_BT: Tensor, cap: float | Tensor) -> Tensor:
    """sg(min(exp(log_weight), cap)), without overflow."""
    return log_weight_BT.detach().clamp(max=_log_cap(cap)).exp()


def _log_cap(cap: float | Tensor) -> float | Tensor:
    return cap.log() if isinstance(cap, Tensor) else math.log(cap)


def _weighted(tokens: Tokens, log_weight_BT: Tensor, cap: float | Tensor) -> TokenLoss:
    """−sg(min(exp(log_weight), cap))·A·ℓ."""
    weight_BT = _capped(log_weight_BT, cap)
    clipped_BT = tokens.mask_BT & (log_weight_BT > _log_cap(cap))
    loss_BT = -weight_BT * tokens.advantage_BT * tokens.logp_BT
    return TokenLoss(loss_BT, clipped_BT, torch.zeros_like(clipped_BT))


def _k3(log_ratio_BT: Tensor, clamp: float = 0.0) -> Tensor:
    """exp(x) − x − 1: never negative, 0 at x = 0. Above 0, `clamp` bounds |x| in the exponential alone."""
    exponent_BT = log_ratio_BT.clamp(-clamp, clamp) if clamp else log_ratio_BT
    return torch.expm1(exponent_BT) - log_ratio_BT


def _vetoed(tokens: Tokens, trigger_BT: Tensor, scope: VetoScope) -> Tensor:
    """Tokens that the negative-advantage veto drops, bool [B, T]."""
    if scope == "trigger":
        return trigger_BT
    if scope == "sequence":
        return tokens.mask_BT & trigger_BT.any(dim=1, keepdim=True)
    triggers_so_far_BT = trigger_BT.cumsum(dim=1)
    if scope == "post":  # everything after the first trigger, including later triggers
        triggers_so_far_BT = triggers_so_far_BT - trigger_BT.int()
    return tokens.mask_BT & (triggers_so_far_BT > 0)


def _proximal(tokens: Tokens) -> Tensor:
    assert tokens.proximal_logp_BT is not None  # checked by the registry
    return tokens.proximal_logp_BT
