"""silu(gate) · up as a kernel, against torch."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("no GPU, and no TRITON_INTERPRET=1", allow_module_level=True)

from stalewise.models.kernels.elementwise import gated_gradients_on_device, gated_on_device

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("width", [40, 1030])
def test_halves_of_one_product_and_their_gradients(width: int) -> None:
    torch.manual_seed(0)
    product = torch.randn(5, 2 * width, device=DEVICE)
    gate, up = (half.clone().requires_grad_() for half in product.split(width, dim=1))
    expected = torch.nn.functional.silu(gate) * up
    gradient = torch.randn(5, width, device=DEVICE)
    halves = product.split(width, dim=1)  # rows with a stride of both widths
    torch.testing.assert_close(gated_on_device(*halves), expected.detach())
    found = gated_gradients_on_device(gradient, *halves).chunk(2, dim=1)
    for one, other in zip(found, torch.autograd.grad(expected, (gate, up), gradient), strict=True):
        torch.testing.assert_close(one, other)


def test_no_tokens_are_no_error() -> None:
    nothing = torch.empty(0, 8, device=DEVICE)
    assert gated_on_device(nothing, nothing).shape == (0, 8)
    assert gated_gradients_on_device(nothing, nothing, nothing).shape == (0, 16)
