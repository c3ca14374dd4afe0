"""The objectives in verl's registry of policy losses, as `stalewise_grpo`, `stalewise_p3o` and so on.

Importing this module registers those that verl can run, with default parameters, if verl is installed. verl imports it
as a plugin (`verl.plugins`) in each of its processes. The ratio is to `old_log_prob`, and advantages are verl's. A loss
sees one micro-batch: objectives with batch statistics need the whole update as one micro-batch per rank.

Axes: B responses, T response tokens.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

from torch import Tensor

from stalewise.distributed import merge_over_ranks
from stalewise.errors import ConfigError
from stalewise.objectives import OBJECTIVES, Objective, Tokens, get_objective, make_tokens
from stalewise.objectives.batch_statistics import Mergeable
from stalewise.objectives.diagnostics import token_sums
from stalewise.objectives.registry import Settings
from stalewise.objectives.tokens import natural_denominator, reduced

PREFIX = "stalewise"
PolicyLoss = Callable[..., tuple[Tensor, dict[str, float]]]

# verl passes no proximal policy to a loss.
NAMES = tuple(name for name, objective in OBJECTIVES.items() if not objective.needs_proximal)


def aggregation(objective: Objective) -> str:
    """verl's `loss_agg_mode` for the reduction of the objective."""
    if objective.constant_denominator:
        return "seq-mean-token-sum-norm"
    return "seq-mean-token-mean" if objective.reduction == "sequence" else "token-mean"


def policy_loss(name: str, **params: Any) -> PolicyLoss:
    """The objective as a policy loss of verl, which returns the loss and metrics by name."""
    objective = get_objective(name)
    if objective.needs_proximal:
        raise ConfigError(f"objective {name} needs a proximal policy, which verl does not provide: choose another")
    settings = objective.settings(params)
    mode = aggregation(objective)

    def compute(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = mode,
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        if loss_agg_mode != mode:
            raise ConfigError(
                f"actor.loss_agg_mode is {loss_agg_mode}, but objective {name} needs {mode}: set it to that"
            )
        batch: Mapping[str, Any] = {} if config is None else config.global_batch_info
        tokens = make_tokens(
            logp=log_prob,
            behaviour_logp=old_log_prob,
            advantage=_one_per_response(advantages, response_mask.bool()),
            mask=response_mask,
            check_values=False,
        )
        token_loss = objective.second_pass(tokens, _statistics(objective, tokens, settings, batch), settings)
        loss_BT = token_loss.loss_BT if rollout_is_weights is None else token_loss.loss_BT * rollout_is_weights
        loss = reduced(loss_BT, tokens, objective.reduction, _denominator(objective, tokens, batch))
        sums = token_sums(tokens, clipped_BT=token_loss.clipped_BT, vetoed_BT=token_loss.vetoed_BT)
        return loss, {f"{PREFIX}/{key}": value for key, value in sums.summary().items()}

    compute.__name__ = compute.__qualname__ = f"{PREFIX}_{name}"
    return compute


def register(name: str, *, under: str = "", **params: Any) -> PolicyLoss:
    """Register the objective in verl as `under`, by default `stalewise_` and its name."""
    algorithms = importlib.import_module("verl.trainer.ppo.core_algos")
    return algorithms.register_policy_loss(under or f"{PREFIX}_{name}")(policy_loss(name, **params))


def _one_per_response(advantages: Tensor, mask_BT: Tensor) -> Tensor:
    """The advantage of each response, [B]; verl has one per token."""
    first_B1 = mask_BT.int().argmax(dim=1, keepdim=True)
    advantage_B1 = advantages.gather(1, first_B1)
    if bool((mask_BT & (advantages != advantage_B1)).any()):
        advice = "choose an algorithm.adv_estimator of outcomes, such as grpo or rloo"
        raise ConfigError(f"advantages differ within a response, but the objective takes one per response: {advice}")
    return advantage_B1.squeeze(1)


def _statistics(objective: Objective, tokens: Tokens, settings: Settings, batch: Mapping[str, Any]) -> Mergeable | None:
    """The first pass, merged over ranks. Ranks with the same responses (tensor parallel) do not change its ratios."""
    if objective.measure is None:
        return None
    whole, here = batch.get("global_batch_size"), len(tokens.mask_BT) * (batch.get("dp_size") or 1)
    if whole is not None and here != whole:
        what = f"objective {objective.name} needs all {whole} responses of an update, but this micro-batch has {here}"
        advice = "raise actor.ppo_micro_batch_size_per_gpu (or ppo_max_token_len_per_gpu)"
        raise ConfigError(f"{what} over all ranks: {advice} until an update is one micro-batch")
    return merge_over_ranks(objective.measure(tokens, settings))


def _denominator(objective: Objective, tokens: Tokens, batch: Mapping[str, Any]) -> float | Tensor:
    """The denominator of verl's own aggregation: counts of the whole update, divided by the ranks."""
    by_response = objective.reduction == "sequence" or objective.constant_denominator
    count = batch.get("global_batch_size" if by_response else "batch_num_tokens")
    if count is None:
        count = natural_denominator(tokens, "sequence" if by_response else "token").clamp(min=1)
    if objective.constant_denominator:
        count = count * (batch.get("loss_scale_factor") or tokens.mask_BT.shape[1])
    return count / (batch.get("dp_size") or 1)


if find_spec("verl") is not None:
    for _name in NAMES:
        register(_name)
