"""Checkpoints in the background: their order, their errors, and what waits for them."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from stalewise import store
from stalewise.api import run
from stalewise.config import RunConfig, make_config
from stalewise.errors import StoreError
from stalewise.models.transfer import HostBuffers
from stalewise.orchestrator import checkpoint_writer, rollout_source
from stalewise.orchestrator import orchestrator as module
from stalewise.orchestrator.checkpoint_writer import CheckpointWriter, fits_beside
from stalewise.orchestrator.run_log import RunLog
from stalewise.store import batch_directories, checkpoints, open_batch
from stalewise.store.atomic import explain_write_errors
from stalewise.store.checkpoints import versions
from stalewise.store.json_lines import committed_ends, read_jsonl
from stalewise.store.manifest import read_shard_manifest
from stalewise.trainer.trainer import Trainer
from stalewise.types import NullCallback
from trainer_inputs import POLICY, rollouts
from trainer_inputs import config as trainer_config

WAIT_S = 60


def test_a_checkpoint_is_pending_until_it_is_joined(tmp_path: Path) -> None:
    writer, done, go = CheckpointWriter(RunLog(tmp_path), HostBuffers()), list[str](), threading.Event()

    def commit() -> dict[str, Any]:
        assert go.wait(WAIT_S)
        done.append("commit")
        return {"bytes": 5}

    writer.begin(3, commit, lambda: done.append("clean up"))
    writer.check()
    assert writer.version == 3 and done == []
    go.set()
    writer.join()
    assert writer.version is None and done[0] == "commit"
    writer.finish()
    assert done == ["commit", "clean up"]
    (record,) = read_jsonl(tmp_path / "journal.jsonl")
    assert (record["event"], record["reason"], record["version"], record["bytes"]) == ("switch", "commit", 3, 5)
    writer.close(pytest.fail)


def test_what_a_commit_lets_the_run_do_counts_as_waiting_for_it(tmp_path: Path) -> None:
    writer = CheckpointWriter(RunLog(tmp_path), HostBuffers())
    writer.on_commit = lambda: time.sleep(0.2)
    writer.begin(3, lambda: {"bytes": 5}, lambda: None)
    writer.close(pytest.fail)
    (record,) = read_jsonl(tmp_path / "journal.jsonl")
    assert record["reason"] == "commit" and record["seconds"] >= 0.2


def test_a_checkpoint_waits_for_the_removal_before_the_last_one_alone(tmp_path: Path) -> None:
    writer, go, done = CheckpointWriter(RunLog(tmp_path), HostBuffers()), threading.Event(), list[int]()

    def remove(number: int) -> None:
        assert go.wait(WAIT_S)
        done.append(number)

    writer.begin(1, dict, lambda: remove(1))
    writer.begin(2, dict, lambda: remove(2))
    writer.join()
    assert done == []
    threading.Timer(0.2, go.set).start()
    writer.begin(3, dict, lambda: remove(3))
    assert done[:1] == [1]
    writer.finish()
    assert done == [1, 2, 3]
    writer.close(pytest.fail)


def test_a_checkpoint_waits_for_a_removal_where_the_disk_has_no_room_beside_it(tmp_path: Path) -> None:
    writer, done = CheckpointWriter(RunLog(tmp_path), HostBuffers()), list[str]()
    room = shutil.disk_usage(tmp_path).total
    writer.begin(1, dict, lambda: [time.sleep(0.2), done.append("removed")])
    writer.begin(2, dict, lambda: None, 2 * room)
    assert done == ["removed"]
    writer.close(pytest.fail)


def test_an_error_of_a_removal_ends_the_run_at_the_next_checkpoint(tmp_path: Path) -> None:
    writer = CheckpointWriter(RunLog(tmp_path), HostBuffers())

    def fail() -> None:
        raise StoreError("cannot remove x")

    writer.begin(1, dict, fail)
    writer.join()
    with pytest.raises(StoreError, match=r"^cannot remove x$"):
        writer.finish()
    writer.close(pytest.fail)


def test_a_checkpoint_is_committed_before_the_error_of_a_removal_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(tmp_path, **SYNCHRONOUS, checkpoints={"keep": 1})
    place, remove = settings.directory / "checkpoints", shutil.rmtree

    def fail(path: Path, **options: Any) -> None:
        if path.parent == place:
            raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        remove(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.shutil, "rmtree", fail)
        patch.setattr(CheckpointWriter, "_has_room", lambda *arguments: False)  # so that the next one waits for it
        with pytest.raises(StoreError, match=r"^cannot remove .*: Permission denied; see to it"):
            run(settings)
    assert versions(settings.directory) == [2, 4]  # the removal after version 2 failed
    assert [path.name for path in batch_directories(settings.directory / "rollouts")][-1] == "g000001-v000002"
    run(settings)
    assert versions(settings.directory) == [6] and not list(settings.directory.rglob(".*tmp-*"))


def test_a_checkpoint_that_fails_after_a_removal_failed_is_the_error(tmp_path: Path) -> None:
    writer = CheckpointWriter(RunLog(tmp_path), HostBuffers())

    def fail(what: str) -> Any:
        raise StoreError(what)

    writer.begin(1, dict, lambda: fail("cannot remove x"))
    writer._rest[0].exception(WAIT_S)
    with pytest.raises(StoreError, match=r"^cannot write y$"):
        writer.begin(2, lambda: fail("cannot write y"), None)
    assert writer.version is None
    writer.close(pytest.fail)


def test_what_a_kill_between_a_commit_and_its_removals_has_left_is_removed_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    often = {**SYNCHRONOUS, "checkpoints": {"every": 1, "keep": 1}}
    settings, seen = config(tmp_path, **often), list[list[int]]()

    class Killed(NullCallback):
        def metrics(self, update: int, record: dict[str, Any]) -> None:
            if update == 3:
                raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, "prune", lambda *arguments, **options: [])
        run(settings, Killed())
    assert versions(settings.directory) == [0, 1, 2, 3]

    class Stopped(NullCallback):
        def begin(self, what: str, total: int) -> None:
            seen.append(versions(settings.directory))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(settings, Stopped())
    assert seen == [[2, 3]]  # the newest, and the one that made the rollouts of this stage


def test_two_removals_that_fail_are_one_error(tmp_path: Path) -> None:
    writer, go = CheckpointWriter(RunLog(tmp_path), HostBuffers()), threading.Event()

    def fail() -> None:
        assert go.wait(WAIT_S)
        raise StoreError("cannot remove x")

    writer.begin(1, dict, fail)
    writer.begin(2, dict, fail)
    go.set()
    with pytest.raises(StoreError, match=r"^cannot remove x$"):
        writer.begin(3, dict, lambda: None)
    writer.close(pytest.fail)


@pytest.mark.parametrize("is_joined", [True, False])  # or the run ends for another reason
def test_a_removal_that_fails_is_told_beside_a_checkpoint_that_failed(tmp_path: Path, is_joined: bool) -> None:
    writer, go, told = CheckpointWriter(RunLog(tmp_path), HostBuffers()), threading.Event(), list[str]()

    def fail(what: str) -> Any:
        assert go.wait(WAIT_S)
        raise StoreError(what)

    writer.begin(1, dict, lambda: fail("cannot remove x"))
    writer.begin(2, lambda: fail("cannot write y"), lambda: None)
    go.set()
    if is_joined:
        with pytest.raises(StoreError, match=r"^cannot write y$"):
            writer.join()
    writer.close(told.append)
    assert told == ["cannot write y"] * (not is_joined) + ["cannot remove x"]


def test_where_the_room_on_the_disk_is_unknown_a_checkpoint_waits_for_the_removal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(checkpoint_writer.shutil, "disk_usage", fail)
    writer, done = CheckpointWriter(RunLog(tmp_path), HostBuffers()), list[str]()
    writer.begin(1, dict, lambda: [time.sleep(0.2), done.append("removed")])
    writer.begin(2, dict, lambda: None, 1)
    assert done == ["removed"]
    writer.close(pytest.fail)


def test_a_checkpoint_after_which_nothing_is_removed_is_written_once(tmp_path: Path) -> None:
    writer, tried = CheckpointWriter(RunLog(tmp_path), HostBuffers()), list[int]()

    def commit() -> dict[str, Any]:
        tried.append(len(tried))
        with explain_write_errors(tmp_path, 0):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    writer.begin(1, dict, None)
    writer.begin(2, commit, None)
    with pytest.raises(StoreError, match=r"^disk full while writing "):
        writer.finish()
    assert tried == [0]
    writer.close(pytest.fail)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_disk_that_is_full_until_a_removal_is_over_gets_the_checkpoint_after_it(tmp_path: Path, number: int) -> None:
    writer, go, tried = CheckpointWriter(RunLog(tmp_path), HostBuffers()), threading.Event(), list[bool]()

    def commit() -> dict[str, Any]:
        tried.append(go.is_set())
        with explain_write_errors(tmp_path, 0):
            if not go.is_set():
                raise OSError(number, os.strerror(number))
        return {}

    writer.begin(1, dict, lambda: go.wait(WAIT_S))
    writer.begin(2, commit, lambda: None)
    threading.Timer(0.2, go.set).start()
    if number == errno.EIO:
        with pytest.raises(StoreError, match=r"^cannot write .*: Input/output error$"):
            writer.join()
        assert tried == [False]
    else:
        writer.finish()
        assert tried == [False, True]
    writer.close(pytest.fail)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (StoreError("disk full while writing x: free 7 bytes"), "^disk full while writing x: free 7 bytes$"),
        (MemoryError("no"), "the checkpoint of version 3 could not be written: MemoryError: no; the run goes on from"),
    ],
)
def test_an_error_is_raised_once_and_nothing_is_cleaned_up(tmp_path: Path, error: Exception, message: str) -> None:
    writer = CheckpointWriter(RunLog(tmp_path), HostBuffers())

    def fail() -> dict[str, Any]:
        raise error

    writer.begin(3, fail, lambda: pytest.fail("the checkpoint before must stay"))
    with pytest.raises(StoreError, match=message):
        writer.finish()
    writer.join()
    writer.begin(3, fail, lambda: None)
    told: list[str] = []
    writer.close(told.append)  # another error may be the reason to end
    assert len(told) == 1


def test_the_memory_of_a_copy_is_there_before_the_first_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, trainer = CheckpointWriter(RunLog(tmp_path), HostBuffers()), Trainer(trainer_config(), POLICY)
    assert trainer.snapshot_shapes() == {}  # moments are made by the first update
    trainer.update(rollouts())
    monkeypatch.setattr(checkpoint_writer, "fits_beside", lambda nbytes: nbytes <= trainer.checkpoint_bytes())
    go = threading.Event()
    writer.begin(0, lambda: {"bytes": int(go.wait(WAIT_S))}, lambda: None)
    writer.reserve(trainer)  # not while another checkpoint is written
    assert writer.version == 0 and writer.buffers.nbytes == 0  # nor does it wait for that one
    go.set()
    writer.finish()
    writer.reserve(trainer)
    writer.finish()
    waits = [one["reason"] for one in read_jsonl(tmp_path / "journal.jsonl")]
    assert waits == ["commit", "memory"]
    held = {key: buffer.data_ptr() for key, buffer in writer.buffers._buffers.items()}
    assert trainer.checkpoint_bytes() - 100 <= writer.buffers.nbytes <= trainer.checkpoint_bytes()  # counts of steps
    taken = trainer.snapshot(writer.buffers)
    assert taken is not None
    copied = {(file, name): one.data_ptr() for file, tensors in taken.files.items() for name, one in tensors.items()}
    assert copied == held
    monkeypatch.setattr(trainer, "snapshot_shapes", lambda: pytest.fail("once is enough"))
    writer.reserve(trainer)
    writer.close(pytest.fail)


def no_snapshot(trainer: Trainer, buffers: HostBuffers) -> None:
    raise OSError("bad memory")


def test_the_copy_is_the_policy_of_a_trainer_that_waits_in_host_memory(tmp_path: Path) -> None:
    writer, trainer = CheckpointWriter(RunLog(tmp_path), HostBuffers()), Trainer(trainer_config(), POLICY)
    own = trainer.policy()
    assert writer.policy(trainer).keys() == own.keys()
    trainer.sleep()
    assert writer.policy(trainer) == {}
    assert writer.copy(trainer) is not None
    taken = writer.policy(trainer)
    assert taken and all(torch.equal(taken[name], own[name]) for name in taken)
    trainer.update(rollouts())
    trainer.sleep()
    assert writer.policy(trainer) == {}  # the copy is of the version before
    assert writer.copy(trainer) is not None
    with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError, match="bad memory"):
        patch.setattr(Trainer, "snapshot", no_snapshot)
        writer.copy(trainer)
    assert writer.policy(trainer) == {}  # a part of the buffers may have been written
    other = Trainer(trainer_config(), POLICY)
    other.sleep()
    assert writer.policy(other) == {}
    writer.close(pytest.fail)


def test_memory_that_is_not_there_is_no_error_before_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, trainer = CheckpointWriter(RunLog(tmp_path), HostBuffers()), Trainer(trainer_config(), POLICY)
    trainer.update(rollouts())

    def fail(shapes: object) -> None:
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr(writer.buffers, "reserve", fail)
    writer.reserve(trainer)
    writer.close(pytest.fail)


def test_half_of_the_free_memory_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class Memory:
        available = 100

    monkeypatch.setattr("stalewise.orchestrator.checkpoint_writer.psutil.virtual_memory", Memory)
    assert fits_beside(50) and not fits_beside(51)


def config(runs: Path, **sections: Any) -> RunConfig:
    record = {
        "runs": str(runs),
        "schedule": {"kind": "staged", "updates": 4, "stages": 2},
        "batch": {"prompts": 4, "group_size": 4},
        "sampler": {"max_new_tokens": 6, "rollouts_per_shard": 16},
        "evaluation": {"prompts": 8, "samples": 1},
        "model": {"check": "off"},
    }
    return make_config({**record, **sections})


class Held(NullCallback):
    """Holds each checkpoint in the background back until the run has sampled the next stage, or ended its last."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.sampled, self.held, self.learned = [threading.Event() for _ in range(9)], 0, 0  # by stages learned before
        real = checkpoints.commit_directory

        def commit_directory(temporary: Path, final: Path) -> None:
            if threading.current_thread().name.startswith("checkpoint"):
                self.held += 1
                assert self.sampled[self.held].wait(WAIT_S), "the run waits for the checkpoint before it samples"
            real(temporary, final)

        patch.setattr(checkpoints, "commit_directory", commit_directory)

    def begin(self, what: str, total: int) -> None:
        self.learned += what == "learn"

    def advance(self, amount: int, note: str = "") -> None:
        if "tokens" in note:
            self.sampled[self.learned].set()


def test_the_next_stage_is_sampled_while_the_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, loads = Held(monkeypatch), list[str]()
    real = module.make_sampler

    def counting(*arguments: Any, **options: Any) -> Any:
        sampler = real(*arguments, **options)
        load = sampler.load
        monkeypatch.setattr(sampler, "load", lambda path: [loads.append(path.name), load(path)])
        return sampler

    monkeypatch.setattr(module, "make_sampler", counting)
    plain = config(tmp_path / "plain")
    run(config(tmp_path / "held"), held)
    assert held.held == 2
    assert set(loads) == {"v000000"}  # the other versions were taken from the trainer
    monkeypatch.setattr(checkpoint_writer, "fits_beside", lambda nbytes: False)
    run(plain)
    for settings in (plain, config(tmp_path / "held")):
        assert versions(settings.directory) == [2, 4]
    shards = [sorted(settings.directory.rglob("shard-*.parquet")) for settings in (plain, config(tmp_path / "held"))]
    assert [path.read_bytes() for path in shards[0]] == [path.read_bytes() for path in shards[1]]


class HeldLonger(NullCallback):
    """Holds each checkpoint back until the run has taken an update after it, or its last one."""

    def __init__(self, patch: pytest.MonkeyPatch, settings: RunConfig) -> None:
        self.settings, self.phase, self.learned, self.told = settings, "", 0, list[str]()
        real = checkpoints.commit_directory

        def commit_directory(temporary: Path, final: Path) -> None:
            self.wait_for(int(final.name[1:]))
            real(temporary, final)

        patch.setattr(checkpoints, "commit_directory", commit_directory)

    def wait_for(self, version: int) -> None:
        """Return when this version may be committed; at once for the first."""
        end = time.monotonic() + WAIT_S
        while version > 0 and self.learned < min(version + 1, self.settings.schedule.updates):
            assert time.monotonic() < end, "the run waits for the checkpoint before it learns"
            time.sleep(0.005)

    def begin(self, what: str, total: int) -> None:
        self.phase = what

    def advance(self, amount: int, note: str = "") -> None:
        if self.phase == "learn" and amount:
            made, batches = versions(self.settings.directory), batch_directories(self.settings.directory / "rollouts")
            self.told.append(f"learned {self.learned + amount}, written {made[-1]}, committed {len(batches)}")
            self.learned += amount


SYNCHRONOUS = {"schedule": {"kind": "synchronous", "updates": 6, "updates_per_generation": 2}}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """Such a run that nothing held up. How often checkpoints are written, and how many are kept, changes no weight."""
    settings = config(tmp_path_factory.mktemp("plain"), **SYNCHRONOUS)
    run(settings)
    return settings


def test_a_run_learns_from_rollouts_before_the_checkpoint_of_their_policy_is_committed(
    plain: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(tmp_path / "held", **SYNCHRONOUS)
    written, real = list[tuple[str, int]](), store.write_shard

    def counting(directory: Path, index: int, *arguments: Any, **options: Any) -> Any:
        written.append((directory.name, index))
        return real(directory, index, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(store, "write_shard", counting)
        run(settings, held := HeldLonger(patch, settings))
    assert len(written) == 6 and len(set(written)) == 6  # none was sampled twice
    assert held.told[2] == "learned 3, written 0, committed 1"  # from rollouts of version 2
    both = [one.directory for one in (plain, settings)]
    assert [path.name for path in batch_directories(both[1] / "rollouts")] == [
        "g000000-v000000",
        "g000001-v000002",
        "g000002-v000004",
    ]
    assert not list(both[1].rglob(".*tmp-*"))
    for name in ("checkpoints/v000006/model.safetensors", "rollouts/g000001-v000002/shard-00001.parquet"):
        assert (both[0] / name).read_bytes() == (both[1] / name).read_bytes()
    for one in batch_directories(both[0] / "rollouts"):
        batches = [open_batch(directory / "rollouts" / one.name) for directory in both]
        origins = [[shard.extra for shard in batch.manifest.shards] for batch in batches]
        assert origins[0] == origins[1] and {"policy", "seed", "worker"} <= origins[0][0].keys()
        assert read_shard_manifest(batches[1].directory, 1) == batches[1].manifest.shards[1]


@pytest.mark.parametrize("schedule", [SYNCHRONOUS["schedule"], {"updates": 6, "end": "spent", "spent_ess": 0.9999999}])
def test_a_run_flushes_nothing_while_a_checkpoint_is_written(
    schedule: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A flush waits until what else is being written to the disk is there: on a slow disk, for gigabytes.
    settings = config(tmp_path, schedule=schedule)
    writers, flushed, real = list[CheckpointWriter](), list[str](), os.fsync

    class Known(CheckpointWriter):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            writers.append(self)

    def fsync(descriptor: int) -> None:
        if threading.current_thread() is threading.main_thread() and writers and writers[0].is_writing:
            flushed.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real(descriptor)

    monkeypatch.setattr(module, "CheckpointWriter", Known)
    monkeypatch.setattr(os, "fsync", fsync)
    run(settings, held := HeldLonger(monkeypatch, settings))
    assert held.learned == 6 and flushed == []


def test_records_are_flushed_before_the_checkpoint_that_they_led_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, real, found = config(tmp_path, **SYNCHRONOUS), checkpoints.commit_directory, list[int]()

    def commit_directory(temporary: Path, final: Path) -> None:
        if version := int(final.name[1:]):
            ends = committed_ends(settings.directory)
            lines = (settings.directory / "metrics.jsonl").read_bytes().splitlines(keepends=True)
            assert ends["metrics.jsonl"][0] >= sum(map(len, lines[:version]))
            assert {"journal.jsonl", "ledger/updates.jsonl"} <= ends.keys()
            found.append(version)
        real(temporary, final)

    monkeypatch.setattr(checkpoints, "commit_directory", commit_directory)
    run(settings)
    assert found == [2, 4, 6]


def test_a_batch_that_gets_its_name_between_two_of_its_updates_is_found_again(
    plain: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(tmp_path / "held", **SYNCHRONOUS, checkpoints={"every": 1})
    with monkeypatch.context() as patch:
        run(settings, held := HeldLonger(patch, settings))
    assert held.told[2].endswith("committed 1") and held.told[3].endswith("committed 2")
    final = [one.directory / "checkpoints" / "v000006" / "model.safetensors" for one in (plain, settings)]
    assert final[0].read_bytes() == final[1].read_bytes()


def test_rollouts_that_wait_for_a_checkpoint_which_fails_are_made_again(
    plain: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(tmp_path / "full", **SYNCHRONOUS)
    with monkeypatch.context() as patch:
        held = HeldLonger(patch, settings)
        real = checkpoints.commit_directory

        def full(temporary: Path, final: Path) -> None:
            real(temporary, final) if final.name == "v000000" else held.wait_for(2)
            if final.name != "v000000":
                raise StoreError(f"disk full while writing {final}: free 5 bytes; run the same command again")

        patch.setattr(checkpoints, "commit_directory", full)
        with pytest.raises(StoreError, match=r"^disk full while writing .*v000002"):
            run(settings, held)
    assert held.learned > 2 and versions(settings.directory) == [0]
    assert [path.name for path in batch_directories(settings.directory / "rollouts")] == ["g000000-v000000"]
    run(settings)
    final = [one.directory / "checkpoints" / "v000006" / "model.safetensors" for one in (settings, plain)]
    assert final[0].read_bytes() == final[1].read_bytes()
    assert not list(settings.directory.rglob(".*tmp-*"))


def test_rollouts_that_wait_are_kept_when_a_run_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = config(tmp_path, **SYNCHRONOUS)

    class Interrupted(HeldLonger):
        def advance(self, amount: int, note: str = "") -> None:
            super().advance(amount, note)
            if self.learned == 3:
                raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        run(settings, Interrupted(patch, settings))
    assert versions(settings.directory)[-1] == 2
    names = [path.name for path in batch_directories(settings.directory / "rollouts")]
    assert names == ["g000000-v000000", "g000001-v000002"] and not list(settings.directory.rglob(".*tmp-*"))


def test_a_later_batch_from_which_nothing_can_be_learned_does_not_end_a_run_whose_checkpoint_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, told = config(tmp_path, **SYNCHRONOUS), list[str]()
    problem = "none of 8 groups has variance; the mean reward is 0.000"
    monkeypatch.setattr(rollout_source, "batch_problem", lambda batch: problem if batch.manifest.version == 2 else "")
    held = HeldLonger(monkeypatch, settings)
    monkeypatch.setattr(held, "log", told.append)
    run(settings, held)
    assert held.told[2] == "learned 3, written 0, committed 1"
    assert f"g000001-v000002: {problem}" in told and versions(settings.directory)[-1] == 6


def test_rollouts_that_wait_replace_what_a_worker_of_a_withdrawn_order_left(
    plain: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(tmp_path / "held", **SYNCHRONOUS)
    batches = [one.directory / "rollouts" / "g000001-v000002" for one in (plain, settings)]

    class Late(HeldLonger):
        def advance(self, amount: int, note: str = "") -> None:
            if self.phase == "learn" and amount and self.learned == 2:
                assert not batches[1].exists()
                shutil.copytree(batches[0].with_name("g000000-v000000"), batches[1])
                (batches[1] / "manifest.json").unlink()
            super().advance(amount, note)

    with monkeypatch.context() as patch:
        run(settings, Late(patch, settings))
    files = [{path.name: path.read_bytes() for path in batch.glob("*.parquet")} for batch in batches]
    assert files[0] == files[1] and open_batch(batches[1]).manifest.version == 2
    assert not list(settings.directory.rglob(".*tmp-*"))


def test_a_temporary_directory_that_cannot_be_removed_does_not_end_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, refused = config(tmp_path, **SYNCHRONOUS), list[Path]()

    def rmdir(path: Path) -> None:
        refused.append(path)
        raise OSError(errno.ENOTEMPTY, "Directory not empty")  # a network file system keeps names of open files

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rmdir", rmdir)
        run(settings, HeldLonger(patch, settings))
    assert refused and versions(settings.directory)[-1] == 6


@pytest.mark.parametrize("place", ["rollouts", "work", "rewards", "work/x"])
def test_what_a_killed_run_leaves_is_removed_whatever_its_directory_is_called(tmp_path: Path, place: str) -> None:
    settings = config((tmp_path / place).parent, name=Path(place).name, schedule={"kind": "synchronous", "updates": 1})
    run(settings)
    left = [
        settings.directory / "rollouts" / ".g000001-v000002.tmp-0123456789ab",
        settings.directory / "checkpoints" / ".v000002.tmp-0123456789ab",
    ]
    for one in left:
        one.mkdir()
    run(settings)
    assert not [one for one in left if one.exists()]


def test_an_evaluation_is_recorded_after_the_checkpoint_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, real, log = config(tmp_path), checkpoints.commit_directory, RunLog.log_evaluation
    there: list[bool] = []

    def slow(temporary: Path, final: Path) -> None:
        time.sleep(0.5 if threading.current_thread().name.startswith("checkpoint") else 0.0)
        real(temporary, final)

    def logged(self: RunLog, record: dict[str, Any]) -> None:
        there.append(record["version"] in versions(settings.directory))
        log(self, record)

    monkeypatch.setattr(checkpoints, "commit_directory", slow)
    monkeypatch.setattr(RunLog, "log_evaluation", logged)
    run(settings)
    assert there == [True, True]


def test_a_full_disk_in_the_background_is_one_message_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, real = config(tmp_path), checkpoints.commit_directory

    def full(temporary: Path, final: Path) -> None:
        if final.name == "v000002":
            raise StoreError(f"disk full while writing {final}: free 5 bytes; run the same command again")
        real(temporary, final)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "commit_directory", full)
        with pytest.raises(StoreError, match=r"^disk full while writing .*v000002: free 5 bytes; run the same command"):
            run(settings)
    assert versions(settings.directory) == [0]
    names = [directory.name for directory in batch_directories(settings.directory / "rollouts")]
    assert names == ["g000000-v000000"] and not list(settings.directory.glob("checkpoints/.*"))
    run(settings)
    whole = config(tmp_path / "whole")
    run(whole)
    final = [one.directory / "checkpoints" / "v000004" / "model.safetensors" for one in (settings, whole)]
    assert final[0].read_bytes() == final[1].read_bytes()


@pytest.mark.parametrize("keep", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_removals_may_be_slow_and_the_room_for_one_checkpoint_more(
    plain: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: int
) -> None:
    settings = config(tmp_path / "slow", **SYNCHRONOUS, checkpoints={"every": 1, "keep": keep})
    real, remove = checkpoints.commit_directory, shutil.rmtree
    place, most = settings.directory / "checkpoints", 3  # two are kept at the most, and one is being written

    def slow(path: Path, **options: Any) -> None:
        time.sleep(0.3 if path.parent == place and threading.current_thread().name.startswith("removal") else 0.0)
        remove(path, **options)

    def full(temporary: Path, final: Path) -> None:  # a quota, of which the disk says nothing
        with explain_write_errors(final, 7):
            if final.parent == place and len(list(place.iterdir())) > most:
                raise OSError(errno.EDQUOT, "Disk quota exceeded")
        real(temporary, final)

    monkeypatch.setattr(checkpoints.shutil, "rmtree", slow)
    monkeypatch.setattr(checkpoints, "commit_directory", full)
    run(settings)
    assert versions(settings.directory) == [5, 6][-keep:]
    final = [one.directory / "checkpoints" / "v000006" / "model.safetensors" for one in (plain, settings)]
    assert final[0].read_bytes() == final[1].read_bytes()
    assert [thread for thread in threading.enumerate() if thread.name.startswith(("checkpoint", "removal"))] == []


def test_every_commit_is_in_the_journal_and_no_time_counts_twice(tmp_path: Path) -> None:
    settings = config(tmp_path, schedule={"kind": "synchronous", "updates": 4, "updates_per_generation": 1})
    run(settings)
    journal = read_jsonl(settings.directory / "journal.jsonl")
    commits = [record["version"] for record in journal if record.get("reason") == "commit"]
    assert commits == [1, 2, 3, 4]
    begun = [record["time"] - record["seconds"] for record in journal]
    ends = [record["time"] for record in journal]
    assert all(start >= end - 1e-3 for start, end in zip(begun[1:], ends, strict=False))


class Inodes(NullCallback):
    """Notes the inode of the newest checkpoint's weights before each phase."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.found = directory, dict[int, int]()

    def begin(self, what: str, total: int) -> None:
        for version in versions(self.directory):
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                weights = self.directory / f"checkpoints/v{version:06d}/model.safetensors"
                self.found[version] = weights.stat().st_ino


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells who reads a file")
def test_a_run_writes_its_checkpoints_over_those_that_are_no_longer_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"schedule": {"kind": "synchronous", "updates": 10, "updates_per_generation": 1}}
    plain, over = config(tmp_path / "plain", **settings), config(tmp_path / "over", **settings)
    monkeypatch.setattr(checkpoints, "_is_local", lambda directory: False)
    run(plain)
    monkeypatch.setattr(checkpoints, "_is_local", lambda directory: True)
    inodes = Inodes(over.directory)
    run(over, inodes)
    assert len(inodes.found) > 5
    assert len(set(list(inodes.found.values())[2:])) <= 3  # kept, being written, spare
    weights = [settings.directory / "checkpoints/v000010/model.safetensors" for settings in (plain, over)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    names = [{path.name for path in (one.directory / "checkpoints").iterdir()} for one in (plain, over)]
    assert names[0] == names[1] and "v000010" in names[0]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells who reads a file")
def test_nothing_is_kept_for_a_checkpoint_that_does_not_overwrite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "_is_local", lambda directory: True)
    monkeypatch.setattr(checkpoint_writer, "fits_beside", lambda nbytes: False)  # so nothing has a copy in memory
    schedule = {"kind": "synchronous", "updates": 4, "updates_per_generation": 1}
    settings, found = config(tmp_path, schedule=schedule), list[str]()

    class Names(NullCallback):
        def begin(self, what: str, total: int) -> None:
            found.extend(path.name for path in (settings.directory / "checkpoints").iterdir())

    run(settings, Names())
    assert {"v000003", "v000004"} <= set(found)
    assert [name for name in found if name.startswith(".")] == []


def test_nothing_is_kept_for_the_next_checkpoint_where_the_disk_has_little_room(tmp_path: Path) -> None:
    writer, old = CheckpointWriter(RunLog(tmp_path), HostBuffers()), tmp_path / ".v000001.tmp-0123456789ab"
    assert writer.spare_for(1) is writer.spare
    old.mkdir()
    writer.spare._directory = old
    assert writer.spare_for(shutil.disk_usage(tmp_path).total) is None
    assert not writer.spare and not old.exists()
    writer.close(pytest.fail)


def test_a_full_disk_gets_the_space_of_what_was_kept(tmp_path: Path) -> None:
    writer, old, tried = CheckpointWriter(RunLog(tmp_path), HostBuffers()), tmp_path / "old", list[bool]()
    old.mkdir()
    writer.spare._directory = old

    def commit() -> dict[str, Any]:
        tried.append(old.exists())
        with explain_write_errors(tmp_path, 0):
            if old.exists():
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return {}

    writer.begin(1, commit, None)
    writer.finish()
    assert tried == [True, False]
    writer.close(pytest.fail)
