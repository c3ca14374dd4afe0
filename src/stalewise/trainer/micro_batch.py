"""Micro-batches: as many responses as fit the token budget, packed into one row (packing.py) or padded.

Responses to one prompt share its tokens. The last token of a response is no input, since nothing is predicted from it.
Architectures that cannot be packed get one row per rollout, padded on the right.

Tokens from outside (such as the output of a tool) are inputs like all others. They are not trained: the mask and N
leave them out, and their log-probabilities are not computed.

Axes: B responses, P prompts, S segments (prompts and responses), T response tokens of the longest response, N all
trained tokens, [X, W] input ids: [1, all tokens] packed, [B, tokens of the longest rollout] padded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stalewise.models.attention import segment_arrays, with_grids
from stalewise.models.transfer import send
from stalewise.objectives import Tokens, make_tokens
from stalewise.objectives.surrogates import TokenLoss
from stalewise.store import RolloutColumns
from stalewise.trainer import packing
from stalewise.types import TokenFlag


@dataclass(frozen=True, slots=True)
class Layout:
    """How micro-batches are arranged for a model and a device."""

    token_budget: int
    packed: bool = True
    grids: bool = True  # for attention without variable lengths
    common_sizes: bool = False  # pad packed tokens and keys to few sizes, for CUDA graphs
    two_halves: bool = False  # run a packed micro-batch as two halves at the same time
    pad_id: int = 0


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rollouts that pass through the model together, on its device."""

    rows: np.ndarray  # [B] positions in the batch of this rank
    tokens: int  # inputs without padding
    buffer: Tensor  # bytes that all tensors are views of; `inputs` come first
    inputs: tuple[dict[str, Any], ...]  # keyword arguments of each call of the model: `input_ids` [X, W] and others
    source_N: Tensor  # index into the flattened [X, W] of all calls: the output that predicts each trained token
    row_N: Tensor  # response of each trained token
    column_N: Tensor  # index within the response
    target_N: Tensor  # token id
    behaviour_logp_BT: Tensor
    mask_BT: Tensor
    advantage_B: Tensor
    keep_B: Tensor  # False: the response is out of the loss
    reference_logp_BT: Tensor | None = None  # where the run has a reference

    @property
    def padded_tokens(self) -> int:
        """Inputs, padding included."""
        return sum(call["input_ids"].numel() for call in self.inputs)

    def to_response_grid(self, value_N: Tensor) -> Tensor:
        """Scatter one value per trained token to [B, T]; 0 elsewhere."""
        grid_BT = value_N.new_zeros(self.mask_BT.shape)
        return grid_BT.index_put((self.row_N, self.column_N), value_N)

    def token_ratios(self, logp_BT: Tensor, proximal_logp_BT: Tensor | None) -> Tokens:
        """The input of the objective, given the policy's log-probabilities. Does not wait for the device."""
        return make_tokens(
            logp=logp_BT,
            behaviour_logp=self.behaviour_logp_BT,
            advantage=self.advantage_B,
            mask=self.mask_BT & self.keep_B.unsqueeze(1),
            proximal_logp=proximal_logp_BT,
            reference_logp=self.reference_logp_BT,
            check_values=False,
        )


def micro_batches(
    rows: RolloutColumns,
    layout: Layout,
    device: torch.device,
    *,
    plan: Sequence[np.ndarray] | None = None,
    advantage_B: np.ndarray | None = None,
    keep_B: np.ndarray | None = None,
) -> Iterator[MicroBatch]:
    """Make micro-batches of all rows within the token budget, with at least one row each. Advantages default to 0."""
    advantage_B = np.zeros(len(rows), dtype=np.float32) if advantage_B is None else advantage_B
    keep_B = np.ones(len(rows), dtype=np.bool_) if keep_B is None else keep_B
    for chosen in plan_micro_batches(rows, layout) if plan is None else plan:
        part = rows.take(chosen)
        tokens, calls, source_N = _packed_inputs(part, layout) if layout.packed else _padded_inputs(part, layout)
        inputs = {f"{call}.{name}": array for call, (arrays, _) in enumerate(calls) for name, array in arrays.items()}
        others = {"source_N": source_N[part.trained], **_response_arrays(part)}
        others |= {"advantage_B": advantage_B[chosen], "keep_B": keep_B[chosen]}
        buffer, tensors = send({**inputs, **others}, device)
        on_device = tuple(
            {**with_grids({name: tensors[f"{call}.{name}"] for name in arrays}), **lengths}
            for call, (arrays, lengths) in enumerate(calls)
        )
        yield MicroBatch(chosen, tokens, buffer, on_device, **{name: tensors[name] for name in others})


def plan_micro_batches(rows: RolloutColumns, layout: Layout) -> list[np.ndarray]:
    """Positions of the rows of each micro-batch."""
    if len(rows) == 0:
        return []
    order, cost = order_and_cost(rows, layout)
    budget = layout.token_budget
    if layout.packed:
        # Micro-batches are about equally large: CUDA graphs pay if the same sizes recur.
        total = int(cost.sum())
        budget = min(budget, -(-total // -(-total // budget)) + int(cost.max()))
    start, plan = 0, []
    while start < len(order):
        part = cost[start:].copy()
        first = order[start]  # its prompt may be shared with the micro-batch before
        part[0] = rows.prompt_lengths[first] + rows.response_lengths[first] - layout.packed
        spent = np.cumsum(part) if layout.packed else part[0] * np.arange(1, len(part) + 1)
        fits = max(1, int(np.searchsorted(spent, budget, side="right")))
        plan.append(order[start : start + fits])
        start += fits
    return plan


def order_and_cost(rows: RolloutColumns, layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    """The order in which rows fill micro-batches, and the tokens that each adds."""
    if layout.packed:
        return packing.order_by_prompt(rows)
    # Longest first: a padded row costs as much as the first of its micro-batch.
    length_B = rows.prompt_lengths + rows.response_lengths
    order = np.argsort(-length_B, kind="stable")
    return order, length_B[order]


# Inputs without padding; arrays and lengths of each call of the model; the output that predicts each response token.
Inputs = tuple[int, list[tuple[dict[str, np.ndarray], dict[str, int]]], np.ndarray]


def _packed_inputs(part: RolloutColumns, layout: Layout) -> Inputs:
    halves = packing.split_in_halves(part) if layout.two_halves else [(part, packing.prompt_numbers(part))]
    packed = [packing.pack(*half) for half in halves]
    tokens = sum(len(row.input_ids_T) for row in packed)
    if layout.common_sizes:
        packed = packing.pad_to_common_size(packed)
    made = [segment_arrays(row.query_S, row.key_S, row.key_M, grids=layout.grids) for row in packed]
    # The longest segments of both halves, so that one CUDA graph serves both.
    longest = {name: max(lengths[name] for _, lengths in made) for name in made[0][1]}
    calls = [
        ({"input_ids": row.input_ids_T[None], **arrays}, longest) for row, (arrays, _) in zip(packed, made, strict=True)
    ]
    starts = np.cumsum([0, *(len(row.input_ids_T) for row in packed[:-1])])
    source_N = np.concatenate([start + row.source_N for start, row in zip(starts, packed, strict=True)])
    return tokens, calls, source_N


def _padded_inputs(part: RolloutColumns, layout: Layout) -> Inputs:
    length_B = part.prompt_lengths + part.response_lengths
    width = int(length_B.max())
    start_B = np.arange(len(part)) * width
    row_N, column_N = packing.rows_and_columns(part.response_lengths)
    index_N = start_B[row_N] + part.prompt_lengths[row_N] + column_N
    input_ids = np.full(len(part) * width, layout.pad_id, dtype=np.int64)
    input_ids[packing.ranges(start_B, part.prompt_lengths)] = part.prompt_ids
    input_ids[index_N] = part.response_ids
    return int(length_B.sum()), [({"input_ids": input_ids.reshape(len(part), width)}, {})], index_N - 1


def _response_arrays(part: RolloutColumns) -> dict[str, np.ndarray]:
    row_N, column_N = packing.rows_and_columns(part.response_lengths)
    tokens = int(part.response_lengths.max())
    grids = {"behaviour_logp_BT": part.behaviour_logp, "reference_logp_BT": part.reference_logp}
    arrays = {name: np.zeros((len(part), tokens), dtype=np.float32) for name in grids if grids[name] is not None}
    for name, grid_BT in arrays.items():
        grid_BT[row_N, column_N] = grids[name]
    mask_BT = np.zeros((len(part), tokens), dtype=np.bool_)
    mask_BT[row_N, column_N] = part.trained
    return {
        "row_N": row_N[part.trained],
        "column_N": column_N[part.trained],
        "target_N": part.response_ids[part.trained].astype(np.int64),
        **arrays,
        "mask_BT": mask_BT,
    }


def token_values(
    parts: Sequence[MicroBatch], logp: Sequence[Tensor], losses: Sequence[TokenLoss], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Log-probability and `TokenFlag` bits of each trained token, [N] each, in the order of the micro-batches."""
    values, flags = [torch.empty(0, device=device)], [torch.empty(0, dtype=torch.uint8, device=device)]
    for part, logp_BT, loss in zip(parts, logp, losses, strict=True):
        index = part.row_N, part.column_N
        grids = (loss.clipped_BT, loss.vetoed_BT, loss.trigger_BT)
        bits = [grid[index] * int(flag) for grid, flag in zip(grids, TokenFlag, strict=True) if grid is not None]
        values.append(logp_BT[index])
        flags.append(torch.stack(bits).sum(dim=0).to(torch.uint8))
    return torch.cat(values), torch.cat(flags)
