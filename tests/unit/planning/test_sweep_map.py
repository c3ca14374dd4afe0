"""The map of a sweep."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stalewise.planning.sweep import draw_map, fit_sweep, write_map
from sweeps import RULE, simulated_runs


def test_the_map_shows_every_run_and_both_constraints(tmp_path: Path) -> None:
    swept = fit_sweep(simulated_runs(), RULE, resamples=0)
    assert swept.fit is not None
    figure = json.loads(draw_map(swept).to_json() or "")
    traces = {trace.get("name"): trace for trace in figure["data"]}
    collapsed = sum(run.collapsed_at is not None for run in swept.runs)
    assert {f"survived ({40 - collapsed})", f"collapsed ({collapsed})"} < set(traces)
    drawn: Any = draw_map(swept)
    line = next(trace for trace in drawn.data if trace.name == "R_batch / (S·G)")
    for staleness, rate in zip(line.x, line.y, strict=True):
        assert staleness * rate == pytest.approx(swept.fit.batch_radius.value)
    assert (figure["layout"]["xaxis"]["type"], figure["layout"]["yaxis"]["type"]) == ("log", "log")
    nothing = fit_sweep([replace(run, collapsed_at=None) for run in swept.runs], RULE)
    bounded: Any = draw_map(nothing)
    assert "R_batch / (S·G): at least" in {trace.name for trace in bounded.data}
    page = write_map(swept, tmp_path / "map.html").read_text()
    assert "plotly" in page and 'id="map"' in page
