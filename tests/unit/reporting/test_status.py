"""`stalewise watch`: runs in every state, seen from their directories alone."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rundirs import add_batch, add_evaluation, add_journal, metrics, write_run
from stalewise.config import RunConfig, make_config, write_resolved
from stalewise.reporting.status import RunPhase, run_status
from stalewise.store.atomic import RunLock, write_json_atomic
from stalewise.store.json_lines import append_line
from tiny import call, called_json, refused


def hold(run: Path, **changes: Any) -> None:
    """Say in the file of the lock that this process has the run."""
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": "2999-01-01T00:00:00+00:00"}
    (run / RunLock.FILE).write_text(json.dumps(holder | changes) + "\n")


def learn(run: Path, first: int, stop: int, **changes: float) -> None:
    for update in range(first, stop):
        append_line(run / "metrics.jsonl", metrics(update, **changes) | {"generation_batch": update // 4})


# ---------------------------------------------------------------- states


def test_a_finished_run(tiny_run: RunConfig) -> None:
    now = run_status(tiny_run.directory)
    assert (now.state, now.update, now.updates, now.seconds_left) == ("finished", 4, 4, 0.0)
    assert (now.stage, now.stages, now.phases) == (1, 2, [])
    assert now.accuracy is not None and now.accuracy["version"] == 4
    shown = call("watch", tiny_run.directory).stdout
    assert "finished" in shown and "4 of 4 (100%)" in shown and "at version 4" in shown
    record = called_json("watch", tiny_run.directory)
    assert record["state"] == "finished" and record["seconds"]["learn"] > 0


def test_a_run_that_never_learned(tmp_path: Path) -> None:
    write_resolved(make_config({}), tmp_path / "config.resolved.json")
    assert run_status(tmp_path).state == "not started"
    shown = call("watch", tmp_path, "--once").stdout
    assert "not started" in shown and "nothing yet: no update is on record" in shown
    assert "is not a run directory" in refused("watch", tmp_path / "elsewhere")


def test_who_has_the_run_is_seen_without_touching_its_lock(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", done=5)
    assert run_status(run).state == "stopped"
    with RunLock(run):
        now = run_status(run)
        assert (now.state, f"process {os.getpid()} on " in now.holder) == ("running", True)
    assert run_status(run).state == "stopped"
    hold(run, since="2001-01-01T00:00:00+00:00")  # a later process has that number by now
    assert run_status(run).state == "stopped"
    hold(run, host="elsewhere")
    assert run_status(run).state == "maybe running"
    (run / RunLock.FILE).write_text("{half")
    assert run_status(run).state == "stopped"


def test_half_written_files_are_shown_as_such(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", done=5)
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"update": 5, "rew')
    now = run_status(run)
    assert now.update == 5 and any("is torn" in warning for warning in now.warnings)
    assert "warnings" in call("watch", run).stdout


# ---------------------------------------------------------------- phases and numbers


def test_phases_follow_from_what_is_on_disk(tmp_path: Path) -> None:
    run = tmp_path / "run"
    record = {"schedule": {"updates": 8, "stages": 2}, "batch": {"prompts": 4, "group_size": 4}}
    evaluation = {"prompts": 16, "samples": 2, "every": 4}
    write_resolved(make_config({**record, "evaluation": evaluation}), run / "config.resolved.json")
    assert run_status(run).phases == [RunPhase("evaluate", 0, 32)]
    add_evaluation(run, 0, 0.4)
    assert run_status(run).phases == [RunPhase("generate", 0, None)]
    (run / "rollouts" / "g000000-v000000").mkdir(parents=True)
    assert run_status(run).phases == [RunPhase("generate", 0, 64)]  # 4 updates of 16 rollouts
    add_batch(run, 0, 0)
    assert run_status(run).phases == [RunPhase("learn", 0, None)]
    learn(run, 0, 3)
    assert run_status(run).phases == [RunPhase("learn", 3, 4)]
    learn(run, 3, 4)
    add_journal(run, "learn", 100.0, 4.0, first=0, stop=4)
    assert run_status(run).phases == [RunPhase("evaluate", 0, 32)]
    add_evaluation(run, 4, 0.5)
    assert (run_status(run).phases, run_status(run).stage) == ([RunPhase("generate", 0, None)], 0)
    (run / "rollouts" / "g000001-v000004").mkdir(parents=True)
    assert run_status(run).stage == 1


def test_numbers_are_those_of_the_last_updates(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", done=0)
    learn(run, 0, 4, reward=0.0, seconds=0.5)
    learn(run, 4, 6, reward=1.0, seconds=0.5, ess=0.75, batch_budget=0.5, horizon_budget=0.125)
    add_journal(run, "generate", 10.0, 6.0, generation_batch=0)
    add_batch(run, 0, 0)
    now = run_status(run)
    assert now.reward == pytest.approx(2 / 6)
    assert (now.ess, now.batch_budget, now.horizon_budget, now.updates_per_second) == (0.75, 0.5, 0.125, 2.0)
    # 2 more updates of 0.5 s, and the second of two generation batches, of 6 s.
    assert now.seconds_left == pytest.approx(1 + 6)
    shown = call("watch", run).stdout
    assert "2.0 updates/s while learning" in shown and "50% of the batch's drift used, 12% of the run's" in shown


@pytest.mark.parametrize(
    ("seconds", "left"),
    [
        (6.0, 6.0 + 4 * 0.5),  # another batch of 6 s, and 4 updates on it
        (0.5, 6 * 0.5 + 6 / 2 * 1.0),  # 6 updates, and 3 times what switching took in the first 2
    ],
)
def test_the_slower_of_two_sides_says_what_is_left(tmp_path: Path, seconds: float, left: float) -> None:
    schedule = {"kind": "pipelined", "updates": 8, "updates_per_generation": 4, "lag": 1}
    run = write_run(tmp_path / "run", done=0, schedule=schedule)
    learn(run, 0, 2, seconds=0.5)
    add_journal(run, "switch", 21.0, 1.0, reason="learner")
    add_journal(run, "wait", 20.0, seconds, generation_batch=0)
    at = {"time": 20.0, "event": "generate", "generation_batch": 0}
    append_line(run / "journal-generator.jsonl", {**at, "seconds": seconds})
    add_batch(run, 0, 0)
    assert run_status(run).seconds_left == pytest.approx(left)


def test_generating_beside_learning_is_two_phases(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", done=3)
    (run / "rollouts" / "g000001-v000000").mkdir(parents=True)
    assert [phase.what for phase in run_status(run).phases] == ["generate", "learn"]
    assert not run_status(run).warnings  # what is in the making is no fault


def test_rollbacks_are_counted(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", done=4)
    record = {"from_version": 6, "to_version": 4, "reason": "it fell", "time": 1.0}
    write_json_atomic(run / "rollbacks" / "r000" / "rollback.json", record)
    now = run_status(run)
    assert now.rollbacks == 1 and "rolled back from version 6 to 4: it fell" in now.warnings[0]
    assert "1 time" in call("watch", run).stdout


def test_text_of_a_run_cannot_steer_the_terminal(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    append_line(run / "eval.jsonl", {"version": 1})
    add_evaluation(run, 8, 0.8, verifier_errors=1, verifier_error_kinds={"\x1b[2Jgone [red]": 1})
    shown = call("watch", run).stdout
    assert "\x1b" not in shown and "gone [red]" in shown


# ---------------------------------------------------------------- on a terminal


def read_until(descriptor: int, words: bytes, seconds: float = 60.0) -> bytes:
    found, end = b"", time.monotonic() + seconds
    while words not in found and time.monotonic() < end:
        if select.select([descriptor], [], [], 0.2)[0]:
            try:
                found += os.read(descriptor, 65536)
            except OSError:  # the other end is closed
                break
    return found


def test_the_view_follows_the_run_and_ctrl_c_leaves_cleanly(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", done=5)
    master, terminal = pty.openpty()
    words = [sys.executable, "-m", "stalewise", "watch", str(run), "--every", "0.1"]
    process = subprocess.Popen(words, stdout=terminal, stderr=subprocess.PIPE, env={**os.environ, "TERM": "xterm"})
    os.close(terminal)
    assert process.stderr is not None
    try:
        assert b"5 of 8" in read_until(master, b"5 of 8")
        append_line(run / "metrics.jsonl", metrics(5))
        assert b"6 of 8" in read_until(master, b"6 of 8")
        process.send_signal(signal.SIGINT)
        rest = read_until(master, b"\x1b[?25h")  # the cursor is shown again
        assert b"\x1b[?25h" in rest
        assert process.wait(timeout=60) == 0
        assert process.stderr.read() == b""
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
        os.close(master)


@pytest.mark.parametrize("lock", ["[]", '{"pid": "one", "host": "here", "since": "now"}', '{"pid": 1, "host": null}'])
def test_a_damaged_lock_is_nobodys(tmp_path: Path, lock: str) -> None:
    run = write_run(tmp_path / "run")
    (run / "run.lock").write_text(lock)
    assert (run_status(run).state, run_status(run).holder) == ("finished", "")
