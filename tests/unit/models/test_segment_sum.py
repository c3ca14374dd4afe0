"""The sum over the copies of each token, as a kernel."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("no GPU, and no TRITON_INTERPRET=1", allow_module_level=True)

from stalewise.models.kernels.elementwise import sum_on_device

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_copies_are_added_up_token_by_token() -> None:
    torch.manual_seed(0)
    key_MKD, value_MKD = (torch.randn(5, 2, 24, device=DEVICE) for _ in range(2))
    copy_M, start = torch.tensor([0, 2, 1, 3, 4], device=DEVICE), torch.tensor([0, 2, 4, 4, 5], device=DEVICE)
    for summed, x in zip(sum_on_device(key_MKD, value_MKD, copy_M, start), (key_MKD, value_MKD), strict=True):
        expected = torch.stack([x[0] + x[2], x[1] + x[3], torch.zeros_like(x[0]), x[4]])
        torch.testing.assert_close(summed, expected)
