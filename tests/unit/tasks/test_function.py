"""Functions of a program as verifiers: where they run, and what happens when they fail."""

from __future__ import annotations

import asyncio
import math
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from stalewise.errors import TaskError
from stalewise.tasks.callables import fingerprint, register
from stalewise.tasks.verifiers import make_verifier
from stalewise.tasks.verifiers.python import MOST_LEFT_BEHIND, FunctionVerifier
from stalewise.types import Prompt, Reward

PROMPTS = [Prompt(str(n), f"{n}?", str(n), {"row": f'{{"level": {n}}}'}) for n in range(6)]
TEXTS = [str(n % 3) for n in range(6)]


def scored(function: Any, prompts: list[Prompt] = PROMPTS, **options: Any) -> list[Reward]:
    verifier = make_verifier("function", function=register(function, fingerprint(function)), **options)
    assert isinstance(verifier, FunctionVerifier)
    try:
        return verifier.score(prompts, TEXTS[: len(prompts)])
    finally:
        verifier.close()


def test_a_lambda_runs_in_a_thread_of_this_process_and_keeps_its_order() -> None:
    threads: set[str] = set()

    def reward(prompt: str, response: str, answer: str, level: int) -> dict[str, float]:
        threads.add(threading.current_thread().name)
        assert prompt == f"{answer}?"
        return {"reward": response == answer, "level": level, "process": os.getpid()}

    found = scored(reward)
    assert [reward.value for reward in found] == [1, 1, 1, 0, 0, 0]
    assert [reward.parts for reward in found] == [{"level": n, "process": os.getpid()} for n in range(6)]
    assert threads == {"stalewise-reward"}


def test_a_function_of_a_module_is_scored_independently_and_one_of_the_program_is_not() -> None:
    found = [FunctionVerifier(register(one, fingerprint(one))) for one in (math.sqrt, lambda response: 1.0)]
    assert [verifier.scores_independently for verifier in found] == [True, False]


def test_an_error_is_that_of_its_response_and_has_a_traceback() -> None:
    def reward(response: str) -> float:
        return 1 / int(response)

    found = scored(reward)
    assert [reward.error for reward in found[:3]] == ["ZeroDivisionError: division by zero", "", ""]
    assert math.isnan(found[0].value)
    lines = found[0].traceback.splitlines()
    assert f'File "{__file__}", line {reward.__code__.co_firstlineno + 1}, in reward' in lines[0]
    assert lines[-1] == "ZeroDivisionError: division by zero"
    assert all("tasks/verifiers" not in line for line in lines)


def test_a_call_over_its_limit_has_no_score_and_the_others_do() -> None:
    let_go = threading.Event()

    def reward(answer: str) -> float:
        if answer == "1":
            let_go.wait(30)
        return 1.0

    found = scored(reward, limit_s=0.3)
    let_go.set()
    assert [reward.error for reward in found] == ["", "timeout after 0.3 s", "", "", "", ""]


def test_too_many_calls_that_do_not_return_stop_the_run() -> None:
    let_go = threading.Event()
    prompts = PROMPTS * 3
    assert len(prompts) > MOST_LEFT_BEHIND

    def reward(answer: str) -> float:
        let_go.wait(30)
        return 1.0

    verifier = FunctionVerifier(register(reward, fingerprint(reward)), limit_s=0.05, workers=6)
    with pytest.raises(TaskError, match=r"did not return within 0\.05 s.*put it into a module"):
        verifier.score(prompts, TEXTS * 3)
    let_go.set()
    verifier.close()


def test_slow_calls_that_return_after_all_do_not_add_up_over_a_run() -> None:
    let_go = threading.Event()

    def reward(answer: str) -> float:
        let_go.wait(30)
        return 1.0

    verifier = FunctionVerifier(register(reward, fingerprint(reward)), limit_s=0.05, workers=6)
    for _ in range(3):  # 18 calls in all, of which 6 run at the same time
        let_go.clear()
        assert {reward.error for reward in verifier.score(PROMPTS, TEXTS)} == {"timeout after 0.05 s"}
        let_go.set()
        time.sleep(0.2)
    verifier.close()


def test_coroutine_functions_run_at_once_and_are_cancelled() -> None:
    running, most = 0, 0

    async def reward(answer: str, level: int) -> dict[str, float]:
        nonlocal running, most
        running, most = running + 1, max(most, running + 1)
        try:
            await asyncio.sleep(30 if answer == "2" else 0.05)
        finally:
            running -= 1
        if answer == "4":
            raise ValueError("none")
        return {"reward": 1.0, "level": level}

    found = scored(reward, limit_s=2.0)
    assert most == 6
    assert [reward.error for reward in found] == ["", "", "timeout after 2.0 s", "", "ValueError: none", ""]
    assert found[5].parts == {"level": 5}
    assert "in reward" in found[4].traceback
    most = 0
    scored(reward, PROMPTS[:2], workers=1)
    assert most == 1


MODULE = """
import os, time
def reward(response, answer, level):
    if answer == "1":
        time.sleep(30)
    return {"reward": response == answer, "level": level, "process": os.getpid()}
"""


def test_a_function_of_a_module_runs_in_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "module_of_the_test.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    import module_of_the_test  # type: ignore[import-not-found]

    start = time.monotonic()
    found = scored(module_of_the_test.reward, limit_s=2.0, workers=2)
    assert time.monotonic() - start < 25
    assert [reward.error for reward in found] == ["", "timeout after 2.0 s", "", "", "", ""]
    assert [reward.value for reward in found if not reward.error] == [1, 1, 0, 0, 0]
    assert os.getpid() not in {reward.parts["process"] for reward in found if not reward.error}
    sys.modules.pop("module_of_the_test")


def test_bad_limits_and_unknown_functions_are_refused() -> None:
    bad: list[dict[str, Any]] = [{"limit_s": 0.0}, {"workers": 0}, {"limit_s": math.inf}]
    for options in bad:
        with pytest.raises(TaskError, match="workers ≥ 1 and a finite limit_s"):
            FunctionVerifier("a@b", **options)
    unknown = FunctionVerifier("lambda@b")  # as a report or an evaluation of other rows makes it
    unknown.close()
    with pytest.raises(TaskError, match="exists only in the program"):
        unknown.score(PROMPTS, TEXTS)
