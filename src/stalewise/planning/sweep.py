"""A sweep: parallel runs over a grid of staleness and learning rate, and the law fitted to their outcomes."""

from __future__ import annotations

import math
import os
import signal
import statistics
import subprocess
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go

from stalewise.config import RunConfig
from stalewise.config.run_directory import check_identity, read_config
from stalewise.config.sections import ModelSection
from stalewise.errors import CalibrationError
from stalewise.planning import calibration
from stalewise.planning.calibration import CollapseRule, Sweep, SweepRun
from stalewise.planning.grid import OUTCOME, GridCell, describe_run, make_grid, outcome
from stalewise.staleness.law import Estimate, fit
from stalewise.store.atomic import read_json, write_atomic, write_json_atomic
from stalewise.tasks.base import child_command
from stalewise.types import NullCallback, ProgressCallback

COLLAPSED = 4  # exit status of `stalewise train` after a non-finite update or a stop by the guard
GRACE_S = 20.0  # for a process to exit after SIGINT
LOG = "train.log"


@dataclass(frozen=True, slots=True)
class SweepResult:
    """A sweep, its calibration file and map, and the reasons of failed runs by directory name."""

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
) -> SweepResult:
    """Run every run of the grid, fit the law to them and to earlier ones of the same rule, and save the calibration."""
    callback, rule, updates = callback or NullCallback(), rule or CollapseRule(), updates or config.schedule.updates
    cells = make_grid(
        config, stalenesses=stalenesses, learning_rates=learning_rates, seeds=seeds, updates=updates, rule=rule
    )
    for cell in cells:
        check_identity(cell.config)
    identity = calibration.identity_of_config(config)  # a missing model fails here and not in every run
    failed = SweepProcesses(cells, jobs or default_jobs(config.model), rule, callback).run()
    runs: list[SweepRun] = []
    for cell in cells:
        try:
            runs += [outcome(cell, rule)] if cell.directory.name not in failed else []
        except CalibrationError as error:
            failed[cell.directory.name] = str(error)
    if not runs:
        name, reason = next(iter(failed.items()))
        raise CalibrationError(f"all {len(failed)} runs of the sweep failed; {name}: {reason}")
    directory = Path(cells[0].config.runs)
    first_run = directory / runs[0].directory
    environment = read_json(first_run / "environment.json")
    engine = read_config(first_run).sampler.engine
    before = calibration.earlier_calibration(config.runs, identity)
    keys = {run.key for run in runs}
    if before is not None and before.sweep is not None and before.sweep.rule == rule:
        runs = [*(run for run in before.sweep.runs if run.key not in keys), *runs]
    result = fit_sweep(runs, rule)
    drawn = write_map(result, directory / "map.html")
    path = calibration.save_calibration(config, environment, engine=engine, sweep=result)
    return SweepResult(result, path, drawn, failed)


def default_jobs(model: ModelSection) -> int:
    """As many parallel runs as the cores allow; one on a GPU, which several would share."""
    from stalewise.models import pick_device

    if pick_device(model.device).type == "cuda":
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // (model.threads or 1))


def fit_sweep(runs: Sequence[SweepRun], rule: CollapseRule, *, resamples: int = 200) -> Sweep:
    """Fit the law, with resamples for its intervals. G is the median over runs that survived, or all if none did."""
    known = [run for run in runs if math.isfinite(run.update_norm_per_lr)]
    stable = [run for run in known if run.collapsed_at is None]
    if not known:
        return Sweep(rule, list(runs), math.nan, None, "no run took an update: lower the learning rates")
    typical = statistics.median(run.update_norm_per_lr for run in stable or known)
    # The drift of a run whose very first update was not finite is unknown: it counts as typical.
    filled = [run if run in known else replace(run, update_norm_per_lr=typical) for run in runs]
    try:
        return Sweep(rule, filled, typical, fit((run.observation for run in filled), resamples=resamples))
    except CalibrationError as error:
        return Sweep(rule, filled, typical, None, str(error))


class SweepProcesses:
    """Trains the runs of a grid in a limited number of processes; none survives `run`."""

    def __init__(self, cells: Sequence[GridCell], jobs: int, rule: CollapseRule, callback: ProgressCallback) -> None:
        self.waiting = deque(cells)
        self.jobs, self.rule, self.callback = jobs, rule, callback
        self.running: dict[GridCell, subprocess.Popen[bytes]] = {}
        self.failed: dict[str, str] = {}
        self.ended = self.reported = 0
        self.runs, self.updates = len(cells), cells[0].config.schedule.updates

    def run(self) -> dict[str, str]:
        """Train the runs that are not complete; returns the reasons of failed runs by directory name."""
        self.callback.begin("sweep", self.runs * self.updates)
        try:
            while self.waiting or self.running:
                while self.waiting and len(self.running) < self.jobs:
                    self._start(self.waiting.popleft())
                for cell, process in list(self.running.items()):
                    if (status := process.poll()) is not None:
                        self._collect(cell, status)
                self._report()
                if self.running:
                    time.sleep(0.2)
        finally:
            self._stop()
        return self.failed

    def _start(self, cell: GridCell) -> None:
        if cell.is_complete or (cell.directory / OUTCOME).is_file():
            self._end(cell)
            return
        command = child_command("stalewise", "train", str(cell.write_config()), "--json")
        with open(cell.directory / LOG, "wb") as log:
            # Its own session: Ctrl-C reaches this process only, which ends the others one by one.
            self.running[cell] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log, start_new_session=True
            )

    def _collect(self, cell: GridCell, status: int) -> None:
        del self.running[cell]
        lines = (cell.directory / LOG).read_text(errors="replace").split("\n")
        message = next((line.removeprefix("error: ") for line in reversed(lines) if line.strip()), "")
        if status == COLLAPSED:
            write_json_atomic(cell.directory / OUTCOME, {"status": status, "message": message})
        elif status != 0:
            self.failed[cell.directory.name] = message or f"exit status {status}"
        self._end(cell)

    def _end(self, cell: GridCell) -> None:
        self.ended += 1
        name = cell.directory.name
        try:
            failure = self.failed.get(name)
            self.callback.log(f"{name}: failed: {failure}" if failure else describe_run(outcome(cell, self.rule)))
        except CalibrationError as error:
            self.callback.log(str(error))

    def _report(self) -> None:
        # A run with all its updates is not complete until its last policy is evaluated.
        running = sum(min(cell.updates_done, self.updates - 1) for cell in self.running)
        done = max(self.reported, self.ended * self.updates + running)
        failures = f", {len(self.failed)} failed" if self.failed else ""
        self.callback.advance(done - self.reported, f"{self.ended} of {self.runs} runs{failures}")
        self.reported = done

    def _stop(self) -> None:
        for process in self.running.values():
            process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + GRACE_S
        for process in self.running.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


STABLE_COLOUR, COLLAPSED_COLOUR = "#2e9e6b", "#d1495b"
BATCH, HORIZON = "#3b82d6", "#e07b1f"
BEYOND = 1.5  # the map extends by this factor beyond what was tried


def write_map(sweep: Sweep, path: Path) -> Path:
    """Write the map as one self-contained HTML file."""
    write_atomic(path, draw_map(sweep).to_html(include_plotlyjs=True, div_id="map"))
    return path


def draw_map(sweep: Sweep) -> go.Figure:
    """Points for runs, and a line with its interval for each constraint that the fit knows or bounds."""
    updates = max(run.updates for run in sweep.runs)
    axis = {"type": "log", "exponentformat": "power", "dtick": 1, "ticks": "outside", "linewidth": 1}
    layout = {
        "template": "none",
        "title": {"text": f"Stability of {len(sweep.runs)} runs of up to {updates} updates"},
        "xaxis": {**axis, "title": {"text": "staleness S (updates)"}},
        "yaxis": {**axis, "title": {"text": "learning rate η"}},
    }
    figure = go.Figure(layout={**layout, "width": 820, "height": 560})
    lags = [run.staleness for run in sweep.runs]
    staleness = np.array([min(lags) / BEYOND, max(lags) * BEYOND])
    if sweep.fit is not None:
        norm = sweep.update_norm_per_lr
        _add_line(figure, "R_batch / (S·G)", sweep.fit.batch_radius, staleness, staleness * norm, BATCH)
        whole = np.full(2, updates * norm)
        _add_line(figure, f"R_crit / (T·G), T = {updates}", sweep.fit.critical_radius, staleness, whole, HORIZON)
    for name, colour, symbol in (("survived", STABLE_COLOUR, "circle"), ("collapsed", COLLAPSED_COLOUR, "x")):
        runs = [run for run in sweep.runs if (run.collapsed_at is not None) == (name == "collapsed")]
        figure.add_scatter(
            x=[run.staleness * 1.03**run.seed for run in runs],  # shifted, so that seeds do not hide each other
            y=[run.learning_rate for run in runs],
            text=[describe_run(run) for run in runs],
            hoverinfo="text",
            mode="markers",
            name=f"{name} ({len(runs)})",
            marker={"color": colour, "symbol": symbol, "size": 10},
        )
    return figure


def _add_line(figure: go.Figure, name: str, radius: Estimate, x: Any, drift_per_rate: Any, colour: str) -> None:
    """Draw η = R / (drift per unit of η) within the radius' interval; only the known ends if it is open."""
    low, high = (end if 0.0 < end < math.inf else None for end in (radius.low, radius.high))
    if low is not None and high is not None:
        outline = {
            "x": np.concatenate([x, x[::-1]]),
            "y": np.concatenate([low / drift_per_rate, (high / drift_per_rate)[::-1]]),
        }
        style = {"fill": "toself", "fillcolor": colour, "opacity": 0.2, "mode": "lines", "line": {"width": 0}}
        figure.add_trace(go.Scatter(outline | style, hoverinfo="skip", showlegend=False))
    ends = ((low, "dot", f"{name}: at least"), (high, "dot", f"{name}: at most"))
    for value, dash, label in ((radius.value, "solid", name),) if radius.known else ends:
        if value is not None:
            line = {"color": colour, "dash": dash, "width": 2}
            figure.add_trace(go.Scatter(x=x, y=value / drift_per_rate, mode="lines", name=label, line=line))
