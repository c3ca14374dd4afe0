"""Runs of episodes: whole, killed and resumed to the same bytes, and learning."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from processes import begin
from ranks import finish, launch, printed
from stalewise import evaluate, fork, learn, rescore, run, store
from stalewise.config import make_config
from stalewise.config.run_directory import read_config, read_result
from stalewise.errors import StalewiseError
from stalewise.integrations.hub import export_policy, export_rollouts
from stalewise.planning.probe import LEAST_UPDATES, probe
from stalewise.reporting.inspection import inspect_rollout, inspect_run
from stalewise.reporting.read import read_run
from stalewise.reporting.summary import describe_progress
from stalewise.reporting.verification import verify_run
from stalewise.rollout.engines.embedded import HFSampler
from stalewise.rollout.generate import sample_and_score
from stalewise.store.checkpoints import checkpoint_directory
from stalewise.store.json_lines import read_jsonl
from stalewise.tasks import make_task
from stalewise.tasks.environments import ChatMessage, Episode
from stalewise.types import POLICY, Prompt, Rollout, SamplerSettings, Segment
from tiny import call, write_config

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
        "model": {"device": "cpu", "check": "off"},
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


class SometimesTwice:
    """Asks a second sum where the first one is even; so some shards of 4 rollouts have episodes and others have not."""

    local = True

    def reset(self, row: Prompt) -> list[ChatMessage]:
        self.left = 1 - int(row.answer) % 2
        return [{"role": "user", "content": row.text}]

    def step(self, response: str) -> list[ChatMessage] | None:
        self.left -= 1
        return None if self.left < 0 else [{"role": "user", "content": "12+34="}]

    def score(self, episode: Episode) -> float:
        return float(episode.turns[0] == episode.prompt.answer)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of episodes of one turn and of two."""
    changes: dict[str, Any] = {"schedule": {"updates": 1, "stages": 1}}
    changes["sampler"] = {"max_new_tokens": 20, "rollouts_per_shard": 4}
    changes["task"] = {"name": "arithmetic", "options": {"environment": f"{__name__}:SometimesTwice"}}
    config = make_config(settings(tmp_path_factory.mktemp("runs"), "mixed", **changes))
    run(config)
    return config.directory


def rollouts_of(directory: Path) -> list[Rollout]:
    return [
        one
        for path in store.batch_directories(directory / "rollouts")
        for one in store.open_batch(path).iter_rollouts()
    ]


def test_counts_of_tokens_are_of_the_policys_own(mixed: Path) -> None:
    rollouts = rollouts_of(mixed)
    own, turns = sum(sum(one.mask) for one in rollouts), sum(max(1, (len(one.segments) + 1) // 2) for one in rollouts)
    outside = 6 * sum(bool(one.segments) for one in rollouts)  # "12+34="
    assert 0 < outside < 6 * len(rollouts)
    (batch,) = inspect_run(mixed)["batches"]
    assert (batch["tokens"], batch["outside_tokens"], batch["turns"]) == (own, outside, turns)
    assert f"│ {own:,} │ {outside:,} │ {turns:,} │" in " ".join(call("inspect", mixed).stdout.split())
    assert f"{own:,} response tokens and {outside:,} from outside" in describe_progress(read_run(mixed))
    episode = next(one for one in rollouts if one.segments)
    rows = call("inspect", mixed, "--group", episode.group).stdout.splitlines()
    cells = [[cell.strip() for cell in line.split("│")] for line in rows]
    (row,) = (row for row in cells if row[1:2] == [str(episode.rollout_id)])
    assert int(row[3]) == sum(episode.mask) == len(episode.response_ids) - 6


def test_lengths_of_an_evaluation_leave_out_what_the_environment_said(mixed: Path) -> None:
    config = read_config(mixed)
    task = make_task(config.task.name, **config.task.options)
    sampler = HFSampler(SamplerSettings(), max_new_tokens=20, device=torch.device("cpu"), dtype=torch.float32)
    sampler.load(checkpoint_directory(mixed, 1))
    _, responses, _ = sample_and_score(
        task, task.evaluation_prompts(8), samples=4, seed=0, sampler=sampler, rows_at_once=512
    )
    segments = [one.episode.segments or (Segment(POLICY, len(one.token_ids)),) for one in responses if one.episode]
    own = [sum(part.tokens for part in parts if part.by == POLICY) for parts in segments]
    found = evaluate(mixed, prompts=8, samples=4)
    assert found.response_length == pytest.approx(sum(own) / len(own))
    assert found.response_length < sum(len(one.token_ids) for one in responses) / len(responses) - 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning")
def test_exported_episodes_load_with_their_segments(
    mixed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    folder = export_rollouts(mixed, tmp_path / "rollouts")
    have = ["segments" in pq.read_schema(path).names for path in sorted(folder.glob("rollouts/*/*.parquet"))]
    assert any(have) and not all(have)
    loaded = datasets.load_dataset(str(folder), split="train", cache_dir=str(tmp_path / "cache"))
    rollouts = rollouts_of(mixed)
    assert [
        tuple(Segment(part["by"], part["tokens"]) for part in segments or ()) for segments in loaded["segments"]
    ] == [one.segments for one in rollouts]
    assert [tuple(logp) for logp in loaded["behaviour_logp"]] == [one.behaviour_logp for one in rollouts]
    assert learn(make_config(settings(tmp_path, "again", schedule={"updates": 1, "stages": 1})), [folder]).updates == 1


def test_cards_of_episodes_count_the_policys_tokens_and_name_the_environment(mixed: Path, tmp_path: Path) -> None:
    (batch,) = inspect_run(mixed)["batches"]
    text = (export_rollouts(mixed, tmp_path / "rollouts") / "README.md").read_text()
    assert f"32 responses ({batch['tokens']:,} tokens of the policy, {batch['outside_tokens']:,} from outside)" in text
    assert f"| 0 | 0 | 32 | {batch['turns']} | {batch['tokens']} | {batch['outside_tokens']} |" in text
    assert "SometimesTwice` answered the policy between its turns" in text and "`segments` (lengths of" in text
    text = (export_policy(mixed, tmp_path / "policy") / "README.md").read_text()
    assert "SometimesTwice` answered it after each turn" in text and "the policy's own tokens" in text
    assert f"| {read_result(mixed, 1).evaluations[-1]['response_length']:.1f} |" in text


@pytest.mark.nightly
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
    for update in range(2):  # what each rank computed stands at the tokens that it is of
        logs = [store.read_tokens(store.token_log_directory(tmp_path / name), update) for name in ("one", "two")]
        mine, other = ({row["rollout_id"]: row["logp"] for row in log.to_pylist()} for log in logs)
        assert mine.keys() == other.keys()
        assert all(other[number] == pytest.approx(logp, abs=1e-3) for number, logp in mine.items())


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
