"""Plays episodes of environments, in worker processes with a time limit for every answer, or here if they are quick.

A worker keeps the environments of its episodes. When it dies, or another one is free earlier, an episode is replayed
there from its turns, so what one environment does costs its own episode only.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import wait
from typing import Any

from stalewise.errors import TaskError
from stalewise.tasks.base import Verifier, load
from stalewise.tasks.environments import ChatMessage, Environment, Episode
from stalewise.tasks.verifiers.judge_process import (
    Answer,
    describe,
    failed,
    record_of,
    reward_of,
    reward_of_record,
    serve,
)
from stalewise.tasks.verifiers.pool import START_LIMIT_S, Confinement, JudgeWorker, end_workers, prompt_record
from stalewise.types import FinishReason, Prompt, Reward

LIVE = 4096  # environments that a process keeps; dropped ones are replayed when they are called again
LONGEST_ANSWER = 1 << 20  # characters


@dataclass(frozen=True, slots=True)
class TaskScore:
    """A score that the task's verifier gives to the policy's last turn; `parts` are added to its own."""

    parts: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True)
class Call:
    """A request to an environment: answer the last turn of the episode, or score an episode that has ended."""

    key: int
    episode: Episode
    is_over: bool = False  # the policy cannot go on: score the episode as it is


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a `Call`: messages, or the end of the episode with a reward."""

    key: int
    messages: tuple[ChatMessage, ...] = ()
    score: Reward | TaskScore | None = None  # None: the episode goes on
    seconds: float = 0.0


Heard = tuple[str, tuple[str, ...]]  # the row and the answered turns, which determine the state of an environment


def _heard(episode: Episode, turns: int) -> Heard:
    return episode.prompt.prompt_id, episode.turns[:turns]


class EnvironmentHost:
    """The environments of the episodes that are played in this process."""

    def __init__(self, factory: str, options: Mapping[str, Any]) -> None:
        self._make, self._options = load(factory), dict(options)
        self._live: OrderedDict[int, tuple[Environment, Heard]] = OrderedDict()  # by key

    def first(self, row: Prompt) -> tuple[ChatMessage, ...]:
        """The messages that an episode of this row begins with."""
        return checked_messages(self._make(**self._options).reset(row), "reset")

    def answer(self, call: Call) -> Outcome:
        """Continue an episode; whatever goes wrong is the error of this episode."""
        start = time.perf_counter()
        try:
            outcome = self._answer(call)
        except BaseException as problem:  # sys.exit in an environment must not end the worker
            self._live.pop(call.key, None)
            outcome = Outcome(call.key, score=failed(problem))
        return replace(outcome, seconds=time.perf_counter() - start)

    def _answer(self, call: Call) -> Outcome:
        episode = call.episode
        is_answered = call.is_over and len(episode.answers) == len(episode.turns)  # the last turn, too
        environment = self._caught_up(call.key, episode, len(episode.turns) - (0 if is_answered else 1))
        if not call.is_over:
            answer = environment.step(episode.turns[-1])
            if answer is not None:
                self._keep(call.key, environment, _heard(episode, len(episode.turns)))
                return Outcome(call.key, checked_messages(answer, "step"))
            episode = replace(episode, finish_reason=FinishReason.STOP.value)
        self._live.pop(call.key, None)
        score = environment.score(episode)
        return Outcome(call.key, score=score if isinstance(score, TaskScore) else reward_of(score))

    def _caught_up(self, key: int, episode: Episode, turns: int) -> Environment:
        """The environment of an episode after this number of turns: kept from before, or replayed.

        Later episodes reuse a key. An environment that an earlier episode left here, since it continued in another
        worker, is not used for them.
        """
        environment, heard = self._live.pop(key, (None, None))
        if environment is None or heard != _heard(episode, turns):
            environment = self._make(**self._options)
            checked_messages(environment.reset(episode.prompt), "reset")
            for number in range(turns):
                again = environment.step(episode.turns[number])
                recorded = episode.answers[number] if number < len(episode.answers) else None
                if recorded is not None and (again is None or checked_messages(again, "step") != recorded):
                    raise RuntimeError("the environment answered the same turns differently when it was replayed")
        return environment

    def _keep(self, key: int, environment: Environment, heard: Heard) -> None:
        self._live[key] = environment, heard
        if len(self._live) > LIVE:
            self._live.popitem(last=False)


def checked_messages(given: object, method: str) -> tuple[ChatMessage, ...]:
    """Messages as plain records; a TypeError says what was returned instead."""
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Sequence):
        raise TypeError(f"{method} returned {type(given).__name__}: expected a list of messages, or None for the end")
    messages: list[ChatMessage] = []
    for message in given:
        if not isinstance(message, Mapping) or not all(
            isinstance(message.get(key), str) for key in ("role", "content")
        ):
            raise TypeError(f"{method} returned {message!r:.80}: a message has a role and a content, both text")
        if len(message["content"]) > LONGEST_ANSWER:
            raise ValueError(
                f"{method} returned {len(message['content'])} characters: at most {LONGEST_ANSWER} are kept"
            )
        messages.append({"role": message["role"], "content": message["content"]})
    if not messages:
        raise ValueError(f"{method} returned no messages: return None to end an episode")
    return tuple(messages)


def main(descriptor: int) -> None:
    """The process of environments; a call may have to replay all turns of its episode."""

    def make(factory: str, options: Mapping[str, Any]) -> Answer:
        host = EnvironmentHost(factory, options)
        with contextlib.suppress(Exception):  # an error that also occurs later costs its own episode
            load(factory)(**options)  # so that imports and loading do not count against the limit of an answer
        return lambda request: (
            outcome_record(host.answer(call_of_record(request["call"])))
            if "call" in request
            else _first_record(host, Prompt(**request["row"]))
        )

    serve(descriptor, make, lambda request: 2 + (len(request["call"]["episode"]["turns"]) if "call" in request else 1))


def _first_record(host: EnvironmentHost, row: Prompt) -> dict[str, Any]:
    """The first messages of a row, or the error, as a record."""
    messages = _begin(host, row)
    return {"error": messages} if isinstance(messages, str) else {"messages": list(messages)}


def _begin(host: EnvironmentHost, row: Prompt) -> tuple[ChatMessage, ...] | str:
    try:
        return host.first(row)
    except BaseException as problem:
        return describe(problem)


def call_record(call: Call) -> dict[str, Any]:
    """A call as a JSON record."""
    episode = asdict(call.episode) | {"prompt": prompt_record(call.episode.prompt)}
    return {"key": call.key, "episode": episode, "is_over": call.is_over}


def call_of_record(record: Mapping[str, Any]) -> Call:
    """The call in a record that the parent sent."""
    episode = dict(record["episode"])
    episode |= {"prompt": Prompt(**episode["prompt"]), "turns": tuple(episode["turns"])}
    episode["answers"] = tuple(tuple(messages) for messages in episode["answers"])
    return Call(record["key"], Episode(**episode), record["is_over"])


def outcome_record(outcome: Outcome) -> dict[str, Any]:
    """An outcome as a JSON record."""
    record: dict[str, Any] = {"messages": list(outcome.messages), "seconds": outcome.seconds}
    if isinstance(outcome.score, TaskScore):
        record["task_score"] = {str(name): float(value) for name, value in outcome.score.parts.items()}
    elif outcome.score is not None:
        record["score"] = record_of(outcome.score)
    return record


def outcome_of_record(key: int, record: Mapping[str, Any]) -> Outcome:
    """The outcome in a worker's answer. It is checked, since an environment may write to the socket itself."""
    try:
        seconds = float(record["seconds"])
        if "task_score" in record:
            parts = reward_of({"reward": 0.0, **record["task_score"]})
            return Outcome(key, score=parts if parts.error else TaskScore(parts.parts), seconds=seconds)
        if "score" in record:
            return Outcome(key, score=reward_of_record(record["score"]), seconds=seconds)
        return Outcome(key, checked_messages(record["messages"], "step"), seconds=seconds)
    except (KeyError, TypeError, ValueError) as problem:
        return Outcome(key, score=Reward(math.nan, error=f"worker died: {describe(problem)}"))


class EnvironmentPool:
    """The environments of a task. `submit` takes calls; `collect` returns outcomes as they arrive, in any order.

    Each answer may take `limit_s` seconds. An episode has at most `max_turns` turns of the policy.
    """

    def __init__(
        self,
        factory: str,
        options: Mapping[str, Any] | None = None,
        *,
        verifier: Verifier | None = None,
        workers: int | None = None,
        limit_s: float = 10.0,
        max_turns: int = 8,
    ) -> None:
        self.workers = min(8, os.cpu_count() or 1) if workers is None else workers
        self.limit_s, self.max_turns, self.verifier = float(limit_s), max_turns, verifier
        if self.workers < 1 or not 0 < self.limit_s < math.inf or max_turns < 1:
            raise TaskError(
                f"an environment needs workers ≥ 1, a finite limit_s > 0 and max_turns ≥ 1, not {workers=}, "
                f"{limit_s=}, {max_turns=}"
            )
        self.factory, self.options = factory, dict(options or {})
        try:
            made = load(factory)
            made(**self.options)  # now: a wrong option or a missing package must not be the error of an episode
        except (TaskError, ImportError, AttributeError, TypeError, ValueError) as error:
            text = str(error) if isinstance(error, TaskError) else describe(error)
            raise TaskError(f"the environment {factory} cannot be made: {text}") from error
        self._host = EnvironmentHost(factory, self.options) if getattr(made, "local", False) else None
        self._waiting: deque[Call] = deque()
        self._calls: dict[int, Call] = {}  # by key: calls that a worker is answering
        self._done: list[Outcome] = []
        self._running: list[JudgeWorker] = []
        self._last_of: dict[int, JudgeWorker] = {}  # by key: the worker that has the environment
        self._lock, self._owner = threading.Lock(), os.getpid()
        self._finalizer = weakref.finalize(self, end_workers, self._running, self._owner)

    def first(self, rows: Sequence[Prompt]) -> list[tuple[ChatMessage, ...]]:
        """The first messages of each row; a TaskError where an environment cannot begin."""
        begun = [_begin(self._host, row) if self._host else self._begin(row) for row in rows]
        for row, messages in zip(rows, begun, strict=True):
            if isinstance(messages, str):
                raise TaskError(f"the environment {self.factory} cannot begin prompt {row.prompt_id}: {messages}")
        return [messages for messages in begun if not isinstance(messages, str)]

    def submit(self, call: Call) -> None:
        """Request an answer or a score."""
        if self._host is not None:
            self._done.append(self._host.answer(call))
        else:
            self._waiting.append(call)
            self._start_work()

    @property
    def pending(self) -> int:
        """Number of calls whose outcome was not collected yet."""
        return len(self._done) + len(self._waiting) + len(self._calls)

    def collect(self, *, block: bool) -> list[Outcome]:
        """Outcomes that have arrived; with `block` it waits for at least one, if any call is pending."""
        while True:
            self._start_work()
            self._receive(block=block and not self._done)
            if self._done or not block or not self.pending:
                done, self._done = self._done, []
                return done

    def close(self) -> None:
        """End the workers and forget all episodes."""
        self._waiting.clear()
        self._calls.clear()
        self._done.clear()
        self._last_of.clear()
        end_workers(self._running, self._owner)

    def _begin(self, row: Prompt) -> tuple[ChatMessage, ...] | str:
        """The first messages of a row, from an idle worker or a new one; or an error."""
        worker = next((candidate for candidate in self._running if candidate.ready and candidate.item is None), None)
        if worker is None:
            worker = self._new_worker()
            self._wait_ready(worker)
        try:
            worker.submit(0, self.limit_s, {"row": prompt_record(row)})
            answer = self._answer_within(worker, self.limit_s)
        except (EOFError, OSError):
            return f"worker died: {self._drop(worker)}"
        if answer is None:
            self._drop(worker)
            return f"timeout after {self.limit_s:g} s"
        worker.item = None
        return str(answer["error"]) if answer.get("error") else checked_messages(answer.get("messages"), "reset")

    @staticmethod
    def _answer_within(worker: JudgeWorker, seconds: float) -> dict[str, Any] | None:
        """The next answer of a worker, or None if it takes longer."""
        deadline = time.monotonic() + seconds
        while wait([worker.connection], max(0.0, deadline - time.monotonic())):
            answer = worker.receive()
            if answer is not None:
                return answer
        return None

    def _wait_ready(self, worker: JudgeWorker) -> None:
        try:
            answer = self._answer_within(worker, START_LIMIT_S)
        except (EOFError, OSError):
            answer = None
        problem = "it did not load" if answer is None else answer.get("error", "")
        if problem:
            self._drop(worker)
            raise TaskError(f"the environment {self.factory} cannot be loaded: {problem}")
        worker.ready = True

    def _new_worker(self) -> JudgeWorker:
        worker = JudgeWorker(self.factory, self.options, self.limit_s, Confinement(), module=__name__)
        worker.longest_answer = 8 * LONGEST_ANSWER
        self._running.append(worker)
        return worker

    def _start_work(self) -> None:
        """Give waiting calls to idle workers; a worker first gets calls of environments that it has."""
        idle = [worker for worker in self._running if worker.ready and worker.item is None]
        starting = sum(not worker.ready for worker in self._running)
        for _ in range(min(len(self._waiting) - len(idle) - starting, self.workers - len(self._running))):
            self._new_worker()
        for worker in idle:
            if not self._waiting:
                return
            mine = next((call for call in self._waiting if self._last_of.get(call.key) is worker), self._waiting[0])
            self._waiting.remove(mine)
            turns = len(mine.episode.turns)
            limit = self.limit_s * (1 if self._last_of.get(mine.key) is worker else turns + 1)
            try:
                worker.submit(mine.key, limit, {"call": call_record(mine)})
            except OSError:  # it died while idle
                self._waiting.appendleft(mine)
                self._drop(worker)
                continue
            self._calls[mine.key], self._last_of[mine.key] = mine, worker

    def _receive(self, *, block: bool) -> None:
        busy = [worker for worker in self._running if worker.item is not None or not worker.ready]
        if not busy:
            return
        patience = max(0.0, min(worker.deadline for worker in busy) - time.monotonic()) if block else 0.0
        answered = wait([worker.connection for worker in busy], patience)
        for worker in busy:
            if worker.connection in answered:
                self._read(worker)
            elif time.monotonic() >= worker.deadline:
                self._give_up(worker, f"timeout after {self.limit_s:g} s")

    def _read(self, worker: JudgeWorker) -> None:
        try:
            answer = worker.receive()
        except (EOFError, OSError):
            self._give_up(worker, "worker died")
            return
        if answer is None:  # it has not fully arrived
            return
        if not worker.ready:
            if answer.get("error"):
                self._drop(worker)
                raise TaskError(f"the environment {self.factory} cannot be loaded: {answer['error']}")
            worker.ready = True
            return
        key, worker.item = worker.item, None
        assert key is not None
        del self._calls[key]
        outcome = outcome_of_record(key, answer)
        self._done.append(outcome)
        if outcome.score is not None:
            self._last_of.pop(key, None)

    def _give_up(self, worker: JudgeWorker, what: str) -> None:
        """Record the failure of this worker's call; its other episodes are replayed in other workers."""
        key, was_ready = worker.item, worker.ready
        end = self._drop(worker)
        if not was_ready:
            raise TaskError(f"the environment {self.factory} did not load: {end}")
        assert key is not None
        del self._calls[key]
        error = what if what.startswith("timeout") else f"{what}: {end}"
        self._done.append(Outcome(key, score=Reward(math.nan, error=error)))
        self._last_of.pop(key, None)

    def _drop(self, worker: JudgeWorker) -> str:
        self._running.remove(worker)
        self._last_of = {key: holder for key, holder in self._last_of.items() if holder is not worker}
        return worker.end(0.0)
