"""Many processes at one generation batch: who makes what, who is lost, and who must not take part."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from stalewise.api import generate, run
from stalewise.config import RunConfig, make_config
from stalewise.errors import StoreError
from stalewise.rollout.factory import batch_plan, make_sampler
from stalewise.rollout.generate import make_shards
from stalewise.rollout.sampler import Request, Response
from stalewise.rollout.workers.claims import SESSIONS, LivenessMonitor, ShardClaims, WorkerSession
from stalewise.rollout.workers.coordinator import Coordinator
from stalewise.rollout.workers.shard_queue import ShardQueue
from stalewise.rollout.workers.sync import policy_digest
from stalewise.rollout.workers.work_order import WorkOrder, config_digest, open_orders, place_order
from stalewise.rollout.workers.worker import work
from stalewise.store import (
    AlreadyCommitted,
    ShardManifest,
    committed_shards,
    is_committed,
    open_batch,
    read_batch_manifest,
    shard_path,
    write_shard,
)
from stalewise.store.atomic import create_atomic, temporary_name
from stalewise.store.checkpoints import checkpoint_directory
from stalewise.store.object_store import DirectoryStore
from stalewise.tasks import make_task
from stalewise.types import SamplerSettings
from tiny import call, refused, tiny_record, write_config
from working import judged, ordered

SOURCE = str(Path(__file__).parents[3] / "src")
BATCH = "g000000-v000000"


def checksums(run: Path, batch: str = BATCH) -> list[str]:
    return [shard.sha256 for shard in read_batch_manifest(run / "rollouts" / batch).shards]


# ---------------------------------------------------------------- independent processes


def start(run: Path, name: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "stalewise", "generate", str(run), "--worker", name, "--once", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{SOURCE}:{run.parent}", "OMP_NUM_THREADS": "1", **environment},
    )


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 60
    while not path.exists():
        assert process.poll() is None and time.monotonic() < until, process.communicate()
        time.sleep(0.02)


def test_processes_share_a_batch_and_take_over_from_one_that_was_killed(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = judged(runs, "shared", workers={"lost_after_s": 1.0})
    monkeypatch.syspath_prepend(str(runs))
    ordered(config)
    victim = start(config.directory, "victim", STALL=str(runs / "stalled"))
    wait_for(runs / "stalled", victim)
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    assert len(list((config.directory / "work" / "claims").glob("*/shard-*"))) >= 1
    other = start(config.directory, "second")
    until = time.monotonic() + 60
    while not list((config.directory / SESSIONS).glob("worker.second-*")):
        assert other.poll() is None and time.monotonic() < until, other.communicate()
        time.sleep(0.02)
    third = work(config.directory, worker="third", once=True)
    out, error = other.communicate(timeout=100)
    assert other.returncode == 0, error
    done = [asdict(third), *json.loads(out)]
    shards = committed_shards(config.directory / "rollouts" / BATCH)
    assert sum(one["shards"] for one in done) == len(shards) == 8
    assert sum(one["taken_over"] for one in done) >= 1
    assert sum(one["too_late"] for one in done) == 0  # nothing was made twice
    assert {shard.extra["worker"] for shard in shards} == {"second", "third"}
    assert not list((config.directory / "work").glob("*/*/*")) and not list((config.directory / "work").glob("*/g*"))

    alone = judged(runs, "alone")
    (made,) = generate(alone)
    assert checksums(config.directory) == checksums(alone.directory) == [shard.sha256 for shard in made.shards]


# ---------------------------------------------------------------- a learner and its workers, in one process


def test_a_learner_that_waits_learns_the_same_from_what_workers_made(tiny_run: RunConfig, runs: Path) -> None:
    config = make_config(tiny_record(runs, checkpoints={"keep": 8}, workers={"learner": "waits", "lost_after_s": 5.0}))
    # One thread alone: transformers does not load two models at a time. Many workers are processes, as above.
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(work, config.directory, worker="a")  # before there is anything to do
        run(config)
        done = asked.result(60)
    assert (done.shards, done.rollouts, done.batches) == (4, 64, [BATCH, "g000001-v000002"])
    assert policy_digest(checkpoint_directory(config.directory, 4)) == policy_digest(
        checkpoint_directory(tiny_run.directory, 4)
    )
    assert work(config.directory).shards == 0  # the run is complete: nothing to wait for
    assert list((config.directory / "work" / "sessions").iterdir()) == []


def test_a_learner_goes_on_at_once_with_what_its_killed_predecessor_had_claimed(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tiny_record(runs, workers={"lost_after_s": 600.0}))
    order = ordered(config)
    object_store = DirectoryStore(config.directory)
    predecessor = WorkerSession(object_store, "learner", role="journal", lost_after_s=600.0)
    predecessor._tell()  # and then it is killed
    claims = ShardClaims(order.name, predecessor)
    assert claims.take([0, 1], 2) == [0, 1]

    def watch(*_: object) -> bool:
        raise AssertionError("nobody needs to be watched: the lock says that it is gone")

    monkeypatch.setattr(LivenessMonitor, "is_lost", watch)
    (made,) = generate(config)
    assert made.rows == 32 and [shard.extra["worker"] for shard in made.shards] != ["learner"] * 2


# ---------------------------------------------------------------- claims


@pytest.fixture
def sessions(tmp_path: Path) -> Iterator[tuple[DirectoryStore, list[WorkerSession]]]:
    object_store = DirectoryStore(tmp_path)
    opened = [WorkerSession(object_store, name, lost_after_s=0.6).__enter__() for name in ("a", "b", "c")]
    yield object_store, opened
    for session in opened:
        session.__exit__()


def freeze(session: WorkerSession) -> None:
    """As SIGSTOP or a long pause of a virtual machine does."""
    session._over.set()
    assert session._thread is not None
    session._thread.join()


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


def test_those_that_began_together_leave_each_other_a_part_however_large_their_appetite(
    runs: Path, sessions: tuple[DirectoryStore, list[WorkerSession]]
) -> None:
    config = make_config(tiny_record(runs))
    order = WorkOrder(batch_plan(config, config.schedule.schedule(), 0), "policy", config_digest(config))
    object_store, (a, b, c) = sessions
    place_order(object_store, order)

    def taken(session: WorkerSession, processes: int) -> list[int]:
        queue = ShardQueue(order, runs, session, sync=None, collects=False)
        queue.processes = processes
        return queue.take([0, 1, 2, 3, 4, 5, 6, 7], 1000)

    assert [taken(a, 3), taken(b, 3), taken(c, 3)] == [[0, 1, 2], [3, 4, 5], [6, 7]]


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
    until = time.monotonic() + 10
    while not taken and time.monotonic() < until:
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
            patched.setattr("stalewise.rollout.workers.claims._machine", lambda: place)
        session._write_heartbeat()
    assert LivenessMonitor(object_store, 600.0).is_lost(session.id) == lost
    session._write_heartbeat()  # of this process, which is there
    assert not LivenessMonitor(object_store, 600.0).is_lost(session.id)


def test_a_worker_that_took_leave_is_not_waited_for(sessions: tuple[DirectoryStore, list[WorkerSession]]) -> None:
    _, (a, b, _) = sessions
    assert ShardClaims("order", a).take([0], 1) == [0]
    a.__exit__()
    claims = ShardClaims("order", b)
    until = time.monotonic() + 10
    while not (taken := claims.take([0], 1)) and time.monotonic() < until:
        time.sleep(0.05)
    assert taken == [0]


def test_clocks_that_are_off_do_no_harm(
    sessions: tuple[DirectoryStore, list[WorkerSession]], monkeypatch: pytest.MonkeyPatch
) -> None:
    object_store, (a, _, _) = sessions
    freeze(a)
    path = object_store.root / SESSIONS / a.id
    now = [1000.0]
    monkeypatch.setattr("stalewise.rollout.workers.claims.time.monotonic", lambda: now[0])
    monkeypatch.setattr("stalewise.rollout.workers.claims.time.time", lambda: 4e9, raising=False)
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


class Halting:
    """A sampler that waits in the middle of its work until it is told to go on."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.began, self.go_on = inner, threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def sample(self, requests: Sequence[Request], settings: SamplerSettings | None = None) -> list[Response]:
        self.began.set()
        assert self.go_on.wait(60)
        return self.inner.sample(requests, settings)


def test_a_worker_that_was_only_slow_changes_nothing(runs: Path) -> None:
    config = make_config(tiny_record(runs, workers={"lost_after_s": 0.6}))
    order = ordered(config)
    object_store, directory = DirectoryStore(config.directory), config.directory / "rollouts" / BATCH
    said: list[str] = []
    with WorkerSession(object_store, "slow", lost_after_s=0.6) as session:
        queue = ShardQueue(order, directory, session, sync=None, collects=True, log=said.append)
        sampler = Halting(make_sampler(config))
        task = make_task("arithmetic", seed=0)
        checkpoint = checkpoint_directory(config.directory, 0)
        thread = threading.Thread(
            target=make_shards,
            args=(order.plan,),
            kwargs={
                "checkpoint": checkpoint,
                "directory": directory,
                "task": task,
                "sampler": sampler,
                "on_shard": lambda rollouts: None,
                "source": queue,
            },
        )
        thread.start()
        assert sampler.began.wait(60)
        freeze(session)
        done = work(config.directory, worker="quick", once=True)
        assert (done.shards, done.taken_over, done.too_late) == (2, 1, 0)
        before = checksums(config.directory)
        sampler.go_on.set()
        thread.join(60)
        assert not thread.is_alive()
    assert queue.made_here == [] and queue.too_late_here == [0]
    assert said == [f"shard 0 of {BATCH} was made twice: another process committed it first"]
    assert checksums(config.directory) == before
    assert len(open_batch(directory)) == 32  # checksums hold


# ---------------------------------------------------------------- who must not take part


def test_a_worker_with_another_policy_is_refused(runs: Path, tmp_path: Path) -> None:
    config = make_config(tiny_record(runs))
    order = ordered(config)
    copy = tmp_path / "copy"
    shutil.copytree(config.directory, copy)
    manifest = checkpoint_directory(copy, 0) / "manifest.json"
    manifest.write_text(manifest.read_text() + "\n")
    message = refused("generate", copy, "--worker", "a", "--once")
    assert f"v000000 is another policy than the one that {order.path} asks for" in message
    shutil.rmtree(checkpoint_directory(copy, 0))
    assert "v000000 is missing, though" in refused("generate", copy, "--worker", "a", "--once")
    weights = checkpoint_directory(config.directory, 0) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    assert "model.safetensors is damaged" in refused("generate", config.directory, "--worker", "a", "--once")
    assert committed_shards(config.directory / "rollouts" / BATCH) == []


def test_a_worker_with_another_config_or_release_is_refused(runs: Path, tmp_path: Path) -> None:
    config = make_config(tiny_record(runs))
    order = ordered(config)
    other = write_config(tmp_path / "other.toml", {**tiny_record(runs), "seed": 5})
    message = refused("generate", other, "--worker", "a", "--once")
    assert "belongs to another config (seed was 0 and is 5): a worker makes rollouts of the run's own" in message
    words = ("--worker", "a", "--once", "--set", "sampler.temperature=0.5")
    assert "sampler.temperature was 1.0 and is 0.5" in refused("generate", config.directory, *words)
    placed = config.directory / order.path
    record = json.loads(placed.read_text())
    for change, message in (
        ({"store": "stalewise.rollouts/9"}, "asks for stalewise.work/1 with stalewise.rollouts/9, this stale"),
        ({"config": "0" * 64}, "is for another config than this worker has"),
        ({"plan": {}}, "is no order: 'generation_batch'; remove it, the learner places it again"),
    ):
        placed.write_text(json.dumps({**record, **change}))
        assert message in refused("generate", config.directory, "--worker", "a", "--once")
    assert "holds no run: start" in refused("generate", tmp_path / "nowhere", "--worker", "a", "--once")
    assert "exclude each other" in refused("generate", config.directory, "--worker", "a", "--ray", "2")


def test_a_worker_may_have_its_own_device_and_engine(runs: Path, tmp_path: Path) -> None:
    config = make_config(tiny_record(runs))
    ordered(config)
    result = call(
        *("generate", config.directory, "--worker", "a", "--once"),
        *("--set", "model.device=cpu", "--set", "model.threads=1"),
    )
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "a: 2 shards with 32 rollouts\n"
    assert is_committed(config.directory / "rollouts" / BATCH)  # the learner need not be there for that


def test_a_worker_takes_the_rate_that_the_learner_settled_on(runs: Path, tmp_path: Path) -> None:
    settled = make_config(tiny_record(runs, optimizer={"learning_rate": 7e-4}))
    ordered(settled)
    planned = {**tiny_record(runs), "plan": {"learning_rate": "planned"}}
    assert work(write_config(tmp_path / "planned.toml", planned), worker="a", once=True).shards == 2


# ---------------------------------------------------------------- orders, temporaries, first come


def test_an_order_that_was_taken_back_leaves_nothing_behind(runs: Path) -> None:
    config = make_config(tiny_record(runs))
    first = ordered(config)
    assert work(config.directory, worker="a", once=True).shards == 2
    directory = config.directory / "rollouts" / BATCH
    (directory / "manifest.json").unlink()
    shard_path(directory, 1).unlink()
    plan = batch_plan(config, config.schedule.schedule(), 0, attempt=1)
    again = WorkOrder(plan, first.policy, config_digest(config))
    object_store = DirectoryStore(config.directory)
    place_order(object_store, first)
    place_order(object_store, again)
    assert [order.name for order in open_orders(object_store)] == [again.name]
    with WorkerSession(object_store, "learner", lost_after_s=60.0) as session:
        said: list[str] = []
        queue = ShardQueue(again, directory, session, sync=None, collects=True, log=said.append)
        assert queue.present() == set()  # what the first order asked for is not what this one asks for
        assert "was made for a withdrawn order" in said[0] and committed_shards(directory) == []


def test_an_order_whose_policy_is_gone_is_passed_over_once_it_was_taken_back(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tiny_record(runs))
    order = ordered(config)
    shutil.rmtree(checkpoint_directory(config.directory, 0))
    seen = iter([[order], []])  # it was open when the worker looked
    monkeypatch.setattr("stalewise.rollout.workers.work_order.open_orders", lambda object_store: next(seen))
    Coordinator(config, "journal", print).withdraw()
    assert work(config.directory, once=True).shards == 0


def test_a_learner_that_starts_leaves_alone_what_a_worker_is_writing(runs: Path) -> None:
    config = make_config(tiny_record(runs))
    ordered(config)
    directory = config.directory / "rollouts" / BATCH
    directory.mkdir(parents=True)
    writing, left = temporary_name(shard_path(directory, 7)), temporary_name(config.directory / "x.json")
    writing.write_text("half")
    left.write_text("half")
    ordered(config)
    assert writing.exists() and not left.exists()
    generate(config)
    assert not writing.exists()  # whoever wrote it was killed: the batch is complete without it


def test_a_shard_that_somebody_put_there_first_is_described_and_not_replaced(tmp_path: Path) -> None:
    from test_store import make_rollouts

    directory = tmp_path / BATCH
    asked = make_rollouts(0, 8)
    theirs = [type(one)(**{**_fields(one), "reward": 0.25}) for one in asked]  # as another machine rounds it
    write_shard(directory, 0, theirs)
    (directory / "shard-00000.json").unlink()  # killed between the file and its manifest
    before = shard_path(directory, 0).read_bytes()
    manifest = write_shard(directory, 0, asked)
    assert shard_path(directory, 0).read_bytes() == before
    assert manifest.reward_sum == 2.0 and committed_shards(directory) == [manifest]
    (directory / "shard-00000.json").unlink()
    assert write_shard(directory, 0, make_rollouts(8, 8)).rollout_first == 8  # something else: it is replaced
    (directory / "shard-00000.json").unlink()
    shard_path(directory, 0).write_bytes(b"half")
    assert write_shard(directory, 0, asked).rows == 8


def _fields(one: Any) -> dict[str, Any]:
    return {name: getattr(one, name) for name in one.__dataclass_fields__}


def test_a_shard_that_is_committed_while_we_look_stays_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from test_store import make_rollouts

    directory, exists = tmp_path / BATCH, Path.exists
    committed: list[ShardManifest] = []

    def commit_after_the_first_look(path: Path) -> bool:
        found = exists(path)
        if not committed:
            monkeypatch.setattr(Path, "exists", exists)
            committed.append(write_shard(directory, 0, make_rollouts(0, 8), extra={"worker": "first"}))
        return found

    monkeypatch.setattr(Path, "exists", commit_after_the_first_look)
    with pytest.raises(AlreadyCommitted):
        write_shard(directory, 0, make_rollouts(0, 8), extra={"worker": "second"})
    assert committed_shards(directory) == committed


def test_a_folder_that_others_clean_up_meanwhile_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    object_store = DirectoryStore(tmp_path)
    link, gone = os.link, []

    def clean_up_first(*names: Any) -> None:
        if not gone:
            gone.append(names)
            object_store.remove("work/claims/order")
        link(*names)

    monkeypatch.setattr(os, "link", clean_up_first)
    assert object_store.create("work/claims/order/shard-00000-0", b"a") and gone
    assert object_store.names("work/claims/order") == ["shard-00000-0"]
    monkeypatch.setattr(Path, "is_dir", lambda path: False)  # it was made a moment after somebody looked
    object_store.remove("work/claims/order")
    assert object_store.names("work/claims") == []


@pytest.mark.parametrize("links", [True, False])
def test_first_come_first_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.EPERM, "no hard links here")

    if not links:
        monkeypatch.setattr(os, "link", none)
    assert create_atomic(tmp_path / "new" / "x", b"first")
    assert not create_atomic(tmp_path / "new" / "x", b"second")
    assert (tmp_path / "new" / "x").read_bytes() == b"first"
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["x"]
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="cannot write"):
        create_atomic(tmp_path / "file" / "x", b"")


@pytest.mark.parametrize("script", sorted((Path(__file__).parents[3] / "examples" / "slurm").glob("*.sbatch")), ids=str)
def test_the_examples_for_slurm_are_shell_scripts_that_name_real_options(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    words = [line for line in script.read_text().splitlines() if "stalewise generate" in line and "--worker" in line]
    assert len(words) == 1
    help_text = call("generate", "--help").stdout
    assert "--worker" in help_text and "--ray" in help_text and "--once" in help_text
