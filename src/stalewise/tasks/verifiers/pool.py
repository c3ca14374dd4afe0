"""Runs judges that may hang, raise or crash in worker processes, each response under a hard time limit.

The workers are fresh interpreters: a fork would copy the locks of the parent's threads and its CUDA context, and
`multiprocessing`'s spawn imports the parent's `__main__` again, which would load torch into every worker and run
scripts without `if __name__ == "__main__"` twice. A worker has its own session: Ctrl-C in the terminal reaches only the
parent. On Linux a supervising process of the sandbox enforces the limits of each worker and ends everything that the
judge started. Requests and answers are lines of JSON: nothing that a judge sends is executed.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

from stalewise.errors import TaskError
from stalewise.tasks import sandbox
from stalewise.tasks.base import paired
from stalewise.tasks.verifiers.judge_process import reward_of_record
from stalewise.types import Prompt, Reward

START_LIMIT_S = 120.0  # for a worker to import its judge; sympy takes a second, much longer on a busy disk
_LONGEST_ANSWER = 1 << 20
_POLL_S = 0.1
JUDGE = "stalewise.tasks.verifiers.judge_process"  # the module whose function `main` is the process
_PROGRAM = (
    "import importlib, json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "importlib.import_module(sys.argv[3]).main(int(sys.argv[2]))"
)
# Environment variables that a judge gets: no tokens, no proxies. The option `environment` names further ones.
_PASSED = """PATH HOME USER LOGNAME LANG LANGUAGE TZ TMPDIR LD_LIBRARY_PATH VIRTUAL_ENV OMP_NUM_THREADS HF_HOME
XDG_CACHE_HOME CUDA_VISIBLE_DEVICES PYTHONDONTWRITEBYTECODE PYTHONWARNINGS"""


@dataclass(frozen=True)
class Confinement:
    """Limits on the processes of a judge together, and the environment variables that they get.

    `sandbox`: no network, no new processes, and only Python's own files and packages are readable; needs Landlock.
    """

    memory_mb: int = 32_768
    processes: int = 64
    file_mb: int = 4096  # the largest file that it may write
    environment: Sequence[str] = ()  # names of further environment variables that it gets
    sandbox: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.environment, str) or not all(isinstance(name, str) for name in self.environment):
            raise TaskError(f"environment is {self.environment!r}: expected a list of names of variables")
        if not isinstance(self.sandbox, bool):
            raise TaskError(f"sandbox is {self.sandbox!r}: expected true or false")

    def variables(self) -> dict[str, str]:
        """The environment of a worker."""
        names = {*_PASSED.split(), *self.environment}
        return {name: value for name, value in os.environ.items() if name in names or name.startswith("LC_")}

    def limits(self) -> dict[str, Any]:
        """Limits of a worker. Used memory is limited, since CUDA reserves far more; the pool limits the time."""
        most = sandbox.Limits(
            memory_mb=self.memory_mb, processes=self.processes, disk_mb=self.file_mb, open_files=4096, files=10_000
        )
        changes = {"seconds": 0, "wall_seconds": 0, "address_space": False, "count_threads": False, "poll_s": _POLL_S}
        return sandbox.enforced(most, **changes)


class JudgeWorker:
    """A worker process, the response it is judging, and its deadline. Environments run in such processes, too."""

    longest_answer = _LONGEST_ANSWER

    def __init__(
        self,
        factory: str,
        options: Mapping[str, Any],
        limit_s: float,
        confinement: Confinement,
        module: str = JUDGE,
    ):
        self.connection, theirs = socket.socketpair()
        self._scratch = contextlib.ExitStack()
        self.folder = self._scratch.enter_context(sandbox.scratch_folder("judge")) if confinement.sandbox else ""
        try:
            self.child = _start_worker(theirs.fileno(), confinement, self.folder, module)
        finally:
            theirs.close()
        self.process = self.child.process
        self.item: int | None = None  # index in the batch of the response it is judging
        self.ready = False
        self.deadline = time.monotonic() + START_LIMIT_S
        self._secret, self._received = "", bytearray()
        self._send({"factory": factory, "options": dict(options), "limit_s": limit_s})

    def submit(self, item: int, limit_s: float, work: Mapping[str, Any]) -> None:
        """Send a request, as a JSON record."""
        self.item, self.deadline = item, time.monotonic() + limit_s
        self._secret = secrets.token_hex(8)
        self._send({"item": self._secret, **work})

    def _send(self, message: Mapping[str, Any]) -> None:
        self.connection.settimeout(10.0)  # raises an OSError: a worker that does not read counts as dead
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any] | None:
        """The next answer, or None if it has not arrived yet; EOFError if there will be none."""
        self.connection.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            chunk = self.connection.recv(1 << 16)
            if not chunk:
                raise EOFError
            self._received += chunk
        line, found, rest = self._received.partition(b"\n")
        if not found:
            if len(self._received) > self.longest_answer:
                raise EOFError
            return None
        self._received = bytearray(rest)
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            raise EOFError from None
        if not isinstance(answer, dict) or answer.get("item", "") != self._secret or rest:
            raise EOFError  # not an answer to the request
        return answer

    def end(self, patience_s: float = 0.0) -> str:
        """End all its processes and return how it ended. `patience_s` gives a judge time to clean up."""
        self.connection.close()  # an idle worker exits on this
        try:
            code = self.process.wait(patience_s) if patience_s else self.process.poll()
        except subprocess.TimeoutExpired:
            code = None
        self.child.stop()
        why = self.child.why()
        self._scratch.close()
        if why:
            return f"its processes exceeded the limit on {why}"
        if code is None:
            return "was killed"
        return f"exit code {code}" if code >= 0 else str(signal.strsignal(-code))


def _start_worker(descriptor: int, confinement: Confinement, folder: str, module: str) -> sandbox.Child:
    """Start the process of a judge, on Linux under a supervising process."""
    paths = [str(entry) for entry in sys.path]
    python = [sandbox.interpreter(), "-I", "-S"] if folder else [sys.executable, "-P"]  # paths are in the command
    command = [*python, "-c", _PROGRAM, json.dumps(paths), str(descriptor), module]
    environment = confinement.variables()
    if sys.platform != "linux":
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=[descriptor], start_new_session=True, env=environment
        )
        return sandbox.Child(process, -1)
    spec = {
        "mechanism": "landlock" if folder else "tree",
        "commands": [command],
        "environment": environment,
        "files": {},
        "folder": folder or os.getcwd(),
        "readable": sandbox.readable_paths([path for path in paths if path]),
        "limits": confinement.limits(),
        "descriptors": [descriptor],
    }
    return _in_lasting_thread(lambda: sandbox.launch(spec, stdin=subprocess.DEVNULL))


_Start = tuple[Callable[[], sandbox.Child], "Future[sandbox.Child]"]
_starts: dict[int, queue.SimpleQueue[_Start]] = {}  # by process: a fork has no thread of its parent
_starts_lock = threading.Lock()


def _in_lasting_thread(start: Callable[[], sandbox.Child]) -> sandbox.Child:
    """Start a process from a thread that lasts as long as this process.

    A sandbox ends with its parent, and for Linux the parent is the thread that started it: a worker would end with a
    short-lived thread.
    """
    if threading.current_thread() is threading.main_thread():
        return start()
    with _starts_lock:
        if os.getpid() not in _starts:
            _starts.clear()
            _starts[os.getpid()] = queue.SimpleQueue()
            threading.Thread(target=_start_all, args=_starts.values(), name="stalewise-starts", daemon=True).start()
        requests = _starts[os.getpid()]
    started: Future[sandbox.Child] = Future()
    requests.put((start, started))
    return started.result()


def _start_all(requests: queue.SimpleQueue[_Start]) -> None:
    while True:
        start, started = requests.get()
        try:
            started.set_result(start())
        except BaseException as error:
            started.set_exception(error)


class ProcessVerifier:
    """A verifier whose judge runs in worker processes, which start at the first score.

    `factory` names a function "module:function" that is called once per worker with `options` and returns the judge: a
    callable (prompt, response) that returns a Reward, a number, or a mapping of numbers with the key "reward". Options
    must be plain JSON data. `confinement` limits a worker's processes. A failure is the error of its own response: no
    result within `limit_s` seconds, an exception, no finite number, a dead process. Without `workers` there is one per
    CPU, at most 8.
    """

    scores_independently = True

    def __init__(
        self,
        factory: str,
        options: Mapping[str, Any] | None = None,
        *,
        workers: int | None = None,
        limit_s: float = 5.0,
        confinement: Confinement | None = None,
    ):
        self.confinement = confinement or Confinement()
        self.confinement.limits()  # raises if a limit is invalid
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
                # After Ctrl-C some workers still judge this batch: their results must not reach the next one.
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
                self._running.append(JudgeWorker(self.factory, self.options, self.limit_s, self.confinement))
            for worker in [worker for worker in self._running if worker.ready and worker.item is None]:
                if not waiting:
                    break
                try:
                    prompt, response = items[waiting[0]]
                    work = {"prompt": prompt_record(prompt), "response": response}
                    worker.submit(waiting[0], self.limit_s, work)
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
            reward = self._receive(worker) if worker.connection in answered else None
            reward = reward or self._check_time(worker)
            if item is not None and reward is not None:
                results.append((item, reward))
        return results

    def _receive(self, worker: JudgeWorker) -> Reward | None:
        try:
            answer = worker.receive()
        except (EOFError, OSError):
            end = self._drop(worker, patience_s=1.0)
            if not worker.ready:
                raise TaskError(f"the verifier's process ended while it loaded {self._judge_name()}: {end}") from None
            return Reward(math.nan, error=f"worker died: {end}")
        if answer is None:
            return None
        if not worker.ready:
            if problem := answer.get("error"):
                self._drop(worker)
                raise TaskError(f"the verifier cannot load {self._judge_name()}: {str(problem)[:300]}")
            worker.ready = True
            return None
        worker.item = None
        return reward_of_record(answer)

    def _check_time(self, worker: JudgeWorker) -> Reward | None:
        if worker not in self._running or time.monotonic() < worker.deadline or (worker.ready and worker.item is None):
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


def prompt_record(prompt: Prompt) -> dict[str, Any]:
    """A prompt as a JSON record."""
    texts = {"prompt_id": prompt.prompt_id, "text": prompt.text, "answer": prompt.answer}
    return texts | {"metadata": dict(prompt.metadata)}  # `asdict` copies deeply, for each response


def end_workers(workers: list[JudgeWorker], owner: int) -> None:
    """End these processes, if this process is the `owner` that started them."""
    if os.getpid() != owner:
        return  # a fork of the owner: the workers are not ours
    for worker in workers:
        worker.connection.close()  # all at once, so that they exit at the same time
    deadline = time.monotonic() + 1.0
    for worker in workers:
        worker.end(max(0.01, deadline - time.monotonic()) if worker.item is None else 0.0)
    workers.clear()
