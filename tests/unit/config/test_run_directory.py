"""Run directories: whose they are, and what came of a run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rundirs import add_evaluation
from stalewise.config import RunConfig, make_config, write_resolved
from stalewise.config.run_directory import (
    check_identity,
    flatten,
    identity_differences,
    is_started,
    read_config,
    read_result,
)
from stalewise.errors import StoreError
from stalewise.store.atomic import read_json, write_json_atomic
from stalewise.store.json_lines import append_line


def config_in(runs: Path, **record: Any) -> RunConfig:
    return make_config({"runs": str(runs), **record})


def test_a_result_is_shown_on_one_line(tmp_path: Path) -> None:
    by_prompt = {"prompt_ids": [f"q{place}" for place in range(500)], "score": [1] * 500, "scored": [1] * 500}
    add_evaluation(tmp_path, 0, 0.25, by_prompt=by_prompt)
    add_evaluation(tmp_path, 8, 0.5, by_prompt=by_prompt)
    result = read_result(tmp_path, 8)
    shown = f"RunResult(directory={str(tmp_path)!r}, updates=8, accuracy=0.5, evaluations=2)"
    assert (repr(result), str(result)) == (shown, shown)
    unevaluated = replace(result, evaluations=[])
    assert repr(unevaluated) == f"RunResult(directory={str(tmp_path)!r}, updates=8, evaluations=0)"


def test_a_directory_belongs_to_its_config_once_it_is_started(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    check_identity(config)  # there is no directory yet
    write_resolved(config, config.directory / "config.resolved.json")
    other = config_in(tmp_path, seed=5)
    check_identity(other)  # nothing was made yet
    (config.directory / "checkpoints" / ".v000000.tmp-1").mkdir(parents=True)
    assert not is_started(config.directory)
    (config.directory / "checkpoints" / "v000000").mkdir()
    assert is_started(config.directory)
    check_identity(config)
    check_identity(other)  # nothing was generated and nothing trained
    write_json_atomic(config.directory / "checkpoints" / "v000002" / "manifest.json", {})
    check_identity(config)
    message = (
        r"belongs to another config \(seed was 0 and is 5\): `stalewise fork \S+/run --at 2 --set seed=5` continues"
    )
    with pytest.raises(StoreError, match=message):
        check_identity(other)
    with pytest.raises(StoreError, match=r"model.path was 'auto' and is 'b'\): choose another name, or delete"):
        check_identity(config_in(tmp_path, model={"path": "b"}))  # which a fork cannot change
    check_identity(config_in(tmp_path, evaluation={"every": 3}, checkpoints={"keep": 9}))


def test_what_may_change_is_no_difference() -> None:
    recorded = make_config({}).model_dump(mode="json")
    free = {"trackers": ["wandb"], "sampler": {"engine": "vllm"}, "learner": {"record_tokens": False}, "name": "b"}
    assert identity_differences(make_config(free), recorded) == []
    changed = make_config({"batch": {"prompts": 8}, "seed": 1})
    assert identity_differences(changed, recorded, but=["seed"]) == ["batch.prompts was 32 and is 8"]
    there = make_config({"model": {"device": "cuda:0", "threads": 2}}).model_dump(mode="json")
    assert identity_differences(make_config({"model": {"device": "cuda:1", "threads": 2}}), there) == []
    assert identity_differences(make_config({"model": {"device": "cpu", "threads": 1}}), there) == [
        "model.device was 'cuda' and is 'cpu'",
        "model.threads was 2 and is 1",
    ]
    pipelined: dict[str, Any] = {"kind": "pipelined", "generator_device": "cuda:1"}
    there = make_config({"schedule": pipelined}).model_dump(mode="json")
    assert identity_differences(make_config({"schedule": {**pipelined, "generator_device": "cuda:2"}}), there) == []
    del recorded["evaluation"]["samples"]  # a setting that is newer than the run had its default
    assert identity_differences(make_config({}), recorded) == []


def test_other_directories_and_formats_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"is not a run directory: it has no config\.resolved\.json"):
        read_config(tmp_path)
    config = config_in(tmp_path)
    path = config.directory / "config.resolved.json"
    write_resolved(config, path)
    assert read_config(config.directory) == config
    path.write_text(json.dumps(read_json(path) | {"format": "stalewise.run/9"}))
    with pytest.raises(StoreError, match="this release reads"):
        read_config(config.directory)
    with pytest.raises(StoreError, match=r"has format stalewise\.run/9; this release reads stalewise\.run/1"):
        check_identity(config)


def test_the_result_sums_up_the_journal(tmp_path: Path) -> None:
    for record in (
        {"event": "learn", "seconds": 2.0, "first": 0, "stop": 2},
        {"event": "ranks", "seconds": 0.0, "world_size": 2},
        {"event": "learn", "seconds": 1.5, "first": 2, "stop": 4},
    ):
        append_line(tmp_path / "journal.jsonl", {"time": 0.0, **record})
    add_evaluation(tmp_path, 4, 0.25)
    result = read_result(tmp_path, 4)
    assert result.seconds == {"generate": 0.0, "learn": 3.5, "switch": 0.0, "evaluate": 0.0}
    assert (result.accuracy, result.updates) == (0.25, 4)


def test_nested_tables_become_dotted_keys() -> None:
    assert flatten({"a": {"b": {"c": 1}}, "d": [2]}) == {"a.b.c": 1, "d": [2]}


def test_files_in_the_run_directory_move_with_it(tmp_path: Path) -> None:
    own = str(tmp_path / "runs" / "a")
    record = {"runs": str(tmp_path / "runs"), "name": "a", "model": {"path": f"{own}/model-1"}}
    record |= {"task": {"name": "jsonl", "options": {"path": f"{own}/data/1/rows.jsonl", "evaluation_path": "else"}}}
    config = make_config(record)
    write_resolved(config, config.directory / "config.resolved.json")
    copied = tmp_path / "copied"
    (tmp_path / "runs" / "a").rename(copied)
    moved = read_config(copied)
    assert moved.model.path == str(copied / "model-1")
    assert moved.task.options == {"path": str(copied / "data/1/rows.jsonl"), "evaluation_path": "else"}
    again = make_config({**record, "runs": str(tmp_path), "name": "copied", "model": {"path": str(copied / "model-1")}})
    assert identity_differences(again, read_json(copied / "config.resolved.json")) == [
        f"task.options.path was '{{run}}/data/1/rows.jsonl' and is '{own}/data/1/rows.jsonl'"
    ]
