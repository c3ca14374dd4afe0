"""Bars of where the time went."""

from __future__ import annotations

from pathlib import Path

from rundirs import figures_of, write_run
from stalewise.reporting.figures import FEWEST_BARS, MOST_BARS, group_stages, run_bars, shorten
from stalewise.reporting.read import read_run, read_runs
from stalewise.reporting.render import render, write_report
from stalewise.store.json_lines import append_line


def test_many_stages_share_bars(tmp_path: Path) -> None:
    spent = {stage: {"learn": 1.0} for stage in range(33)}
    rows = group_stages(spent, MOST_BARS)
    assert len(rows) == 11 and rows[0][0] == "stages 0 to 2" and rows[-1][0] == "stages 30 to 32"
    assert [seconds["learn"] for _, seconds in rows] == [3.0] * 11
    assert [name for name, _ in group_stages({0: {}, 1: {}}, 16)] == ["stage 0", "stage 1"]
    runs = read_runs([write_run(tmp_path / "a"), write_run(tmp_path / "b")])
    assert [name for name, _ in group_stages(runs[0].spent, FEWEST_BARS)] == ["stage 0"]
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


def test_long_labels_lose_their_middle() -> None:
    assert (shorten("stages 0 to 3"), shorten("arithmetic-grpo-fresh-seed0")) == ("stages 0 to 3", "arithmet…h-seed0")
