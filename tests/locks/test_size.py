"""Limits on the package: rooms, loose files, files, lines of a file and of a function."""

from __future__ import annotations

import ast
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "stalewise"
ROOMS = 13
LOOSE_FILES = 7
FILES = 190
FILE_LINES = 600
FUNCTION_LINES = 60


def rooms(source: Path) -> list[str]:
    return sorted(path.name for path in source.iterdir() if path.is_dir() and any(path.rglob("*.py")))


def loose_files(source: Path) -> list[str]:
    return sorted(path.name for path in source.glob("*.py"))


def long_files(source: Path) -> list[str]:
    lengths = {path: len(path.read_text().splitlines()) for path in sorted(source.rglob("*.py"))}
    return [f"{path.relative_to(source)} has {lines} lines" for path, lines in lengths.items() if lines > FILE_LINES]


def long_functions(source: Path) -> list[str]:
    long: list[str] = []
    for path in sorted(source.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > FUNCTION_LINES:
                    long.append(f"{path.relative_to(source)}:{node.lineno} {node.name} has {lines} lines")
    return long


def test_there_are_few_rooms_and_files() -> None:
    assert len(rooms(SOURCE)) <= ROOMS, rooms(SOURCE)
    assert len(loose_files(SOURCE)) <= LOOSE_FILES, loose_files(SOURCE)
    assert len(list(SOURCE.rglob("*.py"))) <= FILES


def test_no_file_is_too_long() -> None:
    assert long_files(SOURCE) == []


def test_no_function_is_too_long() -> None:
    assert long_functions(SOURCE) == []


def test_one_line_more_is_found(tmp_path: Path) -> None:
    body = "\n".join(f"    x = {i}" for i in range(FUNCTION_LINES - 1))
    (tmp_path / "fits.py").write_text(f"def fits():\n{body}\n" + "\n" * (FILE_LINES - FUNCTION_LINES))
    assert long_files(tmp_path) == long_functions(tmp_path) == []
    (tmp_path / "long.py").write_text(f"def long():\n{body}\n    return x\n" + "\n" * (FILE_LINES - FUNCTION_LINES))
    assert long_files(tmp_path) == [f"long.py has {FILE_LINES + 1} lines"]
    assert long_functions(tmp_path) == [f"long.py:1 long has {FUNCTION_LINES + 1} lines"]


def test_rooms_and_loose_files_are_counted(tmp_path: Path) -> None:
    for name in ("a.py", "b/__init__.py", "c/d/e.py", "static/f.js"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert (rooms(tmp_path), loose_files(tmp_path)) == (["b", "c"], ["a.py"])
