"""The tokens of one micro-batch, checked, with their log-ratios; and the reduction of their losses to a scalar.

A denominator is an argument, so that a split changes nothing. Axes: B sequences, T response tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

Reduction = Literal["token", "sequence"]


@dataclass(frozen=True, slots=True)
class Tokens:
    """The input of every objective. Made by `make_tokens`; every tensor is 0 where the mask is False."""

    logp_BT: Tensor  # policy being trained; the only one that carries a gradient
    behaviour_logp_BT: Tensor  # policy that sampled, at its sampling settings
    advantage_B: Tensor  # one per sequence, constant
    mask_BT: Tensor  # bool, True on response tokens
    log_ratio_BT: Tensor  # logp − behaviour_logp
    proximal_logp_BT: Tensor | None = None  # the last snapshot of the policy, for decoupled objectives
    reference_logp_BT: Tensor | None = None  # the reference policy, if there is one

    @property
    def advantage_BT(self) -> Tensor:
        """The advantage of each token's sequence, as a view [B, T]."""
        return self.advantage_B.unsqueeze(1).expand_as(self.log_ratio_BT)

    @property
    def length_B(self) -> Tensor:
        """Response tokens of each sequence, at least 1 so that an empty row gives 0 and not NaN."""
        return self.mask_BT.sum(dim=1).clamp(min=1)

    def sequence_log_ratio_B(self) -> Tensor:
        """Log-ratio of whole responses: Σ_t (logp − behaviour_logp)."""
        return self.log_ratio_BT.sum(dim=1)


def make_tokens(
    *,
    logp: Tensor,
    behaviour_logp: Tensor,
    advantage: Tensor,
    mask: Tensor,
    proximal_logp: Tensor | None = None,
    reference_logp: Tensor | None = None,
    check_values: bool = True,
) -> Tokens:
    """Check the inputs and mask them before any arithmetic, so that padding can hold anything, even NaN and inf.

    Shapes, dtypes and devices are always checked. `check_values` also checks the numbers, which synchronises with the
    device: the trainer turns it off and counts non-finite values in the diagnostics instead.

    Args:
        logp: [B, T] log-probabilities under the policy being trained.
        behaviour_logp: [B, T] log-probabilities under the policy that sampled.
        advantage: [B].
        mask: [B, T], 1 on response tokens and 0 elsewhere (bool or number).
        proximal_logp: [B, T] or None.
        reference_logp: [B, T] or None.
        check_values: whether to check the numbers, too.

    Raises:
        ValueError: names the argument, its shape and what was expected.
    """
    others = {"proximal_logp": proximal_logp, "reference_logp": reference_logp}
    given = {name: value for name, value in others.items() if value is not None}
    _check_shapes(logp, advantage, {"behaviour_logp": behaviour_logp, "mask": mask, **given})
    if check_values:
        _check_mask(mask)
    mask_BT = mask.bool()
    if check_values:
        _check_finite("logp", logp, mask_BT)
        _check_finite("behaviour_logp", behaviour_logp, mask_BT)
        _check_finite("advantage", advantage, mask_BT.any(dim=1))
        for name, value in given.items():
            _check_finite(name, value, mask_BT)
    # Half precision holds log-probabilities to 3 digits: a ratio of them would be noise.
    dtype = torch.promote_types(logp.dtype, torch.float32)
    logp_BT = _masked(logp, mask_BT, dtype)
    behaviour_logp_BT = _masked(behaviour_logp, mask_BT, dtype).detach()
    return Tokens(
        logp_BT=logp_BT,
        behaviour_logp_BT=behaviour_logp_BT,
        advantage_B=advantage.to(dtype).detach(),
        mask_BT=mask_BT,
        log_ratio_BT=logp_BT - behaviour_logp_BT,
        **{f"{name}_BT": _masked(value, mask_BT, dtype).detach() for name, value in given.items()},
    )


def host_list(value: Tensor) -> list[Any]:
    """The numbers of a tensor as Python lists (torch's stubs leave the type of `tolist` open)."""
    return value.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def _masked(value_BT: Tensor, mask_BT: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.where(mask_BT, value_BT.to(dtype), 0.0)


def _check_shapes(logp: Tensor, advantage: Tensor, others: Mapping[str, Tensor]) -> None:
    if logp.ndim != 2:
        raise ValueError(f"logp has shape {list(logp.shape)}; expected [B, T]: sequences × response tokens")
    if not logp.is_floating_point():
        raise ValueError(f"logp has dtype {logp.dtype}; expected floating point")
    B, T = logp.shape
    if B == 0 or T == 0:
        raise ValueError(f"logp has shape {[B, T]}: the batch is empty; expected at least one token")
    for name, value in others.items():
        if value.shape != logp.shape:
            raise ValueError(f"{name} has shape {list(value.shape)}; expected {[B, T]}, the shape of logp")
    if advantage.shape != (B,):
        hint = " (one advantage per sequence, not one per token)" if advantage.shape == (B, T) else ""
        raise ValueError(f"advantage has shape {list(advantage.shape)}; expected {[B]}{hint}")
    for name, value in {**others, "advantage": advantage}.items():
        if value.device != logp.device:
            raise ValueError(f"{name} is on {value.device}; expected {logp.device}, the device of logp")


def _check_mask(mask: Tensor) -> None:
    if mask.dtype is not torch.bool and not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError(
            f"mask has shape {list(mask.shape)} and values from {mask.min().item()} to {mask.max().item()}; "
            "expected only 0 and 1"
        )
    if not bool(mask.any()):
        raise ValueError(f"mask has shape {list(mask.shape)} and no 1: the batch is empty; expected a response token")


def _check_finite(name: str, value: Tensor, where: Tensor) -> None:
    bad = where & ~torch.isfinite(value)
    if bool(bad.any()):
        raise ValueError(
            f"{name} has shape {list(value.shape)} and {int(bad.sum())} non-finite values on response tokens, "
            f"first at {host_list(bad.nonzero()[:5])}; expected finite numbers"
        )


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
