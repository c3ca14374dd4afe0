"""Episodes in worker processes: limits, deaths, replays, and environments that misbehave."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stalewise.errors import TaskError
from stalewise.tasks.environments import Episode
from stalewise.tasks.environments.play import (
    Call,
    EnvironmentHost,
    EnvironmentPool,
    Outcome,
    TaskScore,
    checked_messages,
    outcome_of_record,
    outcome_record,
)
from stalewise.types import Prompt, Reward

MODULE = '''
import os, sys, time

class Counting:
    """Counts turns; some words make it misbehave."""

    def __init__(self, where="", local_=False):
        self.where = where

    def reset(self, row):
        self.said = []
        if row.text == "bad reset":
            raise RuntimeError("no such row")
        return [{"role": "user", "content": row.text}]

    def step(self, response):
        self.said.append(response)
        if self.where:
            with open(self.where, "a") as file:
                file.write(f"{os.getpid()} {response}\\n")
        if response == "raise":
            raise ValueError("what was that?")
        if response == "hang":
            time.sleep(60)
        if response == "die":
            os.kill(os.getpid(), 9)
        if response == "exit":
            sys.exit(3)
        if response == "text":
            return "not messages"
        if response == "bytes":
            return [{"role": "tool", "content": b"no text"}]
        if response == "end":
            return None
        return [{"role": "tool", "content": f"turn {len(self.said)}"}]

    def score(self, episode):
        if "nan" in self.said:
            return float("nan")
        return {"reward": len(self.said), "turns": len(episode.turns)}
'''


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "counting_environment.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield "counting_environment:Counting"
    sys.modules.pop("counting_environment", None)


def episode(*turns: str, answers: int | None = None) -> Episode:
    said = tuple(
        ({"role": "tool", "content": f"turn {n + 1}"},) for n in range(len(turns) - 1 if answers is None else answers)
    )
    return Episode(Prompt("p", "x", ""), turns, said, "stop")  # pyright: ignore[reportArgumentType]


def collect(pool: EnvironmentPool) -> dict[int, Outcome]:
    found: dict[int, Outcome] = {}
    while pool.pending:
        found |= {one.key: one for one in pool.collect(block=True)}
    return found


def test_what_one_environment_does_costs_its_own_episode_only(module: str) -> None:
    pool = EnvironmentPool(module, workers=2, limit_s=1.0)
    try:
        assert pool.first([Prompt("p", "hello", "")]) == [({"role": "user", "content": "hello"},)]
        words = ["raise", "hang", "die", "exit", "text", "bytes", "end", "fine", "nan"]
        for key, word in enumerate(words):
            pool.submit(Call(key, episode(word), is_over=word == "nan"))
        found = {words[key]: outcome for key, outcome in collect(pool).items()}
        errors = {
            word: one.score.error for word, one in found.items() if isinstance(one.score, Reward) and one.score.error
        }
        assert errors["raise"] == "ValueError: what was that?"
        assert errors["hang"] == "timeout after 1 s"
        assert errors["die"].startswith("worker died")
        assert errors["exit"].startswith("SystemExit")
        assert "step returned str: expected a list of messages" in errors["text"]
        assert "both text" in errors["bytes"]
        assert set(errors) == {"raise", "hang", "die", "exit", "text", "bytes"}
        assert found["end"].score == Reward(1.0, {"turns": 1.0})
        assert found["fine"].messages == ({"role": "tool", "content": "turn 1"},)
        assert isinstance(found["nan"].score, Reward) and found["nan"].score.value == 0  # it never saw the cut turn
    finally:
        pool.close()


def test_an_episode_goes_on_elsewhere_when_its_worker_dies(module: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    pool = EnvironmentPool(module, {"where": str(log)}, workers=1, limit_s=5.0)
    try:
        pool.submit(Call(1, episode("a")))
        assert collect(pool)[1].messages[0]["content"] == "turn 1"
        pool.submit(Call(2, episode("die")))
        assert isinstance(collect(pool)[2].score, Reward)
        pool.submit(Call(1, episode("a", "b")))
        assert collect(pool)[1].messages[0]["content"] == "turn 2"
        pool.submit(Call(1, episode("a", "b", "c")))
        assert collect(pool)[1].messages[0]["content"] == "turn 3"
        lines = [line.split() for line in log.read_text().splitlines()]
        assert [word for _, word in lines] == ["a", "die", "a", "b", "c"]  # replayed once, then kept
        assert lines[0][0] == lines[1][0] != lines[2][0] == lines[4][0]
    finally:
        pool.close()


def test_an_environment_that_answers_differently_when_replayed_fails_its_episode(module: str) -> None:
    host = EnvironmentHost(module, {})
    changed = Episode(Prompt("p", "x", ""), ("a", "b"), (({"role": "tool", "content": "something else"},),), "stop")
    outcome = host.answer(Call(3, changed))
    assert isinstance(outcome.score, Reward) and "differently when it was replayed" in outcome.score.error


def test_a_cut_turn_is_scored_without_being_answered(module: str) -> None:
    host = EnvironmentHost(module, {})
    assert host.answer(Call(1, episode("a"))).score is None
    cut = host.answer(Call(1, episode("a", "b"), is_over=True))
    assert cut.score == Reward(1.0, {"turns": 2.0})  # it heard one turn, the episode has two
    assert host.answer(Call(2, episode("a"))).score is None
    full = host.answer(Call(2, episode("a", answers=1), is_over=True))  # its answer found no room
    assert full.score == Reward(1.0, {"turns": 1.0})


def test_what_an_earlier_episode_left_under_a_key_is_not_taken_for_a_later_one(module: str) -> None:
    host = EnvironmentHost(module, {})
    assert host.answer(Call(5, episode("nan"))).score is None  # then it went on in another worker
    later = host.answer(Call(5, episode("a", "end")))
    assert later.score == Reward(2.0, {"turns": 2.0})  # an environment that heard "nan" scores nan


def test_a_slow_environment_does_not_hold_up_others(module: str) -> None:
    pool = EnvironmentPool(module, workers=2, limit_s=3.0)
    try:
        pool.first([Prompt("p", "hello", "")])
        pool.submit(Call(0, episode("hang")))
        for key in range(1, 40):
            pool.submit(Call(key, episode("fine")))
        found, start = list[Outcome](), time.monotonic()
        while len(found) < 39:
            found += pool.collect(block=True)
        assert 0 not in {one.key for one in found} and time.monotonic() - start < 3.0
    finally:
        pool.close()


LOADS = """
import time

loaded = []


class Loads:
    def __init__(self):
        if not loaded:  # once per process, as an import or a dataset
            time.sleep(2.5)
            loaded.append(True)

    def reset(self, row):
        return [{"role": "user", "content": row.text}]

    def step(self, response):
        return None

    def score(self, episode):
        return 1.0
"""


def test_loading_takes_no_time_of_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "loads_environment.py").write_text(LOADS)
    monkeypatch.syspath_prepend(tmp_path)
    pool = EnvironmentPool("loads_environment:Loads", workers=1, limit_s=1.0)
    try:
        row = Prompt("p", "hi", "")
        assert pool.first([row])[0][0]["content"] == "hi"
        pool.submit(Call(0, Episode(row, ("x",), (), "stop")))
        (outcome,) = pool.collect(block=True)
        assert isinstance(outcome.score, Reward) and outcome.score.value == 1.0, outcome
    finally:
        pool.close()


def test_what_cannot_begin_is_refused_at_once(module: str) -> None:
    with pytest.raises(TaskError, match=r"cannot be made: .*unexpected keyword"):
        EnvironmentPool(module, {"speed": 3})
    with pytest.raises(TaskError, match="limit_s=0"):
        EnvironmentPool(module, limit_s=0)
    pool = EnvironmentPool(module, workers=1)
    try:
        with pytest.raises(TaskError, match="cannot begin prompt p: RuntimeError: no such row"):
            pool.first([Prompt("p", "bad reset", "")])
    finally:
        pool.close()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("hi", "returned str"),
        ({"role": "user"}, "returned dict"),
        ([], "no messages"),
        ([{"role": "user"}], "both text"),
        (3, "int"),
    ],
)
def test_messages_are_checked(given: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        checked_messages(given, "step")


def test_closing_leaves_no_process(module: str) -> None:
    pool = EnvironmentPool(module, workers=2)
    for key in range(4):
        pool.submit(Call(key, episode("fine")))
    pool.collect(block=True)
    processes = [worker.process.pid for worker in pool._running]
    pool.close()
    assert processes and pool.pending == 0
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)
    assert math.isnan(Reward(math.nan).value) and TaskScore().parts == {}


@pytest.mark.parametrize(
    "outcome",
    [
        Outcome(3, ({"role": "tool", "content": "5"},), seconds=0.5),
        Outcome(3, score=Reward(0.5, {"length": 2.0}), seconds=0.5),
        Outcome(3, score=TaskScore({"calls": 1.0}), seconds=0.5),
    ],
)
def test_an_outcome_is_the_same_after_its_way_as_json(outcome: Outcome) -> None:
    assert outcome_of_record(3, json.loads(json.dumps(outcome_record(outcome)))) == outcome


@pytest.mark.parametrize(
    "record",
    [{}, {"seconds": 0, "messages": []}, {"seconds": 0, "messages": "text"}, {"seconds": 0, "score": {"value": "1"}}],
)
def test_an_answer_of_another_shape_is_the_error_of_its_episode(record: dict[str, Any]) -> None:
    score = outcome_of_record(3, record).score
    assert isinstance(score, Reward) and score.error.startswith("worker died")
