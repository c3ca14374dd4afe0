"""The index of all rollouts of a run."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from rollout_runs import (
    GROUP_SIZE,
    add_batch,
    consume,
    expected,
    found,
    index_of,
    make_rollout,
    same_table,
    seen_by,
    start_run,
)
from stalewise.config import RunConfig
from stalewise.reporting.browser.group import TokenDecoder, describe_group
from stalewise.reporting.browser.index import CACHE
from stalewise.reporting.browser.query import QueryResult, parse_filters
from stalewise.store import batch_directories, token_files, token_log_directory


def test_the_index_knows_every_rollout_and_what_became_of_it(run: Path) -> None:
    index = index_of(run)
    assert index.column("rollout_id").tolist() == list(range(480))
    assert [place.rollback for place in index.batches] == ["", "", "r000"]
    update = index.column("update")
    assert update[:240].tolist() == np.repeat(np.arange(6), 40).tolist()
    assert (update[240:] == -1).all()
    assert np.isnan(index.column("worst_log_ratio")[240:]).all() and np.isnan(index.column("advantage")[240:]).all()
    assert index.problems == [] and index.parts == ["correct", "format"]
    for start in range(0, 240, 40):
        batch = batch_directories(run / "rollouts")[start // 160]
        seen = seen_by(batch, range(start, start + 40))
        assert index.column("advantage")[start : start + 40] == pytest.approx(seen.advantage)
        log_ratio = np.split(seen.logp - seen.rows.behaviour_logp, seen.rows.response_offsets[1:-1])
        worst = [part[np.abs(part).argmax()] for part in log_ratio]
        assert index.column("worst_log_ratio")[start : start + 40] == pytest.approx(worst)


def test_the_index_is_kept_and_made_anew_when_the_run_goes_on(own: Path) -> None:
    first = index_of(own)
    kept = own / "report" / CACHE
    before = kept.stat().st_mtime_ns
    again = index_of(own)
    assert kept.stat().st_mtime_ns == before
    same_table(again, first)
    assert again.shards == first.shards
    consume(own, batch_directories(own / "rollouts")[1], 1, range(6, 8), per_update=40)
    grown = index_of(own)
    assert grown.fingerprint != first.fingerprint and int(grown.column("update").max()) == 7


def test_a_damaged_cache_is_no_obstacle(own: Path) -> None:
    first = index_of(own)
    (own / "report" / CACHE).write_bytes(b"garbage")
    same_table(index_of(own), first)


def test_a_directory_that_cannot_be_written_is_read_all_the_same(own: Path) -> None:
    shutil.rmtree(own / "report", ignore_errors=True)
    (own / "report").write_text("a file in the way")
    assert index_of(own).table.num_rows == 480


@pytest.mark.parametrize("damage", ["cut", "gone", "garbage"])
def test_a_corrupt_shard_is_named_and_the_rest_works(own: Path, damage: str) -> None:
    shard = batch_directories(own / "rollouts")[0] / "shard-00001.parquet"
    data = shard.read_bytes()
    shard.unlink()
    if damage != "gone":
        shard.write_bytes(data[:200] if damage == "cut" else b"x" * len(data))
    index = index_of(own)
    assert index.table.num_rows == 480 - 64
    assert len(index.problems) == 1 and "shard-00001.parquet is damaged" in index.problems[0]
    assert found(index, text="w7") == [i for i in expected(lambda r: "w7" in r.text) if not 64 <= i < 128]


def change_one_byte(shard: Path) -> None:
    """The file can be read as before, and is not the one that was written."""
    content = shard.read_bytes()
    assert b"parquet-cpp-arrow" in content
    shard.write_bytes(content.replace(b"parquet-cpp-arrow", b"parquet-cpp-arroW"))


def test_a_shard_that_can_be_read_and_is_another_is_damaged(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change_one_byte(batch_directories(own / "rollouts")[0] / "shard-00000.parquet")
    index = index_of(own)
    assert index.table.num_rows == 480 - 64
    assert len(index.problems) == 1 and "shard-00000.parquet is damaged" in index.problems[0]
    shutil.rmtree(own / "report")
    monkeypatch.setattr("stalewise.reporting.browser.index.CHECKED_BYTES", 0)  # as in a store that takes long to hash
    index = index_of(own)
    assert index.table.num_rows == 480 and index.problems == []
    record = describe_group(index, "g000000-v000000", 1, TokenDecoder(own))
    assert "shard-00000.parquet is damaged" in record["problems"][0]
    assert [response["missing"] for response in record["responses"]] == [True] * GROUP_SIZE


def test_a_damaged_token_log_is_named_and_ratios_are_missing(own: Path) -> None:
    token_files(token_log_directory(own))[0].write_bytes(b"garbage")
    index = index_of(own)
    assert "u000000-u000003.parquet is damaged" in index.problems[0]
    assert np.isnan(index.column("worst_log_ratio")[:160]).all()
    assert not np.isnan(index.column("worst_log_ratio")[160:240]).any()


def test_a_token_log_with_other_columns_is_damaged(own: Path) -> None:
    path = token_files(token_log_directory(own))[0]
    table = pq.read_table(path)
    pq.write_table(table.set_column(2, "advantage", table.column("advantage").cast("string")), path)
    index = index_of(own)
    assert "u000000-u000003.parquet is damaged" in index.problems[0]
    assert np.isnan(index.column("advantage")[:160]).all() and not np.isnan(index.column("advantage")[160:240]).any()


def test_a_batch_in_the_making_is_mentioned(own: Path) -> None:
    (batch_directories(own / "rollouts")[1] / "manifest.json").unlink()
    index = index_of(own)
    assert index.table.num_rows == 320
    assert index.generating == ["g000001-v000004"] and index.problems == []


def test_a_run_that_has_just_begun_is_empty(tmp_path: Path) -> None:
    index = index_of(start_run(tmp_path))
    matches = QueryResult(index, parse_filters({"sort": "ratio"}))
    assert index.table.num_rows == 0 and matches.rollouts == 0 and matches.page(0, 10) == []


def test_updates_that_were_taken_back_are_shown_where_their_batch_stands(halved: Path) -> None:
    index = index_of(halved)
    rows = index.column("place") == [place.key for place in index.batches].index("r001:g000001-v000004")
    assert index.column("rollout_id")[rows].tolist() == list(range(160, 200))  # what those updates saw, and no more
    assert index.column("update")[rows].tolist() == [4] * 20 + [5] * 20
    taken, stands = (
        describe_group(index, key, 46, TokenDecoder(halved)) for key in ("r001:g000001-v000004", "g000001-v000004")
    )
    assert (taken["rollback"], taken["is_kept"], stands["rollback"]) == ("r001", True, "")
    assert [one["update"] for one in taken["responses"]] == [5] * GROUP_SIZE
    assert [one["update"] for one in stands["responses"]] == [4] * GROUP_SIZE
    assert [one["rollout_id"] for one in taken["responses"]] == [one["rollout_id"] for one in stands["responses"]]
    for one, other in zip(taken["responses"], stands["responses"], strict=True):
        assert one["tokens"]["ids"] == other["tokens"]["ids"] and one["tokens"]["logp"] != other["tokens"]["logp"]
    with_text = found(index, text="w7", batch="r001:g000001-v000004")
    assert with_text == [i for i in expected(lambda r: "w7" in r.text) if 160 <= i < 200] != []
    same_table(index_of(halved), index)


def test_a_rollback_whose_ledger_is_damaged_is_named(halved: Path) -> None:
    (halved / "rollbacks" / "r001" / "updates.jsonl").write_text("garbage\n" * 3)
    index = index_of(halved)
    assert index.table.num_rows == 480
    assert any("r001/updates.jsonl" in problem for problem in index.problems)


def test_a_real_run_is_indexed(tiny_run: RunConfig) -> None:
    index = index_of(tiny_run.directory)
    assert index.table.num_rows == 64 and (index.column("update") >= 0).all()
    record = describe_group(index, index.batches[0].key, 0, TokenDecoder(tiny_run.directory))
    response = record["responses"][0]
    rollout_text = "".join(response["tokens"]["texts"])
    assert response["length"] == len(response["tokens"]["ids"]) and rollout_text


def test_a_group_number_tells_batches_apart(tmp_path: Path) -> None:
    """Two sources may have groups of one number: they stay two groups."""
    run = start_run(tmp_path)
    add_batch(run, 0, [make_rollout(i) for i in range(8)])
    add_batch(run, 1, [replace(make_rollout(i), rollout_id=100 + i) for i in range(8)])
    assert len(QueryResult(index_of(run), parse_filters({})).groups) == 4


def test_a_group_without_a_reward_is_degenerate(tmp_path: Path) -> None:
    run = start_run(tmp_path)
    unscored = [replace(make_rollout(i), reward=math.nan, reward_error="it failed") for i in range(GROUP_SIZE)]
    differing = [replace(make_rollout(GROUP_SIZE + i), reward=float(i), reward_error="") for i in range(GROUP_SIZE)]
    add_batch(run, 0, [*unscored, *differing])
    assert index_of(run).column("degenerate").tolist() == [True] * GROUP_SIZE + [False] * GROUP_SIZE


def test_a_damaged_index_is_made_anew(own: Path) -> None:
    first = index_of(own)
    kept = own / "report" / CACHE
    whole = kept.read_bytes()
    for place in range(40, len(whole), len(whole) // 25):
        kept.write_bytes(whole[:place] + bytes([whole[place] ^ 16]) + whole[place + 1 :])
        same_table(index_of(own), first)
        assert kept.read_bytes() == whole
