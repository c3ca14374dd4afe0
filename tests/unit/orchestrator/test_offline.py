"""Training on rollouts that exist already."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from callbacks import Listener, StopAt
from stalewise.api import learn
from stalewise.config import RunConfig, make_config
from stalewise.errors import ConfigError, ModelError, StoreError
from stalewise.models import EMBEDDED
from stalewise.orchestrator.offline import SourceBatch
from stalewise.staleness.schedule import ListedSchedule
from stalewise.store import (
    batch_directories,
    consumed,
    from_ranges,
    ledger_path,
    read_ledger,
    truncate_ledger,
)
from stalewise.store.atomic import read_json, sha256_file
from stalewise.store.checkpoints import checkpoint_directory, versions
from stalewise.store.json_lines import read_jsonl
from tiny import tiny_record


def weights(config: RunConfig, version: int) -> str:
    return sha256_file(checkpoint_directory(config.directory, version) / "model.safetensors")


def steps(config: RunConfig) -> list[tuple[int, int, int, int]]:
    entries = read_ledger(ledger_path(config.directory))
    return [(entry.update, entry.generation_batch, entry.version, entry.age) for entry in entries]


def rollouts_of(config: RunConfig) -> list[Path]:
    return batch_directories(config.directory / "rollouts")


def test_learning_again_as_before_gives_the_same_policy_and_leaves_the_rollouts_alone(
    tiny_run: RunConfig, runs: Path
) -> None:
    before = {path: sha256_file(path) for path in tiny_run.directory.rglob("*") if path.is_file()}
    again = make_config(tiny_record(runs, "again"))
    result = learn(again, [tiny_run.directory])
    assert weights(again, 4) == weights(tiny_run, 4)
    assert steps(again) == steps(tiny_run) == [(0, 0, 0, 0), (1, 0, 0, 1), (2, 1, 2, 0), (3, 1, 2, 1)]
    assert result.updates == 4
    assert result.seconds["generate"] == 0
    assert not (again.directory / "rollouts").exists()
    assert [record["version"] for record in result.evaluations] == [0, 4]
    assert {path: sha256_file(path) for path in tiny_run.directory.rglob("*") if path.is_file()} == before


def test_learning_goes_on_where_it_was_interrupted(tiny_run: RunConfig, runs: Path) -> None:
    whole = make_config(tiny_record(runs, "whole", objective={"name": "p3o"}))
    learn(whole, [tiny_run.directory])
    parts = make_config(tiny_record(runs, "parts", objective={"name": "p3o"}))
    with pytest.raises(KeyboardInterrupt):
        learn(parts, [tiny_run.directory], callback=StopAt(3))
    assert versions(parts.directory) == [0, 2]
    assert len(steps(parts)) == 4  # the last two are not in a checkpoint and are taken again
    learn(parts, [tiny_run.directory])
    assert steps(parts) == steps(whole)
    assert weights(parts, 4) == weights(whole, 4) != weights(tiny_run, 4)
    assert [record["update"] for record in read_jsonl(parts.directory / "metrics.jsonl")] == [0, 1, 2, 3]


def test_what_a_run_has_not_learned_from_can_be_learned_from_alone(tiny_run: RunConfig, runs: Path) -> None:
    source = runs / "stopped"
    shutil.copytree(tiny_run.directory, source)
    truncate_ledger(ledger_path(source), 1)  # as if the rollouts of the first stage had been spent after one update
    used = read_ledger(ledger_path(source))
    rest = make_config(tiny_record(runs, "rest"))
    said = Listener()
    assert learn(rest, [source], unused=True, callback=said).updates == 3
    assert [step[:2] for step in steps(rest)] == [(0, 0), (1, 1), (2, 1)]
    before, after = (consumed(entries, 0) for entries in (used, read_ledger(ledger_path(rest.directory))))
    assert not set(from_ranges(before)) & set(from_ranges(after))
    learn(rest, [source], unused=True)  # it is done, and of the same rollouts
    with pytest.raises(StoreError, match="learned from other rollouts"):
        learn(rest, [source])
    with pytest.raises(ConfigError, match="more than the groups that its run has not learned from"):
        learn(make_config(tiny_record(runs, "none")), [tiny_run.directory], unused=True)
    elsewhere = runs / "alone" / rollouts_of(tiny_run)[0].name
    shutil.copytree(rollouts_of(tiny_run)[0], elsewhere)
    with pytest.raises(StoreError, match="lies in no run"):
        learn(make_config(tiny_record(runs, "none")), [elsewhere], unused=True)
    short = make_config(tiny_record(runs, "short", schedule={"kind": "staged", "updates": 3, "stages": 1}))
    learn(short, [tiny_run.directory], callback=(heard := Listener()))
    told = "these rollouts would serve 4 updates: 3 are taken, as schedule.updates says"
    assert told in heard.said and not any("would serve" in text for text in said.said)


def test_ages_are_counted_from_the_checkpoint_in_the_run_that_made_the_rollouts(
    tiny_run: RunConfig, runs: Path
) -> None:
    later = make_config(tiny_record(runs, "later"))
    learn(later, [tiny_run.directory], checkpoint=checkpoint_directory(tiny_run.directory, 2))
    # From version 2: batch 0 of version 0 is 2 updates behind at the start; batch 1 of version 2 is as old as the run.
    assert steps(later) == [(0, 0, -2, 2), (1, 0, -2, 3), (2, 1, 0, 2), (3, 1, 0, 3)]
    metrics = read_jsonl(later.directory / "metrics.jsonl")
    assert [record["age_max"] for record in metrics] == [record["age_mean"] for record in metrics] == [2, 3, 2, 3]
    assert weights(later, 4) != weights(tiny_run, 4)
    sources = read_json(later.directory / "sources.json")
    assert [(batch["version"], batch["counts_as_version"]) for batch in sources["batches"]] == [(0, -2), (2, 0)]
    with pytest.raises(StoreError, match="learned from other rollouts or from another checkpoint"):
        learn(later, [tiny_run.directory])


def test_rollouts_of_a_later_policy_count_as_fresh(tiny_run: RunConfig, runs: Path) -> None:
    # Version 2 made them, the policy that learns is version 0 and one update: the age must not be negative.
    config = make_config(tiny_record(runs, "early", schedule={"updates": 1, "stages": 1}))
    learn(config, [rollouts_of(tiny_run)[1]])
    assert steps(config) == [(0, 0, 0, 0)]


def test_rollouts_of_unknown_origin_count_as_made_at_the_start(tiny_run: RunConfig, runs: Path, tmp_path: Path) -> None:
    copied = tmp_path / "copied" / rollouts_of(tiny_run)[1].name
    shutil.copytree(rollouts_of(tiny_run)[1], copied)
    config = make_config(tiny_record(runs, "other", batch={"prompts": 3}))
    learn(config, [copied])
    # 8 groups make 2 updates of 3; two groups are left over.
    assert steps(config) == [(0, 0, 0, 0), (1, 0, 0, 1)]
    assert {record["rollouts"] for record in read_jsonl(config.directory / "metrics.jsonl")} == {12}
    moved = tmp_path / "moved"
    copied.parent.rename(moved)
    learn(config, [moved / copied.name])  # they may move, as long as they are the same


def test_what_cannot_be_learned_from(tiny_run: RunConfig, runs: Path, tmp_path: Path) -> None:
    config = make_config(tiny_record(runs, "new"))
    batch = rollouts_of(tiny_run)[0]
    for rollouts, error, message in (
        ([tmp_path / "none"], StoreError, "does not exist"),
        ([tmp_path], StoreError, "is neither a run nor a generation batch: name the directory of a run, or a batch in"),
        ([batch.parent], StoreError, f"name the run that it belongs to, {tiny_run.directory}, or a batch in its"),
        ([batch / "manifest.json"], StoreError, f"name the run that it belongs to, {tiny_run.directory}"),
        ([tiny_run.directory / "checkpoints"], StoreError, f"name the run that it belongs to, {tiny_run.directory}"),
        ([tiny_run.directory.parent], StoreError, f"name a run in it, such as {tiny_run.directory.parent}/\\w+, or"),
        ([tiny_run.directory, batch], StoreError, "named twice"),
    ):
        with pytest.raises(error, match=message):
            learn(config, rollouts)
    with pytest.raises(StoreError, match="choose another name for the new run"):
        learn(tiny_run, [tiny_run.directory])
    with pytest.raises(ConfigError, match=r"batch.prompts is 9, more than the groups of any batch"):
        learn(make_config(tiny_record(runs, "new", batch={"prompts": 9})), [tiny_run.directory])
    with pytest.raises(ConfigError, match="objective: no objective is called 'grpoo'; did you mean grpo"):
        learn(make_config(tiny_record(runs, "new", objective={"name": "grpoo"})), [tiny_run.directory])
    (tmp_path / "empty" / "rollouts").mkdir(parents=True)
    with pytest.raises(StoreError, match="has no committed generation batch yet"):
        learn(config, [tmp_path / "empty"])
    assert not config.directory.exists()


def test_a_run_of_its_own_is_not_learned_into(tiny_run: RunConfig, runs: Path) -> None:
    shutil.copytree(tiny_run.directory, runs / "own")
    with pytest.raises(StoreError, match="is a run with rollouts of its own"):
        learn(make_config(tiny_record(runs, "own")), [tiny_run.directory])


def test_rollouts_of_another_tokenizer_are_refused(tiny_run: RunConfig, runs: Path, tmp_path: Path) -> None:
    policy = tmp_path / "policy"
    shutil.copytree(EMBEDDED / "arithmetic", policy)
    config = make_config(tiny_record(runs, "mixed", model={"path": str(policy)}))
    tokenizer = read_json(policy / "tokenizer.json")
    vocabulary = tokenizer["model"]["vocab"]
    # Every digit becomes the next one: all ids are known, and all of them mean something else.
    for digit in range(10):
        vocabulary[str(digit)] = 3 + (digit + 1) % 10
    (policy / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ModelError, match="were made with another tokenizer"):
        learn(config, [tiny_run.directory])
    settings = read_json(policy / "config.json") | {"vocab_size": 5}
    (policy / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match=r"holds token \d+, but the vocabulary of .* ends at 4"):
        learn(config, [tiny_run.directory])
    assert versions(config.directory) == []


def test_damaged_rollouts_have_to_be_repaired_where_they_were_made(
    tiny_run: RunConfig, runs: Path, tmp_path: Path
) -> None:
    copied = tmp_path / rollouts_of(tiny_run)[0].name
    shutil.copytree(rollouts_of(tiny_run)[0], copied)
    shard = copied / "shard-00000.parquet"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    config = make_config(tiny_record(runs, "damaged"))
    with pytest.raises(StoreError, match=r"is damaged.*with the command of the run that made it"):
        learn(config, [copied])
    assert versions(config.directory) == []


def test_a_rollouts_version_is_counted_from_the_starting_policy() -> None:
    def source(version: int, start: int | None, first_update: int, updates: int) -> SourceBatch:
        manifest: Any = SimpleNamespace(version=version, generation_batch=0, shards=[])
        return SourceBatch(0, first_update, updates, Path("batch"), manifest, start, 8)

    sources = (source(0, 2, 0, 2), source(6, 2, 2, 3), source(6, None, 5, 1))
    schedule = ListedSchedule(6, 6, stages=sources)
    assert [(s.generation_batch, s.version, s.age) for s in schedule.steps()] == [
        (0, -2, 2),
        (0, -2, 3),
        (1, 2, 0),  # of a later policy: fresh when its batch is used
        (1, 2, 1),
        (1, 2, 2),
        (2, 0, 5),  # of another run
    ]
    with pytest.raises(IndexError, match="update is 6; no stage of a run of 6 updates has begun there"):
        schedule.at(6)
