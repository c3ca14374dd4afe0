"""Functions of the user's."""

import json
import subprocess
import sys
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import pytest

from prompts import write
from stalewise.errors import TaskError
from stalewise.tasks import make_task, make_verifier
from stalewise.tasks.base import child_command
from stalewise.tasks.rows import Row, RowsTask
from stalewise.tasks.verifiers.judge_process import judged
from stalewise.tasks.verifiers.python import PythonVerifier, load_judge
from stalewise.types import Prompt, Reward
from verifying import score


@pytest.mark.parametrize("function", ["judge", ":judge", "module:", "module:two words"])
def test_function_of_the_wrong_form(function: str) -> None:
    with pytest.raises(TaskError, match="must look like 'module:function'"):
        make_verifier("python", function=function)


def test_function_that_cannot_be_loaded(judges: str) -> None:
    with pytest.raises(TaskError, match="there is no module 'no_such_module'"):
        make_verifier("python", function="no_such_module:judge")
    module = judges.partition(":")[0]
    with pytest.raises(TaskError, match=f"cannot load {module}:jugde: AttributeError"):
        score(make_verifier("python", function=f"{module}:jugde"), "8")
    with pytest.raises(TaskError, match=f"cannot load {module}:not_callable: TypeError"):
        score(make_verifier("python", function=f"{module}:not_callable"), "8")


def test_a_module_that_is_not_there_is_refused_before_any_process_starts() -> None:
    with pytest.raises(TaskError, match="there is no module 'no_such_module' on the Python path"):
        PythonVerifier("no_such_module:judge")


def test_a_module_in_the_working_directory_is_found_where_the_path_lacks_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rewards_beside_the_config.py").write_text("def score(response, answer): return response == answer\n")
    (tmp_path / "json.py").write_text("raise SystemExit('a file beside the config hides no installed module')\n")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])  # as that of an installed script
    monkeypatch.chdir(tmp_path)
    verifier = make_verifier("python", function="rewards_beside_the_config:score", workers=1)
    assert score(verifier, "8") == [Reward(1.0)]
    assert sys.path[-1] == str(tmp_path)


def test_nothing_of_the_working_directory_is_found_where_python_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rewards_beside_the_config.py").write_text("def score(response, answer): return response == answer\n")
    monkeypatch.chdir(tmp_path)
    program = "from stalewise.tasks.base import is_importable; print(is_importable('rewards_beside_the_config'))"
    for options, found in (([], "True"), (["-P"], "False")):
        command = [sys.executable, *options, "-c", program]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == found


@pytest.mark.parametrize("safe", [False, True])
def test_a_child_finds_what_its_parent_finds_and_nothing_in_the_working_directory_hides_a_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, safe: bool
) -> None:
    for name in ("random", "torch", "numpy", "stalewise", "runpy", "json"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a file of the working directory was imported')\n")
    (tmp_path / "apart").mkdir()
    (tmp_path / "apart" / "of_the_parent.py").write_text(
        "import random, runpy, sys\nfrom stalewise.tasks.base import is_importable\n"
        "print(sys.argv[1:], is_importable('beside'), sys.path[-1] == sys.argv[2])\n"
    )
    (tmp_path / "beside.py").touch()  # a reward function's module, say
    monkeypatch.syspath_prepend(str(tmp_path / "apart"))
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])  # as that of an installed script
    command = child_command("of_the_parent", "a b", str(tmp_path), safe=safe)
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == (f"{['a b', str(tmp_path)]} {not safe} {not safe}\n", "")


FORMS = """
def old(prompt, response): return response == prompt.answer
def old_other_names(question, text, strict=True): return text == question.answer
def old_any(*args, **options): return len(args) == 2 and args[1] == args[0].answer
class Old:
    def __call__(self, prompt, response): return response == prompt.answer
old_object = Old()

def all_names(prompt, response, answer, **row): return (prompt, response, answer, row["level"]) == ("3+5", "8", "8", 2)
def row_alone(prompt, response, **row): return (prompt, response, row) == ("3+5", "8", ROW)
ROW = {"problem": "3+5", "answer": "8", "level": 2}
def some(response, answer): return response == answer
def one(response): return response == "8"
def of_the_row(response, level): return (response, level) == ("8", 2)
def by_keyword(prompt, response, *, level): return (prompt, response, level) == ("3+5", "8", 2)
def third(prompt, response, level): return (prompt, response, level) == ("3+5", "8", 2)
def in_order(question, text, gold): return (question, text, gold) == ("3+5", "8", "8")
def as_trl(completions, answer, **columns): return [a == b for a, b in zip(completions, answer)]
async def later(response, answer): return response == answer
async def later_old(prompt, response): return response == prompt.answer
def asks_for_more(response, colour): return 1.0
"""
OLD = ["old", "old_other_names", "old_any", "old_object", "later_old"]
NAMED = ["all_names", "row_alone", "some", "one", "of_the_row", "by_keyword", "third", "in_order", "as_trl", "later"]


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("forms")
    (folder / "forms_of_the_test.py").write_text(FORMS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield "forms_of_the_test"


@pytest.fixture
def prompt(forms: str, tmp_path: Path) -> Prompt:
    path = write(tmp_path / "row.jsonl", [{"problem": "3+5", "answer": "8", "level": 2}])
    options = {"function": f"{forms}:old"}
    task = make_task(
        "jsonl", path=str(path), verifier="python", verifier_options=options, template="Q: {problem}", held_out=0.0
    )
    return task.prompts(0, 1)[0]


@pytest.mark.parametrize("name", OLD + NAMED)
def test_a_function_is_called_by_its_signature(name: str, forms: str, prompt: Prompt) -> None:
    judge = load_judge(f"{forms}:{name}")
    assert judged(judge, prompt, "8") == Reward(1.0)
    assert judged(judge, prompt, "9") == Reward(0.0)


def test_both_forms_run_in_worker_processes(forms: str, prompt: Prompt) -> None:
    for name in ("old", "all_names"):
        verifier = make_verifier("python", function=f"{forms}:{name}", workers=1)
        try:
            assert verifier.score([prompt, prompt], ["8", "9"]) == [Reward(1.0), Reward(0.0)]
        finally:
            verifier.close()


def test_a_function_that_asks_for_what_no_row_has(forms: str, prompt: Prompt) -> None:
    reward = judged(load_judge(f"{forms}:asks_for_more"), prompt, "8")
    assert reward.traceback == "", "no line of the function is at fault"
    assert reward.error == (
        "TaskError: the reward function asks_for_more asks for 'colour', which it does not get: "
        "it may name answer, level, problem, prompt, response"
    )


def test_fields_that_are_no_json_are_left_out_of_the_row() -> None:
    fields = {"problem": "3+5", "answer": "8", "made": date(2020, 1, 1), "level": 2}
    rows = [Row("row 0", fields)]
    task = RowsTask("rows", rows, held_out=0.0, verifier="python", verifier_options={"function": "json:dumps"})
    (prompt,) = task.prompts(0, 1)
    assert json.loads(prompt.metadata["row"]) == {"problem": "3+5", "answer": "8", "level": 2}
