"""Run directories as records, also damaged ones."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rundirs import add_evaluation, warnings, write_run
from stalewise.config import RunConfig
from stalewise.config.run_directory import flatten
from stalewise.errors import StoreError
from stalewise.reporting.read import differing_keys, metric_columns, read_run, unique_labels
from stalewise.reporting.render import write_report
from stalewise.store.atomic import write_json_atomic
from stalewise.store.json_lines import append_line


def test_a_key_that_only_one_table_has_is_a_difference() -> None:
    assert differing_keys([{"a": None, "b": 1}, {"b": 1}]) == ["a"]
    assert differing_keys([{"a": 1}]) == []


def test_columns_are_sorted_and_the_last_record_of_an_update_counts() -> None:
    columns = metric_columns([{"update": 1, "a": 5}, {"update": 0, "a": 1.5}, {"update": 1, "b": True, "c": "text"}])
    np.testing.assert_array_equal(columns["update"], [0, 1])
    np.testing.assert_array_equal(columns["a"], [1.5, np.nan])
    np.testing.assert_array_equal(columns["b"], [np.nan, 1])
    assert np.isnan(columns["c"]).all()


def test_a_corrupt_line_does_not_hide_the_others(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join([*lines[:2], "{damaged", *lines[3:], '{"no": 1}']) + "\n")
    found = read_run(run)
    assert found.column("update").tolist() == [0, 1, 3, 4, 5, 6, 7]
    assert "metrics.jsonl, line 3 is damaged" in warnings(found)
    assert "metrics.jsonl, line 9 is damaged: update missing" in warnings(found)
    assert write_report([run]).is_file()


DAMAGED_RECORDS = [
    ("metrics.jsonl", {"update": "three"}),
    ("metrics.jsonl", {"update": None}),
    ("journal.jsonl", {"time": None, "event": "learn", "seconds": 1.0, "first": 0, "stop": 2}),
    ("journal.jsonl", {"time": 200.0, "event": "learn", "seconds": 1.0, "first": 0}),
    ("journal-generator.jsonl", {"time": 200.0, "event": "generate", "seconds": "x"}),
    ("ledger/stages.jsonl", {"generation_batch": 0, "ended": "early"}),
]


@pytest.mark.parametrize(("file", "record"), DAMAGED_RECORDS)
def test_a_record_of_a_wrong_form_is_left_out_and_said(tmp_path: Path, file: str, record: dict[str, Any]) -> None:
    run = write_run(tmp_path / "run")
    append_line(run / file, record)
    assert write_report([run]).is_file()
    assert f"{run / file}, line " in warnings(read_run(run)) and " is damaged: " in warnings(read_run(run))
    assert read_run(run).updates == 8


@pytest.mark.parametrize("change", [{"accuracy": None}, {"pass_at": {"1": 0.5}}, {"by_prompt": {"score": [1]}}])
def test_an_evaluation_of_a_wrong_form_is_left_out_and_said(tmp_path: Path, change: dict[str, Any]) -> None:
    run = write_run(tmp_path / "run")
    add_evaluation(run, 9, 0.5, **change)
    assert write_report([run]).is_file()
    found = read_run(run)
    assert f"eval.jsonl, line 3 is damaged: {next(iter(change))} is " in warnings(found)
    assert [record["version"] for record in found.evaluations] == [0, 8]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("name", ["rollouts", "environment.json", "metrics.jsonl"])
def test_what_may_not_be_read_is_said(tmp_path: Path, name: str) -> None:
    run = write_run(tmp_path / "run")
    (run / name).chmod(0)
    try:
        assert f"cannot read {run / name}" in warnings(read_run(run))
    finally:
        (run / name).chmod(0o700)


@pytest.mark.parametrize("damage", ["{", '{"format": "stalewise.rollouts/1"}', '{"format": "other"}'])
def test_a_damaged_manifest_is_said_and_the_rest_is_shown(tmp_path: Path, damage: str) -> None:
    run = write_run(tmp_path / "run")
    (run / "rollouts" / "g000001-v000004" / "manifest.json").write_text(damage)
    (run / "environment.json").write_text("[]")
    page = write_report([run]).read_text()
    assert "generation batch g000001-v000004 is left out: " in page and "1 of 2 generation batches" in page
    assert "environment.json is corrupt" in page


def test_a_shard_of_another_length_is_said(tiny_run: RunConfig, tmp_path: Path) -> None:
    run = tmp_path / "copy"
    shutil.copytree(tiny_run.directory, run)
    assert "damaged" not in warnings(read_run(run))
    shard = next((run / "rollouts").rglob("*.parquet"))
    shard.write_bytes(shard.read_bytes()[:-7])
    assert f"{shard} is damaged: it has" in warnings(read_run(run))


def test_a_config_that_is_damaged_is_one_clear_error(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write_json_atomic(run / "config.resolved.json", {"format": "stalewise.run/1", "schedule": {"updates": "many"}})
    with pytest.raises(StoreError, match=r"has no usable schedule .* restore it from a copy"):
        write_report([run])


def test_labels_are_the_shortest_unique_ends_of_paths() -> None:
    assert unique_labels([Path("/a/x"), Path("/a/y")]) == ["x", "y"]
    assert unique_labels([Path("/a/x"), Path("/b/x")]) == ["a/x", "b/x"]


def test_nested_tables_become_dotted_keys() -> None:
    flat = flatten({"seed": 0, "task": {"name": "jsonl", "options": {}}}, keep_empty=True)
    assert flat == {"seed": 0, "task.name": "jsonl", "task.options": {}}
