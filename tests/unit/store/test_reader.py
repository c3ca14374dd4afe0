"""Reading a generation batch: all ways agree, damage is named, and memory does not grow."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stalewise import store
from stalewise.errors import StoreError
from stalewise.store.atomic import read_json, sha256_file
from stalewise.store.reader import open_batch
from stalewise.store.schema import HEAVY_COLUMNS, LIGHT_COLUMNS
from stored_rollouts import SOURCE, make_batch, make_rollouts, same


@given(st.lists(st.integers(1000, 2799), max_size=40))
def test_take_returns_the_ids_asked_for_in_order(batch: store.Batch, ids: list[int]) -> None:
    rows = batch.take(ids)
    assert rows.rollout_id.tolist() == ids
    for place, i in enumerate(ids):
        (expected,) = make_rollouts(i, 1)
        assert rows.response(place).tolist() == list(expected.response_ids)
        assert rows.logp(place).tolist() == list(expected.behaviour_logp)
        assert rows.prompt(place).tolist() == list(expected.prompt_ids)


def test_take_decodes_only_the_row_groups_it_needs(batch: store.Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    original = pq.ParquetFile.read_row_group

    def count(self: pq.ParquetFile, i: int, **options: object) -> pa.Table:
        read.append(i)
        return original(self, i, **options)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", count)
    batch.take([2799, 1000, 1255])  # the third row group of the last shard, and twice the first of the first
    assert read == [0, 2]


def test_asking_for_what_is_not_there(batch: store.Batch) -> None:
    with pytest.raises(StoreError, match="no rollout 3, 999, 2800"):
        batch.take([2800, 1000, 3, 999])
    with pytest.raises(StoreError, match="no column rewards: did you mean reward"):
        list(batch.iter_records(["rewards"]))
    with pytest.raises(StoreError, match="response_ids is not a light column"):
        batch.column("response_ids")
    assert sorted(LIGHT_COLUMNS + HEAVY_COLUMNS) == sorted(store.SCHEMA.names)


def test_streaming_memory_does_not_grow(tmp_path: Path) -> None:
    def peak(shards: int, rows: int) -> tuple[int, int]:
        opened = open_batch(make_batch(tmp_path / f"{shards}", shards, rows, tokens=200))
        arrow, start = 0, pa.total_allocated_bytes()
        tracemalloc.start()
        for _ in opened.iter_rows():
            arrow = max(arrow, pa.total_allocated_bytes() - start)
        python = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return arrow, python

    peak(1, 512)  # imports and caches
    shutil.rmtree(tmp_path / "1")
    (arrow_small, python_small), (arrow_large, python_large) = peak(1, 512), peak(4, 2560)  # 20 times as many rows
    assert arrow_large < 4 * arrow_small  # two shards may be held at a time
    assert python_large < 1.5 * python_small


@pytest.mark.parametrize("place", [0.0, 0.3, 0.7, 0.999])
def test_flipped_byte_is_found_and_the_shard_can_be_made_again(tmp_path: Path, place: float) -> None:
    directory = make_batch(tmp_path)
    path = store.shard_path(directory, 1)
    data = bytearray(path.read_bytes())
    data[int(place * len(data))] ^= 1
    path.write_bytes(data)
    with pytest.raises(StoreError, match=r"shard-00001\.parquet is damaged: .* move the shard away and run the same"):
        open_batch(directory)
    path.rename(tmp_path / "moved away")
    with pytest.raises(StoreError, match=r"shard-00001\.parquet is missing"):
        open_batch(directory, verify=False)
    assert not store.is_committed(directory) and store.next_shard(directory) == 1
    store.write_shard(directory, 1, make_rollouts(1600, 600))
    assert store.is_committed(directory)  # the same bytes again: the manifest still holds
    assert len(list(open_batch(directory).iter_rollouts())) == 1800


def test_damage_that_was_not_looked_for_is_still_named(tmp_path: Path) -> None:
    directory = make_batch(tmp_path, shards=1)
    path = store.shard_path(directory, 0)
    data = bytearray(path.read_bytes())
    data[4:-8] = bytes(len(data) - 12)
    path.write_bytes(data)
    with pytest.raises(StoreError, match=r"shard-00000\.parquet is damaged"):
        list(open_batch(directory, verify=False).iter_rollouts())
    path.write_bytes(data[:-1])
    with pytest.raises(StoreError, match=r"shard-00000\.parquet is damaged"):
        open_batch(directory, verify=False)


def test_shards_from_before_weights_and_policy_were_recorded_are_of_exact_weights_and_the_runs_own(
    tmp_path: Path,
) -> None:
    directory = make_batch(tmp_path, shards=2, rows=8)
    expected = make_rollouts(1000, 16)
    path = store.shard_path(directory, 0)
    new = pq.read_table(path)
    fields = [field for field in new.schema.field("sampler").type if field.name not in ("weights", "policy")]
    column = new.column("sampler").combine_chunks()
    old = pa.StructArray.from_arrays([column.field(field.name) for field in fields], fields=fields)
    place = new.schema.get_field_index("sampler")
    table = new.set_column(place, pa.field("sampler", old.type, nullable=False), old)
    pq.write_table(table.replace_schema_metadata(new.schema.metadata), path)

    def aged(name: str) -> dict[str, Any]:
        record = read_json(directory / name)
        return record | {"samplers": [{field.name: record["samplers"][0][field.name] for field in fields[:-1]}]}

    shard = aged("shard-00000.json") | {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
    manifest = aged("manifest.json")
    manifest["shards"][0] = shard
    (directory / "shard-00000.json").write_text(json.dumps(shard))
    (directory / "manifest.json").write_text(json.dumps(manifest))
    batch = open_batch(directory)
    assert batch.manifest.samplers == (expected[0].sampler,)
    assert expected[0].sampler.weights == "exact" and expected[0].sampler.policy == ""
    assert all(same(read, made) for read, made in zip(batch.iter_rollouts(), expected, strict=True))
    assert len(batch.take([1000, 1015])) == 2


def test_store_imports_without_torch() -> None:
    code = "import sys, stalewise.store; sys.exit('torch' in sys.modules or 'pandas' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": SOURCE})
