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
from stalewise.objectives.surrogates import TokenLoss
from stalewise.trainer.batch import RankBatch
from stalewise.trainer.execution import Execution
from stalewise.trainer.micro_batch import MicroBatch, token_values
from stalewise.trainer.parallel import TokenReader
from stalewise.trainer.pending_update import Read, first_nonfinite, to_host


@dataclass(frozen=True, slots=True)
class UpdateRule:
    """What all updates of a run share."""

    objective: Objective
    settings: Settings  # of the objective
    regularizers: Regularizers
    max_grad_norm: float
    vcpo: bool  # scale each step by the root of the effective sample size of its responses
    record_tokens: bool


def regularizers(section: ObjectiveSection) -> Regularizers:
    """The terms that are added to the loss of every token."""
    kl = section.kl if section.kl_in == "loss" else 0.0
    return Regularizers(kl, section.kl_estimator, section.entropy_bonus)


def update(
    execution: Execution, rule: UpdateRule, batch: RankBatch, micro_batches: Sequence[MicroBatch], rate: float
) -> tuple[Read, TokenReader | None]:
    """Enqueue one update; returns a reader of its scalars and sums (see `step_metrics`) and one of its token values."""
    execution.weights.zero_gradients()
    loss, nonfinite, sums, tokens = compute_gradients(execution, rule, batch, micro_batches)
    loss, nonfinite, sums = execution.sum_over_ranks(loss, nonfinite, sums, batch.most_micro_batches)
    grad_norm = execution.clip_gradients(rule.max_grad_norm)
    # Decided on the device: to read these scalars would leave it idle. An unusable step changes nothing.
    unusable = ~(torch.stack([loss, grad_norm]).isfinite().all() & (nonfinite < 0).all())
    factor = vcpo_factor(sums.sequence_weights) if rule.vcpo else loss.new_ones(())
    # A fused step on a GPU reads float32.
    update_norm = execution.step((rate * factor).float() if rule.vcpo else rate, unusable)
    scalars = loss, grad_norm, factor, update_norm
    with execution.side_stream.reading(scalars, nonfinite, sums):  # during the next update
        packed = torch.cat([torch.stack([scalar.double() for scalar in scalars]), nonfinite.double(), sums.pack()])
        return to_host(packed), tokens


def compute_gradients(
    execution: Execution, rule: UpdateRule, batch: RankBatch, micro_batches: Sequence[MicroBatch]
) -> tuple[Tensor, Tensor, TokenSums, TokenReader | None]:
    """Forward and backward passes of all micro-batches; gradients are left on the parameters."""
    objective, settings = rule.objective, rule.settings
    proximal_logp = [execution.proximal_logp(micro_batch) for micro_batch in micro_batches]
    # Phase one: the statistics of the whole batch that the objective needs.
    statistics = None
    if objective.measure is not None and batch.most_micro_batches > 1:
        with torch.no_grad():
            passes = zip(micro_batches, proximal_logp, strict=True)
            ratios = (
                micro_batch.token_ratios(execution.forward(micro_batch)[0], proximal_logp_BT)
                for micro_batch, proximal_logp_BT in passes
            )
            statistics = merge_over_ranks(_merged([objective.measure(tokens, settings) for tokens in ratios]))
    # Phase two: the gradient.
    losses: list[Tensor] = []
    sums: list[TokenSums] = []
    nonfinite: list[Tensor] = []
    logp: list[Tensor] = []
    token_losses: list[TokenLoss] = []
    for micro_batch, proximal_logp_BT in zip(micro_batches, proximal_logp, strict=True):
        logp_BT, entropy_BT = execution.forward(micro_batch)
        tokens = micro_batch.token_ratios(logp_BT, proximal_logp_BT)
        if batch.most_micro_batches == 1:  # one pass over the whole batch serves both phases
            statistics = objective.first_pass(tokens, settings)
            statistics = None if statistics is None else merge_over_ranks(statistics)
        loss, token_loss = micro_batch_loss(
            objective, tokens, statistics, settings, batch.denominator, rule.regularizers, entropy_BT
        )
        with execution.side_stream.reading(tokens, token_loss, entropy_BT):
            sums.append(micro_batch_sums(tokens, token_loss, entropy_BT.detach()))
            nonfinite.append(first_nonfinite(tokens))
        loss.backward()
        losses.append(loss.detach())
        logp.append(logp_BT.detach())
        token_losses.append(token_loss)
    # A rank that has no rows left runs fillers: their token values are not recorded.
    recorded = batch.own_micro_batches * rule.record_tokens
    with execution.side_stream.reading(micro_batches, logp, token_losses):
        packed = _merged(sums).pack()
        values = token_values(micro_batches[:recorded], logp[:recorded], token_losses[:recorded], execution.device)
        nonfinite_P = torch.stack(nonfinite)
    execution.side_stream.join(packed, *values, nonfinite_P)
    reader = execution.parallel.gather_tokens(*values, batch.most_tokens) if rule.record_tokens else None
    return torch.stack(losses).sum(), nonfinite_P, TokenSums.unpack(packed), reader


def _merged(sums: Sequence[MergeableT]) -> MergeableT:
    return reduce(lambda left, right: left.merge(right), sums)
