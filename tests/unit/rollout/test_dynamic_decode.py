"""The growing cache holds what the one of transformers holds."""

from __future__ import annotations

import torch
from transformers.cache_utils import DynamicLayer

from stalewise.rollout.engines.dynamic_decode import PreallocatedLayer


def test_a_cache_with_room_holds_what_a_growing_one_holds_and_seldom_moves() -> None:
    torch.manual_seed(0)
    grown, plain = PreallocatedLayer(), DynamicLayer()
    moves, last = 0, 0
    for step in range(200):
        rows = 5 if step < 100 else 3
        key, value = torch.randn(rows, 2, 4 if step == 0 else 1, 8), torch.randn(rows, 2, 4 if step == 0 else 1, 6)
        held = grown.update(key, value)
        assert all(map(torch.equal, held, plain.update(key, value)))
        moves, last = moves + (held[0].data_ptr() != last), held[0].data_ptr()
        if step == 99:  # rows that have ended are dropped
            for layer in (grown, plain):
                layer.batch_select_indices(torch.tensor([0, 2, 4]))
        if step == 150:  # and as many rows may be others
            for layer in (grown, plain):
                layer.batch_select_indices(torch.tensor([2, 0, 0]))
    assert grown.get_seq_length() == plain.get_seq_length() == 203
    assert moves <= 15
