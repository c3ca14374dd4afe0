"""The map of a sweep: learning rate against staleness, with runs that survived or collapsed and both constraints."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go

from stalewise.planning.calibration import Sweep
from stalewise.planning.grid import describe_run
from stalewise.staleness.law import Estimate
from stalewise.store.atomic import write_atomic

STABLE, COLLAPSED = "#2e9e6b", "#d1495b"
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
    for name, colour, symbol in (("survived", STABLE, "circle"), ("collapsed", COLLAPSED, "x")):
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
