"""Tables to plotly figures: one per chart, all runs overlaid, long curves thinned."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go

from stalewise.reporting.read import Run, version_clock
from stalewise.reporting.timeline import Column
from stalewise.reporting.wording import ACCURACY, CHARTS, Chart

LONGEST_CURVE = 1000  # points; a chart is about 600 pixels wide
BUCKETS = 500
FEW_POINTS = 32  # with so few, every update gets a marker
MOST_STAGE_LINES = 8
NORMAL_95 = 1.96  # half of an interval's width, in standard errors
LOG_TICKS = ((2.0, 1), (0.7, "D2"))  # beyond so many decades: every power of ten; also 2 and 5 times these
X_TITLE = "update (count, from 0)"
TIME_TITLE = "training time (seconds)"

# Told apart on a light and on a dark ground (3 to 1 on both), and by people who see few colours (with the dashes).
COLOURS = ("#3b82d6", "#cf6f17", "#2b9664", "#d1495b", "#8a63d2", "#a47148", "#c9589a", "#74818d")
DASHES = ("solid", "dash", "dot")
STAGE_COLOUR = TAKEN_BACK_COLOUR = "#7f8a94"
LIMIT_COLOUR = "#d1495b"


@dataclass(frozen=True, slots=True)
class Curve:
    """A curve as it is drawn; `low` and `high` are the ends of its band, where it has one."""

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
    """One chart: every run, every metric, and what was taken back."""
    figure = go.Figure(layout=layout(chart.y_title))
    drawn: list[tuple[Series, list[go.Scatter]]] = []
    for i, run in enumerate(runs):
        for j, key in enumerate(chart.keys):
            style = style_of(i, j, is_single=len(runs) == 1)
            # plotly takes text for HTML, and a run's name is none.
            name = key if len(runs) == 1 else f"{html.escape(run.label)}: {key}"
            for series in series_of(run, chart, key):
                # The page shows and hides runs.
                drawn.append((series, [t.update(meta={"run": i}) for t in curves(series, key, name, style)]))
    for _, traces in sorted(drawn, key=lambda pair: not pair[0].is_taken_back):  # what stands lies on top
        figure.add_traces(traces)
    # Bands of several runs lie on each other.
    figure.update_traces(opacity=0.25 if len(runs) == 1 else 0.12, selector={"fill": "toself"})
    set_axes(figure, chart, runs, [series for series, _ in drawn])
    if len(runs) == 1 and figure.data and not chart.is_against_time:
        add_stage_lines(figure, runs[0])
    if chart.limit is not None and figure.data:
        figure.add_hline(y=chart.limit, line={"width": 1.5, "dash": "dash", "color": LIMIT_COLOUR}, layer="below")
    return figure


def set_axes(figure: go.Figure, chart: Chart, runs: Sequence[Run], drawn: Sequence[Series]) -> None:
    """Ranges that can be read against those of other charts."""
    if chart.is_against_time:
        figure.update_xaxes(title=TIME_TITLE, rangemode="tozero")
    else:  # all of the run to come, and the same in every chart
        horizon = max(run.planned_updates for run in runs)
        figure.update_xaxes(range=[-0.02 * horizon, 1.02 * horizon])
    if chart.is_share:
        figure.update_yaxes(range=[-0.03, 1.03])
    elif chart.is_log:
        figure.update_yaxes(type="log", minor={"ticks": "outside", "ticklen": 2})
        step = next((step for least, step in LOG_TICKS if decades(drawn) > least), None)
        figure.update_yaxes(dtick=step)
    elif chart.has_zero:
        figure.update_yaxes(rangemode="tozero")


def decades(drawn: Sequence[Series]) -> float:
    """How many powers of ten the values span."""
    values = np.concatenate([np.empty(0), *(series.y for series in drawn)])
    known = values[np.isfinite(values) & (values > 0)]
    return float(np.log10(known.max() / known.min())) if len(known) else 0.0


@dataclass(frozen=True, slots=True)
class Series:
    """The values of one metric of one run, or of a stretch of it that was taken back; `spread` is below and above."""

    x: Column
    y: Column
    spread: tuple[Column, Column] | None = None
    is_taken_back: bool = False


def series_of(run: Run, chart: Chart, key: str) -> list[Series]:
    """What a chart shows of one metric of a run: what stands, and then what was taken back."""
    parts = [(run.metrics, run.evaluations, run.clock, False)]
    parts += [(rollback.metrics, rollback.evaluations, rollback.clock, True) for rollback in run.rollbacks]
    found: list[Series] = []
    for metrics, evaluations, clock, is_taken_back in parts:
        if key == ACCURACY:
            x = [version_clock(metrics, clock, record["version"]) for record in evaluations]
            x = x if chart.is_against_time else [record["version"] for record in evaluations]
            value, low, high = (
                np.array([record["accuracy"][end] for record in evaluations]) for end in ("value", "low", "high")
            )
            series = Series(np.array(x, dtype=float), value, (value - low, high - value), is_taken_back)
        else:
            y = metrics.get(key, np.empty(0))
            x = clock if chart.is_against_time else metrics.get("update", y)
            error = metrics.get(f"{key}_error")
            spread = None if error is None else (NORMAL_95 * error, NORMAL_95 * error)
            series = Series(x[: len(y)], y, spread, is_taken_back)
        if (np.isfinite(series.x) & np.isfinite(series.y)).any():
            found.append(series)
    return found


def curves(series: Series, key: str, name: str, style: Style) -> list[go.Scatter]:
    """A series as it is drawn: grey and dotted where it was taken back."""
    if series.is_taken_back:
        name, style = f"{name}, taken back", Style(TAKEN_BACK_COLOUR, "dot")
    return (accuracy_traces if key == ACCURACY else metric_traces)(series, name, style)


def style_of(run: int, metric: int, *, is_single: bool) -> Style:
    """Colour and dash of a curve. Where there is one run, colours are free to tell its metrics apart as well."""
    return Style(COLOURS[(metric if is_single else run) % len(COLOURS)], DASHES[metric % len(DASHES)])


def metric_traces(series: Series, name: str, style: Style) -> list[go.Scatter]:
    """The line of one metric, over a band: from minimum to maximum where it was thinned, or its 95% interval."""
    known = np.isfinite(series.x)
    curve, what = thin(series.x[known], series.y[known]), "minimum to maximum"
    if curve.low is None and series.spread is not None:
        below, above = (part[known] for part in series.spread)
        curve, what = Curve(curve.x, curve.y, curve.y - below, curve.y + above), "95% interval"
    line = go.Scatter(
        x=small(curve.x),
        y=small(curve.y),
        name=name,
        mode="lines+markers" if len(curve.y) <= FEW_POINTS else "lines",
        line={"color": style.colour, "dash": style.dash, "width": 1.7},
        marker={"size": 4},
    )
    has_band = curve.low is not None and np.isfinite(curve.low).any()
    return [_band(curve, f"{name}, {what}", style), line] if has_band else [line]


def _band(curve: Curve, name: str, style: Style) -> go.Scatter:
    """Closed outlines, one for each stretch without a gap: along the maxima and back along the minima."""
    assert curve.low is not None and curve.high is not None
    known = np.flatnonzero(np.isfinite(curve.low))
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
        name=name,
    )


def accuracy_traces(series: Series, name: str, style: Style) -> list[go.Scatter]:
    """Held-out accuracy with its interval; version v is the policy that update v starts from."""
    assert series.spread is not None
    below, above = series.spread
    bars = {"array": above, "arrayminus": below, "thickness": 1.5, "width": 4, "color": style.colour}
    return [
        go.Scatter(
            x=series.x,
            y=series.y,
            error_y=bars,
            name=name,
            mode="lines+markers",
            line={"color": style.colour, "dash": style.dash, "width": 1.2},
            marker={"size": 8, "symbol": "diamond"},
        )
    ]


def add_stage_lines(figure: go.Figure, run: Run) -> None:
    """Mark where a new generation batch begins, unless that would be a hatching, and where a run was taken back to."""
    if len(run.stage_starts) <= MOST_STAGE_LINES:
        for start in run.stage_starts:
            figure.add_vline(x=start, line={"width": 1, "dash": "dot", "color": STAGE_COLOUR}, layer="below")
    for rollback in run.rollbacks:
        line = {"width": 1.5, "dash": "dash", "color": LIMIT_COLOUR}
        figure.add_vline(x=rollback.record["to_version"], line=line, layer="below")


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
        hoverlabel={"namelength": -1},
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
