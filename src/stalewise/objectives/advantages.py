"""Advantages from rewards, by group. Axes: N rollouts in any order, each with its group's number; P groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor

from stalewise.objectives.tokens import host_list

AdvantageKind = Literal["group", "mean", "leave_one_out", "batch"]
TruncatedRule = Literal["keep", "zero", "mask"]

STD_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class Advantages:
    """Advantages of rollouts.

    `degenerate_N` marks rollouts of groups without variance, whose advantage is exactly 0. `keep_N` is False for
    rollouts whose tokens leave the loss mask (truncated ones under the rule `mask`).
    """

    advantage_N: Tensor
    degenerate_N: Tensor
    keep_N: Tensor
    groups: int
    degenerate_groups: int


def group_advantages(
    reward: Tensor,
    group: Tensor,
    *,
    kind: AdvantageKind = "group",
    truncated: Tensor | None = None,
    truncated_rule: TruncatedRule = "keep",
) -> Advantages:
    """Advantage of each rollout against its group.

    `group`: (R − mean) / (std + 1e-6) with the population std; `mean`: R − mean (Dr. GRPO); `leave_one_out`: R − mean
    of the others (RLOO); `batch`: (R − mean) / (std of all rewards of the batch + 1e-6). A group with equal rewards, or
    of one rollout, has advantage exactly 0.

    Truncated responses count in the group's mean under every rule. `keep` trains on them as on others, `zero` sets
    their advantage to 0 (their tokens stay in the denominator), `mask` removes their tokens from the loss.

    >>> group_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([0, 0, 0, 0])).advantage_N
    tensor([ 1.0000, -1.0000, -1.0000,  1.0000])
    >>> group_advantages(torch.tensor([1.0, 0.0, 0.0]), torch.tensor([7, 7, 7]), kind="leave_one_out").advantage_N
    tensor([ 1.0000, -0.5000, -0.5000])

    Args:
        reward: [N] finite rewards.
        group: [N] integers; rollouts with equal numbers answer the same prompt.
        kind: baseline and scale.
        truncated: [N] bool; required by the rules `zero` and `mask`.
        truncated_rule: treatment of truncated responses.
    """
    _check(reward, group, kind, truncated, truncated_rule)
    reward_N = reward.to(torch.promote_types(reward.dtype, torch.float32))
    group_N: Tensor = cast(Any, torch).unique(group, return_inverse=True)[1]  # numbered 0, 1, 2 … without gaps
    groups = int(group_N.max()) + 1

    size_P = torch.bincount(group_N, minlength=groups).to(reward_N.dtype)
    mean_P = reward_N.new_zeros(groups).index_add(0, group_N, reward_N) / size_P
    centred_N = reward_N - mean_P[group_N]
    spread_P = _group_spread(reward_N, group_N, groups)
    # Tested by the spread, not the std: the mean of eight rewards of 0.1 is rounded, which would leave tiny differences
    # that the division scales up.
    degenerate_P = spread_P == 0

    if kind == "group":
        variance_P = reward_N.new_zeros(groups).index_add(0, group_N, centred_N.square()) / size_P
        advantage_N = centred_N / (variance_P.sqrt() + STD_EPSILON)[group_N]
    elif kind == "batch":
        advantage_N = centred_N / (reward_N.std(correction=0) + STD_EPSILON)
    elif kind == "leave_one_out":
        advantage_N = centred_N * (size_P / (size_P - 1).clamp(min=1))[group_N]
    else:
        advantage_N = centred_N
    advantage_N = advantage_N.masked_fill(degenerate_P[group_N], 0.0)

    keep_N = torch.ones_like(reward_N, dtype=torch.bool)
    if truncated is not None and truncated_rule == "zero":
        advantage_N = advantage_N.masked_fill(truncated, 0.0)
    if truncated is not None and truncated_rule == "mask":
        keep_N = ~truncated
    return Advantages(advantage_N, degenerate_P[group_N], keep_N, groups, int(degenerate_P.sum()))


def _group_spread(reward_N: Tensor, group_N: Tensor, groups: int) -> Tensor:
    """Largest minus smallest reward of each group."""
    zeros_P = reward_N.new_zeros(groups)
    largest_P = zeros_P.scatter_reduce(0, group_N, reward_N, "amax", include_self=False)
    smallest_P = zeros_P.scatter_reduce(0, group_N, reward_N, "amin", include_self=False)
    return largest_P - smallest_P


def _check(
    reward: Tensor, group: Tensor, kind: AdvantageKind, truncated: Tensor | None, truncated_rule: TruncatedRule
) -> None:
    for name, value, kinds in (("kind", kind, AdvantageKind), ("truncated_rule", truncated_rule, TruncatedRule)):
        if value not in get_args(kinds):
            raise ValueError(f"{name} is {value!r}; expected one of {', '.join(get_args(kinds))}")
    if reward.ndim != 1 or len(reward) == 0:
        raise ValueError(f"reward has shape {list(reward.shape)}; expected [N], one per rollout, N at least 1")
    if group.shape != reward.shape:
        raise ValueError(f"group has shape {list(group.shape)}; expected {list(reward.shape)}, the shape of reward")
    if group.is_floating_point():
        raise ValueError(f"group has dtype {group.dtype}; expected integers")
    finite = torch.isfinite(reward)
    if not bool(finite.all()):
        first = host_list((~finite).nonzero().flatten()[:5])
        raise ValueError(
            f"reward has shape {list(reward.shape)} and {int((~finite).sum())} non-finite values, first at {first}; "
            "leave out rollouts whose verifier failed"
        )
    if truncated is None:
        if truncated_rule != "keep":
            raise ValueError(f"truncated is None; truncated_rule {truncated_rule!r} expects a bool tensor of shape [N]")
        return
    if truncated.dtype is not torch.bool:
        raise ValueError(f"truncated has dtype {truncated.dtype}; expected bool")
    if truncated.shape != reward.shape:
        raise ValueError(f"truncated has shape {list(truncated.shape)}; expected {list(reward.shape)}, as reward")
