"""Selection of the rollouts of each optimizer update: whole groups, in the order of generation.

Nothing is shuffled, since a task already gives its prompts in random order; so the rollouts of an update are adjacent
on disk, and reading them costs the same in a stage of any length.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from stalewise.store.reader import Batch


def deal(group_column: npt.ArrayLike, per_update: int) -> list[npt.NDArray[np.int64]]:
    """Positions of the rows of each update: `per_update` whole groups by group id, the last update gets the rest.

    Rows of one group need not be adjacent in `group_column`.

    >>> [rows.tolist() for rows in deal([7, 7, 5, 5, 9, 7], per_update=2)]
    [[2, 3, 0, 1, 5], [4]]
    """
    if per_update < 1:
        raise ValueError(f"per_update is {per_update}: an optimizer batch has at least one group")
    groups = np.asarray(group_column, dtype=np.int64)
    order = np.argsort(groups, kind="stable")
    firsts = np.flatnonzero(np.diff(groups[order], prepend=groups[order][:1] - 1))  # of each group
    return np.split(order, firsts[per_update::per_update]) if len(order) else []


def rollouts_of_updates(batch: Batch, per_update: int) -> list[npt.NDArray[np.int64]]:
    """Rollout ids of each update on a generation batch; cached, since training reads a stage in pieces."""
    if per_update not in batch.rollouts_by_update:
        rollout_ids = batch.column("rollout_id")
        batch.rollouts_by_update[per_update] = [rollout_ids[rows] for rows in deal(batch.column("group"), per_update)]
    return batch.rollouts_by_update[per_update]


def rewards_of_updates(batch: Batch, per_update: int) -> list[tuple[float, float]]:
    """Mean reward of each update on a generation batch, and its standard error."""
    reward, group = batch.column("reward"), batch.column("group")
    return [mean_reward(reward[rows], group[rows]) for rows in deal(group, per_update)]


def mean_reward(reward: npt.NDArray[np.floating], group: npt.NDArray[np.integer]) -> tuple[float, float]:
    """Mean of the known rewards, and its standard error over groups, since rollouts of one prompt are correlated.

    NaN if no reward is known; the error also if there is only one group.

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
