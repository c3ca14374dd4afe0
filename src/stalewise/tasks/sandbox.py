"""Runs untrusted Python programs: no network, no files but their own, and limits on everything else.

`run_python` uses the first mechanism that works here: bubblewrap, Linux namespaces, or Landlock with seccomp. Each is
tried with a program that attempts to escape. If none works, it refuses. SECURITY.md says what each isolates.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from stalewise.errors import TaskError
from stalewise.tasks import sandbox_process

MECHANISMS = ("bubblewrap", "namespaces", "landlock")
START_S = 30.0  # for the sandbox to start and to end, beyond the program's own limit
_SCRIPT = str(Path(sandbox_process.__file__).resolve())
_SCRATCH = "stalewise-scratch-"
_PROGRAM = "program.py"
_PEER = "peer.py"


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on a program. All its processes count together."""

    seconds: float = 5.0  # of CPU time, so that a busy machine does not change a reward
    wall_seconds: float = 0.0  # 0: three times `seconds`
    memory_mb: int = 512
    processes: int = 16  # and threads; with Landlock alone, threads only
    output_kb: int = 256  # of standard output, and as much of standard error
    disk_mb: int = 16
    files: int = 256
    open_files: int = 64

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not 0 <= value < 1e9 or (value == 0 and name != "wall_seconds"):
                raise TaskError(f"a sandbox's limit {name} is {value!r}: it must be a number above 0")


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """How a program ended, and what it wrote.

    `status` is "ok" (exit code 0), "failed" (another exit code), "killed" (by a signal), or the limit that ended it:
    "timeout", "memory", "processes", "output", "disk".
    """

    status: str
    stdout: str
    stderr: str
    exit_code: int | None  # None if it was killed
    seconds: float  # of CPU time
    mechanism: str

    @property
    def timed_out(self) -> bool:
        """Whether it was ended because it took too long."""
        return self.status == "timeout"


def run_python(
    program: str,
    *,
    stdin: str = "",
    files: Mapping[str, str] | None = None,
    limits: Limits | None = None,
    packages: bool = False,
    peer: str = "",
    unsafe_without_sandbox: bool = False,
) -> SandboxResult:
    """Run a program in a sandbox; it starts in a folder of its own that holds `files` and is gone afterwards.

    It may import the standard library, and with `packages` the packages of this environment. A `peer` is a second
    program in another process of the same sandbox. Descriptor 3 of each is one end of a socket between them, the peer
    has no output, and everything ends with the first program (of at most 100 kB). Thread-safe.

    Raises a TaskError if nothing can isolate the program. With `unsafe_without_sandbox` it runs without isolation, but
    with limits, and all its processes are ended.
    """
    mechanism = isolation(unsafe_without_sandbox=unsafe_without_sandbox)
    programs = {_PROGRAM: program} | ({_PEER: peer} if peer else {})
    return _run(mechanism, programs, stdin, dict(files or {}), limits or Limits(), packages=packages)


def isolation(*, unsafe_without_sandbox: bool = False) -> str:
    """The mechanism that isolates programs on this machine; a TaskError if there is none."""
    mechanism, reasons = _probe_all()
    if mechanism:
        return mechanism
    if unsafe_without_sandbox and sys.platform == "linux":
        return "none"
    raise TaskError(
        f"programs cannot be isolated on this machine: {reasons}. Install bubblewrap (bwrap), allow user namespaces, "
        "or use Linux 5.13 or later with Landlock; on a machine that may be lost, unsafe_without_sandbox = true runs "
        "programs with your rights"
    )


@cache
def _probe_all() -> tuple[str, str]:
    """The first mechanism that isolates, and why the ones before it do not."""
    reasons: list[str] = []
    for mechanism in MECHANISMS:
        if not (reason := probe(mechanism)):
            return mechanism, "; ".join(reasons)
        reasons.append(f"{mechanism}: {reason}")
    return "", "; ".join(reasons)


_ESCAPE = """
import os, socket, sys
outside = sys.stdin.read()
attempts = {
    "read a file outside": lambda: open(outside).read(),
    "list its folder": lambda: os.listdir(os.path.dirname(outside)),
    "write a file outside": lambda: open(outside + ".written", "w"),
    "open a socket": lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM).connect(("127.0.0.1", 1)),
}
for name, attempt in attempts.items():
    try:
        attempt()
    except ConnectionRefusedError:
        print("could", name)
    except OSError:
        continue
    else:
        print("could", name)
open("own", "w").write("x")
print("done")
"""


@contextlib.contextmanager
def scratch_folder(kind: str) -> Iterator[str]:
    """A temporary folder that this process locks. A folder whose process was killed is removed at the next start.

    The kernel drops the lock when the process ends, however it ends.
    """
    remove_abandoned(os.getpid())
    folder, held = "", None
    while held is None:
        folder = tempfile.mkdtemp(prefix=f"{_SCRATCH}{kind}-")
        with contextlib.suppress(FileNotFoundError):  # another process may have found it before it was locked
            held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(held, fcntl.LOCK_EX)
            if not os.path.isdir(folder):
                os.close(held)
                held = None
    try:
        yield folder
    finally:
        _remove(folder)
        os.close(held)


@cache
def remove_abandoned(process: int) -> None:
    """Remove the folders of `scratch_folder` that no process holds any more; once for each process id."""
    for path in Path(tempfile.gettempdir()).glob(f"{_SCRATCH}*"):
        with contextlib.suppress(OSError):  # another user's, or held
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(folder).st_uid == os.getuid():
                    _remove(path)
            finally:
                os.close(folder)


def _remove(folder: str | Path) -> None:
    """Remove a folder, also where a program took permissions away from its own folders."""
    for parent, names, _ in os.walk(folder):
        for path in (os.path.join(parent, name) for name in names):
            if not os.path.islink(path):
                with contextlib.suppress(OSError):
                    os.chmod(path, 0o700)
    shutil.rmtree(folder, ignore_errors=True)


@cache
def probe(mechanism: str) -> str:
    """Why a mechanism does not work here; empty if a trial program could not escape from it."""
    if sys.platform != "linux":
        return "this is not Linux"
    if mechanism == "bubblewrap" and shutil.which("bwrap") is None:
        return "bwrap is not installed"
    with scratch_folder("probe") as folder:
        outside = Path(folder, "outside")
        outside.write_text("outside")
        try:
            result = _run(mechanism, {_PROGRAM: _ESCAPE}, str(outside), {}, Limits(wall_seconds=20))
        except TaskError as problem:
            return str(problem)
    if result.stdout == "done\n":
        return ""
    return " ".join((result.stdout + result.stderr)[-200:].split()) or f"the trial program ended as {result.status}"


def _run(
    mechanism: str,
    programs: Mapping[str, str],
    stdin: str,
    files: Mapping[str, str],
    limits: Limits,
    *,
    packages: bool = False,
) -> SandboxResult:
    for name in files:
        if os.path.isabs(name) or ".." in Path(name).parts or name in (*programs, "", "."):
            raise TaskError(f"file {name!r} of a sandbox must have a name of its own within the program's folder")
    with scratch_folder("sandbox") as folder:
        own = folder if mechanism in ("landlock", "none") else sandbox_process.WORK
        # No site module: it would run the .pth files of an environment.
        commands = [[interpreter(), "-S", "-s", "-B", "-X", "utf8", name] for name in programs]
        if len(programs) > 1:  # the peer must not change the first program, nor what that imports
            commands[0][-1:] = ["-P", "-c", programs[_PROGRAM]]
        spec = {
            "mechanism": mechanism,
            "commands": commands,
            "environment": _environment(own, packages=packages),
            "files": {**files, **programs},
            "folder": folder,
            "readable": readable_paths(package_folders() if packages else ()),
            "limits": enforced(limits),
            "descriptors": [],
        }
        with _memory_file(stdin.encode("utf-8", "surrogatepass")) as given:
            child = launch(spec, stdin=given, piped=True)
            return _result(child, mechanism, limits)


def enforced(limits: Limits, **changes: Any) -> dict[str, Any]:
    """Limits as the sandbox's process reads them."""
    return {
        "seconds": limits.seconds,
        "wall_seconds": limits.wall_seconds or 3 * limits.seconds,
        "memory_bytes": limits.memory_mb << 20,
        "address_space": True,
        "processes": limits.processes,
        "count_threads": True,
        "disk_bytes": limits.disk_mb << 20,
        "files": limits.files,
        "open_files": limits.open_files,
        "poll_s": sandbox_process.POLL_S,
        **changes,
    }


def interpreter() -> str:
    """The interpreter itself, not a link to it in a virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


def package_folders() -> list[str]:
    """Directories of the packages of this environment."""
    return list(dict.fromkeys(sysconfig.get_paths()[name] for name in ("purelib", "platlib")))


def readable_paths(more: Sequence[str] = ()) -> list[str]:
    """Paths that every program must read: the interpreter, its library and shared libraries; and `more`."""
    paths = ["/usr/lib", "/usr/lib64", "/lib", "/lib64", "/etc/ld.so.cache", interpreter()]
    paths += [os.path.join(sys.base_prefix, "lib"), sysconfig.get_paths()["stdlib"], *more]
    paths += ["/nix/store"] if interpreter().startswith("/nix/store/") else []
    return list(
        dict.fromkeys(path for entry in paths for path in (entry, os.path.realpath(entry)) if os.path.lexists(path))
    )


def _environment(folder: str, *, packages: bool) -> dict[str, str]:
    """The environment variables of a program: one thread in libraries, and a fixed order of sets."""
    same = {"HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    same |= {"OPENBLAS_NUM_THREADS": "1", "PATH": ""}
    return same | ({"PYTHONPATH": os.pathsep.join(package_folders())} if packages else {})


@dataclass
class Child:
    """A running sandbox: its first process, and the pipe for that process's report."""

    process: subprocess.Popen[bytes]
    report: int

    def stop(self) -> None:
        """Ask for the end of all processes, and wait for it."""
        if sys.platform != "linux":  # nothing watches them, but they have a group
            with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: the latter for zombies
                os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()
        try:
            self.process.wait(START_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def why(self) -> str:
        """Read and close the report; the limit that ended the program, or an empty string. Called after `stop`."""
        if self.report < 0:
            return ""
        with os.fdopen(self.report, "rb") as pipe:
            report = json.loads(pipe.read() or b"{}")
        self.report = -1
        return "" if report.get("end") == "stopped" else str(report.get("end", ""))


def launch(spec: Mapping[str, Any], *, stdin: int, piped: bool = False) -> Child:
    """Start the process that isolates and watches what the spec describes; `piped`: its output comes here."""
    out = subprocess.PIPE if piped else None
    whole = {"interpreter": interpreter(), "bubblewrap": shutil.which("bwrap") or "", "parent": os.getpid()}
    whole |= {"root": os.geteuid() == 0, **spec}
    report, writes = os.pipe()
    try:
        with _memory_file(json.dumps(whole).encode()) as described:
            command = [interpreter(), "-I", "-S", _SCRIPT, str(described), str(writes)]
            passed = [described, writes, *spec["descriptors"]]
            process = subprocess.Popen(
                command, stdin=stdin, stdout=out, stderr=out, pass_fds=passed, env={}, cwd="/", start_new_session=True
            )
    except BaseException:
        os.close(report)
        raise
    finally:
        os.close(writes)
    return Child(process, report)


@contextlib.contextmanager
def _memory_file(content: bytes) -> Any:
    """A descriptor of a file without a name; it cannot fill up like a pipe."""
    descriptor = os.memfd_create("stalewise")
    try:
        with os.fdopen(os.dup(descriptor), "wb") as file:
            file.write(content)
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)


def _result(child: Child, mechanism: str, limits: Limits) -> SandboxResult:
    """Read the output of a sandbox until it ends, up to the limit on output, and make the result."""
    deadline = time.monotonic() + (limits.wall_seconds or 3 * limits.seconds) + START_S
    try:
        out, err, report, flooded = _read_all(child, limits.output_kb << 10, deadline)
        child.process.wait(max(1.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise TaskError(f"a sandbox ({mechanism}) did not end within {START_S:g} s of its limit") from None
    finally:
        child.stop()
        os.close(child.report)
        for pipe in (child.process.stdout, child.process.stderr):
            if pipe is not None:
                pipe.close()
    try:
        outcome = json.loads(report)
    except ValueError:
        raise TaskError(f"a sandbox ({mechanism}) ended without a report: {_end(child.process.returncode)}") from None
    if outcome["error"]:
        raise TaskError(f"a sandbox ({mechanism}) could not be built: {outcome['error']}")
    result = SandboxResult("output", _text(out), _text(err), None, float(outcome["seconds"]), mechanism)
    if flooded:
        return result
    if end := outcome["end"]:
        return replace(result, status={"time": "timeout", "stopped": "killed"}.get(end, end))
    if os.WIFSIGNALED(outcome["status"]):  # the kernel itself may have ended it at its limit of CPU time
        return replace(result, status="timeout" if result.seconds >= limits.seconds else "killed")
    code = os.waitstatus_to_exitcode(outcome["status"])
    return replace(result, status="failed" if code else "ok", exit_code=code)


def _read_all(child: Child, most: int, deadline: float) -> tuple[bytes, bytes, bytes, bool]:
    """Standard output, standard error and report until all are closed; a flood of output ends the program."""
    assert child.process.stdout is not None and child.process.stderr is not None
    descriptors = [child.process.stdout.fileno(), child.process.stderr.fileno(), child.report]
    read = {descriptor: bytearray() for descriptor in descriptors}
    flooded = False
    with selectors.DefaultSelector() as selector:
        for descriptor in descriptors:
            selector.register(descriptor, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                raise subprocess.TimeoutExpired(_SCRIPT, START_S)
            for key, _ in ready:
                chunk = os.read(key.fd, 65536)
                if not chunk:
                    selector.unregister(key.fd)
                elif key.fd == child.report or len(read[key.fd]) + len(chunk) <= most:
                    read[key.fd] += chunk
                else:
                    read[key.fd] += chunk[: most - len(read[key.fd])]
                    if not flooded:
                        flooded = True
                        child.process.send_signal(signal.SIGTERM)
    out, err, report = (bytes(read[descriptor]) for descriptor in descriptors)
    return out, err, report, flooded


def _text(output: bytes) -> str:
    return output.decode("utf-8", "replace")


def _end(code: int | None) -> str:
    return f"exit code {code}" if code is None or code >= 0 else str(signal.strsignal(-code))
