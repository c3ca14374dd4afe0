"""benchmarks/where_staging_pays.py: measured rates in, a table out."""

from __future__ import annotations

import pytest

from benchmarks import where_staging_pays


@pytest.mark.parametrize("size", where_staging_pays.WEIGHTS)
def test_a_step_takes_what_was_measured(size: str) -> None:
    for rows, tokens, seconds in where_staging_pays.steps(size):
        assert where_staging_pays.step(size, rows, tokens) == pytest.approx(seconds, rel=0.06)


def test_the_formula_is_slower_than_whole_runs_and_saves_less() -> None:
    checked = {one["run"]: one for one in where_staging_pays.check()}
    assert len(checked) == 5
    assert all(1.0 < one["ratio"] < 1.45 for one in checked.values())
    for kind in ("measured_s", "formula_s"):
        saved = checked["0.5b-disk/256/4"][kind] / checked["0.5b-disk/256/64"][kind]
        assert saved == pytest.approx(1.35 if kind == "measured_s" else 1.21, abs=0.01)


def test_staging_pays_more_on_more_devices_and_with_slower_switches() -> None:
    rows = {(row["size"], row["lengths"], row["devices"]): row for row in where_staging_pays.table()}
    assert len(rows) == 12
    for (size, lengths, devices), row in rows.items():
        times = list(row["times"].values())
        assert times == sorted(times) and times[0] > 1.1
        if devices == 1:
            assert rows[size, lengths, 8]["times"]["5"] > row["times"]["5"]


def test_the_page_has_the_table() -> None:
    page = (where_staging_pays.RESULTS.parents[1] / "docs" / "benchmarks.md").read_text()
    assert where_staging_pays.show(where_staging_pays.table(), []) in page
