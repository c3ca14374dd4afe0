"""The report on runs in every state: complete, cut short, never begun, long, compared, and with hostile text."""

from __future__ import annotations

import base64
import gzip
import re
from pathlib import Path

import numpy as np
import pytest

from rundirs import add_evaluation, figures_of, metrics, write_run
from stalewise.config import make_config, write_resolved
from stalewise.config.run_directory import read_config
from stalewise.errors import StoreError
from stalewise.reporting.figures import (
    BAR_COLOURS,
    COLOURS,
    LIMIT_COLOUR,
    STAGE_COLOUR,
    MetricSeries,
)
from stalewise.reporting.read import read_runs
from stalewise.reporting.render import (
    describe_bars,
    describe_curve,
    describe_stage_end,
    packed_plotly,
    render,
    spread_versions,
    write_report,
)
from stalewise.reporting.summary import CHARTS, METRICS
from stalewise.store.atomic import write_json_atomic
from stalewise.store.json_lines import append_line

HOSTILE = "</script><img src=x onerror=alert(1)>&amp;"


def text_of(page: str) -> str:
    """What is on the page besides the packed library."""
    return page.replace(packed_plotly(), "")


def test_a_complete_run_makes_one_page_with_everything(tmp_path: Path) -> None:
    run = write_run(tmp_path / "first")
    path = write_report([run])
    assert path == run / "report" / "index.html"
    page = path.read_text()
    for words in ("Improved.", "0.400 [0.350, 0.450]", "0.800 [0.750, 0.850]", "8 of 8 updates", "2 of 2 generation"):
        assert words in page, words
    assert "No rule of thumb is broken." in page
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


def test_held_out_prompts_that_flipped_are_listed_with_their_answers(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    ids = [prompt.prompt_id for prompt in read_config(run).make_task().evaluation_prompts(3)]
    for version, score in ((0, [0, 4, 4]), (4, [1, 4, 2]), (8, [4, 1, 4])):
        by_prompt = {"prompt_ids": ids, "score": score, "scored": [4, 4, 4]}
        add_evaluation(run, version, 0.5, by_prompt=by_prompt)
    page = " ".join(re.sub("<[^>]*>", " ", text_of(write_report([run]).read_text())).split())
    assert "From version 0 to version 8, 1 of 3 prompts were gained and 1 lost; 1 stayed as they were" in page
    numbers = ids[1].removeprefix("arithmetic/").split("+")
    lost, gained = page[page.index("Lost (1)") :], page[page.index("Gained (1)") :]
    assert f"{'+'.join(numbers)}= {sum(map(int, numbers))} 1.00 1.00 0.25" in lost
    assert "0.00 0.25 1.00" in gained
    assert spread_versions(range(20)) == [0, 3, 5, 8, 11, 14, 16, 19]


def test_parts_of_rewards_have_a_chart(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", done=7)
    assert "parts" not in figures_of(write_report([run]).read_text())
    append_line(run / "metrics.jsonl", metrics(7, **{"part/format": 0.5, "part/<b>": 0.75}))
    page = write_report([run]).read_text()
    assert [one["name"] for one in figures_of(page)["parts"]["data"]] == ["part/format", "part/&lt;b&gt;"]
    assert "mean of the reward part &lt;b&gt;" in page and "reward part <b>" not in page


def test_every_axis_has_a_title_with_a_unit(tmp_path: Path) -> None:
    for figure in figures_of(write_report([write_run(tmp_path / "run")]).read_text()).values():
        for axis in ("xaxis", "yaxis"):
            assert re.fullmatch(r".+ \(.+\)", figure["layout"][axis]["title"]["text"])


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


def test_what_is_no_run_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="is not a run directory: "):
        write_report([tmp_path])
    with pytest.raises(StoreError, match="at least one"):
        write_report([])
    run = write_run(tmp_path / "run")
    with pytest.raises(StoreError, match="named twice"):
        write_report([run, tmp_path / "." / "run"])
    write_json_atomic(run / "config.resolved.json", {"format": "stalewise.run/0"})
    with pytest.raises(StoreError, match=r"has format stalewise.run/0; this release reads stalewise.run/1"):
        write_report([run])


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


def test_stages_that_end_when_they_are_spent(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", schedule={"updates": 8, "end": "spent"})
    ended = {"reason": "effective sample size", "ess": 0.87, "bound": 0.9}
    for batch, first in ((0, 0), (1, 4)):
        stage = {"generation_batch": batch, "first_update": first, "planned_updates": 6, "first_prompt": 0}
        append_line(run / "ledger" / "stages.jsonl", stage | {"ended": ended if batch else None})
    append_line(run / "metrics.jsonl", metrics(7, age_max=7.0))
    page = write_report([run]).read_text()
    assert "on 2 generation batches (" in page
    assert "effective sample size (ess 0.87, bound 0.9)" in page
    assert "the schedule allows" not in page  # it does not know before


def test_half_a_character_does_not_spoil_the_page(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    add_evaluation(run, 9, 0.5, verifier_errors=1, verifier_error_kinds={"bad \ud800": 1})
    assert "bad ? (1)" in write_report([run]).read_text()


def test_a_directory_that_cannot_be_written_to_is_said_with_the_way_out(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "report").write_text("a file where the directory should be")
    with pytest.raises(StoreError, match=r"report is a file: .*; name another file or directory with --output"):
        write_report([run])
    assert write_report([run], tmp_path / "page.html").is_file()


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


def test_curves_and_bars_have_text_alternatives() -> None:
    text = "ess: first 0.5 at update 0, last 1 at update 2, lowest 0.25 at update 1, highest 1 at update 2."
    assert describe_curve(MetricSeries(np.arange(3.0), np.array([0.5, 0.25, 1.0])), "ess", "update") == text
    bars = [("stage 0", {"generate": 1.0, "learn": 3.0, "idle": 0.0}), ("stage 1", {})]
    assert describe_bars(bars) == "stage 0: 4.0 s, of which generate 25%, learn 75%. stage 1: 0.0 s."


def test_the_end_of_a_stage_has_its_numbers() -> None:
    record = {"reason": "effective sample size", "ess": 0.87, "bound": 0.9, "planned_updates": 32}
    assert describe_stage_end(record) == "effective sample size (ess 0.87, bound 0.9)"
    assert describe_stage_end({"reason": "all of it was used", "planned_updates": 8}) == "all of it was used"
    assert describe_stage_end(None) == "–"
