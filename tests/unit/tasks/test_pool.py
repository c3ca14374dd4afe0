"""The pool against real processes: what hangs, raises, dies or lies is an error of that one response."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from attacks.hostile import VERIFIERS, attack_by_verifier
from stalewise.errors import TaskError
from stalewise.tasks import make_verifier
from stalewise.tasks.sandbox import probe
from stalewise.tasks.verifiers.pool import ProcessVerifier
from verifying import question, score


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie of somebody else's does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pid: int) -> None:
    """The time limit of a test is how long one waits."""
    while alive(pid):
        time.sleep(0.02)


def test_lengths_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match="1 prompts but 2 responses"):
        make_verifier("exact").score([question()], ["8", "9"])


def test_unknown_verifier_or_option_names_the_nearest() -> None:
    with pytest.raises(TaskError, match="unknown verifier 'maths'; did you mean math"):
        make_verifier("maths")
    with pytest.raises(TaskError, match="verifier number has no option 'whic'; did you mean which"):
        make_verifier("number", whic="last")
    with pytest.raises(TaskError, match="verifier exact has no option 'x'; it takes none"):
        make_verifier("exact", x=1)
    with pytest.raises(TaskError, match="verifier python needs the option 'function'"):
        make_verifier("python")
    with pytest.raises(TaskError, match="input should be 'first' or 'last'"):
        make_verifier("number", which="middle")
    with pytest.raises(TaskError, match="workers ≥ 1"):
        make_verifier("math", workers=0)


def test_workers_outlive_the_thread_in_which_they_started(judges: str) -> None:
    """A shard is scored in a thread that ends with its batch. Linux tells a child when the thread that made it dies."""
    verifier: Any = make_verifier("python", function=judges, workers=2)
    found: list[set[int]] = []
    for _ in range(2):
        with ThreadPoolExecutor(1) as thread:
            assert [reward.error for reward in thread.submit(score, verifier, *["8"] * 8).result()] == [""] * 8
        time.sleep(0.3)
        found.append({worker.process.pid for worker in verifier._running if worker.process.poll() is None})
    verifier.close()
    assert len(found[0]) == 2 and found[0] == found[1]


def test_a_worker_that_still_loads_when_a_batch_is_scored_serves_the_next(judges: str) -> None:
    verifier: Any = make_verifier("python", function=judges, workers=4)
    for _ in range(3):
        with ThreadPoolExecutor(1) as thread:
            assert [reward.error for reward in thread.submit(score, verifier, *["8"] * 4).result()] == [""] * 4
    verifier.close()


def test_hanging_judges_are_killed_and_replaced_and_order_is_kept(judges: str) -> None:
    verifier: Any = make_verifier("python", function=judges, workers=2, limit_s=0.4)
    score(verifier, "8", "8")  # both have started
    before = {worker.process.pid for worker in verifier._running}
    rewards = score(verifier, "8", "hang", "9", "spin", "8", "9")
    after = {worker.process.pid for worker in verifier._running}
    verifier.close()
    assert len(before) == 2 and len(after) <= 2 and after != before
    for pid in before | after:
        wait_until_gone(pid)
    assert [reward.error for reward in rewards] == ["", "timeout after 0.4 s", "", "timeout after 0.4 s", "", ""]
    assert [rewards[place].value for place in (0, 2, 4, 5)] == [1.0, 0.0, 1.0, 0.0]


def test_what_a_killed_judge_started_is_killed_too(judges: str, tmp_path: Path) -> None:
    note = tmp_path / "child"
    with ProcessVerifier(
        "stalewise.tasks.verifiers.python:load_judge", {"function": judges}, workers=1, limit_s=1
    ) as verifier:
        assert score(verifier, "children", answer=str(note))[0].error == "timeout after 1.0 s"
    wait_until_gone(int(note.read_text()))


def test_workers_live_on_between_batches_and_end_with_close(judges: str) -> None:
    verifier = make_verifier("python", function=judges, workers=1)
    first, again = (int(score(verifier, "pid")[0].value) for _ in range(2))
    assert first == again
    os.kill(first, signal.SIGKILL)  # as the kernel does when memory is short
    time.sleep(0.1)
    replaced = score(verifier, "pid")[0]
    assert replaced.error == "", "a worker that died while idle must not cost a response"
    verifier.close()
    verifier.close()
    with pytest.raises(ProcessLookupError):  # neither running nor a zombie
        os.kill(int(replaced.value), 0)
    assert score(verifier, "8")[0].value == 1.0, "a closed verifier starts again"
    verifier.close()


def test_nothing_starts_before_the_first_response(judges: str) -> None:
    verifier = ProcessVerifier("no.such.module:judge")
    assert verifier.score([], []) == []
    with pytest.raises(TaskError, match=r"cannot load no\.such\.module:judge: ModuleNotFoundError"):
        score(verifier, "8")


PARENT = """
import sys
from stalewise.tasks import make_verifier
from stalewise.types import Prompt

sys.path.insert(0, sys.argv[1])
verifier = make_verifier("python", function="judges_of_the_test:judge", workers=1, limit_s=float(sys.argv[3]))
print(int(verifier.score([Prompt("q", "", "")], ["pid"])[0].value), flush=True)
verifier.score([Prompt("q", "", "")], [sys.argv[2]])
"""


def parent(judges: str, tmp_path: Path, response: str, limit_s: float) -> tuple[subprocess.Popen[str], int]:
    """Start a script without `if __name__ == "__main__"` that scores; return it and its worker's id."""
    script = tmp_path / "parent.py"
    script.write_text(textwrap.dedent(PARENT))
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path), response, str(limit_s)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def test_workers_end_with_the_interpreter(judges: str, tmp_path: Path) -> None:
    process, worker = parent(judges, tmp_path, "8", limit_s=5)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "Traceback" not in errors
    wait_until_gone(worker)


def test_interrupting_the_parent_prints_no_traceback_of_a_worker(judges: str, tmp_path: Path) -> None:
    process, worker = parent(judges, tmp_path, "hang", limit_s=30)
    time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)  # what Ctrl-C in a terminal does
    _, errors = process.communicate(timeout=20)
    assert errors.count("Traceback") == 1, "only the parent's own"
    assert "worker.py" not in errors
    wait_until_gone(worker)


def test_a_hanging_worker_ends_even_when_its_parent_was_killed(judges: str, tmp_path: Path) -> None:
    process, worker = parent(judges, tmp_path, "spin", limit_s=0.3)
    time.sleep(0.1)
    process.kill()
    process.communicate(timeout=20)
    wait_until_gone(worker)


@pytest.mark.skipif(sys.platform != "linux", reason="the watching process is for Linux")
@pytest.mark.parametrize("act", VERIFIERS)
def test_a_hostile_judge_costs_its_own_response(act: str, tmp_path: Path) -> None:
    assert attack_by_verifier(act, tmp_path) == []


def test_a_judge_sees_no_secrets_unless_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "OPENAI_API_KEY", "https_proxy", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    for named, value in (((), 0.5), (["OPENAI_API_KEY"], 1.0)):
        verifier = make_verifier("python", function="attacks.judges:judge", workers=1, environment=named)
        assert score(verifier, "environment", answer="{}")[0].value == value
        verifier.close()


@pytest.mark.skipif(bool(probe("landlock")), reason="no Landlock")
def test_a_judge_in_a_sandbox_has_no_network_and_reads_nothing_outside(tmp_path: Path) -> None:
    given = json.dumps({"folder": str(tmp_path)})
    for sandbox, value in ((True, 0.5), (False, 1.0)):
        verifier = make_verifier("python", function="attacks.judges:judge", workers=1, sandbox=sandbox)
        rewards = score(verifier, "network", "read outside", answer=given)
        verifier.close()
        assert [reward.value for reward in rewards] == [value, value]
    assert make_verifier("math").confinement.sandbox  # type: ignore[attr-defined]


def test_confinement_is_checked() -> None:
    for options, message in (
        ({"memory_mb": 0}, "memory_mb"),
        ({"environment": "HF_TOKEN"}, "environment"),
        ({"sandbox": 1}, "true or false"),
    ):
        with pytest.raises(TaskError, match=message):
            make_verifier("python", function="attacks.judges:judge", **options)
