"""Environments of the package verifiers, where it is installed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from stalewise.errors import TaskError
from stalewise.tasks import make_task
from stalewise.tasks.environments import Episode
from stalewise.tasks.environments.play import Call, EnvironmentHost, EnvironmentPool
from stalewise.types import Reward

FACTORY = "stalewise.tasks.environments.prime:PrimeEnvironment"
ENVIRONMENT = """
import verifiers as vf
from datasets import Dataset

class Sure(vf.MultiTurnEnv):
    @vf.stop
    async def asked_twice(self, state):
        return len(state["trajectory"]) == 2

    async def env_response(self, messages, state, **kwargs):
        return [vf.UserMessage(content="Are you sure?")]

def right(completion, answer, **kwargs):
    return float(completion[-1]["content"] == answer)

def load_environment(rows=4):
    data = Dataset.from_list([{"question": f"{i}+{i}?", "answer": str(2 * i)} for i in range(rows)])
    return Sure(dataset=data, eval_dataset=data, rubric=vf.Rubric(funcs=[right]))
"""


def test_without_the_package_it_says_what_to_install() -> None:
    if importlib.util.find_spec("verifiers") is not None:
        pytest.skip("verifiers is installed")
    with pytest.raises(TaskError, match=r"pip install 'stalewise\[verifiers\]'"):
        make_task("verifiers", env="doublecheck")
    with pytest.raises(TaskError, match=r"pip install 'stalewise\[verifiers\]'"):
        EnvironmentPool(FACTORY, {"env": "doublecheck"})
    with pytest.raises(TaskError, match="needs the option env"):
        EnvironmentPool(FACTORY)


def test_its_own_rollout_is_played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("verifiers")
    (tmp_path / "sure_environment.py").write_text(ENVIRONMENT)
    monkeypatch.syspath_prepend(tmp_path)
    task = make_task("verifiers", env="sure_environment")
    assert task.size == 4
    host = EnvironmentHost(FACTORY, {"env": "sure_environment"})
    for key, (row, value) in enumerate(zip(task.prompts(0, 2), (1.0, 0.0), strict=True)):
        assert host.first(row)[-1]["content"] == row.text
        first = host.answer(Call(key, Episode(row, ("x",), (), "stop")))
        assert first.messages == ({"role": "user", "content": "Are you sure?"},)
        turns = ("x", row.answer if value else "no")
        last = host.answer(Call(key, Episode(row, turns, (first.messages,), "stop")))
        assert isinstance(last.score, Reward) and last.score.value == value and last.score.parts["right"] == value
    sys.modules.pop("sure_environment", None)
