"""Plans from a calibration: safe learning rates, costs and choices of a schedule."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from calibrations import ENVIRONMENT, PROBE, SWEEP, config_at, stable_and_not
from stalewise.config import RunConfig
from stalewise.errors import CalibrationError
from stalewise.orchestrator.setup import resolve_settings
from stalewise.planning.calibration import (
    Calibration,
    CalibrationIdentity,
    CollapseRule,
    Probe,
    Sweep,
    measured_here,
    save_calibration,
)
from stalewise.planning.planner import (
    ConfigPlan,
    Planner,
    budget_limits,
    count_stops,
    law_learning_rate,
    make_planner,
    measured_elsewhere,
    plan_for_training,
    rounded_down,
    sizes,
)
from stalewise.planning.sweep import fit_sweep
from stalewise.staleness.law import Estimate
from tiny import call, called_json, tiny_record, write_config


def plan_config(config: RunConfig, calibration: Calibration) -> ConfigPlan:
    return Planner(config, calibration).plan()


def require_calibration(config: RunConfig) -> Calibration:
    return make_planner(config).calibration


def test_costs_by_hand(runs: Path) -> None:
    config = config_at(runs, checkpoints={"every": 40, "keep": 2}, evaluation={"every": 50, "prompts": 8, "samples": 2})
    calibration = Calibration(CalibrationIdentity({}), {}, probe=PROBE)
    found = Planner(config, calibration).costs(updates=100, updates_per_generation=30)
    assert found is not None
    assert found.learn == 50.0  # 100 · 0.5
    assert found.generate == pytest.approx(4 * 3.0 + 1600 * 0.01)  # 4 generations, 100 · 16 rollouts
    # Stops at 30, 40, 50, 60, 80, 90, 100; evaluations at 0, 50 and 100, of 16 responses each.
    assert found.switch == pytest.approx(4.0 + 7 * 2.0)
    assert found.evaluate == pytest.approx(3 * 16 * 0.02)
    assert found.seconds == pytest.approx(50 + 28 + 18 + 0.96)
    assert found.disk_bytes == 1600 * 100 + 3 * 5000


def calibrated(runs: Path, **parts: Probe | Sweep) -> Callable[..., RunConfig]:
    save_calibration(config_at(runs), ENVIRONMENT, engine=None, **parts)
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
    (said,) = measured_elsewhere(
        replace(require_calibration(served), sweep=None), measured_here(served.model, "server")
    )
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
        again = Planner(config, calibration).costs(choice.drift_updates, choice.updates_per_generation)
        assert again is not None and choice.drift_seconds == again.seconds
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
    assert "run `stalewise sweep CONFIG --staleness 1,2,9 --lr 3e-4,9e-4,3e-3,9e-3`" in result.stderr


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
    assert alone.lines[0].startswith("plan: training with optimizer.learning_rate = 3e-4; a calibration (optional, ")
    assert alone.lines[0].endswith("safe: `stalewise sweep CONFIG --staleness 1,2,9 --lr 3e-4,9e-4,3e-3,9e-3`")
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
    with pytest.raises(CalibrationError, match="no calibration found for this model"):
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
    assert resolve_settings(config, said.append).optimizer.learning_rate == 0.1
    assert "stays 0.1: the sweep shows that rates up to" in said[0]
    assert "so higher rates are untested or unresolved" in said[0]
    asked_for = calibrated(runs, sweep=whole)(**given, plan={"learning_rate": "planned"})
    assert resolve_settings(asked_for).optimizer.learning_rate == law_learning_rate(asked_for)
    fallen = calibrated(runs, sweep=SWEEP)(**given, **if_calibrated)
    assert resolve_settings(fallen).optimizer.learning_rate == law_learning_rate(fallen) < 0.1


def test_stops_and_sizes() -> None:
    assert count_stops(10, 4, 5) == 4  # 4, 5, 8, 10
    assert sizes(12) == [1, 2, 4, 8, 12] and sizes(8) == [1, 2, 4, 8]


def test_a_rate_is_never_rounded_up() -> None:
    assert [rounded_down(rate) for rate in (0.000597, 0.001)] == ["5.9e-4", "1e-3"]
