"""Who makes which shard, and who is lost."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from stalewise.rollout.workers.shard_queue import SESSIONS, LivenessMonitor, ShardClaims, WorkerSession
from stalewise.store.object_store import DirectoryStore
from working import freeze


def test_of_all_that_reach_for_a_shard_one_gets_it(sessions: tuple[DirectoryStore, list[WorkerSession]]) -> None:
    _, (a, b, c) = sessions
    got: list[list[int]] = [[], [], []]
    gate = threading.Barrier(3)

    def reach(place: int, session: WorkerSession) -> None:
        claims = ShardClaims("order", session)
        gate.wait()
        while taken := claims.take(range(30), 1):
            got[place] += taken

    threads = [threading.Thread(target=reach, args=pair) for pair in enumerate((a, b, c))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got[0] + got[1] + got[2]) == list(range(30))


def test_one_of_those_who_see_a_worker_lost_takes_over(sessions: tuple[DirectoryStore, list[WorkerSession]]) -> None:
    _, (a, b, c) = sessions
    assert ShardClaims("order", a).take([0], 1) == [0]
    seers = [ShardClaims("order", session) for session in (b, c)]
    until = time.monotonic() + 1.2
    while time.monotonic() < until:  # for as long as it lives, nobody
        assert [claims.take([0], 1) for claims in seers] == [[], []]
        time.sleep(0.05)
    freeze(a)
    taken: list[int] = []
    while not taken:
        for claims in seers:
            taken += claims.take([0], 1)
        time.sleep(0.05)
    assert taken == [0]
    assert [claims.taken_over for claims in seers].count(1) == 1


@pytest.mark.parametrize(("place", "lost"), [(None, True), ("another machine", False)])
def test_a_process_of_this_machine_that_is_no_more_is_not_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str | None, lost: bool
) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    object_store, session = DirectoryStore(tmp_path), WorkerSession(DirectoryStore(tmp_path), "a", lost_after_s=600.0)
    with monkeypatch.context() as patched:
        patched.setattr("os.getpid", lambda: ended.pid)
        if place is not None:
            patched.setattr("stalewise.rollout.workers.shard_queue._machine", lambda: place)
        session._write_heartbeat()
    assert LivenessMonitor(object_store, 600.0).is_lost(session.id) == lost
    session._write_heartbeat()  # of this process, which is there
    assert not LivenessMonitor(object_store, 600.0).is_lost(session.id)


def test_a_worker_that_took_leave_is_not_waited_for(sessions: tuple[DirectoryStore, list[WorkerSession]]) -> None:
    _, (a, b, _) = sessions
    assert ShardClaims("order", a).take([0], 1) == [0]
    a.__exit__()
    claims = ShardClaims("order", b)
    while not (taken := claims.take([0], 1)):
        time.sleep(0.05)
    assert taken == [0]


def test_clocks_that_are_off_do_no_harm(
    sessions: tuple[DirectoryStore, list[WorkerSession]], monkeypatch: pytest.MonkeyPatch
) -> None:
    object_store, (a, _, _) = sessions
    freeze(a)
    path = object_store.root / SESSIONS / a.id
    now = [1000.0]
    monkeypatch.setattr("stalewise.rollout.workers.shard_queue.time.monotonic", lambda: now[0])
    monkeypatch.setattr("stalewise.rollout.workers.shard_queue.time.time", lambda: 4e9, raising=False)
    monitor = LivenessMonitor(object_store, 30.0)
    for content, modified in ((b"\xff no JSON", 0.0), (b"", 4e9), (b'{"beat": -1}', 1e8), (b'{"beat": 0}', 0.0)):
        path.write_bytes(content)  # whatever it says and however old it looks, it has changed
        os.utime(path, (modified, modified))
        assert not monitor.is_lost(a.id)
        now[0] += 29.0
        os.utime(path, (modified + 77.0, modified + 77.0))
        assert not monitor.is_lost(a.id)
    now[0] += 1.5  # nothing but 30 seconds of our own without a change
    assert monitor.is_lost(a.id)
