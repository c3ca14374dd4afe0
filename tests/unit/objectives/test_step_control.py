from __future__ import annotations

import math

import pytest
import torch

from stalewise.objectives.batch_statistics import WeightSums, vcpo_factor


def test_vcpo_factor_is_the_root_of_the_effective_sample_size() -> None:
    # w = {1, 1, 1, 5}: ρ = 64 / (4·28) = .571429; √ρ = .755929.
    weights = WeightSums.of(torch.tensor([1.0, 1.0, 1.0, 5.0], dtype=torch.float64).log(), torch.ones(4).bool())
    assert vcpo_factor(weights).item() == pytest.approx(math.sqrt(64 / 112))


def test_fresh_data_takes_the_whole_step() -> None:
    assert vcpo_factor(WeightSums.of(torch.zeros(5), torch.ones(5).bool())).item() == 1.0
