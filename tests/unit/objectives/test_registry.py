from __future__ import annotations

import math
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from stalewise.objectives import evaluate, registry
from stalewise.objectives.registry import OBJECTIVES, get_objective, register_objective
from stalewise.objectives.tokens import Tokens, constant_denominator


def test_the_table_holds_the_objectives_of_the_methods_page() -> None:
    names = "grpo dapo dr_grpo gspo cispo tis decoupled_ppo topr m2po mu_grpo p3o p3o_two_anchor"
    assert list(OBJECTIVES) == names.split()
    assert all(name == row.name for name, row in OBJECTIVES.items())


def test_defaults_are_those_of_the_methods_page() -> None:
    defaults = {name: dict(row.settings()) for name, row in OBJECTIVES.items()}
    assert defaults == {
        "grpo": {"clip_low": 0.8, "clip_high": 1.2},
        "dapo": {"clip_low": 0.8, "clip_high": 1.28},
        "dr_grpo": {"clip_low": 0.8, "clip_high": 1.2},
        "gspo": {"clip_low": 0.9997, "clip_high": 1.0004},
        "cispo": {"cap": 5.0},
        "tis": {"cap": 2.0},
        "decoupled_ppo": {"clip_low": 0.8, "clip_high": 1.2, "cap": 2.0},
        "topr": {},
        "m2po": {"variant": "paper", "threshold": 0.04},
        "mu_grpo": {"clip_low": 0.0, "clip_high": 5.0, "kappa": 1e-4, "scope": "suffix"},
        "p3o": {"k3_clamp": 0.0},
        "p3o_two_anchor": {"anchors": "separate", "k3_clamp": 0.0},
    }


def test_what_a_method_prescribes_outside_of_its_loss() -> None:
    assert [n for n, row in OBJECTIVES.items() if row.needs_proximal] == ["decoupled_ppo", "p3o_two_anchor"]
    assert [n for n, row in OBJECTIVES.items() if row.reduction == "sequence"] == ["gspo"]
    assert all(row.reduction == "token" for name, row in OBJECTIVES.items() if name != "gspo")
    assert [n for n, row in OBJECTIVES.items() if row.advantage != "group"] == ["dr_grpo"]
    assert OBJECTIVES["dr_grpo"].advantage == "mean"
    assert [n for n, row in OBJECTIVES.items() if row.drops_degenerate_groups] == ["dapo"]
    assert [n for n, row in OBJECTIVES.items() if row.constant_denominator] == ["dr_grpo"]
    assert [n for n, row in OBJECTIVES.items() if row.measure] == ["m2po", "p3o", "p3o_two_anchor"]
    assert all((row.measure is None) == (row.statistics is None) for row in OBJECTIVES.values())


def test_unknown_names_list_the_near_ones() -> None:
    with pytest.raises(ValueError, match="no objective is called 'mu_gpro'; did you mean mu_grpo"):
        get_objective("mu_gpro")
    with pytest.raises(ValueError, match="no objective is called 'xyz'; known: cispo, dapo"):
        get_objective("xyz")
    with pytest.raises(ValueError, match="grpo has no parameter 'clip_hgih'; did you mean clip_high"):
        get_objective("grpo").settings({"clip_hgih": 2.0})
    with pytest.raises(ValueError, match="p3o has no parameter 'cap'; "):
        get_objective("p3o").settings({"cap": 2.0})


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("grpo", {"clip_low": "0.8"}, "grpo.clip_low is '0.8'; expected a finite number"),
        ("grpo", {"clip_low": True}, "grpo.clip_low is True; expected a finite number"),
        ("cispo", {"cap": math.inf}, "cispo.cap is inf; expected a finite number"),
        ("mu_grpo", {"scope": "sufix"}, "mu_grpo.scope is 'sufix'; did you mean suffix"),
        ("m2po", {"variant": 1}, "m2po.variant is 1; .*one of paper, released"),
    ],
)
def test_wrong_types_are_named(name: str, params: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_objective(name).settings(params)


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("grpo", {"clip_low": 1.1}, "grpo.clip_low is 1.1; expected a bound on the ratio from 0 to 1"),
        ("grpo", {"clip_low": -0.1}, "grpo.clip_low is -0.1; expected a bound on the ratio from 0 to 1"),
        ("grpo", {"clip_high": 0.9}, "grpo.clip_high is 0.9; expected a bound on the ratio of at least 1"),
        ("tis", {"cap": 0.0}, "tis.cap is 0.0; expected a positive bound"),
        ("mu_grpo", {"kappa": 0.0}, "kappa is 0.0; expected a ratio between 0 and 1"),
        ("mu_grpo", {"kappa": 1.0}, "kappa is 1.0; expected a ratio between 0 and 1"),
        ("m2po", {"threshold": 0.0}, "m2po.threshold is 0.0; expected a positive second moment"),
    ],
)
def test_values_out_of_range_are_named(name: str, params: dict[str, float], message: str) -> None:
    from batches import random_batch
    from stalewise.objectives import evaluate

    with pytest.raises(ValueError, match=message):
        evaluate(name, **random_batch(), params=params)


def test_integers_are_numbers() -> None:
    assert get_objective("cispo").settings({"cap": 3}) == {"cap": 3.0}


def test_constant_denominator() -> None:
    assert constant_denominator(3, 7) == 21.0
    assert constant_denominator(1, 1) == 1.0
    for sequences, max_tokens in ((0, 7), (3, 0)):
        with pytest.raises(ValueError, match=f"are {sequences} and {max_tokens}; expected at least 1"):
            constant_denominator(sequences, max_tokens)


@pytest.fixture
def _no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_CUSTOM", {})


@pytest.mark.usefixtures("_no_others")
def test_a_program_registers_its_own() -> None:
    @register_objective(reduction="sequence", advantage="mean")
    def mine(tokens: Tokens, batch: None, *, scale: float = 2.0) -> Tensor:
        return -scale * tokens.advantage_BT * tokens.logp_BT

    row = get_objective("mine@0123456789ab")
    assert (row.name, row.reduction, row.advantage, dict(row.settings())) == (
        "mine",
        "sequence",
        "mean",
        {"scale": 2.0},
    )
    assert "mine" not in OBJECTIVES
    batch: dict[str, Any] = {
        "behaviour_logp": torch.zeros(1, 2),
        "advantage": torch.ones(1),
        "mask": torch.tensor([[True, False]]),
    }
    logp = torch.full((1, 2), -0.5, requires_grad=True)
    result = evaluate("mine", logp=logp, params={"scale": 3.0}, **batch)
    assert result.loss.item() == pytest.approx(1.5)  # 3 · 0.5; the second token is masked
    result.loss.backward()
    assert logp.grad is not None
    assert logp.grad.tolist() == [[-3.0, 0.0]]


@pytest.mark.usefixtures("_no_others")
def test_whole_numbers_stay_whole() -> None:
    @register_objective
    def truncated(tokens: Tokens, batch: None, *, steps: int = 3, kind: Literal["a", "b"] = "a") -> Tensor:
        return -tokens.advantage_BT * tokens.logp_BT * len(range(steps))

    settings = get_objective("truncated").settings({"steps": 2.0, "kind": "b"})
    assert settings == {"steps": 2, "kind": "b"} and isinstance(settings["steps"], int)
    with pytest.raises(ValueError, match=r"truncated\.steps is 1\.5; expected a whole number"):
        get_objective("truncated").settings({"steps": 1.5})


@pytest.mark.usefixtures("_no_others")
def test_what_cannot_be_an_objective_is_refused() -> None:
    def loss(tokens: Tokens, batch: None) -> Tensor:
        return tokens.logp_BT

    def without_default(tokens: Tokens, batch: None, *, scale: float) -> Tensor:
        return tokens.logp_BT

    def without_type(tokens, batch, *, scale=1.0):  # type: ignore[no-untyped-def]
        return tokens.logp_BT

    def with_flag(tokens: Tokens, batch: None, *, centred: bool = True) -> Tensor:
        return tokens.logp_BT

    for function, options, message in (
        (with_flag, {}, "its parameter 'centred' must be an int, a float or a Literal"),
        (loss, {"name": "grpo"}, "it is built in"),
        (loss, {"name": "a-b"}, "cannot name an objective"),
        (loss, {"reductoin": "token"}, "no field 'reductoin'; did you mean reduction"),
        (without_default, {}, "its parameter 'scale' needs a default"),
        (without_type, {}, "annotate its parameter 'scale', as in beta: float"),
    ):
        with pytest.raises(ValueError, match=message):
            register_objective(function, **options)
    with pytest.raises(ValueError, match="no objective is called 'gone' in this program: register it"):
        get_objective("gone@0123456789ab")


@pytest.mark.usefixtures("_no_others")
@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda tokens: tokens.logp_BT.sum(), r"a loss of shape \[\]: expected \[1, 2\], one per token"),
        (lambda tokens: 3, "returned int: expected a tensor or a TokenLoss"),
        (lambda tokens: tokens.logp_BT.detach(), "a loss without a gradient"),
    ],
)
def test_a_loss_of_another_form_is_refused(returned: Any, message: str) -> None:
    register_objective(lambda tokens, batch: returned(tokens), name="mine")
    inputs: dict[str, Any] = {"behaviour_logp": torch.zeros(1, 2), "advantage": torch.ones(1), "mask": torch.ones(1, 2)}
    with pytest.raises(ValueError, match=message):
        evaluate("mine", logp=torch.zeros(1, 2, requires_grad=True), **inputs)
