"""Attention of one new token per row against the slots of a cache."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from stalewise.models.attention import _similar, slot_attention


def test_what_one_row_has_does_not_reach_another() -> None:
    torch.manual_seed(0)
    query_RH1D, (key_TKD, value_TKD) = torch.randn(2, 2, 1, 4), torch.randn(2, 20, 2, 4)
    # Blocks of 4 tokens: both slots share the prompt in block 4; their own are 0 and 1, and 2 and 3.
    arguments: dict[str, Any] = {"slot_R": [0, 1], "block_SB": [[4, 0, 1], [4, 2, 3]], "prefix_R": [2, 2]}
    arguments = {name: torch.tensor(values) for name, values in {**arguments, "length_R": [3, 5]}.items()}
    arguments |= {"block_size": 4, "prompt_blocks": 1, "room": 8}
    module = SimpleNamespace(config=SimpleNamespace())
    places = [16, 17, 8, 9, 10]  # of the second row's keys
    for window in (None, 2):
        seen = places[-(window or 5) :]
        key_KLD, value_KLD = key_TKD[seen].transpose(0, 1), value_TKD[seen].transpose(0, 1)
        expected = torch.nn.functional.scaled_dot_product_attention(query_RH1D[1], key_KLD, value_KLD)
        for value in (1.0, math.nan):
            key_TKD[0] = value_TKD[0] = value
            found, _ = slot_attention(module, query_RH1D, key_TKD, value_TKD, None, **arguments, sliding_window=window)
            torch.testing.assert_close(found[1].transpose(0, 1), expected)
            assert found[0].isnan().any() == math.isnan(value)


def test_segments_of_similar_lengths_share_a_grid_if_one_would_be_large() -> None:
    chosen = _similar(np.array([3, 1000, 4]), np.array([5, 1000, 4000]))
    assert [segments.tolist() for segments in chosen] == [[0], [2], [1]]
    assert [segments.tolist() for segments in _similar(np.array([3, 4]), np.array([5, 4]))] == [[0, 1]]
