"""Draws where the time went as stacked bars: one per run and process, and one per stage."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from stalewise.reporting.figures import as_json, layout
from stalewise.reporting.read import Run
from stalewise.reporting.timeline import ACTIVITIES, IDLE, StageSeconds, total_seconds

MOST_BARS = 16  # in all charts of stages together
FEWEST_BARS = 4  # in each of them
LONGEST_LABEL = 16  # characters; more would leave no room for the bar on a phone
COLOUR_LIST = ("#3b82d6", "#2b9664", "#cf6f17", "#c9589a", "#8a63d2", "#7f8a94")
BAR_COLOURS: dict[str, str] = dict(zip((*ACTIVITIES, IDLE), COLOUR_LIST, strict=True))
PATTERNS = {"wait": "/", IDLE: "."}  # what is no work is also told apart without colour

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
