"""The loss of an objective on a whole batch, and on its micro-batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from batches import random_batch
from stalewise.objectives.loss import evaluate, micro_batch_loss, micro_batch_sums
from stalewise.objectives.registry import get_objective
from stalewise.objectives.regularizers import Regularizers
from stalewise.objectives.tokens import make_tokens, natural_denominator


def test_a_denominator_divides_the_sum() -> None:
    r = torch.tensor([[1.0, 2.0, 0.5]])
    logp = torch.tensor([[-0.5, -1.0, -2.0]])
    batch: dict[str, Any] = {
        "logp": logp,
        "behaviour_logp": logp - r.log(),
        "advantage": torch.tensor([1.0]),
        "mask": torch.ones(1, 3),
    }
    # −(1 + min(2, 1.2) + 0.5) = −2.7
    assert evaluate("grpo", **batch).loss.item() == pytest.approx(-0.9)
    assert evaluate("grpo", **batch, denominator=10).loss.item() == pytest.approx(-0.27)
    for denominator in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=r"denominator is .*; expected a positive number"):
            evaluate("grpo", **batch, denominator=denominator)


def test_the_pieces_make_the_whole() -> None:
    batch = random_batch(seed=3)
    whole = evaluate("p3o", **batch)
    objective = get_objective("p3o")
    settings, tokens = objective.settings(), make_tokens(**batch)
    statistics = objective.first_pass(tokens, settings)
    loss, token_loss = micro_batch_loss(objective, tokens, statistics, settings, natural_denominator(tokens, "token"))
    assert loss.item() == whole.loss.item()
    assert micro_batch_sums(tokens, token_loss).summary() == pytest.approx(whole.stats, nan_ok=True)


def test_the_reference_reaches_the_divergence() -> None:
    batch = random_batch(seed=4)
    reference = batch["logp"].detach() - 0.3
    plain = evaluate("grpo", **batch)
    held = evaluate("grpo", **batch, reference_logp=reference, regularizers=Regularizers(kl=0.5, estimator="k2"))
    # k2 is half of the squared difference, the same at every token.
    assert held.loss.item() - plain.loss.item() == pytest.approx(0.5 * 0.3**2 / 2, rel=1e-4)
