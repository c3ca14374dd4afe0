"""Runs jobs in a few worker processes: in order, each after the jobs it needs, skipping those with a result."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from experiments.lab.definition import Job

from stalewise.store.atomic import write_json_atomic

CHECKOUT = Path(__file__).parents[2]
HEAVY = ("checkpoints", "rollouts", "ledger", "bias")  # parts of a run directory to delete once its numbers are kept


def kept_path(out: Path, key: str) -> Path:
    """Result of a job; the file exists once the job is done."""
    return out / "kept" / f"{key}.json"


def failed_path(out: Path, key: str) -> Path:
    """Why a job failed. A result from a later attempt takes precedence."""
    return out / "failed" / f"{key}.json"


def again_path(out: Path, key: str) -> Path:
    """Marks a job that must run again although it has a result."""
    return out / "again" / key


def warm_path(out: Path, key: str) -> Path:
    """Policy made by a warm start."""
    return out / "warm" / key


def output_for_others(out: Path, job: Job) -> Path | None:
    """Directory that dependent jobs read beside the result; None where there is none."""
    if job.kind == "warm":
        return warm_path(out, job.key)
    return out / "runs" / job.key / "checkpoints" if job.kind in ("train", "learn") else None


class JobPool:
    """Runs jobs in parallel. A failure is recorded and does not stop the others."""

    def __init__(
        self,
        jobs: Sequence[Job],
        out: Path,
        *,
        workers: int,
        deadline_s: float | None = None,
        keep_runs: bool = False,
        log: Callable[[str], object] = lambda text: None,
    ) -> None:
        self.jobs = {job.key: job for job in jobs}
        self.out, self.workers, self.keep_runs, self.log = out, workers, keep_runs, log
        self.until = None if deadline_s is None else time.monotonic() + deadline_s
        self.lock = threading.Condition()
        self.failed: dict[str, str] = {}
        needed_again = self._needed_again()
        self.waiting = [key for key in self.jobs if not kept_path(out, key).is_file() or key in needed_again]
        self.total = len(self.waiting)
        self.running: set[str] = set()
        self.processes: set[subprocess.Popen[str]] = set()

    def _needed_again(self) -> set[str]:
        """Done jobs whose rollouts or policies were deleted but are needed by a job that is not done.

        The old result stays until the run is repeated, since the deadline may come first. A mark on disk prevents a
        half-finished repeat from counting as a complete run.
        """
        pending = {key for key in self.jobs if not kept_path(self.out, key).is_file()}
        for key in pending:
            for need in self.jobs[key].needs:
                output = output_for_others(self.out, self.jobs[need])
                if output is not None and need not in pending and not output.is_dir():
                    shutil.rmtree(self.out / "runs" / need, ignore_errors=True)
                    again_path(self.out, need).parent.mkdir(parents=True, exist_ok=True)
                    again_path(self.out, need).touch()
        return {key for key in self.jobs if again_path(self.out, key).is_file()}

    def run(self) -> dict[str, str]:
        """Run jobs until the deadline; returns the reasons of failed jobs by key."""
        threads = [
            threading.Thread(target=self._work, args=(number,)) for number in range(min(self.workers, self.total))
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.5)
        except BaseException:
            with self.lock:
                self.waiting.clear()
                for process in self.processes:
                    process.kill()
            raise
        self._strip(self.jobs)  # also what a killed process left
        for key, problem in self.failed.items():
            write_json_atomic(failed_path(self.out, key), {"problem": problem})
        return self.failed

    def _next(self) -> Job | None:
        """The first job whose dependencies are done; None if nothing is left to start."""
        with self.lock:
            while True:
                if not self.waiting or (self.until is not None and time.monotonic() > self.until):
                    return None
                for key in list(self.waiting):
                    job = self.jobs[key]
                    if broken := next((need for need in job.needs if need in self.failed), None):
                        self.waiting.remove(key)
                        self.failed[key] = f"needs {broken}, which failed: {self.failed[broken]}"
                    elif not any(need in self.waiting or need in self.running for need in job.needs):
                        self.waiting.remove(key)
                        self.running.add(key)
                        return job
                if not self.running:
                    return None
                self.lock.wait(1.0)

    def _work(self, number: int) -> None:
        process: subprocess.Popen[str] | None = None
        try:
            while (job := self._next()) is not None:
                if process is None or process.poll() is not None:
                    process = self._start(number)
                problem = self._ask(process, job)
                with self.lock:
                    self.running.discard(job.key)
                    if problem:
                        self.failed[job.key] = problem
                    else:
                        again_path(self.out, job.key).unlink(missing_ok=True)
                    self._strip((job.key, *job.needs))
                    done = self.total - len(self.waiting) - len(self.running)
                    self.log(
                        f"{done} of {self.total}: {job.kind} {job.key}" + (f" failed: {problem}" if problem else "")
                    )
                    self.lock.notify_all()
        finally:
            if process is not None:
                self._end(process)

    def _start(self, number: int) -> subprocess.Popen[str]:
        log = self.out / "logs" / f"worker-{number}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "experiments.lab.worker", str(self.out)]
        environment = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ}
        # Workers import this checkout whatever the working directory is.
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(CHECKOUT), os.environ.get("PYTHONPATH")]))
        with log.open("ab") as file:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env=environment,
                start_new_session=True,  # Ctrl-C reaches this process only, which ends the workers
            )
        self.processes.add(process)
        return process

    def _ask(self, process: subprocess.Popen[str], job: Job) -> str:
        """Send a job to a worker; returns why it failed, or an empty string."""
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(job.record()) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except OSError:
            answer = ""
        if not answer:
            process.wait()
            return f"its process exited with status {process.returncode}: see {self.out / 'logs'}"
        return json.loads(answer)["problem"]

    def _end(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
        self.processes.discard(process)

    def _strip(self, keys: Iterable[str]) -> None:
        """Delete weights and rollouts that no job needs any more (a grid would fill a disk). Failed runs can resume."""
        if self.keep_runs:
            return
        unfinished = {*self.waiting, *self.running}
        needed = {need for key in unfinished for need in self.jobs[key].needs}
        for key in {*keys} - needed - unfinished - set(self.failed):
            for name in HEAVY:
                shutil.rmtree(self.out / "runs" / key / name, ignore_errors=True)
