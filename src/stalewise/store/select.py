"""Which rollouts make up which optimizer batch of a generation batch: whole groups, in the order they were generated.

There is no shuffle here, since a task already gives its prompts in random order; and in that order the rollouts of one
update lie together, so that reading them costs the same in a stage of any length.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from stalewise.store.reader import Batch


def deal(group_column: npt.ArrayLike, per_update: int) -> list[npt.NDArray[np.int64]]:
    """Deal rollouts out to updates of `per_update` groups: each group whole and once, in the order of group ids.

    Args:
        group_column: group of each row; rows of one group need not lie together.
        per_update: groups per update; the last update gets what is left.

    Returns:
        Positions of the rows of each update, group by group.

    >>> [rows.tolist() for rows in deal([7, 7, 5, 5, 9, 7], per_update=2)]
    [[2, 3, 0, 1, 5], [4]]
    """
    if per_update < 1:
        raise ValueError(f"per_update is {per_update}: an optimizer batch has at least one group")
    groups = np.asarray(group_column, dtype=np.int64)
    order = np.argsort(groups, kind="stable")
    firsts = np.flatnonzero(np.diff(groups[order], prepend=groups[order][:1] - 1))  # where each group begins
    return np.split(order, firsts[per_update::per_update]) if len(order) else []


def rollouts_of_updates(batch: Batch, per_update: int) -> list[npt.NDArray[np.int64]]:
    """Rollout ids of each update on a generation batch."""
    rollout_ids = batch.column("rollout_id")
    return [rollout_ids[rows] for rows in deal(batch.column("group"), per_update)]


def rewards_of_updates(batch: Batch, per_update: int) -> list[float]:
    """Mean reward of each update on a generation batch, over the rollouts that have one; NaN where none has."""
    dealt = (batch.column("reward")[rows] for rows in deal(batch.column("group"), per_update))
    scored = [reward[~np.isnan(reward)] for reward in dealt]
    return [float(reward.mean()) if len(reward) else float("nan") for reward in scored]
