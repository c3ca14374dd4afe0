"""Tables to plotly figures: one per chart, all runs overlaid, long curves thinned."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go

from stalewise.report.read import ACTIVITIES, IDLE, Column, Run
from stalewise.report.words import ACCURACY, CHARTS, Chart

LONGEST_CURVE = 1000  # points; a chart is about 600 pixels wide
BUCKETS = 500
FEW_POINTS = 32  # with so few, every update gets a marker
MOST_STAGE_LINES = 8
X_TITLE = "update (count, from 0)"

# Told apart on a light and on a dark ground, and by people who see few colours (with the dashes).
COLOURS = ("#3b82d6", "#e07b1f", "#2e9e6b", "#d1495b", "#8a63d2", "#a47148", "#d66aa8", "#7f8c98")
DASHES = ("solid", "dash", "dot")
ACTIVITY_COLOURS = {"generate": "#3b82d6", "learn": "#2e9e6b", "switch": "#e07b1f", "evaluate": "#8a63d2"}
IDLE_COLOUR = "#a9b1ba"


@dataclass(frozen=True, slots=True)
class Curve:
    """A curve as it is drawn; `low` and `high` are there where a point stands for several updates."""

    x: Column
    y: Column
    low: Column | None = None
    high: Column | None = None


@dataclass(frozen=True, slots=True)
class Style:
    """How a curve looks: metrics differ in dashes, since equal curves lie on each other, and runs in colour."""

    colour: str
    dash: str


def thin(x: Column, y: Column) -> Curve:
    """Replace a curve of more than LONGEST_CURVE points by the mean, minimum and maximum of at most BUCKETS buckets.

    Buckets are of equal width but for the last one. What is not finite is in no mean; a bucket of such values alone
    stays a gap.
    """
    y = np.where(np.isfinite(y), y, np.nan)
    if len(y) <= LONGEST_CURVE:
        return Curve(x, y)
    width = bucket_width(len(y))
    starts = np.arange(0, len(y), width)
    known = ~np.isnan(y)
    count = np.add.reduceat(known.astype(np.float64), starts)
    gap = np.where(count > 0, 0.0, np.nan)
    total = np.add.reduceat(np.where(known, y, 0.0), starts)
    low = np.minimum.reduceat(np.where(known, y, np.inf), starts)
    high = np.maximum.reduceat(np.where(known, y, -np.inf), starts)
    some = count > 0
    mean = total / np.maximum(count, 1) + gap
    middle = np.add.reduceat(x, starts) / np.diff(np.append(starts, len(y)))
    return Curve(middle, mean, np.where(some, low, np.nan), np.where(some, high, np.nan))


def bucket_width(points: int) -> int:
    """Updates per point of a curve of that many updates."""
    return 1 if points <= LONGEST_CURVE else -(-points // BUCKETS)


def draw_charts(runs: Sequence[Run]) -> dict[str, dict[str, Any]]:
    """Figures by the name of their chart, as plotly.js takes them; charts for which no run has a value are left out."""
    figures = {chart.name: draw(chart, runs) for chart in CHARTS}
    return {name: as_json(figure) for name, figure in figures.items() if figure.data}


def draw(chart: Chart, runs: Sequence[Run]) -> go.Figure:
    """One chart: every run, every metric."""
    figure = go.Figure(layout=layout(chart.y_title))
    for i, run in enumerate(runs):
        for j, key in enumerate(chart.keys):
            style = style_of(i, j, is_single=len(runs) == 1)
            # plotly takes text for HTML, and a run's name is none.
            name = key if len(runs) == 1 else f"{html.escape(run.label)}: {key}"
            traces = accuracy_traces(run, name, style) if key == ACCURACY else metric_traces(run, key, name, style)
            figure.add_traces([trace.update(meta={"run": i}) for trace in traces])  # the page shows and hides runs
    # Bands of several runs lie on each other.
    figure.update_traces(opacity=0.25 if len(runs) == 1 else 0.12, selector={"fill": "toself"})
    # All of the run to come, and the same in every chart, so that they can be read against each other.
    horizon = max(run.schedule.updates for run in runs)
    figure.update_xaxes(range=[-0.02 * horizon, 1.02 * horizon])
    if chart.is_share:
        figure.update_yaxes(range=[-0.03, 1.03])
    else:
        figure.update_yaxes(rangemode="tozero")
    if len(runs) == 1 and figure.data:
        add_stage_lines(figure, runs[0])
    return figure


def style_of(run: int, metric: int, *, is_single: bool) -> Style:
    """Colour and dash of a curve. Where there is one run, colours are free to tell its metrics apart as well."""
    return Style(COLOURS[(metric if is_single else run) % len(COLOURS)], DASHES[metric % len(DASHES)])


def metric_traces(run: Run, key: str, name: str, style: Style) -> list[go.Scatter]:
    """The line of one metric, over the band from minimum to maximum where it was thinned."""
    y = run.column(key)
    if not np.isfinite(y).any():
        return []
    curve = thin(run.column("update"), y)
    line = go.Scatter(
        x=small(curve.x),
        y=small(curve.y),
        name=name,
        mode="lines+markers" if len(curve.y) <= FEW_POINTS else "lines",
        line={"color": style.colour, "dash": style.dash, "width": 1.7},
        marker={"size": 4},
    )
    return [line] if curve.low is None else [_band(curve, name, style), line]


def _band(curve: Curve, name: str, style: Style) -> go.Scatter:
    """Closed outlines, one for each stretch without a gap: along the maxima and back along the minima."""
    assert curve.low is not None and curve.high is not None
    known = np.flatnonzero(~np.isnan(curve.y))
    x, y = [], []
    for stretch in np.split(known, np.flatnonzero(np.diff(known) > 1) + 1):
        x += [curve.x[stretch], curve.x[stretch[::-1]], [np.nan]]
        y += [curve.high[stretch], curve.low[stretch[::-1]], [np.nan]]
    return go.Scatter(
        x=small(np.concatenate(x)),
        y=small(np.concatenate(y)),
        fill="toself",
        fillcolor=style.colour,
        mode="lines",
        line={"width": 0},
        hoverinfo="skip",
        name=f"{name}, minimum to maximum",
    )


def accuracy_traces(run: Run, name: str, style: Style) -> list[go.Scatter]:
    """Held-out accuracy with its interval; version v is the policy that update v starts from."""
    points = [(record["version"], record["accuracy"]) for record in run.evaluations]
    value, low, high = (np.array([point[key] for _, point in points]) for key in ("value", "low", "high"))
    if not np.isfinite(value).any():
        return []
    bars = {"array": high - value, "arrayminus": value - low, "thickness": 1.5, "width": 4, "color": style.colour}
    return [
        go.Scatter(
            x=np.array([version for version, _ in points]),
            y=value,
            error_y=bars,
            name=name,
            mode="lines+markers",
            line={"color": style.colour, "dash": style.dash, "width": 1.2},
            marker={"size": 8, "symbol": "diamond"},
        )
    ]


def add_stage_lines(figure: go.Figure, run: Run) -> None:
    """Mark where a new generation batch begins, unless that would be a hatching."""
    starts = [run.schedule.updates_of(batch).start for batch in range(1, run.schedule.generation_batches)]
    if len(starts) <= MOST_STAGE_LINES:
        for start in starts:
            figure.add_vline(x=start, line={"width": 1, "dash": "dot", "color": IDLE_COLOUR}, layer="below")


def draw_time(runs: Sequence[Run]) -> dict[str, Any]:
    """Where the time went: one stacked bar per run."""
    names = list(dict.fromkeys([*ACTIVITIES, *(name for run in runs for name in run.seconds if name != IDLE), IDLE]))
    figure = go.Figure(layout=layout("run (name)"))
    for name in names:
        figure.add_bar(
            y=[html.escape(run.label) for run in runs],
            x=[round(run.seconds.get(name, 0.0), 3) for run in runs],
            name=name,
            orientation="h",
            marker={"color": ACTIVITY_COLOURS.get(name, IDLE_COLOUR), "line": {"width": 0}},
        )
    legend = {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "traceorder": "normal"}
    figure.update_layout(
        barmode="stack", hovermode="y unified", height=150 + 34 * len(runs), showlegend=True, legend=legend
    )
    figure.update_xaxes(title="wall-clock time (seconds)", rangemode="tozero")
    figure.update_yaxes(autorange="reversed", type="category")  # the first run on top, as in the tables
    return as_json(figure)


def layout(y_title: str) -> go.Layout:
    """What all figures have in common. The page adds colours, since only it knows whether it is dark.

    It also has the legend: with several runs in a chart plotly's would take more room than the curves.
    """
    axis = {"zeroline": False, "automargin": True, "linewidth": 1, "ticks": "outside", "ticklen": 4}
    axis["exponentformat"] = "power"  # 3×10⁻⁴ where plotly would write 300µ
    return go.Layout(
        template="none",
        height=310,
        margin={"l": 64, "r": 16, "t": 28, "b": 52},
        xaxis={**axis, "title": X_TITLE},
        yaxis={**axis, "title": y_title, "hoverformat": ".4~g"},
        hovermode="x unified",
        showlegend=False,
    )


def small(values: Column) -> np.ndarray[Any, Any]:
    """Half the bytes on the page, and seven digits, which is more than a screen shows."""
    return values.astype(np.float32)


def as_json(figure: go.Figure) -> dict[str, Any]:
    """What plotly.js takes; arrays become base64, and NaN in them a gap."""
    text = figure.to_json()
    assert text is not None
    return json.loads(text)
