"""Rollouts by column agree with the other ways of reading."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stalewise import store
from stalewise.errors import StoreError
from stalewise.store.columns import column_problem, concatenate
from stored_rollouts import make_rollouts, same

SHARD = store.ShardManifest(0, "shard-00000.parquet", 1, "abc", 2, 3, 2, 0, 1, 0, 0, 0.0, 2, 0, 0, 0.0, ())


def test_every_way_of_reading_agrees(batch: store.Batch) -> None:
    expected = make_rollouts(1000, 1800)
    assert len(batch) == 1800
    assert all(same(a, b) for a, b in zip(expected, batch.iter_rollouts(), strict=True))
    rows = concatenate(list(batch.iter_rows()))
    assert rows.rollout_id.tolist() == [r.rollout_id for r in expected]
    for i in (0, 255, 256, 599, 600, 1799):
        assert rows.response(i).tolist() == list(expected[i].response_ids)
        assert rows.logp(i).tolist() == list(expected[i].behaviour_logp)
        assert rows.prompt(i).tolist() == list(expected[i].prompt_ids)
    assert rows.truncated.tolist() == [r.truncated for r in expected]
    assert np.array_equal(rows.reward, [r.reward for r in expected], equal_nan=True)
    assert np.array_equal(batch.column("reward"), rows.reward, equal_nan=True)
    assert batch.column("response_length").tolist() == rows.response_lengths.tolist()
    assert batch.column("prompt_length").tolist() == rows.prompt_lengths.tolist()
    assert batch.column("finish_reason").tolist() == [str(r.finish_reason) for r in expected]
    for record, rollout in zip(batch.iter_records(["rollout_id", "reward"]), expected, strict=True):
        reward = None if math.isnan(rollout.reward) else rollout.reward
        assert record == {"rollout_id": rollout.rollout_id, "reward": reward}
    for part in (rows, next(batch.iter_rows()), batch.take([1000])):  # torch.from_numpy wants writable arrays
        arrays = [getattr(part, f.name) for f in dataclasses.fields(part)]
        assert all(array.flags.writeable for array in arrays if array is not None)


def test_a_column_of_episodes_has_the_tokens_from_outside(tmp_path: Path) -> None:
    shard = dataclasses.replace(SHARD, tokens=3, extra={"outside_tokens": 2})
    column, values = store.TokenColumn(tmp_path, "key"), np.arange(5, dtype=np.float32)
    with pytest.raises(StoreError, match="would hold 3 finite numbers for the 5 tokens"):
        column.write(shard, values[:3])
    column.write(shard, values)
    assert column.read(shard, 1, 4).tolist() == [1, 2, 3, 4]


def test_a_column_of_other_numbers_is_refused(tmp_path: Path) -> None:
    column = store.TokenColumn(tmp_path, "key")
    column.write(SHARD, np.zeros(SHARD.tokens, dtype=np.float32))
    path, metadata = column.path(SHARD), pq.read_schema(column.path(SHARD)).metadata
    assert column_problem(path, tmp_path / "elsewhere") == ""
    for values, message in (
        (pa.array([1] * SHARD.tokens, pa.int32()), "other columns than one of 32-bit numbers"),
        (pa.array([1.0] * (SHARD.tokens + 1), pa.float32()), "it has 4 numbers for 3 tokens"),
    ):
        pq.write_table(pa.table({"value": values}).replace_schema_metadata(metadata), path)
        with pytest.raises(StoreError, match=message):
            store.TokenColumn(tmp_path, "key").read(SHARD, 0, 1)
    path.write_bytes(path.read_bytes()[:-20])
    assert column_problem(path, tmp_path / "elsewhere") != ""


def test_no_bit_of_a_column_changes_a_number_unnoticed(tmp_path: Path) -> None:
    values = np.array([-0.5, -1.25, -3.0], dtype=np.float32)
    store.TokenColumn(tmp_path, "key").write(SHARD, values)
    path = store.TokenColumn(tmp_path, "key").path(SHARD)
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << place % 8)]) + whole[place + 1 :])
        column = store.TokenColumn(tmp_path, "key")
        if column.has(SHARD):  # else it is computed again
            try:
                assert column.read(SHARD, 0, 3).tolist() == values.tolist(), place
            except StoreError:
                continue
