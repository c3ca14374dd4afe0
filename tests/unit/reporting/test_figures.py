"""Curves: thinning, bands, axes, stages and rollbacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rundirs import add_batch, add_evaluation, metrics, warnings, write_run
from stalewise.reporting.figures import (
    BUCKETS,
    LONGEST_CURVE,
    STAGE_COLOUR,
    bucket_width,
    draw,
    draw_charts,
    thin,
)
from stalewise.reporting.read import Run, read_run, read_runs
from stalewise.reporting.render import describe_chart, describe_thinning, render, write_report
from stalewise.reporting.summary import CHARTS, Chart, summarize
from stalewise.store.atomic import write_json_atomic
from stalewise.store.json_lines import append_line

ESS = next(chart for chart in CHARTS if chart.name == "ess")


def traces(chart: Chart, run: Run) -> list[Any]:
    return list(draw(chart, [run]).select_traces())


def stage_lines(run: Run) -> list[float]:
    return [shape["x0"] for shape in draw(ESS, [run]).to_dict()["layout"].get("shapes", ())]


def test_an_evaluation_is_drawn_before_anything_is_learned(tmp_path: Path) -> None:
    assert set(draw_charts([read_run(write_run(tmp_path / "run", done=0))])) == {"reward", "reward-time"}


def test_a_curve_of_1000_points_is_left_alone() -> None:
    y = np.arange(float(LONGEST_CURVE))
    curve = thin(y, y)
    np.testing.assert_array_equal(curve.y, y)
    assert curve.low is None and bucket_width(LONGEST_CURVE) == 1


def test_thinning_keeps_mean_and_extremes() -> None:
    x = np.arange(1001.0)  # ⌈1001 / 500⌉ = 3 updates per point: 333 buckets of 3, and one of 2
    y = np.zeros(1001)
    y[4], y[7], y[8] = 9.0, np.nan, -3.0
    y[9:12] = np.inf
    curve = thin(x, y)
    assert curve.low is not None and curve.high is not None
    assert len(curve.x) == 334 <= BUCKETS
    np.testing.assert_array_equal(curve.x[[0, 1, -1]], [1, 4, 999.5])
    # Updates 3 to 5 are 0, 9, 0; updates 6 to 8 are 0, unknown, −3; updates 9 to 11 are not finite.
    np.testing.assert_allclose(curve.y[:5], [0, 3, -1.5, np.nan, 0])
    np.testing.assert_allclose(curve.low[:5], [0, 0, -3, np.nan, 0])
    np.testing.assert_allclose(curve.high[:5], [0, 9, 0, np.nan, 0])


def test_the_band_of_a_thinned_curve_has_the_same_gaps(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "long", updates=1200))
    run.metrics["ess"][6:9] = np.nan  # the third of the buckets of ⌈1200 / 500⌉ = 3
    band, line, *_ = traces(ESS, run)
    assert len(line.y) == 400 and np.flatnonzero(np.isnan(line.y)).tolist() == [2]
    # Buckets 0 and 1, there and back, in the middle of their updates; a gap; then the other 397.
    np.testing.assert_array_equal(band.x[:6], [1, 4, 4, 1, np.nan, 10])
    np.testing.assert_array_equal(band.y[:6], [0.25, 0.25, 0.25, 0.25, np.nan, 0.25])
    assert len(band.x) == 2 * 2 + 1 + 2 * 397 + 1
    assert "3 updates in long" in describe_thinning([run])


def test_accuracy_has_its_interval_and_its_version(tmp_path: Path) -> None:
    _, accuracy = traces(CHARTS[0], read_run(write_run(tmp_path / "run")))
    np.testing.assert_array_equal(accuracy.x, [0, 8])
    np.testing.assert_allclose(accuracy.error_y.array, [0.05, 0.05])
    np.testing.assert_allclose(accuracy.error_y.arrayminus, [0.05, 0.05])


def test_stages_are_marked_where_they_are_few(tmp_path: Path) -> None:
    few = write_run(tmp_path / "few")
    many = write_run(tmp_path / "many", updates=64, schedule={"updates": 64, "stages": 32})
    for update in range(64):
        append_line(many / "metrics.jsonl", metrics(update) | {"generation_batch": update // 2})
    assert stage_lines(read_run(few)) == [4]
    assert stage_lines(read_run(many)) == []


def test_stages_are_marked_where_they_happened(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", done=3)
    assert stage_lines(read_run(run)) == []  # the schedule has one at update 4; nobody has got there
    append_line(run / "metrics.jsonl", metrics(3) | {"generation_batch": 1})
    assert stage_lines(read_run(run)) == [3]


def test_curves_against_time_use_the_clock(tmp_path: Path) -> None:
    chart = next(chart for chart in CHARTS if chart.is_against_time)
    reward, accuracy = traces(chart, read_run(write_run(tmp_path / "run")))
    # 10 s of generating, then 8 updates in 20 s.
    np.testing.assert_allclose(reward.x, 10 + 2.5 * np.arange(1, 9))
    np.testing.assert_allclose(accuracy.x, [0, 30])


def test_the_reward_has_a_band_where_its_error_is_known(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", updates=4))
    run.metrics["reward_error"] = np.array([0.1, np.nan, 0.05, 0.05])
    band, line, _ = traces(CHARTS[0], run)
    assert (band.name, band.fill, line.name) == ("reward, 95% interval", "toself", "reward")
    # Alone, update 0; then, after a gap, 2 and 3: along the upper ends and back along the lower.
    np.testing.assert_array_equal(band.x, [0, 0, np.nan, 2, 3, 3, 2, np.nan])
    ends = 0.25 + 1.96 * np.array([0.1, -0.1, np.nan, 0.05, 0.05, -0.05, -0.05, np.nan])
    np.testing.assert_allclose(band.y, ends, rtol=1e-6)


@pytest.mark.parametrize(("largest", "step"), [(0.5, None), (2.0, "D2"), (900.0, 1)])
def test_a_narrow_log_axis_has_labels_between_the_powers_of_ten(tmp_path: Path, largest: float, step: object) -> None:
    run = read_run(write_run(tmp_path / "run"))
    run.metrics["ratio_max_positive"][3] = largest
    chart = next(chart for chart in CHARTS if chart.is_log)
    assert draw(chart, [run]).to_dict()["layout"]["yaxis"].get("dtick") == step


def test_what_was_taken_back_is_grey_and_said(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", done=6)
    place = run / "rollbacks" / "r000"
    record = {"from_version": 6, "to_version": 4, "reason": "the reward fell", "value": 0.1, "best": 0.8, "time": 130.0}
    record |= {"learning_rate_factor": 0.5, "batches": ["g000001-v000004"], "led_there": [0, 1]}
    write_json_atomic(place / "rollback.json", record)
    for update in (4, 5):
        append_line(place / "metrics.jsonl", metrics(update, ess=0.05))
    add_evaluation(place, 6, 0.1)
    add_batch(place, 1, 4, rows=512)
    found = read_run(run)
    assert "; another 2 updates and 512 rollouts were rolled back." in summarize(found).cost
    table = render(read_runs([run, write_run(tmp_path / "other")]))
    assert "6 of 8 and 2 rolled back</td>" in table and "2048 and 512 rolled back</td>" in table
    said = "The run was rolled back from version 6 to 4: the reward fell (0.1; its best was 0.8); learned before it "
    said += "from generation batch 0, 1; the learning rate is"
    assert said in warnings(found)
    assert "ESS falls" not in warnings(found)  # that was taken back
    taken, _, kept, _ = traces(ESS, found)  # what stands is drawn last, so it lies on top
    assert (kept.name, taken.name) == ("ess", "ess, rolled back")
    assert taken.line.color == STAGE_COLOUR and list(taken.x) == [4, 5]
    assert 4 in stage_lines(found)
    assert "ess, rolled back: first 0.05 at update 4" in describe_chart(ESS, [found])
    assert "Dotted grey curves were rolled back" in write_report([run]).read_text()
