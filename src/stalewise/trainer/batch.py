"""The rollouts of one update: advantages, the denominator of the loss, and the split over ranks.

Rows are split over ranks by tokens; rows of one prompt stay together. Advantages and the denominator are of the whole
update, so that no split changes the gradient. One process is one rank with all rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from stalewise.config.sections import ObjectiveSection
from stalewise.distributed import Message
from stalewise.errors import StoreError
from stalewise.objectives import constant_denominator, group_advantages
from stalewise.objectives.registry import Objective
from stalewise.objectives.regularizers import kl_of_responses, overlong_penalty
from stalewise.store import RolloutColumns, TokenRecord, concatenate, mean_reward
from stalewise.trainer.micro_batch import Layout, MicroBatch, micro_batches, order_and_cost, plan_micro_batches

_NUMBERS = ("own_micro_batches", "denominator", "most_micro_batches", "most_tokens")
_ARRAYS = ("advantage_B", "keep_B", "position_B")


@dataclass(frozen=True, slots=True, eq=False)
class RankBatch:
    """The rows of an update that one rank runs.

    A rank in lockstep with others runs a filler when it has no micro-batch left: a row outside of the loss that is not
    recorded.
    """

    rows: RolloutColumns
    advantage_B: np.ndarray
    keep_B: np.ndarray  # False: the response is out of the loss
    position_B: np.ndarray  # positions of the rows in the update, without the filler
    plan: list[np.ndarray]  # positions in `rows` of the rows of each micro-batch
    own_micro_batches: int  # without fillers
    denominator: float  # of the loss over the whole update
    most_micro_batches: int  # of any rank
    most_tokens: int  # trained tokens of any rank

    def micro_batches(self, layout: Layout, device: torch.device) -> Iterator[MicroBatch]:
        """The micro-batches of the plan."""
        values = {"advantage_B": self.advantage_B, "keep_B": self.keep_B}
        return micro_batches(self.rows, layout, device, plan=self.plan, **values)

    def token_at(self, micro_batch: int, index: int) -> tuple[int, int]:
        """Rollout id and token of an index into the flattened [B, T] of a micro-batch."""
        chosen = self.plan[micro_batch]
        row, token = divmod(index, int(self.rows.response_lengths[chosen].max()))
        return int(self.rows.rollout_id[chosen[row]]), token

    def pack(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """The record and the arrays of a message to the rank."""
        columns = {f"rows.{field.name}": getattr(self.rows, field.name) for field in fields(RolloutColumns)}
        arrays = {name: array for name, array in columns.items() if array is not None}
        arrays |= {name: getattr(self, name) for name in _ARRAYS}
        arrays |= {"plan": np.concatenate(self.plan), "sizes": np.array([len(chosen) for chosen in self.plan])}
        return {name: getattr(self, name) for name in _NUMBERS}, arrays


def unpack_rank_batch(message: Message) -> RankBatch:
    """The inverse of `RankBatch.pack`."""
    arrays = message.arrays
    return RankBatch(
        rows=RolloutColumns(**{field.name: arrays.get(f"rows.{field.name}") for field in fields(RolloutColumns)}),  # pyright: ignore[reportArgumentType]
        plan=np.split(arrays["plan"], np.cumsum(arrays["sizes"])[:-1]),
        **{name: arrays[name] for name in _ARRAYS},
        **message.record,
    )


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
    denominator: float  # of the loss
    layout: Layout | None = None
    ranks: Sequence[RankBatch] = ()
    micro_batches: Sequence[MicroBatch] = ()

    def split(self, layout: Layout, device: torch.device, *, world: int, lockstep: bool) -> UpdateBatch:
        """The same batch split over ranks; the first of them is this one."""
        if len(self.rows) == 0:
            return self
        ranks = split_over_ranks(self, layout, world=world, lockstep=lockstep)
        return replace(self, layout=layout, ranks=ranks, micro_batches=list(ranks[0].micro_batches(layout, device)))

    def token_record(self, logp_RN: np.ndarray, flags_RN: np.ndarray) -> TokenRecord:
        """The record of all tokens of the update, from the values [ranks, tokens] that the ranks gathered."""
        order, logp, flags = [], [], []
        for rank, batch in enumerate(self.ranks):
            chosen = np.concatenate([np.empty(0, np.int64), *batch.plan[: batch.own_micro_batches]])
            trained = batch.rows.take(chosen).trained
            order.append(batch.position_B[chosen])
            for values, computed in ((logp, logp_RN), (flags, flags_RN)):
                values.append(np.zeros(len(trained), dtype=computed.dtype))  # 0 for tokens from outside
                values[-1][trained] = computed[rank, : int(trained.sum())]
        ordered, logp_N, flags_N = map(np.concatenate, (order, logp, flags))
        return TokenRecord(self.rows, ordered, self.advantage_B, logp_N, flags_N)


def make_update_batch(
    rows: RolloutColumns,
    objective: Objective,
    section: ObjectiveSection,
    max_new_tokens: int,
    without_variance: str = "keep",
) -> UpdateBatch:
    """Compute the advantages of the rollouts of one update, and leave out rollouts without anything to learn.

    `without_variance` says what happens to groups whose rewards are all equal; see `config.sections.BatchSection`.
    """
    empty = np.flatnonzero((rows.trained_lengths == 0) | (rows.prompt_lengths == 0))
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
    reward = task_rewards(rows, section, max_new_tokens)
    group = torch.from_numpy(rows.group)
    advantages = group_advantages(
        torch.from_numpy(reward - kl_in_reward(rows, section)).float(),
        group,
        kind=objective.advantage if section.advantage == "auto" else section.advantage,
        truncated=torch.from_numpy(rows.truncated),
        truncated_rule=section.truncated,
    )
    # A divergence in the reward gives every group some variance, but no information about the task.
    equal = group_advantages(torch.from_numpy(reward).float(), group) if section.kl else advantages
    statistics["degenerate_fraction"] = equal.degenerate_groups / equal.groups
    drops = objective.drops_degenerate_groups or without_variance in ("drop", "refill")
    chosen = np.arange(len(rows))
    if drops or without_variance == "skip":
        chosen = np.flatnonzero(~equal.degenerate_N.numpy())
    advantage_B = advantages.advantage_N.numpy()[chosen]
    keep_B = advantages.keep_N.numpy()[chosen]
    if not keep_B.any() or not (section.regularizes_loss or (advantage_B * keep_B).any()):
        return nothing
    kept = rows.take(chosen)
    if drops:
        denominator = _loss_denominator(kept, keep_B, objective, max_new_tokens)
    else:  # skipped groups count in the denominator: their loss is 0
        denominator = _loss_denominator(rows, advantages.keep_N.numpy(), objective, max_new_tokens)
    return replace(nothing, rows=kept, advantage_B=advantage_B, keep_B=keep_B, denominator=denominator)


def task_rewards(rows: RolloutColumns, section: ObjectiveSection, max_new_tokens: int) -> np.ndarray:
    """The reward of each row, with the penalty on long responses."""
    if not section.overlong_tokens:
        return rows.reward
    margin, factor = section.overlong_tokens, section.overlong_penalty
    return rows.reward + overlong_penalty(
        rows.response_lengths, max_tokens=max_new_tokens, margin=margin, factor=factor
    )


def kl_in_reward(rows: RolloutColumns, section: ObjectiveSection) -> np.ndarray | float:
    """The penalty of each row for the sampling policy's divergence from the reference; 0 if it is in the loss."""
    if not section.kl:
        return 0.0
    if rows.reference_logp is None:
        raise StoreError("these rollouts have no log-probabilities under a reference, which objective.kl needs")
    if section.kl_in == "loss":
        return 0.0
    values = rows.behaviour_logp, rows.reference_logp
    return section.kl * kl_of_responses(*values, rows.response_offsets, section.kl_estimator)


def _loss_denominator(rows: RolloutColumns, keep_B: np.ndarray, objective: Objective, max_new_tokens: int) -> float:
    if objective.constant_denominator:
        return constant_denominator(int(keep_B.sum()), max_new_tokens)
    if objective.reduction == "sequence":
        return float(keep_B.sum())
    return float(rows.trained_lengths[keep_B].sum())


def split_over_ranks(batch: UpdateBatch, layout: Layout, *, world: int, lockstep: bool) -> list[RankBatch]:
    """The batch of each rank. `lockstep`: all ranks must run equally many micro-batches."""
    rows = batch.rows
    rank_B = ranks_of_rows(rows, layout, world) if world > 1 else np.zeros(len(rows), dtype=np.int64)
    positions = [np.flatnonzero(rank_B == rank) for rank in range(world)]
    parts = [rows.take(chosen) for chosen in positions] if world > 1 else [rows]
    plans = [plan_micro_batches(part, layout) for part in parts]
    most = max(map(len, plans))
    most_tokens = max(int(part.trained.sum()) for part in parts)
    filler = rows.take([np.argmin(rows.prompt_lengths + rows.response_lengths)])  # the shortest row
    batches = []
    for chosen, part, plan in zip(positions, parts, plans, strict=True):
        missing = (most if lockstep else max(1, len(plan))) - len(plan)
        padding = (0, 1 if missing else 0)
        batches.append(
            RankBatch(
                rows=concatenate([part, filler]) if missing else part,
                advantage_B=np.pad(batch.advantage_B[chosen], padding),
                keep_B=np.pad(batch.keep_B[chosen], padding),
                position_B=chosen,
                plan=[*plan, *[np.array([len(part)])] * missing],
                own_micro_batches=len(plan),
                denominator=batch.denominator,
                most_micro_batches=most,
                most_tokens=most_tokens,
            )
        )
    return batches


def ranks_of_rows(rows: RolloutColumns, layout: Layout, world: int) -> np.ndarray:
    """The rank of each row [B]: about equally many tokens each, in the order of micro-batches."""
    order, cost = order_and_cost(rows, layout)
    middle = np.cumsum(cost) - cost / 2
    rank_B = np.empty(len(rows), dtype=np.int64)
    rank_B[order] = np.minimum(middle * world // cost.sum(), world - 1)
    return rank_B
