"""Runs judges that may hang, raise or crash in worker processes, each response under a hard time limit.

The workers are fresh interpreters: a fork would copy the locks of the parent's threads and its CUDA context, and
`multiprocessing`'s spawn imports the parent's `__main__` again, which would load torch into every worker and run
scripts without `if __name__ == "__main__"` twice. A worker has its own session: Ctrl-C in the terminal reaches only the
parent, and killing the worker's process group also ends everything that the judge started.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from stalewise.errors import TaskError
from stalewise.tasks.base import paired
from stalewise.types import Prompt, Reward

START_LIMIT_S = 120.0  # for a worker to import its judge; sympy takes a second, much longer on a busy disk
JUDGE = "stalewise.tasks.verifiers.judge_process"  # the module whose function `main` is the process
_PROGRAM = (
    "import importlib, json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "importlib.import_module(sys.argv[3]).main(int(sys.argv[2]))"
)


class JudgeWorker:
    """One process, the response it judges, and its deadline. Environments run in such processes, too."""

    def __init__(self, factory: str, options: Mapping[str, Any], limit_s: float, module: str = JUDGE):
        ours, theirs = socket.socketpair()
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, json.dumps([*map(str, sys.path)]), str(theirs.fileno()), module],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        finally:
            theirs.close()
        self.connection = Connection(ours.detach())
        self.item: int | None = None  # index in the batch of the response it is judging
        self.ready = False
        self.deadline = time.monotonic() + START_LIMIT_S
        self.connection.send((factory, dict(options), limit_s))

    def submit(self, item: int, limit_s: float, *work: object) -> None:
        """Give it something to do."""
        self.item, self.deadline = item, time.monotonic() + limit_s
        self.connection.send(work)

    def end(self, patience_s: float = 0.0) -> str:
        """End the process and return how it ended. `patience_s` gives a judge time to clean up."""
        self.connection.close()  # an idle worker exits on this
        try:
            code = self.process.wait(patience_s) if patience_s else self.process.poll()
        except subprocess.TimeoutExpired:
            code = None
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: the latter for zombies
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if code is None:
            return "was killed"
        return f"exit code {code}" if code >= 0 else str(signal.strsignal(-code))


class ProcessVerifier:
    """A verifier whose judge runs in worker processes, which start at the first score.

    `factory` names a function "module:function" that is called once per worker with `options` and returns the judge: a
    callable (prompt, response) that returns a Reward, a number, or a mapping of numbers with the key "reward". A
    failure is the error of its own response: no result within `limit_s` seconds, an exception, no finite number, a dead
    process. Without `workers` there is one per CPU, at most 8.
    """

    def __init__(
        self,
        factory: str,
        options: Mapping[str, Any] | None = None,
        *,
        workers: int | None = None,
        limit_s: float = 5.0,
    ):
        self.workers = min(8, os.cpu_count() or 1) if workers is None else workers
        self.limit_s = float(limit_s)
        if self.workers < 1 or not 0 < self.limit_s < math.inf:
            raise TaskError(f"a verifier needs workers ≥ 1 and a finite limit_s > 0, not {workers=}, {limit_s=}")
        self.factory, self.options = factory, dict(options or {})
        self._running: list[JudgeWorker] = []
        self._lock = threading.Lock()
        self._owner = os.getpid()
        # Runs at garbage collection and at interpreter exit; must not refer to self.
        self._finalizer = weakref.finalize(self, end_workers, self._running, self._owner)

    def score(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[Reward]:
        """Score `responses[i]` as an answer to `prompts[i]`; results in the same order.

        Takes at most limit × items per worker, plus the time to start workers.
        """
        items = paired(prompts, responses)
        with self._lock:
            try:
                return self._score(items)
            finally:
                # After Ctrl-C some still work on this batch: their results must not reach the next one.
                for worker in [worker for worker in self._running if worker.item is not None]:
                    self._drop(worker)

    def close(self) -> None:
        """End the workers. Scoring again starts new ones."""
        with self._lock:
            end_workers(self._running, self._owner)

    def __enter__(self) -> ProcessVerifier:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _score(self, items: list[tuple[Prompt, str]]) -> list[Reward]:
        rewards: list[Reward | None] = [None] * len(items)
        waiting = deque(range(len(items)))
        while waiting or any(worker.item is not None for worker in self._running):
            missing = min(self.workers, len(waiting)) - sum(worker.item is None for worker in self._running)
            for _ in range(min(missing, self.workers - len(self._running))):
                self._running.append(JudgeWorker(self.factory, self.options, self.limit_s))
            for worker in [worker for worker in self._running if worker.ready and worker.item is None]:
                if not waiting:
                    break
                try:
                    worker.submit(waiting[0], self.limit_s, *items[waiting[0]])
                    waiting.popleft()
                except OSError:  # it died while idle, which is not this response's fault
                    self._drop(worker)
            for item, reward in self._collect():
                rewards[item] = reward
        return [reward for reward in rewards if reward is not None]

    def _collect(self) -> list[tuple[int, Reward]]:
        """Wait until a worker answers, dies or is out of time; return the results."""
        pending = [worker for worker in self._running if worker.item is not None or not worker.ready]
        if not pending:
            return []
        patience = max(0.0, min(worker.deadline for worker in pending) - time.monotonic())
        answered = wait([worker.connection for worker in pending], patience)
        results: list[tuple[int, Reward]] = []
        for worker in pending:
            item = worker.item
            reward = self._receive(worker) if worker.connection in answered else self._check_time(worker)
            if item is not None and reward is not None:
                results.append((item, reward))
        return results

    def _receive(self, worker: JudgeWorker) -> Reward | None:
        try:
            message = worker.connection.recv()
        except (EOFError, OSError):
            end = self._drop(worker, patience_s=1.0)
            if not worker.ready:
                raise TaskError(f"the verifier's process ended while it loaded {self._judge_name()}: {end}") from None
            return Reward(math.nan, error=f"worker died: {end}")
        if not worker.ready:
            if message:
                self._drop(worker)
                raise TaskError(f"the verifier cannot load {self._judge_name()}: {message}")
            worker.ready = True
            return None
        worker.item = None
        return Reward(*message)

    def _check_time(self, worker: JudgeWorker) -> Reward | None:
        if time.monotonic() < worker.deadline:
            return None
        self._drop(worker)
        if not worker.ready:
            raise TaskError(f"the verifier did not load {self._judge_name()} within {START_LIMIT_S:.0f} s")
        return Reward(math.nan, error=f"timeout after {self.limit_s} s")

    def _drop(self, worker: JudgeWorker, patience_s: float = 0.0) -> str:
        self._running.remove(worker)
        return worker.end(patience_s)

    def _judge_name(self) -> str:
        return str(self.options.get("function", self.factory))


def end_workers(workers: list[JudgeWorker], owner: int) -> None:
    """End all of these processes, which the process `owner` started."""
    if os.getpid() != owner:
        return  # a fork of the owner: the workers are not ours
    for worker in workers:
        worker.connection.close()  # all at once, so that they exit at the same time
    deadline = time.monotonic() + 1.0
    for worker in workers:
        worker.end(max(0.01, deadline - time.monotonic()) if worker.item is None else 0.0)
    workers.clear()
