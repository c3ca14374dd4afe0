"""Generation beside training: a second process generates while the orchestrator trains.

The two share only the run directory. Version (g − lag)·µ makes batch g as soon as that version is committed. So the
generator is at most `lag` batches ahead, and results do not depend on the speed of either side: a run in which either
is killed ends in the same weights. `journal.jsonl` and `journal-generator.jsonl` have the times that each side waited.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from stalewise.config import make_config
from stalewise.config.run_directory import read_config
from stalewise.distributed import child_environment
from stalewise.errors import EngineError, StalewiseError, StoreError
from stalewise.models import find_device
from stalewise.orchestrator.orchestrator import Orchestrator
from stalewise.orchestrator.rollout_source import RolloutSource
from stalewise.planning.memory import device_memory, estimate, generator_elsewhere
from stalewise.rollout.engines.embedded import HFSampler
from stalewise.staleness.schedule import Schedule
from stalewise.store import atomic, checkpoints, committed_shards
from stalewise.tasks.base import child_command
from stalewise.types import NullCallback

JOURNAL = "journal-generator.jsonl"
LOG = "generator.log"
POLL_S = 0.02
STOP_S = 10.0  # time for the generator to end
LOCK_S = 60.0  # time for the generator of a killed process to end


class BackgroundGeneration(RolloutSource):
    """Generates in a process of its own. Evaluations stay in this process, since they never overlap with training."""

    process: subprocess.Popen[bytes] | None = None

    def start(self, run: Orchestrator) -> None:
        """Start the generator, if anything is left to generate."""
        if not batches_to_make(run):
            return
        self.log_path = run.directory / LOG
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                child_command("stalewise.orchestrator.pipelined", str(run.directory)),
                stdin=subprocess.PIPE,  # closed when this process ends, which ends the generator
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C goes to this process, which then ends the other
                env=child_environment(),
            )

    def stop(self) -> None:
        """End the generator."""
        if self.process is None:
            return
        try:
            self.process.communicate(timeout=STOP_S)  # closes its stdin
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process = None

    def batches_needed(self, schedule: Schedule, version: int) -> range:
        """The batch that this version learns from; all others are left to the generator."""
        current = schedule.at(version).generation_batch
        return range(current, current + 1)

    def obtain(self, run: Orchestrator, generation_batch: int) -> None:
        """Wait until the generator has committed the batch."""
        directory, batch = run.batch_directory(generation_batch), run.config.batch
        total = len(run.schedule.prompts_of(generation_batch, batch.prompts)) * batch.group_size
        run.begin_phase("wait", total)
        shown = 0
        with run.run_log.timed("wait", generation_batch=generation_batch):
            run.writer.join()  # the generator may be waiting for it; and a failure to write it must end the run
            while not run.has_batch(generation_batch):
                if self.process is not None and self.process.poll() is not None:
                    lines = self.log_path.read_text(errors="replace").strip().splitlines()
                    reason = lines[-1].removeprefix("error: ") if lines else f"exit status {self.process.returncode}"
                    raise EngineError(
                        f"the generating process ended: {reason} (its log: {self.log_path}); committed rollouts are "
                        "kept: run the same command again"
                    )
                made = sum(shard.rows for shard in committed_shards(directory))
                run.callback.advance(made - shown)
                shown = made
                time.sleep(POLL_S)
        run.callback.advance(total - shown)


def generate_all(directory: Path) -> None:
    """The generator: make every batch as soon as its policy is committed, until the last one is made."""
    _acquire(atomic.RunLock(directory / "ledger"))  # dropped when this process ends
    config = run_config = read_config(directory)
    if (device := config.schedule.generator_device) is not None:
        record = config.model_dump(mode="json")
        config = make_config({**record, "model": {**record["model"], "device": device}}, source="generator")
    with contextlib.closing(Orchestrator(config, NullCallback(), journal=JOURNAL)) as orchestrator:
        engine = getattr(orchestrator.sampler, "own", orchestrator.sampler)
        device = find_device(run_config.model.device, "model.device")  # found, not picked: it may not be this process's
        beside = device.type == "cuda" and not generator_elsewhere(run_config.schedule, device)
        needed = estimate(run_config, orchestrator.newest_policy()) if beside else None
        if isinstance(engine, HFSampler) and needed is not None:
            engine.most_bytes = max(needed.left_for_slots(device_memory(device)), 2 * sum(needed.sampling.values()))
        while batches_to_make(orchestrator):
            with orchestrator.run_log.timed("wait"):
                while (missing := orchestrator.missing_batch(checkpoints.versions(directory)[-1])) is None:
                    time.sleep(POLL_S)
            orchestrator.generate(missing)


def batches_to_make(run: Orchestrator) -> list[int]:
    """Generation batches that training still needs and that are not committed."""
    version, schedule = checkpoints.versions(run.directory)[-1], run.schedule
    if version == schedule.updates:
        return []
    coming = range(schedule.at(version).generation_batch, schedule.generation_batches)
    return [g for g in coming if not run.has_batch(g)]


def _acquire(lock: atomic.RunLock) -> None:
    """Acquire the lock of the generator; the generator of a killed process may still have to end."""
    until = time.monotonic() + LOCK_S
    while time.monotonic() < until:
        with contextlib.suppress(StoreError):
            return lock.acquire()
        time.sleep(POLL_S)
    lock.acquire()


def _end_with_parent() -> None:
    os.read(sys.stdin.fileno(), 1)  # returns when the parent closes its end, or has ended
    os._exit(0)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        generate_all(Path(sys.argv[1]))
    except StalewiseError as error:
        sys.exit(f"error: {' '.join(str(error).split())}")
