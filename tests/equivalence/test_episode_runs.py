"""Runs of episodes: whole, killed and resumed to the same bytes, and learning."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from processes import begin
from ranks import finish, launch, printed
from stalewise import evaluate, fork, learn, rescore, run, store
from stalewise.config import make_config
from stalewise.config.run_directory import read_result
from stalewise.errors import StalewiseError
from stalewise.planning.probe import LEAST_UPDATES, probe
from stalewise.reporting.inspection import inspect_rollout, inspect_run
from stalewise.reporting.verification import verify_run
from stalewise.store.json_lines import read_jsonl
from tiny import write_config

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
    process = begin(PROGRAM, json.dumps(killed), directory=tmp_path)
    deadline = time.monotonic() + 120
    while not list((tmp_path / "killed").glob("rollouts/*/shard-00001.json")) and time.monotonic() < deadline:
        time.sleep(0.005)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
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


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run of the number game with a suite that is played, and one that is not."""
    suites = [
        {"name": "played", "options": {"environment": "sums", "environment_options": {"rounds": 2}}},
        {"name": "one turn"},
    ]
    suites = [{"task": "arithmetic", "prompts": 8, "samples": 2, **one} for one in suites]
    runs = tmp_path_factory.mktemp("runs")
    run(make_config(settings(runs, "played", evaluation={"prompts": 8, "suite": suites})))
    return runs / "played"


def test_suites_are_played_in_their_own_environment(played: Path) -> None:
    accuracy = {name: one["accuracy"]["value"] for name, one in read_result(played, 4).suites.items()}
    assert set(accuracy) == {"played", "one turn"} and accuracy["played"] != accuracy["one turn"]
    assert evaluate(played, prompts=8).accuracy.value == pytest.approx(
        read_result(played, 4).evaluations[-1]["accuracy"]["value"]
    )


def test_another_run_learns_from_stored_episodes(played: Path, tmp_path: Path) -> None:
    (batch, *_) = store.batch_directories(played / "rollouts")
    first, second = (learn(make_config(settings(tmp_path, name)), [batch]) for name in ("first", "second"))
    assert first.updates == second.updates == 2
    metrics = [read_jsonl(tmp_path / name / "metrics.jsonl") for name in ("first", "second")]
    assert [one["loss"] for one in metrics[0]] == [one["loss"] for one in metrics[1]]
    original = read_jsonl(played / "metrics.jsonl")  # the same policy, the same episodes
    assert [one["loss"] for one in metrics[0]] == pytest.approx([one["loss"] for one in original[:2]], rel=1e-5)
    own = sum(sum(rollout.mask) for rollout in store.open_batch(batch).iter_rollouts())
    assert sum(one["tokens"] for one in metrics[0]) == own  # not one token from outside


def test_episodes_are_not_scored_again_by_a_verifier_alone(played: Path) -> None:
    with pytest.raises(StalewiseError, match=r"environment sums scored.*--weight"):
        rescore(played, "number")
    assert rescore(played, weights={"played": 0.5}).record["mean_after"] > 0


@pytest.mark.slow
def test_a_pipelined_run_plays_the_episodes_of_its_schedule(tmp_path: Path) -> None:
    schedule = {"kind": "pipelined", "updates": 3, "updates_per_generation": 1}
    config = make_config(settings(tmp_path, "pipelined", schedule=schedule, evaluation={"prompts": 4}))
    assert run(config).updates == 3
    batches = store.batch_directories(config.directory / "rollouts")
    episodes = [one for batch in batches for one in store.open_batch(batch).iter_rollouts()]
    assert len(batches) == 3 and sum(bool(one.segments) for one in episodes) > len(episodes) / 2


@pytest.mark.slow
def test_ranks_learn_from_episodes_as_one_process_does(tmp_path: Path) -> None:
    changes = {"schedule": {"updates": 2, "stages": 1}, "evaluation": {"prompts": 4}}
    changes |= {"optimizer": {"epsilon": 1e-2, "learning_rate": 1e-2}}
    run(make_config(settings(tmp_path, "one", **changes)))
    config = write_config(tmp_path / "two.toml", settings(tmp_path, "two", **changes))
    codes = finish(launch(2, tmp_path, "train", config), timeout=200)
    assert codes == [0, 0], printed(tmp_path, 2)
    assert shards(tmp_path, "one") == shards(tmp_path, "two")
    one, two = (read_jsonl(tmp_path / name / "metrics.jsonl") for name in ("one", "two"))
    for mine, other in zip(one, two, strict=True):
        assert mine["tokens"] == other["tokens"] and mine["loss"] == pytest.approx(other["loss"], rel=1e-4, abs=1e-6)


@pytest.mark.slow
def test_a_probe_plays_episodes(tmp_path: Path) -> None:
    small = {"batch": {"prompts": 4, "group_size": 4}, "evaluation": {"prompts": 4}}
    found = probe(make_config(settings(tmp_path, "probed", **small)), train=run, updates=LEAST_UPDATES)
    assert found.path.is_file()
    batches = store.batch_directories(found.directory / "rollouts")
    assert any(one.segments for batch in batches for one in store.open_batch(batch).iter_rollouts())


def test_a_mixture_is_played_whole_or_not_at_all(tmp_path: Path) -> None:
    tasks: list[dict[str, Any]] = [{"name": "arithmetic", "label": "one"}, {"name": "arithmetic", "label": "two"}]
    given = settings(tmp_path, "mixed", schedule={"updates": 1, "stages": 1}, evaluation={"prompts": 4})
    given["model"] |= {"path": "arithmetic"}
    given["task"] = {"name": "mixture", "options": {"tasks": tasks, "environment": "sums"}}
    config = make_config(given)
    run(config)
    (batch,) = store.batch_directories(config.directory / "rollouts")
    rollouts = list(store.open_batch(batch).iter_rollouts())
    assert {one.prompt_id.partition("::")[0] for one in rollouts if one.segments} == {"one", "two"}
    given["task"] = {
        "name": "mixture",
        "options": {"tasks": [{**tasks[0], "options": {"environment": "sums"}}, tasks[1]]},
    }
    with pytest.raises(StalewiseError, match=r"mixture, one: an environment plays all tasks of a mixture or none"):
        run(make_config({**given, "name": "refused"}))


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
