"""A shorter step where the data is worth less: VCPO's control of the learning rate, usable with any objective."""

from __future__ import annotations

from torch import Tensor

from stalewise.objectives.batch_statistics import WeightSums


def vcpo_factor(sequence_weights: WeightSums) -> Tensor:
    """Factor on one step's learning rate: min(1, ρ)^½ with ρ = (Σw)² / (B Σw²) of the sequence weights.

    w = exp(Σ_t(ℓ − b)), not truncated, over the whole optimizer batch. Huang et al. 2026.

    >>> import torch
    >>> weights = WeightSums.of(torch.tensor([1.0, 1.0, 1.0, 5.0]).log(), torch.ones(4, dtype=torch.bool))
    >>> round(vcpo_factor(weights).item(), 4)  # ρ = 64 / (4 · 28) = 0.5714
    0.7559
    """
    return sequence_weights.effective_sample_size().sqrt()
