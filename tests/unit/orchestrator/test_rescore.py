"""Rescoring: further rewards beside the first ones, which stay; `learn` uses the ones it is told."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stalewise
from stalewise.errors import ConfigError, StoreError, TaskError
from stalewise.orchestrator.rescore import ScoreChange, rescore
from stalewise.reporting.browser.group import TokenDecoder, describe_group
from stalewise.reporting.browser.index import IndexCache
from stalewise.store import batch_directories, open_batch
from stalewise.store.json_lines import read_jsonl
from stalewise.store.reward_versions import reward_versions
from stalewise.types import Reward
from tiny import call, called_json, refused, tiny_record, write_config

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b), "id": f"{a}+{b}"} for a in range(10, 20) for b in range(10, 20)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on rows, scored by `exact`."""
    root = tmp_path_factory.mktemp("runs")
    data = root / "rows.jsonl"
    data.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    task = {"name": "jsonl", "options": {"path": str(data), "problem_field": "prompt", "verifier": "exact"}}
    config = stalewise.make_config(tiny_record(root, task=task, model={"path": "arithmetic"}))
    stalewise.run(config)
    return config.directory


def first_rewards(run: Path) -> dict[int, tuple[str, str, float]]:
    return {
        one.rollout_id: (one.prompt_id, one.text, one.reward)
        for path in batch_directories(run / "rollouts")
        for one in open_batch(path).iter_rollouts()
    }


def shards(run: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in (run / "rollouts").rglob("*") if path.is_file()}


def test_another_verifier_gives_another_version_beside_the_first(run: Path) -> None:
    before, files = first_rewards(run), shards(run)
    made = stalewise.rescore(
        run, lambda response, answer: {"reward": len(response), "odd": len(response) % 2}, name="len"
    )
    assert shards(run) == files
    lengths = [len(text) for _, text, _ in before.values()]
    old = [reward for _, _, reward in before.values()]
    assert made.record["rollouts"] == len(before) == 64
    assert made.record["changed"] == sum(x != y for x, y in zip(lengths, old, strict=True)) > 0
    assert made.record["mean_before"] == pytest.approx(np.mean(old))
    assert made.record["mean_after"] == pytest.approx(np.mean(lengths))
    for path in batch_directories(run / "rollouts"):
        manifest = open_batch(path).manifest
        found = made.rewards_of(manifest, path)
        ids = open_batch(path).column("rollout_id")
        assert found.values(ids[::-1]).tolist() == [len(before[i][1]) for i in ids[::-1].tolist()]
        assert found.reward(int(ids[0])).parts == {"odd": len(before[int(ids[0])][1]) % 2}


def test_repaired_answers_change_the_rewards_of_their_prompts_alone(run: Path, tmp_path: Path) -> None:
    before = first_rewards(run)
    prompt_id, text, _ = next(one for one in before.values() if one[2] == 0)
    (tmp_path / "fixed.jsonl").write_text(json.dumps({"id": prompt_id, "answer": text}) + "\n")
    made = rescore(run, answers=tmp_path / "fixed.jsonl", name="fixed")
    own = [one for one in before.values() if one[0] == prompt_id]
    changed = sum((one[1] == text) != bool(one[2]) for one in own)
    assert made.record["changed"] == changed > 0
    assert made.record["answers"] == 1
    line = called_json("rescore", run, "--answers", tmp_path / "fixed.jsonl", "--name", "fixed-2")
    assert line["changed"] == changed


def test_weights_use_recorded_parts_without_a_verifier(tmp_path: Path) -> None:
    config = stalewise.make_config(tiny_record(tmp_path, schedule={"updates": 2, "stages": 1}))
    stalewise.run(config)
    rollouts = [
        one for path in batch_directories(config.directory / "rollouts") for one in open_batch(path).iter_rollouts()
    ]
    printed = call("rescore", config.directory, "--weight", "correct=2", "--weight", "format=0.5").stdout
    (made,) = reward_versions(config.directory)
    expected = [2 * one.reward_parts["correct"] + 0.5 * one.reward_parts["format"] for one in rollouts]
    changed = sum(value != one.reward for value, one in zip(expected, rollouts, strict=True))
    assert made.name == "r1"
    before = np.mean([one.reward for one in rollouts])
    assert f"r1: {changed} of 32 rewards changed" in printed
    assert f"mean {before:.4f} → {np.mean(expected):.4f}" in printed
    assert "rewards r1: " in call("inspect", config.directory).stdout
    shown = call("inspect", config.directory, "--rollout", 0).stdout
    assert f"  r1      {expected[0]:g} (correct" in shown
    assert "no such reward part; did you mean correct" in refused("rescore", config.directory, "--weight", "corect=1")
    assert "expected a number" in refused("rescore", config.directory, "--weight", "correct=high")
    # A verifier by name works on a task that has its own.
    other = called_json("rescore", config.directory, "--verifier", "number", "--name", "number")
    assert other["rollouts"] == 32


def test_learn_uses_the_rewards_it_is_told(run: Path, tmp_path: Path) -> None:
    before = first_rewards(run)
    made = rescore(run, weights=None, answers={prompt: "no" for prompt, _, _ in before.values()}, name="none-right")
    assert made.record["mean_after"] == 0
    lengths = stalewise.rescore(run, lambda response: sum(map(ord, response)) % 3, name="by-sum")
    record = tiny_record(tmp_path, "offline", model={"path": "arithmetic"}, task={"name": "arithmetic"})
    path = write_config(tmp_path / "a.toml", record)
    result = call("learn", path, "--rollouts", run, "--rewards", "by-sum")
    assert result.exit_code == 0, result.stderr
    metrics = read_jsonl(tmp_path / "offline" / "metrics.jsonl")
    assert np.mean([line["reward"] for line in metrics]) == pytest.approx(lengths.record["mean_after"])
    sources = json.loads((tmp_path / "offline" / "sources.json").read_text())["batches"]
    assert {batch["rewards"] for batch in sources} == {"by-sum"}
    assert "learned from the rewards by-sum" in call("inspect", tmp_path / "offline").stdout
    index = IndexCache(tmp_path / "offline").index()
    assert sorted(index.column("reward")) == sorted(sum(map(ord, text)) % 3 for _, text, _ in before.values())
    shown = describe_group(
        index, index.batches[0].key, int(index.column("group")[0]), TokenDecoder(tmp_path / "offline")
    )
    assert shown["rewards_used"] == "by-sum"
    assert shown["responses"][0]["rewards"]["none-right"] == 0
    # Another version of the rewards is another run.
    assert "learned from other rollouts" in refused("learn", path, "--rollouts", run, "--rewards", "none-right")
    for setting, reason in (
        ("objective.reward_weights={correct=2.0}", "reward_weights weigh parts of the first rewards"),
        ("batch.without_variance=drop", "chooses groups by the first rewards"),
    ):
        changed = ("--set", "name=other", "--set", setting)
        assert reason in refused("learn", path, "--rollouts", run, "--rewards", "by-sum", *changed)
    assert "has no rewards 'by-sun'; did you mean by-sum" in refused(
        "learn", path, "--rollouts", run, "--rewards", "by-sun", "--set", "name=b"
    )
    damaged = made.directory / f"{batch_directories(run / 'rollouts')[0].name}.parquet"
    damaged.write_bytes(damaged.read_bytes() + b"x")
    assert "is damaged" in refused("learn", path, "--rollouts", run, "--rewards", "none-right", "--set", "name=c")


def test_bad_input_is_one_message_and_keeps_nothing(run: Path, tmp_path: Path) -> None:
    names = {one.name for one in reward_versions(run)}
    rescore(run, name="taken")
    with pytest.raises(StoreError, match="exists and is never overwritten"):
        rescore(run, name="taken")
    with pytest.raises(StoreError, match="cannot be called 'first'"):
        rescore(run, name="first")
    with pytest.raises(TaskError, match="1 of 1 answers are of no prompt"):
        rescore(run, answers={"99+99": "1"})
    with pytest.raises(TaskError, match="unknown verifier 'maths'"):
        rescore(run, "maths")
    with pytest.raises(TaskError, match=r"64 of 64 responses could not be scored.*no rewards were kept"):
        stalewise.rescore(run, lambda response: 1 / 0)
    with pytest.raises(ConfigError, match="these rewards have no parts"):
        rescore(run, weights={"correct": 1.0})
    (tmp_path / "answers.jsonl").write_text('{"id": "a"}\n')
    with pytest.raises(TaskError, match="line 1: expected an object with id"):
        rescore(run, answers=tmp_path / "answers.jsonl")
    assert {one.name for one in reward_versions(run)} == {*names, "taken"}
    assert not list((run / "rewards").glob(".*"))


def test_changed_data_are_noticed(tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    task = {"name": "jsonl", "options": {"path": str(data), "problem_field": "prompt", "verifier": "exact"}}
    config = stalewise.make_config(tiny_record(tmp_path, task=task, model={"path": "arithmetic"}))
    stalewise.generate(config)
    data.write_text("".join(f"{json.dumps({**row, 'answer': '0'})}\n" for row in ROWS))
    assert rescore(config.directory).record["mean_after"] == 0  # rows with ids of their own may be repaired in place
    data.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS[10:]))
    with pytest.raises(TaskError, match="the data were changed; restore them"):
        rescore(config.directory)


@pytest.mark.parametrize(
    ("before", "after", "changed"), [(1.0, 1.0, 0), (1.0, 0.0, 1), (math.nan, 1.0, 1), (1.0, math.nan, 1)]
)
def test_changes_are_counted(before: float, after: float, changed: int) -> None:
    change = ScoreChange()
    change.add(Reward(before), Reward(after))
    found: dict[str, Any] = change.record()
    assert found["changed"] == changed
    assert found["unscored_after"] == math.isnan(after)
    assert found["mean_before"] == (None if math.isnan(before) else before)
