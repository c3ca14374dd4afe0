"""Learning-rate schedules, and operations on lists of tensors."""

from __future__ import annotations

import math

import pytest
import torch

from stalewise.config import OptimizerSection
from stalewise.trainer.optimizer import add_to, learning_rate


def test_learning_rate_schedules() -> None:
    # Warm-up of 2: ½, 1. Cosine over the 8 that follow: 1 at its first, ½ in the middle.
    cosine = OptimizerSection(learning_rate=2.0, warmup_updates=2, schedule="cosine")
    rates = [learning_rate(update, cosine, updates=10) for update in range(10)]
    assert rates[:3] == [1.0, 2.0, 2.0]
    assert rates[6] == pytest.approx(1.0)
    assert rates[9] == pytest.approx(1 + math.cos(7 / 8 * math.pi))
    linear = OptimizerSection(learning_rate=2.0, schedule="linear")
    assert [learning_rate(update, linear, updates=4) for update in range(4)] == [2.0, 1.5, 1.0, 0.5]
    assert learning_rate(3, OptimizerSection(learning_rate=2.0), updates=4) == 2.0


def test_amounts_of_lower_precision_are_added_in_that_of_the_totals() -> None:
    totals = [torch.full((2,), 1.0), torch.full((3,), 256.0)]
    add_to(totals, [torch.full((2,), 0.5), torch.full((3,), 1.0, dtype=torch.bfloat16)])
    assert [total.tolist() for total in totals] == [[1.5] * 2, [257.0] * 3]  # 257 is no bfloat16


def test_amounts_of_equal_precision_need_no_widening() -> None:
    totals = [torch.full((2,), 1.0, dtype=torch.bfloat16)]
    add_to(totals, [torch.full((2,), 0.5, dtype=torch.bfloat16)])  # as with bfloat16-only on a GPU
    assert totals[0].tolist() == [1.5, 1.5]
