"""Executes the notebooks and, with --write, keeps what they print.

    python scripts/notebooks.py [--write] [NAME …]

Each runs with nbclient in an empty directory. Progress lines are not kept.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
CELL_S = 600


def execute(path: Path) -> Any:
    """The notebook with the outputs of its cells; an exception in a cell is raised here."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as directory:
        NotebookClient(notebook, timeout=CELL_S, resources={"metadata": {"path": directory}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times
        if cell.cell_type == "code":
            kept = [one for one in cell.outputs if one.output_type != "display_data" and one.get("name") != "stderr"]
            cell.outputs = kept  # without progress
    return notebook


def main() -> None:
    """Execute them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb")))
    parser.add_argument("--write", action="store_true", help="write the outputs into the notebooks")
    options = parser.parse_args()
    for name in options.names:
        path = NOTEBOOKS / f"{name}.ipynb"
        notebook = execute(path)
        if options.write:
            nbformat.write(notebook, path)
        print(f"{name}: {sum(cell.cell_type == 'code' for cell in notebook.cells)} cells ran")


if __name__ == "__main__":
    main()
