"""Which rollouts belong to which update."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stalewise.store import reader

group_ids = st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 50), max_size=60)


@given(group_ids, st.integers(1, 9))
def test_every_group_is_dealt_whole_and_once_in_order(groups: list[int], per_update: int) -> None:
    dealt = [rows.tolist() for rows in reader.split_into_updates(groups, per_update)]
    order = [list(dict.fromkeys(groups[row] for row in rows)) for rows in dealt]
    assert [group for update in order for group in update] == sorted(set(groups))
    assert all(len(update) == per_update for update in order[:-1])
    assert sorted(row for rows in dealt for row in rows) == list(range(len(groups)))
    for rows in dealt:
        assert rows == sorted(rows, key=lambda row: (groups[row], row))


def test_an_update_without_groups_is_refused() -> None:
    with pytest.raises(ValueError, match="per_update is 0"):
        reader.split_into_updates([1], 0)
