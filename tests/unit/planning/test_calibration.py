"""Calibrations: what they belong to, what a probe reads from a run, and what a plan says of a config."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from stalewise.config import RunConfig, make_config
from stalewise.errors import CalibrationError, ConfigError
from stalewise.models.loading import EMBEDDED
from stalewise.orchestrator.setup import resolve_learning_rate
from stalewise.planning.calibration import (
    Calibration,
    CalibrationIdentity,
    CalibrationKey,
    CollapseRule,
    Sweep,
    SweepRun,
    calibration_path,
    find_calibration,
    fingerprint_of_files,
    identity_of_config,
    place_of,
    read_calibration,
    save_calibration,
)
from stalewise.planning.costs import Phase, Probe, costs
from stalewise.planning.planner import (
    budget_limits,
    law_learning_rate,
    measured_elsewhere,
    plan_config,
    plan_for_training,
    require_calibration,
)
from stalewise.planning.probe import generation_costs, measure, phases, switching_costs
from stalewise.planning.sweep import fit_sweep
from stalewise.staleness.law import Estimate
from stalewise.store import batch_directories, read_batch_manifest
from stalewise.store.atomic import read_json, read_jsonl, write_json_atomic
from tiny import call, called_json, refused, tiny_record, write_config

PROBE = Probe(
    updates=32,
    phases=[Phase(1, 2, 6.0, 1.0), Phase(3, 32, 2.0, 0.1)],
    reward_mean=0.5,
    reward_variance_within=0.2,
    reward_variance_between=0.05,
    teaching_share=0.9,
    tokens_per_second=1000.0,
    generation_sizes=(64, 320),
    seconds_per_generation=3.0,
    seconds_per_rollout=0.01,
    seconds_per_update=0.5,
    tokens_per_update=100.0,
    seconds_per_switch=2.0,
    seconds_to_start=4.0,
    seconds_per_evaluated_response=0.02,
    peak_memory_bytes=2**29,
    bytes_per_rollout=100.0,
    bytes_per_checkpoint=5000,
)
ENVIRONMENT = {"stalewise": "0", "device": "cpu", "threads": 1}


def sweep_run(staleness: int, rate: float, collapsed_at: int | None = None, seed: int = 0, norm: float = 2.0):
    return SweepRun(staleness, rate, 100, seed, collapsed_at, norm, 0.9, 0.9, f"S{staleness}")


def stable_and_not() -> list[SweepRun]:
    """R_batch is near 0.4 (S·η·G) with G = 2: below it runs survive, above it they collapse at any time."""
    points = [(s, drift, seed) for s in (1, 3, 9) for drift in (0.05, 0.1, 0.2, 0.8, 1.6) for seed in (0, 1)]
    return [
        sweep_run(s, drift / (2.0 * s), None if drift < 0.4 else 1 + 37 * i % 100, seed)
        for i, (s, drift, seed) in enumerate(points)
    ]


SWEEP = fit_sweep(stable_and_not(), CollapseRule(), resamples=0)


def config_at(runs: Path, **changes: Any) -> RunConfig:
    settings: dict[str, Any] = {"schedule": {"kind": "staged", "updates": 100, "stages": 10}}
    return make_config(tiny_record(runs, **{**settings, **changes}))


# ---------------------------------------------------------------- identity and file


def test_what_a_calibration_belongs_to(runs: Path) -> None:
    config = config_at(runs)
    mine = identity_of_config(config)
    other = config_at(runs, schedule={"updates": 7, "stages": 7}, optimizer={"learning_rate": 1.0})
    same = make_config({**other.model_dump(mode="json"), "name": "other", "seed": 5})
    assert mine.differences(identity_of_config(same)) == []
    assert mine.digest == identity_of_config(same).digest
    assert mine.slug == "arithmetic-mu_grpo"
    for section, key, value in (
        ("batch", "prompts", 5),
        ("batch", "group_size", 8),
        ("objective", "name", "grpo"),
        ("optimizer", "weight_decay", 0.1),
        ("optimizer", "betas", [0.9, 0.95]),
        ("optimizer", "max_grad_norm", 2.0),
        ("optimizer", "schedule", "cosine"),
        ("optimizer", "warmup_updates", 3),
        ("optimizer", "step_control", "vcpo"),
        ("sampler", "temperature", 0.5),
        ("sampler", "max_new_tokens", 9),
        ("model", "precision", "bfloat16-only"),
    ):
        other = identity_of_config(config_at(runs, **{section: {key: value}}))
        (difference,) = mine.differences(other)
        assert difference.startswith(f"{section}.{key} is ")
        assert other.digest != mine.digest
    lora = identity_of_config(config_at(runs, model={"lora": {"rank": 4}}))
    assert mine.differences(lora) == ["model.lora.rank is 0 and not 4"]


def test_another_model_under_the_same_name_is_noticed(tmp_path: Path) -> None:
    for place in ("here", "there"):
        shutil.copytree(EMBEDDED / "arithmetic", tmp_path / place / "policy")
    here, there = (config_at(tmp_path, model={"path": str(tmp_path / p / "policy")}) for p in ("here", "there"))
    assert identity_of_config(here) == identity_of_config(there)
    weights = tmp_path / "there" / "policy" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    (difference,) = identity_of_config(here).differences(identity_of_config(there))
    assert difference.startswith("model.fingerprint is ")


def test_a_fingerprint_reads_files_that_are_shorter_than_a_piece(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    first = fingerprint_of_files(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    assert fingerprint_of_files(tmp_path) != first


def test_probe_and_sweep_share_a_file_and_come_back_as_they_were(runs: Path) -> None:
    config = config_at(runs)
    assert find_calibration(config) is None
    path = save_calibration(config, ENVIRONMENT, probe=PROBE)
    assert path.parent == runs / "calibrations"
    assert path.name == f"arithmetic-mu_grpo-{identity_of_config(config).digest}.json"
    assert save_calibration(config, {**ENVIRONMENT, "stalewise": "1"}, sweep=SWEEP) == path
    found = find_calibration(config)
    assert found is not None and found.sweep is not None and found.sweep.fit is not None and SWEEP.fit is not None
    places: dict[str, CalibrationKey] = {part: CalibrationKey("cpu", "hf", 1) for part in ("probe", "sweep")}
    expected = Calibration(identity_of_config(config), {**ENVIRONMENT, "stalewise": "1"}, PROBE, places=places)
    assert replace(found, sweep=None) == expected
    assert (found.sweep.runs, found.sweep.rule) == (SWEEP.runs, SWEEP.rule)
    assert found.sweep.fit.batch_radius == SWEEP.fit.batch_radius
    assert found.sweep.fit.domain == SWEEP.fit.domain
    assert read_json(path)["format"] == "stalewise.calibration/1"
    assert find_calibration(config_at(runs, batch={"prompts": 5})) is None


def test_what_the_runs_do_not_determine_comes_back_too(runs: Path) -> None:
    nothing = fit_sweep([replace(run, collapsed_at=None) for run in stable_and_not()], CollapseRule(), resamples=0)
    assert nothing.fit is not None and math.isnan(nothing.fit.batch_radius.value)
    found = read_calibration(save_calibration(config_at(runs), ENVIRONMENT, sweep=nothing)).sweep
    assert found is not None and found.fit is not None
    assert found.fit.batch_radius.low == nothing.fit.batch_radius.low
    assert (math.isnan(found.fit.batch_radius.value), found.fit.batch_radius.high) == (True, math.inf)


def test_a_named_calibration_of_something_else_is_refused_by_what_differs(runs: Path, tmp_path: Path) -> None:
    path = save_calibration(config_at(runs), ENVIRONMENT, probe=PROBE)
    named = {"plan": {"calibration": str(path)}}
    assert find_calibration(config_at(tmp_path / "elsewhere", **named)) is not None
    with pytest.raises(CalibrationError, match=r"is for something else \(batch.prompts is 5 and not 4\): name the one"):
        find_calibration(config_at(runs, **named, batch={"prompts": 5}))
    with pytest.raises(CalibrationError, match=r"nowhere.json does not exist: `stalewise sweep` makes one"):
        find_calibration(config_at(runs, plan={"calibration": "nowhere.json"}))


def test_a_damaged_calibration_is_refused_by_its_name(runs: Path) -> None:
    config = config_at(runs)
    path = save_calibration(config, ENVIRONMENT, probe=PROBE)
    record = read_json(path)
    del record["probe"]["seconds_per_update"]
    write_json_atomic(path, record)
    with pytest.raises(CalibrationError, match=r"\.json is corrupt: probe\.seconds_per_update: Field required; delete"):
        find_calibration(config)
    write_json_atomic(path, {**record, "format": "stalewise.calibration/9"})
    with pytest.raises(CalibrationError, match=r"has format stalewise.calibration/9; this release reads"):
        find_calibration(config)


# ---------------------------------------------------------------- the probe


def test_a_probe_measures_a_real_run(tmp_path: Path, runs: Path) -> None:
    file = write_config(tmp_path / "tiny.toml", tiny_record(runs, plan={"strict": True}))
    found = called_json("probe", file, "--updates", 8)
    directory = runs / "tiny-probe"
    metrics = read_jsonl(directory / "metrics.jsonl")
    assert [(phase["first"], phase["last"]) for phase in found["phases"]] == [(1, 2), (3, 8)]
    assert found["phases"][0]["mean"] == pytest.approx(sum(m["update_norm_per_lr"] for m in metrics[:2]) / 2)
    manifests = [read_batch_manifest(batch) for batch in batch_directories(directory / "rollouts")]
    assert [manifest.rows for manifest in manifests] == [48, 48, 32]  # of 3, 3 and 2 updates with 16 rollouts each
    assert found["generation_sizes"] == [32, 48]
    means = [manifest.reward_mean or 0.0 for manifest in manifests]
    assert found["reward_mean"] == pytest.approx((48 * means[0] + 48 * means[1] + 32 * means[2]) / 128)
    total = found["reward_variance_within"] + found["reward_variance_between"]
    assert total == pytest.approx(found["reward_mean"] * (1 - found["reward_mean"]))  # rewards are 0 or 1
    assert 0 < found["teaching_share"] <= 1
    for name in ("tokens_per_second", "seconds_per_rollout", "seconds_per_update", "seconds_per_switch"):
        assert 0 < found[name] < math.inf
    assert found["peak_memory_bytes"] > 50e6
    assert 0 < found["bytes_per_rollout"] < 10_000 < found["bytes_per_checkpoint"]
    before = (directory / "journal.jsonl").read_bytes()
    again = called_json("probe", file, "--updates", 8)
    assert again == found  # of a run that is complete, nothing is done anew
    assert (directory / "journal.jsonl").read_bytes() == before
    shown = call("probe", file, "--updates", 8)
    assert shown.exit_code == 0
    assert "G = ‖Δθ‖/η" in shown.stdout and "of the groups teach" in shown.stdout
    planned = call("plan", file, "--set", "schedule.updates=8", "--set", "schedule.stages=2")
    assert planned.exit_code == 3
    assert "time: about" in planned.stdout
    assert "no safe learning rate is known: the calibration has a probe alone; `stalewise sweep" in planned.stderr


def test_a_probe_that_is_too_short_is_refused(tmp_path: Path, runs: Path) -> None:
    file = write_config(tmp_path / "tiny.toml", tiny_record(runs))
    assert refused("probe", file, "--updates", 7) == "--updates is 7; a probe needs at least 8"


def test_a_run_is_measured_whoever_made_it(tiny_run: RunConfig) -> None:
    found = measure(tiny_run)
    assert (found.updates, found.peak_memory_bytes, found.generation_sizes) == (4, None, (32, 32))
    assert found.seconds_per_generation == 0.0  # one size tells nothing of it


def test_phases_grow_fourfold() -> None:
    metrics = [{"update": u, "update_norm_per_lr": 8.0 if u < 2 else 2.0 if u < 8 else 1.0} for u in range(20)]
    assert phases(metrics) == [Phase(1, 2, 8.0, 0.0), Phase(3, 8, 2.0, 0.0), Phase(9, 20, 1.0, 0.0)]


def event(batch: int, rollouts: int, seconds: float) -> dict[str, Any]:
    timed = {"event": "generate", "seconds": seconds}
    return {**timed, "generation_batch": batch, "rollouts": rollouts, "tokens": 10 * rollouts}


def test_the_fixed_cost_of_a_generation_is_told_from_its_slope() -> None:
    journal = [event(0, 100, 50.0), event(1, 100, 3.0), event(2, 100, 3.0), event(3, 20, 1.4)]
    found = generation_costs(journal, {0: 1.0, 1: 1.0, 2: 1.0, 3: 0.5})
    assert found["seconds_per_generation"] == pytest.approx(1.0)
    assert found["seconds_per_rollout"] == pytest.approx(0.02)
    assert found["generation_sizes"] == (20, 100)
    assert found["tokens_per_second"] == pytest.approx(2200 / 7.4)


def test_a_generation_of_two_sittings_is_not_timed() -> None:
    journal = [event(0, 100, 50.0), event(1, 100, 0.5), event(2, 100, 3.0), event(3, 20, 1.4)]
    found = generation_costs(journal, {0: 1.0, 1: 1.0, 2: 1.0, 3: 0.5})
    assert found["seconds_per_rollout"] == pytest.approx(0.02)
    with pytest.raises(CalibrationError, match="no generation of the probe was timed as a whole"):
        generation_costs(journal[:2], {0: 1.0, 1: 1.0})


def test_where_noise_hides_the_fixed_cost_it_is_none() -> None:
    found = generation_costs([event(1, 100, 3.0), event(2, 20, 0.1)], {1: 0.0, 2: 0.0})
    assert (found["seconds_per_generation"], found["seconds_per_rollout"]) == (0.0, pytest.approx(3.1 / 120))


def test_starting_is_told_from_switching() -> None:
    seconds = [("first checkpoint", 1.0), ("learner", 5.0), ("checkpoint", 0.5), ("learner", 0.1), ("checkpoint", 0.7)]
    journal = [{"event": "switch", "reason": reason, "seconds": time} for reason, time in seconds]
    found = switching_costs(journal)
    assert found["seconds_per_switch"] == pytest.approx(0.1 + 0.6)
    assert found["seconds_to_start"] == pytest.approx(1.0 + 4.9)


# ---------------------------------------------------------------- costs and plans


def test_costs_by_hand(runs: Path) -> None:
    config = config_at(runs, checkpoints={"every": 40, "keep": 2}, evaluation={"every": 50, "prompts": 8, "samples": 2})
    found = costs(PROBE, config, updates=100, updates_per_generation=30)
    assert found.learn == 50.0  # 100 · 0.5
    assert found.generate == pytest.approx(4 * 3.0 + 1600 * 0.01)  # 4 generations, 100 · 16 rollouts
    # Stops at 30, 40, 50, 60, 80, 90, 100; evaluations at 0, 50 and 100, of 16 responses each.
    assert found.switch == pytest.approx(4.0 + 7 * 2.0)
    assert found.evaluate == pytest.approx(3 * 16 * 0.02)
    assert found.seconds == pytest.approx(50 + 28 + 18 + 0.96)
    assert found.disk_bytes == 1600 * 100 + 3 * 5000


def calibrated(runs: Path, **parts: Probe | Sweep) -> Callable[..., RunConfig]:
    save_calibration(config_at(runs), ENVIRONMENT, **parts)
    return lambda **changes: config_at(runs, **changes)


def test_a_plan_says_which_rate_is_safe_and_what_binds(runs: Path) -> None:
    config = calibrated(runs, probe=PROBE, sweep=SWEEP)
    careful = config(optimizer={"learning_rate": 1e-4})
    plan = plan_config(careful, require_calibration(careful))
    assert SWEEP.fit is not None
    assert (plan.staleness, plan.updates, plan.is_safe, plan.problem) == (9, 100, True, "")
    assert plan.safe is not None and plan.safe.binding == "batch"
    assert law_learning_rate(careful) == plan.safe.learning_rate
    # 0.2 survived and 0.8 did not: whatever is safe at S = 9 lies below 0.8/(9 · 2).
    assert 1e-4 < plan.safe.learning_rate < 0.8 / 18
    assert plan.staleness_allowed == 9
    bold = config(optimizer={"learning_rate": 0.1})
    unsafe = plan_config(bold, require_calibration(bold))
    assert (unsafe.is_safe, unsafe.safe) == (False, plan.safe)
    less_risk = plan_config(config(plan={"risk": 0.01}), require_calibration(careful)).safe
    assert less_risk is not None and less_risk.learning_rate < plan.safe.learning_rate


def test_what_was_measured_elsewhere_is_said(runs: Path, tmp_path: Path) -> None:
    config = config_at(runs, model={"threads": 1})
    record = tiny_record(runs, model={"threads": 1}, schedule={"kind": "staged", "updates": 100, "stages": 10})
    file = write_config(tmp_path / "config.toml", record)
    save_calibration(config, ENVIRONMENT, probe=PROBE)
    save_calibration(config, {"device": "cpu", "threads": 8}, sweep=SWEEP)  # the law does not know of threads
    assert plan_config(config, require_calibration(config)).elsewhere == []
    assert "is safe" in call("plan", file).stdout and "was made on" not in call("plan", file).stdout
    save_calibration(config, {"device": "NVIDIA H200", "threads": 1}, probe=PROBE)
    (times,) = plan_config(config, require_calibration(config)).elsewhere
    assert times.startswith("the probe was made on NVIDIA H200 and the engine hf, and this is cpu with 1 threads and")
    assert "its times do not hold here" in times
    save_calibration(config, {"device": "NVIDIA H200", "threads": 1}, sweep=SWEEP)
    assert "may hold here" in plan_config(config, require_calibration(config)).elsewhere[1]
    assert any("its times do not hold" in line for line in plan_for_training(config).lines)
    assert "note: the probe was made on NVIDIA H200" in call("plan", file).stdout
    served = config_at(runs, model={"threads": 1}, sampler={"engine": "server", "server": {"urls": ["http://a"]}})
    save_calibration(config, ENVIRONMENT, probe=PROBE)
    (said,) = measured_elsewhere(replace(require_calibration(served), sweep=None), place_of(served))
    assert "this is cpu with 1 threads and the engine server" in said


def test_the_choices_weigh_safety_against_measured_costs(runs: Path) -> None:
    config = calibrated(runs, probe=PROBE, sweep=SWEEP)(optimizer={"learning_rate": 1e-4})
    calibration = require_calibration(config)
    plan = plan_config(config, calibration)
    assert [choice.updates_per_generation for choice in plan.choices] == [1, 2, 4, 8, 16, 32, 64, 100]
    rates = [choice.plan.learning_rate for choice in plan.choices if choice.plan is not None]
    assert rates == sorted(rates, reverse=True)
    assert [choice.plan is None for choice in plan.choices] == [False] * 4 + [True] * 4  # S above 9 was never tried
    for choice in plan.choices[:4]:
        assert choice.plan is not None and choice.drift_updates is not None
        assert (choice.drift_updates - 1) * choice.plan.learning_rate < 100 * 1e-4
        assert choice.drift_updates * choice.plan.learning_rate >= 100 * 1e-4 * (1 - 1e-6)
        again = costs(PROBE, config, updates=choice.drift_updates, updates_per_generation=choice.updates_per_generation)
        assert choice.drift_seconds == again.seconds
    fastest = min((c for c in plan.choices if c.drift_seconds is not None), key=lambda c: c.drift_seconds or math.inf)
    assert plan.fastest == fastest.updates_per_generation


def test_the_fastest_schedule_depends_on_what_generating_costs(runs: Path) -> None:
    config = calibrated(runs, probe=PROBE, sweep=SWEEP)(optimizer={"learning_rate": 0.02})
    calibration = require_calibration(config)
    free = replace(PROBE, seconds_per_generation=0.0, seconds_per_switch=0.0)
    assert plan_config(config, replace(calibration, probe=free)).fastest == 1
    # Where R_batch leaves room, η does not depend on µ, and dear generations want large batches.
    assert SWEEP.fit is not None
    roomy = replace(SWEEP, fit=replace(SWEEP.fit, batch_radius=Estimate(1e3, 1e3, 1e3, known=True)))
    dear = replace(calibration, sweep=roomy, probe=replace(PROBE, seconds_per_generation=1e6))
    assert plan_config(config, dear).fastest == 8
    # Where it binds, η goes as 1/S: as many generations are needed to get as far, whatever µ is.
    assert plan_config(config, replace(dear, sweep=SWEEP)).fastest == 2


def test_plans_are_refused_with_the_command_that_calibrates(tmp_path: Path, runs: Path) -> None:
    file = write_config(tmp_path / "tiny.toml", config_at(runs).model_dump(mode="json", exclude_none=True))
    result = call("plan", file)
    assert (result.exit_code, result.stdout) == (3, "")
    assert "make one with `stalewise sweep CONFIG --staleness 1,2,9 --lr 3e-4,9e-4,3e-3,9e-3`" in result.stderr


def test_a_plan_is_printed(tmp_path: Path, runs: Path) -> None:
    config = calibrated(runs, probe=PROBE, sweep=SWEEP)()
    file = write_config(tmp_path / "tiny.toml", config.model_dump(mode="json", exclude_none=True))
    shown = call("plan", file)
    assert shown.exit_code == 0, shown.stderr
    for part in ("safe; η up to", "R_batch binds", "time: about", "disk:", "memory:", "← fastest", "unknown"):
        assert part in shown.stdout, part
    record = called_json("plan", file)
    assert (record["is_safe"], record["staleness"]) == (True, 9)
    timed = {one["updates_per_generation"]: one["drift_seconds"] for one in record["choices"] if one["drift_seconds"]}
    assert len(timed) > 2 and record["fastest"] == min(timed, key=lambda size: timed[size])
    assert record["seconds"] == pytest.approx(
        sum(record["cost"][k] for k in ("learn", "generate", "switch", "evaluate"))
    )
    beyond = call("plan", file, "--set", "schedule.updates=1000", "--set", "schedule.stages=100")
    assert beyond.exit_code == 3
    assert "updates T = 1000 is outside the calibration: the sweep covers 100 to 100" in beyond.stderr


def test_before_training_a_plan_is_said_in_a_few_lines(runs: Path) -> None:
    alone = plan_for_training(config_at(runs))
    assert (len(alone.lines), alone.is_safe) == (1, None)
    assert alone.lines[0].startswith("no calibration: nobody knows which η is safe; `stalewise sweep CONFIG")
    assert budget_limits(config_at(runs)) is None
    config = calibrated(runs, probe=PROBE, sweep=SWEEP)
    said = plan_for_training(config(optimizer={"learning_rate": 1e-4}))
    assert (len(said.lines), said.is_safe) == (2, True)
    assert said.lines[0].startswith("plan: S = 9, T = 100, η = 1e-4: safe; η up to ")
    assert said.lines[1].startswith("plan: about ")
    spent = plan_for_training(config(schedule={"kind": "staged", "updates": 100, "stages": None, "end": "spent"}))
    assert any("stages that are used up" in line for line in spent.lines)
    warned = plan_for_training(config(optimizer={"learning_rate": 0.1}))
    assert (len(warned.lines), warned.is_safe) == (3, False)
    assert "NOT safe" in warned.lines[0] and "lower optimizer.learning_rate to" in warned.lines[1]
    assert SWEEP.fit is not None
    assert budget_limits(config()) == (SWEEP.fit.batch_radius.low, SWEEP.fit.critical_radius.low)


def test_strict_refuses_what_is_not_known_to_be_safe(runs: Path) -> None:
    strict = {"plan": {"strict": True}}
    with pytest.raises(CalibrationError, match="no calibration for this model"):
        plan_for_training(config_at(runs, **strict))
    config = calibrated(runs, sweep=SWEEP)
    assert plan_for_training(config(**strict, optimizer={"learning_rate": 1e-4})).is_safe is True
    with pytest.raises(CalibrationError, match="NOT safe"):
        plan_for_training(config(**strict, optimizer={"learning_rate": 0.1}))
    with pytest.raises(CalibrationError, match="outside the calibration"):
        plan_for_training(config(**strict, schedule={"kind": "staged", "updates": 1000, "stages": 200}))


def test_a_sweep_in_which_everything_collapsed_plans_nothing(runs: Path) -> None:
    lost = fit_sweep([replace(run, collapsed_at=5) for run in stable_and_not()], CollapseRule(), resamples=0)
    config = calibrated(runs, sweep=lost)()
    plan = plan_config(config, require_calibration(config))
    assert (plan.safe, plan.is_safe) == (None, None)
    assert "is unknown: no run survived" in plan.problem
    limits = budget_limits(config)
    assert limits is not None and limits[0] == 0 < limits[1]  # R_crit is watched though R_batch cannot be
    with pytest.raises(CalibrationError, match="is unknown: no run survived"):
        law_learning_rate(config)


def test_a_rate_that_is_merely_known_to_be_safe_does_not_take_the_place_of_a_larger_one(runs: Path) -> None:
    whole = fit_sweep([replace(run, collapsed_at=None) for run in stable_and_not()], CollapseRule(), resamples=0)
    given = {"optimizer": {"learning_rate": 0.1}}
    if_calibrated = {"plan": {"learning_rate": "planned-if-calibrated"}}
    said: list[str] = []
    config = calibrated(runs, sweep=whole)(**given, **if_calibrated)
    assert law_learning_rate(config) < 0.1
    assert resolve_learning_rate(config, said.append).optimizer.learning_rate == 0.1
    assert "stays 0.1, as given: up to" in said[0] and "no run of the sweep says that more is not" in said[0]
    asked_for = calibrated(runs, sweep=whole)(**given, plan={"learning_rate": "planned"})
    assert resolve_learning_rate(asked_for).optimizer.learning_rate == law_learning_rate(asked_for)
    fallen = calibrated(runs, sweep=SWEEP)(**given, **if_calibrated)
    assert resolve_learning_rate(fallen).optimizer.learning_rate == law_learning_rate(fallen) < 0.1


def test_identities_are_told_apart_by_what_one_of_them_lacks() -> None:
    mine, theirs = CalibrationIdentity({"a": 1}), CalibrationIdentity({"b": 2})
    assert mine.differences(theirs) == ["a is 1 and not None", "b is None and not 2"]


def test_a_calibration_is_a_record_of_plain_values(runs: Path) -> None:
    path = save_calibration(config_at(runs), ENVIRONMENT, probe=PROBE)
    assert read_json(path)["probe"] == {**asdict(PROBE), "generation_sizes": [64, 320]}
    assert calibration_path(config_at(runs), identity_of_config(config_at(runs))) == path


def test_a_warm_up_longer_than_the_probe_is_refused(runs: Path) -> None:
    from stalewise.planning.probe import probe_config

    with pytest.raises(ConfigError, match="warmup_updates is 50, more than the 32 updates"):
        probe_config(config_at(runs, optimizer={"warmup_updates": 50}), 32)


def test_short_runs_keep_away_from_the_bucket_and_the_workers_of_the_run(runs: Path) -> None:
    from stalewise.planning.grid import make_grid
    from stalewise.planning.probe import probe_config

    config = config_at(runs, storage={"url": "s3://bucket/run"}, workers={"learner": "waits"})
    grid = make_grid(
        config, stalenesses=[1], learning_rates=[1e-3], seeds=[0], updates=8, rule=CollapseRule(evaluations=4)
    )
    for short in (probe_config(config, 32), *(cell.config for cell in grid)):
        assert (short.storage.url, short.workers.learner) == ("", "shares")
