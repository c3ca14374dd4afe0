"""Versions of rewards on disk: whole or absent, never overwritten, and of the rollouts that they were made for."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stalewise.errors import StoreError
from stalewise.store import BatchManifest, ShardManifest
from stalewise.store.reward_versions import find_version, new_version, reward_versions
from stalewise.types import Reward

SHARD = ShardManifest(0, "shard-00000.parquet", 1, "abc", 2, 2, 2, 0, 1, 0, 0, 0.0, 2, 0, 0, 0.0, ())
BATCH = BatchManifest(0, 0, "t", 2, 2, 2, 0.5, 0, 0, 0.0, (), (SHARD,))
COUNTS = dict.fromkeys(("rollouts", "changed", "raised", "lowered", "unscored_before", "unscored_after"), 1)
PLACE = Path("g000000-v000000")


def write(run: Path, name: str, time: float = 1.0) -> None:
    with new_version(run, name) as writer:
        writer.add(PLACE.name, BATCH, [3, 5], [Reward(0.25, {"a": 1.0}), Reward(math.nan, error="ValueError: \ud800")])
        writer.record |= {"time": time, **COUNTS}


def test_a_version_is_read_as_it_was_written(tmp_path: Path) -> None:
    write(tmp_path, "b", time=2.0)
    write(tmp_path, "a", time=3.0)
    assert [one.name for one in reward_versions(tmp_path)] == ["b", "a"]
    found = find_version(tmp_path, "b").rewards_of(BATCH, PLACE)
    assert found.values(np.array([5, 3])).tolist()[1] == 0.25
    assert math.isnan(found.values(np.array([5]))[0])
    assert found.reward(3) == Reward(0.25, {"a": 1.0})
    assert found.reward(5).error.startswith("ValueError: ")


def test_a_version_that_failed_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), new_version(tmp_path, "a") as writer:
        writer.add(PLACE.name, BATCH, [3], [Reward(1.0)])
        raise ZeroDivisionError
    assert reward_versions(tmp_path) == []
    assert not list((tmp_path / "rewards").iterdir())


def test_what_does_not_belong_together_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "a")
    with pytest.raises(StoreError, match="exists and is never overwritten"):
        write(tmp_path, "a")
    with pytest.raises(StoreError, match=r"cannot be called '\.\./b'"):
        write(tmp_path, "../b")
    with pytest.raises(StoreError, match="has no rewards 'x'; known: a"):
        find_version(tmp_path, "x")
    version = find_version(tmp_path, "a")
    with pytest.raises(StoreError, match="has rewards of other rollouts"):
        version.rewards_of(replace(BATCH, shards=(replace(SHARD, sha256="other"),)), PLACE)
    with pytest.raises(StoreError, match="has no rewards of g000001-v000000"):
        version.rewards_of(BATCH, Path("g000001-v000000"))
    (version.directory / f"{PLACE.name}.parquet").unlink()
    with pytest.raises(StoreError, match="is damaged or missing"):
        version.rewards_of(BATCH, PLACE)
    (version.directory / "manifest.json").write_text('{"format": "stalewise.rewards/9"}')
    with pytest.raises(StoreError, match="this release reads"):
        reward_versions(tmp_path)


def test_one_process_scores_at_a_time_and_what_a_killed_one_left_is_removed(tmp_path: Path) -> None:
    left = tmp_path / "rewards" / ".a.tmp-0123456789ab"
    left.mkdir(parents=True)
    with new_version(tmp_path, "a") as writer:
        assert not left.exists()
        with pytest.raises(StoreError, match="another process is scoring"):
            write(tmp_path, "b")
        writer.record |= {"time": 1.0, **COUNTS}
    assert [one.name for one in reward_versions(tmp_path)] == ["a"]


def test_a_changed_manifest_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "a")
    path = tmp_path / "rewards" / "a" / "manifest.json"
    path.write_text(path.read_text().replace('"abc"', '"abd"'))
    with pytest.raises(StoreError, match="was changed after it was written"):
        reward_versions(tmp_path)
    path.write_text(
        '{"format": "stalewise.rewards/1", "time": 1, "batches": {"g": {"rows": 1}}}'
    )  # of an earlier release
    with pytest.raises(StoreError, match="is damaged: rollouts, changed, raised"):
        reward_versions(tmp_path)
