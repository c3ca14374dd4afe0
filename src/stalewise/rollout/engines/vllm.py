"""The engine vllm: vLLM's offline engine, one process for each copy of the policy, requests shared out among them.

The first checkpoint starts the processes; a later one replaces their weights in place. vLLM does not say whether a
reload was complete, so the engine is asked, and started anew where it did not get the checkpoint's policy.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stalewise.config.sections import VllmSection
from stalewise.errors import ConfigError, EngineError
from stalewise.rollout.engines.weight_check import Memory, PolicyCheck
from stalewise.rollout.policy_files import (
    Answer,
    HasPolicy,
    PolicyFiles,
    check_lengths,
    make_responses,
    read_policy_files,
)
from stalewise.rollout.sampler import Request, Response
from stalewise.types import SamplerSettings

APPETITE = (
    4096  # requests for one copy: some times what vLLM has under way, since at the end of a call places stay empty
)
ENDING_S = 20.0  # that a process has to end by itself


class Copy:
    """One process with one copy of the policy."""

    def __init__(self, devices: Sequence[str]) -> None:
        """`devices` are the GPUs that it sees; none: it sees what this process sees."""
        self.memory = Memory()
        self.busy = False
        self.failed = False  # its log is worth reading
        environment = {"VLLM_LOGGING_LEVEL": "WARNING", **os.environ}
        if devices:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        descriptor, name = tempfile.mkstemp(prefix="stalewise-vllm-", suffix=".log")
        self.log = Path(name)
        self.pipe, theirs = Pipe()
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "stalewise.rollout.engines.vllm_process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=descriptor,  # nobody reads vLLM's words unless it fails
                stderr=descriptor,
                env=environment,
                start_new_session=True,  # Ctrl-C is for the conductor, and one signal ends vLLM's own processes, too
            )
        finally:
            theirs.close()
            os.close(descriptor)

    def send(self, method: str, *arguments: object) -> None:
        """Tell it to do something; `receive` gets what came of it."""
        self.busy = True
        try:
            self.pipe.send((method, arguments))
        except OSError:
            raise self._death() from None

    def receive(self) -> Any:
        """What came of the last `send`."""
        try:
            kind, result = self.pipe.recv()
        except (EOFError, OSError):
            raise self._death() from None
        self.busy = False
        if kind == "error":
            self.failed = True
            cause = f", by {self._last_error()}" if "See root cause" in result else ""
            raise EngineError(f"vLLM: {result}{cause} (its log: {self.log})")
        return result

    def _death(self) -> EngineError:
        self.failed = True
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(ENDING_S)
        words = f"{self._last_error() or 'it said nothing'} (its log: {self.log})"
        return EngineError(f"vLLM ended by itself ({self.process.returncode}): {words}")

    def _last_error(self) -> str:
        """The last exception in its log that is not about another one."""
        found = re.findall(r"\b\w+(?:Error|Exception): .+", self.log.read_text(errors="replace"))
        own = [words for words in found if "root cause" not in words]
        return own[-1] if own else ""

    def end(self) -> None:
        """End the process and all that it started."""
        self.pipe.close()
        if not self.busy:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(ENDING_S)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if not self.failed:
            self.log.unlink(missing_ok=True)


class VllmSampler(HasPolicy):
    """Samples with vLLM on this machine."""

    def __init__(
        self,
        settings: SamplerSettings,
        *,
        max_new_tokens: int,
        options: VllmSection,
        on_tokens: Callable[[int], object] = lambda count: None,
    ) -> None:
        """`on_tokens` is told the number of tokens that each copy sampled in one call."""
        if importlib.util.find_spec("vllm") is None:
            raise EngineError(
                "vLLM is not installed here: pip install 'stalewise[vllm]', or choose sampler.engine = hf"
            )
        self.settings = settings
        self.max_new_tokens = max_new_tokens
        self.preferred_batch_size = APPETITE
        self.on_tokens = on_tokens
        self._options = options
        self._copies: list[Copy] = []
        self._check = PolicyCheck(settings.precision, options.max_model_len)
        self._running: PolicyFiles | None = None  # what the processes have

    # ------------------------------------------------------------ weights

    def load(self, checkpoint: Path) -> None:
        """Sample from this checkpoint, in processes that are there or in new ones."""
        policy = read_policy_files(checkpoint)
        self._check.token_ids(policy)  # first: a checkpoint that cannot be loaded need not start anything
        if not self._try_in_place(policy):
            self.close()
            self._start(policy)
            if problem := self._problem(policy):
                raise EngineError(
                    f"vLLM does not have the policy of {checkpoint}, though it was started with it: its "
                    f"log-probabilities of a probe {problem}; does vLLM support this architecture in this precision?"
                )
        self._policy = self._running = policy

    def _try_in_place(self, policy: PolicyFiles) -> bool:
        """Whether the processes that run now have this policy, after a reload if need be."""
        if self._running is None or self._running.architecture != policy.architecture:
            return False
        try:
            if self._running.weights == policy.weights:
                self._all("wake")
            elif policy.tied and not reloads_tied_layers():
                return False
            else:
                self._all("reload", str(policy.checkpoint))
            return not self._problem(policy)
        except EngineError:  # a new start either works or says what is wrong
            for copy in self._copies:
                copy.failed = False
            return False

    def _start(self, policy: PolicyFiles) -> None:
        arguments = {
            "dtype": self.settings.precision,
            "max_model_len": self._options.max_model_len,
            "tensor_parallel_size": self._options.tensor_parallel,
            "gpu_memory_utilization": self._options.gpu_memory_utilization,
            **self._options.options,
        }
        try:
            for devices in device_groups(self._options.copies, self._options.tensor_parallel):
                self._copies.append(Copy(devices))
            self.preferred_batch_size = APPETITE * len(self._copies)
            self._all("start", str(policy.checkpoint), arguments, self._options.while_learning == "sleep")
        except BaseException:
            self.close()
            raise

    def _problem(self, policy: PolicyFiles) -> str:
        answers = self._all("numbers", self._check.token_ids(policy))
        problems = [
            self._check.problem(policy, np.array(numbers, dtype=np.float64), copy.memory)
            for copy, numbers in zip(self._copies, answers, strict=True)
        ]
        return next((problem for problem in problems if problem), "")

    # ------------------------------------------------------------ sampling

    def check_lengths(self, prompt_ids: Sequence[Sequence[int]]) -> None:
        """Refuse prompts that leave no room for a response."""
        limits = [limit for limit in (self.policy.context, self._options.max_model_len) if limit is not None]
        check_lengths(prompt_ids, limit=min(limits, default=None), max_new_tokens=self.max_new_tokens)

    def sample(self, requests: Sequence[Request], settings: SamplerSettings | None = None) -> list[Response]:
        """Responses in the order of the requests."""
        self.check_lengths([request.prompt_ids for request in requests])
        shares = split(requests, len(self._copies))
        for copy, share in zip(self._copies, shares, strict=True):
            copy.send(
                "sample",
                [list(requests[number].prompt_ids) for number in share],
                [requests[number].seed for number in share],
                settings or self.settings,
                self.max_new_tokens,
                self.policy.stop_ids,
            )
        answers: list[Answer | None] = [None] * len(requests)
        for place, sampled in self._receive():
            for number, (ids, logp, finish_reason) in zip(shares[place], sampled, strict=True):
                answers[number] = Answer(ids, logp, finish_reason)
            self.on_tokens(sum(len(ids) for ids, _, _ in sampled))
        whole = [answer for answer in answers if answer is not None]
        return make_responses(whole, self.policy, max_new_tokens=self.max_new_tokens, who="vLLM")

    def sleep(self) -> None:
        """Give GPU memory to the learner, as the config says, until the next `load`."""
        if self._options.while_learning == "close":
            self.close()
        elif self._options.while_learning == "sleep":
            self._all("sleep")

    def close(self) -> None:
        """End the processes; `load` starts others."""
        copies, self._copies, self._running = self._copies, [], None
        for copy in copies:
            copy.end()

    # ------------------------------------------------------------ talking to the processes

    def _all(self, method: str, *arguments: object) -> list[Any]:
        """Let every copy do something at the same time; results in their order."""
        for copy in self._copies:
            copy.send(method, *arguments)
        results: dict[int, Any] = dict(self._receive())
        return [results[place] for place in range(len(self._copies))]

    def _receive(self) -> Iterable[tuple[int, Any]]:
        """Results of all copies, whichever has one first."""
        waiting: dict[Connection, int] = {copy.pipe: place for place, copy in enumerate(self._copies)}
        while waiting:
            for pipe in wait(list(waiting)):
                place = waiting.pop(pipe)  # pyright: ignore[reportArgumentType]
                yield place, self._copies[place].receive()


def device_groups(copies: int, tensor_parallel: int) -> list[list[str]]:
    """GPUs of each copy, as CUDA_VISIBLE_DEVICES wants them; empty lists on a machine without GPUs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    if count == 0:
        return [[] for _ in range(copies or 1)]
    names = visible.split(",")[:count] if visible else [str(number) for number in range(count)]
    groups = [names[start : start + tensor_parallel] for start in range(0, count, tensor_parallel)]
    whole = [group for group in groups if len(group) == tensor_parallel]
    if len(whole) < (copies or 1):
        raise ConfigError(
            f"sampler.vllm wants {copies or 1} copies on {tensor_parallel} GPUs each, and there are {count}: lower "
            "copies or tensor_parallel"
        )
    return whole[: copies or len(whole)]


def reloads_tied_layers() -> bool:
    """Whether vLLM's reload_weights reaches an output layer that is the embedding.

    On a CPU, vLLM 0.32 computes with a packed copy of it, which keeps the old weights.
    """
    return torch.cuda.is_available()


def split(requests: Sequence[Request], parts: int) -> list[list[int]]:
    """Numbers of the requests for each part. Neighbours with one prompt stay together: its prefix is computed once.

    >>> split([Request([1], 0), Request([1], 1), Request([2], 2), Request([3], 3)], 2)
    [[0, 1], [2, 3]]
    """
    shares: list[list[int]] = [[] for _ in range(parts)]
    smallest = 0
    for number, request in enumerate(requests):
        if number and list(request.prompt_ids) != list(requests[number - 1].prompt_ids):
            smallest = min(range(parts), key=lambda part: len(shares[part]))
        shares[smallest].append(number)
    return shares
