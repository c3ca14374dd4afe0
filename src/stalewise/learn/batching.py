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
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stalewise.attention import packed_arguments, to_device
from stalewise.store import Rows

# Sizes of padded micro-batches. Tokens cost time; keys that nobody sees are only copied.
SIZE_STEP, TOKEN_RATIO, KEY_RATIO = 128, 1.06, 1.25


@dataclass(frozen=True, slots=True)
class Layout:
    """How micro-batches are laid out for a model and a device."""

    token_budget: int
    packed: bool = True
    grids: bool = True  # for attention that has no variable lengths
    few_sizes: bool = False  # packed tokens and keys are padded, so that few different numbers of them come up
    pad_id: int = 0


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rollouts that pass through the model together."""

    rows: np.ndarray  # [B] positions in the optimizer batch
    tokens: int  # that pass through the model, without padding
    input_ids_XW: Tensor
    arguments: Mapping[str, Any]  # what the model's forward takes beside the ids
    source_N: Tensor  # place in the flattened [X, W] whose output predicts each response token
    row_N: Tensor  # response of each response token
    column_N: Tensor  # its place in the response
    target_N: Tensor  # its token id
    behaviour_logp_BT: Tensor
    mask_BT: Tensor

    def to_response_grid(self, value_N: Tensor) -> Tensor:
        """Put one value per response token where it belongs in [B, T]; 0 elsewhere."""
        grid_BT = value_N.new_zeros(self.mask_BT.shape)
        return grid_BT.index_put((self.row_N, self.column_N), value_N)


def micro_batches(rows: Rows, layout: Layout, device: torch.device) -> Iterator[MicroBatch]:
    """All rows in micro-batches of at most so many tokens (at least one row each)."""
    return (lay_out(rows, chosen, layout, device) for chosen in plan_micro_batches(rows, layout))


def lay_out(rows: Rows, chosen: np.ndarray, layout: Layout, device: torch.device) -> MicroBatch:
    """The micro-batch of some rows, given by their positions as `plan_micro_batches` has them."""
    return _pack(rows, chosen, layout, device) if layout.packed else _pad(rows, chosen, layout, device)


def plan_micro_batches(rows: Rows, layout: Layout) -> list[np.ndarray]:
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


def order_and_cost(rows: Rows, layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    """The order in which rows are put into micro-batches, and the tokens that each adds."""
    return _shared(rows) if layout.packed else _padded(rows)


def _padded(rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """Longest first: a padded row costs as much as the longest of its micro-batch, which is the first."""
    length_B = rows.prompt_lengths + rows.response_lengths
    order = np.argsort(-length_B, kind="stable")
    return order, length_B[order]


def _shared(rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """Rows with one prompt together, in the order of their prompts, and the tokens that each adds."""
    prompt_B = _prompt_numbers(rows)
    order = np.argsort(prompt_B, kind="stable")
    is_first = np.diff(prompt_B[order], prepend=-1) != 0
    return order, rows.response_lengths[order] - 1 + np.where(is_first, rows.prompt_lengths[order], 0)


def _prompt_numbers(rows: Rows) -> np.ndarray:
    """A number for each distinct prompt, [B]."""
    numbers: dict[bytes, int] = {}
    return np.array([numbers.setdefault(rows.prompt(row).tobytes(), len(numbers)) for row in range(len(rows))])


def _cost_alone(rows: Rows, row: int, layout: Layout) -> int:
    length = int(rows.prompt_lengths[row] + rows.response_lengths[row])
    return length - 1 if layout.packed else length


def _pack(rows: Rows, chosen: np.ndarray, layout: Layout, device: torch.device) -> MicroBatch:
    part = rows.take(chosen)
    prompt_B = _prompt_numbers(part)
    first_B = np.flatnonzero(np.diff(prompt_B, prepend=-1))  # the first response of each prompt
    prompt_P, own_B = part.prompt_lengths[first_B], part.response_lengths - 1

    # A prompt is followed by its responses. Where each begins:
    is_first = np.zeros(len(part), dtype=np.int64)
    is_first[first_B] = prompt_P
    response_start = np.cumsum(own_B + is_first) - own_B
    prompt_start = response_start[first_B] - prompt_P
    tokens = int(prompt_P.sum() + own_B.sum())

    row_N, column_N = _rows_and_columns(part.response_lengths)
    last_of_prompt_B = (prompt_start + prompt_P - 1)[prompt_B]
    source_N = np.where(column_N == 0, last_of_prompt_B[row_N], response_start[row_N] + column_N - 1)

    input_ids = np.zeros(size_above(tokens, TOKEN_RATIO) if layout.few_sizes else tokens, dtype=np.int64)
    input_ids[ranges(prompt_start, prompt_P)] = np.concatenate([part.prompt(int(row)) for row in first_B])
    passing_N = column_N < own_B[row_N]
    input_ids[(response_start[row_N] + column_N)[passing_N]] = part.response_ids[passing_N]

    # Segments in the order of their tokens; a response of one token has none that pass.
    start_S = np.concatenate([prompt_start, response_start[own_B > 0]])
    query_S = np.concatenate([prompt_P, own_B[own_B > 0]])
    seen_S = np.concatenate([np.zeros_like(prompt_P), prompt_P[prompt_B][own_B > 0]])  # keys of the prompt
    seen_start_S = np.concatenate([prompt_start, prompt_start[prompt_B][own_B > 0]])
    by_place = np.argsort(start_S)
    start_S, query_S, seen_S, seen_start_S = (x[by_place] for x in (start_S, query_S, seen_S, seen_start_S))
    both = np.stack([seen_S, query_S], axis=1).ravel()
    key_M = ranges(np.stack([seen_start_S, start_S], axis=1).ravel(), both)
    key_S = seen_S + query_S
    if layout.few_sizes:
        query_S, key_S, key_M = _with_padding(query_S, key_S, key_M, len(input_ids) - tokens)
    return MicroBatch(
        rows=chosen,
        tokens=tokens,
        input_ids_XW=to_device(input_ids[None], device),
        arguments=packed_arguments(query_S, key_S, key_M, device, grids=layout.grids),
        source_N=to_device(source_N, device),
        **_responses(part, row_N, column_N, device),
    )


def _with_padding(
    query_S: np.ndarray, key_S: np.ndarray, key_M: np.ndarray, padding: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Segments that take up the padding of queries and keys, none of them longer than the longest that is real.

    The number of segments becomes a power of two. A query that is padding sees any tokens: nothing comes of it, and no
    token has many copies.
    """
    extra_query = _pieces(padding, int(query_S.max()))
    keys = size_above(len(key_M) + padding, KEY_RATIO)
    unseen = _pieces(keys - len(key_M) - padding, int(key_S.max()))  # keys that no query sees
    extra = len(extra_query) + len(unseen)
    segments = 1 << (len(query_S) + extra).bit_length()
    empty = np.zeros(segments - len(query_S) - extra, dtype=np.int64)
    return (
        np.concatenate([query_S, extra_query, np.zeros_like(unseen), empty]),
        np.concatenate([key_S, extra_query, unseen, empty]),
        np.concatenate([key_M, np.arange(keys - len(key_M)) % (int(query_S.sum()) + padding)]),
    )


def _pieces(total: int, most: int) -> np.ndarray:
    """`total` as pieces of `most`, and a rest."""
    whole, rest = divmod(total, most)
    return np.array([most] * whole + [rest] * (rest > 0), dtype=np.int64)


def size_above(number: int, ratio: float) -> int:
    """The next of few sizes, each at most about `ratio` times the one before it; multiples of SIZE_STEP.

    >>> [size_above(n, 1.06) for n in (1, 1000, 1030, 16_000)]
    [128, 1024, 1152, 16512]
    """
    size = SIZE_STEP
    while size < number:
        size = max(size + SIZE_STEP, int(size * ratio) // SIZE_STEP * SIZE_STEP)
    return size


def _pad(rows: Rows, chosen: np.ndarray, layout: Layout, device: torch.device) -> MicroBatch:
    part = rows.take(chosen)
    length_B = part.prompt_lengths + part.response_lengths
    width = int(length_B.max())
    start_B = np.arange(len(part)) * width
    row_N, column_N = _rows_and_columns(part.response_lengths)
    place_N = start_B[row_N] + part.prompt_lengths[row_N] + column_N
    input_ids = np.full(len(part) * width, layout.pad_id, dtype=np.int64)
    input_ids[ranges(start_B, part.prompt_lengths)] = part.prompt_ids
    input_ids[place_N] = part.response_ids
    return MicroBatch(
        rows=chosen,
        tokens=int(length_B.sum()),
        input_ids_XW=to_device(input_ids.reshape(len(part), width), device),
        arguments={},
        source_N=to_device(place_N - 1, device),
        **_responses(part, row_N, column_N, device),
    )


def _responses(part: Rows, row_N: np.ndarray, column_N: np.ndarray, device: torch.device) -> dict[str, Any]:
    """What both layouts say of the responses themselves."""
    tokens = int(part.response_lengths.max())
    behaviour_BT = np.zeros((len(part), tokens), dtype=np.float32)
    behaviour_BT[row_N, column_N] = part.behaviour_logp
    return {
        "row_N": to_device(row_N, device),
        "column_N": to_device(column_N, device),
        "target_N": to_device(part.response_ids.astype(np.int64), device),
        "behaviour_logp_BT": to_device(behaviour_BT, device),
        "mask_BT": to_device(np.arange(tokens) < part.response_lengths[:, None], device),
    }


def _rows_and_columns(length_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    row_N = np.repeat(np.arange(len(length_B)), length_B)
    return row_N, np.arange(len(row_N)) - (np.cumsum(length_B) - length_B)[row_N]


def ranges(start_S: np.ndarray, length_S: np.ndarray) -> np.ndarray:
    """start, start + 1, … of each segment, one after the other.

    >>> ranges(np.array([10, 3]), np.array([2, 3])).tolist()
    [10, 11, 3, 4, 5]
    """
    segment, column = _rows_and_columns(length_S)
    return start_S[segment] + column
