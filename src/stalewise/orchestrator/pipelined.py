"""Generation and learning at the same time: the conductor learns, and a process of its own generates.

They meet in the run directory alone. Which version makes which batch is the schedule's: batch g is made by version
(g − lag)·µ, as soon as that is there, and learned from when its turn comes. So the generator is never more than `lag`
batches ahead (it waits for the learner), the learner waits for it where it is slower, and the order of things on two
fast machines or one slow one is the same: a run that is killed, on either side, ends in the same weights. How long each
side waited is in its journal, `journal.jsonl` and `journal-generator.jsonl`.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from stalewise.config import RunConfig, make_config
from stalewise.config.run_directory import read_config
from stalewise.distributed import environment_of_a_child
from stalewise.errors import EngineError, StalewiseError, StoreError
from stalewise.orchestrator.orchestrator import Orchestrator
from stalewise.staleness.collapse import Judgement, Trouble
from stalewise.store import committed_shards, is_committed
from stalewise.store.atomic import RunLock
from stalewise.store.checkpoints import versions
from stalewise.types import NullCallback

JOURNAL = "journal-generator.jsonl"
LOG = "generator.log"
POLL_S = 0.02
STOP_S = 10.0  # that the generator has to end in
LOCK_S = 60.0  # that the generator of a sitting which was killed has to end in


class PipelinedOrchestrator(Orchestrator):
    """The learner's side. It evaluates, too: that is done at versions at which the learner stands still anyway."""

    process: subprocess.Popen[bytes] | None = None

    def prepare(self) -> None:
        """Also start the generator, where there is anything left to generate."""
        super().prepare()
        self._start()

    def close(self) -> None:
        """Also end the generator."""
        self._stop()
        super().close()

    def missing_batch(self, version: int) -> int | None:
        """The batch that this version learns from, where it is not there: all others are the generator's business."""
        current = self.schedule.at(version).generation_batch
        return None if is_committed(self.batch_directory(current)) else current

    def obtain(self, generation_batch: int) -> None:
        """Wait until the generator has made it."""
        directory = self.batch_directory(generation_batch)
        prompts = len(self.schedule.prompts_of(generation_batch, self.config.batch.prompts))
        total = prompts * self.config.batch.group_size
        self._begin("wait", total)
        seen = 0
        with self.records.timed("wait", generation_batch=generation_batch):
            while not is_committed(directory):
                self._check()
                made = sum(shard.rows for shard in committed_shards(directory))
                self.callback.advance(made - seen)
                seen = made
                time.sleep(POLL_S)
        self.callback.advance(total - seen)

    def _take_back(self, trouble: Trouble, judgement: Judgement) -> None:
        self._stop()  # it must not write to batches that are moved away
        super()._take_back(trouble, judgement)
        self._start()

    def _start(self) -> None:
        if not unmade(self):
            return
        with (self.directory / LOG).open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "stalewise.orchestrator.pipelined", str(self.directory)],
                stdin=subprocess.PIPE,  # its end tells the generator that nobody needs it any more
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for this side, which then ends the other
                env=environment_of_a_child(),
            )

    def _check(self) -> None:
        if self.process is None or self.process.poll() is None:
            return
        said = (self.directory / LOG).read_text(errors="replace").strip().splitlines()
        reason = said[-1].removeprefix("error: ") if said else f"exit status {self.process.returncode}"
        raise EngineError(
            f"the generating process ended: {reason} (its log: {self.directory / LOG}); what is committed is kept: run "
            "the same command again"
        )

    def _stop(self) -> None:
        if self.process is None:
            return
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process = None


def generate_all(directory: Path) -> None:
    """The generator's side: make every batch as soon as its policy is there, until the last one is made."""
    with _only_generator(directory):
        orchestrator = Orchestrator(generator_config(read_config(directory)), NullCallback(), JOURNAL)
        try:
            while unmade(orchestrator):
                with orchestrator.records.timed("wait"):
                    while (missing := orchestrator.missing_batch(versions(directory)[-1])) is None:
                        time.sleep(POLL_S)
                orchestrator.generate(missing)
        finally:
            orchestrator.close()


def unmade(orchestrator: Orchestrator) -> list[int]:
    """Generation batches that are still to be learned from and are not there."""
    version, schedule = versions(orchestrator.directory)[-1], orchestrator.schedule
    if version == schedule.updates:
        return []
    to_come = range(schedule.at(version).generation_batch, schedule.generation_batches)
    return [g for g in to_come if not is_committed(orchestrator.batch_directory(g))]


def generator_config(config: RunConfig) -> RunConfig:
    """The config for the process that generates: on its own device, where it has one."""
    device = config.schedule.generator_device
    if device is None:
        return config
    record = config.model_dump(mode="json")
    record["model"]["device"] = device
    return make_config(record, source="generator")


@contextlib.contextmanager
def _only_generator(directory: Path) -> Iterator[None]:
    """One generator at a time: that of a sitting which was killed may still be ending."""
    lock = RunLock(directory / "ledger")
    until = time.monotonic() + LOCK_S
    while True:
        try:
            lock.acquire()
            break
        except StoreError:
            if time.monotonic() > until:
                raise
            time.sleep(POLL_S)
    try:
        yield
    finally:
        lock.release()


def _end_with_parent() -> None:
    os.read(sys.stdin.fileno(), 1)  # returns when the parent closes its end, or is no more
    os._exit(0)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        generate_all(Path(sys.argv[1]))
    except StalewiseError as error:
        sys.exit(f"error: {' '.join(str(error).split())}")
