"""Tasks made of rows: held-out rows, templates, and rows that are left out."""

from pathlib import Path
from typing import Any

import pytest

from prompts import ids, write
from stalewise.errors import TaskError
from stalewise.tasks import make_task
from stalewise.tasks.rows import PromptForm, Row, RowsTask
from stalewise.tasks.verifiers.python import arguments


def test_held_out_rows_do_not_depend_on_the_order_of_the_file(sums: Path, tmp_path: Path) -> None:
    lines = sums.read_text().splitlines(keepends=True)
    (tmp_path / "turned.jsonl").write_text("".join(reversed(lines)))
    turned = make_task("jsonl", path=tmp_path / "turned.jsonl")
    assert turned.evaluation_prompts(5) == make_task("jsonl", path=sums).evaluation_prompts(5)


def test_templates_and_field_names(tmp_path: Path) -> None:
    rows = [{"q": r"\frac{1}{2} {problem}", "a": 0.5, "n": number} for number in range(3)]
    path = write(tmp_path / "t.jsonl", rows)
    fields = {"problem_field": "q", "answer_field": "a", "id_field": "n", "held_out": 0, "verifier": "exact"}
    plain = make_task("jsonl", path=path, template="Q: {problem}\nA:", **fields).prompts(0, 3)
    assert sorted(ids(plain)) == ["0", "1", "2"]
    assert plain[0].text == "Q: \\frac{1}{2} {problem}\nA:"
    assert (plain[0].answer, plain[0].metadata) == ("0.5", {"problem": r"\frac{1}{2} {problem}"})
    chat = make_task("jsonl", path=path, chat=True, system="Be brief.", **fields).prompts(0, 1)[0]
    assert chat.metadata == {"format": "chat", "system": "Be brief."}


def test_separate_evaluation_file_and_overlap(tmp_path: Path) -> None:
    train = write(tmp_path / "a.jsonl", [{"id": n, "problem": f"{n}+1", "answer": n + 1} for n in range(10)])
    held = write(tmp_path / "b.jsonl", [{"id": n, "problem": f"{n}+1 ", "answer": n + 1} for n in range(8, 12)])
    task = make_task("jsonl", path=train, evaluation_path=held)
    assert (task.size, task.overlapping) == (8, 2)  # type: ignore[attr-defined]
    assert sorted(ids(task.evaluation_prompts(9))) == sorted(f"evaluation/{n}" for n in range(8, 12))
    with pytest.raises(TaskError, match="every training problem is also an evaluation problem"):
        make_task("jsonl", path=train, evaluation_path=train)


def test_excluded_ids_and_repeated_rows(sums: Path) -> None:
    sums.write_text(sums.read_text() * 2)
    everything = ids(make_task("jsonl", path=sums, held_out=0).prompts(0, 50))
    assert len(set(everything)) == 50
    fewer = make_task("jsonl", path=sums, held_out=0, exclude_ids=[*everything[:4], "unknown"])
    assert (fewer.size, set(everything[:4]) & set(ids(fewer.prompts(0, 46)))) == (46, set())
    with pytest.raises(TaskError, match="exclude_ids leaves none of its 50 rows"):
        make_task("jsonl", path=sums, exclude_ids=everything)
    with pytest.raises(TaskError, match="holds nothing out"):
        fewer.evaluation_prompts(1)


def test_a_form_needs_its_problem_and_a_chat_for_its_system_text() -> None:
    assert PromptForm(template="Q: {problem} {x}").apply("{y}") == "Q: {y} {x}"
    assert PromptForm(chat=True, system="s").metadata == {"format": "chat", "system": "s"}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"template": "no"}, "must contain"),
        ({"system": "s"}, "needs chat=true"),
    ]
    for options, message in cases:
        with pytest.raises(TaskError, match=message):
            PromptForm(**options)


def test_a_task_without_training_rows_only_evaluates() -> None:
    rows = [Row("here", {"problem": "1+1", "answer": 2})]
    task = RowsTask("sums", None, seed=0, evaluation_rows=rows)
    assert task.size == 0 and [prompt.answer for prompt in task.evaluation_prompts(5)] == ["2"]
    with pytest.raises(TaskError, match="has no training prompts"):
        task.prompts(0, 1)


@pytest.mark.parametrize(
    ("answer", "text"),
    [("20", "20"), (20, "20"), (0.5, "0.5"), (["20", "zwölf"], '["20", "zwölf"]'), (True, "true"), (None, "")],
)
def test_a_function_gets_the_answer_with_its_type(answer: Any, text: str) -> None:
    fields = {"verifier": "python", "verifier_options": {"function": "math:sqrt"}, "answer_field": "gold"}
    rows = [Row("here", {"problem": "1+1", "gold": answer, "answer": "another"})]
    (prompt,) = RowsTask("sums", None, evaluation_rows=rows, **fields).evaluation_prompts(1)
    assert prompt.answer == text
    given = arguments(prompt, "r")["answer"]
    assert given == answer and type(given) is type(answer)


def test_a_list_as_answer_is_refused_with_a_way_out_where_no_function_scores() -> None:
    rows = [Row("here", {"problem": "1+1", "answer": ["2", "two"]})]
    with pytest.raises(
        TaskError, match=r"must be text or a number, not list: name another .* or score with a reward f"
    ):
        RowsTask("sums", None, evaluation_rows=rows)
