"""Reduction of token losses to a scalar. The denominator is an argument, so that a split changes nothing."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from stalewise.objectives.tokens import Tokens

Reduction = Literal["token", "sequence"]


def reduced(loss_BT: Tensor, tokens: Tokens, reduction: Reduction, denominator: float | Tensor) -> Tensor:
    """Σ over response tokens of weight · loss, divided by `denominator`.

    The weight of a token is 1 (`token`), or 1 / length of its response (`sequence`: the sum of per-response means).
    Clipped and vetoed tokens count in the denominator, too.
    """
    if reduction == "sequence":
        loss_BT = loss_BT / tokens.length_B.unsqueeze(1)
    return loss_BT.where(tokens.mask_BT, 0.0).sum() / denominator


def natural_denominator(tokens: Tokens, reduction: Reduction) -> Tensor:
    """The denominator that makes `reduced` a mean: response tokens, or responses that have tokens.

    With micro-batches or ranks, sum these over all of them first.
    """
    return tokens.mask_BT.any(dim=1).sum() if reduction == "sequence" else tokens.mask_BT.sum()


def constant_denominator(sequences: int, max_tokens: int) -> float:
    """Dr. GRPO's denominator: a constant, so that long responses are not weighted down."""
    if sequences < 1 or max_tokens < 1:
        raise ValueError(f"sequences and max_tokens are {sequences} and {max_tokens}; expected at least 1 of each")
    return float(sequences * max_tokens)
