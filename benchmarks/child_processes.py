"""Child processes of benchmarks: their output goes to a file, and what they started ends with them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

GRACE_S = 5.0  # between the request to end and the kill
LAST_WORDS = 15  # lines of a process that failed


def when() -> dict[str, Any]:
    """The time, and how busy the machine is, to be asked before something is measured."""
    return {"date": datetime.now(UTC).isoformat(timespec="seconds"), "load": round(os.getloadavg()[0], 1)}


def start(command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """A process in a session of its own. No pipe: what it leaves running, as vLLM may, would hold that open."""
    exit_when_told()
    with open(log, "wb") as said:
        return subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, env=environment, start_new_session=True)


def finish(process: subprocess.Popen[bytes], seconds: float | None = None) -> int | None:
    """Exit status, or None if it had to be ended after `seconds`. Nothing that it started is left."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        end(process)
        return None
    finally:
        kill(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and what it started: asked first, killed after some seconds."""
    family = _family(process)
    _signal(process, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=GRACE_S)
    kill(process, family)


def kill(process: subprocess.Popen[bytes], family: Sequence[psutil.Process] = ()) -> None:
    """Kill whatever is left in the session of a process, and what it and `family` have in sessions of their own."""
    family = [*family, *_family(process)]
    _signal(process, signal.SIGKILL)
    for one in family:
        with contextlib.suppress(psutil.Error):  # it has ended
            one.kill()
    process.wait()


def _family(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """What a process has started, and what that has; nothing after it has ended."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    return []


def exit_when_told() -> None:
    """Turn SIGTERM and SIGHUP into SystemExit, so that this process ends its children first.

    A signal that is ignored, as SIGHUP is under nohup, stays ignored.
    """
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda number, _: sys.exit(128 + number))


def last_words(log: Path, lines: int = LAST_WORDS) -> list[str]:
    """The end of what a process said."""
    return log.read_text(errors="replace").strip().splitlines()[-lines:] if log.exists() else []


def ending(code: int, log: Path) -> list[str]:
    """Why a process failed: its last words, and the signal that ended it; without either its exit code."""
    lines = last_words(log)
    if code < 0:
        hint = "; the machine's memory may have run out" if -code == signal.SIGKILL else ""
        return [*lines, f"ended with signal {-code}{hint}"]
    return lines or [f"ended with exit code {code}"]


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # nothing is left; macOS says so in another way
        os.killpg(process.pid, number)


@contextlib.contextmanager
def multi_process_service() -> Iterator[dict[str, str]]:
    """The environment of processes that compute on a GPU at the same time.

    Empty where the service is not installed, or where the environment names one already.
    """
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None or "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="mps-") as place:  # a short path: it holds a socket
        shared = {"CUDA_MPS_PIPE_DIRECTORY": place, "CUDA_MPS_LOG_DIRECTORY": place}
        started = subprocess.run([control, "-d"], env={**os.environ, **shared})
        try:
            yield shared if started.returncode == 0 else {}
        finally:
            subprocess.run([control], input=b"quit\n", env={**os.environ, **shared}, stdout=subprocess.DEVNULL)
