"""The report on runs in every state: complete, cut short, never begun, long, compared, and with hostile text."""

from __future__ import annotations

import base64
import gzip
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stalewise.config import make_config, write_resolved
from stalewise.errors import StoreError
from stalewise.files import append_line, write_json_atomic
from stalewise.report import write_report
from stalewise.report.figures import BUCKETS, LONGEST_CURVE, bucket_width, draw, draw_charts, thin
from stalewise.report.read import Run, differing, metric_columns, read_run, read_runs, time_spent, verifier_errors
from stalewise.report.render import packed_library, render, thinning
from stalewise.report.summary import ranking, summarise
from stalewise.report.words import ACCURACY, CHARTS, METRICS, Chart
from stalewise.store.manifest import BatchManifest, manifest_record

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"
HOSTILE = "</script><img src=x onerror=alert(1)>&amp;"
PLOTTED = [key for chart in CHARTS for key in chart.keys]


def write_run(directory: Path, *, updates: int = 8, done: int | None = None, **config: Any) -> Path:
    """A staged run of two stages as the conductor leaves it, complete or after `done` updates."""
    done = updates if done is None else done
    record = {"schedule": {"updates": updates, "stages": 2}, "objective": {"name": "grpo"}} | config
    write_resolved(make_config(record), directory / "config.resolved.json")
    write_json_atomic(directory / "environment.json", {"python": "3.11.7", "device": "cpu", "threads": 2})
    (directory / "metrics.jsonl").write_text("".join(json.dumps(metrics(u)) + "\n" for u in range(done)))
    add_evaluation(directory, 0, 0.4)
    if done == updates:
        add_evaluation(directory, updates, 0.8)
    for stage in range(2):
        if done > stage * updates // 2:
            add_batch(directory, stage, stage * updates // 2)
    return directory


def metrics(update: int, **changes: float) -> dict[str, float]:
    values = dict.fromkeys([key for key in PLOTTED if key != ACCURACY], 0.25)
    return {"update": update, **values, "taken": 1.0, "loss": 0.5, "nonfinite": 0.0, "age_max": 0.0, **changes}


def add_evaluation(directory: Path, version: int, value: float, **changes: Any) -> None:
    accuracy = {"value": value, "low": value - 0.05, "high": value + 0.05}
    record = {"version": version, "task": "arithmetic", "prompts": 128, "samples": 4, "accuracy": accuracy}
    record |= {"pass_at": {"1": accuracy}, "response_length": 3.5, "truncated_fraction": 0.0}
    append_line(
        directory / "eval.jsonl",
        {**record, "verifier_errors": 0, "verifier_error_kinds": {}, "seconds": 2.0, **changes},
    )


def add_batch(directory: Path, index: int, version: int, **changes: Any) -> None:
    values: dict[str, Any] = {"rows": 1024, "tokens": 4096, "prompt_tokens": 0, "reward_mean": 0.4, "truncated": 0}
    values |= {"verifier_errors": 0, "seconds": 1.5, "samplers": (), "shards": (), **changes}
    manifest = BatchManifest(generation_batch=index, version=version, task="arithmetic", **values)
    path = directory / "rollouts" / f"g{index:06d}-v{version:06d}" / "manifest.json"
    write_json_atomic(path, manifest_record(manifest))


def figures_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


def text_of(page: str) -> str:
    """What is on the page besides the packed library."""
    return page.replace(packed_library(), "")


def traces(chart: Chart, run: Run) -> list[Any]:
    return list(draw(chart, [run]).select_traces())


def stage_lines(run: Run) -> list[float]:
    return [shape["x0"] for shape in draw(CHARTS[1], [run]).to_dict()["layout"].get("shapes", ())]


def warnings(run: Run) -> str:
    return "\n".join(summarise(run).warnings)


# ---------------------------------------------------------------- the page


def test_a_complete_run_makes_one_page_with_everything(tmp_path: Path) -> None:
    run = write_run(tmp_path / "first")
    path = write_report([run])
    assert path == run / "report" / "index.html"
    page = path.read_text()
    for words in ("Improved.", "0.400 [0.350, 0.450]", "0.800 [0.750, 0.850]", "8 of 8 updates", "2 of 2 generation"):
        assert words in page, words
    assert "Nothing in the records looks wrong." in page
    assert set(figures_of(page)) == {*(chart.name for chart in CHARTS), "time"}
    assert page == render(read_runs([run]))  # no date and no chance in it


def test_the_page_asks_for_nothing_outside_of_itself(tmp_path: Path) -> None:
    page = text_of(write_report([write_run(tmp_path / "run")]).read_text())
    # A setting's description may name an address as text.
    assert re.findall(r"""(?:src|href)\s*=|url\(|@import|https?://(?!localhost:8000)""", page) == []
    assert "default-src 'none'" in page


def test_the_library_inside_is_plotly() -> None:
    code = gzip.decompress(base64.b64decode(packed_library())).decode()
    assert code.lstrip().startswith("/**\n* plotly.js")


def test_every_axis_has_a_title_with_a_unit(tmp_path: Path) -> None:
    for figure in figures_of(write_report([write_run(tmp_path / "run")]).read_text()).values():
        for axis in ("xaxis", "yaxis"):
            assert re.fullmatch(r".+ \(.+\)", figure["layout"][axis]["title"]["text"])


def test_every_metric_that_is_drawn_is_documented() -> None:
    documented = set(re.findall(r"^\| `(\w+)` \|", DOCUMENT.read_text(), flags=re.MULTILINE))
    assert set(PLOTTED) - {ACCURACY} <= documented
    assert set(PLOTTED) == set(METRICS)


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
    assert "g000007-v000004 is not complete (0 shards so far): left out" in page


def test_a_run_that_never_learned(tmp_path: Path) -> None:
    write_resolved(make_config({}), tmp_path / "config.resolved.json")
    page = write_report([tmp_path]).read_text()
    for words in ("Not evaluated.", "0 of 128 updates", "0 of 4 generation batches", "No time is on record."):
        assert words in page
    assert set(figures_of(page)) == {"time"}
    assert "Not drawn, since there is no value on record: Reward and held-out accuracy, Effective" in page
    assert "environment.json is missing" in page


def test_an_evaluation_is_drawn_before_anything_is_learned(tmp_path: Path) -> None:
    assert set(draw_charts([read_run(write_run(tmp_path / "run", done=0))])) == {"reward"}


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
    assert "a/run has the highest last accuracy, 0.800 [0.750, 0.850]; the intervals of b/run overlap with it." in page
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
    assert ranking(read_runs([bad, good])).endswith("0.800 [0.750, 0.850], clear of all others.")
    add_evaluation(other, 9, 0.9, task="gym")
    assert "cannot be compared" in ranking(read_runs([good, other]))
    (bad / "eval.jsonl").unlink()
    assert "Fewer than two" in ranking(read_runs([good, bad]))


def test_a_key_that_only_one_table_has_is_a_difference() -> None:
    assert differing([{"a": None, "b": 1}, {"b": 1}]) == ["a"]
    assert differing([{"a": 1}]) == []


# ---------------------------------------------------------------- in words


@pytest.mark.parametrize(
    ("value", "verdict"),
    # The first evaluation is 0.4 with [0.35, 0.45], and every interval is ± 0.05.
    [(0.52, "Improved"), (0.48, "No clear change"), (0.28, "Got worse"), (math.nan, "No clear change")],
)
def test_the_verdict_follows_from_the_intervals(tmp_path: Path, value: float, verdict: str) -> None:
    run = write_run(tmp_path / "run")
    add_evaluation(run, 8, value)
    assert summarise(read_run(run)).verdict == verdict


def test_time_is_split_and_the_rest_is_idle() -> None:
    journal = [
        {"time": 104.0, "event": "switch", "seconds": 4.0},  # 100 to 104
        {"time": 110.0, "event": "generate", "seconds": 5.0},  # 105 to 110, after 1 s of nothing
        {"time": 120.0, "event": "learn", "seconds": 10.0, "first": 0, "stop": 2},  # at once
        {"time": 150.0, "event": "evaluate", "seconds": 3.0},  # 147 to 150, after 27 s
    ]
    # Updates 0 and 1 are in the journal; 2 and 3 are not yet: 0.5 + 0.25.
    columns = {"update": np.arange(4.0), "seconds": np.array([5.0, 5.0, 0.5, 0.25])}
    expected = {"generate": 5.0, "learn": 10.75, "switch": 4.0, "evaluate": 3.0, "idle": 28.0}
    assert time_spent(journal, columns) == pytest.approx(expected)
    assert sum(time_spent(journal, {}).values()) == pytest.approx(150 - 100)


WARNINGS = [
    ({"ess": 0.05}, "ESS falls to 0.05 and is below 0.1 in 12% of the updates"),
    ({"nonfinite": 3.0}, "3 tokens had a ratio that is not finite"),
    ({"grad_norm": math.inf}, "grad_norm is not finite in 1 update"),
    ({"taken": 0.0}, "1 of 8 updates had nothing to learn from"),
    ({"degenerate_fraction": 3.0}, "59% of the groups have equal rewards"),  # (7 · 0.25 + 3) / 8 = 0.594
    ({"age_max": 4.0}, "Rollouts reach age 4; the schedule allows 3"),  # 8 updates in 2 stages
    ({"log_ratio_max_abs": 0.2}, "On fresh rollouts log-ratios reach 0.2"),
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
    assert "54% of the rollouts are truncated at sampler.max_new_tokens = 16; raise that limit." in found
    assert "In an evaluation 75% of the responses are truncated at 16 tokens." in found
    assert "failed on 7 responses: timeout (6), of no recorded kind (1)" in found
    assert verifier_errors(read_run(run)).total() == 7


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
    band, line, *_ = traces(CHARTS[1], run)
    assert len(line.y) == 400 and np.flatnonzero(np.isnan(line.y)).tolist() == [2]
    # Buckets 0 and 1, there and back, in the middle of their updates; a gap; then the other 397.
    np.testing.assert_array_equal(band.x[:6], [1, 4, 4, 1, np.nan, 10])
    np.testing.assert_array_equal(band.y[:6], [0.25, 0.25, 0.25, 0.25, np.nan, 0.25])
    assert len(band.x) == 2 * 2 + 1 + 2 * 397 + 1
    assert "3 updates in long" in thinning([run])


def test_accuracy_has_its_interval_and_its_version(tmp_path: Path) -> None:
    _, accuracy = traces(CHARTS[0], read_run(write_run(tmp_path / "run")))
    np.testing.assert_array_equal(accuracy.x, [0, 8])
    np.testing.assert_allclose(accuracy.error_y.array, [0.05, 0.05])
    np.testing.assert_allclose(accuracy.error_y.arrayminus, [0.05, 0.05])


def test_stages_are_marked_where_they_are_few(tmp_path: Path) -> None:
    few = write_run(tmp_path / "few")
    many = write_run(tmp_path / "many", updates=64, schedule={"updates": 64, "stages": 32})
    assert stage_lines(read_run(few)) == [4]
    assert stage_lines(read_run(many)) == []
