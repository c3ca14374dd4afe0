"""The worker process of the pool: loads a judge and scores one response after another.

It imports nothing but the judge, so it starts quickly and never holds a second copy of torch.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import socket
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, SupportsFloat, SupportsIndex

from stalewise.errors import StalewiseError
from stalewise.tasks.base import load
from stalewise.types import MOST_PARTS, Prompt, Reward

Judge = Callable[[Prompt, str], object]
"""Returns a Reward, a number, or a mapping of numbers with the key "reward"; may raise."""

LARGEST = 1e15  # largest reward: the square of 1.8e19 is infinite in float32, which makes the advantage 0
_LONGEST_ERROR = 300
_LONGEST_TRACEBACK = 8000
_FRAMES = 8  # innermost frames that are kept of a traceback
_PACKAGE = str(Path(__file__).parents[2])


Answer = Callable[[Mapping[str, Any]], Mapping[str, object]]


def main(descriptor: int) -> None:
    """The process of a judge."""

    def make(factory: str, options: Mapping[str, Any]) -> Answer:
        judge = load(factory)(**options)
        return lambda request: record_of(judged(judge, Prompt(**request["prompt"]), request["response"]))

    serve(descriptor, make, lambda request: 2)


def serve(
    descriptor: int,
    make: Callable[[str, Mapping[str, Any]], Answer],
    limits: Callable[[Mapping[str, Any]], int],
) -> None:
    """Answer requests over the socket with this descriptor until the parent closes it; each is a line of JSON.

    `make` is called once, with a factory and its options. A request takes at most `limits` times the parent's limit.
    """
    os.set_inheritable(descriptor, False)  # programs that a judge starts must not keep the socket open
    os.dup2(2, 1)  # output of a judge goes to the log, not to the parent's standard output
    try:
        with socket.socket(fileno=descriptor) as connection, connection.makefile("rb") as lines:
            begin = json.loads(next(lines))
            try:
                answer = make(begin["factory"], begin["options"])
            except Exception as problem:
                connection.sendall(line_of({"error": describe(problem)}))
                return
            connection.sendall(line_of({"error": ""}))
            with open(os.devnull, "w") as nowhere:
                for line in lines:
                    request = json.loads(line)
                    # The parent kills a judge that is over its limit. If the parent itself was killed, this timer ends
                    # the process; it runs outside of Python, so no judge can block it.
                    faulthandler.dump_traceback_later(limits(request) * begin["limit_s"] + 1, exit=True, file=nowhere)
                    result = answer(request)
                    faulthandler.cancel_dump_traceback_later()
                    connection.sendall(line_of({"item": request["item"], **result}))
    except (StopIteration, OSError):
        return  # the parent has ended or closed the pool


def line_of(message: Mapping[str, object]) -> bytes:
    """The bytes of a message: one line of JSON."""
    return json.dumps(message).encode() + b"\n"


def record_of(reward: Reward) -> dict[str, object]:
    """A reward as a JSON record; an error if JSON cannot hold it, since a judge may put anything into it."""
    record = {"value": reward.value, "parts": dict(reward.parts), "error": reward.error, "traceback": reward.traceback}
    record |= {} if reward.answer is None else {"answer": str(reward.answer)}
    try:
        json.dumps(record)
    except Exception as problem:
        return record_of(Reward(math.nan, error=describe(problem)))
    return record


def reward_of_record(record: Mapping[str, object]) -> Reward:
    """The reward in a worker's answer. It is checked, since a judge may write to the socket itself."""
    value, parts, error, trace = (record.get(name) for name in ("value", "parts", "error", "traceback"))
    texts = isinstance(error, str) and isinstance(trace, str)
    numbers = isinstance(value, int | float) and isinstance(parts, Mapping) and len(parts) <= MOST_PARTS
    if not (texts and numbers):
        return Reward(math.nan, error="worker died: it sent an answer that is not a reward")
    if error:
        return Reward(math.nan, error=str(error)[:_LONGEST_ERROR], traceback=str(trace)[-_LONGEST_TRACEBACK:])
    answer = record.get("answer")
    reward = _finite(value, {str(name): part for name, part in parts.items()})  # type: ignore[union-attr]
    return replace(reward, answer=answer if isinstance(answer, str) else None)


def judged(judge: Judge, prompt: Prompt, response: str) -> Reward:
    """Call a judge and make a Reward of its result or its exception."""
    try:
        return reward_of(judge(prompt, response))
    except BaseException as problem:  # sys.exit in a judge must not end the worker
        return failed(problem)


def failed(problem: BaseException) -> Reward:
    """The Reward if a judge raised: no value, an error, and the traceback from the judge's first own frame on."""
    frames = traceback.extract_tb(problem.__traceback__)
    own = next((number for number, frame in enumerate(frames) if not frame.filename.startswith(_PACKAGE)), -1)
    error = describe(problem)
    if own < 0 and isinstance(problem, StalewiseError):  # its message needs no traceback
        return Reward(math.nan, error=error)
    shown = traceback.StackSummary.from_list(frames[max(own, 0) :][-_FRAMES:]).format()
    return Reward(math.nan, error=error, traceback="".join(shown) + error)


def reward_of(result: object) -> Reward:
    """Make a Reward of the result of a judge.

    >>> reward_of(True)
    Reward(value=1.0, parts={}, error='')
    >>> reward_of({"reward": 0.5, "length": 12})
    Reward(value=0.5, parts={'length': 12.0}, error='')
    """
    if isinstance(result, Reward):
        return result if result.error else replace(_finite(result.value, result.parts), answer=result.answer)
    if result is None:
        return Reward(math.nan, error="returned None: it must return a number, or a dict with the key reward")
    if not isinstance(result, Mapping):
        return _finite(result, {})
    if "reward" not in result:
        return Reward(math.nan, error='no reward: a dict from a verifier must have the key "reward"')
    answer = result.get("answer")
    is_part = not isinstance(answer, str | None)  # a number may be both
    parts = {str(name): value for name, value in result.items() if name != "reward" and (name != "answer" or is_part)}
    return replace(_finite(result["reward"], parts), answer=None if answer is None else str(answer))


def _finite(value: object, parts: Mapping[str, object]) -> Reward:
    if len(parts) > MOST_PARTS:
        return Reward(math.nan, error=f"too many reward parts: {len(parts)}; the most are {MOST_PARTS}")
    numbers: dict[str, float] = {}
    for name, item in {"reward": value, **parts}.items():
        # float() alone would also read strings; this accepts the scalars of numpy and torch.
        number = float(item) if isinstance(item, SupportsFloat | SupportsIndex) else None
        if number is None or not math.isfinite(number):
            shown = type(item).__name__ if number is None else str(number)
            return Reward(math.nan, error=f"not a finite number: {name} is {shown}")
        numbers[name] = number
    if abs(numbers["reward"]) > LARGEST:
        return Reward(math.nan, error=f"too large: reward is {numbers['reward']}; the largest is {LARGEST:g}")
    return Reward(numbers.pop("reward"), numbers)


def describe(problem: BaseException) -> str:
    """The class and message of an exception on one line."""
    try:
        message = " ".join(str(problem).split())
    except Exception:  # an exception of the user's whose own __str__ raises
        message = "(no message)"
    return f"{type(problem).__name__}: {message}"[:_LONGEST_ERROR]
