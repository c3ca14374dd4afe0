"""Micro-batches: as many responses as fit the token budget, packed one after the other without padding.

Responses to one prompt share it: its tokens pass through the model once for all of them. The last token of a response
does not pass at all, since nothing is predicted from it. Models whose architecture cannot be packed get one row per
rollout, padded on the right, instead.

Axes: B responses, P prompts, S segments (prompts and responses), T response tokens of the longest response, N all
response tokens, [X, W] what the model is given: [1, all tokens] packed, [B, tokens of the longest rollout] padded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stalewise.models.attention import segment_arrays, with_grids
from stalewise.models.transfer import send
from stalewise.store import RolloutColumns
from stalewise.trainer.packing import halves, in_few_sizes, pack, prompt_numbers, ranges, rows_and_columns, shared_cost


@dataclass(frozen=True, slots=True)
class Layout:
    """How micro-batches are laid out for a model and a device."""

    token_budget: int
    packed: bool = True
    grids: bool = True  # for attention that has no variable lengths
    few_sizes: bool = False  # packed tokens and keys are padded, so that few different numbers of them come up
    side_by_side: bool = False  # packed micro-batches pass in two halves at the same time
    pad_id: int = 0


@dataclass(frozen=True, slots=True)
class ForwardInput:
    """What the model is given in one call."""

    input_ids_XW: Tensor
    arguments: Mapping[str, Any]  # what the model's forward takes beside the ids


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rollouts that pass through the model together."""

    rows: np.ndarray  # [B] positions in the optimizer batch
    tokens: int  # that pass through the model, without padding
    buffer: Tensor  # of bytes, which all its tensors are views of, those of the passages first
    passages: tuple[ForwardInput, ...]
    source_N: Tensor  # place in the flattened [X, W] of all passages whose output predicts each response token
    row_N: Tensor  # response of each response token
    column_N: Tensor  # its place in the response
    target_N: Tensor  # its token id
    behaviour_logp_BT: Tensor
    mask_BT: Tensor
    of_rows: Mapping[str, Tensor]  # what else travels with them, a number for each: [B]

    @property
    def places(self) -> int:
        """Tokens that pass through the model, padding included."""
        return sum(passage.input_ids_XW.numel() for passage in self.passages)

    def to_response_grid(self, value_N: Tensor) -> Tensor:
        """Put one value per response token where it belongs in [B, T]; 0 elsewhere."""
        grid_BT = value_N.new_zeros(self.mask_BT.shape)
        return grid_BT.index_put((self.row_N, self.column_N), value_N)


def micro_batches(rows: RolloutColumns, layout: Layout, device: torch.device) -> Iterator[MicroBatch]:
    """All rows in micro-batches of at most so many tokens (at least one row each)."""
    return (lay_out(rows, chosen, layout, device) for chosen in plan_micro_batches(rows, layout))


def lay_out(
    rows: RolloutColumns,
    chosen: np.ndarray,
    layout: Layout,
    device: torch.device,
    of_rows: Mapping[str, np.ndarray] = MappingProxyType({}),
) -> MicroBatch:
    """The micro-batch of some rows, given by their positions as `plan_micro_batches` has them.

    `of_rows` are numbers of all rows that travel with those of the chosen ones.
    """
    part = rows.take(chosen)
    tokens, passages, source_N = _packed(part, layout) if layout.packed else _padded(part, layout)
    named = {f"{place}.{name}": array for place, (arrays, _) in enumerate(passages) for name, array in arrays.items()}
    responses = {"source_N": source_N, **_responses(part)}
    beside = {f"rows.{name}": array[chosen] for name, array in of_rows.items()}
    buffer, there = send({**named, **responses, **beside}, device)

    def passage(place: int) -> ForwardInput:
        arrays, numbers = passages[place]
        arguments: dict[str, Any] = {**with_grids({name: there[f"{place}.{name}"] for name in arrays}), **numbers}
        return ForwardInput(arguments.pop("input_ids_XW"), arguments)

    return MicroBatch(
        rows=chosen,
        tokens=tokens,
        buffer=buffer,
        passages=tuple(map(passage, range(len(passages)))),
        of_rows={name: there[f"rows.{name}"] for name in of_rows},
        **{name: there[name] for name in responses},
    )


def plan_micro_batches(rows: RolloutColumns, layout: Layout) -> list[np.ndarray]:
    """Positions of the rows of each micro-batch."""
    if len(rows) == 0:
        return []
    order, cost = order_and_cost(rows, layout)
    budget = layout.token_budget
    if layout.packed:
        # About equally large: sizes that come up again and again are what CUDA graphs are made for.
        total = int(cost.sum())
        budget = min(budget, -(-total // -(-total // budget)) + int(cost.max()))
    start, plan = 0, []
    while start < len(order):
        part = cost[start:].copy()
        part[0] = _cost_alone(rows, int(order[start]), layout)  # its prompt may have passed in the micro-batch before
        spent = np.cumsum(part) if layout.packed else part[0] * np.arange(1, len(part) + 1)
        fits = max(1, int(np.searchsorted(spent, budget, side="right")))
        plan.append(order[start : start + fits])
        start += fits
    return plan


def order_and_cost(rows: RolloutColumns, layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    """The order in which rows are put into micro-batches, and the tokens that each adds."""
    return shared_cost(rows) if layout.packed else _longest_first(rows)


def _longest_first(rows: RolloutColumns) -> tuple[np.ndarray, np.ndarray]:
    """Longest first: a padded row costs as much as the longest of its micro-batch, which is the first."""
    length_B = rows.prompt_lengths + rows.response_lengths
    order = np.argsort(-length_B, kind="stable")
    return order, length_B[order]


def _cost_alone(rows: RolloutColumns, row: int, layout: Layout) -> int:
    length = int(rows.prompt_lengths[row] + rows.response_lengths[row])
    return length - 1 if layout.packed else length


# Tokens without padding; for each passage arrays and sizes; where in all of them each response token is predicted.
Passing = tuple[int, list[tuple[dict[str, np.ndarray], dict[str, int]]], np.ndarray]


def _packed(part: RolloutColumns, layout: Layout) -> Passing:
    packed = [pack(*one) for one in (halves(part) if layout.side_by_side else [(part, prompt_numbers(part))])]
    tokens = sum(len(one.input_ids_T) for one in packed)
    if layout.few_sizes:
        packed = in_few_sizes(packed)
    made = [segment_arrays(one.query_S, one.key_S, one.key_M, grids=layout.grids) for one in packed]
    # The longest segments of both: what is recorded for one size is then recorded once.
    longest = {name: max(lengths[name] for _, lengths in made) for name in made[0][1]}
    passages = [
        ({"input_ids_XW": one.input_ids_T[None], **arrays}, longest)
        for one, (arrays, _) in zip(packed, made, strict=True)
    ]
    starts = np.cumsum([0, *(len(one.input_ids_T) for one in packed[:-1])])
    source_N = np.concatenate([start + one.source_N for start, one in zip(starts, packed, strict=True)])
    return tokens, passages, source_N


def _padded(part: RolloutColumns, layout: Layout) -> Passing:
    length_B = part.prompt_lengths + part.response_lengths
    width = int(length_B.max())
    start_B = np.arange(len(part)) * width
    row_N, column_N = rows_and_columns(part.response_lengths)
    place_N = start_B[row_N] + part.prompt_lengths[row_N] + column_N
    input_ids = np.full(len(part) * width, layout.pad_id, dtype=np.int64)
    input_ids[ranges(start_B, part.prompt_lengths)] = part.prompt_ids
    input_ids[place_N] = part.response_ids
    return int(length_B.sum()), [({"input_ids_XW": input_ids.reshape(len(part), width)}, {})], place_N - 1


def _responses(part: RolloutColumns) -> dict[str, np.ndarray]:
    """What both layouts say of the responses themselves."""
    row_N, column_N = rows_and_columns(part.response_lengths)
    tokens = int(part.response_lengths.max())
    behaviour_BT = np.zeros((len(part), tokens), dtype=np.float32)
    behaviour_BT[row_N, column_N] = part.behaviour_logp
    return {
        "row_N": row_N,
        "column_N": column_N,
        "target_N": part.response_ids.astype(np.int64),
        "behaviour_logp_BT": behaviour_BT,
        "mask_BT": np.arange(tokens) < part.response_lengths[:, None],
    }
