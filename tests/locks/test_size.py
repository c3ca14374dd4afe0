"""A file is readable in one sitting, a function on two screens."""

from __future__ import annotations

import ast
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"
FILE_LINES = 350
FUNCTION_LINES = 60


def long_files(source: Path) -> list[str]:
    lengths = {path: len(path.read_text().splitlines()) for path in sorted(source.rglob("*.py"))}
    return [f"{path.relative_to(source)} has {lines} lines" for path, lines in lengths.items() if lines > FILE_LINES]


def long_functions(source: Path) -> list[str]:
    found: list[str] = []
    for path in sorted(source.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > FUNCTION_LINES:
                    found.append(f"{path.relative_to(source)}:{node.lineno} {node.name} has {lines} lines")
    return found


def test_no_file_is_longer_than_350_lines() -> None:
    assert long_files(SOURCE) == []


def test_no_function_is_longer_than_60_lines() -> None:
    assert long_functions(SOURCE) == []


def test_one_line_more_is_found(tmp_path: Path) -> None:
    body = "\n".join(f"    x = {i}" for i in range(FUNCTION_LINES - 1))
    (tmp_path / "fits.py").write_text(f"def fits():\n{body}\n" + "\n" * (FILE_LINES - FUNCTION_LINES))
    assert long_files(tmp_path) == long_functions(tmp_path) == []
    (tmp_path / "long.py").write_text(f"def long():\n{body}\n    return x\n" + "\n" * (FILE_LINES - FUNCTION_LINES))
    assert long_files(tmp_path) == [f"long.py has {FILE_LINES + 1} lines"]
    assert long_functions(tmp_path) == [f"long.py:1 long has {FUNCTION_LINES + 1} lines"]
