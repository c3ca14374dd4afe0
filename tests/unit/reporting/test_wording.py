"""The texts of metrics and charts."""

from __future__ import annotations

import re
from pathlib import Path

from rundirs import PLOTTED
from stalewise.reporting.summary import ACCURACY, METRICS

DOCUMENT = Path(__file__).parents[3] / "docs" / "metrics.md"


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
