"""Numbers derived by hand; the arithmetic is in the comments."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from stalewise.objectives import (
    OBJECTIVES,
    evaluate,
    get_objective,
    make_tokens,
    micro_batch_loss,
    micro_batch_sums,
    surrogates,
)


def loss_and_gradient(
    name: str,
    *,
    ratio: list[list[float]],
    logp: list[list[float]],
    advantage: list[float],
    mask: list[list[int]] | None = None,
    **more: Any,
) -> tuple[float, list[list[float]], Any]:
    logp_BT = torch.tensor(logp, dtype=torch.float64, requires_grad=True)
    mask_BT = torch.ones_like(logp_BT) if mask is None else torch.tensor(mask)
    behaviour: Tensor = logp_BT.detach() - torch.tensor(ratio, dtype=torch.float64).log()
    result = evaluate(
        name,
        logp=logp_BT,
        behaviour_logp=behaviour,
        advantage=torch.tensor(advantage, dtype=torch.float64),
        mask=mask_BT,
        **more,
    )
    (gradient,) = torch.autograd.grad(result.loss, logp_BT)
    return result.loss.item(), gradient.tolist(), result.stats


def rows(*values: list[float]) -> Any:
    """Nested approx: one per row, since pytest's approx does not nest."""
    return [pytest.approx(value, abs=1e-12) for value in values]


def test_grpo_clips_only_what_has_already_moved_in_the_direction_of_its_advantage() -> None:
    # A = +1: r = 1.5 > 1.2 is clipped to 1.2 (no gradient); r = 0.5 is not clipped: −r = −0.5.
    # A = −2: r = 0.5 < 0.8 is clipped to 0.8: loss +1.6; r = 1.5 is not: loss 3.0, gradient −r·A = 3.0.
    # Sum −1.2 − 0.5 + 1.6 + 3.0 = 2.9 over 4 tokens.
    loss, gradient, stats = loss_and_gradient(
        "grpo", ratio=[[1.5, 0.5], [0.5, 1.5]], logp=[[-1.0, -1.0], [-1.0, -1.0]], advantage=[1.0, -2.0]
    )
    assert loss == pytest.approx(2.9 / 4)
    assert gradient == rows([0.0, -0.5 / 4], [0.0, 3.0 / 4])
    assert stats["clip_fraction"] == 0.5


def test_grpo_bounds_are_bounds_on_the_ratio_itself() -> None:
    # clip_high 2 lets r = 1.5 through and cuts 3: −(1.5 + 2) / 2. clip_low 0.1 lets r = 0.5 through: +0.5.
    loss, _, _ = loss_and_gradient(
        "grpo", ratio=[[1.5, 3.0]], logp=[[-1.0, -1.0]], advantage=[1.0], params={"clip_low": 0.1, "clip_high": 2}
    )
    assert loss == pytest.approx(-3.5 / 2)
    loss, _, _ = loss_and_gradient(
        "grpo", ratio=[[0.5, 0.05]], logp=[[-1.0, -1.0]], advantage=[-1.0], params={"clip_low": 0.1, "clip_high": 2}
    )
    assert loss == pytest.approx((0.5 + 0.1) / 2)


def test_a_ratio_exactly_on_the_bound_keeps_its_gradient() -> None:
    # r = 1 = clip_low = clip_high: both branches of the min are equal, and the slope inside is −A.
    _, gradient, stats = loss_and_gradient(
        "grpo",
        ratio=[[1.0], [1.0]],
        logp=[[-1.0], [-1.0]],
        advantage=[1.0, -3.0],
        params={"clip_low": 1, "clip_high": 1},
    )
    assert gradient == rows([-0.5], [1.5])
    assert stats["clip_fraction"] == 0


def test_without_an_advantage_nothing_counts_as_clipped() -> None:
    # A = 0: neither bound applies, however far r is from [0.8, 1.2]; the loss is 0 in any case.
    loss, gradient, stats = loss_and_gradient("grpo", ratio=[[0.01, 9.0]], logp=[[-1.0, -1.0]], advantage=[0.0])
    assert loss == 0
    assert gradient == rows([0.0, 0.0])
    assert stats["clip_fraction"] == 0


def test_the_default_bounds_of_the_clipped_family() -> None:
    # A = 1 at r = 1.25: grpo and dr_grpo cut at 1.2, dapo at 1.28. A = −1 at r = 0.5: all cut at 0.8.
    for name, high in (("grpo", 1.2), ("dr_grpo", 1.2), ("dapo", 1.25)):
        loss, _, _ = loss_and_gradient(name, ratio=[[1.25]], logp=[[-1.0]], advantage=[1.0])
        assert loss == pytest.approx(-high), name
        loss, _, _ = loss_and_gradient(name, ratio=[[0.5]], logp=[[-1.0]], advantage=[-1.0])
        assert loss == pytest.approx(0.8), name
    loss, _, _ = loss_and_gradient("dapo", ratio=[[1.5]], logp=[[-1.0]], advantage=[1.0])
    assert loss == pytest.approx(-1.28)


def test_gspo_has_one_ratio_per_response_and_a_mean_per_response() -> None:
    # Row 1: log-ratios log 2 and log 8 (mean log 4): s = 4, beyond 5: no. With clip [0.5, 5]: −4·1.
    # Row 2: one token, log-ratio log 0.5, A = −1: s = 0.5: +0.5. Mean over 2 responses: (−4 + 0.5) / 2 = −1.75.
    # Gradients: row 1 −s·A/len/B = −4/2/2 = −1 for each token; row 2: −0.5·(−1)/1/2 = 0.25.
    loss, gradient, _ = loss_and_gradient(
        "gspo",
        ratio=[[2.0, 8.0], [0.5, 99.0]],
        logp=[[-1.0, -1.0], [-1.0, -1.0]],
        advantage=[1.0, -1.0],
        mask=[[1, 1], [1, 0]],
        params={"clip_low": 0.5, "clip_high": 5.0},
    )
    assert loss == pytest.approx(-1.75)
    assert gradient == rows([-1.0, -1.0], [0.25, 0.0])


def test_gspo_default_bounds() -> None:
    # s = 1.0005 > 1.0004 and s = 0.9996 < 0.9997 are clipped; s = 1.00035 and 0.99975 are not.
    for ratio, advantage, expected in (
        (1.0005, 1.0, -1.0004),
        (1.00035, 1.0, -1.00035),
        (0.9996, -1.0, 0.9997),
        (0.99975, -1.0, 0.99975),
    ):
        loss, _, _ = loss_and_gradient("gspo", ratio=[[ratio]], logp=[[-1.0]], advantage=[advantage])
        assert loss == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(("name", "cap"), [("cispo", 5.0), ("tis", 2.0)])
def test_capped_weights(name: str, cap: float) -> None:
    # Weights min(r, cap) of r = {8, 0.5}, constant: loss −(cap·2·(−1) + 0.5·2·(−3)) / 2, gradient −w·A / 2.
    loss, gradient, stats = loss_and_gradient(name, ratio=[[8.0, 0.5]], logp=[[-1.0, -3.0]], advantage=[2.0])
    assert loss == pytest.approx((cap * 2 * 1 + 0.5 * 2 * 3) / 2)
    assert gradient == rows([-cap * 2 / 2, -0.5 * 2 / 2])
    assert stats["clip_fraction"] == 0.5
    loss, _, _ = loss_and_gradient(name, ratio=[[8.0]], logp=[[-1.0]], advantage=[1.0], params={"cap": 7.0})
    assert loss == pytest.approx(7.0)


def test_decoupled_ppo_weighs_by_the_proximal_policy_and_clips_against_it() -> None:
    # b = −1 everywhere. Token 1: p − b = log 3, capped at 2; ℓ − p = log 1.1, inside the clip: −2·1.1.
    # Token 2: p − b = log 0.5; ℓ − p = log 2, clipped to 1.2: −0.5·1.2, no gradient.
    behaviour = torch.tensor([[-1.0, -1.0]], dtype=torch.float64)
    proximal = behaviour + torch.tensor([[3.0, 0.5]], dtype=torch.float64).log()
    logp = (proximal + torch.tensor([[1.1, 2.0]], dtype=torch.float64).log()).requires_grad_()
    result = evaluate(
        "decoupled_ppo",
        logp=logp,
        behaviour_logp=behaviour,
        proximal_logp=proximal,
        advantage=torch.tensor([1.0], dtype=torch.float64),
        mask=torch.ones(1, 2),
    )
    (gradient,) = torch.autograd.grad(result.loss, logp)
    assert result.loss.item() == pytest.approx(-(2.2 + 0.6) / 2)
    assert gradient.tolist() == rows([-2.2 / 2, 0.0])
    assert result.stats["clip_fraction"] == 0.5


def test_topr_weighs_negative_responses_by_their_whole_ratio_and_positive_ones_by_one() -> None:
    # Row 1 (A = 1): weight 1. Row 2 (A = −1): Π r = 0.5·0.5 = 0.25. Row 3 (A = −1): Π r = 4, cut to 1.
    # Losses −w·A·ℓ: row 1: 1 + 1; row 2: −0.25·(1 + 1); row 3: −1·(1 + 1); sum −0.5 over 6 tokens.
    loss, gradient, stats = loss_and_gradient(
        "topr",
        ratio=[[3.0, 0.2], [0.5, 0.5], [2.0, 2.0]],
        logp=[[-1.0, -1.0], [-1.0, -1.0], [-1.0, -1.0]],
        advantage=[1.0, -1.0, -1.0],
    )
    assert loss == pytest.approx(-0.5 / 6)
    assert gradient == rows([-1 / 6, -1 / 6], [0.25 / 6, 0.25 / 6], [1 / 6, 1 / 6])
    assert stats["clip_fraction"] == pytest.approx(2 / 6)


def m2po_ratios(squares: list[float]) -> list[list[float]]:
    return [[math.exp(math.sqrt(square)) for square in squares]]


def test_m2po_paper_drops_one_where_the_released_code_clips_two() -> None:
    # v = {.03, .05, .07}, all harmful, threshold .04. Paper: mean .05; without .07 it is .04: one token dropped.
    # Released: Σ min(v_i, v_k) = .09 < .12 at k = 0 and .13 ≥ .12 at k = 1: τ² = v_0 = .03: two tokens clipped to e^τ.
    ratio = m2po_ratios([0.03, 0.05, 0.07])
    logp = [[-1.0, -1.0, -1.0]]
    # A threshold a hair above .04, since √.05² is not exactly .05.
    loss, gradient, stats = loss_and_gradient(
        "m2po", ratio=ratio, logp=logp, advantage=[1.0], params={"threshold": 0.04 + 1e-12}
    )
    assert stats["clip_fraction"] == pytest.approx(1 / 3)
    assert loss == pytest.approx(-(ratio[0][0] + ratio[0][1]) / 3)
    assert gradient == rows([-ratio[0][0] / 3, -ratio[0][1] / 3, 0.0])
    loss, gradient, stats = loss_and_gradient(
        "m2po", ratio=ratio, logp=logp, advantage=[1.0], params={"variant": "released"}
    )
    assert stats["clip_fraction"] == pytest.approx(2 / 3)
    assert loss == pytest.approx(-math.exp(math.sqrt(0.03)))
    # The token that set τ is on the kink: half of its slope.
    assert gradient == rows([-ratio[0][0] / 6, 0.0, 0.0])


@pytest.mark.parametrize("variant", ["paper", "released"])
@pytest.mark.parametrize(
    ("squares", "taken_out"),
    [
        ([0.01, 0.02, 0.03, 0.2], 1),  # mean .065; without .2 it is .02. Σ min(v_i, v_3) is the first ≥ .16: clips .2
        ([0.05, 0.05], 2),  # even one alone is above .04; k = 0: τ = 0
        ([0.03, 0.04], 0),  # mean .035: within the budget
    ],
)
def test_m2po_worked_cases(variant: str, squares: list[float], taken_out: int) -> None:
    _, _, stats = loss_and_gradient(
        "m2po",
        ratio=m2po_ratios(squares),
        logp=[[-1.0] * len(squares)],
        advantage=[1.0],
        params={"variant": variant},
    )
    assert stats["clip_fraction"] * len(squares) == pytest.approx(taken_out)


def test_m2po_released_clips_negative_advantages_from_below() -> None:
    # A = −1, r = e^−√v: v = {.05, .05}: τ = 0, both clipped to 1: loss 1, no gradient (both lie off the kink at 0).
    ratio = [[math.exp(-math.sqrt(0.05))] * 2]
    loss, gradient, _ = loss_and_gradient(
        "m2po", ratio=ratio, logp=[[-1.0, -1.0]], advantage=[-1.0], params={"variant": "released"}
    )
    assert loss == pytest.approx(1.0)
    assert gradient == rows([0.0, 0.0])


@pytest.mark.parametrize("variant", ["paper", "released"])
def test_m2po_leaves_harmless_tokens_alone_however_far_they_are(variant: str) -> None:
    # (A > 0, r < 1) is harmless: −r·A unclipped. One harmful token with v = log² 2 = .48 > .04 is taken out.
    loss, gradient, _ = loss_and_gradient(
        "m2po", ratio=[[0.01, 2.0]], logp=[[-1.0, -1.0]], advantage=[1.0], params={"variant": variant}
    )
    assert loss == pytest.approx({"paper": -0.01 / 2, "released": -(0.01 + 1.0) / 2}[variant])
    assert gradient == rows([-0.01 / 2, 0.0])


def test_mu_grpo_relaxes_the_clip_to_five_and_to_nothing_below() -> None:
    # A = 1: r = 8 → 5, r = 3 → 3. A = −1: r = 0.01 (above kappa): −r·A = 0.01, r = 8: 8. Sum −8 + 8.01 over 4.
    loss, gradient, stats = loss_and_gradient(
        "mu_grpo", ratio=[[8.0, 3.0], [0.01, 8.0]], logp=[[-1.0, -1.0], [-1.0, -1.0]], advantage=[1.0, -1.0]
    )
    assert loss == pytest.approx((-8 + 8.01) / 4)
    assert gradient == rows([0.0, -0.75], [0.01 / 4, 2.0])
    assert stats["clip_fraction"] == 0.25
    assert stats["veto_fraction"] == 0.0


@pytest.mark.parametrize(
    ("scope", "kept"),
    [
        ("suffix", [1, 0, 0, 0]),
        ("post", [1, 1, 0, 0]),
        ("trigger", [1, 0, 1, 0]),
        ("sequence", [0, 0, 0, 0]),
    ],
)
def test_veto_scopes(scope: str, kept: list[int]) -> None:
    # Triggers (r = 5e-5 < 1e-4) at tokens 1 and 3 of a response with A = −2; r = 2 elsewhere: gradient −r·A/n = 4/n.
    # A response with A = +1 and the same ratios is never vetoed. n = 8.
    ratio = [2.0, 5e-5, 2.0, 5e-5]
    loss, gradient, stats = loss_and_gradient(
        "mu_grpo", ratio=[ratio, ratio], logp=[[-1.0] * 4] * 2, advantage=[-2.0, 1.0], params={"scope": scope}
    )
    negative = [2 * r * k for r, k in zip(ratio, kept, strict=True)]
    assert gradient == rows([x / 8 for x in negative], [-r / 8 for r in ratio])
    assert loss == pytest.approx((sum(negative) - sum(ratio)) / 8)
    assert stats["veto_fraction"] == (4 - sum(kept)) / 8
    assert stats["veto_response_fraction"] == 0.5


def test_veto_threshold_is_strict_and_off_by_default_above_kappa() -> None:
    for ratio, vetoed in ((0.99e-4, 1.0), (1.01e-4, 0.0)):
        _, _, stats = loss_and_gradient("mu_grpo", ratio=[[ratio]], logp=[[-1.0]], advantage=[-1.0])
        assert stats["veto_fraction"] == vetoed
    _, _, stats = loss_and_gradient("mu_grpo", ratio=[[0.04]], logp=[[-1.0]], advantage=[-1.0], params={"kappa": 0.05})
    assert stats["veto_fraction"] == 1.0


def test_p3o_by_hand() -> None:
    # r = {1, 2, ½}: ESS = 3.5² / (3·5.25) = 7/9. Weights min(r, 7/9) = {7/9, 7/9, 1/2}.
    # −w·A·ℓ = {7/18, −7/9, 1/2} = 1/9; k3 = {0, ½ + log 2 − 1, 2 − log 2 − 1} = ½ in total, times 2/9. Sum 2/9.
    # Gradient −w·A + (2/9)·(1 − 1/r) = {−7/9, 7/9 + 1/9, −1/4 − 2/9} = {−7/9, 8/9, −17/36}.
    loss, gradient, stats = loss_and_gradient(
        "p3o", ratio=[[1.0], [2.0], [0.5]], logp=[[-0.5], [-1.0], [-2.0]], advantage=[1.0, -1.0, 0.5], denominator=1.0
    )
    assert loss == pytest.approx(2 / 9)
    assert gradient == rows([-7 / 9], [8 / 9], [-17 / 36])
    assert stats["ess"] == pytest.approx(7 / 9)
    assert stats["clip_fraction"] == pytest.approx(2 / 3)


def two_anchor(proximal_offset: list[float]) -> tuple[float, list[list[float]]]:
    logp = torch.tensor([[-0.5], [-1.0], [-2.0]], dtype=torch.float64, requires_grad=True)
    ratio = torch.tensor([[1.0], [2.0], [0.5]], dtype=torch.float64)
    proximal_ratio = torch.tensor(proximal_offset, dtype=torch.float64)[:, None]
    result = evaluate(
        "p3o_two_anchor",
        logp=logp,
        behaviour_logp=logp.detach() - ratio.log(),
        proximal_logp=logp.detach() - proximal_ratio.log(),
        advantage=torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64),
        mask=torch.ones(3, 1),
        denominator=1.0,
    )
    (gradient,) = torch.autograd.grad(result.loss, logp)
    return result.loss.item(), gradient.tolist()


def test_p3o_two_anchor_is_p3o_where_the_proximal_policy_is_the_current_one() -> None:
    loss, gradient = two_anchor([1.0, 1.0, 1.0])
    assert loss == pytest.approx(2 / 9)
    assert gradient == rows([-7 / 9], [8 / 9], [-17 / 36])


def test_p3o_two_anchor_by_hand() -> None:
    # Proximal ratios {1, 1, 3}: ESS_p = 25 / (3·11) = 25/33 < 7/9: the cap. Weights {25/33, 25/33, 1/2}.
    # Policy −w·A·ℓ: 25/33·(½ − 1) + ½ = 1/2 − 25/66 = 8/66. Behaviour: (2/9)·½ = 1/9.
    # Proximal: (8/33)·k3 with k3 = 1/3 + log 3 − 1 of the third token.
    loss, gradient = two_anchor([1.0, 1.0, 3.0])
    assert loss == pytest.approx(8 / 66 + 1 / 9 + (8 / 33) * (1 / 3 + math.log(3) - 1))
    # Third token: −½·½ + (2/9)(1 − 2) + (8/33)(1 − 1/3).
    assert gradient == rows([-25 / 33], [25 / 33 + 1 / 9], [-1 / 4 - 2 / 9 + 16 / 99])


@pytest.mark.parametrize("denominator", [10.0, torch.tensor(10.0)])
def test_the_denominator_is_an_argument(denominator: float | Tensor) -> None:
    loss, gradient, _ = loss_and_gradient(
        "grpo", ratio=[[1.0, 1.0]], logp=[[-1.0, -1.0]], advantage=[3.0], denominator=denominator
    )
    assert loss == pytest.approx(-0.6)
    assert gradient == rows([-0.3, -0.3])
    loss, _, _ = loss_and_gradient(
        "gspo", ratio=[[1.0, 1.0]], logp=[[-1.0, -1.0]], advantage=[3.0], denominator=denominator
    )
    assert loss == pytest.approx(-0.3)  # one response with mean 3, over 10


def test_denominator_must_be_positive() -> None:
    for bad in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=r"denominator is .*; expected a positive number"):
            loss_and_gradient("grpo", ratio=[[1.0]], logp=[[-1.0]], advantage=[1.0], denominator=bad)


def test_the_learner_can_give_the_exact_entropy() -> None:
    # Entropies {0.5, 1.5} on the two response tokens, mean 1; without them −r·ℓ = {1, 1·2}, mean 1.5.
    logp = torch.tensor([[-1.0, -2.0]], dtype=torch.float64)
    tokens = make_tokens(logp=logp, behaviour_logp=logp, advantage=torch.ones(1), mask=torch.ones(1, 2))
    objective = get_objective("grpo")
    _, token_loss = micro_batch_loss(objective, tokens, None, objective.settings(), 2.0)
    assert micro_batch_sums(tokens, token_loss).summary()["entropy"] == 1.5
    exact = torch.tensor([[0.5, 1.5]], dtype=torch.float64)
    assert micro_batch_sums(tokens, token_loss, exact).summary()["entropy"] == 1.0


def test_every_objective_of_the_table_is_a_surrogate() -> None:
    functions = {name for name, value in vars(surrogates).items() if inspect.isfunction(value) and name[0] != "_"}
    assert {objective.token_loss.__name__ for objective in OBJECTIVES.values()} == functions - {"harmful", "dataclass"}


def test_a_token_without_advantage_is_neither_vetoed_nor_weighted() -> None:
    # TOPR: A = 0 has weight 1 like A > 0. A ratio of 3 would be capped, and counted as clipped, for A < 0 alone.
    clipped = [
        loss_and_gradient("topr", ratio=[[3.0]], logp=[[-1.0]], advantage=[advantage])[2]["clip_fraction"]
        for advantage in (1.0, 0.0, -1.0)
    ]
    assert clipped == [0, 0, 1]


def test_a_ratio_of_exactly_kappa_is_no_trigger() -> None:
    at = math.log(0.05)
    logp_BT = torch.tensor([[at, math.nextafter(at, -math.inf)]], dtype=torch.float64)
    sure_BT, every_BT = torch.zeros_like(logp_BT), torch.ones_like(logp_BT)
    advantage_B = torch.tensor([-1.0], dtype=torch.float64)
    tokens = make_tokens(logp=logp_BT, behaviour_logp=sure_BT, advantage=advantage_B, mask=every_BT)
    found = surrogates.mu_grpo(tokens, None, kappa=0.05)
    assert found.trigger_BT is not None and found.trigger_BT.tolist() == [[False, True]]
