"""One update over several ranks: who passes which rows through the model, and what all of them must know of the whole.

Rows are dealt by tokens, those of one prompt next to each other. Advantages, groups and denominators are of the whole
update and are known before it is dealt; statistics of the policy are merged later. One process has the only share.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stalewise.distributed import Message
from stalewise.objectives.surrogates import TokenLoss
from stalewise.store import RolloutColumns, TokenRecord, concatenate
from stalewise.trainer.batch import UpdateBatch
from stalewise.trainer.micro_batch import Layout, MicroBatch, order_and_cost, plan_micro_batches
from stalewise.types import TokenFlag


@dataclass(frozen=True, slots=True)
class Known:
    """What every rank must know of the whole update."""

    denominator: float  # of the loss
    passes: int  # micro-batches of the rank that has most
    tokens: int  # response tokens of the rank that has most


@dataclass(frozen=True, slots=True, eq=False)
class RankBatch:
    """What one rank does of an update.

    A rank that has nothing left to do while others have, and that must keep in step with them, passes one row without
    weight: fillers come after all other micro-batches, and nothing of them is kept.
    """

    batch: UpdateBatch
    plan: list[np.ndarray]  # positions in it of the rows of each micro-batch
    own: int  # micro-batches that are no fillers
    whole: Known

    def pack(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """For the wire."""
        arrays = {f"rows.{field.name}": getattr(self.batch.rows, field.name) for field in fields(RolloutColumns)}
        arrays |= {"advantage": self.batch.advantage.numpy(), "keep": self.batch.keep.numpy()}
        arrays |= {"plan": np.concatenate(self.plan), "sizes": np.array([len(chosen) for chosen in self.plan])}
        return {"own": self.own, **asdict(self.whole)}, arrays


def unpack_share(message: Message) -> RankBatch:
    """The inverse of `pack`."""
    arrays, record = message.arrays, dict(message.record)
    rows = RolloutColumns(**{field.name: arrays[f"rows.{field.name}"] for field in fields(RolloutColumns)})
    batch = UpdateBatch(rows, torch.from_numpy(arrays["advantage"]), torch.from_numpy(arrays["keep"]))
    plan = np.split(arrays["plan"], np.cumsum(arrays["sizes"])[:-1])
    return RankBatch(batch, plan, record.pop("own"), Known(**record))


@dataclass(frozen=True, slots=True, eq=False)
class RankBatches:
    """An update with the shares of all ranks, for the one that leads."""

    batch: UpdateBatch
    rows: list[np.ndarray]  # positions in it of each rank's rows
    shares: list[RankBatch]

    def first_of(self, rank: int, part: int, place: int) -> tuple[int, int]:
        """Rollout and token of a place in the flattened [B, T] of a rank's micro-batch."""
        rows, chosen = self.shares[rank].batch.rows, self.shares[rank].plan[part]
        row, token = divmod(place, int(rows.response_lengths[chosen].max()))
        return int(rows.rollout_id[chosen[row]]), token

    def token_record(self, read: Callable[[], tuple[np.ndarray, np.ndarray]]) -> TokenRecord:
        """What the update saw of each token, from what each rank saw: [ranks, tokens] log-probabilities and flags."""
        logp_RN, flags_RN = read()
        order, logp, flags = [], [], []
        for rank, (mine, share) in enumerate(zip(self.rows, self.shares, strict=True)):
            chosen = np.concatenate([np.empty(0, np.int64), *share.plan[: share.own]])
            count = int(share.batch.rows.response_lengths[chosen].sum())
            order.append(mine[chosen])
            logp.append(logp_RN[rank, :count])
            flags.append(flags_RN[rank, :count])
        ordered, logp_N, flags_N = map(np.concatenate, (order, logp, flags))
        return TokenRecord(self.batch.rows, ordered, self.batch.advantage.numpy(), logp_N, flags_N)


def deal_update(
    batch: UpdateBatch, layout: Layout, denominator: float, *, world: int = 1, in_step: bool = False
) -> RankBatches:
    """Deal an update out; `in_step`: every rank must pass as many micro-batches as any other."""
    if world == 1:
        plan = plan_micro_batches(batch.rows, layout)
        known = Known(denominator, len(plan), int(batch.rows.response_lengths.sum()))
        return RankBatches(batch, [np.arange(len(batch.rows))], [RankBatch(batch, plan, len(plan), known)])
    rank_B = ranks_of_rows(batch.rows, layout, world)
    rows = [np.flatnonzero(rank_B == rank) for rank in range(world)]
    batches = [_take(batch, chosen) for chosen in rows]
    plans = [plan_micro_batches(part.rows, layout) for part in batches]
    known = Known(
        denominator,
        passes=max(map(len, plans)),
        tokens=max(int(part.rows.response_lengths.sum()) for part in batches),
    )
    shares = []
    for part, plan in zip(batches, plans, strict=True):
        missing = (known.passes if in_step else max(1, len(plan))) - len(plan)
        filled = _with_filler(part, batch) if missing else part
        shares.append(RankBatch(filled, [*plan, *[np.array([len(part.rows)])] * missing], len(plan), known))
    return RankBatches(batch, rows, shares)


def ranks_of_rows(rows: RolloutColumns, layout: Layout, world: int) -> np.ndarray:
    """The rank of each row [B]: about as many tokens for each, in the order of micro-batches."""
    order, cost = order_and_cost(rows, layout)
    middle = np.cumsum(cost) - cost / 2
    rank_B = np.empty(len(rows), dtype=np.int64)
    rank_B[order] = np.minimum(middle * world // cost.sum(), world - 1)
    return rank_B


def _take(batch: UpdateBatch, chosen: np.ndarray) -> UpdateBatch:
    places = torch.from_numpy(chosen)
    return UpdateBatch(batch.rows.take(chosen), batch.advantage[places], batch.keep[places])


def _with_filler(part: UpdateBatch, whole: UpdateBatch) -> UpdateBatch:
    """With the shortest row of the whole update at its end, out of the loss."""
    shortest = np.argmin(whole.rows.prompt_lengths + whole.rows.response_lengths)
    return UpdateBatch(
        concatenate([part.rows, whole.rows.take([shortest])]),
        torch.cat([part.advantage, part.advantage.new_zeros(1)]),
        torch.cat([part.keep, part.keep.new_zeros(1)]),
    )


def seen_of_tokens(
    parts: list[MicroBatch], seen: list[tuple[Tensor, TokenLoss]], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Log-probability and flags of each response token, flat, in the order of the micro-batches."""
    logp, flags = [torch.empty(0, device=device)], [torch.empty(0, dtype=torch.uint8, device=device)]
    for part, (logp_BT, loss) in zip(parts, seen, strict=True):
        places = part.row_N, part.column_N
        grids = (loss.clipped_BT, loss.vetoed_BT, loss.trigger_BT)
        bits = [grid[places] * int(flag) for grid, flag in zip(grids, TokenFlag, strict=True) if grid is not None]
        logp.append(logp_BT[places])
        flags.append(torch.stack(bits).sum(dim=0).to(torch.uint8))
    return torch.cat(logp), torch.cat(flags)
