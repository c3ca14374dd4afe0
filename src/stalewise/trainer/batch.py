"""The rollouts of one update: their advantages, which of them count, and the denominator of the loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from stalewise.config.run import ObjectiveSection
from stalewise.errors import StoreError
from stalewise.objectives import constant_denominator, group_advantages
from stalewise.objectives.registry import Objective
from stalewise.store import RolloutColumns, TokenRecord, mean_reward
from stalewise.trainer.micro_batch import Layout, MicroBatch
from stalewise.trainer.rank_batch import RankBatch, split_over_ranks


@dataclass(frozen=True, slots=True, eq=False)
class UpdateBatch:
    """The rollouts of one update, with advantages, split over ranks and into the micro-batches of this rank.

    `rows` has no rollouts without a reward and no groups that the objective drops; it is empty where no advantage is
    left to learn from.
    """

    statistics: dict[str, float]  # of all rollouts of the update
    version_first: np.ndarray  # of all rollouts of the update
    rows: RolloutColumns
    advantage_B: np.ndarray
    keep_B: np.ndarray  # False: the response is out of the loss
    denominator: float  # of the loss: a number of the whole update, so that no split changes the gradient
    layout: Layout | None = None
    ranks: Sequence[RankBatch] = ()
    micro_batches: Sequence[MicroBatch] = ()

    def split(self, layout: Layout, device: torch.device, *, world: int, lockstep: bool) -> UpdateBatch:
        """The same batch split over ranks; the first of them is this one."""
        if len(self.rows) == 0:
            return self
        columns = self.rows, self.advantage_B, self.keep_B, self.denominator
        ranks = split_over_ranks(*columns, layout, world=world, lockstep=lockstep)
        return replace(self, layout=layout, ranks=ranks, micro_batches=list(ranks[0].micro_batches(layout, device)))

    def token_record(self, logp_RN: np.ndarray, flags_RN: np.ndarray) -> TokenRecord:
        """What the update computed for each token, from the values [ranks, tokens] that the ranks gathered."""
        order, logp, flags = [], [], []
        for rank, batch in enumerate(self.ranks):
            chosen = np.concatenate([np.empty(0, np.int64), *batch.plan[: batch.own_micro_batches]])
            count = int(batch.rows.response_lengths[chosen].sum())
            order.append(batch.position_B[chosen])
            logp.append(logp_RN[rank, :count])
            flags.append(flags_RN[rank, :count])
        ordered, logp_N, flags_N = map(np.concatenate, (order, logp, flags))
        return TokenRecord(self.rows, ordered, self.advantage_B, logp_N, flags_N)


def make_update_batch(
    rows: RolloutColumns, objective: Objective, section: ObjectiveSection, max_new_tokens: int
) -> UpdateBatch:
    """Compute the advantages of the rollouts of one update, and leave out those that cannot be learned from."""
    empty = np.flatnonzero((rows.response_lengths == 0) | (rows.prompt_lengths == 0))
    if len(empty):
        raise StoreError(
            f"rollout {rows.rollout_id[empty[0]]} has no prompt or no response tokens ({len(empty)} such in this "
            "update), so it cannot be trained on: generate the rollouts without it"
        )
    scored = np.isfinite(rows.reward)
    reward, reward_error = mean_reward(rows.reward, rows.group)
    statistics = {
        "rollouts": float(len(rows)),
        "reward": reward,
        "reward_error": reward_error,
        "truncated_fraction": float(rows.truncated.mean()),
        "verifier_error_fraction": 1 - float(scored.mean()),
        "degenerate_fraction": float("nan"),
    }
    nothing = UpdateBatch(statistics, rows.version_first, rows.take([]), np.zeros(0), np.zeros(0, np.bool_), 1.0)
    rows = rows.take(np.flatnonzero(scored))
    if len(rows) == 0:
        return nothing
    found = group_advantages(
        torch.from_numpy(rows.reward).float(),
        torch.from_numpy(rows.group),
        kind=objective.advantage if section.advantage == "auto" else section.advantage,
        truncated=torch.from_numpy(rows.truncated),
        truncated_rule=section.truncated,
    )
    statistics["degenerate_fraction"] = found.degenerate_groups / found.groups
    chosen = np.arange(len(rows))
    if objective.drops_degenerate_groups:
        chosen = np.flatnonzero(~found.degenerate_N.numpy())
    advantage_B, keep_B = found.advantage_N.numpy()[chosen], found.keep_N.numpy()[chosen]
    if not (advantage_B * keep_B).any():
        return nothing
    rows = rows.take(chosen)
    denominator = _loss_denominator(rows, keep_B, objective, max_new_tokens)
    return replace(nothing, rows=rows, advantage_B=advantage_B, keep_B=keep_B, denominator=denominator)


def _loss_denominator(rows: RolloutColumns, keep_B: np.ndarray, objective: Objective, max_new_tokens: int) -> float:
    if objective.constant_denominator:
        return constant_denominator(int(keep_B.sum()), max_new_tokens)
    if objective.reduction == "sequence":
        return float(keep_B.sum())
    return float(rows.response_lengths[keep_B].sum())
