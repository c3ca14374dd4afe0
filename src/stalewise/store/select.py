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
    """Rollout ids of each update on a generation batch; looked up once, since a stage is learned from in pieces."""
    if per_update not in batch.dealt:
        rollout_ids = batch.column("rollout_id")
        batch.dealt[per_update] = [rollout_ids[rows] for rows in deal(batch.column("group"), per_update)]
    return batch.dealt[per_update]


def rewards_of_updates(batch: Batch, per_update: int) -> list[tuple[float, float]]:
    """Mean reward of each update on a generation batch, and its standard error."""
    reward, group = batch.column("reward"), batch.column("group")
    return [mean_reward(reward[rows], group[rows]) for rows in deal(group, per_update)]


def mean_reward(reward: npt.NDArray[np.floating], group: npt.NDArray[np.integer]) -> tuple[float, float]:
    """Mean over the rollouts that have a reward, and its standard error over groups: those of one prompt are alike.

    NaN where no rollout has a reward; the error also where there is one group only.

    >>> mean_reward(np.array([1.0, 1.0, 0.0, 0.0]), np.array([0, 0, 1, 1]))
    (0.5, 0.5)
    """
    known = ~np.isnan(reward)
    if not known.any():
        return float("nan"), float("nan")
    _, group = np.unique(group[known], return_inverse=True)
    means = np.bincount(group, weights=reward[known]) / np.bincount(group)
    error = means.std(ddof=1) / np.sqrt(len(means)) if len(means) > 1 else np.nan
    return float(reward[known].mean(dtype=np.float64)), float(error)
