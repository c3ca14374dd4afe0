"""Which groups make up which optimizer batch of a generation batch. Pure: the order is a function of seed and group id.

The order is by a hash (SplitMix64) and not by a library's shuffle: it is the same under every numpy version, whatever
order the groups come in; and a group that drops out (its verifier failed) moves no other group past another.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_MASK = 2**64 - 1
_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def batches(groups: npt.ArrayLike, per_update: int, seed: int) -> list[npt.NDArray[np.int64]]:
    """Deal the groups out to optimizer batches of `per_update` groups: each group once, no group in two batches.

    Args:
        groups: group ids; repeats count once, so the `group` column of a generation batch will do.
        per_update: groups per optimizer batch; the last batch gets what is left.
        seed: another seed, another order.

    >>> [batch.tolist() for batch in batches([0, 0, 1, 1, 2, 2, 3, 3, 4, 4], per_update=2, seed=0)]
    [[2, 4], [1, 0], [3]]
    """
    if per_update < 1:
        raise ValueError(f"per_update is {per_update}: an optimizer batch has at least one group")
    unique = np.unique(np.asarray(groups, dtype=np.int64))
    order = unique[np.argsort(hash_keys(unique, seed), kind="stable")]
    return [order[start : start + per_update] for start in range(0, len(order), per_update)]


def rows_of(group_column: npt.ArrayLike, chosen: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Positions of the rows whose group is among `chosen`: in the order of `chosen`, and by position within a group.

    >>> rows_of([5, 5, 6, 7, 7], chosen=[7, 5]).tolist()
    [3, 4, 0, 1]
    """
    column = np.asarray(group_column, dtype=np.int64)
    wanted = np.asarray(chosen, dtype=np.int64)
    by_group = np.argsort(column, kind="stable")
    firsts = np.searchsorted(column, wanted, side="left", sorter=by_group)
    lasts = np.searchsorted(column, wanted, side="right", sorter=by_group)
    pieces = [by_group[first:last] for first, last in zip(firsts, lasts, strict=True)]
    return np.concatenate([np.empty(0, np.int64), *pieces])


def hash_keys(groups: npt.NDArray[np.int64], seed: int) -> npt.NDArray[np.uint64]:
    """SplitMix64: the key of group g is output number g of the generator seeded with `seed`. No two groups collide."""
    state = np.full(groups.shape, seed & _MASK, dtype=np.uint64)
    z = state + (groups.astype(np.uint64) + np.uint64(1)) * _GAMMA  # wraps around, as it should
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
