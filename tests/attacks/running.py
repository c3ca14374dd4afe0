"""Runs a hostile program and looks for what it did."""

from __future__ import annotations

import json
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

from attacks.programs import BEGIN, PROGRAMS
from stalewise.tasks import sandbox
from stalewise.tasks.sandbox import Limits, SandboxResult

LIMITS = Limits(seconds=1.0, wall_seconds=20.0, memory_mb=384, processes=12, disk_mb=8)
WAITING = ("time.sleep(20)", "time.sleep(60)")  # programs that are ended by the clock


@dataclass
class Surroundings:
    """What a hostile program is told about, and must not reach."""

    outside: Path
    server: socket.socket
    datagrams: socket.socket
    unix: socket.socket
    mark: str

    def told(self) -> str:
        port = self.server.getsockname()[1]
        unix = self.unix.getsockname()
        given = {"outside": str(self.outside), "port": port, "pid": os.getpid(), "mark": self.mark, "unix": unix}
        given["home"] = str(Path.home())
        return json.dumps(given)

    def findings(self) -> list[str]:
        """What is no longer as it was."""
        found: list[str] = []
        state = self.outside.stat() if self.outside.exists() else None
        if state is None or self.outside.read_text() != "secret":
            found.append("the file outside was changed")
        elif (state.st_mode & 0o777, int(state.st_mtime), state.st_uid) != (0o644, 1_000_000_000, os.getuid()):
            found.append("permissions, times or owner of the file outside were changed")
        if len(list(self.outside.parent.iterdir())) != 2:  # the file and the socket
            found.append("the run directory has other files")
        for one in (self.server, self.datagrams, self.unix):
            try:
                one.accept() if one.type == socket.SOCK_STREAM else one.recv(1)
                found.append(f"something arrived at {one.getsockname()}")
            except BlockingIOError:
                pass
        return [*found, *(f"process {pid} is left" for pid in processes_with(self.mark))]


@contextmanager
def surroundings(folder: Path, mark: str) -> Iterator[Surroundings]:
    outside = folder / "run" / "rollouts"
    outside.parent.mkdir()
    outside.write_text("secret")
    outside.chmod(0o644)
    os.utime(outside, (1_000_000_000, 1_000_000_000))
    with (
        socket.socket() as server,
        socket.socket(type=socket.SOCK_DGRAM) as datagrams,
        socket.socket(socket.AF_UNIX) as unix,
    ):
        server.bind(("127.0.0.1", 0))
        datagrams.bind(server.getsockname())
        unix.bind(str(outside.parent / "socket"))
        for one in (server, datagrams, unix):
            one.setblocking(False)
            if one.type == socket.SOCK_STREAM:
                one.listen()
        yield Surroundings(outside, server, datagrams, unix, mark)


def processes_with(mark: str) -> list[int]:
    """Processes with this text in their command line; those that are just ending have a second."""
    deadline = time.monotonic() + 1.0
    while True:
        found = [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cmdline") if mark.encode() in _read(path)]
        found = [pid for pid in found if pid != os.getpid()]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.02)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def attack(name: str, mechanism: str, folder: Path) -> tuple[SandboxResult, list[str]]:
    """Run one program of `PROGRAMS` and return its result and what it achieved."""
    text, allowed = PROGRAMS[name]
    limits = replace(LIMITS, wall_seconds=2.0) if any(wait in text for wait in WAITING) else LIMITS
    if mechanism == "bubblewrap" and "without end" in name:
        allowed = allowed | {"ok"}  # it has no limit on the number of files, only on their size
    mark = f"stalewise-attack-{os.getpid()}-{time.monotonic_ns()}"
    temporary = folder / "temporary"
    temporary.mkdir()
    with surroundings(folder, mark) as around, patch.object(tempfile, "tempdir", str(temporary)):
        result = sandbox._run(mechanism, {"program.py": BEGIN + text}, around.told(), {}, limits)
        found = around.findings()
    if "ESCAPED" in result.stdout:
        found.append(result.stdout[:200])
    if result.status not in allowed:
        found.append(f"it ended as {result.status}, expected {sorted(allowed)}: {result.stderr[-300:]}")
    if len(result.stdout) > LIMITS.output_kb << 10 or len(result.stderr) > LIMITS.output_kb << 10:
        found.append("its output is longer than the limit")
    if left := list(temporary.iterdir()):
        found.append(f"{left} is left")
    return result, found
