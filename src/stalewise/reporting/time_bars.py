"""Where the time went, as stacked bars: one per run and process, and one per stage."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from stalewise.reporting.figures import as_json, layout
from stalewise.reporting.read import Run
from stalewise.reporting.timeline import ACTIVITIES, IDLE, Spent, total

MOST_ROWS = 16  # bars of all charts of stages
FEWEST_ROWS = 4  # of each of them
LONGEST_LABEL = 16  # characters beside a bar; more would leave no room for it on a phone
COLOURS = {
    "generate": "#3b82d6",
    "learn": "#2b9664",
    "switch": "#cf6f17",
    "wait": "#c9589a",
    "evaluate": "#8a63d2",
    IDLE: "#7f8a94",
}
PATTERNS = {"wait": "/", IDLE: "."}  # what is no work also looks different to whoever sees few colours

Row = tuple[str, Mapping[str, float]]


def rows_of_runs(runs: Sequence[Run]) -> list[Row]:
    """One bar per run, and one more for the second process of a pipelined run."""
    rows: list[Row] = []
    for run in runs:
        rows.append((run.label if not run.generator else f"{run.label}, learner", run.seconds))
        if run.generator:
            rows.append((f"{run.label}, generator", total(run.generator)))
    return rows


def rows_of_stages(run: Run, charts: int = 1) -> list[Row]:
    """One bar per stage, or per few consecutive stages where there are many; fewer bars where there are more charts."""
    return grouped(run.spent, max(FEWEST_ROWS, MOST_ROWS // charts))


def grouped(spent: Spent, most: int) -> list[Row]:
    """At most so many rows, each of equally many consecutive stages but for the last.

    >>> grouped({0: {"learn": 1.0}, 1: {"learn": 2.0}, 2: {"learn": 4.0}}, 2)[0][0]
    'stages 0 to 1'
    """
    stages = sorted(spent)
    width = -(-len(stages) // most)
    rows: list[Row] = []
    for start in range(0, len(stages), width or 1):
        part = stages[start : start + width]
        name = f"stage {part[0]}" if len(part) == 1 else f"stages {part[0]} to {part[-1]}"
        rows.append((name, total({stage: spent[stage] for stage in part})))
    return rows


def short(label: str) -> str:
    """A label without its middle, where it is long; names of runs differ at the beginning or at the end.

    >>> short("stages 0 to 3"), short("arithmetic-grpo-fresh-seed0")
    ('stages 0 to 3', 'arithmet…h-seed0')
    """
    half = LONGEST_LABEL // 2
    return label if len(label) <= LONGEST_LABEL else f"{label[:half]}…{label[1 - half :]}"


def draw_bars(rows: Sequence[Row], y_title: str) -> dict[str, Any]:
    """Stacked bars of seconds, as plotly.js takes them."""
    names = dict.fromkeys([*ACTIVITIES, *(name for _, seconds in rows for name in seconds), IDLE])
    names = [name for name in names if name != IDLE and any(seconds.get(name) for _, seconds in rows)] + [IDLE]
    figure = go.Figure(layout=layout(y_title))
    for name in names:
        figure.add_bar(
            y=[html.escape(label) for label, _ in rows],
            x=[round(seconds.get(name, 0.0), 3) for _, seconds in rows],
            name=html.escape(name),
            orientation="h",
            marker={
                "color": COLOURS.get(name, COLOURS[IDLE]),
                "line": {"width": 0},
                "pattern": {"shape": PATTERNS.get(name, ""), "size": 6, "fillmode": "overlay", "fgcolor": "#ffffff"},
            },
        )
    legend = {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "traceorder": "normal"}
    height = 190 + 30 * len(rows)
    figure.update_layout(barmode="stack", hovermode="y unified", height=height, showlegend=True, legend=legend)
    figure.update_layout(margin={"t": 60})  # the legend, which takes two lines on a phone, is below the buttons
    figure.update_xaxes(title="wall-clock time (seconds)", rangemode="tozero")
    # The first on top, as in the tables.
    figure.update_yaxes(autorange="reversed", type="category", title={"standoff": 12})
    labels = [label for label, _ in rows]
    figure.update_yaxes(tickvals=[*map(html.escape, labels)], ticktext=[html.escape(short(label)) for label in labels])
    return as_json(figure)
