"""The notebooks run, and what they show was made by them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted(ROOT.glob("notebooks/*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_was_executed_in_order_and_none_failed(path: Path) -> None:
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1)), "scripts/notebooks.py --write"
    assert all(output["output_type"] in ("stream", "execute_result") for cell in cells for output in cell["outputs"])
    for number, cell in enumerate(cells):
        compile("".join(cell["source"]), f"{path.name}, cell {number}", "exec")


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_notebooks_run(path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts/notebooks.py"), path.stem]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"{path.stem}: " in done.stdout
