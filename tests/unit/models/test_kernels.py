"""Triton kernels against what they stand in for: on a GPU, or anywhere with Triton and TRITON_INTERPRET=1."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stalewise.models.attention import slot_attention
from stalewise.trainer.logprobs import chunk_gradient, chunk_statistics

pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("no GPU, and no TRITON_INTERPRET=1", allow_module_level=True)

from stalewise.models.kernels.decode_attention import decode_attention
from stalewise.models.kernels.logits import gradient_on_device, statistics_on_device

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("vocabulary", [100, 4096, 9000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_read_in_one_pass_as_in_many(vocabulary: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits_CV = (5 * torch.randn(4, vocabulary, device=DEVICE)).to(dtype)
    logits_CV[0, : vocabulary // 2] = -torch.inf  # tokens that the model rules out: with 9000 the whole first block
    logits_CV[1, 20] = 80.0
    logits_CV[2] = 0.5
    target_C = torch.tensor([vocabulary - 1, 20, 0, 7], device=DEVICE)
    gradient_C = torch.tensor([1.0, -0.5, 2.0, 0.0], device=DEVICE)
    expected = chunk_statistics(logits_CV, target_C)
    for found, other in zip(statistics_on_device(logits_CV, target_C), expected, strict=True):
        torch.testing.assert_close(found, other, rtol=1e-5, atol=1e-5)
    arguments = (logits_CV, expected[0], target_C, gradient_C)
    expected_CV = chunk_gradient(*arguments)
    found_CV = gradient_on_device(*arguments)
    torch.testing.assert_close(found_CV, expected_CV)
    assert found_CV.data_ptr() == logits_CV.data_ptr()


def test_what_is_not_finite_stays_so() -> None:
    logits_CV = torch.randn(3, 300, device=DEVICE)
    logits_CV[0, 5], logits_CV[1, 7] = torch.nan, torch.inf
    lse_C, logp_C, _ = statistics_on_device(logits_CV, torch.tensor([1, 2, 3], device=DEVICE))
    assert lse_C.isfinite().tolist() == logp_C.isfinite().tolist() == [False, False, True]


def test_no_rows_are_no_work() -> None:
    logits_CV, nothing = torch.empty(0, 300, device=DEVICE), torch.empty(0, device=DEVICE)
    assert all(len(found) == 0 for found in statistics_on_device(logits_CV, nothing.long()))
    assert gradient_on_device(logits_CV, nothing, nothing.long(), nothing).shape == (0, 300)


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
