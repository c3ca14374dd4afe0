"""Numbers that FeynRL's P3O and P4O losses give on stated tensors, and what differs by intent.

Recorded from `compute_policy_loss` of FeynRL-project/FeynRL: P3O and P4O at 4f7eafe (5 August 2026), and P4O at 396a7e7
(5 May 2026), before its two trust regions became one around a mixture. Losses are sums, in float32.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from stalewise.objectives import evaluate
from stalewise.objectives.advantages import group_advantages

TOKENS = torch.tensor([10, 9, 7, 10, 4, 1])  # of each response: 41 in all
CLAMP = {"k3_clamp": 10.0}
MIXTURE: dict[str, Any] = {"anchors": "mixture", **CLAMP}
# Name and parameters here, deviation of the log-ratio; loss, norm of the gradient, two of its values, and ESS.
FEYNRL: list[tuple[str, dict[str, Any], float, tuple[float, ...]]] = [
    ("p3o", CLAMP, 0.0, (0.13455843925, 5.22015333176, -1.0, 0.5, 0.99999999976)),
    ("p3o", CLAMP, 0.1, (-0.74566215277, 5.04976749420, -0.94854611158, 0.47306737304, 0.99335335442)),
    ("p3o", CLAMP, 1.0, (3.13644027710, 4.86234045029, -0.81273388863, 0.05677291751, 0.67920065523)),
    ("p3o", CLAMP, 4.0, (7204.48388672, 6514.42724609, -5.87975025177, -6.07394027710, 0.22159933647)),
    ("p3o", CLAMP, 8.0, (85819.5859375, 18657.2734375, -61.38239669800, -68.59694671631, 0.11791542720)),
    ("p3o_two_anchor", CLAMP, 0.1, (-0.74550807476, 5.04981803894, -0.94846063852, 0.47305449843, 0.99335335442)),
    ("p3o_two_anchor", CLAMP, 1.0, (4.43664884567, 5.08209753036, -0.75153923035, 0.04597264528, 0.67920065523)),
    ("p3o_two_anchor", CLAMP, 4.0, (7372.64306641, 6517.44042969, -5.25809574127, -6.25216865540, 0.22159933647)),
    ("p3o_two_anchor", CLAMP, 8.0, (93996.0546875, 19656.4746094, -60.50275802612, -69.03111267090, 0.11791542720)),
    ("p3o_two_anchor", MIXTURE, 0.0, (0.13455843925, 5.22015333176, -1.0, 0.5, 0.99999999976)),
    ("p3o_two_anchor", MIXTURE, 0.1, (-0.74609357119, 5.04962444305, -0.94837957621, 0.47316709161, 0.99335335442)),
    ("p3o_two_anchor", MIXTURE, 1.0, (0.06192111969, 4.01943826675, -0.68382108212, 0.14650806785, 0.67920065523)),
    ("p3o_two_anchor", MIXTURE, 4.0, (3846.75903320, 3430.62719727, -2.82411766052, -3.26431417465, 0.22159933647)),
    ("p3o_two_anchor", MIXTURE, 8.0, (78458.015625, 9725.36523438, -31.46340942383, -35.88762664795, 0.11791542720)),
]


def batch(deviation: float) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    logp = -3 * torch.rand(6, 10, generator=generator)
    return {
        "logp": logp,
        "behaviour_logp": logp - deviation * torch.randn(6, 10, generator=generator),
        "proximal_logp": logp - deviation / 2 * torch.randn(6, 10, generator=generator),
        "advantage": torch.tensor([1.0, -1.0, 0.5, -0.5, 0.0, 2.0]),
        "mask": torch.arange(10) < TOKENS[:, None],
    }


def loss_and_gradient(name: str, given: dict[str, Any], **params: Any) -> tuple[float, Tensor, float]:
    logp = given["logp"].clone().requires_grad_()
    result = evaluate(name, **{**given, "logp": logp}, params=params, denominator=1.0)
    result.loss.backward()
    assert logp.grad is not None
    return result.loss.item(), logp.grad, result.stats["ess"]


@pytest.mark.parametrize(("name", "params", "deviation", "expected"), FEYNRL)
def test_loss_and_gradient(name: str, params: dict[str, Any], deviation: float, expected: tuple[float, ...]) -> None:
    loss, gradient, ess = loss_and_gradient(name, batch(deviation), **params)
    found = (loss, gradient.norm().item(), gradient[0, 0].item(), gradient[3, 5].item(), ess)
    assert found == pytest.approx(expected, rel=1e-5, abs=2e-5)


def test_difference_ess_is_of_the_batch_and_not_of_a_micro_batch() -> None:
    given = batch(1.0)
    halves = [{name: value[rows] for name, value in given.items()} for rows in (slice(0, 3), slice(3, 6))]
    losses, _, ess = zip(*(loss_and_gradient("p3o", half, **CLAMP) for half in halves), strict=True)
    assert ess == pytest.approx((0.6450554087, 0.7605843735), rel=1e-6)
    assert sum(losses) == pytest.approx(2.9257531166, rel=1e-5)  # FeynRL, in two micro-batches; 3.13644 in one


def test_difference_the_exponent_of_k3_is_not_clamped_by_default() -> None:
    # A token with b − ℓ = 12: with the clamp its slope is (1 − ESS)·(+1), without it (1 − ESS)·(1 − e^12).
    given = batch(1.0)
    given["behaviour_logp"][4, 0] = given["logp"][4, 0] + 12  # of the response whose advantage is 0
    slopes = [loss_and_gradient("p3o", given, **params) for params in (CLAMP, {})]
    (_, clamped, ess), (_, plain, _) = slopes
    assert clamped[4, 0].item() == pytest.approx(1 - ess, rel=1e-5)
    assert plain[4, 0].item() == pytest.approx((1 - ess) * (1 - math.exp(12)), rel=1e-5)
    assert torch.equal(clamped[:4], plain[:4])


def test_difference_a_ratio_that_overflows_is_no_ess_of_one() -> None:
    # FeynRL: the square of e^100 overflows in float32, so its ESS is 1 and nothing regularizes: loss −3.92403.
    given = batch(1.0)
    given["behaviour_logp"][0, 0] = given["logp"][0, 0] - 100
    loss, _, ess = loss_and_gradient("p3o", given, **CLAMP)
    assert ess == pytest.approx(1 / TOKENS.sum().item(), rel=1e-6)  # one token has all of the weight
    assert loss > 0


def test_difference_the_deviation_of_a_group() -> None:
    reward = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0])
    ours = group_advantages(reward, torch.zeros(8, dtype=torch.int64)).advantage_N
    theirs = (reward - reward.mean()) / (reward.std() + 1e-8)
    assert ours / theirs == pytest.approx(torch.full((8,), math.sqrt(8 / 7)), rel=1e-5)


def test_without_advantages_the_loss_is_the_regularizer() -> None:
    # FeynRL takes this step; our trainer skips an update whose groups all have equal rewards.
    given = batch(1.0)
    given["advantage"] = torch.zeros(6)
    loss, gradient, _ = loss_and_gradient("p3o", given, **CLAMP)
    assert (loss, gradient.norm().item()) == pytest.approx((6.1549830437, 3.4609653950), rel=1e-5)
