"""Programs in processes of their own, forked from the server that ranks come from: it has imported torch already."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import SimpleNamespace
from typing import IO

from ranks import CONTEXT


def begin(source: str, *words: object, directory: Path) -> ForkServerProcess:
    """`python -c SOURCE WORDS`; what it prints goes to `stdout.txt` and `stderr.txt` in the directory."""
    process = CONTEXT.Process(target=_program, args=(source, [str(word) for word in words], directory))
    process.start()
    return process


def completed(source: str, *words: object, directory: Path, timeout: float = 120.0) -> subprocess.CompletedProcess[str]:
    """What such a program returned and printed, once it has ended."""
    process = begin(source, *words, directory=directory)
    process.join(timeout)
    code = process.exitcode
    process.kill()
    process.join()
    assert code is not None, f"the program did not end within {timeout} s"
    out, err = ((directory / name).read_text() for name in ("stdout.txt", "stderr.txt"))
    return subprocess.CompletedProcess([source, *map(str, words)], code, out, err)


class ForkedPopen:
    """`subprocess.Popen` of `child_command`, as far as what starts such a process in the background needs it."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdin: int,
        stdout: int | IO[bytes],
        stderr: IO[bytes],
        start_new_session: bool,
        env: Mapping[str, str] | None = None,
    ) -> None:
        python, option, _, *words = command
        assert (python, option, start_new_session) == (sys.executable, "-c", True)
        out = Path(os.devnull if isinstance(stdout, int) else stdout.name)
        theirs, self._stdin = CONTEXT.Pipe(duplex=False)
        environment = dict(os.environ if env is None else env)
        self._process = CONTEXT.Process(target=_module, args=(words, theirs, out, Path(stderr.name), environment))
        self._process.start()
        theirs.close()
        if stdin == subprocess.DEVNULL:
            self._stdin.close()

    def poll(self) -> int | None:
        return self._process.exitcode

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (code := self._process.exitcode) is None:
            raise subprocess.TimeoutExpired("a process of the fork server", timeout or 0.0)
        return code

    def communicate(self, timeout: float | None = None) -> None:
        self._stdin.close()
        self.wait(timeout)

    def send_signal(self, number: int) -> None:
        if self._process.pid is not None and self._process.exitcode is None:
            os.kill(self._process.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


FORKING = SimpleNamespace(**{**vars(subprocess), "Popen": ForkedPopen})  # in place of the module


def _module(words: list[str], stdin: Connection, out: Path, err: Path, environment: dict[str, str]) -> None:
    os.setsid()
    os.dup2(stdin.fileno(), 0)
    sys.stdin = os.fdopen(0)
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(environment)
    import torch

    torch.set_num_threads(1)
    module, *sys.argv[1:] = words
    if module != "stalewise":  # which is a package: its `__main__` is run
        sys.modules.pop(module, None)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _program(source: str, words: list[str], directory: Path) -> None:
    for number, name in ((1, "stdout.txt"), (2, "stderr.txt")):
        os.dup2(os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    sys.argv = ["-c", *words]
    exec(compile(source, "<program>", "exec"), {"__name__": "__main__"})
