"""Sweeps: the grid, what counts as a collapse, and real runs side by side that are resumed, fail and are stopped."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from processes import FORKING
from stalewise.errors import CalibrationError, ConfigError
from stalewise.planning import sweep as sweep_module
from stalewise.planning.calibration import find_calibration
from stalewise.planning.sweep import fit_sweep, sweep
from stalewise.store.atomic import RunLock
from sweeps import RULE, grid, simulated_runs, tiny_config
from tiny import tiny_record, write_config

# ---------------------------------------------------------------- fit and figure


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


def test_a_sweep_of_real_runs_goes_on_where_it_stopped(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_module, "subprocess", FORKING)  # `make nightly` starts runs as they are started
    config = tiny_config(runs, sampler={"engine": "auto"})
    heard = Heard()
    settings: dict[str, Any] = {"stalenesses": [1], "updates": 4, "rule": RULE, "callback": heard}
    sound, broken = (runs / "tiny-sweep" / f"S0001-lr{rate}-seed0" for rate in ("3e-4", "1e30"))
    found = sweep(config, learning_rates=[1e30], **settings)
    (run,) = found.sweep.runs
    # A rate of 1e30 makes weights that are not finite in the first update, or ratios in the second.
    assert (run.directory, run.collapsed_at in (1, 2)) == (broken.name, True)
    assert (heard.done, heard.total) == (4, 4)

    before = (broken / "train.log").stat().st_mtime_ns
    again = sweep(config, learning_rates=[3e-4, 1e30], **settings)
    assert (again.failed, (broken / "train.log").stat().st_mtime_ns) == ({}, before)  # not trained once more
    assert {run.directory: run.collapsed_at is None for run in again.sweep.runs} == {
        sound.name: True,
        broken.name: False,
    }
    assert again.sweep.problem == "2 runs cannot calibrate the law: at least 6 are needed"
    assert again.map.is_file()

    part = sweep(config, learning_rates=[3e-4], **settings)
    assert {run.directory for run in part.sweep.runs} == {sound.name, broken.name}  # one is of the sweep before
    assert (sound / "train.log").stat().st_mtime_ns > before
    kept = find_calibration(config)
    assert kept is not None and kept.sweep is not None
    assert (kept.sweep.runs, kept.environment["threads"]) == (part.sweep.runs, 1)
    assert kept.places["sweep"].engine == "hf"  # what `auto` picked


@pytest.mark.nightly
def test_a_run_of_a_sweep_that_is_in_use_failed_and_the_others_count(runs: Path) -> None:
    config, heard = tiny_config(runs), Heard()
    busy, other = (runs / "tiny-sweep" / f"S0001-lr{rate}-seed0" for rate in ("3e-4", "1e30"))
    with RunLock(busy):
        found = sweep(config, stalenesses=[1], learning_rates=[3e-4, 1e30], updates=4, rule=RULE, callback=heard)
    assert list(found.failed) == [busy.name]
    assert "is in use by process" in found.failed[busy.name]
    assert [run.directory for run in found.sweep.runs] == [other.name]
    assert (heard.done, heard.total) == (8, 8)


@pytest.mark.nightly
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


@pytest.mark.nightly
def test_an_interrupted_sweep_leaves_no_process_behind(tmp_path: Path, runs: Path) -> None:
    file = write_config(tmp_path / "tiny.toml", tiny_record(runs))
    words = ["sweep", str(file), "--staleness", "1", "--lr", "1e-5", "--updates", "5000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "stalewise", *words], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    directory = runs / "tiny-sweep" / "S0001-lr1e-5-seed0"
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
    assert "the same command resumes" in said


def test_bad_settings_are_found_before_any_process_starts(runs: Path) -> None:
    with pytest.raises(ConfigError, match="--updates 1: expected at least 2"):
        grid(tiny_config(runs), [1], [1e-3], updates=1)
