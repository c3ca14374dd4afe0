"""The rollouts of one update: their advantages, what is left out, and what the summed loss is divided by."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stalewise.config import RunConfig
from stalewise.errors import StoreError
from stalewise.objectives import constant_denominator, group_advantages
from stalewise.objectives.registry import Objective
from stalewise.store import RolloutColumns, mean_reward


@dataclass(frozen=True, slots=True)
class UpdateBatch:
    """The rollouts of one update, with advantages; rollouts that cannot teach anything are already gone."""

    rows: RolloutColumns
    advantage: Tensor  # [B]
    keep: Tensor  # [B] bool; False: the tokens are out of the loss


def make_update_batch(
    rows: RolloutColumns, config: RunConfig, objective: Objective
) -> tuple[UpdateBatch | None, dict[str, float]]:
    """Advantages of the rollouts of one update, None where nothing is left to learn from; and what they are like."""
    empty = np.flatnonzero((rows.response_lengths == 0) | (rows.prompt_lengths == 0))
    if len(empty):
        raise StoreError(
            f"rollout {rows.rollout_id[empty[0]]} has no prompt or no response tokens ({len(empty)} such in this "
            "update): there is nothing to learn from; make the rollouts without them"
        )
    scored = torch.from_numpy(rows.reward).isfinite()
    reward, reward_error = mean_reward(rows.reward, rows.group)
    described = {
        "rollouts": float(len(rows)),
        "reward": reward,
        "reward_error": reward_error,
        "truncated_fraction": float(rows.truncated.mean()),
        "verifier_error_fraction": 1 - float(scored.double().mean()),
        "degenerate_fraction": float("nan"),
    }
    rows = rows.take(scored.nonzero().squeeze(1).numpy())
    if len(rows) == 0:
        return None, described
    kind = config.objective.advantage
    found = group_advantages(
        torch.from_numpy(rows.reward).float(),
        torch.from_numpy(rows.group),
        kind=objective.advantage if kind == "auto" else kind,
        truncated=torch.from_numpy(rows.truncated),
        truncated_rule=config.objective.truncated,
    )
    described["degenerate_fraction"] = found.degenerate_groups / found.groups
    chosen = torch.ones(len(rows), dtype=torch.bool)
    if objective.drops_degenerate_groups:
        chosen = ~found.degenerate_N
    if not bool((found.advantage_N[chosen] * found.keep_N[chosen]).any()):
        return None, described
    batch = UpdateBatch(
        rows=rows.take(chosen.nonzero().squeeze(1).numpy()),
        advantage=found.advantage_N[chosen],
        keep=found.keep_N[chosen],
    )
    return batch, described


def loss_denominator(batch: UpdateBatch, config: RunConfig, objective: Objective) -> float:
    """What the summed loss is divided by: of the whole update, so that its split never shows."""
    if objective.constant_denominator:
        return constant_denominator(int(batch.keep.sum()), config.sampler.max_new_tokens)
    if objective.reduction == "sequence":
        return float(batch.keep.sum())
    lengths = torch.from_numpy(batch.rows.response_lengths)
    return float(lengths[batch.keep].sum())
