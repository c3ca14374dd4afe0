"""The built-in environments."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Any

import pytest

from stalewise.errors import TaskError
from stalewise.tasks import make_task, sandbox
from stalewise.tasks.base import CHAT
from stalewise.tasks.environments import Episode, environment_factory, first_messages, make_environments
from stalewise.tasks.environments.builtin import Calculator, PythonTool, Retry, RunningSums, calculate
from stalewise.tasks.environments.play import Call, Outcome, TaskScore
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


def program(text: str) -> str:
    return f"```python\n{text}\n```"


def test_the_python_tool_runs_programs_in_the_sandbox() -> None:
    tool = PythonTool(seconds=2, most_characters=20)
    tool.reset(Prompt("p", "x", "", CHAT))
    assert tool.step(program("print(6*7)")) == [{"role": "tool", "content": "42"}]
    assert tool.step(program("1/0")) == [{"role": "tool", "content": "error: ZeroDivisionE …"}]
    assert tool.step(program("print('a' * 99)")) == [{"role": "tool", "content": "a" * 20 + " …"}]
    assert tool.step("The answer is 42.") is None


def test_a_machine_that_cannot_isolate_programs_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_probe_all", lambda: ("", "no mechanism"))
    with pytest.raises(TaskError, match=r"cannot be made: programs cannot be isolated.*bubblewrap"):
        make_environments("python")
    assert make_environments("python", {"unsafe_without_sandbox": True}).max_turns == 8


# Each is bounded by itself, in case a sandbox does not hold. What a call is answered with.
HOSTILE = {
    "reads": ("print(open({secret!r}).read())", "error: "),
    "writes": ("open({secret!r}, 'w').write('gone')", "error: "),
    "kills its parent": ("import os\nos.kill(os.getppid(), 9)\nprint('alive')", ""),
    "connects": ("import socket\nsocket.create_connection(('127.0.0.1', {port}), 1)", "error: "),
    "never ends": ("while True: pass", "error: timeout"),
    "sleeps": ("import time\ntime.sleep(60)", "error: timeout"),
    "takes memory": ("x = [bytearray(1 << 20) for _ in range(1000)]\nprint(len(x))", "error: "),
    "prints": ("for _ in range(500): print('a' * 100_000)", ""),
    "forks": ("import os\nfor _ in range(20):\n    if os.fork() == 0: os._exit(0)\nprint('done')", ""),
    "leaves a child": ("import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(60)\nprint('left')", ""),
    "recurses": ("def f(): return f()\nf()", "error: RecursionError"),
    "prints bytes": ("import os\nos.write(1, bytes(range(256)))", ""),
}


@pytest.mark.slow
def test_hostile_calls_cost_their_own_turn_and_nothing_else(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a secret")
    pool = make_environments("python", {"seconds": 0.5, "workers": 2, "limit_s": 30})
    row = Prompt("p", "What is 6*7?", "42", CHAT)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.0)
        places = {"secret": str(secret), "port": server.getsockname()[1]}
        try:
            for key, (text, _) in enumerate(HOSTILE.values()):
                call = program(re.sub(r"\{(secret!r|port)\}", lambda name: name[0].format(**places), text))
                pool.submit(Call(key, Episode(row, (call,), (), "stop")))
            found = dict[int, Outcome]()
            while pool.pending:
                found |= {one.key: one for one in pool.collect(block=True)}
            for key, (name, (_, begins)) in enumerate(HOSTILE.items()):
                assert found[key].score is None, f"{name}: {found[key].score}"
                said = found[key].messages[0]["content"]
                assert said.startswith(begins) and "secret" not in said.replace(str(secret), ""), f"{name}: {said}"
                assert len(said) <= 402
                # The episode goes on where it was.
                turns = (found[key].messages,)
                first = program(re.sub(r"\{(secret!r|port)\}", lambda name: name[0].format(**places), HOSTILE[name][0]))
                pool.submit(Call(key, Episode(row, (first, program("print(6*7)")), turns, "stop")))
            while pool.pending:
                for one in pool.collect(block=True):
                    assert one.messages == ({"role": "tool", "content": "42"},), list(HOSTILE)[one.key]
            with pytest.raises(BlockingIOError):
                server.accept()
        finally:
            pool.close()
    assert secret.read_text() == "a secret"


def test_names_of_environments() -> None:
    assert environment_factory("calculator").endswith(":Calculator")
    with pytest.raises(TaskError, match="unknown environment 'calculater'; did you mean"):
        environment_factory("calculater")
    with pytest.raises(TaskError, match="no module 'nowhere_at_all'"):
        environment_factory("nowhere_at_all:Thing")
    with pytest.raises(TaskError, match="no environment"):
        make_task("arithmetic", environment_options={"a": 1})
