"""Micro-batches: as many sequences as fit the token budget, packed one after the other without padding.

Models whose architecture cannot be packed get one row per sequence, padded on the right, instead.

Axes: B sequences, T response tokens of the longest response, N all response tokens, [X, W] what the model is given:
[1, all tokens] packed, [B, tokens of the longest] padded.
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


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Sequences that pass through the model together."""

    rows: np.ndarray  # [B] positions in the optimizer batch
    input_ids_XW: Tensor
    arguments: Mapping[str, Any]  # what the model's forward takes beside the ids
    source_N: Tensor  # place in the flattened [X, W] whose output predicts each response token
    row_N: Tensor  # sequence of each response token
    column_N: Tensor  # its place in the response
    target_N: Tensor  # its token id
    behaviour_logp_BT: Tensor
    mask_BT: Tensor

    def to_response_grid(self, value_N: Tensor) -> Tensor:
        """Put one value per response token where it belongs in [B, T]; 0 elsewhere."""
        grid_BT = value_N.new_zeros(self.mask_BT.shape)
        return grid_BT.index_put((self.row_N, self.column_N), value_N)


def micro_batches(
    rows: Rows, *, token_budget: int, device: torch.device, packed: bool = True, pad_id: int = 0
) -> Iterator[MicroBatch]:
    """All rows, longest first, in micro-batches of at most `token_budget` tokens (at least one row each)."""
    length_B = rows.prompt_lengths + rows.response_lengths
    order = np.argsort(-length_B, kind="stable")
    start = 0
    while start < len(order):
        length = length_B[order[start:]]
        # A padded row costs as much as the longest of its micro-batch, which is the first.
        cost = np.cumsum(length) if packed else length[0] * np.arange(1, len(length) + 1)
        fits = max(1, int(np.searchsorted(cost, token_budget, side="right")))
        yield _collate(rows, order[start : start + fits], device, packed, pad_id)
        start += fits


def _collate(rows: Rows, chosen: np.ndarray, device: torch.device, packed: bool, pad_id: int) -> MicroBatch:
    part = rows.take(chosen)
    prompt_B, response_B = part.prompt_lengths, part.response_lengths
    length_B = prompt_B + response_B
    width, tokens = int(length_B.max()), int(response_B.max())
    start_B = np.cumsum(length_B) - length_B if packed else np.arange(len(part)) * width

    row_N = np.repeat(np.arange(len(part)), response_B)
    column_N = np.arange(len(row_N)) - part.response_offsets[:-1][row_N]
    place_N = start_B[row_N] + prompt_B[row_N] + column_N
    prompt_row = np.repeat(np.arange(len(part)), prompt_B)
    prompt_place = start_B[prompt_row] + np.arange(len(prompt_row)) - part.prompt_offsets[:-1][prompt_row]
    input_ids = np.full(int(length_B.sum()) if packed else len(part) * width, pad_id, dtype=np.int64)
    input_ids[prompt_place] = part.prompt_ids
    input_ids[place_N] = part.response_ids
    behaviour_BT = np.zeros((len(part), tokens), dtype=np.float32)
    behaviour_BT[row_N, column_N] = part.behaviour_logp

    return MicroBatch(
        rows=chosen,
        input_ids_XW=to_device(input_ids.reshape(1 if packed else len(part), -1), device),
        arguments=packed_arguments(length_B, device) if packed else {},
        source_N=to_device(place_N - 1, device),
        row_N=to_device(row_N, device),
        column_N=to_device(column_N, device),
        target_N=to_device(part.response_ids.astype(np.int64), device),
        behaviour_logp_BT=to_device(behaviour_BT, device),
        mask_BT=to_device(np.arange(tokens) < response_B[:, None], device),
    )
