"""Loss and diagnostics of an objective on a batch, and the functions that the trainer calls per micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stalewise.objectives.batch_statistics import Mergeable
from stalewise.objectives.diagnostics import TokenSums, token_sums
from stalewise.objectives.registry import Objective, Settings, get_objective
from stalewise.objectives.regularizers import NONE, Regularizers
from stalewise.objectives.surrogates import TokenLoss
from stalewise.objectives.tokens import Tokens, make_tokens, natural_denominator, reduced


@dataclass(frozen=True, slots=True)
class ObjectiveResult:
    """`loss` is a scalar with a gradient through `logp`; `stats` are the diagnostics of docs/metrics.md."""

    loss: Tensor
    stats: Mapping[str, float]


def evaluate(
    name: str,
    *,
    logp: Tensor,
    behaviour_logp: Tensor,
    advantage: Tensor,
    mask: Tensor,
    proximal_logp: Tensor | None = None,
    reference_logp: Tensor | None = None,
    params: Mapping[str, Any] | None = None,
    denominator: float | Tensor | None = None,
    regularizers: Regularizers = NONE,
    entropy: Tensor | None = None,
) -> ObjectiveResult:
    """Loss and diagnostics of a whole optimizer batch under the objective called `name`.

    Args:
        name: a key of `OBJECTIVES`.
        logp: [B, T] log-probabilities of the sampled tokens under the policy being trained.
        behaviour_logp: [B, T] under the policy that sampled them, at its sampling settings.
        advantage: [B].
        mask: [B, T], 1 on response tokens.
        proximal_logp: [B, T] under the proximal policy, for `decoupled_ppo` and `p3o_two_anchor`.
        reference_logp: [B, T] under the reference policy, for `regularizers` with a KL divergence.
        params: parameters of the objective; docs/objectives.md lists them.
        denominator: divisor of the summed loss; None: the response tokens of this batch (gspo: its responses).
        regularizers: terms added to the loss of every token; docs/regularizers.md.
        entropy: [B, T] of the policy's distribution at each token, for an entropy bonus.

    Raises:
        ValueError: names the argument, its shape and what was expected.

    >>> r = torch.tensor([[1.0, 2.0, 0.5]])
    >>> logp = torch.tensor([[-0.5, -1.0, -2.0]])
    >>> result = evaluate("grpo", logp=logp, behaviour_logp=logp - r.log(), advantage=torch.tensor([1.0]),
    ...                   mask=torch.ones(1, 3))
    >>> round(result.loss.item(), 6)  # −(1 + min(2, 1.2) + 0.5) / 3
    -0.9
    """
    objective = get_objective(name)
    settings = objective.settings(params)
    tokens = make_tokens(
        logp=logp,
        behaviour_logp=behaviour_logp,
        advantage=advantage,
        mask=mask,
        proximal_logp=proximal_logp,
        reference_logp=reference_logp,
    )
    if denominator is None:
        denominator = natural_denominator(tokens, objective.reduction)
    elif not bool(torch.as_tensor(denominator).isfinite().all()) or float(denominator) <= 0:
        raise ValueError(f"denominator is {float(denominator)}; expected a positive number")
    batch = objective.first_pass(tokens, settings)
    loss, token_loss = micro_batch_loss(objective, tokens, batch, settings, denominator, regularizers, entropy)
    return ObjectiveResult(loss, micro_batch_sums(tokens, token_loss, entropy).summary())


def micro_batch_loss(
    objective: Objective,
    tokens: Tokens,
    batch: Mergeable | None,
    settings: Settings,
    denominator: float | Tensor,
    regularizers: Regularizers = NONE,
    entropy_BT: Tensor | None = None,
) -> tuple[Tensor, TokenLoss]:
    """Return this micro-batch's part of the loss, regularizers included, and the objective's own loss per token.

    Does not synchronise with the device.
    """
    token_loss = objective.second_pass(tokens, batch, settings)
    loss_BT = regularizers.add_to(token_loss.loss_BT, tokens, entropy_BT)
    return reduced(loss_BT, tokens, objective.reduction, denominator), token_loss


def micro_batch_sums(tokens: Tokens, token_loss: TokenLoss, entropy_BT: Tensor | None = None) -> TokenSums:
    """The micro-batch's sums for the diagnostics. Does not synchronise with the device."""
    return token_sums(tokens, clipped_BT=token_loss.clipped_BT, vetoed_BT=token_loss.vetoed_BT, entropy_BT=entropy_BT)
