"""Manifests add up; other formats and broken ones are refused."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from stalewise import store
from stalewise.errors import StoreError
from stalewise.store import manifest
from stalewise.store.atomic import read_json
from stored_rollouts import make_batch, make_rollouts


def test_batch_manifest_adds_up(batch: store.Batch) -> None:
    expected, manifest = make_rollouts(1000, 1800), batch.manifest
    scored = [r.reward for r in expected if not math.isnan(r.reward)]
    assert (manifest.generation_batch, manifest.version, manifest.task) == (3, 64, "arithmetic")
    assert manifest.rows == 1800 and manifest.seconds == 4.5 and manifest.extra == {"note": "x"}
    assert manifest.tokens == sum(len(r.response_ids) for r in expected)
    assert manifest.prompt_tokens == sum(len(r.prompt_ids) for r in expected)
    assert manifest.reward_mean == pytest.approx(sum(scored) / len(scored), rel=1e-12)
    assert manifest.truncated == sum(r.truncated for r in expected)
    assert manifest.verifier_errors == 1800 - len(scored) > 0
    assert manifest.samplers == (expected[0].sampler,)


def test_other_formats_and_broken_manifests_are_refused(tmp_path: Path) -> None:
    directory = make_batch(tmp_path, shards=1, rows=8)
    path = directory / "manifest.json"
    record = read_json(path)
    path.write_text(json.dumps({**record, "a later key": 1}))
    store.open_batch(directory)
    path.write_text(json.dumps({**record, "format": "stalewise.rollouts/3"}))
    with pytest.raises(StoreError, match=r"has format stalewise\.rollouts/3; this release reads stalewise\.rollouts/1"):
        store.open_batch(directory)
    path.write_text(json.dumps({k: v for k, v in record.items() if k != "rows"}))
    with pytest.raises(StoreError, match=r"manifest\.json is corrupt: rows missing"):
        store.open_batch(directory)
    path.write_text(json.dumps({**record, "samplers": [{"colour": "red"}]}))
    with pytest.raises(StoreError, match=r"manifest\.json is corrupt: samplers"):
        store.open_batch(directory)
    path.write_text(json.dumps(record))
    renamed = directory.rename(directory.with_name("g000003-v000065"))
    with pytest.raises(StoreError, match="generation batch 3 of version 64: the directory was renamed"):
        store.open_batch(renamed)


def test_batches_are_listed_in_order_of_generation(tmp_path: Path) -> None:
    names = ["g000002-v000064", "g1000000-v000001", "g000010-v000064", ".g000001-v000000.tmp-00", "other"]
    for name in names:
        (tmp_path / name).mkdir()
    assert [d.name for d in manifest.batch_directories(tmp_path)] == [names[0], names[2], names[1]]
    assert manifest.batch_directories(tmp_path / "none") == []
    with pytest.raises(StoreError, match="other is not a generation batch"):
        manifest.parse_batch_name(tmp_path / "other")
