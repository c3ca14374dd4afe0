"""Charts in words, for whoever does not see them: first, last, lowest and highest value of every curve."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stalewise.report.bars import Row
from stalewise.report.figures import Series, series_of
from stalewise.report.read import Run
from stalewise.report.words import Chart


def chart_in_words(chart: Chart, runs: Sequence[Run]) -> str:
    """A sentence per curve."""
    where = "second" if chart.is_against_time else "update"
    sentences = [
        curve_in_words(series, f"{run.label}: {key}" if len(runs) > 1 else key, where)
        for run in runs
        for key in chart.keys
        for series in series_of(run, chart, key)
    ]
    return f"{chart.title}, {chart.y_title}. {' '.join(sentences)}"


def curve_in_words(series: Series, name: str, where: str) -> str:
    """First, last, lowest and highest value, and where they are.

    >>> curve_in_words(Series(np.arange(3.0), np.array([0.5, 0.25, 1.0])), "ess", "update")
    'ess: first 0.5 at update 0, last 1 at update 2, lowest 0.25 at update 1, highest 1 at update 2.'
    """
    known = np.isfinite(series.x) & np.isfinite(series.y)
    x, y = series.x[known], series.y[known]
    places = {"first": 0, "last": len(y) - 1, "lowest": int(y.argmin()), "highest": int(y.argmax())}
    parts = [f"{word} {y[place]:.4g} at {where} {x[place]:.6g}" for word, place in places.items()]
    return f"{name}{', taken back' if series.is_taken_back else ''}: {', '.join(parts)}."


def bars_in_words(rows: Sequence[Row]) -> str:
    """A sentence per bar: its length, and what it consists of.

    >>> bars_in_words([("stage 0", {"generate": 1.0, "learn": 3.0, "idle": 0.0})])
    'stage 0: 4.0 s, of which generate 25%, learn 75%.'
    """
    sentences: list[str] = []
    for name, seconds in rows:
        whole = sum(seconds.values())
        parts = [f"{activity} {part / whole:.0%}" for activity, part in seconds.items() if part] if whole else []
        sentences.append(f"{name}: {whole:.1f} s{', of which ' if parts else ''}{', '.join(parts)}.")
    return " ".join(sentences)
