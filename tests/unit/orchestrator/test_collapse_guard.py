"""Runs that collapse are rolled back and continue."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from callbacks import Listener
from stalewise.api import learn, run
from stalewise.config import RunConfig, make_config
from stalewise.config.run_directory import schedule_of
from stalewise.errors import ConfigError, StoreError
from stalewise.orchestrator.collapse_guard import Collapsed, CollapseGuard
from stalewise.orchestrator.run_log import RunLog
from stalewise.staleness.collapse import Assessment, Degradation
from stalewise.store import (
    batch_directories,
    checkpoints,
    open_batch,
)
from stalewise.store.atomic import read_json, write_json_atomic
from stalewise.store.checkpoints import checkpoint_directory, versions
from stalewise.store.json_lines import read_jsonl
from stalewise.trainer.trainer import NonFiniteUpdate
from tiny import tiny_record

RUINOUS = {"learning_rate": 1e-2}


JUDGED = {"every": 4, "prompts": 16, "samples": 2}


def made(runs: Path, name: str = "run", **changes: Mapping[str, Any]) -> RunConfig:
    return make_config(tiny_record(runs, name, **{"optimizer": {"learning_rate": 1e-3}, **changes}))


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, Listener]:
    guard = {"action": "both", "window": 4, "rollbacks": 8}
    schedule = {"updates": 8, "stages": 2}
    runs = tmp_path_factory.mktemp("runs")
    config = made(runs, optimizer=RUINOUS, guard=guard, schedule=schedule, evaluation=JUDGED)
    listener = Listener()
    run(config, listener)
    return config, listener


def test_a_run_that_collapses_is_taken_back_and_goes_on(guarded: tuple[RunConfig, Listener]) -> None:
    config, listener = guarded
    places = sorted((config.directory / "rollbacks").iterdir())
    assert len(places) > 1 and len([text for text in listener.said if "back to version" in text]) == len(places)
    for number, place in enumerate(places):
        record = read_json(place / "rollback.json")
        assert record["learning_rate_factor"] == 0.5 ** (number + 1)
        assert record["to_version"] < record["update"] <= record["from_version"]
        tail = read_jsonl(place / "metrics.jsonl")
        assert [one["update"] for one in tail] == list(range(record["to_version"], record["from_version"]))
        assert {directory.name for directory in batch_directories(place / "rollouts")} == set(record["batches"])
        assert record["led_there"]
    metrics = read_jsonl(config.directory / "metrics.jsonl")
    assert [record["update"] for record in metrics] == list(range(8))
    assert metrics[-1]["learning_rate"] == pytest.approx(1e-2 * 0.5 ** len(places))
    journal = read_jsonl(config.directory / "journal.jsonl")
    assert sum(record["event"] == "rollback" for record in journal) == len(places)
    accuracies = [record["accuracy"]["value"] for record in read_jsonl(config.directory / "eval.jsonl")]
    assert accuracies[-1] > 0


def test_a_rollback_leaves_no_record_of_a_removed_checkpoint_at_any_moment(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard, schedule = {"action": "both", "window": 4, "rollbacks": 8}, {"updates": 8, "stages": 2}
    config = made(runs, optimizer=RUINOUS, guard=guard, schedule=schedule, evaluation=JUDGED)

    def killed(directory: Path, last: int) -> None:
        evaluated = [record["version"] for record in read_jsonl(directory / "eval.jsonl")]
        assert max(evaluated) <= last < versions(directory)[-1]
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(checkpoints, "remove_after", killed)
        run(config)
    run(config)
    assert versions(config.directory)[-1] == 8


def test_rollouts_that_are_made_anew_are_other_rollouts(guarded: tuple[RunConfig, Listener]) -> None:
    config, _ = guarded
    place = sorted((config.directory / "rollbacks").iterdir())[0]
    name = f"g{read_json(place / 'rollback.json')['fresh_from_batch']:06d}"
    (old,) = (place / "rollouts").glob(f"{name}-*")
    (new,) = (config.directory / "rollouts").glob(f"{name}-*")
    assert old.name == new.name  # by the same policy, for the same updates
    seeds = [{rollout.seed for rollout in open_batch(directory).iter_rollouts()} for directory in (old, new)]
    assert not seeds[0] & seeds[1]


def test_halving_alone_learns_from_the_same_rollouts_again(runs: Path) -> None:
    guard = {"action": "halve", "window": 4, "rollbacks": 8}
    config = made(
        runs, optimizer=RUINOUS, guard=guard, schedule={"updates": 8, "stages": 1}, evaluation={**JUDGED, "every": 4}
    )
    run(config)
    records = [read_json(path) for path in sorted(config.directory.glob("rollbacks/*/rollback.json"))]
    assert records and all(record["batches"] == [] and record["led_there"] == [0] for record in records)
    generated = [one for one in read_jsonl(config.directory / "journal.jsonl") if one["event"] == "generate"]
    assert len(generated) == 1


def test_a_guard_that_stops_says_where_the_last_good_policy_is(runs: Path) -> None:
    config = made(
        runs,
        optimizer=RUINOUS,
        guard={"action": "stop", "window": 4},
        schedule={"updates": 12, "stages": 3},
        evaluation=JUDGED,
    )
    with pytest.raises(Collapsed, match=r"the run collapsed: .* the last policy known to be good is version \d+"):
        run(config)
    assert Collapsed.exit_code == 4
    with pytest.raises(Collapsed):  # and says it again
        run(config)


def test_a_run_is_taken_back_only_so_often(runs: Path) -> None:
    config = made(
        runs,
        optimizer={"learning_rate": 1.0},
        guard={"action": "fresh", "window": 4, "rollbacks": 2},
        schedule={"updates": 12, "stages": 3},
        evaluation=JUDGED,
    )
    with pytest.raises(Collapsed, match=r"once more after 2 rollbacks: .*lower optimizer.learning_rate"):
        run(config)
    assert len(list((config.directory / "rollbacks").iterdir())) == 2
    assert checkpoint_directory(config.directory, 0).is_dir()  # the last good policy is never pruned


def test_a_policy_that_a_run_got_worse_from_again_is_not_taken_twice(runs: Path) -> None:
    checkpoints_kept = {"every": 2, "keep": 8}
    config = made(runs, guard={"action": "halve"}, schedule={"updates": 6, "stages": 1}, checkpoints=checkpoints_kept)
    run(config)
    guard = CollapseGuard(config.guard, RunLog(config.directory), evaluated_every=0, uses_rewards=True)
    schedule, good = schedule_of(config.schedule, config.directory), Assessment(good=frozenset({0, 2, 4}))
    assert versions(config.directory) == [0, 2, 4, 6]
    assert guard.roll_back(schedule, Degradation("the reward fell", 6), good) == 4
    assert guard.roll_back(schedule, Degradation("the reward fell", 6), good) == 2  # version 4 was tried
    assert guard.roll_back(schedule, Degradation("the reward fell", 6), good) == 0
    assert guard.roll_back(schedule, Degradation("the reward fell", 6), good) == 0  # no other is left


def test_a_run_that_was_killed_after_a_rollback_finds_the_policies_that_it_had(runs: Path) -> None:
    record = tiny_record(runs, "run", guard={"action": "halve"}, schedule={"updates": 6, "stages": 1})
    config = make_config({**record, "checkpoints": {"every": 2, "keep": 8}})
    run(config)
    guard = CollapseGuard(config.guard, RunLog(config.directory), evaluated_every=0, uses_rewards=True)
    schedule, good = schedule_of(config.schedule, config.directory), Assessment(good=frozenset({0, 2, 4}))
    assert guard.roll_back(schedule, Degradation("the reward fell", 6), good) == 4
    assert guard.rollbacks.ended_at(4) and not guard.rollbacks.ended_at(2)

    class Killed(Listener):
        def begin(self, what: str, total: int) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(make_config({**record, "checkpoints": {"every": 2, "keep": 1}}), Killed())
    assert versions(config.directory) == [0, 2, 4]  # to which it may go back, as if it had not been killed


def test_of_policies_that_were_all_tried_the_one_tried_least_is_taken(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = made(runs, guard={"action": "halve"}, schedule={"updates": 6, "stages": 1})
    guard = CollapseGuard(config.guard, RunLog(config.directory), evaluated_every=0, uses_rewards=True)
    monkeypatch.setattr(guard, "_possible_targets", lambda schedule: [0, 2])
    monkeypatch.setattr(guard.rollbacks, "roll_back", lambda *_, **__: None)
    guard.rollbacks.records = [{"to_version": version} for version in (0, 2, 2)]
    schedule, good = schedule_of(config.schedule, config.directory), Assessment(good=frozenset({0, 2}))
    assert guard.roll_back(schedule, Degradation("the reward fell", 6), good) == 0


def test_what_may_be_removed_does_not_depend_on_when_that_is_done(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = made(runs, guard={"action": "halve"}, schedule={"updates": 8, "stages": 1})
    guard = CollapseGuard(config.guard, RunLog(config.directory), evaluated_every=2, uses_rewards=False)
    schedule, on_disk = schedule_of(config.schedule, config.directory), [0, 2, 4]
    monkeypatch.setattr(guard, "_possible_targets", lambda schedule: on_disk)
    for version, accuracy in ((0, 0.4), (2, 0.39)):
        interval = {"value": accuracy, "low": accuracy - 0.01, "high": accuracy + 0.01}
        guard.run_log.evaluations.append({"version": version, "accuracy": interval})
    assert guard.needed_versions(schedule, 4) == {0, 2}
    guard.run_log.evaluations += [{"version": version, "accuracy": interval} for version in (4, 6)]
    on_disk.append(6)
    assert guard.needed_versions(schedule, 4) == {0, 2}
    assert guard.needed_versions(schedule, 6) == {0, 4}


def test_an_update_that_is_not_finite_is_taken_back(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stalewise.trainer.trainer import Trainer

    real, failed = Trainer._metrics, []

    def fail_once(self: Trainer, *arguments: Any) -> dict[str, float]:
        if self.version == 3 and not failed:
            failed.append(self.version)
            raise NonFiniteUpdate("update 3: gradient norm inf")
        return real(self, *arguments)

    monkeypatch.setattr(Trainer, "_metrics", fail_once)
    listener = Listener()
    config = made(runs, guard={"action": "halve"}, schedule={"updates": 4, "stages": 2})
    assert run(config, listener).updates == 4
    record = read_json(config.directory / "rollbacks" / "r000" / "rollback.json")
    assert record["reason"] == "an update was not finite"
    assert record["to_version"] == 2
    assert any("gradient norm inf" in text for text in listener.said)
    failed.clear()
    with pytest.raises(NonFiniteUpdate):  # nobody asked for a guard
        run(made(runs, "unguarded", schedule={"updates": 4, "stages": 2}))


def test_learning_again_can_be_taken_back_and_only_by_accuracy(runs: Path) -> None:
    source = made(runs, "source", schedule={"updates": 6, "stages": 1})
    run(source)
    again = {"optimizer": RUINOUS, "evaluation": {**JUDGED, "every": 2}, "schedule": {"updates": 6, "stages": 1}}
    config = made(runs, "again", guard={"action": "halve", "window": 2, "rollbacks": 8}, **again)
    result = learn(config, [source.directory])
    assert result.updates == 6
    records = [read_json(path) for path in sorted(config.directory.glob("rollbacks/*/rollback.json"))]
    assert records and {record["reason"] for record in records} == {"held-out accuracy fell"}
    assert [record["update"] for record in read_jsonl(config.directory / "metrics.jsonl")] == list(range(6))
    with pytest.raises(ConfigError, match="`learn` generates nothing: use "):
        learn(made(runs, "fresh", guard={"action": "fresh"}), [source.directory])


def test_settings_newer_than_a_run_count_as_their_defaults(runs: Path) -> None:
    config = made(runs, schedule={"updates": 1, "stages": 1})
    run(config)
    path = config.directory / "config.resolved.json"
    record = read_json(path)
    del record["guard"]
    write_json_atomic(path, record)
    assert run(config).updates == 1
    with pytest.raises(StoreError, match=r"guard.action was 'off' and is 'stop'"):
        run(made(runs, schedule={"updates": 1, "stages": 1}, guard={"action": "stop"}))


def test_a_healthy_run_with_a_guard_is_the_run_without(tiny_run: RunConfig, runs: Path) -> None:
    guarded = made(runs, optimizer={"learning_rate": 3e-4}, guard={"action": "both"})
    run(guarded)
    weights = [checkpoint_directory(config.directory, 4) / "model.safetensors" for config in (tiny_run, guarded)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert not (guarded.directory / "rollbacks").exists()
