"""Which evaluation prompts were trained on."""

from __future__ import annotations

from pathlib import Path

import pytest

from stalewise.errors import TaskError
from stalewise.tasks.rows import EVALUATION, Seen, named_ids, read_ids, seen
from stalewise.types import Prompt


def test_a_problem_is_seen_by_its_id_or_its_text() -> None:
    trained = seen([Prompt("sum-1", "What is 2 + 2?", "4"), Prompt("7", "Solve: x", "1", {"problem": "x^2 = 4"})])
    assert trained.ids == {"sum-1"}  # "7" is a row number
    assert Prompt(EVALUATION + "sum-1", "another", "") in trained
    assert Prompt("new", "what is 2+2", "") in trained
    assert Prompt("new", "Find it.", "", {"problem": "x^{2}=4"}) in trained
    assert Prompt("7", "What is 3+3?", "") not in trained
    assert Prompt("7", "", "") in trained | Seen(frozenset({"7"}))
    assert named_ids(["12", "a12"]) == {"a12"}


def test_ids_are_read_from_lines_and_objects(tmp_path: Path) -> None:
    file = tmp_path / "ids"
    file.write_text('a\n\n{"id": 3}\n{"eval_id": "b", "prompt_id": "c"}\n')
    assert read_ids(file).ids == {"a", "3", "b", "c"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no ids"),
        (b"{", "line 1: not JSON"),
        (b'a\n{"x": 1}', "line 2: an object without id, eval_id or prompt_id"),
        (b"\xff", "cannot be read"),
    ],
)
def test_a_bad_file_of_ids_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "ids").write_bytes(content)
    with pytest.raises(TaskError, match=message):
        read_ids(tmp_path / "ids")
    with pytest.raises(TaskError, match="there is no file"):
        read_ids(tmp_path / "none")
