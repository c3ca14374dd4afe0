"""Scores responses with a function of the user's."""

from __future__ import annotations

import asyncio
import json
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from stalewise.errors import TaskError
from stalewise.tasks.base import is_importable, load, no_module, paired
from stalewise.tasks.callables import (
    ChatText,
    bind,
    check_parameters,
    importable_name,
    is_async,
    registered,
    takes_prompt_object,
)
from stalewise.tasks.sandbox import probe
from stalewise.tasks.verifiers.judge_process import Judge, failed, judged, reward_of
from stalewise.tasks.verifiers.pool import Confinement, ProcessVerifier
from stalewise.types import Prompt, Reward


class PythonVerifier(ProcessVerifier):
    """A function "module:function", called in a worker process.

    Its parameters may be named `prompt`, `response`, `answer` or like fields of the row, as for reward functions of
    `stalewise.train`. A function with the two parameters (prompt, response) gets a `Prompt`, which has all of these.

    It returns the reward as a number, or a dict of numbers with the key "reward"; the other keys are reward parts. A
    dict without "reward" is an error: neither the sum nor the mean of the parts would be an obvious reward.

    The function gets no tokens and no proxies from this process's environment; `environment` names variables that it
    gets. `memory_mb` and `processes` limit the processes of one worker together. With `sandbox` it has no network,
    starts no programs, and reads only Python's own files and those on the Python path.
    """

    def __init__(
        self,
        function: str,
        *,
        workers: int | None = None,
        limit_s: float = 5.0,
        memory_mb: int = 32_768,
        processes: int = 64,
        environment: Sequence[str] = (),
        sandbox: bool = False,
    ):
        module, colon, name = function.partition(":")
        if not (colon and all(part.isidentifier() for part in (*module.split("."), name))):
            raise TaskError(f"verifier python: function={function!r} must look like 'module:function'")
        if not is_importable(module):
            raise TaskError(f"verifier python: {no_module(module)}")
        if sandbox is True and (reason := probe("landlock")):
            raise TaskError(f"verifier python: sandbox = true needs Landlock, which does not work here: {reason}")
        confinement = Confinement(memory_mb, processes, environment=environment, sandbox=sandbox)
        options = {"function": function}
        super().__init__(f"{__name__}:load_judge", options, workers=workers, limit_s=limit_s, confinement=confinement)


def load_judge(function: str) -> Judge:
    """Import the user's function; runs in a worker."""
    user_function = load(function)
    if not callable(user_function):
        raise TypeError(f"{function} is not a function")
    judge: Any = user_function if takes_prompt_object(user_function) else make_judge(user_function)
    return (lambda prompt, response: asyncio.run(judge(prompt, response))) if is_async(user_function) else judge


MOST_LEFT_BEHIND = 8  # calls over their limit that still run; more would use up the machine
CALLS_AT_ONCE = 64  # concurrent calls of a coroutine function


class FunctionVerifier:
    """The function that `function` refers to (`stalewise.tasks.callables`), called with the arguments that it names.

    `limit_s` is the time limit of one call, `workers` the number of concurrent calls. The default is one per CPU (at
    most 8) in processes, 1 in threads, since the function may not be thread-safe, and 64 in an event loop.
    """

    def __init__(self, function: str, *, workers: int | None = None, limit_s: float = 5.0):
        if (workers is not None and workers < 1) or not 0 < limit_s < math.inf:
            raise TaskError(f"a verifier needs workers ≥ 1 and a finite limit_s > 0, not {workers=}, {limit_s=}")
        self.function, self.workers, self.limit_s = function, workers, float(limit_s)
        self._verifier: ProcessVerifier | _Threads | _EventLoop | None = None

    @property
    def scores_independently(self) -> bool:
        """Whether the function runs in other processes. One in this process may keep state between its calls."""
        return isinstance(self._made(), ProcessVerifier)

    def score(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[Reward]:
        """Score `responses[i]` as an answer to `prompts[i]`; results in the same order."""
        return self._made().score(prompts, responses)

    def close(self) -> None:
        """End processes and threads. Scoring again starts new ones."""
        if self._verifier is not None:
            self._verifier.close()
            self._verifier = None

    def _made(self) -> ProcessVerifier | _Threads | _EventLoop:
        if self._verifier is None:
            self._verifier = self._make()
        return self._verifier

    def _make(self) -> ProcessVerifier | _Threads | _EventLoop:
        function = registered(self.function, "reward function")
        if is_async(function):
            return _EventLoop(function, self.workers or CALLS_AT_ONCE, self.limit_s)
        if name := importable_name(function):
            options = {"function": name}
            return ProcessVerifier(
                f"{__name__}:load_function_judge", options, workers=self.workers, limit_s=self.limit_s
            )
        return _Threads(make_judge(function), self.workers or 1, self.limit_s)


def arguments(prompt: Prompt, response: str) -> dict[str, Any]:
    """The arguments that a reward function may name: fields of the row, `prompt`, `response` and `answer`.

    The answer is the row's own value, so a number stays a number.
    """
    row = json.loads(prompt.metadata.get("row", "{}"))
    text = prompt.metadata.get("problem", prompt.text)
    if isinstance(row.get("prompt"), list):
        text = ChatText(text)
        text.messages = row["prompt"]
    answer = row.get(prompt.metadata.get("answer_field"), prompt.answer)  # the field is named if it is not text
    return {**row, "prompt": text, "response": response, "answer": answer}


def make_judge(function: Any) -> Judge:
    """A judge that calls the function with the arguments that it names."""
    call = bind(function)

    def judge(prompt: Prompt, response: str) -> Any:
        values = arguments(prompt, response)
        check_parameters(function, values)
        return call(values)

    return judge


def load_function_judge(function: str) -> Judge:
    """Import the function; runs in a worker process."""
    return make_judge(load(function))


class _Threads:
    """Calls in threads. A call over its time limit keeps its thread, and a new thread replaces it."""

    def __init__(self, judge: Judge, workers: int, limit_s: float) -> None:
        self._judge, self._workers, self._limit_s = judge, workers, limit_s
        self._overdue: list[threading.Event] = []  # calls that did not return in time; set when they return

    def score(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[Reward]:
        items = paired(prompts, responses)
        rewards: list[Reward | None] = [None] * len(items)
        waiting = list(reversed(range(len(items))))
        running: dict[int, tuple[float, threading.Event]] = {}  # index: when it began, and whether it returned
        answers: queue.SimpleQueue[tuple[int, Reward]] = queue.SimpleQueue()
        tasks: queue.SimpleQueue[tuple[int, threading.Event] | None] = queue.SimpleQueue()

        def work() -> None:
            while (call := tasks.get()) is not None:
                index, returned = call
                reward = judged(self._judge, *items[index])
                returned.set()
                answers.put((index, reward))

        threads = [_thread(work) for _ in range(min(self._workers, len(items)))]
        while waiting or running:
            while waiting and len(running) < self._workers:
                index, returned = waiting.pop(), threading.Event()
                running[index] = time.monotonic(), returned
                tasks.put((index, returned))
            patience = min(began for began, _ in running.values()) + self._limit_s - time.monotonic()
            try:
                index, reward = answers.get(timeout=max(0.0, patience))
            except queue.Empty:
                for index in self._late(running):
                    running.pop(index)
                    rewards[index] = Reward(math.nan, error=f"timeout after {self._limit_s} s")
                    threads.append(_thread(work))
            else:
                if running.pop(index, None) is not None:  # None: it was late and has its error
                    rewards[index] = reward
        for _ in threads:
            tasks.put(None)
        return [reward for reward in rewards if reward is not None]

    def _late(self, running: dict[int, tuple[float, threading.Event]]) -> list[int]:
        now = time.monotonic()
        late = [index for index, (began, _) in running.items() if now - began >= self._limit_s]
        calls = [*self._overdue, *(running[index][1] for index in late)]
        self._overdue = [returned for returned in calls if not returned.is_set()]
        if len(self._overdue) > MOST_LEFT_BEHIND:
            raise TaskError(
                f"{len(self._overdue)} calls of the reward function did not return within {self._limit_s:g} s. A "
                "function of a program runs in its threads, which cannot be ended: put it into a module, so that it "
                "runs in worker processes, or raise limit_s in verifier_options"
            )
        return late

    def close(self) -> None:
        """Do nothing: threads end when they have nothing to do."""


def _thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, name="stalewise-reward", daemon=True)
    thread.start()
    return thread


class _EventLoop:
    """Calls of a coroutine function in one event loop, which lives in a thread as long as the verifier."""

    def __init__(self, function: Any, at_once: int, limit_s: float) -> None:
        self._call, self._at_once, self._limit_s = bind(function), at_once, limit_s
        self._loop = asyncio.new_event_loop()
        self._thread = _thread(self._loop.run_forever)

    def score(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[Reward]:
        calls = self._score_all(paired(prompts, responses))
        return asyncio.run_coroutine_threadsafe(calls, self._loop).result()

    async def _score_all(self, items: list[tuple[Prompt, str]]) -> list[Reward]:
        places = asyncio.Semaphore(self._at_once)

        async def score_one(prompt: Prompt, response: str) -> Reward:
            async with places:
                try:
                    result = await asyncio.wait_for(self._call(arguments(prompt, response)), self._limit_s)
                    return reward_of(result)
                except TimeoutError:
                    return Reward(math.nan, error=f"timeout after {self._limit_s} s")
                except Exception as problem:
                    return failed(problem)

        return list(await asyncio.gather(*(score_one(prompt, response) for prompt, response in items)))

    def close(self) -> None:
        if self._thread.is_alive():  # not in a fork
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
