"""Staleness as a budget, in small real runs: stages that end when they are spent, rollbacks, two processes."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stalewise.api import generate, learn, run
from stalewise.config import RunConfig, make_config
from stalewise.errors import ConfigError, EngineError, StoreError
from stalewise.models.loading import EMBEDDED
from stalewise.orchestrator.collapse_guard import Collapsed
from stalewise.orchestrator.drift_budget import DriftBudget
from stalewise.orchestrator.orchestrator import Orchestrator
from stalewise.staleness.collapse import Evidence, Judgement, Trouble, judge, rewards_as_evidence
from stalewise.staleness.spent import GROWTH, HEADROOM, Stage, StageSchedule, is_spent, next_stage, remaining_ess
from stalewise.store import batch_directories, consumed, ledger_path, open_batch, read_ledger
from stalewise.store.atomic import read_json, read_jsonl, write_json_atomic
from stalewise.store.checkpoints import checkpoint_directory, versions
from stalewise.trainer.trainer import NonFiniteUpdate
from stalewise.types import NullCallback
from tiny import tiny_record

SPENT = {"kind": "staged", "updates": 20, "stages": None, "end": "spent", "spent_ess": 0.995}
RUINOUS = {"learning_rate": 2e-2}
JUDGED = {"every": 4, "prompts": 16, "samples": 2}


class Listener(NullCallback):
    def __init__(self) -> None:
        self.said: list[str] = []

    def log(self, message: str) -> None:
        self.said.append(message)


def made(runs: Path, name: str = "run", **changes: Mapping[str, Any]) -> RunConfig:
    return make_config(tiny_record(runs, name, **{"optimizer": {"learning_rate": 1e-3}, **changes}))


# ---------------------------------------------------------------- stages that end when they are spent


def test_sizes_of_stages_follow_what_was_used() -> None:
    schedule = StageSchedule(updates=100, updates_per_generation=100)
    first = next_stage(schedule, 0, was_spent=False, per_update=4)
    schedule = StageSchedule(100, 100, stages=(first,))
    grown = next_stage(schedule, first.planned_updates, was_spent=False, per_update=4)
    assert grown.planned_updates == GROWTH * first.planned_updates
    assert grown.first_prompt == 4 * first.planned_updates
    schedule = StageSchedule(100, 100, stages=(first, grown))
    shrunk = next_stage(schedule, grown.first_update + 4, was_spent=True, per_update=4)
    assert shrunk.planned_updates == HEADROOM * 4
    assert shrunk.first_prompt == grown.first_prompt + 4 * grown.planned_updates  # unused prompts are passed over
    assert next_stage(schedule, 98, was_spent=False, per_update=4).planned_updates == 2  # no more than is left


def test_a_stage_without_a_begin_has_no_step() -> None:
    with pytest.raises(IndexError, match="no stage has begun"):
        StageSchedule(updates=4, updates_per_generation=4).at(0)
    assert StageSchedule(10, 10, stages=(Stage(0, 0, 8, 0),)).at(9).age == 9


@pytest.mark.parametrize(
    ("ess", "spent"),
    [
        ([1.0, 0.1, 1.0], False),  # one heavy token is no reason
        ([1.0, 0.1, 0.1], True),
        ([0.1, 0.1], False),  # too few to tell
        ([1.0, 1.0, math.nan], True),  # unknown is not fine
        ([0.8, 0.79, 0.78], False),  # as low as from the start: new rollouts would be no better
        ([0.8, 0.7, 0.6], True),
    ],
)
def test_spent_is_what_the_median_of_the_last_updates_says(ess: list[float], spent: bool) -> None:
    assert is_spent(ess, bound=0.9) == spent


def test_nothing_measured_is_not_known() -> None:
    assert math.isnan(remaining_ess([]))


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
        last = [record["ess"] for record in metrics if record["update"] < stage["first_update"]][-3:]
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


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ({"end": "spent", "stages": 4}, "remove stages"),
        ({"end": "spent", "kind": "synchronous"}, "say kind = staged"),
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


# ---------------------------------------------------------------- the guard


def test_what_is_not_beyond_doubt_is_no_trouble() -> None:
    def evidence(version: int, value: float, error: float, updates: int = 8, is_last: bool = False) -> Evidence:
        return Evidence((version,), updates, value, error, is_last)

    def judged(*found: Evidence) -> Judgement:
        return judge(found, fraction=0.9, window=8, reason="it fell")

    good = evidence(8, 0.9, 0.01)
    doubtful = judged(good, evidence(16, 0.75, 0.04))
    assert doubtful.trouble is None and doubtful.good == {8} and doubtful.poor == {16}  # nobody goes back to that
    last = judged(good, evidence(16, 0.75, 0.04, is_last=True))
    assert last.trouble is not None  # nothing comes after it that could clear it
    assert judged(good, evidence(16, 0.75, 0.2, is_last=True)).trouble is None
    assert judged(good, evidence(16, 0.5, 0.05, updates=4)).trouble is None  # not for long enough
    in_a_row = judged(good, evidence(16, 0.5, 0.05, updates=4), evidence(20, 0.4, 0.05, updates=4))
    assert in_a_row.trouble is not None and in_a_row.trouble.bad_version == 16
    assert in_a_row.good == in_a_row.best == {8}
    came_back = [evidence(16, 0.5, 0.05, updates=4), evidence(20, 0.9, 0.05), evidence(24, 0.4, 0.05, updates=4)]
    assert judged(good, *came_back).trouble is None
    assert judged(evidence(0, -1.0, 0.1), evidence(8, -2.0, 0.1)).trouble is None  # nothing to lose
    assert judged(good, evidence(16, math.nan, 0.1)).trouble is None


def test_what_one_kind_of_evidence_calls_poor_is_not_good() -> None:
    first = Judgement(None, frozenset({0, 8}), frozenset(), frozenset({8}))
    second = Judgement(Trouble("it fell", 16), frozenset({0}), frozenset({8}), frozenset({0}))
    both = first | second
    assert both.trouble == Trouble("it fell", 16)
    assert both.good == {0} and both.best == {0, 8}


@pytest.mark.parametrize(("updates_per_generation", "reward"), [(4, 0.2), (8, 0.2), (4, 0.05), (32, 0.5)])
def test_a_policy_that_stays_as_it_is_is_hardly_ever_called_bad(updates_per_generation: int, reward: float) -> None:
    """128 updates of 32 prompts × 8 rollouts, whose prompts differ in difficulty."""
    alarms = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        found: list[tuple[int, float, float]] = []
        for update in range(128):
            difficulty = rng.beta(reward, 1 - reward, size=32)
            means = rng.binomial(8, difficulty) / 8
            version = update // updates_per_generation * updates_per_generation
            found.append((version, float(means.mean()), float(means.std(ddof=1) / np.sqrt(32))))
        evidence = rewards_as_evidence(found, window=8)
        alarms += judge(evidence, fraction=0.9, window=8, reason="it fell").trouble is not None
    assert alarms <= 2


def test_rewards_without_an_error_prove_nothing() -> None:
    assert rewards_as_evidence([(0, 0.5, math.nan), (0, math.nan, math.nan)], window=1) == []


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, Listener]:
    guard = {"action": "both", "window": 4, "rollbacks": 8}
    schedule = {"updates": 12, "stages": 3}
    runs = tmp_path_factory.mktemp("runs")
    config = made(runs, optimizer=RUINOUS, guard=guard, schedule=schedule, evaluation=JUDGED)
    listener = Listener()
    run(config, listener)
    return config, listener


def test_a_run_that_collapses_is_taken_back_and_goes_on(guarded: tuple[RunConfig, Listener]) -> None:
    config, listener = guarded
    places = sorted((config.directory / "rollbacks").iterdir())
    assert places and len([text for text in listener.said if "back to version" in text]) == len(places)
    for number, place in enumerate(places):
        record = read_json(place / "rollback.json")
        assert record["learning_rate_factor"] == 0.5 ** (number + 1)
        assert record["to_version"] < record["update"] <= record["from_version"]
        tail = read_jsonl(place / "metrics.jsonl")
        assert [one["update"] for one in tail] == list(range(record["to_version"], record["from_version"]))
        assert {directory.name for directory in batch_directories(place / "rollouts")} == set(record["batches"])
        assert record["led_there"]
    metrics = read_jsonl(config.directory / "metrics.jsonl")
    assert [record["update"] for record in metrics] == list(range(12))
    assert metrics[-1]["learning_rate"] == pytest.approx(2e-2 * 0.5 ** len(places))
    journal = read_jsonl(config.directory / "journal.jsonl")
    assert sum(record["event"] == "rollback" for record in journal) == len(places)
    accuracies = [record["accuracy"]["value"] for record in read_jsonl(config.directory / "eval.jsonl")]
    assert accuracies[-1] > 0


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


def test_an_update_that_is_not_finite_is_taken_back(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stalewise.trainer.trainer import Trainer

    real, failed = Trainer._read_step, []

    def fail_once(self: Trainer, *arguments: Any) -> dict[str, float]:
        if self.version == 3 and not failed:
            failed.append(self.version)
            raise NonFiniteUpdate("update 3: gradient norm inf")
        return real(self, *arguments)

    monkeypatch.setattr(Trainer, "_read_step", fail_once)
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
    source = made(runs, "source", schedule={"updates": 10, "stages": 2})
    run(source)
    again = {"optimizer": RUINOUS, "evaluation": {**JUDGED, "every": 2}, "schedule": {"updates": 10, "stages": 2}}
    config = made(runs, "again", guard={"action": "halve", "window": 2, "rollbacks": 8}, **again)
    result = learn(config, [source.directory])
    assert result.updates == 10
    records = [read_json(path) for path in sorted(config.directory.glob("rollbacks/*/rollback.json"))]
    assert records and {record["reason"] for record in records} == {"held-out accuracy fell"}
    assert [record["update"] for record in read_jsonl(config.directory / "metrics.jsonl")] == list(range(10))
    with pytest.raises(ConfigError, match="`learn` generates nothing: use "):
        learn(made(runs, "fresh", guard={"action": "fresh"}), [source.directory])


def test_what_made_the_present_rollouts_is_never_pruned(runs: Path) -> None:
    schedule = {"kind": "staged", "updates": 20, "stages": None, "end": "spent"}
    config = made(runs, schedule=schedule, checkpoints={"every": 2, "keep": 1})

    class Stop(NullCallback):
        def metrics(self, update: int, record: dict[str, Any]) -> None:
            if update == 14:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(config, Stop())
    stages = read_jsonl(config.directory / "ledger" / "stages.jsonl")
    assert versions(config.directory) == [stages[-1]["first_update"], 14]


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


# ---------------------------------------------------------------- the budget


def test_the_budget_warns_once_before_each_limit() -> None:
    said: list[str] = []
    budget = DriftBudget((1.0, 4.0), said.append)
    assert budget.measure(0.5, 0.0) == {"batch_drift": 0.5, "batch_budget": 0.5, "horizon_budget": 0.125}
    assert not said
    budget.measure(0.9, 0.0)
    budget.measure(0.95, 0.0)
    assert len(said) == 1 and "90% of the drift" in said[0] and "smaller stages" in said[0]
    budget.measure(3.5, 2.4)
    assert len(said) == 2 and "in all" in said[1]
    assert DriftBudget.note({"batch_budget": 0.43, "horizon_budget": 0.12}) == "  budget 43% of batch, 12% of run"


def test_the_budget_warns_where_one_more_step_would_cross_a_limit() -> None:
    said: list[str] = []
    budget = DriftBudget((1.0, 100.0), said.append)
    budget.measure(0.3, 0.0)
    assert not said  # what was used before the first look is not known to be one step
    budget.measure(0.7, 0.0)
    assert len(said) == 1 and "70% of the drift" in said[0]


def test_a_stage_whose_rollouts_have_lost_half_their_worth_is_told_once() -> None:
    said: list[str] = []
    budget = DriftBudget(None, said.append)
    falling = [1.0, 0.9, 0.8, 0.6, 0.45, 0.4, 0.3]
    for seen in range(len(falling)):
        budget.look_at(falling[: seen + 1])
    assert len(said) == 1 and "worth 45% of what they were" in said[0] and 'schedule.end = "spent"' in said[0]
    DriftBudget(None, said.append).look_at(falling)  # another sitting, in the same stage
    DriftBudget(None, said.append).look_at([0.5, 0.5, 0.5, 0.5])  # low from the start: not age
    DriftBudget(None, said.append).look_at([])
    assert len(said) == 1


def test_a_warning_of_an_earlier_sitting_is_not_repeated(runs: Path) -> None:
    config = made(runs, evaluation={"every": 2})
    limits = {"format": "stalewise.limits/1", "limits": [1e-6, 1e-6]}  # any update is beyond them
    write_json_atomic(config.directory / "limits.json", limits)
    first, second = Listener(), Listener()
    orchestrator = Orchestrator(config, first)
    orchestrator.prepare()
    while versions(config.directory) != [0, 2]:
        orchestrator.act()
    orchestrator.close()
    run(config, second)
    warned = [[text for text in listener.said if "of the drift" in text] for listener in (first, second)]
    assert [len(texts) for texts in warned] == [2, 0]


def test_a_budget_that_is_not_known_is_not_shown() -> None:
    found = DriftBudget(None, print).measure(0.5, 0.25)
    assert found["batch_drift"] == 0.25 and math.isnan(found["batch_budget"]) and math.isnan(found["horizon_budget"])
    assert DriftBudget.note(found) == ""
    said: list[str] = []
    half = DriftBudget((0.0, 1.0), said.append).measure(0.95, 0.0)  # one of two
    assert math.isnan(half["batch_budget"]) and DriftBudget.note(half) == "  budget 95% of run"
    assert len(said) == 1 and "in all" in said[0]


def test_drift_within_a_batch_is_counted_from_the_policy_that_made_it(tiny_run: RunConfig) -> None:
    metrics = read_jsonl(tiny_run.directory / "metrics.jsonl")
    assert [record["batch_drift"] for record in metrics[:2]] == [record["drift"] for record in metrics[:2]]
    assert metrics[2]["batch_drift"] == pytest.approx(metrics[2]["drift"] - metrics[1]["drift"])


# ---------------------------------------------------------------- two processes


PIPELINED = {"kind": "pipelined", "updates": 6, "stages": None, "updates_per_generation": 2, "lag": 1}


def test_generation_and_learning_run_side_by_side(runs: Path) -> None:
    config = made(runs, schedule=PIPELINED, checkpoints={"every": 32, "keep": 1})
    result = run(config)
    made_by = [json.loads((d / "manifest.json").read_text()) for d in batch_directories(config.directory / "rollouts")]
    assert [(one["generation_batch"], one["version"]) for one in made_by] == [(0, 0), (1, 0), (2, 2)]
    ours, theirs = (read_jsonl(config.directory / name) for name in ("journal.jsonl", "journal-generator.jsonl"))
    assert {"learn", "wait"} <= {record["event"] for record in ours}
    assert "generate" not in {record["event"] for record in ours}
    assert {record["event"] for record in theirs} == {"generate", "wait"}
    assert result.seconds["wait"] > 0
    assert [record["age_max"] for record in read_jsonl(config.directory / "metrics.jsonl")] == [0, 1, 2, 3, 2, 3]


def test_a_generator_that_fails_says_why_and_loses_nothing(runs: Path, tmp_path: Path) -> None:
    weightless = tmp_path / "weightless"  # whoever samples from it finds that out
    shutil.copytree(EMBEDDED / "arithmetic", weightless, ignore=shutil.ignore_patterns("*.safetensors"))
    config = made(runs, schedule=PIPELINED, sampler={"foreign": {"path": str(weightless), "share": 0.5}})
    with pytest.raises(EngineError, match=r"the generating process ended: .*weightless.*run the same command again"):
        run(config)
    assert "Fatal" not in (config.directory / "generator.log").read_text()


def test_a_generator_that_is_killed_is_one_message(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stalewise.orchestrator.pipelined import PipelinedOrchestrator

    start = PipelinedOrchestrator._start

    def start_and_kill(self: PipelinedOrchestrator) -> None:
        start(self)
        assert self.process is not None
        self.process.kill()

    config = made(runs, schedule=PIPELINED)
    with monkeypatch.context() as patched:
        patched.setattr(PipelinedOrchestrator, "_start", start_and_kill)
        with pytest.raises(EngineError, match=r"the generating process ended: .*run the same command again"):
            run(config)
    assert generate(config)  # here, as it could be on another machine
    assert run(config).updates == 6
    assert "Fatal" not in (config.directory / "generator.log").read_text()


def test_a_batch_that_was_moved_away_comes_again_though_later_ones_are_there(runs: Path) -> None:
    config = made(runs, schedule=PIPELINED)

    class Stop(NullCallback):
        def metrics(self, update: int, record: dict[str, Any]) -> None:
            if update == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(config, Stop())
    generate(config, batch=2)
    shutil.rmtree(batch_directories(config.directory / "rollouts")[1])
    assert run(config).updates == 6


def test_a_pipelined_run_cannot_have_fresh_rollouts_from_policies_that_are_gone() -> None:
    with pytest.raises(ConfigError, match='use "halve" or "stop"'):
        make_config({"schedule": {"kind": "pipelined"}, "guard": {"action": "both"}})


# ---------------------------------------------------------------- the recipe


def test_the_recipe_fills_in_what_a_config_does_not_say() -> None:
    auto = make_config({"recipe": "auto"})
    assert (auto.schedule.end, auto.guard.action, auto.plan.learning_rate) == (
        "spent",
        "halve",
        "planned-if-calibrated",
    )
    own = make_config({"recipe": "auto", "schedule": {"stages": 2}, "guard": {"rollbacks": 1}, "plan": {"risk": 0.1}})
    assert (own.schedule.end, own.guard.action, own.guard.rollbacks) == ("count", "halve", 1)
    assert make_config(own.model_dump(mode="json")) == own
    with pytest.raises(ConfigError, match="recipe"):
        make_config({"recipe": "magic"})


def test_the_recipe_trains_without_a_calibration_and_says_so(runs: Path) -> None:
    listener = Listener()
    config = make_config({**tiny_record(runs), "schedule": {"updates": 4}, "recipe": "auto"})
    assert run(config, listener).updates == 4
    assert any("optimizer.learning_rate stays 0.0003, as given: no calibration" in text for text in listener.said)
