"""Where the batches of a run are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rollout_runs import index_of, start_run
from stalewise.errors import StoreError
from stalewise.reporting.browser.locations import find_batches, read_rows, read_shard
from stalewise.store import batch_directories, read_batch_manifest, shard_path
from stalewise.store.atomic import write_json_atomic


def test_batches_of_another_run_are_found(own: Path, tmp_path: Path) -> None:
    learned = start_run(tmp_path / "learned")
    batch = batch_directories(own / "rollouts")[0]
    write_json_atomic(learned / "sources.json", {"batches": [{"directory": str(batch), "updates": 4}]})
    assert index_of(learned).table.num_rows == 160
    write_json_atomic(learned / "sources.json", {"batches": [{"directory": str(batch), "updates": 4}] * 2})
    assert [place.key for place in index_of(learned).batches] == ["0:g000000-v000000", "1:g000000-v000000"]


def test_rows_of_a_damaged_shard_are_refused(own: Path) -> None:
    (batch, *_) = find_batches(own)
    shard = read_batch_manifest(batch.directory).shards[0]
    assert read_rows(batch, shard, np.array([3, 5, 4000])).column("rollout_id").to_pylist() == [3, 5]
    path = shard_path(batch.directory, shard.index)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(StoreError, match="is damaged: it has"):
        read_shard(batch, shard, ["rollout_id"])
    with pytest.raises(StoreError, match="is damaged: its content differs from its manifest"):
        read_rows(batch, shard, np.array([3]))
    path.unlink()
    with pytest.raises(StoreError, match="is damaged: "):
        read_shard(batch, shard, ["rollout_id"])
