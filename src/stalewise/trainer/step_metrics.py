"""The numbers of a step, once they have come home from the device: metrics, or why there was none."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stalewise.errors import ModelError, StalewiseError
from stalewise.objectives import Tokens
from stalewise.objectives.diagnostics import TokenSums, drift_statistics
from stalewise.trainer.rank_batch import RankBatches


class NonFiniteUpdate(StalewiseError, ArithmeticError):
    """An update whose gradient or ratios are not finite: nothing was changed."""

    exit_code = 4


def out_of_memory(token_budget: int) -> ModelError:
    """What to do about it."""
    return ModelError(
        f"out of memory with {token_budget} tokens a micro-batch: lower learner.tokens_per_micro_batch, or set "
        "learner.gradient_checkpointing"
    )


def first_nonfinite(tokens: Tokens) -> Tensor:
    """Place in the flattened [B, T] of the first token whose ratio is not a finite number, −1 where there is none."""
    log_ratio_BT = tokens.log_ratio_BT.detach()
    bad = (tokens.mask_BT & ~(log_ratio_BT.isfinite() & log_ratio_BT.exp().isfinite())).flatten()
    return torch.where(bad.any(), bad.int().argmax(), -1)


def read_step(
    numbers: Tensor, update: int, rate: float, dealt: RankBatches, *, drift_before: float
) -> dict[str, float]:
    """Metrics of a step: loss, gradient norm, step factor and ‖Δθ‖, then places of all micro-batches, then sums."""
    count = len(dealt.shares) * dealt.shares[0].whole.passes
    first, places, packed = numbers.tensor_split([4, 4 + count])
    loss, grad_norm, factor, norm = first.tolist()
    stats = TokenSums.unpack(packed).summary()
    if stats["nonfinite"] or not (math.isfinite(grad_norm) and math.isfinite(loss)):
        raise NonFiniteUpdate(
            f"update {update}: {int(stats['nonfinite'])} tokens with a non-finite ratio"
            f"{_name_places(dealt, places.tolist())}, gradient norm {grad_norm:g}, loss {loss:g}; nothing "
            "was changed: start a new run with a lower optimizer.learning_rate or more stages"
        )
    if not math.isfinite(norm):
        raise NonFiniteUpdate(
            f"update {update} at learning rate {rate * factor:g} made weights that are not finite; "
            "the last checkpoint is whole: start a new run with a lower optimizer.learning_rate"
        )
    return {
        "loss": loss,
        "grad_norm": grad_norm,
        "learning_rate": rate,
        "step_factor": factor,
        **stats,
        **drift_statistics(norm, rate * factor, drift_before),
    }


def _name_places(dealt: RankBatches, places: list[float]) -> str:
    """Name the first bad token of each micro-batch by rollout and place in the response."""
    passes = dealt.shares[0].whole.passes
    found = [dealt.first_of(*divmod(index, passes), int(place)) for index, place in enumerate(places) if place >= 0]
    named = [f"rollout {rollout} token {token}" for rollout, token in found]
    return f" ({', '.join(named[:3])})" if named else ""
