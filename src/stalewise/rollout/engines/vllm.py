"""The engine vllm: vLLM's offline engine, one process per replica of the policy, requests split among them.

The first checkpoint starts the processes; later ones replace their weights in place. vLLM does not report whether a
reload was complete, so the engine is probed, and restarted if it does not have the checkpoint's policy.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stalewise.config.sections import VllmSection
from stalewise.errors import ConfigError, EngineError
from stalewise.rollout.engines.weight_check import AnswerHistory, PolicyCheck
from stalewise.rollout.policy_files import Answer, ExternalSampler, PolicyFiles, read_policy_files
from stalewise.rollout.sampler import Request, Response
from stalewise.tasks.base import child_command
from stalewise.types import SamplerSettings

# Requests per replica: several times what vLLM has under way, since it runs partly empty at the end of each call.
REQUESTS_PER_REPLICA = 4096
END_S = 20.0  # that a process has to end by itself


class VllmReplica:
    """One process with one replica of the policy; `devices` are the GPUs that it sees (none: those of this process)."""

    def __init__(self, devices: Sequence[str]) -> None:
        self.history = AnswerHistory()
        self.busy = False
        self.failed = False  # keep its log
        environment = {"VLLM_LOGGING_LEVEL": "WARNING", **os.environ}
        if devices:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        descriptor, name = tempfile.mkstemp(prefix="stalewise-vllm-", suffix=".log")
        self.log = Path(name)
        self.pipe, theirs = Pipe()
        try:
            self.process = subprocess.Popen(
                child_command("stalewise.rollout.engines.vllm_process", str(theirs.fileno()), safe=True),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=descriptor,
                stderr=descriptor,
                env=environment,
                start_new_session=True,  # Ctrl-C is for the orchestrator, and one signal ends vLLM's own processes
            )
        finally:
            theirs.close()
            os.close(descriptor)

    def send(self, method: str, *arguments: object) -> None:
        """Call a method of the process; `receive` returns its result."""
        self.busy = True
        try:
            self.pipe.send((method, arguments))
        except OSError:
            raise self._death() from None

    def receive(self) -> Any:
        """The result of the last `send`."""
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
            self.process.wait(END_S)
        reason = f"{self._last_error() or 'no error in its log'} (its log: {self.log})"
        return EngineError(f"vLLM ended by itself ({self.process.returncode}): {reason}")

    def _last_error(self) -> str:
        """The last exception in its log that does not refer to another one."""
        errors = re.findall(r"\b\w+(?:Error|Exception): .+", self.log.read_text(errors="replace"))
        return next((error for error in reversed(errors) if "root cause" not in error), "")

    def end(self) -> None:
        """End the process and all that it started."""
        self.pipe.close()
        if not self.busy:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(END_S)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if not self.failed:
            self.log.unlink(missing_ok=True)


SLEEP_LEVELS = {"sleep": 1, "drop": 2}  # of vLLM, by sampler.vllm.while_learning


class VllmSampler(ExternalSampler):
    """Samples with vLLM on this machine."""

    def __init__(
        self,
        settings: SamplerSettings,
        *,
        max_new_tokens: int,
        options: VllmSection,
        device: torch.device | None = None,
        on_tokens: Callable[[int], object] = lambda count: None,
    ) -> None:
        """`device` is the trainer's: vLLM uses its GPU and those after it, or all GPUs if it has no number."""
        if importlib.util.find_spec("vllm") is None:
            raise EngineError("vLLM is not installed: pip install 'stalewise[vllm]', or choose sampler.engine = hf")
        super().__init__(settings, max_new_tokens, on_tokens, options.max_model_len)
        self.preferred_batch_size = REQUESTS_PER_REPLICA
        self._options = options
        self._groups = device_groups(options.copies, options.tensor_parallel, device)
        self._replicas: list[VllmReplica] = []
        self._check = PolicyCheck(settings.precision, options.max_model_len)
        self._running: PolicyFiles | None = None  # the policy of the processes

    def load(self, checkpoint: Path) -> None:
        """Sample from this checkpoint, in running processes or in new ones."""
        policy = read_policy_files(checkpoint)
        self._check.token_ids(policy)  # first: a checkpoint that does not load need not start anything
        if not self._load_in_place(policy):
            self.close()
            self._start(policy)
            if problem := self._mismatch(policy):
                raise EngineError(
                    f"vLLM does not have the policy of {checkpoint}, though it was started with it: its "
                    f"log-probabilities of a probe {problem}; does vLLM support this architecture in this precision?"
                )
        self.policy = self._running = policy

    def _load_in_place(self, policy: PolicyFiles) -> bool:
        """Whether the running processes have this policy, after a reload if necessary."""
        if self._running is None or self._running.architecture != policy.architecture:
            return False
        try:
            if self._running.weights == policy.weights and self._options.while_learning != "drop":
                self._call("wake")
            elif policy.tied and not reloads_tied_layers():
                return False
            else:
                self._call("reload", str(policy.checkpoint))
            return not self._mismatch(policy)
        except EngineError:  # a restart either works or reports the problem
            for replica in self._replicas:
                replica.failed = False
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
            for devices in self._groups:
                self._replicas.append(VllmReplica(devices))
            self.preferred_batch_size = REQUESTS_PER_REPLICA * len(self._replicas)
            self._call("start", str(policy.checkpoint), arguments, SLEEP_LEVELS.get(self._options.while_learning, 0))
        except BaseException:
            self.close()
            raise

    def _mismatch(self, policy: PolicyFiles) -> str:
        answers = self._call("probe_logps", self._check.token_ids(policy))
        vectors = [np.array(logps, dtype=np.float64) for logps in answers]
        replicas = zip(self._replicas, vectors, strict=True)
        problems = [self._check.mismatch(policy, logps, replica.history) for replica, logps in replicas]
        return next(filter(None, problems), "")

    def sample(self, requests: Sequence[Request], settings: SamplerSettings | None = None) -> list[Response]:
        """Responses in the order of the requests."""
        self.check_lengths([request.prompt_ids for request in requests])
        parts = split(requests, len(self._replicas))
        for replica, part in zip(self._replicas, parts, strict=True):
            replica.send(
                "sample",
                [requests[number].context for number in part],
                [requests[number].turn_seed for number in part],
                settings or self.settings,
                [self.max_new_tokens - len(requests[number].begun) for number in part],
                self.policy.stop_ids,
            )
        answers: dict[int, Answer] = {}
        for index, sampled in self._receive():
            answers |= {number: Answer(*answer) for number, answer in zip(parts[index], sampled, strict=True)}
            self.on_tokens(sum(len(ids) for ids, _, _ in sampled))
        return self.make_responses([answers[number] for number in range(len(requests))], requests, "vLLM")

    def sleep(self, *, weights: bool = False, drop: bool = False) -> None:
        """Free GPU memory until the next `load`, as `while_learning` says."""
        if self._options.while_learning == "close":
            self.close()
        elif self._options.while_learning in SLEEP_LEVELS:
            self._call("sleep")

    def close(self) -> None:
        """End the processes; `load` starts others."""
        replicas, self._replicas, self._running = self._replicas, [], None
        for replica in replicas:
            replica.end()

    def _call(self, method: str, *arguments: object) -> list[Any]:
        """Call a method of all replicas at the same time; results in their order."""
        for replica in self._replicas:
            replica.send(method, *arguments)
        results: dict[int, Any] = dict(self._receive())
        return [results[index] for index in range(len(self._replicas))]

    def _receive(self) -> Iterable[tuple[int, Any]]:
        """Results of all replicas as they arrive."""
        waiting: dict[Any, int] = {replica.pipe: index for index, replica in enumerate(self._replicas)}
        while waiting:
            for pipe in wait(list(waiting)):
                index = waiting.pop(pipe)
                yield index, self._replicas[index].receive()


def device_groups(copies: int, tensor_parallel: int, device: torch.device | None = None) -> list[list[str]]:
    """GPUs of each replica, as in CUDA_VISIBLE_DEVICES; empty lists on a machine without GPUs."""
    visible, count = os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.device_count()
    if count == 0:
        return [[] for _ in range(copies or 1)]
    device = device or torch.device("cuda")
    if device.type == "cpu":
        raise ConfigError(
            "sampler.engine is vllm, which samples on a GPU, and model.device is cpu: name a GPU, or use the engine hf"
        )
    names = visible.split(",")[:count] if visible else [str(number) for number in range(count)]
    numbers = gpu_numbers(copies, tensor_parallel, device, count)
    if len(numbers) < tensor_parallel * (copies or 1):
        first = f" from {device} on" if device.index is not None else ""
        raise ConfigError(
            f"sampler.vllm needs {copies or 1} copies on {tensor_parallel} GPUs each{first}, and there are {count}: "
            "lower copies or tensor_parallel"
        )
    firsts = range(0, len(numbers), tensor_parallel)
    return [[names[number] for number in numbers[first : first + tensor_parallel]] for first in firsts]


def gpu_numbers(copies: int, tensor_parallel: int, device: torch.device, count: int) -> list[int]:
    """GPUs that an engine takes, of `count`: all of them, or from the device's number on one copy if none are given."""
    first = device.index or 0
    copies = copies or (1 if device.index is not None else max(1, (count - first) // tensor_parallel))
    return list(range(first, min(count, first + copies * tensor_parallel)))


def reloads_tied_layers() -> bool:
    """Whether vLLM's reload_weights reaches a tied output layer: on a CPU, vLLM 0.32 keeps a packed copy of it."""
    return torch.cuda.is_available()


def split(requests: Sequence[Request], parts: int) -> list[list[int]]:
    """Numbers of the requests for each part. Neighbours with one prompt stay together: its prefix is computed once."""
    numbers: list[list[int]] = [[] for _ in range(parts)]
    smallest = 0
    for number, request in enumerate(requests):
        if number and list(request.prompt_ids) != list(requests[number - 1].prompt_ids):
            smallest = min(range(parts), key=lambda part: len(numbers[part]))
        numbers[smallest].append(number)
    return numbers
