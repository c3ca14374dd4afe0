"""Splits an update over ranks: which rows each rank runs, and what it must know of the whole update.

Rows are split by tokens; rows of one prompt stay together. Advantages and the denominator are of the whole update.
One process is one rank with all rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from stalewise.distributed import Message
from stalewise.store import RolloutColumns, concatenate
from stalewise.trainer.micro_batch import Layout, MicroBatch, micro_batches, order_and_cost, plan_micro_batches

_NUMBERS = ("own_micro_batches", "denominator", "most_micro_batches", "most_tokens")
_ARRAYS = ("advantage_B", "keep_B", "position_B")


@dataclass(frozen=True, slots=True, eq=False)
class RankBatch:
    """The rows of an update that one rank runs.

    A rank that has to keep pace with others but has no micro-batch left runs a filler: one row outside of the loss.
    Fillers come last, and nothing of them is recorded.
    """

    rows: RolloutColumns
    advantage_B: np.ndarray
    keep_B: np.ndarray  # False: the response is out of the loss
    position_B: np.ndarray  # of the rows in the update, without the filler
    plan: list[np.ndarray]  # positions in `rows` of the rows of each micro-batch
    own_micro_batches: int  # without fillers
    denominator: float  # of the loss of the whole update
    most_micro_batches: int  # of any rank
    most_tokens: int  # response tokens of any rank

    def micro_batches(self, layout: Layout, device: torch.device) -> Iterator[MicroBatch]:
        """The micro-batches of the plan."""
        return micro_batches(
            self.rows, layout, device, plan=self.plan, advantage_B=self.advantage_B, keep_B=self.keep_B
        )

    def token_at(self, micro_batch: int, index: int) -> tuple[int, int]:
        """Rollout id and token of an index into the flattened [B, T] of a micro-batch."""
        chosen = self.plan[micro_batch]
        row, token = divmod(index, int(self.rows.response_lengths[chosen].max()))
        return int(self.rows.rollout_id[chosen[row]]), token

    def pack(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """The record and the arrays of a message to the rank."""
        arrays = {f"rows.{field.name}": getattr(self.rows, field.name) for field in fields(RolloutColumns)}
        arrays |= {name: getattr(self, name) for name in _ARRAYS}
        arrays |= {"plan": np.concatenate(self.plan), "sizes": np.array([len(chosen) for chosen in self.plan])}
        return {name: getattr(self, name) for name in _NUMBERS}, arrays


def unpack_rank_batch(message: Message) -> RankBatch:
    """The inverse of `RankBatch.pack`."""
    arrays = message.arrays
    return RankBatch(
        rows=RolloutColumns(**{field.name: arrays[f"rows.{field.name}"] for field in fields(RolloutColumns)}),
        plan=np.split(arrays["plan"], np.cumsum(arrays["sizes"])[:-1]),
        **{name: arrays[name] for name in _ARRAYS},
        **message.record,
    )


def split_over_ranks(
    rows: RolloutColumns,
    advantage_B: np.ndarray,
    keep_B: np.ndarray,
    denominator: float,
    layout: Layout,
    *,
    world: int = 1,
    lockstep: bool = False,
) -> list[RankBatch]:
    """The batch of each rank. `lockstep`: all ranks must run equally many micro-batches."""
    rank_B = ranks_of_rows(rows, layout, world) if world > 1 else np.zeros(len(rows), dtype=np.int64)
    positions = [np.flatnonzero(rank_B == rank) for rank in range(world)]
    parts = [rows.take(chosen) for chosen in positions] if world > 1 else [rows]
    plans = [plan_micro_batches(part, layout) for part in parts]
    most = max(map(len, plans))
    most_tokens = max(int(part.response_lengths.sum()) for part in parts)
    filler = rows.take([np.argmin(rows.prompt_lengths + rows.response_lengths)])  # the shortest row
    batches = []
    for chosen, part, plan in zip(positions, parts, plans, strict=True):
        missing = (most if lockstep else max(1, len(plan))) - len(plan)
        padding = (0, 1 if missing else 0)
        batches.append(
            RankBatch(
                rows=concatenate([part, filler]) if missing else part,
                advantage_B=np.pad(advantage_B[chosen], padding),
                keep_B=np.pad(keep_B[chosen], padding),
                position_B=chosen,
                plan=[*plan, *[np.array([len(part)])] * missing],
                own_micro_batches=len(plan),
                denominator=denominator,
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
