"""The report on runs in every state: complete, cut short, never begun, long, compared, and with hostile text."""

from __future__ import annotations

import base64
import gzip
import json
import math
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rundirs import PLOTTED, add_batch, add_evaluation, metrics, write_run
from stalewise.config import RunConfig, make_config, write_resolved
from stalewise.errors import StoreError
from stalewise.reporting import write_report
from stalewise.reporting.figures import (
    BUCKETS,
    COLOURS,
    LIMIT_COLOUR,
    LONGEST_CURVE,
    STAGE_COLOUR,
    bucket_width,
    draw,
    draw_charts,
    thin,
)
from stalewise.reporting.read import Run, differing_keys, metric_columns, read_run, read_runs, verifier_errors
from stalewise.reporting.render import describe_chart, describe_thinning, packed_plotly, render
from stalewise.reporting.summary import ranking, summarize
from stalewise.reporting.time_bars import BAR_COLOURS, MOST_BARS, group_stages, run_bars, stage_bars
from stalewise.reporting.timeline import (
    add_uncommitted,
    committed_updates,
    seconds_by_stage,
    total_seconds,
    update_clock,
)
from stalewise.reporting.wording import ACCURACY, CHARTS, METRICS, Chart
from stalewise.store.atomic import append_line, write_json_atomic

DOCUMENT = Path(__file__).parents[3] / "docs" / "metrics.md"
HOSTILE = "</script><img src=x onerror=alert(1)>&amp;"
ESS = next(chart for chart in CHARTS if chart.name == "ess")


def figures_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


def text_of(page: str) -> str:
    """What is on the page besides the packed library."""
    return page.replace(packed_plotly(), "")


def traces(chart: Chart, run: Run) -> list[Any]:
    return list(draw(chart, [run]).select_traces())


def stage_lines(run: Run) -> list[float]:
    return [shape["x0"] for shape in draw(ESS, [run]).to_dict()["layout"].get("shapes", ())]


def warnings(run: Run) -> str:
    return "\n".join(summarize(run).warnings)


# ---------------------------------------------------------------- the page


def test_a_complete_run_makes_one_page_with_everything(tmp_path: Path) -> None:
    run = write_run(tmp_path / "first")
    path = write_report([run])
    assert path == run / "report" / "index.html"
    page = path.read_text()
    for words in ("Improved.", "0.400 [0.350, 0.450]", "0.800 [0.750, 0.850]", "8 of 8 updates", "2 of 2 generation"):
        assert words in page, words
    assert "The records show no problem." in page
    assert set(figures_of(page)) == {*(chart.name for chart in CHARTS), "time", "stages-0"}
    assert page == render(read_runs([run]))  # no date and no chance in it


def test_the_page_asks_for_nothing_outside_of_itself(tmp_path: Path) -> None:
    page = text_of(write_report([write_run(tmp_path / "run")]).read_text())
    # A setting's description may name an address as text.
    assert re.findall(r"""(?:src|href)\s*=(?!"#)|url\(|@import|https?://(?!localhost:\d)""", page) == []
    assert "default-src 'none'" in page


def test_the_library_inside_is_plotly() -> None:
    code = gzip.decompress(base64.b64decode(packed_plotly())).decode()
    assert code.lstrip().startswith("/**\n* plotly.js")


def test_every_axis_has_a_title_with_a_unit(tmp_path: Path) -> None:
    for figure in figures_of(write_report([write_run(tmp_path / "run")]).read_text()).values():
        for axis in ("xaxis", "yaxis"):
            assert re.fullmatch(r".+ \(.+\)", figure["layout"][axis]["title"]["text"])


def test_every_metric_that_is_drawn_is_documented() -> None:
    documented = set(re.findall(r"^\| `(\w+)` \|", DOCUMENT.read_text(), flags=re.MULTILINE))
    assert set(PLOTTED) - {ACCURACY} <= documented
    assert set(PLOTTED) == set(METRICS)


def test_the_words_on_the_page_are_those_of_the_document() -> None:
    def plain(cell: str) -> str:
        return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", cell).replace("`", "").replace("\\|", "|").strip()

    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in DOCUMENT.read_text().splitlines() if line.startswith("| `")]
    found = {plain(cells[0]): (plain(cells[1]), plain(cells[3])) for cells in rows}
    written = {key: (metric.definition, metric.check_when) for key, metric in METRICS.items() if key != ACCURACY}
    assert written == {key: found.get(key) for key in written}


def test_text_of_a_run_stays_text(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a<b>&c", task={"name": "jsonl", "options": {"path": HOSTILE}})
    other = write_run(tmp_path / "other")
    add_evaluation(run, 9, 0.5, task=HOSTILE, verifier_errors=1, verifier_error_kinds={HOSTILE: 1})
    append_line(run / "journal.jsonl", {"time": 10.0, "event": HOSTILE, "seconds": 1.0})
    write_json_atomic(run / "environment.json", {"device": HOSTILE})
    page = text_of(write_report([run, other], tmp_path / "page.html").read_text())
    assert "<img" not in page and "a<b>" not in page
    assert page.count("</script>") == 3
    # plotly takes names for HTML, too.
    assert figures_of(page)["ess"]["data"][0]["name"] == "a&lt;b&gt;&amp;c: ess"
    assert HOSTILE.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;") in page


def test_a_long_run_fits_into_5_megabytes(tmp_path: Path) -> None:
    path = write_report([write_run(tmp_path / "long", updates=4096)])
    assert path.stat().st_size < 5_000_000
    # ⌈4096 / 500⌉ = 9 updates per point.
    assert "9 updates in long" in path.read_text()


def test_output_may_be_a_file_or_a_directory(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    assert write_report([run], tmp_path / "new" / "page.html") == tmp_path / "new" / "page.html"
    assert write_report([run], tmp_path) == tmp_path / "index.html"
    assert (tmp_path / "index.html").read_text() == (tmp_path / "new" / "page.html").read_text()


# ---------------------------------------------------------------- runs in other states


def test_a_run_that_was_cut_short(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", done=5)
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"update": 5, "rew')
    (run / "rollouts" / "g000007-v000004").mkdir()
    page = write_report([run]).read_text()
    assert "Not evaluated after learning." in page
    assert "The run is not finished: 5 of 8 updates" in page
    assert "the last line (6) is torn" in page
    assert "g000007-v000004 is not complete (0 rollouts so far): left out" in page


def test_a_run_that_never_learned(tmp_path: Path) -> None:
    write_resolved(make_config({}), tmp_path / "config.resolved.json")
    page = write_report([tmp_path]).read_text()
    for words in ("Not evaluated.", "0 of 128 updates", "0 of 4 generation batches", "No time is on record."):
        assert words in page
    assert set(figures_of(page)) == {"time"}
    assert "Not drawn, because no value is recorded: Reward and held-out accuracy, Reward" in page
    assert "environment.json is missing" in page


def test_an_evaluation_is_drawn_before_anything_is_learned(tmp_path: Path) -> None:
    assert set(draw_charts([read_run(write_run(tmp_path / "run", done=0))])) == {"reward", "reward-time"}


def test_what_is_no_run_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="is no run directory: "):
        write_report([tmp_path])
    with pytest.raises(StoreError, match="at least one"):
        write_report([])
    run = write_run(tmp_path / "run")
    with pytest.raises(StoreError, match="named twice"):
        write_report([run, tmp_path / "." / "run"])
    write_json_atomic(run / "config.resolved.json", {"format": "stalewise.run/0"})
    with pytest.raises(StoreError, match=r"has format stalewise.run/0; this release reads stalewise.run/1"):
        write_report([run])


# ---------------------------------------------------------------- several runs


def test_runs_are_compared(tmp_path: Path) -> None:
    first = write_run(tmp_path / "a" / "run")
    second = write_run(tmp_path / "b" / "run", objective={"name": "p3o"}, seed=3)
    path = write_report([first, second])
    assert path == first / "report" / "comparison.html"
    page = path.read_text()
    table = page[page.index("Settings that differ") :]
    table = table[: table.index("</table>")]
    assert re.findall(r"<tr><td><code>(.+?)</code>", table) == ["seed", "objective.name"]
    assert "Environment: no difference." in page
    assert "a/run has the highest last accuracy, 0.800 [0.750, 0.850]; the intervals of b/run overlap it." in page
    curves = figures_of(page)["ess"]["data"]
    assert [curve["name"] for curve in curves] == [
        *("a/run: ess", "a/run: ess_sequence", "b/run: ess", "b/run: ess_sequence")
    ]
    assert [curve["meta"]["run"] for curve in curves] == [0, 0, 1, 1]
    assert curves[0]["line"]["color"] != curves[2]["line"]["color"]
    assert curves[0]["line"]["dash"] != curves[1]["line"]["dash"]


def test_the_ranking_knows_what_it_cannot_say(tmp_path: Path) -> None:
    good, bad, other = (write_run(tmp_path / name) for name in ("good", "bad", "other"))
    add_evaluation(bad, 9, 0.69)  # [0.64, 0.74] ends below 0.75, where that of `good` begins
    assert ranking(read_runs([bad, good])).endswith("0.800 [0.750, 0.850], above all others.")
    add_evaluation(other, 9, 0.9, task="gym")
    assert "cannot be compared" in ranking(read_runs([good, other]))
    (bad / "eval.jsonl").unlink()
    assert "Fewer than two" in ranking(read_runs([good, bad]))


def test_a_key_that_only_one_table_has_is_a_difference() -> None:
    assert differing_keys([{"a": None, "b": 1}, {"b": 1}]) == ["a"]
    assert differing_keys([{"a": 1}]) == []


# ---------------------------------------------------------------- in words


@pytest.mark.parametrize(
    ("value", "verdict"),
    # The first evaluation is 0.4 with [0.35, 0.45], and every interval is ± 0.05.
    [(0.52, "Improved"), (0.48, "No clear change"), (0.28, "Got worse"), (math.nan, "No clear change")],
)
def test_the_verdict_follows_from_the_intervals(tmp_path: Path, value: float, verdict: str) -> None:
    run = write_run(tmp_path / "run")
    add_evaluation(run, 8, value)
    assert summarize(read_run(run)).verdict == verdict


JOURNAL = [
    {"time": 104.0, "event": "switch", "seconds": 4.0},  # 100 to 104
    {"time": 110.0, "event": "generate", "seconds": 5.0, "generation_batch": 0},  # 105 to 110, after 1 s of nothing
    {"time": 120.0, "event": "learn", "seconds": 10.0, "first": 0, "stop": 2},  # at once
    {"time": 150.0, "event": "evaluate", "seconds": 3.0},  # 147 to 150, after 27 s
    {"time": 152.0, "event": "generate", "seconds": 2.0, "generation_batch": 1},
]
# Updates 0 and 1 are in the journal; 2 and 3 are not yet: 0.5 + 0.25.
LEARNED = {"update": np.arange(4.0), "seconds": np.array([2.0, 6.0, 0.5, 0.25])}


def stage_of(update: int) -> int:
    return update // 2


def test_time_is_split_by_stage_and_the_rest_is_idle() -> None:
    spent = seconds_by_stage(JOURNAL, stage_of)
    assert sum(total_seconds(spent).values()) == pytest.approx(152 - 100)
    add_uncommitted(spent, LEARNED, 2, stage_of)
    assert spent[0] == pytest.approx({"switch": 4.0, "generate": 5.0, "learn": 10.0, "evaluate": 3.0, "idle": 28.0})
    assert spent[1] == pytest.approx({"generate": 2.0, "learn": 0.75})
    assert total_seconds(spent) == pytest.approx(
        {"generate": 7, "learn": 10.75, "switch": 4, "evaluate": 3, "idle": 28}
    )


def test_the_clock_of_updates_leaves_out_evaluating_and_idle_time() -> None:
    # 4 + 5 s before learning; its 10 s are dealt 2 : 6; then 2 s of generating, and what is not journalled.
    np.testing.assert_allclose(update_clock(JOURNAL, LEARNED, 2), [11.5, 19, 21.5, 21.75])
    # Without times of its own an update gets an equal share.
    np.testing.assert_allclose(update_clock(JOURNAL, {"update": np.arange(3.0)}, 2), [14, 19, np.nan])


def test_after_a_rollback_the_journal_is_ahead_of_the_run() -> None:
    assert committed_updates(JOURNAL, []) == 2
    assert committed_updates(JOURNAL, [{"time": 119.0, "to_version": 0}]) == 2
    assert committed_updates(JOURNAL, [{"time": 121.0, "to_version": 1}]) == 1
    assert committed_updates([], []) == 0


def test_many_stages_share_bars(tmp_path: Path) -> None:
    spent = {stage: {"learn": 1.0} for stage in range(33)}
    rows = group_stages(spent, MOST_BARS)
    assert len(rows) == 11 and rows[0][0] == "stages 0 to 2" and rows[-1][0] == "stages 30 to 32"
    assert [seconds["learn"] for _, seconds in rows] == [3.0] * 11
    assert [name for name, _ in group_stages({0: {}, 1: {}}, 16)] == ["stage 0", "stage 1"]
    runs = read_runs([write_run(tmp_path / "a"), write_run(tmp_path / "b")])
    assert [name for name, _ in stage_bars(runs[0], 2)] == ["stage 0"]
    figures = figures_of(render(runs))
    assert figures["stages-0"]["data"][0]["y"] == figures["stages-1"]["data"][0]["y"] == ["stage 0"]


def test_the_second_process_has_a_bar_of_its_own(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    for record in ({"event": "generate", "generation_batch": 0}, {"event": "wait"}):
        append_line(run / "journal-generator.jsonl", {"time": 110.0, "seconds": 4.0, **record})
    rows = dict(run_bars([read_run(run)]))
    assert rows["run, trainer"] == {"generate": 10, "learn": 20, "switch": 0, "evaluate": 0, "idle": 0}
    assert rows["run, generator"]["wait"] == 4
    page = write_report([run]).read_text()
    assert "run, generator: 8.0 s, of which generate 50%, wait 50%." in page
    assert "The generator process took 8.0 s: 50% generating, 50% waiting." in page
    assert "67% learning" in page and "0% switching" not in page


WARNINGS = [
    ({"ess": 0.05}, "ESS falls to 0.05 and is below 0.1 in 12% of the updates"),
    ({"nonfinite": 3.0}, "3 tokens had a ratio that is not finite"),
    ({"grad_norm": math.inf}, "grad_norm is not finite in 1 update"),
    ({"taken": 0.0}, "1 of 8 updates had nothing to learn from"),
    ({"degenerate_fraction": 3.0}, "59% of the groups have equal rewards"),  # (7 · 0.25 + 3) / 8 = 0.594
    ({"age_max": 4.0}, "Rollouts reach age 4; the schedule allows 3"),  # 8 updates in 2 stages
    ({"log_ratio_max_abs": 0.2}, "On fresh rollouts log-ratios reach 0.2"),
    ({"batch_budget": 0.85}, "batch_budget reaches 0.85: 85% of the drift that the law allows within one generation"),
    ({"horizon_budget": 1.2}, "horizon_budget reaches 1.20: more than all of the drift that the law allows over the"),
]


@pytest.mark.parametrize(("change", "words"), WARNINGS)
def test_what_is_wrong_with_updates_is_said(tmp_path: Path, change: dict[str, float], words: str) -> None:
    run = write_run(tmp_path / "run", done=7)
    assert warnings(read_run(run)) == ""
    append_line(run / "metrics.jsonl", metrics(7, **change))
    assert words in warnings(read_run(run))


def test_an_update_that_was_not_taken_is_no_gap_to_warn_of(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", done=7)
    append_line(run / "metrics.jsonl", {"update": 7, "reward": 1.0, "taken": 0.0})
    assert "not finite" not in warnings(read_run(run))


def test_truncation_and_verifier_errors_are_said(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", sampler={"max_new_tokens": 16})
    kinds = {"verifier_error_kinds": {"timeout": 4}}
    # 300 + 800 of 2048 rollouts are 54%; 5 + 2 errors, of which 1 has no kind.
    add_batch(run, 0, 0, truncated=300, verifier_errors=5, extra=kinds)
    add_batch(run, 1, 4, truncated=800)
    add_evaluation(run, 8, 0.8, truncated_fraction=0.75, verifier_errors=2, verifier_error_kinds={"timeout": 2})
    found = warnings(read_run(run))
    assert "54% of the rollouts are truncated at sampler.max_new_tokens = 16; raise it." in found
    assert "In an evaluation 75% of the responses are truncated at 16 tokens." in found
    assert "failed on 7 responses: timeout (6), of no recorded kind (1)" in found
    assert verifier_errors(read_run(run)).total() == 7
    assert "No answer was found" not in found


def test_responses_without_an_answer_are_said(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    examples = [{"prompt_id": name, "response": "?"} for name in ("a", "a", "b", "c", "d")]
    add_batch(run, 0, 0, extra={"unparsed": 5, "unparsed_examples": examples})
    add_batch(run, 1, 4, extra={"unparsed": "many", "unparsed_examples": [7, {"prompt_id": None}]})  # damaged
    add_evaluation(run, 8, 0.8, unparsed=2, unparsed_examples=3)
    found = warnings(read_run(run))
    assert "No answer was found in 7 responses, for example at a, b, c; they count as wrong." in found


# ---------------------------------------------------------------- columns and curves


def test_columns_are_sorted_and_the_last_record_of_an_update_counts() -> None:
    columns = metric_columns([{"update": 1, "a": 5}, {"update": 0, "a": 1.5}, {"update": 1, "b": True, "c": "text"}])
    np.testing.assert_array_equal(columns["update"], [0, 1])
    np.testing.assert_array_equal(columns["a"], [1.5, np.nan])
    np.testing.assert_array_equal(columns["b"], [np.nan, 1])
    assert np.isnan(columns["c"]).all()


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


# ---------------------------------------------------------------- stages that end by themselves, and runs taken back


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


def test_stages_that_end_when_they_are_spent(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", schedule={"updates": 8, "end": "spent"})
    ended = {"reason": "effective sample size", "ess": 0.87, "bound": 0.9}
    for batch, first in ((0, 0), (1, 4)):
        stage = {"generation_batch": batch, "first_update": first, "planned_updates": 6}
        append_line(run / "ledger" / "stages.jsonl", stage | {"ended": ended if batch else None})
    append_line(run / "metrics.jsonl", metrics(7, age_max=7.0))
    page = write_report([run]).read_text()
    assert "on 2 generation batches (" in page
    assert "effective sample size (ess 0.87, bound 0.9)" in page
    assert "the schedule allows" not in page  # it does not know before


def test_a_run_that_learned_from_the_rollouts_of_others(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", updates=8, schedule={"updates": 128})
    shutil.rmtree(run / "rollouts")
    write_json_atomic(run / "sources.json", {"batches": [{"updates": 6}, {"updates": 2}]})
    assert "8 of 8 updates with grpo are done, on 2 generation batches of other runs." in summarize(read_run(run)).cost


# ---------------------------------------------------------------- damage


def test_a_corrupt_line_does_not_hide_the_others(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join([*lines[:2], "{damaged", *lines[3:], '{"no": 1}']) + "\n")
    found = read_run(run)
    assert found.column("update").tolist() == [0, 1, 3, 4, 5, 6, 7]
    assert "metrics.jsonl, line 3 is corrupt" in warnings(found) and "8 readable lines are used" in warnings(
        found
    )
    assert "1 of 8 records lack required keys or have wrong values (update): left out" in warnings(found)
    assert write_report([run]).is_file()


DAMAGED_RECORDS = [
    ("metrics.jsonl", {"update": "three"}),
    ("metrics.jsonl", {"update": None}),
    ("journal.jsonl", {"time": None, "event": "learn", "seconds": 1.0, "first": 0, "stop": 2}),
    ("journal.jsonl", {"time": 200.0, "event": "learn", "seconds": 1.0, "first": 0}),
    ("journal-generator.jsonl", {"time": 200.0, "event": "generate", "seconds": "x"}),
    ("ledger/stages.jsonl", {"generation_batch": 0, "ended": "early"}),
]


@pytest.mark.parametrize(("file", "record"), DAMAGED_RECORDS)
def test_a_record_of_a_wrong_form_is_left_out_and_said(tmp_path: Path, file: str, record: dict[str, Any]) -> None:
    run = write_run(tmp_path / "run")
    append_line(run / file, record)
    assert write_report([run]).is_file()
    assert f"{run / file}: 1 of " in warnings(read_run(run))
    assert read_run(run).updates == 8


@pytest.mark.parametrize("change", [{"accuracy": None}, {"pass_at": {"1": 0.5}}, {"by_prompt": {"score": [1]}}])
def test_an_evaluation_of_a_wrong_form_is_left_out_and_said(tmp_path: Path, change: dict[str, Any]) -> None:
    run = write_run(tmp_path / "run")
    add_evaluation(run, 9, 0.5, **change)
    assert write_report([run]).is_file()
    found = read_run(run)
    assert "eval.jsonl: 1 of 3 records lack required keys" in warnings(found)
    assert [record["version"] for record in found.evaluations] == [0, 8]


def test_half_a_character_does_not_spoil_the_page(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    add_evaluation(run, 9, 0.5, verifier_errors=1, verifier_error_kinds={"bad \ud800": 1})
    assert "bad ? (1)" in write_report([run]).read_text()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("name", ["rollouts", "environment.json", "metrics.jsonl"])
def test_what_may_not_be_read_is_said(tmp_path: Path, name: str) -> None:
    run = write_run(tmp_path / "run")
    (run / name).chmod(0)
    try:
        assert f"cannot read {run / name}" in warnings(read_run(run))
    finally:
        (run / name).chmod(0o700)


@pytest.mark.parametrize("damage", ["{", '{"format": "stalewise.rollouts/1"}', '{"format": "other"}'])
def test_a_damaged_manifest_is_said_and_the_rest_is_shown(tmp_path: Path, damage: str) -> None:
    run = write_run(tmp_path / "run")
    (run / "rollouts" / "g000001-v000004" / "manifest.json").write_text(damage)
    (run / "environment.json").write_text("[]")
    page = write_report([run]).read_text()
    assert "generation batch g000001-v000004 is left out: " in page and "1 of 2 generation batches" in page
    assert "environment.json is corrupt" in page


def test_a_shard_of_another_length_is_said(tiny_run: RunConfig, tmp_path: Path) -> None:
    run = tmp_path / "copy"
    shutil.copytree(tiny_run.directory, run)
    assert "damaged" not in warnings(read_run(run))
    shard = next((run / "rollouts").rglob("*.parquet"))
    shard.write_bytes(shard.read_bytes()[:-7])
    assert f"{shard} is damaged: it has" in warnings(read_run(run))


def test_a_config_that_is_damaged_is_one_clear_error(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write_json_atomic(run / "config.resolved.json", {"format": "stalewise.run/1", "schedule": {"updates": "many"}})
    with pytest.raises(StoreError, match=r"has no usable schedule .* restore it from a copy"):
        write_report([run])


def test_a_directory_that_cannot_be_written_to_is_said_with_the_way_out(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "report").write_text("a file where the directory should be")
    with pytest.raises(StoreError, match=r"cannot write .*; name another file or directory with --output"):
        write_report([run])
    assert write_report([run], tmp_path / "page.html").is_file()


# ---------------------------------------------------------------- for everybody


def luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def themes(page: str) -> list[dict[str, str]]:
    blocks = re.findall(r"color-scheme: (?:light|dark); (--[^}]*)}", page)
    return [dict(re.findall(r"(--[\w-]+): (#\w{6});", block)) for block in blocks]


def test_contrast_is_that_of_wcag_aa(tmp_path: Path) -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    found = themes(write_report([write_run(tmp_path / "run")]).read_text())
    assert len(found) == 3 and found[1] == found[2] != found[0]  # light; dark by the system; dark by choice
    for theme in found:
        for ground in ("--ground", "--card", "--good-ground", "--bad-ground", "--note-ground"):
            for text in ("--text", "--faint"):
                assert contrast(theme[text], theme[ground]) >= 4.5, (text, ground)
        for tone in ("--good", "--bad", "--note"):
            assert contrast(theme[tone], theme[f"{tone}-ground"]) >= 4.5, tone
        for colour in (*COLOURS, *BAR_COLOURS.values(), STAGE_COLOUR, LIMIT_COLOUR, theme["--rule"], theme["--focus"]):
            assert contrast(colour, theme["--card"]) >= 3, colour


def test_every_plot_is_also_in_words(tmp_path: Path) -> None:
    page = write_report([write_run(tmp_path / "run")]).read_text()
    plots = re.findall(r'data-figure="([\w-]+)" role="img" aria-label="([^"]*)"', page)
    assert {name for name, _ in plots} == set(figures_of(page))
    for name, words in plots:
        needed = ("s, of which",) if name in ("time", "stages-0") else ("first", "last", "lowest", "highest")
        assert all(word in words for word in needed), name
    assert dict(plots)["reward"].endswith(
        "accuracy: first 0.4 at update 0, last 0.8 at update 8, lowest 0.4 at update 0, highest 0.8 at update 8."
    )


def test_definitions_are_on_the_page_and_tables_can_be_reached_by_keyboard(tmp_path: Path) -> None:
    page = write_report([write_run(tmp_path / "run")]).read_text()
    assert f'<summary title="{METRICS["ess"].in_full}">' in page
    tables = re.findall(r"<div class=\"table\"[^>]*>", page)
    assert tables and all('tabindex="0"' in table and "aria-label" in table for table in tables)
