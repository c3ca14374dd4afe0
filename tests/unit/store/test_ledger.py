"""The ledger and its ranges of rollout ids."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stalewise.errors import StoreError
from stalewise.store import ledger


def test_ledger_round_trip_and_truncation(tmp_path: Path) -> None:
    path = ledger.ledger_path(tmp_path)
    assert ledger.read_ledger(path) == [] and ledger.consumed([]) == ()
    entries = [
        ledger.LedgerEntry(u, u // 2, u // 2 * 2, u % 2, ledger.to_ranges([4 * u, 4 * u + 1, 100 + u]), {"ess": 0.5})
        for u in range(6)
    ]
    for entry in entries:
        ledger.append_entry(path, entry)
    assert ledger.read_ledger(path) == entries
    assert ledger.consumed(entries, generation_batch=1) == ((8, 9), (12, 13), (102, 103))
    assert ledger.consumed([*entries[:1], *entries[:2]]) == ((0, 1), (4, 5), (100, 101))
    assert ledger.truncate_ledger(path, before=4) == 2
    assert ledger.read_ledger(path) == entries[:4]
    with pytest.raises(StoreError, match="extra may not hold age"):
        ledger.append_entry(path, dataclasses.replace(entries[4], extra={"age": 3}))
    ledger.append_entry(path, entries[2])
    with pytest.raises(StoreError, match="line 5: update 2 follows update 3"):
        ledger.read_ledger(path)
    path.write_text('{"update": 1}\n')
    with pytest.raises(StoreError, match="line 1 is damaged: generation_batch, version, age, rollout_ids missing"):
        ledger.read_ledger(path)


@given(st.sets(st.integers(-(10**6), 10**6)) | st.sets(st.integers(0, 30)))
def test_ranges_hold_exactly_the_ids(ids: set[int]) -> None:
    ranges = ledger.to_ranges(list(ids))
    assert ledger.from_ranges(ranges).tolist() == sorted(ids)
    assert all(b[0] - a[1] > 1 for a, b in itertools.pairwise(ranges))


def test_consumed_merges_what_overlaps_and_what_is_adjacent() -> None:
    entries = [
        ledger.LedgerEntry(0, 0, 0, 0, ((0, 3), (8, 9))),
        ledger.LedgerEntry(1, 0, 0, 1, ((4, 5), (9, 9))),
        ledger.LedgerEntry(2, 1, 2, 0, ((20, 21),)),
    ]
    assert ledger.consumed(entries) == ((0, 5), (8, 9), (20, 21))
    assert ledger.consumed(entries, generation_batch=1) == ((20, 21),)
