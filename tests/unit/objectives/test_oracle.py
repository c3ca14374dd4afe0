"""Loss and gradient of 13 settings on 6 batches each, from numbers computed outside of this code base."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from stalewise.objectives import evaluate

CASES = json.loads((Path(__file__).parents[2] / "oracles" / "objectives.json").read_text())["cases"]


def case_id(case: dict[str, Any]) -> str:
    settings = "-".join(str(value) for value in case["params"].values() if isinstance(value, str))
    return f"{case['objective']}-{settings}".rstrip("-")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_loss_and_gradient_equal_the_oracle(case: dict[str, Any], dtype: torch.dtype) -> None:
    params = dict(case["params"])
    if "clip" in params:
        params["clip_low"], params["clip_high"] = params.pop("clip")
    inputs: dict[str, Any] = {
        name: torch.tensor(case[name], dtype=dtype) for name in ("logp", "behaviour_logp", "advantage", "mask")
    }
    logp = inputs["logp"].requires_grad_()
    expected_gradient = torch.tensor(case["grad_logp"], dtype=dtype)

    result = evaluate(case["objective"], **inputs, params=params)
    (gradient,) = torch.autograd.grad(result.loss, logp)

    # The oracle's gradients are central differences with 8 digits: their error is relative to the largest of them.
    tolerance = 1e-6 if dtype is torch.float64 else 1e-4
    gradient_scale = max(1.0, expected_gradient.abs().max().item())
    assert (gradient - expected_gradient).abs().max().item() <= tolerance * gradient_scale
    if dtype is torch.float64:
        assert result.loss.item() == pytest.approx(case["loss"], abs=1e-6)
    else:
        # Losses may cancel to nearly 0 while their terms are near 1: float32 rounds the terms.
        term = (inputs["advantage"][:, None] * inputs["logp"] * inputs["mask"]).abs().mean().item()
        assert result.loss.item() == pytest.approx(case["loss"], rel=1e-4, abs=1e-4 * term)


def test_the_oracle_is_all_there() -> None:
    assert len(CASES) == 78
