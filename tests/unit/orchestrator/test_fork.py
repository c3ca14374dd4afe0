"""Forks: the run as it was at a checkpoint, with some settings changed, under another name."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import stalewise
from callbacks import StopAt
from ranks import CONTEXT
from stalewise.config import RunConfig, make_config
from stalewise.config.run_directory import read_config, read_fork
from stalewise.errors import ConfigError, StoreError, TaskError
from stalewise.orchestrator import fork as forks
from stalewise.orchestrator.contamination import seen_in_training
from stalewise.orchestrator.orchestrator import Orchestrator
from stalewise.reporting.inspection import inspect_run
from stalewise.reporting.read import read_run
from stalewise.reporting.summary import describe_lineage
from stalewise.store import LedgerEntry, batch_directories
from stalewise.store.checkpoints import checkpoint_directory, read_state, versions
from stalewise.store.json_lines import read_jsonl
from stalewise.types import NullCallback
from tiny import call, called_json, refused, tiny_record, write_config

KINDS: dict[str, dict[str, Any]] = {
    "staged": {"kind": "staged", "updates": 4, "stages": 2},
    "short": {"kind": "staged", "updates": 2, "stages": 2},
    "pipelined": {"kind": "pipelined", "updates": 4, "updates_per_generation": 1, "lag": 1},
    "spent": {"updates": 10, "end": "spent", "spent_ess": 0.999},
}


def config_of(runs: Path, kind: str = "staged", **changes: Any) -> RunConfig:
    changes = {"checkpoints": {"every": 1, "keep": 20}, "model": {"threads": 1}, **changes}
    return make_config(tiny_record(runs, "first", schedule={"stages": None, **KINDS[kind]}, **changes))


def weights(run: Path, version: int) -> dict[str, str]:
    """Checksums of the policy and the optimizer."""
    files = sorted(checkpoint_directory(run, version).glob("*.safetensors"))
    assert len(files) > 1 or version == 0
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def without_times(path: Path) -> list[dict[str, Any]]:
    return [{key: v for key, v in line.items() if key not in ("seconds", "time")} for line in read_jsonl(path)]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = config_of(tmp_path_factory.mktemp("runs"))
    stalewise.run(config)
    return config.directory


@pytest.mark.parametrize(
    ("kind", "at"),
    [
        ("staged", 1),
        ("staged", 2),
        *(pytest.param(kind, at, marks=pytest.mark.nightly) for kind, at in (("pipelined", 2), ("spent", 3))),
    ],
)
def test_an_unchanged_fork_ends_in_the_same_weights(tmp_path: Path, first: Path, kind: str, at: int) -> None:
    run = first
    if kind != "staged":
        config = config_of(tmp_path, kind)
        stalewise.run(config)
        run = config.directory
    last = versions(run)[-1]
    forked = stalewise.fork(run, at=at, name=f"{kind}-{at}")
    assert versions(forked.directory) == [at]
    assert weights(forked.directory, at) == weights(run, at)
    made = {path: path.stat().st_ino for path in forked.directory.rglob("*.parquet") if "rollouts" in path.parts}
    assert made
    stalewise.run(forked)
    assert weights(forked.directory, last) == weights(run, last)
    for name in ("metrics.jsonl", "ledger/updates.jsonl", "eval.jsonl"):
        assert without_times(forked.directory / name) == without_times(run / name)
    assert {path: path.stat().st_ino for path in made} == made  # rollouts that fit were used, not made again
    batches = [path.name for path in batch_directories(run / "rollouts")]
    assert [path.name for path in batch_directories(forked.directory / "rollouts")] == batches


def table_of(first: Path) -> Path:
    path = first.parent / "table.json"
    assert call("difficulty", first, "--output", path).exit_code == 0
    return path


@pytest.mark.parametrize("what", ["reference", "difficulty", "refill"])
def test_a_fork_keeps_reference_table_and_longer_batches(tmp_path: Path, first: Path, what: str) -> None:
    changes: dict[str, Any] = {
        "reference": {"objective": {"kl": 0.1}, "checkpoints": {"every": 1, "keep": 1}},
        "difficulty": {"task": {"difficulty": str(shutil.copy(table_of(first), tmp_path)), "pass_rates": [0.0, 0.9]}},
        "refill": {"batch": {"without_variance": "refill"}, "optimizer": {"learning_rate": 1e-3}},
    }[what]
    config = config_of(tmp_path, **changes)
    with pytest.raises(KeyboardInterrupt):
        stalewise.run(config, StopAt(3))  # within the second stage
    forked = stalewise.fork(config.directory, name="forked")
    assert len(read_fork(forked.directory)["rollouts"]) == 1
    (tmp_path / "table.json").unlink(missing_ok=True)  # a run keeps its own
    stalewise.run(config)
    stalewise.run(forked)
    assert weights(forked.directory, 4) == weights(config.directory, 4)
    computed = [line for line in read_jsonl(forked.directory / "journal.jsonl") if line.get("reason") == "reference"]
    assert len(computed) == (2 if what == "reference" else 0)  # once a stage, not again for the fork


def test_a_fork_finds_its_reference_or_says_that_it_cannot(tmp_path: Path, first: Path) -> None:
    held = stalewise.fork(first, at=1, settings={"objective.kl": 0.1}, name="held")
    assert versions(held.directory) == [0, 1] and read_fork(held.directory)["rollouts"] == ["g000000-v000000"]
    stalewise.run(held)
    again = stalewise.fork(held.directory, at=3, settings={"objective.kl": 0.2}, name="held-more")
    kept = list((again.directory / "columns").rglob("*.parquet"))
    assert len(kept) == 4  # of both stages: nothing is computed again
    few = config_of(tmp_path, "short", checkpoints={"every": 1, "keep": 1})
    stalewise.run(few)
    changes = {"objective.kl": 0.1, "schedule.updates": 4}
    with pytest.raises(ConfigError, match="no longer has version 0: name a model"):
        stalewise.fork(few.directory, settings=changes)
    nowhere = {"task.difficulty": str(tmp_path / "nowhere.json"), "schedule.updates": 4}
    with pytest.raises(TaskError, match=r"nowhere\.json"):
        stalewise.fork(few.directory, settings=nowhere)
    assert [path.name for path in tmp_path.iterdir()] == ["first"]


def test_settings_of_training_keep_the_rollouts_of_the_stage(first: Path) -> None:
    forked = stalewise.fork(
        first, at=1, settings={"optimizer.learning_rate": 1e-3, "objective.name": "grpo"}, name="lr"
    )
    assert read_fork(forked.directory)["rollouts"] == ["g000000-v000000"]
    assert read_fork(forked.directory)["schedule"] is None
    result = stalewise.run(forked)
    rates = [line["learning_rate"] for line in read_jsonl(result.directory / "metrics.jsonl")]
    assert rates == [3e-4, 1e-3, 1e-3, 1e-3]
    ages = [entry["age"] for entry in read_jsonl(result.directory / "ledger" / "updates.jsonl")]
    assert ages == [0, 1, 0, 1]


def test_settings_of_rollouts_begin_a_stage_at_the_checkpoint(first: Path) -> None:
    settings = {
        "sampler.temperature": 0.8,
        "schedule.updates": 5,
        "batch.group_size": 2,
        "sampler.rollouts_per_shard": 8,
    }
    forked = stalewise.fork(first, at=1, settings=settings, name="hot")
    record = read_fork(forked.directory)
    assert record["rollouts"] == []
    # One update on batch 0 of version 0. All 4 updates of the first run took 16 prompts of 4 responses: ids 0 to 63,
    # so the first new prompt is 64 / 2 = 32.
    assert record["schedule"] == {"past": [[0, 0, 1, 0]], "first_prompt": 32}
    result = stalewise.run(forked)
    ledger = read_jsonl(result.directory / "ledger" / "updates.jsonl")
    # The 4 updates that are left have 2 stages.
    assert [(line["generation_batch"], line["version"], line["age"]) for line in ledger] == [
        *((0, 0, 0), (1, 1, 0), (1, 1, 1), (2, 3, 0), (2, 3, 1)),
    ]
    assert ledger[1]["rollout_ids"] == [[64, 71]]
    assert read_run(result.directory).is_complete


def test_a_run_trains_on_after_its_end(first: Path) -> None:
    forked = stalewise.fork(first, settings={"schedule.updates": 6}, name="longer")
    stalewise.run(forked)
    ledger = read_jsonl(forked.directory / "ledger" / "updates.jsonl")
    assert [(line["generation_batch"], line["version"]) for line in ledger[3:]] == [(1, 2), (2, 4), (3, 5)]
    again = stalewise.fork(forked.directory, at=5, settings={"optimizer.learning_rate": 1e-5}, name="third")
    assert [one["run"] for one in read_fork(again.directory)["ancestors"]] == [str(first)]
    stalewise.run(again)
    assert versions(again.directory)[-1] == 6


@pytest.mark.parametrize(("at", "changes"), [(4, {"schedule.updates": 5}), (3, {"sampler.temperature": 0.8})])
def test_fewer_updates_are_left_than_stages(first: Path, at: int, changes: dict[str, Any]) -> None:
    forked = stalewise.fork(first, at=at, settings=changes, name=f"last-of-{at}")
    stalewise.run(forked)
    ledger = read_jsonl(forked.directory / "ledger" / "updates.jsonl")
    assert (ledger[-1]["update"], ledger[-1]["age"]) == (at, 0)  # one stage for the one update that is left


def test_stages_may_become_open_ended_and_counted(first: Path) -> None:
    forked = stalewise.fork(first, at=2, settings={"schedule.end": "spent", "schedule.updates": 8}, name="open")
    stalewise.run(forked)
    stages = read_jsonl(forked.directory / "ledger" / "stages.jsonl")
    # After a past stage of 2 updates the next is planned twice as long; its prompts are new ones.
    assert [(line["first_update"], line["planned_updates"], line["first_prompt"]) for line in stages[:2]] == [
        *((0, 2, 8), (2, 4, 16)),
    ]
    counted = stalewise.fork(
        forked.directory, at=3, settings={"schedule.end": "count", "schedule.stages": 1}, name="back"
    )
    stalewise.run(counted)
    assert read_jsonl(counted.directory / "ledger" / "updates.jsonl")[-1]["age"] == 4  # updates 3 to 7


def test_lineage_is_shown(first: Path) -> None:
    forked = stalewise.fork(first, at=2, settings={"optimizer.learning_rate": 1e-5}, name="shown")
    expected = f"Forked from {first} at version 2 with optimizer.learning_rate = 1e-05 (0.0003)"
    assert expected in describe_lineage(read_run(forked.directory))
    assert expected in call("inspect", forked.directory).stdout
    assert inspect_run(forked.directory)["fork"]["version"] == 2
    page = Path(call("report", forked.directory).stdout.strip()).read_text()
    assert "Forked from" in page
    stalewise.run(forked)
    card = (Path(call("export", forked.directory, first.parent / "exported").stdout.strip()) / "README.md").read_text()
    assert "**Lineage.** Forked from the run first at version 2 with optimizer.learning_rate" in card
    assert str(first.parent) not in card


def test_prompts_of_the_run_before_were_seen(tmp_path: Path, first: Path) -> None:
    forked = stalewise.fork(first, at=2, settings={"task.name": "arithmetic-steps"}, name="other-task")
    assert (forked.directory / "rollouts" / "g000000-v000000").is_dir()
    assert not (forked.directory / "eval.jsonl").exists()  # of another task
    seen = seen_in_training(forked.directory)
    assert any(name.startswith("arithmetic/") for name in seen.ids)
    assert any(name.startswith("arithmetic-steps/") for name in seen.ids)


def test_bad_input_is_one_message_and_makes_nothing(first: Path, tmp_path: Path) -> None:
    before = sorted(path.name for path in first.parent.iterdir())
    assert "has no checkpoint of version 9; it has 0, 1, 2, 3, 4" in refused("fork", first, "--at", 9)
    assert "is not a run directory" in refused("fork", tmp_path)
    assert "did you mean" in refused("fork", first, "--set", "optimizer.learning_rat=1")
    assert "no such setting" in refused("fork", first, "--at", 1, "--unset", "optimizer.rate")
    assert "takes model.path from its checkpoint" in refused("fork", first, "--at", 1, "--set", "model.path=x")
    assert "--name names the fork" in refused("fork", first, "--at", 1, "--set", "name=x")
    assert "nothing is left to train; --set schedule.updates=8" in refused("fork", first)
    assert "exists" in refused("fork", first, "--at", 1, "--name", "first")
    assert sorted(path.name for path in first.parent.iterdir()) == before
    text: Any = "2"
    with pytest.raises(StoreError, match=r"version '2' is not a whole number; .* has 0, 1, 2, 3, 4"):
        stalewise.fork(first, at=text)
    with pytest.raises(ConfigError, match="bfloat16-only"):
        stalewise.fork(first, at=1, settings={"model.precision": "bfloat16-only"})


def test_a_damaged_checkpoint_is_not_forked(first: Path, tmp_path: Path) -> None:
    run = shutil.copytree(first, tmp_path / "first")
    path = checkpoint_directory(run, 2) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(StoreError, match="is damaged or missing"):
        stalewise.fork(run, at=2)
    assert [path.name for path in tmp_path.iterdir()] == ["first"]


def test_the_refusal_of_a_changed_config_names_the_fork_that_works(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    record = tiny_record(Path("runs"), checkpoints={"every": 1, "keep": 20})
    assert call("train", write_config(tmp_path / "a.toml", record)).exit_code == 0
    record["sampler"] |= {"max_new_tokens": 6}
    record["schedule"] |= {"updates": 6}
    message = refused("train", write_config(tmp_path / "a.toml", record))
    command = message.partition("`")[2].partition("`")[0]
    expected = "stalewise fork runs/tiny --at 4 --set schedule.updates=6 --set sampler.max_new_tokens=6"
    assert command == expected
    assert call(*command.split()[1:]).exit_code == 0
    assert called_json("train", "runs/tiny-v4")["updates"] == 6
    assert read_config("runs/tiny-v4").sampler.max_new_tokens == 6
    record["schedule"] |= {"updates": 4}  # the run is finished: its last version has nothing to train on
    message = refused("train", write_config(tmp_path / "a.toml", record))
    command = message.partition("`")[2].partition("`")[0]
    assert command == "stalewise fork runs/tiny --at 3 --set sampler.max_new_tokens=6"
    assert call(*command.split()[1:]).exit_code == 0


def test_some_settings_change_in_place_and_are_journaled(tmp_path: Path) -> None:
    config = config_of(tmp_path, "short")
    stalewise.run(config)
    before = weights(config.directory, 2)
    record = config.model_dump(mode="json")
    record["evaluation"] |= {"every": 1, "samples": 3}
    record["checkpoints"] |= {"keep": 5}
    stalewise.run(make_config(record))
    (line,) = [line for line in read_jsonl(config.directory / "journal.jsonl") if line["event"] == "config"]
    assert line["changes"] == {"checkpoints.keep": [20, 5], "evaluation.every": [0, 1], "evaluation.samples": [2, 3]}
    assert line["version"] == 2
    assert weights(config.directory, 2) == before
    assert read_config(config.directory).evaluation.every == 1
    assert "evaluation.every = 1 (0)" in call("inspect", config.directory).stdout
    assert "At version 2 was changed: checkpoints.keep = 5 (20)" in describe_lineage(read_run(config.directory))
    stalewise.run(make_config(record))  # again, without a change
    assert [line["event"] for line in read_jsonl(config.directory / "journal.jsonl")].count("config") == 1


def test_while_nothing_was_trained_settings_may_change(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    with contextlib.closing(Orchestrator(config, NullCallback())) as started:
        started.prepare()
        assert started.step()  # evaluates version 0
    record = config.model_dump(mode="json")
    record["sampler"]["max_new_tokens"] = 6
    stalewise.generate(make_config(record))
    assert not read_jsonl(config.directory / "eval.jsonl")  # of longer responses
    record["optimizer"]["learning_rate"] = 1e-3  # rollouts do not depend on it
    stalewise.generate(make_config(record))
    record["sampler"]["max_new_tokens"] = 5
    with pytest.raises(
        StoreError, match=r"fork .*/first --at 0 --set sampler.max_new_tokens=5` continues from version 0"
    ):
        stalewise.generate(make_config(record))
    record["sampler"]["max_new_tokens"] = 6
    assert stalewise.run(make_config(record)).updates == 4
    assert read_jsonl(config.directory / "metrics.jsonl")[0]["learning_rate"] == 1e-3


def test_another_model_before_anything_was_generated(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    with contextlib.closing(Orchestrator(config, NullCallback())) as started:
        started.prepare()
    other = config_of(tmp_path, task={"name": "arithmetic-steps"}, model={"path": "arithmetic-steps", "threads": 1})
    with contextlib.closing(Orchestrator(other, NullCallback())) as started:
        started.prepare()
    assert read_state(checkpoint_directory(config.directory, 0))["source"] == "arithmetic-steps"


def killed(run: Path, fsyncs: int, train: bool = False) -> None:
    """Fork, or train a fork, in a process that ends itself before its n-th fsync."""
    real, left = os.fsync, [fsyncs]

    def fsync(descriptor: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        real(descriptor)

    os.fsync = fsync
    if train:
        torch.set_num_threads(1)
        stalewise.run(read_config(run))
    else:
        forks.fork(run, at=2, name="killed")


@pytest.mark.slow
def test_a_killed_fork_leaves_nothing_or_all(first: Path) -> None:
    target, ends = first.parent / "killed", set[int | None]()
    for fsyncs in (0, 3, 12, 25, 10_000):
        process = CONTEXT.Process(target=killed, args=(first, fsyncs))
        process.start()
        process.join()
        ends.add(process.exitcode)
        assert target.exists() == (process.exitcode == 0)
    assert ends == {-signal.SIGKILL, 0}
    assert not list(first.parent.glob(".killed*"))  # the last one removed what the others had left
    for fsyncs in (8, 60):  # before and after its first checkpoint
        process = CONTEXT.Process(target=killed, args=(target, fsyncs, True))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    assert versions(target) == [2, 3]  # the second one had come as far
    stalewise.run(read_config(target))
    assert weights(target, 4) == weights(first, 4)


def test_past_batches_follow_from_the_ledger() -> None:
    entries = [LedgerEntry(u, g, v, u - v, ()) for u, g, v in ((0, 0, 0), (1, 0, 0), (2, 1, 0), (3, 2, 2))]
    past = forks.past_batches(entries)
    assert [(one.generation_batch, one.first_update, one.planned_updates, one.version) for one in past] == [
        *((0, 0, 2, 0), (1, 2, 1, 0), (2, 3, 1, 2)),
    ]


def test_files_are_copied_where_they_cannot_be_linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_text("content")
    (tmp_path / "a" / ".b.tmp-1").write_text("half")

    def link(source: Path, target: Path) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", link)
    forks.link_tree(tmp_path / "a", tmp_path / "c")
    assert [(path.name, path.read_text()) for path in (tmp_path / "c").iterdir()] == [("b", "content")]
