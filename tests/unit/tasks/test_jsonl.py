"""Tasks from JSONL files."""

from pathlib import Path

import pytest

from prompts import ids
from stalewise.errors import TaskError
from stalewise.tasks import Task, make_task
from stalewise.tasks.jsonl import read_jsonl
from stalewise.types import Prompt


def test_jsonl_task(sums: Path) -> None:
    task = make_task("jsonl", path=sums, seed=1, held_out=0.2)
    training, evaluation = task.prompts(0, 40), task.evaluation_prompts(100)
    assert (task.name, task.size, len(evaluation)) == ("sums", 40, 10)
    assert len(set(ids(training)) | set(ids(evaluation))) == 50
    assert isinstance(task, Task)
    assert task.verifier.score(training[:1], [f"it is {training[0].answer}"])[0].value == 1.0
    assert make_task("jsonl", path=sums, seed=2, held_out=0.2).evaluation_prompts(100) == evaluation


GOOD = b'{"problem": "1+1", "answer": 2, "id": 7}\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty: write one JSON object per line"),
        (b"\n  \n", "is empty"),
        (GOOD + b'{"problem": \n', "line 2: not JSON: Expecting value at character 12; every row must"),
        (
            b'[\n  {"problem": "1+1", "answer": 2}\n]\n',
            r"line 1: not JSON: .*; every row must be a JSON object on a line of",
        ),
        (b"[" * 100_000, "line 1: not JSON: "),
        (GOOD + b"\n[1]\n", "line 3: must be a JSON object, not list; every row must be a JSON object on"),
        (b'{"problm": "1+1", "answer": 2}', "line 1: there is no field 'problem'; did you mean problm"),
        (b'{"problem": "1+1"}', "line 1: there is no field 'answer'; known: problem"),
        (b'{"problem": "1+1", "answer": null}', "field 'answer' must be text or a number, not NoneType"),
        (b'{"problem": "1+1", "answer": true}', "field 'answer' must be text or a number, not bool"),
        (b'{"problem": "1+1", "answer": NaN}', "field 'answer' is nan"),
        (b'{"problem": " ", "answer": 2}', "field 'problem' is empty"),
        (GOOD + b"\n" + GOOD, "line 3: id '7' was already used by .*line 1"),
        (GOOD, r"1 distinct row\(s\) are too few to hold 1 out: add rows, or name evaluation rows"),
        (b'{"problem": "\xff"}', "bad.jsonl, line 1 is not UTF-8 text: invalid start byte; save the file as UTF-8"),
        (
            b"".join(b'{"problem": "%d+1", "answer": 1}\n' % n for n in range(9000)) + b"\xff",
            "bad.jsonl, line 9001 is not UTF-8 text: ",
        ),
        (GOOD.decode().encode("utf-16"), "bad.jsonl, line 1 is not UTF-8 text: "),
    ],
)
def test_bad_files_give_one_clear_error(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    with pytest.raises(TaskError, match=message) as caught:
        make_task("jsonl", path=path)
    assert "\n" not in str(caught.value) and "cannot be a path" not in str(caught.value)


def test_bad_paths_and_settings(tmp_path: Path, sums: Path) -> None:
    with pytest.raises(TaskError, match=r"there is no file .*missing\.jsonl"):
        make_task("jsonl", path=tmp_path / "missing.jsonl")
    with pytest.raises(TaskError, match=rf"there is no file missing\.jsonl in {Path.cwd()}: correct its path"):
        make_task("jsonl", path="missing.jsonl")
    with pytest.raises(TaskError, match="cannot be read: Is a directory"):
        make_task("jsonl", path=tmp_path)
    with pytest.raises(TaskError, match=r"must contain \{problem\}"):
        make_task("jsonl", path=sums, template="Q: {question}")
    with pytest.raises(TaskError, match="needs chat=true"):
        make_task("jsonl", path=sums, system="Be brief.")
    with pytest.raises(TaskError, match=r"held_out=1\.0 must be"):
        make_task("jsonl", path=sums, held_out=1.0)


def test_byte_order_mark_and_windows_lines(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.replace(b"\n", b"\r\n"))
    assert make_task("jsonl", path=path, held_out=0).prompts(0, 1)[0] == Prompt("7", "1+1", "2")


def test_rows_say_where_they_are(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"problem": "1"}\n\n{"problem": "2"}\n')
    rows = list(read_jsonl(tmp_path / "a.jsonl"))
    assert [row.where.rpartition(", ")[2] for row in rows] == ["line 1", "line 3"]
    assert rows[1].fields == {"problem": "2"}
