"""Runs that find their stages themselves, and the stages on disk."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from callbacks import StopAt
from stalewise.api import generate, learn, run
from stalewise.config import RunConfig, ScheduleSection, make_config
from stalewise.errors import ConfigError
from stalewise.orchestrator.stages import begin_stage, forget_stages, read_schedule
from stalewise.staleness.spent import HEADROOM, useful_share
from stalewise.store import (
    batch_directories,
    consumed,
    ledger_path,
    open_batch,
    read_ledger,
)
from stalewise.store.checkpoints import versions
from stalewise.store.json_lines import read_jsonl
from tiny import tiny_record

SPENT = {"kind": "staged", "updates": 20, "stages": None, "end": "spent", "spent_ess": 0.995}


def made(runs: Path, name: str = "run", **changes: Mapping[str, Any]) -> RunConfig:
    return make_config(tiny_record(runs, name, **{"optimizer": {"learning_rate": 1e-3}, **changes}))


@pytest.fixture(scope="module")
def spent_run(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    config = made(tmp_path_factory.mktemp("runs"), schedule=SPENT)
    run(config)
    return config


def test_a_stage_ends_when_its_rollouts_are_spent_and_says_why(spent_run: RunConfig) -> None:
    stages = read_jsonl(spent_run.directory / "ledger" / "stages.jsonl")
    metrics = read_jsonl(spent_run.directory / "metrics.jsonl")
    assert [record["update"] for record in metrics] == list(range(20))
    spent = [stage for stage in stages if stage["ended"] and stage["ended"]["reason"] == "effective sample size"]
    assert spent
    for stage in spent:
        before = stages[stage["generation_batch"] - 1]
        used = stage["first_update"] - before["first_update"]
        assert used < before["planned_updates"]
        taken = [record for record in metrics if record["update"] < stage["first_update"]][-3:]
        last = [useful_share(record["ess"], record["kl_behaviour_policy"]) for record in taken]
        assert stage["ended"]["ess"] == sorted(last)[1] < stage["ended"]["bound"] == 0.995
        assert stage["planned_updates"] <= math.ceil(HEADROOM * used)
    assert max(record["age_max"] for record in metrics) < 20


def test_the_end_of_the_last_stage_is_on_record_once(spent_run: RunConfig) -> None:
    path = spent_run.directory / "ledger" / "stages.jsonl"
    before = path.read_bytes()
    *stages, end = read_jsonl(path)
    batches = len(batch_directories(spent_run.directory / "rollouts"))
    assert (len(stages), end["generation_batch"], end["first_update"], end["planned_updates"]) == (batches,) * 2 + (
        20,
        0,
    )
    last = [record["ess"] for record in read_jsonl(spent_run.directory / "metrics.jsonl")][-3:]
    spent = len(last) == 3 and sorted(last)[1] < 0.995
    used_up = {"reason": "all of it was used", "planned_updates": stages[-1]["planned_updates"]}
    assert end["ended"] == used_up or (spent and end["ended"]["ess"] == sorted(last)[1])
    run(spent_run)  # complete: nothing is written again
    assert path.read_bytes() == before


def test_the_end_of_the_last_stage_comes_again_where_a_kill_lost_it(spent_run: RunConfig, runs: Path) -> None:
    config = make_config({**spent_run.model_dump(mode="json"), "runs": str(runs)})
    shutil.copytree(spent_run.directory, config.directory)
    path = config.directory / "ledger" / "stages.jsonl"
    whole = path.read_bytes()
    path.write_bytes(b"".join(whole.splitlines(keepends=True)[:-1]))
    (config.directory / "records.json").unlink()  # it was not yet written
    run(config)
    assert path.read_bytes() == whole


def test_what_a_spent_stage_left_stays_in_the_store_for_learning(spent_run: RunConfig, runs: Path) -> None:
    entries = read_ledger(ledger_path(spent_run.directory))
    batches = [open_batch(directory) for directory in batch_directories(spent_run.directory / "rollouts")]
    ids = [set(batch.column("rollout_id").tolist()) for batch in batches]
    assert sum(map(len, ids)) == len(set.union(*ids))
    used = [sum(last - first + 1 for first, last in consumed(entries, g)) for g in range(len(batches))]
    left = [len(found) - count for found, count in zip(ids, used, strict=True)]
    assert any(left)
    place = batches[left.index(max(left))].directory
    again = made(runs, "again", schedule={"kind": "staged", "updates": 4, "stages": 1})
    assert learn(again, [place]).updates > 0


def test_generating_ahead_begins_the_first_stage(runs: Path) -> None:
    config = made(runs, schedule=SPENT)
    (manifest,) = generate(config)
    assert (manifest.generation_batch, manifest.version, manifest.rows) == (0, 0, 8 * 4 * 4)
    assert generate(config) == []
    assert run(config).updates == 20


def test_what_made_the_present_rollouts_is_never_pruned(runs: Path) -> None:
    schedule = {"kind": "staged", "updates": 20, "stages": None, "end": "spent"}
    config = made(runs, schedule=schedule, checkpoints={"every": 2, "keep": 1})

    with pytest.raises(KeyboardInterrupt):
        run(config, StopAt(14))
    stages = read_jsonl(config.directory / "ledger" / "stages.jsonl")
    assert versions(config.directory) == [stages[-1]["first_update"], 14]


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ({"end": "spent", "stages": 4}, "remove stages"),
        ({"end": "spent", "kind": "synchronous"}, 'set kind = "staged"'),
        ({"spent_ess": 0.5}, "no meaning without end"),
        ({"end": "spent", "spent_ess": 1.0}, "less than 1"),
        ({"kind": "pipelined", "lag": 0}, "greater than or equal to 1"),
        ({"kind": "pipelined", "lag": 99}, "less than or equal to 8"),
        ({"kind": "staged", "generator_device": "cuda:1"}, "no meaning in a staged schedule"),
    ],
)
def test_contradictions_of_a_schedule(schedule: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config({"schedule": schedule})


def test_stages_on_disk_are_those_of_the_schedule(tmp_path: Path) -> None:
    path, section = tmp_path / "stages.jsonl", ScheduleSection(updates=20, end="spent")
    schedule = read_schedule(section, path)
    spent = {"reason": "effective sample size"}
    for version, reason in ((0, None), (4, None), (8, None), (12, spent)):
        schedule = begin_stage(schedule, path, version, spent=lambda reason=reason: reason, per_update=4)
    assert [(line["first_update"], line["planned_updates"]) for line in read_jsonl(path)] == [(0, 8), (8, 12), (12, 5)]
    used_up = {"reason": "all of it was used", "planned_updates": 8}
    assert [line["ended"] for line in read_jsonl(path)] == [None, used_up, spent]
    assert read_schedule(section, path) == schedule
    schedule = forget_stages(schedule, path, 8)
    assert read_schedule(section, path) == schedule and schedule.generation_batches == 2


def test_a_fixed_schedule_has_no_stages_on_disk(tmp_path: Path) -> None:
    path = tmp_path / "stages.jsonl"
    schedule = read_schedule(ScheduleSection(updates=20, stages=2), path)

    def never() -> None:
        raise AssertionError("no checkpoint is read")

    assert begin_stage(schedule, path, 10, spent=never, per_update=4) is schedule
    assert forget_stages(schedule, path, 3) is schedule
    assert not path.exists()
