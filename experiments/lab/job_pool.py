"""Runs jobs in a few worker processes: in order, each after the policies it needs, skipping those with a result."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from experiments.lab.definition import Job

from stalewise.store.atomic import write_json_atomic

CHECKOUT = Path(__file__).parents[2]


def kept_path(out: Path, key: str) -> Path:
    """Result of a job; the file exists once the job is done."""
    return out / "kept" / f"{key}.json"


def failed_path(out: Path, key: str) -> Path:
    """Why a job failed. A result from a later attempt takes precedence."""
    return out / "failed" / f"{key}.json"


def policy_path(out: Path, key: str) -> Path:
    """A policy that other runs sample with."""
    return out / "policies" / key


def is_done(out: Path, job: Job) -> bool:
    """Whether a job has a result, and a policy where others need it."""
    return kept_path(out, job.key).is_file() and (job.kind != "policy" or policy_path(out, job.key).is_dir())


class JobPool:
    """Runs jobs in parallel. A failure is recorded and does not stop the others."""

    def __init__(
        self,
        plan: Callable[[], Sequence[Job]],
        out: Path,
        *,
        workers: int,
        deadline_s: float | None = None,
        keep_runs: bool = False,
        log: Callable[[str], object] = lambda text: None,
    ) -> None:
        """`plan` gives the jobs that are known now, in order; it is asked again after each job."""
        self.plan, self.out, self.workers, self.keep_runs, self.log = plan, out, workers, keep_runs, log
        self.until = None if deadline_s is None else time.monotonic() + deadline_s
        self.lock = threading.Condition()
        self.failed: dict[str, str] = {}
        self.running: set[str] = set()
        self.processes: set[subprocess.Popen[str]] = set()
        self.is_stopped = False
        self.refresh()

    def refresh(self) -> None:
        """Ask the plan again: jobs may have become known, and some are no longer wanted."""
        self.jobs = {job.key: job for job in self.plan()}
        taken = {*self.failed, *self.running}
        self.waiting = [key for key, job in self.jobs.items() if key not in taken and not is_done(self.out, job)]

    def run(self) -> dict[str, str]:
        """Run jobs until the deadline; returns the reasons of failed jobs by key."""
        threads = [threading.Thread(target=self._work, args=(number,)) for number in range(self.workers)]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.5)
        except BaseException:
            with self.lock:
                self.is_stopped = True
                for process in self.processes:
                    process.kill()
            raise
        for key, problem in self.failed.items():
            write_json_atomic(failed_path(self.out, key), {"problem": problem})
        return self.failed

    def _next(self) -> Job | None:
        """The first job whose dependencies are done; None if nothing is left to start."""
        with self.lock:
            while True:
                late = self.until is not None and time.monotonic() > self.until
                if self.is_stopped or late:
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
                self.lock.wait(1.0)  # a job that ends may make others known

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
                    elif (
                        not self.keep_runs
                    ):  # weights and rollouts of a grid would fill a disk; a failed run can resume
                        shutil.rmtree(self.out / "runs" / job.key, ignore_errors=True)
                    self.refresh()
                    done = len(self.jobs) - len(self.waiting) - len(self.running)
                    self.log(
                        f"{done} of {len(self.jobs)} known: {job.kind} {job.key}"
                        + (f" failed: {problem}" if problem else "")
                    )
                    self.lock.notify_all()
        finally:
            if process is not None:
                self._end(process)

    def _start(self, number: int) -> subprocess.Popen[str]:
        log = self.out / "logs" / f"worker-{number}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "experiments.lab.worker", str(self.out), str(self.workers)]
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
