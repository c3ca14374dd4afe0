"""Attention of one new token per row, as a kernel."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stalewise.models.attention import slot_attention

pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("no GPU, and no TRITON_INTERPRET=1", allow_module_level=True)

from stalewise.models.kernels.decode_attention import decode_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("room", [110, 300])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(9, 3, 64), (2, 2, 40)])
def test_a_new_token_attends_to_its_prompt_and_to_its_own(
    heads: int, kv_heads: int, width: int, window: int | None, room: int
) -> None:
    torch.manual_seed(0)
    query_RH1D = torch.randn(5, heads, 1, width, device=DEVICE)
    key_TKD, value_TKD = torch.randn(2, 700, kv_heads, width, device=DEVICE)
    # Two rows with one prompt, one whose prompt has nothing to look back to, one that has ended.
    places = {"prompt_R": [500, 500, 0, 300, 600], "prefix_R": [70, 70, 0, 3, 64], "own_R": [0, 40, 80, 120, 160]}
    arguments: dict[str, Any] = {name: torch.tensor(place, device=DEVICE) for name, place in places.items()}
    arguments["length_R"] = torch.tensor([71, 100, 1, 1, 104], device=DEVICE)
    module = SimpleNamespace(config=SimpleNamespace())
    expected, _ = slot_attention(
        module, query_RH1D, key_TKD, value_TKD, None, **arguments, room=room, scaling=0.2, sliding_window=window
    )
    found = decode_attention(
        query_RH1D.squeeze(2), key_TKD, value_TKD, **arguments, room=room, scale=0.2, window=window
    )
    # On a GPU products of float32 are rounded to fewer bits.
    torch.testing.assert_close(found, expected.squeeze(1), rtol=0, atol=1e-5 if DEVICE == "cpu" else 5e-3)
    alone = query_RH1D[1, :1, 0] @ torch.cat([key_TKD[500:570, 0], key_TKD[40:70, 0]]).T * 0.2
    if window is None:
        mixed = alone.softmax(dim=1) @ torch.cat([value_TKD[500:570, 0], value_TKD[40:70, 0]])
        torch.testing.assert_close(expected[1, 0, :1], mixed, rtol=0, atol=1e-5)
