"""silu(gate) · up as a kernel, against torch."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("no GPU, and no TRITON_INTERPRET=1", allow_module_level=True)

from stalewise.models.fused_ops import _Gated, _JoinedLinears
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


@pytest.mark.parametrize("shape", [(5, 1), (1, 5)])  # of a decoding step, and of packed prompts
def test_parts_of_joined_layers(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    gate_proj, up_proj = (torch.nn.Linear(12, 40, bias=False, device=DEVICE) for _ in range(2))
    x = torch.randn(*shape, 12, device=DEVICE)
    expected = (torch.nn.functional.silu(gate_proj(x)) * up_proj(x)).detach()
    with torch.inference_mode():
        joined = _JoinedLinears([gate_proj, up_proj])
        gate, up = joined.part(0, x), joined.part(1, x)
        assert gate.stride(-2) == up.stride(-2) == 80  # no copies: rows have the stride of both
        found: Any = _Gated.apply(gate, up)
    torch.testing.assert_close(found, expected)


def test_no_tokens_are_no_error() -> None:
    nothing = torch.empty(0, 8, device=DEVICE)
    assert gated_on_device(nothing, nothing).shape == (0, 8)
    assert gated_gradients_on_device(nothing, nothing, nothing).shape == (0, 16)
