"""The table of objectives by name, with typed parameters."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from stalewise.errors import nearest
from stalewise.objectives import surrogates
from stalewise.objectives.advantages import AdvantageKind
from stalewise.objectives.batch_statistics import (
    AnchorSums,
    Mergeable,
    SecondMomentSums,
    WeightSums,
    anchor_weights,
    behaviour_weights,
    harmful,
)
from stalewise.objectives.surrogates import TokenLoss
from stalewise.objectives.tokens import Reduction, Tokens

Settings = Mapping[str, Any]  # every parameter of one objective, with defaults filled in and types checked


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """One row of the table.

    `measure` is phase one (None: the objective needs no statistics of the whole batch). `reduction` and the fields
    after it are prescriptions of the method outside of its loss, which the trainer follows.
    """

    name: str
    token_loss: Callable[..., TokenLoss]
    measure: Callable[[Tokens, Settings], Mergeable] | None = None
    statistics: type[Mergeable] | None = None  # type of the result of `measure`, to unpack it after a gather
    needs_proximal: bool = False
    reduction: Reduction = "token"
    advantage: AdvantageKind = "group"
    drops_degenerate_groups: bool = False
    constant_denominator: bool = False
    ignores_zero_advantages: bool = True  # tokens with advantage 0 have no part in the loss or its statistics
    is_custom: bool = False  # registered by a program

    def parameters(self) -> dict[str, tuple[Any, Any]]:
        """Type and default of each parameter, from the function's signature."""
        return dict(_parameters(self.token_loss))

    def settings(self, params: Mapping[str, Any] | None = None) -> Settings:
        """Defaults overridden by `params`; an unknown name or a wrong type is a ValueError."""
        known = self.parameters()
        settings: dict[str, Any] = {name: default for name, (_, default) in known.items()}
        for name, value in (params or {}).items():
            if name not in known:
                hint = nearest(name, known) if known else "it has none"
                raise ValueError(f"objective {self.name} has no parameter {name!r}; {hint}")
            settings[name] = _checked(f"{self.name}.{name}", value, known[name][0])
        for name, value in settings.items():
            if name in _RANGES and not _RANGES[name][0](value):
                raise ValueError(f"{self.name}.{name} is {value}; expected {_RANGES[name][1]}")
        return settings

    def first_pass(self, tokens: Tokens, settings: Settings) -> Mergeable | None:
        """Phase one on one micro-batch; merge the results over all of them before phase two."""
        self._check_proximal(tokens)
        return None if self.measure is None else self.measure(tokens, settings)

    def second_pass(self, tokens: Tokens, batch: Mergeable | None, settings: Settings) -> TokenLoss:
        """Phase two on one micro-batch, given the merged results of phase one."""
        self._check_proximal(tokens)
        result = self.token_loss(tokens, batch, **settings)
        return _checked_loss(result, tokens, self.name) if self.is_custom else result

    def _check_proximal(self, tokens: Tokens) -> None:
        if self.needs_proximal and tokens.proximal_logp_BT is None:
            shape = list(tokens.logp_BT.shape)
            raise ValueError(f"proximal_logp is None; objective {self.name} expects a tensor of shape {shape}")


@cache
def _parameters(token_loss: Callable[..., TokenLoss]) -> dict[str, tuple[Any, Any]]:
    hints = get_type_hints(token_loss)
    signature = inspect.signature(token_loss)
    keywords = [p for p in signature.parameters.values() if p.kind is inspect.Parameter.KEYWORD_ONLY]
    return {p.name: (hints[p.name], p.default) for p in keywords}


# Ranges of parameters by name; a name means the same in every objective.
_RANGES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "clip_low": (lambda low: 0 <= low <= 1, "a bound on the ratio from 0 to 1"),
    "clip_high": (lambda high: high >= 1, "a bound on the ratio of at least 1"),
    "cap": (lambda cap: cap > 0, "a positive bound on the ratio"),
    "kappa": (lambda kappa: 0 < kappa < 1, "a ratio between 0 and 1"),
    "k3_clamp": (lambda bound: bound >= 0, "0 for none, or a positive bound on the exponent"),
    "threshold": (lambda threshold: threshold > 0, "a positive second moment"),
}


def _checked(where: str, value: Any, expected: Any) -> Any:
    if get_origin(expected) is Literal:
        choices = get_args(expected)
        if value not in choices:
            raise ValueError(f"{where} is {value!r}; {nearest(str(value), choices)} (one of {', '.join(choices)})")
        return value
    # bool is an int in Python; a clip range of True is a mistake.
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{where} is {value!r}; expected a finite number")
    if expected is int:
        if value != int(value):
            raise ValueError(f"{where} is {value!r}; expected a whole number")
        return int(value)
    return float(value)


def _second_moments(tokens: Tokens, settings: Settings) -> SecondMomentSums:
    return SecondMomentSums.of(tokens.log_ratio_BT.square(), harmful(tokens), settings["threshold"])


_ROWS = (
    Objective(name="grpo", token_loss=surrogates.grpo),
    Objective(name="dapo", token_loss=surrogates.dapo, drops_degenerate_groups=True),
    Objective(name="dr_grpo", token_loss=surrogates.dr_grpo, advantage="mean", constant_denominator=True),
    Objective(name="gspo", token_loss=surrogates.gspo, reduction="sequence"),
    Objective(name="cispo", token_loss=surrogates.cispo),
    Objective(name="tis", token_loss=surrogates.tis),
    Objective(name="decoupled_ppo", token_loss=surrogates.decoupled_ppo, needs_proximal=True),
    Objective(name="topr", token_loss=surrogates.topr),
    Objective(name="m2po", token_loss=surrogates.m2po, measure=_second_moments, statistics=SecondMomentSums),
    Objective(name="mu_grpo", token_loss=surrogates.mu_grpo),
    Objective(
        name="p3o",
        token_loss=surrogates.p3o,
        measure=lambda tokens, _: behaviour_weights(tokens),
        statistics=WeightSums,
        ignores_zero_advantages=False,
    ),
    Objective(
        name="p3o_two_anchor",
        token_loss=surrogates.p3o_two_anchor,
        measure=lambda tokens, _: anchor_weights(tokens),
        statistics=AnchorSums,
        needs_proximal=True,
        ignores_zero_advantages=False,
    ),
)
OBJECTIVES: Mapping[str, Objective] = {row.name: row for row in _ROWS}


_CUSTOM: dict[str, Objective] = {}


def get_objective(name: str) -> Objective:
    """The objective with this name; an unknown name is a ValueError that lists similar ones.

    A name may carry the fingerprint of a program's function, as in `mine@0123456789ab`, which is not compared here.
    """
    plain = name.partition("@")[0]
    known = {**_CUSTOM, **OBJECTIVES}
    if plain not in known:
        where = " in this program: register it with @stalewise.objective, then start the run" if "@" in name else ""
        raise ValueError(f"no objective is called {plain!r}{where}; {nearest(plain, known)}")
    return known[plain]


def register_objective(function: Callable[..., Any] | None = None, *, name: str = "", **prescribed: Any) -> Any:
    """Register a function `(tokens, batch, *, parameters)` as an objective; a decorator, with or without arguments.

        @stalewise.objective
        def reinforce(tokens, batch, *, scale: float = 1.0):
            return -scale * tokens.advantage_BT * tokens.logp_BT

    It returns the loss of each token [B, T], unreduced, or a `TokenLoss` that also says which tokens were clipped. The
    parameters are keyword-only numbers with defaults. `prescribed` are fields of `Objective`, such as
    `reduction="sequence"` or `advantage="mean"`. The name is that of the function. Registering it again replaces it; a
    built-in objective cannot be replaced.
    """
    if function is None:
        return partial(register_objective, name=name, **prescribed)
    own = name or function.__name__
    if not own.isidentifier() or own in OBJECTIVES:
        raise ValueError(f"{own!r} cannot name an objective: {'it is built in' if own in OBJECTIVES else 'no name'}")
    if unknown := sorted(prescribed.keys() - set(Objective.__dataclass_fields__)):
        raise ValueError(
            f"an objective has no field {unknown[0]!r}; {nearest(unknown[0], Objective.__dataclass_fields__)}"
        )
    made = Objective(name=own, token_loss=function, is_custom=True, **prescribed)
    try:
        made.settings()
    except KeyError as error:
        raise ValueError(f"objective {own}: annotate its parameter {error}, as in beta: float = 0.1") from None
    kinds = {key: kind for key, (kind, _) in made.parameters().items()}
    if other := [key for key, kind in kinds.items() if kind not in (int, float) and get_origin(kind) is not Literal]:
        raise ValueError(f"objective {own}: its parameter {other[0]!r} must be an int, a float or a Literal of texts")
    if without := [key for key, (_, default) in made.parameters().items() if default is inspect.Parameter.empty]:
        raise ValueError(f"objective {own}: its parameter {without[0]!r} needs a default")
    _CUSTOM[own] = made
    vars(function)["objective_name"] = own
    return function


def _checked_loss(result: Any, tokens: Tokens, name: str) -> TokenLoss:
    """Check the result of a program's objective and make a TokenLoss of it: one loss per token, with a gradient."""
    if not isinstance(result, TokenLoss):
        if not isinstance(result, Tensor):
            raise ValueError(f"objective {name} returned {type(result).__name__}: expected a tensor or a TokenLoss")
        nothing = torch.zeros_like(tokens.mask_BT, dtype=torch.bool)
        result = TokenLoss(result, nothing, nothing)
    if result.loss_BT.shape != tokens.logp_BT.shape:
        expected, found = list(tokens.logp_BT.shape), list(result.loss_BT.shape)
        raise ValueError(f"objective {name} returned a loss of shape {found}: expected {expected}, one per token")
    if tokens.logp_BT.requires_grad and not result.loss_BT.requires_grad:
        raise ValueError(f"objective {name} returned a loss without a gradient: it must depend on tokens.logp_BT")
    return TokenLoss(result.loss_BT * tokens.mask_BT, result.clipped_BT, result.vetoed_BT, result.trigger_BT)
