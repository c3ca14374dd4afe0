"""The sandbox in every way that this machine has, against programs that try to get out."""

import os
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

import pytest

from attacks.programs import PROGRAMS
from attacks.running import attack, processes_with
from stalewise.errors import TaskError
from stalewise.tasks import sandbox
from stalewise.tasks.sandbox import Limits, isolation, run_python

AVAILABLE = [mechanism for mechanism in sandbox.MECHANISMS if not sandbox.probe(mechanism)]
QUICK = [
    "reads the run directory",
    "looks for open descriptors",
    "changes permissions and times",
    "writes everywhere",
    "connects by TCP",
    "kills what started it",
    "leaves a daemon behind",
    "takes memory in many processes",
    "makes folders without end",
    "floods its output",
]


def test_what_goes_in_and_comes_out() -> None:
    program = "import sys, os, helper\nprint(sys.stdin.read().upper(), helper.x, open('data/a.txt').read(), "
    program += "sorted(os.listdir()))"
    result = run_python(program, stdin="hé", files={"helper.py": "x = 3", "data/a.txt": "ä"})
    assert (result.status, result.exit_code, result.timed_out) == ("ok", 0, False), result.stderr
    assert result.stdout == "HÉ 3 ä ['data', 'helper.py', 'program.py']\n"
    assert 0 < result.seconds < 5 and result.mechanism == isolation()
    failed = run_python("import sys; print('x'); print('y', file=sys.stderr); sys.exit(3)")
    assert (failed.status, failed.exit_code, failed.stdout, failed.stderr) == ("failed", 3, "x\n", "y\n")


def test_nothing_of_one_program_reaches_the_next() -> None:
    assert run_python("open('left', 'w').write('x')").status == "ok"
    assert run_python("import os; print(os.path.exists('left'))").stdout == "False\n"


def test_the_environment_is_the_sandboxs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "HTTPS_PROXY", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "secret")
    result = run_python("import os; print(sorted(os.environ))")
    assert "secret" not in result.stdout and "HF_TOKEN" not in result.stdout and "HOME" in result.stdout


def test_packages_only_if_asked() -> None:
    assert run_python("import numpy").status == "failed"
    result = run_python("import numpy; print(numpy.arange(3).sum())", packages=True, limits=Limits(memory_mb=2000))
    assert result.stdout == "3\n", result.stderr


def test_two_programs_with_a_socket_between_them() -> None:
    first = "import socket; s = socket.socket(fileno=3); s.sendall(b'2\\n'); print(s.makefile().readline())"
    peer = "import socket\ns = socket.socket(fileno=3)\nprint('unheard')\n"
    peer += "s.sendall(b'%d\\n' % (int(s.recv(9)) + 1))\ninput()"
    assert run_python(first, peer=peer, stdin="x").stdout == "3\n\n"


@pytest.mark.parametrize("mechanism", [*AVAILABLE, "none"])
@pytest.mark.parametrize(
    ("program", "status"),
    [("while True: pass", "timeout"), ("import time; time.sleep(60)", "timeout"), ("import os; os.abort()", "killed")],
)
def test_what_never_ends_is_ended(mechanism: str, program: str, status: str) -> None:
    limits = Limits(seconds=0.3, wall_seconds=5 if "while" in program else 0.6)
    result = sandbox._run(mechanism, {"program.py": program}, "", {}, limits)
    assert result.status == status and result.timed_out is (status == "timeout")


@pytest.mark.parametrize("mechanism", AVAILABLE)
@pytest.mark.parametrize("name", QUICK)
def test_hostile_programs_are_held(name: str, mechanism: str, tmp_path: Path) -> None:
    assert attack(name, mechanism, tmp_path)[1] == []


def test_every_hostile_program_is_written_down() -> None:
    assert len(PROGRAMS) >= 25 and set(QUICK) <= set(PROGRAMS)


def test_without_a_sandbox_its_processes_end_all_the_same(tmp_path: Path) -> None:
    _, found = attack("leaves a daemon behind", "none", tmp_path)
    assert found == []


def test_a_machine_that_cannot_isolate_refuses_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_probe_all", lambda: ("", "namespaces: Operation not permitted"))
    with pytest.raises(TaskError, match=r"cannot be isolated.*Operation not permitted.*unsafe_without_sandbox = true"):
        run_python("print(1)")
    result = run_python("print(1)", unsafe_without_sandbox=True)
    assert (result.stdout, result.mechanism) == ("1\n", "none")


def test_a_probe_tells_what_got_out() -> None:
    assert "could read a file outside" in sandbox.probe("none")
    assert "could open a socket" in sandbox.probe("none")


@pytest.mark.parametrize("name", ["../x", "/etc/x", "program.py", ""])
def test_files_stay_in_the_folder(name: str) -> None:
    with pytest.raises(TaskError, match="within the program's folder"):
        run_python("", files={name: "x"})


def test_limits_are_above_zero() -> None:
    with pytest.raises(TaskError, match="limit memory_mb is 0"):
        Limits(memory_mb=0)


PARENT = """
import sys
from stalewise.tasks import sandbox
from stalewise.tasks.sandbox import Limits
program = "import os, sys; os.execv(sys.executable, [sys.executable, '-c', 'while True: pass', '{mark}'])"
sandbox._run("{mechanism}", {{"program.py": program}}, "", {{}}, Limits(seconds=100))
"""


@pytest.mark.parametrize("mechanism", [*AVAILABLE, "none"])
def test_a_program_ends_when_its_parent_is_killed(mechanism: str) -> None:
    mark = f"stalewise-parent-{os.getpid()}-{time.monotonic_ns()}"
    script = textwrap.dedent(PARENT.format(mark=mark, mechanism=mechanism))
    process = subprocess.Popen([sys.executable, "-c", script])
    while not [pid for pid in processes_with(mark) if pid != process.pid]:
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 20
    while processes_with(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes_with(mark) == []


def test_threads_may_run_programs_at_once() -> None:
    results: dict[int, str] = {}

    def run(number: int) -> None:
        results[number] = run_python(f"print({number})").stdout

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: f"{number}\n" for number in range(4)}


HOLDS = """
import sys, time
from stalewise.tasks.sandbox import scratch_folder
with scratch_folder("test") as folder:
    print(folder, flush=True)
    time.sleep(60)
"""


def test_a_folder_whose_process_was_killed_is_removed_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    killed, alive = (
        subprocess.Popen([sys.executable, "-c", HOLDS], stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    )
    with killed, alive:
        left, held = (Path(one.stdout.readline().strip()) for one in (killed, alive) if one.stdout)
        (left / "closed" / "deeper").mkdir(parents=True)
        (left / "closed").chmod(0)
        outside = tmp_path / "outside"
        outside.mkdir(mode=0o750)
        (left / "link").symlink_to(outside)
        (tmp_path / "stalewise-scratch-link").symlink_to(outside)
        killed.kill()
        killed.wait()
        sandbox.remove_abandoned(os.getpid())
        left.mkdir(exist_ok=True)  # a process that is forked later finds it, although its parent has looked before
        monkeypatch.setattr(os, "getpid", lambda: -1)
        with sandbox.scratch_folder("test") as own:
            found = {path.name for path in tmp_path.iterdir()}
            assert found == {held.name, Path(own).name, "outside", "stalewise-scratch-link"}
        assert outside.stat().st_mode & 0o777 == 0o750
        assert not Path(own).exists()
        alive.kill()
