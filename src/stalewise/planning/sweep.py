"""A sweep: runs side by side over a grid of staleness and learning rate, and the law fitted to what became of them."""

from __future__ import annotations

import math
import os
import signal
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from stalewise.config import RunConfig
from stalewise.config.run_directory import check_identity
from stalewise.errors import CalibrationError
from stalewise.planning.calibration import (
    CollapseRule,
    Sweep,
    SweepRun,
    calibration_path,
    identity_of_config,
    read_calibration,
    save_calibration,
)
from stalewise.planning.grid import OUTCOME, Cell, describe_run, make_grid, outcome, sweep_directory
from stalewise.planning.sweep_map import write_map
from stalewise.staleness.law import fit
from stalewise.store.atomic import read_json, write_json_atomic
from stalewise.types import NullCallback, ProgressCallback

COLLAPSED = 4  # exit status of `stalewise train` where an update was not finite, or its guard stopped it
PATIENCE_S = 20.0  # that a process is given to end by itself
LOG = "train.log"


@dataclass(frozen=True, slots=True)
class Swept:
    """A sweep, where it is written down and drawn, and the runs that failed, with the reason."""

    sweep: Sweep
    path: Path
    map: Path
    failed: dict[str, str]


def sweep(
    config: RunConfig,
    *,
    stalenesses: Sequence[int],
    learning_rates: Sequence[float],
    updates: int | None = None,
    seeds: Sequence[int] = (0,),
    rule: CollapseRule | None = None,
    jobs: int | None = None,
    callback: ProgressCallback | None = None,
) -> Swept:
    """Make or finish every run of the grid, fit the law, and write it into the calibration.

    Runs that an earlier sweep of the same config and rule put there stay in the fit.
    """
    callback, rule = callback or NullCallback(), rule or CollapseRule()
    cells = make_grid(
        config,
        stalenesses=stalenesses,
        learning_rates=learning_rates,
        seeds=seeds,
        updates=updates or config.schedule.updates,
        rule=rule,
    )
    for cell in cells:
        check_identity(cell.config)
    identity_of_config(config)  # a model that is not there fails now, and not in every run
    failed = Crew(cells, jobs or default_jobs(config), rule, callback).run()
    found: list[SweepRun] = []
    for cell in cells:
        try:
            found += [outcome(cell, rule)] if cell.directory.name not in failed else []
        except CalibrationError as error:
            failed[cell.directory.name] = str(error)
    if not found:
        name, reason = next(iter(failed.items()))
        raise CalibrationError(f"all {len(failed)} runs of the sweep failed; {name}: {reason}")
    result = fit_sweep([*earlier_runs(config, rule, found), *found], rule)
    environment = read_json(Path(cells[0].config.runs) / found[0].directory / "environment.json")
    drawn = write_map(result, sweep_directory(config) / "map.html")
    return Swept(result, save_calibration(config, environment, sweep=result), drawn, failed)


def default_jobs(config: RunConfig) -> int:
    """As many runs side by side as the cores hold; one where there is a GPU, which they would share."""
    from stalewise.models.loading import pick_device

    if pick_device(config.model.device).type == "cuda":
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // (config.model.threads or 1))


def earlier_runs(config: RunConfig, rule: CollapseRule, found: Sequence[SweepRun]) -> list[SweepRun]:
    """Runs in the calibration of this config that were judged by the same rule and are not made anew."""
    path = calibration_path(config, identity_of_config(config))
    before = read_calibration(path).sweep if path.is_file() else None
    made = {run.key for run in found}
    return [run for run in before.runs if run.key not in made] if before is not None and before.rule == rule else []


def fit_sweep(runs: Sequence[SweepRun], rule: CollapseRule, *, resamples: int = 200) -> Sweep:
    """Fit the law, with so many resamples for its intervals.

    G of a plan is the median over runs that survived, or over all where none did.
    """
    known = [run for run in runs if math.isfinite(run.update_norm_per_lr)]
    stable = [run for run in known if run.collapsed_at is None]
    if not known:
        return Sweep(rule, list(runs), math.nan, None, "no run took an update: lower the learning rates")
    typical = statistics.median(run.update_norm_per_lr for run in stable or known)
    # A run whose very first update was not finite moved by an amount that nobody knows: it counts as a typical one.
    filled = [run if run in known else replace(run, update_norm_per_lr=typical) for run in runs]
    try:
        return Sweep(rule, filled, typical, fit((run.observation for run in filled), resamples=resamples))
    except CalibrationError as error:
        return Sweep(rule, filled, typical, None, str(error))


class Crew:
    """Processes that train the runs of a grid, some at a time; none is left behind."""

    def __init__(self, cells: Sequence[Cell], jobs: int, rule: CollapseRule, callback: ProgressCallback) -> None:
        self.waiting = deque(cells)
        self.jobs = jobs
        self.rule = rule
        self.callback = callback
        self.running: list[tuple[Cell, subprocess.Popen[bytes]]] = []
        self.failed: dict[str, str] = {}
        self.ended: list[Cell] = []
        self.runs = len(cells)
        self.updates = cells[0].config.schedule.updates
        self.told = 0

    def run(self) -> dict[str, str]:
        """Train what is not complete yet; the reasons of those that failed, by the names of their directories."""
        self.callback.begin("sweep", self.runs * self.updates)
        try:
            while self.waiting or self.running:
                while self.waiting and len(self.running) < self.jobs:
                    self._start(self.waiting.popleft())
                self._collect()
                self._tell()
                if self.running:
                    time.sleep(0.2)
        finally:
            self._stop()
        return self.failed

    def _start(self, cell: Cell) -> None:
        if cell.is_complete or (cell.directory / OUTCOME).is_file():
            self._end(cell)
            return
        words = [sys.executable, "-m", "stalewise", "train", str(cell.write_config()), "--json"]
        with open(cell.directory / LOG, "wb") as log:
            # A session of its own: Ctrl-C comes to this process, which ends the others one by one.
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log, start_new_session=True
            )
        self.running.append((cell, process))

    def _collect(self) -> None:
        for cell, process in list(self.running):
            status = process.poll()
            if status is None:
                continue
            self.running.remove((cell, process))
            if status == COLLAPSED:
                write_json_atomic(cell.directory / OUTCOME, {"status": status, "message": last_line(cell)})
            elif status != 0:
                self.failed[cell.directory.name] = last_line(cell) or f"exit status {status}"
            self._end(cell)

    def _end(self, cell: Cell) -> None:
        self.ended.append(cell)
        name = cell.directory.name
        self.callback.log(f"{name}: failed: {self.failed[name]}" if name in self.failed else self._describe(cell))

    def _describe(self, cell: Cell) -> str:
        try:
            return describe_run(outcome(cell, self.rule))
        except CalibrationError as error:
            return str(error)

    def _tell(self) -> None:
        # A run that has made its last update is not over: that policy is evaluated.
        going = sum(min(cell.updates_done, self.updates - 1) for cell, _ in self.running)
        done = len(self.ended) * self.updates + going
        note = f"{len(self.ended)} of {self.runs} runs"
        self.callback.advance(max(0, done - self.told), note + (f", {len(self.failed)} failed" if self.failed else ""))
        self.told = max(self.told, done)

    def _stop(self) -> None:
        for _, process in self.running:
            process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + PATIENCE_S
        for _, process in self.running:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def last_line(cell: Cell) -> str:
    """The last thing that a process said."""
    lines = (cell.directory / LOG).read_text(errors="replace").split("\n")
    return next((line.removeprefix("error: ") for line in reversed(lines) if line.strip()), "")
