"""Verifiers that misbehave; the response names what to do, the prompt's answer is JSON with a folder and a mark."""

import ctypes
import json
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CHILD = [sys.executable, "-c", "import time; time.sleep(300)"]


def _sockets() -> list[int]:
    """Descriptors of this process that are sockets: the one that leads to the trainer."""
    found = []
    for number in range(256):
        try:
            if os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                found.append(number)
        except OSError:
            continue
    return found


def _send(data: bytes) -> None:
    for number in _sockets():
        socket.socket(fileno=os.dup(number)).sendall(data)


class _Payload:
    """Unpickling it writes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"echo x > {self.path}",)


def judge(prompt: Any, response: str) -> Any:
    """Do what the response names, and return 1 or what it returns."""
    given = json.loads(prompt.answer)
    return _ACTS[response](given) or 1.0


def _pickle(given: dict[str, str]) -> None:
    payload = pickle.dumps((1.0, {}, _Payload(given["folder"] + "/unpickled"), ""))
    _send(struct.pack("!i", len(payload)) + payload)


def _setsid(given: dict[str, str]) -> None:
    subprocess.Popen([*CHILD, given["mark"]], start_new_session=True)


def _daemon(given: dict[str, str]) -> None:
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execv(CHILD[0], [*CHILD, given["mark"]])
        os._exit(0)


def _kill_watcher(given: dict[str, str]) -> None:
    subprocess.Popen([*CHILD, given["mark"]], start_new_session=True)
    parent = os.getppid()
    grandparent = int(Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[1])
    for pid in (parent, grandparent):
        try:
            os.kill(pid, signal.SIGKILL)
            open(given["folder"] + "/killed", "w").close()
        except OSError:
            continue


def _die_with_child(given: dict[str, str]) -> None:
    _setsid(given)
    os._exit(3)


def _hang_with_child(given: dict[str, str]) -> None:
    _setsid(given)
    time.sleep(60)


def _fork_many(given: dict[str, str]) -> None:
    for _ in range(40):  # bounded: should nothing hold it, it must not take the machine down
        subprocess.Popen([*CHILD, given["mark"]])
    time.sleep(20)


def _memory(given: dict[str, str]) -> None:
    held = []
    for _ in range(64):
        held.append(b"x" * (1 << 25))
    time.sleep(20)


def _big_file(given: dict[str, str]) -> None:
    with open(given["folder"] + "/big", "wb") as file:
        for _ in range(8):
            file.write(bytes(1 << 20))
        file.flush()


def _half(given: dict[str, str]) -> None:
    _send(b'{"item": "')
    time.sleep(60)


def _environment(given: dict[str, str]) -> float:
    wrong = ("TOKEN", "SECRET", "PROXY", "KEY", "PASSWORD")
    return 1.0 if [name for name in os.environ if any(part in name.upper() for part in wrong)] else 0.5


def _network(given: dict[str, str]) -> float:
    try:
        socket.socket()
        return 1.0
    except OSError:
        return 0.5


def _read_outside(given: dict[str, str]) -> float:
    try:
        os.listdir(given["folder"])
        return 1.0
    except OSError:
        return 0.5


_ACTS = {
    "pickle": _pickle,
    "setsid": _setsid,
    "daemon": _daemon,
    "kill the watcher": _kill_watcher,
    "die with a child": _die_with_child,
    "hang with a child": _hang_with_child,
    "fork many": _fork_many,
    "memory": _memory,
    "big file": _big_file,
    "half an answer": _half,
    "flood of answers": lambda given: _send(b"x" * (1 << 22)),
    "not JSON": lambda given: _send(b"\x80\x04.\n"),
    "JSON bomb": lambda given: _send(b"[" * 100_000 + b"\n"),
    "forged answer": lambda given: _send(b'{"item": "x", "value": 9, "parts": {}, "error": "", "traceback": ""}\n'),
    "answer of another kind": lambda given: _send(b"[1, 2]\n"),
    "environment": _environment,
    "network": _network,
    "read outside": _read_outside,
    "crash": lambda given: ctypes.string_at(0),
    "ok": lambda given: 0.25,
}
