"""One update on one page: forward, ratios, batch statistics, loss, backward, sum over ranks, clip, step, metrics.

`Execution` runs the policy: it alone knows devices, streams, CUDA graphs and shards. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from stalewise.config.sections import ObjectiveSection
from stalewise.distributed import MergeableT, merge_over_ranks
from stalewise.objectives import Objective, Regularizers, Settings, micro_batch_loss, micro_batch_sums
from stalewise.objectives.batch_statistics import vcpo_factor
from stalewise.objectives.diagnostics import TokenSums
from stalewise.trainer.batch import RankBatch
from stalewise.trainer.execution import Execution
from stalewise.trainer.micro_batch import MicroBatch, token_values
from stalewise.trainer.parallel import TokenReader
from stalewise.trainer.pending_update import Read, first_nonfinite, to_host


@dataclass(frozen=True, slots=True)
class UpdateRule:
    """What every update of a run has in common."""

    objective: Objective
    settings: Settings  # of the objective
    regularizers: Regularizers
    max_grad_norm: float
    vcpo: bool  # scale each step by the root of the effective sample size of its responses
    record_tokens: bool


def regularizers(section: ObjectiveSection) -> Regularizers:
    """The terms that the loss of every token gets."""
    kl = section.kl if section.kl_in == "loss" else 0.0
    return Regularizers(kl, section.kl_estimator, section.entropy_bonus)


def update(
    execution: Execution, rule: UpdateRule, batch: RankBatch, parts: Sequence[MicroBatch], rate: float
) -> tuple[Read, TokenReader | None]:
    """Enqueue one update; returns readers of its numbers (see `step_metrics`) and of its token values."""
    execution.weights.zero_gradients()
    loss, nonfinite, sums, tokens = compute_gradients(execution, rule, batch, parts)
    loss, nonfinite, sums = execution.sum_over_ranks(loss, nonfinite, sums, batch.most_micro_batches)
    grad_norm = execution.clip_gradients(rule.max_grad_norm)
    # Decided on the device, where waiting would leave it idle: a step on such numbers changes nothing.
    unusable = ~(torch.stack([loss, grad_norm]).isfinite().all() & (nonfinite < 0).all())
    factor = vcpo_factor(sums.sequence_weights) if rule.vcpo else loss.new_ones(())
    # As float32, which a fused step reads on a GPU.
    update_norm = execution.step((rate * factor).float() if rule.vcpo else rate, unusable)
    numbers = loss, grad_norm, factor, update_norm
    with execution.side_stream.reading(numbers, nonfinite, sums):  # during the next update
        packed = torch.cat([torch.stack([x.double() for x in numbers]), nonfinite.double(), sums.pack()])
        return to_host(packed), tokens


def compute_gradients(
    execution: Execution, rule: UpdateRule, batch: RankBatch, parts: Sequence[MicroBatch]
) -> tuple[Tensor, Tensor, TokenSums, TokenReader | None]:
    """Forward and backward passes of all micro-batches; gradients are left on the parameters."""
    objective, settings = rule.objective, rule.settings
    proximal_logp = [execution.proximal_logp(part) for part in parts]
    # Phase one: what the objective needs to know of the whole batch.
    statistics = None
    if objective.measure is not None and batch.most_micro_batches > 1:
        with torch.no_grad():
            passes = zip(parts, proximal_logp, strict=True)
            ratios = (part.token_ratios(execution.forward(part)[0], near_BT) for part, near_BT in passes)
            statistics = merge_over_ranks(_merged([objective.measure(tokens, settings) for tokens in ratios]))
    # Phase two: the gradient.
    losses, sums, nonfinite, logp, token_losses = [], [], [], [], []
    for part, near_BT in zip(parts, proximal_logp, strict=True):
        logp_BT, entropy_BT = execution.forward(part)
        tokens = part.token_ratios(logp_BT, near_BT)
        if batch.most_micro_batches == 1:  # the whole batch in one pass, which serves both phases
            statistics = objective.first_pass(tokens, settings)
            statistics = None if statistics is None else merge_over_ranks(statistics)
        added = rule.regularizers, entropy_BT
        loss, token_loss = micro_batch_loss(objective, tokens, statistics, settings, batch.denominator, *added)
        with execution.side_stream.reading(tokens, token_loss, entropy_BT):
            sums.append(micro_batch_sums(tokens, token_loss, entropy_BT.detach()))
            nonfinite.append(first_nonfinite(tokens))
        loss.backward()
        losses.append(loss.detach())
        logp.append(logp_BT.detach())
        token_losses.append(token_loss)
    # Sums and token values, without the fillers of a rank that has no rows left.
    recorded = batch.own_micro_batches * rule.record_tokens
    with execution.side_stream.reading(parts, logp, token_losses):
        packed = _merged(sums).pack()
        values = token_values(parts[:recorded], logp[:recorded], token_losses[:recorded], execution.device)
        nonfinite_P = torch.stack(nonfinite)
    execution.side_stream.join(packed, *values, nonfinite_P)
    reader = execution.parallel.gather_tokens(*values, batch.most_tokens) if rule.record_tokens else None
    return torch.stack(losses).sum(), nonfinite_P, TokenSums.unpack(packed), reader


def _merged(sums: Sequence[MergeableT]) -> MergeableT:
    return reduce(lambda one, other: one.merge(other), sums)
