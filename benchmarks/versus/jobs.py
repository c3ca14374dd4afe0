"""Measurements as processes, one after the other, and the file their results are merged into.

A process of its own gives every measurement clean memory peaks and a fresh CUDA context; one that fails (out of memory,
say) leaves its last words in the file and the others go on.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

LAST_WORDS = 30  # lines of a failed process that are kept
PACKAGES = ("stalewise", "torch", "transformers", "trl", "accelerate", "datasets", "numpy", "pyarrow")


@dataclass(frozen=True)
class Step:
    """One process: which worker, and what only this call of it needs to know."""

    worker: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """One entry of the results; the records of its steps are merged."""

    name: str
    steps: Sequence[Step]
    needs: Path | None = None  # a directory on this machine: where it is gone, the job is done again
    clean_up: Callable[[], object] = lambda: None


class Results:
    """The file of results: read, updated and written as a whole after every job."""

    def __init__(self, path: Path, settings: Mapping[str, Any], headline: Callable[[Mapping[str, Any]], Any]) -> None:
        self.path, self.headline = path, headline
        self.record: dict[str, Any] = {"format": "stalewise.benchmark/1", "settings": _plain(settings), "runs": {}}
        if path.exists():
            self.record = json.loads(path.read_text())
            if self.record["settings"] != _plain(settings):
                other = {k: v for k, v in self.record["settings"].items() if _plain(settings).get(k) != v}
                raise SystemExit(f"{path} was made with other settings ({other}): give another --out")
        self.record.setdefault("sittings", [])

    @property
    def runs(self) -> dict[str, Any]:
        return self.record["runs"]

    def begin_sitting(self, device: str) -> None:
        """Note who measures, on what and with which command. Raises nothing: what is unknown is null."""
        sitting = {"date": now(), "command": " ".join(sys.argv), **environment(device)}
        self.record["sittings"].append(sitting)

    def add(self, name: str, result: Mapping[str, Any]) -> None:
        self.runs[name] = {**result, "sitting": len(self.record["sittings"]) - 1}
        self.write()

    def write(self) -> None:
        head = self.headline(self.runs)
        ordered = {**head, **{key: value for key, value in self.record.items() if key not in head}}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(without_places(json.dumps(ordered, indent=1)) + "\n")
        os.replace(temporary, self.path)
        self.record = ordered


def _plain(record: Mapping[str, Any]) -> dict[str, Any]:
    """As it will be read from the file."""
    return json.loads(without_places(json.dumps(record)))


def without_places(text: str) -> str:
    """Paths within the repository or the home directory without what lies before them, which is nobody's business."""
    for place, name in ((Path(__file__).resolve().parents[2], ""), (Path.home(), "~/")):
        text = text.replace(f"{place}/", name)
    return text


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def environment(device: str) -> dict[str, Any]:
    """Versions and machine; torch is asked in a process of its own, so that none of its state is left here."""
    question = (
        "import torch, json; c = torch.cuda.is_available();"
        "print(json.dumps({'gpu': torch.cuda.get_device_name() if c else None, 'cuda': torch.version.cuda}))"
    )
    asked = subprocess.run([sys.executable, "-c", question], capture_output=True, text=True)
    gpu = json.loads(asked.stdout) if asked.returncode == 0 else {"gpu": None, "cuda": None}
    return {
        "device": gpu["gpu"] if device.startswith("cuda") else _processor(),
        **gpu,
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "machine": platform.machine(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {package: _version(package) for package in PACKAGES},
    }


def _processor() -> str:
    """What /proc/cpuinfo calls it; ARM kernels call it nothing."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


class Runner:
    """Runs jobs until the deadline. `--worker SPEC` of the same script is what a process is started with."""

    def __init__(self, script: Path, work: Path, settings: Any, results: Results, *, deadline_s: float) -> None:
        self.script, self.work, self.settings, self.results = script, work, settings, results
        self.start, self.deadline_s = time.monotonic(), deadline_s

    def has_time_for(self, job: Job) -> bool:
        """Whether the deadline leaves time for as long as this job's like took, where one is known."""
        kind = job.name.rpartition("/")[0]
        like = [run["process_seconds"] for name, run in self.results.runs.items() if name.startswith(kind + "/")]
        return time.monotonic() - self.start + max(like, default=0.0) < self.deadline_s

    def is_missing(self, job: Job, *, again: bool = False) -> bool:
        """Not done, failed, or to be done again; what other jobs need is only made where it is not there."""
        known = self.results.runs.get(job.name)
        if known is None or known.get("error"):
            return True
        return again if job.needs is None else not job.needs.exists()

    def run(self, jobs: Sequence[Job], *, again: bool = False) -> bool:
        """Do what is missing. False: the deadline came first."""
        for place, job in enumerate(jobs, start=1):
            if not self.is_missing(job, again=again):
                continue
            if not self.has_time_for(job):
                print(f"deadline of {self.deadline_s:.0f} s: {job.name} and what comes after it is not started")
                return False
            print(f"[{place}/{len(jobs)}] {job.name} …", end=" ", flush=True)
            result = self._run_steps(job)
            job.clean_up()
            self.results.add(job.name, result)
            said = result["error"].splitlines()[-1] if result.get("error") else _in_short(result)
            print(f"{result['process_seconds']:.0f} s  {said}", flush=True)
            if job.needs is not None and not job.needs.exists():
                print(f"{job.needs} was not made: nothing else can be measured")
                return False
        return True

    def _run_steps(self, job: Job) -> dict[str, Any]:
        merged: dict[str, Any] = {"date": now()}
        start = time.monotonic()
        for step in job.steps:
            merged |= self._run_step(job.name, step)
            if merged.get("error"):
                break
        return {**merged, "process_seconds": time.monotonic() - start}

    def _run_step(self, name: str, step: Step) -> dict[str, Any]:
        label = f"{name}-{step.worker}".replace("/", "_")
        spec, result, log = (self.work / "jobs" / f"{label}.{kind}" for kind in ("spec.json", "result.json", "log"))
        spec.parent.mkdir(parents=True, exist_ok=True)
        result.unlink(missing_ok=True)
        record = {
            "worker": step.worker,
            "settings": dataclasses.asdict(self.settings),
            "options": dict(step.options),
            "work": str(self.work),
            "result": str(result),
        }
        spec.write_text(json.dumps(record))
        with open(log, "w") as output:
            done = subprocess.run(
                [sys.executable, str(self.script), "--worker", str(spec)],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment(),
            )
        if done.returncode == 0 and result.exists():
            return json.loads(result.read_text())
        words = log.read_text(errors="replace").strip().splitlines()[-LAST_WORDS:]
        return {"error": "\n".join([f"{step.worker} ended with {done.returncode}", *words])}

    def _environment(self) -> dict[str, str]:
        quiet = {
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "TRANSFORMERS_VERBOSITY": "error",
            "PYTHONUNBUFFERED": "1",
        }
        threads = {"OMP_NUM_THREADS": str(self.settings.threads)} if self.settings.threads else {}
        return {**os.environ, **quiet, **threads}


def _in_short(result: Mapping[str, Any]) -> str:
    """The first few numbers of a result, for whoever watches."""
    wanted = ("tokens_per_second", "seconds", "mfu", "idle_share", "peak_bytes", "final_accuracy", "ns_per_token")
    return "  ".join(f"{key} {result[key]:.4g}" for key in wanted if isinstance(result.get(key), int | float))


def work_on(spec_path: Path, workers: Mapping[str, Callable[..., dict[str, Any]]], read: Callable[..., Any]) -> None:
    """What `--worker SPEC` does: call the worker, write its record, last of all."""
    spec = json.loads(spec_path.read_text())
    record = workers[spec["worker"]](read(spec["settings"]), Path(spec["work"]), **spec["options"])
    path = Path(spec["result"])
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(record))
    os.replace(temporary, path)
