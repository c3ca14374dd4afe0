"""A list of measurements: what is made, cut, left out and not made twice; processes end with what they started."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # benchmarks/ is no part of the package

from benchmarks import child_processes, measure  # noqa: E402
from multi_process import fake_service  # noqa: E402

SLEEP = "-c 'import time; time.sleep(60)'"
LEAVES_ONE = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open(sys.argv[1], "w").write(str(child.pid))
"""


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """Measurements change what signals do to this process."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def step(name: str, run: str, seconds: float = 60, **more: object) -> str:
    lines = {"name": name, "run": run, "seconds": seconds, **more}
    return "[[step]]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in lines.items())


def plan_of(tmp_path: Path, *steps: str) -> list[measure.Step]:
    path = tmp_path / "plan.toml"
    path.write_text("\n".join(steps))
    return measure.read_plan(path)


def test_a_shared_step_has_the_multi_process_service_and_others_the_gpu_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_service(tmp_path, monkeypatch)
    say = "-c \"import os; print(os.environ.get('CUDA_MPS_PIPE_DIRECTORY', 'alone'))\""
    plan = plan_of(tmp_path, step("together", say, shared=True, beside="x"), step("apart", say, beside="x"))
    assert {one["state"] for one in measure.work(plan, tmp_path, seconds=60).values()} == {"done"}
    place = (tmp_path / "together.log").read_text().strip()
    assert place != "alone" and (tmp_path / "apart.log").read_text().strip() == "alone"
    assert (tmp_path / "service").read_text().splitlines() == [f"{place} -d", f"{place} quit"]


def test_steps_are_made_in_order_and_those_that_ended_well_only_once(tmp_path: Path) -> None:
    (tmp_path / "mark.py").write_text("import os, sys; open(os.environ['OUT'] + '/order', 'a').write(sys.argv[1])")
    mark = str(tmp_path / "mark.py")
    plan = plan_of(
        tmp_path,
        step("first", f"{mark} a"),
        step("wrong", "-c 'print(5); raise SystemExit(3)'"),
        step("slow", SLEEP, seconds=0.5),
        step("long", f"{mark} never", least=1000),
        step("last", f"{mark} b"),
    )
    found = measure.work(plan, tmp_path, seconds=60)
    assert {name: one["state"] for name, one in found.items()} == {
        "first": "done",
        "wrong": "failed",
        "slow": "cut",
        "last": "done",
    }
    assert found["wrong"]["code"] == 3 and found["wrong"]["said"] == ["5"]
    assert found["slow"]["seconds"] < 20
    assert json.loads((tmp_path / "measure.json").read_text()) == found
    again = measure.work(plan[:2], tmp_path, seconds=60)
    assert (tmp_path / "order").read_text() == "ab"
    assert again["wrong"]["state"] == "failed" and again["slow"]["state"] == "cut"


def test_neighbours_with_one_name_run_at_the_same_time(tmp_path: Path) -> None:
    """Each waits for the file of the other."""
    (tmp_path / "wait.py").write_text("""
import os, sys, time
open(sys.argv[1], "w").close()
while not os.path.exists(sys.argv[2]):
    time.sleep(0.02)
""")
    wait = str(tmp_path / "wait.py")
    one, other = tmp_path / "one", tmp_path / "other"
    plan = plan_of(
        tmp_path,
        step("a", f"{wait} {one} {other}", beside="x"),
        step("b", f"{wait} {other} {one}", beside="x"),
        step("slow", SLEEP, seconds=3, beside="y"),  # in which the other is done on a busy machine, too
        step("c", "-c 'import os; print(os.environ[\"LEFT\"])' $LEFT", seconds=25, beside="y"),
    )
    found = measure.work(plan, tmp_path, seconds=60)
    assert {name: one["state"] for name, one in found.items()} == {"a": "done", "b": "done", "slow": "cut", "c": "done"}
    assert list(found)[-1] == "slow" and (tmp_path / "c.log").read_text() == "15\n"


def test_the_time_for_all_steps_cuts_one(tmp_path: Path) -> None:
    began = time.monotonic()
    found = measure.work(plan_of(tmp_path, step("a", SLEEP), step("b", SLEEP)), tmp_path, seconds=0.5)
    assert found["a"]["state"] == "cut" and "b" not in found
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("code", [0, 1])
def test_what_a_step_leaves_is_removed_however_it_ended(code: int, tmp_path: Path) -> None:
    work = (
        f"import pathlib, sys; pathlib.Path('$OUT/work').mkdir(); pathlib.Path('$OUT/file').touch(); sys.exit({code})"
    )
    plan = plan_of(tmp_path, step("one", f'-c "{work}"', remove=["$OUT/work", "$OUT/file", "$OUT/no"]))
    out = tmp_path / "out"
    out.mkdir()
    assert measure.work(plan, out, seconds=60)["one"]["state"] == ("failed" if code else "done")
    assert sorted(path.name for path in out.iterdir()) == ["measure.json", "one.log"]


def test_variables_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tell = "import os, sys; print(sys.argv[1], os.environ['PLACE'])"
    plan = plan_of(tmp_path, step("a", f'-c "{tell}" $WHAT') + 'environment = { PLACE = "$WHAT:$OUT" }')
    monkeypatch.delenv("WHAT", raising=False)
    with pytest.raises(SystemExit, match="set WHAT in the environment"):
        measure.check_variables(plan, {})
    monkeypatch.setenv("WHAT", "x y")
    measure.check_variables(plan, {"WHAT": "x y"})
    measure.work(plan, tmp_path, seconds=60)
    assert (tmp_path / "a.log").read_text() == f"x y x y:{tmp_path}\n"


def test_a_plan_that_is_none_gets_one_message(tmp_path: Path) -> None:
    for text, words in (
        ("[[step", "is not a plan"),
        ("[[steps]]\nname = 'a'", "is not a plan"),
        ("[[step]]\nname = 'a'", "is not a plan"),
        (step("a", "x") + step("a", "y"), "two steps are called a"),
    ):
        with pytest.raises(SystemExit, match=words):
            plan_of(tmp_path, text)
    with pytest.raises(SystemExit, match="is not a plan"):
        measure.read_plan(tmp_path / "missing.toml")


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "plans").glob("*.toml")), ids=lambda path: path.stem)
def test_plans_name_scripts_that_are_there(path: Path) -> None:
    steps = measure.read_plan(path)
    assert steps
    for one in steps:
        script = one.run.split()[0]
        assert script == "-m" or (ROOT / script).is_file(), one.name


def gone(pid: int) -> bool:
    """Whether a process has ended, waiting a little for it."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


def test_what_a_process_leaves_running_ends_with_it(tmp_path: Path) -> None:
    number, log = tmp_path / "pid", tmp_path / "log"
    assert child_processes.finish(child_processes.start([sys.executable, "-c", LEAVES_ONE, str(number)], log)) == 0
    assert gone(int(number.read_text()))


def test_who_is_told_to_end_ends_what_it_started(tmp_path: Path) -> None:
    """A step that starts processes in sessions of their own, as benchmarks do."""
    number, log = tmp_path / "pid", tmp_path / "log"
    inner = f"import os, time; open({str(number)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    outer = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from benchmarks.child_processes import finish, start
finish(start([sys.executable, "-c", {inner!r}], Path({str(tmp_path / "inner")!r})))
"""
    process = child_processes.start([sys.executable, "-c", outer], log)
    while not number.exists() or not number.read_text():
        assert process.poll() is None, log.read_text()
        time.sleep(0.02)
    assert child_processes.finish(process, seconds=0.01) is None
    assert gone(int(number.read_text()))


@pytest.mark.parametrize("told", [signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_of_a_measurement_that_is_told_to_end(tmp_path: Path, told: signal.Signals) -> None:
    """Three processes one above the other, each in a session of its own."""
    number = tmp_path / "pid"
    inner = f"import os, time; open({str(number)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    (tmp_path / "outer.py").write_text(f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from benchmarks.child_processes import finish, start
finish(start([sys.executable, "-c", {inner!r}], Path({str(tmp_path / "inner")!r})))
""")
    (tmp_path / "plan.toml").write_text(step("a", str(tmp_path / "outer.py")))
    command = [sys.executable, str(ROOT / "benchmarks" / "measure.py"), str(tmp_path / "plan.toml"), "--out"]
    process = subprocess.Popen([*command, str(tmp_path / "out")], stderr=subprocess.DEVNULL)
    while not number.exists() or not number.read_text():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(told)
    assert process.wait(20) != 0 and gone(int(number.read_text()))


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
    child_processes.exit_when_told()
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL


def test_why_a_process_ended(tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = child_processes.finish(
        child_processes.start([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], log)
    )
    assert code == -9 and child_processes.ending(-9, log) == [
        "ended with signal 9; the machine's memory may have run out"
    ]
    assert child_processes.ending(3, tmp_path / "none") == ["ended with exit code 3"]


def test_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(step("a", "-c 'print(1)'") + step("b", "-c 'raise SystemExit(2)'"))
    command = [sys.executable, str(ROOT / "benchmarks" / "measure.py"), str(tmp_path / "plan.toml")]
    listed = subprocess.run([*command, "--list"], capture_output=True, text=True, timeout=60)
    assert listed.returncode == 0 and "print(1)" in listed.stdout
    done = subprocess.run([*command, "--out", str(tmp_path / "out")], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert re.fullmatch(r"a: done after \d+ s\nb: failed after \d+ s\n", done.stdout)
