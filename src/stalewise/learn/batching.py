"""Micro-batches: rows sorted by length, padded on the right, as many as fit the token budget.

Axes: B rows, W positions of prompt and response, T response tokens of the longest response, N all response tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stalewise.store import Rows


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows that pass through the model together."""

    rows: np.ndarray  # [B] positions in the optimizer batch
    input_ids_BW: Tensor
    row_N: Tensor  # row of each response token
    source_N: Tensor  # position whose output predicts it
    column_N: Tensor  # its place in the response
    target_N: Tensor  # its token id
    behaviour_logp_BT: Tensor
    mask_BT: Tensor

    def to_response_grid(self, value_N: Tensor) -> Tensor:
        """Put one value per response token where it belongs in [B, T]; 0 elsewhere."""
        grid_BT = value_N.new_zeros(self.mask_BT.shape)
        return grid_BT.index_put((self.row_N, self.column_N), value_N)


def micro_batches(rows: Rows, *, token_budget: int, pad_id: int, device: torch.device) -> Iterator[MicroBatch]:
    """All rows, longest first, in micro-batches of at most `token_budget` padded tokens (at least one row each)."""
    length_B = rows.prompt_lengths + rows.response_lengths
    order = np.argsort(-length_B, kind="stable")
    start = 0
    while start < len(order):
        fits = max(1, token_budget // int(length_B[order[start]]))
        yield _collate(rows, order[start : start + fits], pad_id, device)
        start += fits


def _collate(rows: Rows, chosen: np.ndarray, pad_id: int, device: torch.device) -> MicroBatch:
    part = rows.take(chosen)
    prompt_B, response_B = part.prompt_lengths, part.response_lengths
    width, tokens = int((prompt_B + response_B).max()), int(response_B.max())
    row_N = np.repeat(np.arange(len(part)), response_B)
    column_N = np.arange(len(row_N)) - np.repeat(part.response_offsets[:-1], response_B)
    place_N = prompt_B[row_N] + column_N

    input_ids_BW = np.full((len(part), width), pad_id, dtype=np.int64)
    prompt_row = np.repeat(np.arange(len(part)), prompt_B)
    prompt_column = np.arange(len(prompt_row)) - np.repeat(part.prompt_offsets[:-1], prompt_B)
    input_ids_BW[prompt_row, prompt_column] = part.prompt_ids
    input_ids_BW[row_N, place_N] = part.response_ids
    behaviour_BT = np.zeros((len(part), tokens), dtype=np.float32)
    behaviour_BT[row_N, column_N] = part.behaviour_logp
    mask_BT = np.arange(tokens) < response_B[:, None]

    def on_device(array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)

    return MicroBatch(
        rows=chosen,
        input_ids_BW=on_device(input_ids_BW),
        row_N=on_device(row_N),
        source_N=on_device(place_N - 1),
        column_N=on_device(column_N),
        target_N=on_device(part.response_ids.astype(np.int64)),
        behaviour_logp_BT=on_device(behaviour_BT),
        mask_BT=on_device(mask_BT),
    )
