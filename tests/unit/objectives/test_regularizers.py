"""A divergence from a reference, an entropy bonus, and shaped rewards."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from batches import random_batch
from stalewise.objectives import Regularizers, evaluate
from stalewise.objectives.regularizers import kl_estimate, kl_of_responses, overlong_penalty


def verl_kl(logp: Tensor, reference: Tensor, kind: str) -> Tensor:
    """verl's `kl_penalty_forward` (trainer/ppo/core_algos.py), by its names k1, k2 and k3."""
    if kind == "k1":
        return logp - reference
    if kind == "k2":
        return 0.5 * (logp - reference).square()
    kl = torch.clamp(reference - logp, min=-20, max=20)
    return torch.clamp(torch.exp(kl) - kl - 1, min=-10, max=10)


def test_values_by_hand() -> None:
    logp, reference = torch.tensor(-2.0, dtype=torch.float64), torch.tensor(-2.0 + math.log(3), dtype=torch.float64)
    assert kl_estimate(logp, reference, "k1").item() == pytest.approx(-math.log(3))
    assert kl_estimate(logp, reference, "k2").item() == pytest.approx(math.log(3) ** 2 / 2)
    assert kl_estimate(logp, reference, "k3").item() == pytest.approx(3 - math.log(3) - 1)
    assert kl_estimate(logp, logp, "k3").item() == 0


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_estimators_equal_those_of_verl(kind: Any) -> None:
    batch = random_batch()
    logp, near = batch["logp"].clone().requires_grad_(), batch["behaviour_logp"].clamp(max=2.0)
    near = torch.where((near - logp.detach()).abs() < 2, near, logp.detach())  # where verl clamps nothing
    ours, theirs = kl_estimate(logp, near, kind), verl_kl(logp, near, kind)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    (gradient,), (expected,) = (torch.autograd.grad(one.sum(), logp) for one in (ours, theirs))
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-14)


def test_samples_of_the_policy_give_the_divergence() -> None:
    p, q = torch.tensor([0.7, 0.2, 0.1]).double(), torch.tensor([0.4, 0.4, 0.2]).double()
    exact = (p * (p / q).log()).sum().item()
    for kind in ("k1", "k3"):
        assert (p * kl_estimate(p.log(), q.log(), kind)).sum().item() == pytest.approx(exact)
    assert (p * kl_estimate(p.log(), q.log(), "k2")).sum().item() != pytest.approx(exact, rel=1e-2)  # biased


@pytest.mark.parametrize("name", ["grpo", "gspo", "p3o"])
def test_the_loss_has_the_terms_and_0_adds_nothing(name: str) -> None:
    batch = random_batch()
    reference, entropy = batch["behaviour_logp"] - 0.1, batch["logp"].abs()
    given: dict[str, Any] = {"reference_logp": reference, "entropy": entropy}
    plain = evaluate(name, **batch).loss
    assert torch.equal(evaluate(name, **batch, **given, regularizers=Regularizers()).loss, plain)
    found = evaluate(name, **batch, **given, regularizers=Regularizers(kl=0.3, estimator="k1", entropy=0.2)).loss
    mask, added = batch["mask"].double(), 0.3 * (batch["logp"] - reference) - 0.2 * entropy
    weight = mask / mask.sum(dim=1, keepdim=True) / len(mask) if name == "gspo" else mask / mask.sum()
    assert (found - plain).item() == pytest.approx((added * weight).sum().item(), rel=1e-9)


def test_what_is_missing_is_named() -> None:
    batch = random_batch()
    with pytest.raises(ValueError, match="reference_logp is None"):
        evaluate("grpo", **batch, regularizers=Regularizers(kl=0.1))
    with pytest.raises(ValueError, match="entropy_BT is None"):
        evaluate("grpo", **batch, regularizers=Regularizers(entropy=0.1))
    with pytest.raises(ValueError, match="estimator is 'k4'; expected one of k1, k2, k3"):
        kl_estimate(batch["logp"], batch["logp"], "k4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="reference_logp has shape"):
        evaluate("grpo", **batch, reference_logp=batch["logp"][:1])


def test_the_divergence_of_a_response_is_the_sum_of_its_tokens() -> None:
    """As in verl's `apply_kl_penalty` and TRL's RLOO trainer: reward − β Σ_t(ℓ − f), ℓ of the policy that sampled."""
    logp, reference = np.array([-1.0, -2.0, -3.0, -0.5]), np.array([-1.5, -1.0, -3.0, -1.5])
    assert kl_of_responses(logp, reference, np.array([0, 2, 4])).tolist() == [-0.5, 1.0]
    assert kl_of_responses(logp, reference, np.array([0, 2, 4]), "k2").tolist() == [0.625, 0.5]


def test_long_responses_are_penalised_softly() -> None:
    lengths = np.array([1, 7, 8, 9, 10, 12])
    assert overlong_penalty(lengths, max_tokens=10, margin=4, factor=2.0).tolist() == [0, -0.5, -1, -1.5, -2, -2]
