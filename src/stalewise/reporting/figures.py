"""Draws the charts of the report as plotly figures: all runs overlaid, long curves thinned."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go

from stalewise.reporting.compare import NORMAL_95
from stalewise.reporting.read import ACTIVITIES, IDLE, Column, Run, StageSeconds, total_seconds, version_clock
from stalewise.reporting.summary import ACCURACY, Chart, charts_of

LONGEST_CURVE = 1000  # points; a chart is about 600 pixels wide
BUCKETS = 500
FEW_POINTS = 32  # up to this number, every update gets a marker
MOST_STAGE_LINES = 8
LOG_TICKS = ((2.0, 1), (0.7, "D2"))  # above 2 decades: powers of ten; above 0.7: also 2 and 5 times these
X_TITLE = "update (count, from 0)"
TIME_TITLE = "training time (seconds)"

# Contrast of 3 to 1 on the light and the dark page; with the dashes, also distinct for colour-blind readers.
COLOURS = ("#3b82d6", "#cf6f17", "#2b9664", "#d1495b", "#8a63d2", "#a47148", "#c9589a", "#74818d")
DASHES = ("solid", "dash", "dot")
STAGE_COLOUR = ROLLED_BACK_COLOUR = "#7f8a94"
LIMIT_COLOUR = "#d1495b"


@dataclass(frozen=True, slots=True)
class MetricSeries:
    """The values of one metric of a run or of a rollback; `spread` is the error below and above."""

    x: Column
    y: Column
    spread: tuple[Column, Column] | None = None
    is_rolled_back: bool = False


@dataclass(frozen=True, slots=True)
class DrawnCurve:
    """A curve as it is drawn, with the ends of its band if it has one."""

    x: Column
    y: Column
    low: Column | None = None
    high: Column | None = None


@dataclass(frozen=True, slots=True)
class LineStyle:
    """The look of a curve: dashes tell metrics apart, colours tell runs apart."""

    colour: str
    dash: str


def thin(x: Column, y: Column) -> DrawnCurve:
    """Replace a curve of more than LONGEST_CURVE points by mean, minimum and maximum of at most BUCKETS buckets.

    Buckets have equal width, except the last. Non-finite values are left out; a bucket without a finite value is a gap.
    """
    y = np.where(np.isfinite(y), y, np.nan)
    if len(y) <= LONGEST_CURVE:
        return DrawnCurve(x, y)
    starts = np.arange(0, len(y), bucket_width(len(y)))
    known = ~np.isnan(y)
    count = np.add.reduceat(known.astype(np.float64), starts)
    gap = np.where(count > 0, 0.0, np.nan)
    mean = np.add.reduceat(np.where(known, y, 0.0), starts) / np.maximum(count, 1) + gap
    low = np.minimum.reduceat(np.where(known, y, np.inf), starts)
    high = np.maximum.reduceat(np.where(known, y, -np.inf), starts)
    middle = np.add.reduceat(x, starts) / np.diff(np.append(starts, len(y)))
    return DrawnCurve(middle, mean, np.where(count > 0, low, np.nan), np.where(count > 0, high, np.nan))


def bucket_width(points: int) -> int:
    """Updates per drawn point of a curve."""
    return 1 if points <= LONGEST_CURVE else -(-points // BUCKETS)


def draw_charts(runs: Sequence[Run]) -> dict[str, dict[str, Any]]:
    """Figures for plotly.js by chart name; charts without any value are left out."""
    figures = {chart.name: draw(chart, runs) for chart in charts_of(runs)}
    return {name: as_json(figure) for name, figure in figures.items() if figure.data}


def draw(chart: Chart, runs: Sequence[Run]) -> go.Figure:
    """One chart with every run and metric, including what was rolled back."""
    figure = go.Figure(layout=layout(chart.y_title))
    drawn: list[tuple[MetricSeries, list[go.Scatter]]] = []
    for i, run in enumerate(runs):
        for j, key in enumerate(chart.keys):
            style = style_of(i, j, is_single=len(runs) == 1)
            name = html.escape(key if len(runs) == 1 else f"{run.label}: {key}")  # plotly reads names as HTML
            for series in series_of(run, chart, key):
                # The page shows and hides runs by `meta`.
                drawn.append((series, [t.update(meta={"run": i}) for t in traces_of(series, key, name, style)]))
    for _, traces in sorted(drawn, key=lambda pair: not pair[0].is_rolled_back):  # rolled back: underneath
        figure.add_traces(traces)
    # Bands of several runs overlap.
    figure.update_traces(opacity=0.25 if len(runs) == 1 else 0.12, selector={"fill": "toself"})
    set_axes(figure, chart, runs, [series for series, _ in drawn])
    if len(runs) == 1 and figure.data and not chart.is_against_time:
        add_stage_lines(figure, runs[0])
    if chart.limit is not None and figure.data:
        figure.add_hline(y=chart.limit, line={"width": 1.5, "dash": "dash", "color": LIMIT_COLOUR}, layer="below")
    return figure


def set_axes(figure: go.Figure, chart: Chart, runs: Sequence[Run], drawn: Sequence[MetricSeries]) -> None:
    """Set the ranges of the axes, comparable between charts."""
    if chart.is_against_time:
        figure.update_xaxes(title=TIME_TITLE, rangemode="tozero")
    else:  # the whole planned run, the same in every chart
        horizon = max(run.planned_updates for run in runs)
        figure.update_xaxes(range=[-0.02 * horizon, 1.02 * horizon])
    if chart.is_share:
        figure.update_yaxes(range=[-0.03, 1.03])
    elif chart.is_log:
        values = np.concatenate([np.empty(0), *(series.y for series in drawn)])
        values = values[np.isfinite(values) & (values > 0)]
        decades = float(np.log10(values.max() / values.min())) if len(values) else 0.0
        step = next((step for least, step in LOG_TICKS if decades > least), None)
        figure.update_yaxes(type="log", minor={"ticks": "outside", "ticklen": 2}, dtick=step)
    elif chart.has_zero:
        figure.update_yaxes(rangemode="tozero")


def series_of(run: Run, chart: Chart, key: str) -> list[MetricSeries]:
    """The values of one metric of a run, followed by those of its rollbacks."""
    parts = [(run.metrics, run.evaluations, run.clock, False)]
    parts += [(rollback.metrics, rollback.evaluations, rollback.clock, True) for rollback in run.rollbacks]
    known_series: list[MetricSeries] = []
    for metrics, evaluations, clock, is_rolled_back in parts:
        if key == ACCURACY:
            versions = [record["version"] for record in evaluations]
            x = [version_clock(metrics, clock, version) for version in versions] if chart.is_against_time else versions
            value, low, high = (
                np.array([record["accuracy"][end] for record in evaluations]) for end in ("value", "low", "high")
            )
            series = MetricSeries(np.array(x, dtype=float), value, (value - low, high - value), is_rolled_back)
        else:
            y = metrics.get(key, np.empty(0))
            x = clock if chart.is_against_time else metrics.get("update", y)
            error = metrics.get(f"{key}_error")
            spread = None if error is None else (NORMAL_95 * error, NORMAL_95 * error)
            series = MetricSeries(x[: len(y)], y, spread, is_rolled_back)
        if (np.isfinite(series.x) & np.isfinite(series.y)).any():
            known_series.append(series)
    return known_series


def style_of(run: int, metric: int, *, is_single: bool) -> LineStyle:
    """Colour and dash of a curve. With a single run, colours also tell its metrics apart."""
    return LineStyle(COLOURS[(metric if is_single else run) % len(COLOURS)], DASHES[metric % len(DASHES)])


def traces_of(series: MetricSeries, key: str, name: str, style: LineStyle) -> list[go.Scatter]:
    """The plotly traces of a series: grey and dotted if it was rolled back."""
    if series.is_rolled_back:
        name, style = f"{name}, rolled back", LineStyle(ROLLED_BACK_COLOUR, "dot")
    return (accuracy_traces if key == ACCURACY else metric_traces)(series, name, style)


def metric_traces(series: MetricSeries, name: str, style: LineStyle) -> list[go.Scatter]:
    """A line over its band: minimum to maximum if it was thinned, otherwise the 95% interval if it is known."""
    known = np.isfinite(series.x)
    curve, what = thin(series.x[known], series.y[known]), "minimum to maximum"
    if curve.low is None and series.spread is not None:
        below, above = (part[known] for part in series.spread)
        curve, what = DrawnCurve(curve.x, curve.y, curve.y - below, curve.y + above), "95% interval"
    line = go.Scatter(
        x=curve.x.astype(np.float32),  # half the bytes on the page, and seven digits are enough
        y=curve.y.astype(np.float32),
        name=name,
        mode="lines+markers" if len(curve.y) <= FEW_POINTS else "lines",
        line={"color": style.colour, "dash": style.dash, "width": 1.7},
        marker={"size": 4},
    )
    has_band = curve.low is not None and np.isfinite(curve.low).any()
    return [_band(curve, f"{name}, {what}", style), line] if has_band else [line]


def _band(curve: DrawnCurve, name: str, style: LineStyle) -> go.Scatter:
    """One closed outline for each part without a gap: along the maxima and back along the minima."""
    assert curve.low is not None and curve.high is not None
    known = np.flatnonzero(np.isfinite(curve.low))
    x, y = [], []
    for part in np.split(known, np.flatnonzero(np.diff(known) > 1) + 1):
        x += [curve.x[part], curve.x[part[::-1]], [np.nan]]
        y += [curve.high[part], curve.low[part[::-1]], [np.nan]]
    x, y = (np.concatenate(values).astype(np.float32) for values in (x, y))
    look = {"fill": "toself", "fillcolor": style.colour, "mode": "lines", "line": {"width": 0}, "hoverinfo": "skip"}
    return go.Scatter(x=x, y=y, name=name, **look)


def accuracy_traces(series: MetricSeries, name: str, style: LineStyle) -> list[go.Scatter]:
    """Held-out accuracy with error bars; version v is the policy before update v."""
    assert series.spread is not None
    below, above = series.spread
    bars = {"array": above, "arrayminus": below, "thickness": 1.5, "width": 4, "color": style.colour}
    line = {"color": style.colour, "dash": style.dash, "width": 1.2}
    look = {"mode": "lines+markers", "line": line, "marker": {"size": 8, "symbol": "diamond"}}
    return [go.Scatter(x=series.x, y=series.y, error_y=bars, name=name, **look)]


def add_stage_lines(figure: go.Figure, run: Run) -> None:
    """Mark the start of each generation batch, if they are few, and the versions of rollbacks."""
    starts = run.stage_starts if len(run.stage_starts) <= MOST_STAGE_LINES else []
    lines = [(start, {"width": 1, "dash": "dot", "color": STAGE_COLOUR}) for start in starts]
    red = {"width": 1.5, "dash": "dash", "color": LIMIT_COLOUR}
    for x, line in [*lines, *((rollback.record["to_version"], red) for rollback in run.rollbacks)]:
        figure.add_vline(x=x, line=line, layer="below")


def layout(y_title: str) -> go.Layout:
    """The layout of all figures. The page adds the colours of its theme, and has the legend in its captions."""
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


def as_json(figure: go.Figure) -> dict[str, Any]:
    """A figure for plotly.js; arrays become base64, and NaN a gap."""
    return json.loads(str(figure.to_json()))


MOST_BARS = 16  # in all charts of stages together
FEWEST_BARS = 4  # in each chart of stages
LONGEST_LABEL = 16  # characters; more would leave no room for the bar on a phone
COLOUR_LIST = ("#3b82d6", "#2b9664", "#cf6f17", "#c9589a", "#8a63d2", "#7f8a94")
BAR_COLOURS: dict[str, str] = dict(zip((*ACTIVITIES, IDLE), COLOUR_LIST, strict=True))
PATTERNS = {"wait": "/", IDLE: "."}  # waiting and idle time have patterns, not only colours

TimeBar = tuple[str, Mapping[str, float]]  # label, seconds by activity


def run_bars(runs: Sequence[Run]) -> list[TimeBar]:
    """One bar per run, and one more for the second process of a pipelined run."""
    bars: list[TimeBar] = []
    for run in runs:
        bars.append((run.label if not run.generator else f"{run.label}, trainer", run.seconds))
        if run.generator:
            bars.append((f"{run.label}, generator", total_seconds(run.generator)))
    return bars


def group_stages(spent: StageSeconds, most: int) -> list[TimeBar]:
    """At most `most` bars, each of equally many consecutive stages, except the last."""
    stages = sorted(spent)
    width = -(-len(stages) // most)
    bars: list[TimeBar] = []
    for start in range(0, len(stages), width or 1):
        part = stages[start : start + width]
        name = f"stage {part[0]}" if len(part) == 1 else f"stages {part[0]} to {part[-1]}"
        bars.append((name, total_seconds({stage: spent[stage] for stage in part})))
    return bars


def shorten(label: str) -> str:
    """A label without its middle, if it is long: names of runs differ at the start or at the end."""
    half = LONGEST_LABEL // 2
    return label if len(label) <= LONGEST_LABEL else f"{label[:half]}…{label[1 - half :]}"


def draw_bars(bars: Sequence[TimeBar], y_title: str) -> dict[str, Any]:
    """Stacked bars of seconds, for plotly.js."""
    names = dict.fromkeys([*ACTIVITIES, *(name for _, seconds in bars for name in seconds), IDLE])
    names = [name for name in names if name != IDLE and any(seconds.get(name) for _, seconds in bars)] + [IDLE]
    labels = [html.escape(label) for label, _ in bars]
    figure = go.Figure(layout=layout(y_title))
    for name in names:
        pattern = {"shape": PATTERNS.get(name, ""), "size": 6, "fillmode": "overlay", "fgcolor": "#ffffff"}
        figure.add_bar(
            y=labels,
            x=[round(seconds.get(name, 0.0), 3) for _, seconds in bars],
            name=html.escape(name),
            orientation="h",
            marker={"color": BAR_COLOURS.get(name, BAR_COLOURS[IDLE]), "line": {"width": 0}, "pattern": pattern},
        )
    legend = {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "traceorder": "normal"}
    height = 190 + 30 * len(bars)
    figure.update_layout(barmode="stack", hovermode="y unified", height=height, showlegend=True, legend=legend)
    figure.update_layout(margin={"t": 60})  # the legend, two lines on a phone, goes below the buttons
    figure.update_xaxes(title="wall-clock time (seconds)", rangemode="tozero")
    # The first on top, as in the tables.
    figure.update_yaxes(autorange="reversed", type="category", title={"standoff": 12})
    figure.update_yaxes(tickvals=labels, ticktext=[html.escape(shorten(label)) for label, _ in bars])
    return as_json(figure)
