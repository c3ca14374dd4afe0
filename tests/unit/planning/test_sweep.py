"""Sweeps: the grid, what counts as a collapse, and real runs side by side that are resumed, fail and are stopped."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stalewise.config import RunConfig, make_config
from stalewise.errors import CalibrationError, ConfigError, StoreError
from stalewise.planning.calibration import CollapseRule, SweepRun, find_calibration
from stalewise.planning.grid import Cell, find_collapse_of_run, make_grid, outcome
from stalewise.planning.sweep import fit_sweep, sweep
from stalewise.planning.sweep_map import draw_map, write_map
from stalewise.staleness.law import Law, simulate
from stalewise.store.atomic import RunLock, append_line, write_json_atomic
from tiny import refused, tiny_record, write_config

RULE = CollapseRule(evaluations=4)


def tiny_config(runs: Path, **changes: Any) -> RunConfig:
    return make_config(tiny_record(runs, **{"evaluation": {"prompts": 4, "samples": 2}, **changes}))


def grid(
    config: RunConfig, stalenesses: list[int], rates: list[float], updates: int = 64, seeds: tuple[int, ...] = (0,)
):
    return make_grid(
        config, stalenesses=stalenesses, learning_rates=rates, seeds=seeds, updates=updates, rule=CollapseRule()
    )


# ---------------------------------------------------------------- the grid


def test_a_grid_is_of_ordinary_configs_whose_worst_age_is_its_staleness(runs: Path) -> None:
    config = tiny_config(runs, plan={"strict": True}, task={"options": {"largest": 30}})
    cells = grid(config, [16, 4], [1e-3, 3e-4], seeds=(1, 0))
    assert [cell.directory.name for cell in cells][:3] == [
        "S0004-lr3e-4-seed0",
        "S0004-lr3e-4-seed1",
        "S0016-lr3e-4-seed0",
    ]
    assert len(cells) == 8
    for cell in cells:
        assert cell.directory.parent == runs / "tiny-sweep"
        assert cell.config.schedule.schedule().worst_age == cell.staleness
        assert (cell.config.evaluation.every, cell.config.model.threads) == (2, 1)  # 32 evaluations of 64 updates
        assert cell.config.plan.strict is False
        assert (cell.config.guard.action, cell.config.guard.fraction, cell.config.guard.window) == ("stop", 0.5, 12)
    written = tomllib.loads(cells[0].write_config().read_text())
    assert make_config(written) == cells[0].config


def test_the_largest_staleness_is_that_of_one_generation(runs: Path) -> None:
    (cell,) = grid(tiny_config(runs), [64, 63], [1e-3])
    assert (cell.staleness, cell.config.schedule.updates_per_generation) == (63, 64)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["0", "1e-3"], "--staleness 0: expected 1 to 8, the updates of a run: no rollout gets older"),
        (["-3", "1e-3"], "--staleness -3: expected 1 to 8, the updates of a run: no rollout gets older"),
        (
            ["9", "1e-3"],
            "--staleness 9: expected 1 to 8, the updates of a run: no rollout gets older; --updates makes runs longer",
        ),
        (["3", "0"], "--lr 0: a learning rate is above 0"),
        (["3", "nan"], "--lr nan: a learning rate is above 0"),
        (["3;5", "1e-3"], "--staleness 3;5: expected numbers with commas between them, as in 4,16,64"),
        (["3", ","], "--staleness, --lr and --seeds each need at least one value"),
    ],
)
def test_a_grid_that_cannot_be_is_refused(tmp_path: Path, runs: Path, words: list[str], message: str) -> None:
    file = write_config(tmp_path / "tiny.toml", tiny_record(runs))
    assert refused("sweep", file, f"--staleness={words[0]}", f"--lr={words[1]}", "--updates", 8) == message
    assert not runs.exists()


def test_runs_of_another_sweep_are_not_taken_for_this_one(runs: Path) -> None:
    config = tiny_config(runs)
    (cell,) = grid(config, [3], [1e-3])
    write_json_atomic(
        cell.directory / "config.resolved.json", {"format": "stalewise.run/1", **cell.config.model_dump(mode="json")}
    )
    (cell.directory / "checkpoints" / "v000000").mkdir(parents=True)
    with pytest.raises(StoreError, match=r"belongs to another config \(schedule.updates was 64 and is 32"):
        sweep(config, stalenesses=[3], learning_rates=[1e-3], updates=32)


# ---------------------------------------------------------------- collapse


def curve(*values: float, every: int = 4) -> list[dict[str, Any]]:
    return [{"version": every * i, "accuracy": {"value": value}} for i, value in enumerate(values)]


def test_a_collapse_is_dated_by_the_evaluation_that_fell_below() -> None:
    # Means of two: 0.8 at version 4, then 0.8, 0.45, and 0.1, below half of the best, at version 16 and after it.
    assert find_collapse_of_run(curve(0.8, 0.8, 0.8, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1), RULE) == 16
    assert find_collapse_of_run(curve(0.8, 0.8, 0.8, 0.1, 0.1, 0.1, 0.9, 0.9, 0.9), RULE) is None  # it came back
    assert find_collapse_of_run(curve(0.4, 0.5, 0.6, 0.7), RULE) is None
    assert find_collapse_of_run([], RULE) is None


def test_a_run_that_ends_below_the_line_has_collapsed() -> None:
    assert find_collapse_of_run(curve(0.8, 0.8, 0.8, 0.8, 0.1, 0.1), RULE) == 20
    assert find_collapse_of_run(curve(0.8, 0.8, 0.8, 0.8, 0.8, 0.1), RULE) is None  # the mean of two is above the line


def ended_run(cell: Cell, accuracies: list[float], updates: int, norm: float = 5.0) -> Cell:
    """The records of a run of the grid that moved by `norm`·η in each of so many updates."""
    step = norm * cell.config.optimizer.learning_rate
    for record in curve(*accuracies, every=cell.config.evaluation.every):
        append_line(cell.directory / "eval.jsonl", record)
    for update in range(updates):
        append_line(cell.directory / "metrics.jsonl", {"update": update, "drift": (update + 1) * step})
    return cell


def test_what_became_of_a_run(runs: Path) -> None:
    whole, fallen = (ended_run(cell, [], 0) for cell in grid(tiny_config(runs), [3], [1e-3, 1e-2]))
    assert whole.config.evaluation.every == 2
    ended_run(whole, [0.4] * 33, 64)
    assert whole.is_complete and whole.updates_done == 64
    found = outcome(whole, RULE)
    assert (found.collapsed_at, found.best_accuracy, found.last_accuracy) == (None, 0.4, 0.4)
    assert found.update_norm_per_lr == pytest.approx(5.0)
    ended_run(fallen, [0.8, 0.8, 0.2, 0.1, 0.1], 8)
    append_line(fallen.directory / "metrics.jsonl", {"update": 8, "drift": 1e6})  # what comes after does not count
    assert not fallen.is_complete
    late = outcome(fallen, RULE)
    assert (late.collapsed_at, late.best_accuracy, late.last_accuracy) == (6, 0.8, 0.1)
    assert late.update_norm_per_lr == pytest.approx(5.0)


def test_a_run_that_ended_before_its_time_collapsed_there(runs: Path) -> None:
    first, later, end = grid(tiny_config(runs), [3], [1e-3, 1e-2, 1e-1])
    for cell, updates in ((first, 0), (later, 7), (end, 64)):
        ended_run(cell, [0.4] * (updates // 2 + 1), updates)
        write_json_atomic(cell.directory / "outcome.json", {"status": 4, "message": "not finite"})
    assert [outcome(cell, RULE).collapsed_at for cell in (first, later, end)] == [1, 8, 64]
    assert math.isnan(outcome(first, RULE).update_norm_per_lr)
    assert outcome(later, RULE).update_norm_per_lr == pytest.approx(5.0)


def test_a_run_that_never_moved_says_nothing(runs: Path) -> None:
    (cell,) = grid(tiny_config(runs), [3], [1e-3])
    ended_run(cell, [0.4] * 33, 64, norm=0.0)
    with pytest.raises(CalibrationError, match="never moved: none of its groups has rewards that differ"):
        outcome(cell, RULE)


# ---------------------------------------------------------------- fit and figure


def simulated_runs() -> list[SweepRun]:
    law, generator = Law(0.25, 1.0, 0.15), np.random.default_rng(0)
    drawn = [
        simulate(law, staleness=s, learning_rate=float(r), updates=512, update_norm_per_lr=1.0, generator=generator)
        for s in (4, 16, 64, 256)
        for r in np.geomspace(2e-4, 2e-2, 10)
    ]
    return [SweepRun(o.staleness, o.learning_rate, 512, 0, o.collapsed_at, 1.0, 0.9, 0.5, "x") for o in drawn]


def test_the_law_is_found_in_the_runs_of_a_sweep() -> None:
    found = fit_sweep(simulated_runs(), RULE, resamples=0).fit
    assert found is not None
    assert found.batch_radius.value == pytest.approx(0.25, rel=0.2)
    assert found.critical_radius.value == pytest.approx(1.0, rel=0.2)


def test_the_norm_of_a_plan_is_that_of_runs_that_survived() -> None:
    runs = [replace(run, update_norm_per_lr=3.0 if run.collapsed_at else 2.0) for run in simulated_runs()]
    assert fit_sweep(runs, RULE, resamples=0).update_norm_per_lr == 2.0
    unknown = [replace(run, update_norm_per_lr=math.nan) if run.collapsed_at == 1 else run for run in runs]
    unknown.append(replace(runs[0], collapsed_at=1, update_norm_per_lr=math.nan))
    filled = fit_sweep(unknown, RULE, resamples=0)
    assert filled.fit is not None
    assert filled.runs[-1].update_norm_per_lr == 2.0


def test_too_few_runs_are_no_fit_and_say_so() -> None:
    found = fit_sweep(simulated_runs()[:5], RULE)
    assert (found.fit, found.problem) == (None, "5 runs cannot calibrate the law: at least 6 are needed")


def test_the_map_shows_every_run_and_both_constraints(tmp_path: Path) -> None:
    swept = fit_sweep(simulated_runs(), RULE, resamples=0)
    assert swept.fit is not None
    figure = json.loads(draw_map(swept).to_json() or "")
    traces = {trace.get("name"): trace for trace in figure["data"]}
    collapsed = sum(run.collapsed_at is not None for run in swept.runs)
    assert {f"survived ({40 - collapsed})", f"collapsed ({collapsed})"} < set(traces)
    drawn: Any = draw_map(swept)
    line = next(trace for trace in drawn.data if trace.name == "R_batch / (S·G)")
    for staleness, rate in zip(line.x, line.y, strict=True):
        assert staleness * rate == pytest.approx(swept.fit.batch_radius.value)
    assert (figure["layout"]["xaxis"]["type"], figure["layout"]["yaxis"]["type"]) == ("log", "log")
    nothing = fit_sweep([replace(run, collapsed_at=None) for run in swept.runs], RULE)
    bounded: Any = draw_map(nothing)
    assert "R_batch / (S·G): at least" in {trace.name for trace in bounded.data}
    page = write_map(swept, tmp_path / "map.html").read_text()
    assert "plotly" in page and 'id="map"' in page


# ---------------------------------------------------------------- real runs


class Heard:
    """A watcher that remembers."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.done = self.total = 0

    def begin(self, what: str, total: int) -> None:
        assert what == "sweep"
        self.total = total
        self.done = 0

    def advance(self, amount: int, note: str = "") -> None:
        assert amount >= 0
        self.done += amount

    def metrics(self, update: int, record: dict[str, Any]) -> None: ...

    def log(self, message: str) -> None:
        self.said.append(message)


def test_a_sweep_of_real_runs_goes_on_where_it_stopped(runs: Path) -> None:
    config = tiny_config(runs)
    heard = Heard()
    settings: dict[str, Any] = {"stalenesses": [1], "updates": 4, "rule": RULE, "watcher": heard}
    busy, broken = (runs / "tiny-sweep" / f"S0001-lr{rate}-seed0" for rate in ("3e-4", "1e30"))
    with RunLock(busy):
        found = sweep(config, learning_rates=[3e-4, 1e30], **settings)
    assert list(found.failed) == [busy.name]
    assert "is in use by process" in found.failed[busy.name]
    (run,) = found.sweep.runs
    # A rate of 1e30 makes weights that are not finite in the first update, or ratios in the second.
    assert (run.directory, run.collapsed_at in (1, 2)) == (broken.name, True)
    assert (heard.done, heard.total) == (8, 8)

    before = (broken / "train.log").stat().st_mtime_ns
    again = sweep(config, learning_rates=[3e-4, 1e30], **settings)
    assert (again.failed, (broken / "train.log").stat().st_mtime_ns) == ({}, before)  # not trained once more
    assert {run.directory: run.collapsed_at is None for run in again.sweep.runs} == {
        busy.name: True,
        broken.name: False,
    }
    assert again.sweep.problem == "2 runs cannot calibrate the law: at least 6 are needed"
    assert again.map.is_file()

    part = sweep(config, learning_rates=[3e-4], **settings)
    assert {run.directory for run in part.sweep.runs} == {busy.name, broken.name}  # one is of the sweep before
    assert (busy / "train.log").stat().st_mtime_ns > before
    kept = find_calibration(config)
    assert kept is not None and kept.sweep is not None
    assert (kept.sweep.runs, kept.environment["threads"]) == (part.sweep.runs, 1)


def test_a_sweep_of_which_every_run_fails_says_why(runs: Path) -> None:
    config = tiny_config(runs, objective={"name": "nonsense"})
    with pytest.raises(
        CalibrationError, match=r"all 1 runs of the sweep failed; S0001-lr1e-3-seed0: objective: .*nonse"
    ):
        sweep(config, stalenesses=[1], learning_rates=[1e-3], updates=4)


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_an_interrupted_sweep_leaves_no_process_behind(tmp_path: Path, runs: Path) -> None:
    file = write_config(tmp_path / "tiny.toml", tiny_record(runs))
    words = ["sweep", str(file), "--staleness", "100", "--lr", "1e-5", "--updates", "5000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "stalewise", *words], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    directory = runs / "tiny-sweep" / "S0100-lr1e-5-seed0"
    deadline = time.monotonic() + 120
    while not (directory / "metrics.jsonl").is_file() and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.1)
    child = json.loads((directory / "run.lock").read_text())["pid"]
    assert is_alive(child)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert not is_alive(child)
    assert "run the same command again to go on" in said


def test_bad_settings_are_found_before_any_process_starts(runs: Path) -> None:
    with pytest.raises(ConfigError, match="--updates 1: a run needs at least 2"):
        grid(tiny_config(runs), [1], [1e-3], updates=1)
