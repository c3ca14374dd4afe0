"""The built-in environments."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from stalewise.errors import TaskError
from stalewise.tasks import make_task
from stalewise.tasks.base import CHAT
from stalewise.tasks.environments import Episode, environment_factory, first_messages
from stalewise.tasks.environments.builtin import Calculator, PythonTool, Retry, RunningSums, calculate
from stalewise.tasks.environments.play import TaskScore
from stalewise.types import Prompt

ROW = Prompt("arithmetic/12+34", "12+34=", "46")


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2+3*4", "14"),
        ("-(7-10)", "3"),
        ("7/2", "3.5"),
        ("6/3", "2"),
        ("7//2", "3"),
        ("17%5", "2"),
        ("1/0", "error: division by zero"),
        ("2**9", "error: not an expression of numbers and + - * / // %"),
        ("__import__('os')", "error: not an expression of numbers and + - * / // %"),
        ("1+", "error: not an expression of numbers and + - * / // %"),
        ("True+1", "error: not an expression of numbers and + - * / // %"),
        ("1+" * 150 + "1", "error: the expression is too long"),
    ],
)
def test_the_calculator_calculates_and_nothing_else(expression: str, value: str) -> None:
    assert calculate(expression) == value


def test_a_calculator_without_a_chat_answers_turns_that_end_in_an_equals_sign() -> None:
    one = Calculator()
    assert one.reset(ROW) == [{"role": "user", "content": "12+34="}]
    assert one.step("12+34=") == [{"role": "tool", "content": "46;"}]
    assert one.step("46;1+1=") == [{"role": "tool", "content": "2;"}]
    assert one.step("46") is None
    score = one.score(Episode(ROW, ("12+34=", "46"), (), "stop"))
    assert score == TaskScore({"calls": 2.0, "call_errors": 0.0})


def test_a_calculator_in_a_chat_says_how_it_is_called() -> None:
    row = Prompt("p", "What is 3+4?", "7", {**CHAT, "system": "Be brief."})
    one = Calculator(role="user")
    first = one.reset(row)
    assert (
        first[0]["role"] == "system" and first[0]["content"].startswith("Be brief.") and "<calc>" in first[0]["content"]
    )
    assert first[1] == {"role": "user", "content": "What is 3+4?"}
    assert one.step("I compute <calc>3+4</calc>") == [{"role": "user", "content": "7"}]
    assert one.step("It is 7.") is None
    with pytest.raises(TaskError, match="role"):
        Calculator(role="system")


def test_sums_go_on_from_the_policys_own_answers() -> None:
    game = RunningSums(rounds=3)
    assert game.reset(ROW) == [{"role": "user", "content": "12+34="}]
    answer = game.step("47")  # wrong, and the next sum begins with it: 10 + 47 % 90
    assert answer is not None and answer[0]["content"].startswith("57+")
    total = eval(answer[0]["content"].rstrip("="))
    again = game.step(str(total))
    assert again is not None
    assert game.step("no") is None
    assert game.score(Episode(ROW, ("47", str(total), "no"), (), "stop")) == {
        "reward": pytest.approx(1 / 3),
        "played": 3.0,
    }
    replay = RunningSums(rounds=3)
    replay.reset(ROW)
    assert replay.step("47") == answer  # the same for the same row and turns


def test_second_tries_are_worth_less() -> None:
    one = Retry(verifier="number", tries=2, discount=0.5)
    row = Prompt("p", "2+2", "4")
    assert one.reset(row) == first_messages(row)
    assert one.step("5") == [{"role": "user", "content": "That is not right. Try again."}]
    assert one.step("4") is None
    assert one.score(Episode(row, ("5", "4"), (), "stop")) == {"reward": 0.5, "first": 0.0, "turns": 2.0}
    with pytest.raises(TaskError, match="tries"):
        Retry(tries=0)


def test_reasoning_gym_in_several_turns() -> None:
    pytest.importorskip("reasoning_gym")
    options: dict[str, Any] = {"dataset": "basic_arithmetic", "tries": 2}
    task = make_task("gym", dataset="basic_arithmetic", environment="retry", environment_options=options)
    (row,) = task.prompts(0, 1)
    one = Retry(**options)
    one.reset(row)
    assert one.step("<answer>no idea</answer>") is not None
    assert one.step(f"<answer>{row.answer}</answer>") is None
    score = one.score(Episode(row, ("", ""), (), "stop"))
    assert score == {"reward": pytest.approx(0.7), "first": 0.0, "turns": 2.0}
    task.environment.close()  # pyright: ignore[reportAttributeAccessIssue]
    task.verifier.close()


def test_the_python_tool_runs_programs_in_the_sandbox() -> None:
    if importlib.util.find_spec("stalewise.tasks.sandbox") is None:
        with pytest.raises(TaskError, match="needs the sandbox"):
            PythonTool()
        return
    tool = PythonTool(seconds=2, most_characters=20, unsafe_without_sandbox=True)
    tool.reset(Prompt("p", "x", "", CHAT))
    assert tool.step("```python\nprint(6*7)\n```") == [{"role": "tool", "content": "42"}]
    assert tool.step("```python\n1/0\n```") == [{"role": "tool", "content": "error: ZeroDivisionE …"}]
    assert tool.step("```python\nprint('a' * 99)\n```") == [{"role": "tool", "content": "a" * 20 + " …"}]
    assert tool.step("The answer is 42.") is None


def test_names_of_environments() -> None:
    assert environment_factory("calculator").endswith(":Calculator")
    with pytest.raises(TaskError, match="unknown environment 'calculater'; did you mean"):
        environment_factory("calculater")
    with pytest.raises(TaskError, match="no module 'nowhere_at_all'"):
        environment_factory("nowhere_at_all:Thing")
    with pytest.raises(TaskError, match="no environment"):
        make_task("arithmetic", environment_options={"a": 1})
