"""The kernel against the same step in plain torch."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("no GPU, and no TRITON_INTERPRET=1", allow_module_level=True)

from stalewise.models.kernels.low_precision_step import step_on_device
from stalewise.trainer import moments
from stalewise.trainer.moments import BLOCK, StepNumbers, new_moments, step_key

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter cuts float32 off to bfloat16, where a GPU rounds.
DTYPES = [torch.float32, torch.bfloat16] if torch.cuda.is_available() else [torch.float32]


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_steps_equal_those_in_plain_torch(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = torch.randn(5, 600).to(DEVICE, dtype)
    weights = [weight.clone(), weight.clone()]
    held = [new_moments(weight, kind) for weight in weights]
    for number in range(1, 5):
        usable = float(number != 3)
        scalars = torch.tensor([1e-2, 1 - 0.9**number, (1 - 0.99**number) ** 0.5, usable], device=DEVICE)
        numbers = StepNumbers(0.9, 0.99, 1e-8, 0.1, scalars, step_key(1, number, 2))
        gradient = torch.randn(5, 600).to(DEVICE, dtype)
        expected = moments._step_rows(weights[0], gradient, held[0], numbers, 0)
        square = step_on_device(weights[1], gradient, held[1], numbers, BLOCK)
        torch.testing.assert_close(square, expected, rtol=1e-5, atol=0)
        torch.testing.assert_close(weights[1], weights[0])
        for name, tensor in held[0].items():  # another rounding of a number may tip it over to its other neighbour
            close = torch.isclose(
                tensor.float(), held[1][name].float(), rtol=0.01, atol=1.01 if kind == "int8" else 1e-9
            )
            assert close.all(), name
            assert (tensor == held[1][name]).float().mean() > 0.99, name
