"""The norm with a result in low precision, as a kernel, also with the sum before it, against torch."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("no GPU, and no TRITON_INTERPRET=1", allow_module_level=True)

from stalewise.models.kernels import elementwise
from stalewise.models.kernels.elementwise import added_normed_on_device, norm_gradients_on_device, normed_on_device

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(("rows", "width"), [(5, 24), (7, 600)])
def test_the_norm_and_its_gradients(rows: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elementwise, "FEWEST_PROGRAMS", 3)  # each sums several rows
    monkeypatch.setattr(elementwise, "NUMBERS_AT_ONCE", 1)
    torch.manual_seed(0)
    x, weight = torch.randn(rows, width, device=DEVICE) * 0.02, torch.randn(width, device=DEVICE)
    x.requires_grad_()
    weight.requires_grad_()
    expected = torch.nn.functional.rms_norm(x, (width,), weight, 1e-5)
    y, factor = normed_on_device(x.detach(), weight.detach(), 1e-5, torch.float32)
    torch.testing.assert_close(y, expected.detach())
    gradient = torch.randn(rows, width, device=DEVICE)
    *found, low = norm_gradients_on_device(gradient, x.detach(), weight.detach(), factor)
    assert low.numel() == 0
    for one, other in zip(found, torch.autograd.grad(expected, (x, weight), gradient), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("rows", "width"), [(5, 24), (7, 600)])
def test_a_sum_its_norm_and_their_gradients(rows: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elementwise, "FEWEST_PROGRAMS", 3)
    monkeypatch.setattr(elementwise, "NUMBERS_AT_ONCE", 1)
    torch.manual_seed(0)
    x, addition, weight, down, along = (
        torch.randn(*shape, device=DEVICE)
        for shape in ((rows, width), (rows, width), (width,), (rows, width), (rows, width))
    )
    addition = addition.to(torch.bfloat16)
    given = [one.requires_grad_() for one in (x, addition, weight)]
    expected_sum = x + addition
    expected = torch.nn.functional.rms_norm(expected_sum, (width,), weight, 1e-5)
    x, addition, weight = (one.detach() for one in given)
    total, y, factor = added_normed_on_device(x, addition, weight, 1e-5, torch.float32)
    torch.testing.assert_close((total, y), (expected_sum.detach(), expected.detach()))
    wanted = torch.autograd.grad((expected, expected_sum), given, (down, along))
    found, of_weight, low = norm_gradients_on_device(down, total, weight, factor, along, torch.bfloat16)
    torch.testing.assert_close(found, wanted[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(low, wanted[1], rtol=1e-2, atol=1e-2)  # rounded once, perhaps to the neighbour
    torch.testing.assert_close(of_weight, wanted[2], rtol=1e-4, atol=1e-4)


def test_the_result_has_the_precision_that_is_asked_for() -> None:
    y, factor = normed_on_device(torch.ones(2, 8, device=DEVICE), torch.ones(8, device=DEVICE), 0.0, torch.bfloat16)
    assert y.dtype is torch.bfloat16 and y.float().tolist() == [[1.0] * 8] * 2
    assert factor.tolist() == [1.0, 1.0]


def test_no_rows_are_no_error() -> None:
    nothing, weight = torch.empty(0, 8, device=DEVICE), torch.ones(8, device=DEVICE)
    y, factor = normed_on_device(nothing, weight, 1e-5, torch.float32)
    x_grad, weight_grad, _ = norm_gradients_on_device(y, nothing, weight, factor)
    assert x_grad.shape == (0, 8) and weight_grad.tolist() == [0.0] * 8
