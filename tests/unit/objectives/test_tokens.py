"""Bad input: each gets a ValueError that names the argument, its shape and what was expected."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from stalewise.objectives import evaluate, get_objective
from stalewise.objectives.tokens import make_tokens


def inputs(**changed: Tensor) -> dict[str, Any]:
    good = {
        "logp": torch.full((2, 3), -1.0),
        "behaviour_logp": torch.full((2, 3), -1.0),
        "advantage": torch.tensor([1.0, -1.0]),
        "mask": torch.ones(2, 3),
    }
    return good | changed


def with_value(row: int, column: int, value: float) -> Tensor:
    tensor = torch.full((2, 3), -1.0)
    tensor[row, column] = value
    return tensor


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"logp": torch.zeros(6)}, r"logp has shape \[6\]; expected \[B, T\]"),
        ({"logp": torch.zeros(2, 3, dtype=torch.int64)}, r"logp has dtype torch.int64; expected floating point"),
        ({"logp": torch.zeros(0, 3)}, r"logp has shape \[0, 3\]: the batch is empty"),
        ({"logp": torch.zeros(2, 0)}, r"logp has shape \[2, 0\]: the batch is empty"),
        ({"behaviour_logp": torch.zeros(3, 2)}, r"behaviour_logp has shape \[3, 2\]; expected \[2, 3\]"),
        ({"mask": torch.ones(2, 4)}, r"mask has shape \[2, 4\]; expected \[2, 3\]"),
        ({"proximal_logp": torch.ones(2)}, r"proximal_logp has shape \[2\]; expected \[2, 3\]"),
        ({"advantage": torch.zeros(2, 3)}, r"advantage has shape \[2, 3\]; expected \[2\] \(one advantage per seq"),
        ({"advantage": torch.zeros(3)}, r"advantage has shape \[3\]; expected \[2\]$"),
        ({"mask": with_value(0, 0, 2.0)}, r"mask has shape \[2, 3\] and values from -1.0 to 2.0; expected only"),
        ({"mask": torch.zeros(2, 3)}, r"mask has shape \[2, 3\] and no 1: the batch is empty"),
        ({"logp": with_value(1, 2, math.nan)}, r"logp has shape \[2, 3\] and 1 non-finite .* first at \[\[1, 2\]\]"),
        ({"behaviour_logp": with_value(0, 1, -math.inf)}, r"behaviour_logp has .* 1 non-finite .* \[\[0, 1\]\]"),
        ({"proximal_logp": with_value(0, 0, math.inf)}, r"proximal_logp has .* 1 non-finite .* \[\[0, 0\]\]"),
        ({"advantage": torch.tensor([math.nan, 1.0])}, r"advantage has shape \[2\] and 1 non-finite .* \[\[0\]\]"),
        ({"behaviour_logp": torch.zeros(2, 3, device="meta")}, "behaviour_logp is on meta; expected cpu"),
        ({"mask": torch.zeros(2, 3, device="meta")}, "mask is on meta; expected cpu"),
        ({"advantage": torch.zeros(2, device="meta")}, "advantage is on meta; expected cpu"),
    ],
)
def test_bad_input_is_named(changed: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate("grpo", **inputs(**changed))


def test_the_first_five_bad_places_are_named_and_all_are_counted() -> None:
    with pytest.raises(ValueError, match=r"and 6 non-finite .* \[\[0, 0\], \[0, 1\], \[0, 2\], \[1, 0\], \[1, 1\]\];"):
        evaluate("grpo", **inputs(logp=torch.full((2, 3), math.nan)))


def test_a_missing_proximal_policy_is_named() -> None:
    for name in ("decoupled_ppo", "p3o_two_anchor"):
        with pytest.raises(ValueError, match=rf"proximal_logp is None; objective {name} expects .* shape \[2, 3\]"):
            evaluate(name, **inputs())


def test_each_phase_alone_refuses_a_missing_proximal_policy() -> None:
    objective, tokens = get_objective("decoupled_ppo"), make_tokens(**inputs())
    with pytest.raises(ValueError, match="proximal_logp is None; objective decoupled_ppo"):
        objective.first_pass(tokens, objective.settings())
    with pytest.raises(ValueError, match="proximal_logp is None; objective decoupled_ppo"):
        objective.second_pass(tokens, None, objective.settings())


def test_negative_masks_are_refused() -> None:
    with pytest.raises(ValueError, match="mask"):
        evaluate("grpo", **inputs(mask=-torch.ones(2, 3)))


def test_a_mask_of_which_one_value_is_neither_0_nor_1_is_refused() -> None:
    with pytest.raises(ValueError, match="mask"):
        evaluate("grpo", **inputs(mask=torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.5, 0.0]])))


def test_padding_may_hold_anything() -> None:
    mask = torch.ones(2, 3)
    mask[0, 2] = 0
    dirty = with_value(0, 2, math.nan).requires_grad_()
    clean = evaluate("p3o", **inputs(mask=mask))
    result = evaluate("p3o", **inputs(mask=mask, logp=dirty, behaviour_logp=with_value(0, 2, -math.inf)))
    (gradient,) = torch.autograd.grad(result.loss, dirty)
    assert result.loss.item() == clean.loss.item()
    assert gradient.isfinite().all()
    assert gradient[0, 2] == 0


def test_off_the_mask_every_tensor_is_zero() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    tokens = make_tokens(**inputs(mask=mask, proximal_logp=torch.full((2, 3), -3.0)))
    assert tokens.proximal_logp_BT is not None
    # On the mask logp and behaviour_logp are −1, so their ratio is 0 there, too.
    assert tokens.logp_BT.tolist() == tokens.behaviour_logp_BT.tolist() == [[-1, -1, 0], [-1, 0, 0]]
    assert tokens.proximal_logp_BT.tolist() == [[-3, -3, 0], [-3, 0, 0]]
    assert tokens.log_ratio_BT.tolist() == [[0, 0, 0], [0, 0, 0]]


def test_an_advantage_of_a_row_without_tokens_is_not_looked_at() -> None:
    mask = torch.ones(2, 3)
    mask[0] = 0
    evaluate("grpo", **inputs(mask=mask, advantage=torch.tensor([math.inf, 1.0])))


def test_value_checks_can_be_left_to_the_diagnostics() -> None:
    tokens = make_tokens(**inputs(logp=with_value(1, 2, math.nan)), check_values=False)
    assert tokens.log_ratio_BT[1, 2].isnan()


def test_half_precision_is_raised_to_float32() -> None:
    half = {name: value.half() if name != "mask" else value for name, value in inputs().items()}
    tokens = make_tokens(**half)
    assert tokens.logp_BT.dtype == tokens.log_ratio_BT.dtype == tokens.advantage_B.dtype == torch.float32
    assert make_tokens(**inputs(logp=torch.zeros(2, 3).double())).log_ratio_BT.dtype == torch.float64


def test_only_the_policy_carries_a_gradient() -> None:
    grad = {name: value.requires_grad_() for name, value in inputs().items() if name != "mask"}
    tokens = make_tokens(**grad, mask=torch.ones(2, 3), proximal_logp=torch.zeros(2, 3, requires_grad=True))
    assert tokens.logp_BT.requires_grad
    assert tokens.proximal_logp_BT is not None
    constants = (tokens.behaviour_logp_BT, tokens.advantage_B, tokens.proximal_logp_BT)
    assert not any(tensor.requires_grad for tensor in constants)
