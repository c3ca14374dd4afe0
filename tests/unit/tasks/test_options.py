"""Options of tasks and verifiers have types, and their files are found."""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from stalewise.errors import TaskError
from stalewise.tasks import TASKS, make_task, make_verifier
from stalewise.tasks.base import load
from stalewise.tasks.options import named_files, options_model
from stalewise.tasks.verifiers import VERIFIERS


@pytest.fixture
def rows(tmp_path: Path) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"problem": f"p{i}", "answer": str(i)}) + "\n" for i in range(20)))
    return str(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"evaluation_path": 1}, "evaluation_path is 1, expected"),
        ({"verifier": {"name": "exact"}}, "verifier is {'name': 'exact'}, expected text or expected a verifier"),
        ({"chat": "yes"}, "chat is 'yes', expected true or false"),
        ({"chat": True, "system": 3}, "system is 3, expected text"),
        ({"held_out": "much"}, "held_out is 'much', expected a number"),
        ({"exclude_ids": "abc"}, "exclude_ids is 'abc', "),
        ({"template": None}, "template is None, expected text"),
        ({"verifier_options": [1]}, r"verifier_options is \[1\], expected a table"),
        ({"few_shot": 7}, "few_shot is 7, "),
        ({"verifier": "number", "verifier_options": {"which": 2}}, "verifier number: which is 2, "),
    ],
)
def test_another_type_is_refused_in_words(rows: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        make_task("jsonl", path=rows, **options)


def test_arithmetic_and_paths_have_types() -> None:
    with pytest.raises(TaskError, match="task arithmetic-chat: largest is 'x', expected a whole number"):
        make_task("arithmetic-chat", largest="x")
    with pytest.raises(TaskError, match="task jsonl: path is 1, expected"):
        make_task("jsonl", path=1)
    with pytest.raises(TaskError, match="limit_s is 'soon', expected a number"):
        make_verifier("python", function="json:loads", limit_s="soon")
    with pytest.raises(TaskError, match="must look like"):
        make_verifier("python", function="..json:loads")
    with pytest.raises(TaskError, match="chat_template_kwargs holds what JSON cannot"):
        form = {"chat": True, "chat_template_kwargs": {"day": datetime.date(2026, 1, 1)}}
        make_task("jsonl", path=__file__, **form)


def test_right_options_are_taken_as_they_are(rows: str) -> None:
    shots = [{"problem": "p", "answer": 1}]
    task = make_task("jsonl", path=rows, held_out=0, few_shot=shots, verifier="exact", exclude_ids=["x"])
    assert task.size == 20
    assert make_task("jsonl", path=Path(rows), held_out=0.5).size == 10


@pytest.mark.parametrize("reference", [*TASKS.values(), *VERIFIERS.values()])
def test_every_task_and_verifier_has_a_model(reference: str) -> None:
    assert issubclass(options_model(load(reference)), object)


@pytest.mark.parametrize(
    ("path", "message"),
    [("a\0b", "cannot be a path"), ("x" * 300, "cannot be read: File name too long"), ("\ud800", "cannot be a path")],
)
def test_a_path_that_cannot_be_one(path: str, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        make_task("jsonl", path=path)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"problem": "a\\ud800", "answer": 1}', "line 1: field 'problem' has half of a surrogate pair"),
        ('{"problem": 1' + "0" * 4200 + ', "answer": 1}', "a number of thousands of digits"),
        ('{"problem": "' + "a" * (2**22 + 1) + '", "answer": 1}', "has 4,194,305 characters"),
    ],
)
def test_rows_that_no_tokenizer_takes(tmp_path: Path, row: str, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(row + "\n")
    with pytest.raises(TaskError, match=message):
        make_task("jsonl", path=str(path))


def test_a_line_of_100_mb_is_refused_by_its_number_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with path.open("w") as file:
        file.write('{"problem": "a", "answer": 1}\n{"problem": "')
        for _ in range(100):
            file.write("a" * 10**6)
        file.write('", "answer": 1}\n')
    with pytest.raises(TaskError, match="line 2 has more than 16,777,216 characters"):
        make_task("jsonl", path=str(path))


def test_a_mixture_that_is_no_list_is_told_so() -> None:
    for tasks in (None, {}, 7):
        with pytest.raises(TaskError, match=r"task mixture: tasks is .*, expected a list"):
            make_task("mixture", tasks=tasks)


def test_files_and_modules_that_options_name_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)  # as in a script
    Path("rows.jsonl").write_text("a\n")
    package = Path("graders")
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('it was imported')\n")
    (package / "strict.py").write_text("def grade(response): ...\n")
    options = {
        "path": "rows.jsonl",
        "verifier_options": {"function": "graders.strict:grade", "workers": 1, "urls": ["http://a:80", "./graders"]},
        "tasks": [
            {"path": str(tmp_path / "rows.jsonl")},
            {"path": "missing.jsonl"},
            {"path": "graders"},
            {"path": "/"},
        ],
        "functions": ["no_such_module:f", "graders.none:f", "graders.strict.f:f", "json:loads", "sys:exit", "x" * 5000],
        "odd": ["a\0b:c", "", "__main__:f"],
    }
    rows = ("rows.jsonl", str(tmp_path / "rows.jsonl"))
    assert {name: (text, str(Path(path).resolve())) for name, (text, path) in named_files(options).items()} == {
        "path": rows,
        "verifier_options.function": ("graders.strict:grade", str(package.resolve() / "strict.py")),
        "tasks.0.path": (rows[1], rows[1]),
        "functions.3": ("json:loads", json.__file__),
    }
    assert "graders" not in sys.modules
