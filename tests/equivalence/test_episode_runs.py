"""Runs of episodes: whole, killed and resumed to the same bytes, and learning."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from stalewise import fork, run, store
from stalewise.config import make_config
from stalewise.errors import StalewiseError
from stalewise.reporting.inspection import inspect_rollout, inspect_run
from stalewise.reporting.verification import verify_run
from stalewise.store.json_lines import read_jsonl

PROGRAM = """
import json, sys
from stalewise import run
from stalewise.config import make_config
run(make_config(json.loads(sys.argv[1])))
"""


def settings(runs: Path, name: str, **changes: Any) -> dict[str, Any]:
    return {
        "name": name,
        "runs": str(runs),
        "task": {"name": "arithmetic", "options": {"environment": "sums", "environment_options": {"rounds": 2}}},
        "model": {"device": "cpu"},
        "sampler": {"max_new_tokens": 20, "rollouts_per_shard": 16},
        "batch": {"prompts": 8, "group_size": 4},
        "schedule": {"updates": 4, "stages": 2},
        "evaluation": {"prompts": 8},
    } | changes


def shards(runs: Path, name: str) -> dict[str, bytes]:
    return {
        str(path.relative_to(runs / name)): path.read_bytes() for path in (runs / name).glob("rollouts/*/*.parquet")
    }


@pytest.mark.slow
def test_a_killed_run_of_episodes_is_resumed_to_the_same_bytes(tmp_path: Path) -> None:
    run(make_config(settings(tmp_path, "whole")))
    expected = shards(tmp_path, "whole")
    assert len(expected) == 8  # 2 stages of 2 updates of 32 rollouts, 16 to a shard
    killed = settings(tmp_path, "killed")
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, json.dumps(killed)], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not list((tmp_path / "killed").glob("rollouts/*/shard-00001.json")) and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = {path: data for path, data in shards(tmp_path, "killed").items() if path in expected}
    assert 1 <= len(before) < len(expected)
    run(make_config(killed))
    assert shards(tmp_path, "killed") == expected
    calls = sorted((tmp_path / "killed").glob("rollouts/*/calls-*.jsonl"))
    assert len(calls) == 8 and all(path.stat().st_size for path in calls)


def test_a_run_of_episodes_is_stored_and_shown_turn_by_turn(tmp_path: Path) -> None:
    config = make_config(settings(tmp_path, "one", schedule={"updates": 1, "stages": 1}))
    run(config)
    (batch,) = inspect_run(config.directory)["batches"]
    directory = Path(batch["directory"])
    manifest = store.read_batch_manifest(directory)
    rollouts = list(store.open_batch(directory).iter_rollouts())
    episodes = [rollout for rollout in rollouts if rollout.segments]
    assert episodes and manifest.format == store.EPISODES
    assert manifest.tokens == sum(sum(rollout.mask) for rollout in rollouts)
    record = inspect_rollout(config.directory, episodes[0].rollout_id)
    assert [segment["by"] for segment in record["segments"]] == ["policy", "user", "policy"]
    assert {token["by"] for token in record["tokens"] if token["logp"] is None} == {"user"}
    logged = store.read_tokens(store.token_log_directory(config.directory), 0).to_pylist()
    by_id = {row["rollout_id"]: row for row in logged}
    for rollout in episodes:
        if row := by_id.get(rollout.rollout_id):
            assert not any(logp for logp, own in zip(row["logp"], rollout.mask, strict=True) if not own)


def test_an_environment_and_a_second_policy_are_refused_together(tmp_path: Path) -> None:
    given = settings(tmp_path, "both")
    given["sampler"] = {**given["sampler"], "foreign": {"path": "embedded:arithmetic", "share": 0.5}}
    with pytest.raises(StalewiseError, match=r"sampler\.foreign"):
        run(make_config(given))


@pytest.mark.nightly
def test_the_embedded_policy_learns_the_game_of_sums(tmp_path: Path) -> None:
    changes = {
        "schedule": {"updates": 60, "stages": 2},
        "batch": {"prompts": 16, "group_size": 8},
        "sampler": {"max_new_tokens": 32},
        "optimizer": {"learning_rate": 1e-3},
        "evaluation": {"prompts": 128},
    }
    result = run(make_config(settings(tmp_path, "learns", **changes)))
    before, after = (one["accuracy"]["value"] for one in (result.evaluations[0], result.evaluations[-1]))
    assert before < 0.27 and after > before + 0.12  # 0.198 and 0.425 when it was written


def test_episodes_are_held_near_a_reference_and_forked(tmp_path: Path) -> None:
    changes = {"schedule": {"updates": 2, "stages": 2}, "checkpoints": {"every": 1, "keep": 3}}
    config = make_config(settings(tmp_path, "first", objective={"kl": 0.05}, **changes))
    run(config)
    forked = fork(config.directory, at=1, name="fork")
    run(forked)
    weights = "checkpoints/v000002/model.safetensors"
    assert (forked.directory / weights).read_bytes() == (config.directory / weights).read_bytes()
    assert verify_run(forked.directory).damaged == []
    first = read_jsonl(config.directory / "metrics.jsonl")[0]
    assert first["kl_reference"] == pytest.approx(0, abs=1e-5)  # version 0 is the reference
