"""Jobs: one arm, seed and learning rate each, one JSON file each; and lists of them, worked off until the time is out.

A job is done in processes of its own, so that vLLM is on the Python path of none but its own, and so that whatever goes
wrong leaves its words in the job's file and the others go on. Imports no torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import platform
import shlex
import shutil
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from safetensors import safe_open

from ..child_processes import end, exit_when_told, multi_process_service
from .settings import OURS, SMOKE, Settings, job_name

FORMAT = "stalewise.benchmark.gsm8k/1"
PACKAGES = ("stalewise", "torch", "transformers", "trl", "vllm", "accelerate", "datasets", "math-verify")
BYTES_A_WEIGHT = 28  # on the disk, of a job
LAST_WORDS = 60  # lines of a failed process that are kept
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "PYTHONUNBUFFERED": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
# FlashInfer's sampler and DeepGEMM are compiled where they are used; a dense model in bfloat16 needs neither.
FOR_VLLM = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "MASTER_ADDR": "127.0.0.1",
}


# ---------------------------------------------------------------- one job


@dataclasses.dataclass(frozen=True)
class Job:
    """What `run` is asked for."""

    arm: str
    seed: int
    rate: float
    settings: Settings
    out: Path
    work: Path
    timed: bool = False
    vllm: str = ""  # directories to put before PYTHONPATH in the process that uses vLLM
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    base: Settings = dataclasses.field(default_factory=Settings)

    @property
    def name(self) -> str:
        return job_name(self.arm, self.seed, self.rate, self.settings, base=self.base)

    @property
    def file(self) -> Path:
        return self.out / f"{self.name}.json"


def read(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def write(path: Path, record: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(record, indent=1) + "\n")
    os.replace(temporary, path)


def is_done(record: Mapping[str, Any] | None) -> bool:
    """Whether it came to its end; what was left out for want of a package is tried again."""
    return record is not None and not record.get("error") and not record.get("left_out")


def is_wanted(job: Job) -> bool:
    """Whether there is something to do: a job that ran among others is done again where its time is asked for."""
    found = read(job.file)
    return not is_done(found) or (job.timed and not (found or {}).get("timed"))


def is_settled(job: Job) -> bool:
    """Whether nothing can be done for it here: it is done, or a package that it needs is not there."""
    return not is_wanted(job) or bool((read(job.file) or {}).get("left_out"))


def run_job(job: Job, script: Path) -> dict[str, Any]:
    """Do a job that is not done yet, and write its file."""
    if not is_wanted(job):
        print(f"{job.name}: done before")
        return read(job.file) or {}
    job.settings.check(job.arm)
    directory = job.work / job.name
    trained = _trained_before(job, directory)
    if not trained and (job.timed or job.arm not in OURS):  # a clock that was stopped says nothing: begin again
        shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {
        "format": FORMAT,
        "arm": job.arm,
        "seed": job.seed,
        "learning_rate": job.rate,
        "timed": job.timed,
        "settings": job.settings.record(),
        "changes": dict(job.changes),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "compiled_before": _kernels_are_cached(),
    }
    start = time.monotonic()
    for worker in ("ours",) if job.arm in OURS else ("theirs", "evaluate"):
        found = (trained if worker == "theirs" else None) or _work(job, worker, directory, script)
        record |= {**found, "environment": record.get("environment") or found.get("environment")}  # of the training
        if record.get("error") or record.get("left_out"):
            break
    record["process_seconds"] = time.monotonic() - start
    write(job.file, without_places(record, job))
    if is_done(record) or record.get("left_out"):
        shutil.rmtree(directory, ignore_errors=True)
    _say(job, record)
    return record


def _trained_before(job: Job, directory: Path) -> dict[str, Any] | None:
    """What TRL's process left, where only the evaluation is missing: the time was out in the middle of it."""
    spec, found = read(directory / "theirs.spec.json"), read(directory / "theirs.result.json")
    if spec is None or found is None or not is_done(found) or job.arm in OURS:
        return None
    return found if spec["settings"] == dataclasses.asdict(job.settings) and spec["timed"] == job.timed else None


def _say(job: Job, record: Mapping[str, Any]) -> None:
    if words := record.get("left_out"):
        print(f"{job.name}: left out: {words}")
    elif record.get("error"):
        print(f"{job.name}: failed after {record['process_seconds']:.0f} s\n{record['error']}")
    else:
        curve = "  ".join(f"{point['update']}: {point['accuracy']:.3f}" for point in record["curve"])
        clock = f"{record['seconds']:.1f} s" if record.get("seconds") else "no clock"
        print(
            f"{job.name}: {clock} ({record['process_seconds']:.0f} s in all)  {curve}  "
            f"greedy {record['greedy']['accuracy']:.3f}"
            + ("  also {before:.3f} → {accuracy:.3f}".format(**record["also"]) if record.get("also") else ""),
            flush=True,
        )


def without_places(record: Mapping[str, Any], job: Job) -> dict[str, Any]:
    """Paths without what lies before them."""
    text = json.dumps(record)
    for place in (job.work, job.out, Path(__file__).resolve().parents[2], Path.home()):
        text = text.replace(f"{json.dumps(str(place))[1:-1]}/", "")
    return json.loads(text)


def _work(job: Job, worker: str, directory: Path, script: Path) -> dict[str, Any]:
    """One process of a job; what it found, or its last words."""
    spec, result, log = (directory / f"{worker}.{kind}" for kind in ("spec.json", "result.json", "log"))
    result.unlink(missing_ok=True)
    write(
        spec,
        {
            "worker": worker,
            "arm": job.arm,
            "seed": job.seed,
            "rate": job.rate,
            "timed": job.timed,
            "settings": dataclasses.asdict(job.settings),
            "changes": dict(job.changes),
            "directory": str(directory),
            "out": str(job.out),
            "result": str(result),
        },
    )
    environment = {**os.environ, **QUIET}
    places = [str(script.parents[1]), environment.get("PYTHONPATH", "")]
    if worker == "theirs" and job.arm == "trl_vllm":
        places.insert(0, job.vllm)
        environment = {**environment, **FOR_VLLM, **{k: v for k, v in os.environ.items() if k in FOR_VLLM}}
        environment["MASTER_PORT"] = str(free_port())  # jobs beside each other would take the same one
    environment["PYTHONPATH"] = os.pathsep.join(place for place in places if place)
    with open(log, "w") as output:
        done = subprocess.run(
            [sys.executable, str(script), "worker", str(spec)], stdout=output, stderr=subprocess.STDOUT, env=environment
        )
    words = log.read_text(errors="replace").strip().splitlines()[-LAST_WORDS:]
    found = read(result)
    if found is None:
        return {"error": "\n".join([f"{worker} ended with {done.returncode}", *words])}
    return {**found, "last_words": words} if found.get("error") else found


def free_port() -> int:
    """A port on which nobody listens."""
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return int(opened.getsockname()[1])


def _kernels_are_cached() -> bool:
    """Whether an earlier process left compiled kernels, which then need not be compiled within the clock."""
    places = (os.environ.get("TORCHINDUCTOR_CACHE_DIR"), os.environ.get("TRITON_CACHE_DIR"))
    usual = [Path("/tmp").glob("torchinductor_*/*"), (Path.home() / ".triton" / "cache").glob("*")]
    said = [Path(place).glob("*") for place in places if place]
    return any(next(found, None) is not None for found in [*said, *usual])


# ---------------------------------------------------------------- within a process


def work_on(spec_path: Path) -> None:
    """What `worker SPEC` does. Whatever is raised stands in the result with its whole traceback."""
    spec = json.loads(spec_path.read_text())
    try:
        found = {**WORKERS[spec["worker"]](spec), "environment": environment(spec["settings"]["device"])}
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if spec["arm"] in OURS or missing not in ("trl", "vllm", "datasets"):
            found = {"error": traceback.format_exc()}
        else:
            found = {"left_out": f"{missing} is not installed"}
    except BaseException as error:  # a process that was told to end says so, too
        found = {"error": traceback.format_exc()}
        if not isinstance(error, Exception):
            write(Path(spec["result"]), found)
            raise
    write(Path(spec["result"]), found)
    if spec["worker"] == "theirs":  # nothing is left to do, and the end of a process group may hang
        sys.stdout.flush()
        os._exit(0)


def _train_ours(spec: Mapping[str, Any]) -> dict[str, Any]:
    from . import ours
    from .library import newest_checkpoint

    settings = Settings(**spec["settings"])
    directory = Path(spec["directory"])
    found = ours.train(
        settings, spec["arm"], spec["seed"], spec["rate"], directory, name="run", changes=spec["changes"]
    )
    base = next((point for point in found["curve"] if point["update"] == 0), None)
    if base is not None and spec["arm"] != "random_reward":
        write(_base_file(spec), base)
    return found | evaluate_last(spec, *newest_checkpoint(directory / "run"))


def _train_theirs(spec: Mapping[str, Any]) -> dict[str, Any]:
    vllm = spec["arm"] == "trl_vllm"
    if vllm:
        import vllm as _  # noqa: F401  # pyright: ignore[reportMissingImports]

    from . import theirs

    settings = Settings(**spec["settings"])
    return theirs.train(settings, spec["seed"], spec["rate"], Path(spec["directory"]), vllm=vllm)


def _evaluate_theirs(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Judge the weights that TRL left, by what judges ours."""
    from .library import Evaluator, model_directory
    from .ours import in_short

    settings, directory = Settings(**spec["settings"]), Path(spec["directory"])
    at = {int(update): seconds for update, seconds in (read(directory / "theirs.result.json") or {})["at"].items()}
    weights = directory / "weights"
    sampled = Evaluator(settings)
    curve: list[dict[str, Any]] = []
    for update in settings.evaluated:
        point = read(_base_file(spec)) if update == 0 else None
        if point is None:
            place = weights / f"v{update:06d}" if update else model_directory(settings.model)
            point = in_short(sampled(place, update))
        if update == 0:
            write(_base_file(spec), {"update": 0, "seconds": 0.0, **point})
        curve.append({**point, "update": update, "seconds": at.get(update, 0.0)})
    sampled.close()
    return {"curve": curve, **evaluate_last(spec, weights / f"v{settings.updates:06d}", settings.updates)}


def evaluate_last(spec: Mapping[str, Any], checkpoint: Path, version: int) -> dict[str, Any]:
    """Greedy accuracy of the last policy; on the second test set also of the policy that everything starts from."""
    from .library import Evaluator, model_directory
    from .ours import in_short

    settings = Settings(**spec["settings"])
    evaluator = Evaluator(settings, greedy=True)
    found = {"greedy": in_short(evaluator(checkpoint, version))}
    evaluator.close()
    if settings.also_test:
        every = dataclasses.replace(settings, test=settings.also_test, test_prompts=sys.maxsize)
        evaluator, base = Evaluator(every, greedy=True), _base_file(spec, also=True)
        first = read(base) or in_short(evaluator(model_directory(settings.model), 0))
        write(base, first)
        found["also"] = {"before": first["accuracy"], **in_short(evaluator(checkpoint, version))}
        evaluator.close()
    return found


def _base_file(spec: Mapping[str, Any], *, also: bool = False) -> Path:
    """The accuracy of the policy that everything starts from: measured once, for TRL's arms and the second test set."""
    settings = Settings(**spec["settings"])
    sizes = "greedy" if also else f"{settings.test_prompts}x{settings.test_samples}"
    test = Path(settings.also_test if also else settings.test).stem
    return Path(spec["out"]) / "base" / f"{Path(settings.model).name}-{test}-{sizes}-n{settings.max_new_tokens}.json"


WORKERS = {"ours": _train_ours, "theirs": _train_theirs, "evaluate": _evaluate_theirs}


def environment(device: str) -> dict[str, Any]:
    """Versions and machine."""
    import torch

    cuda = torch.cuda.is_available() and device != "cpu"
    return {
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {package: _version(package) for package in PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


# ---------------------------------------------------------------- lists of jobs


def plan(arms: Sequence[str], seeds: Sequence[int], rates: Sequence[float], more: str) -> list[str]:
    """Lines of a list of jobs: the arguments of `run`. Seeds go round within a rate, arms within a seed.

    >>> plan(["p3o", "auto"], [0], [2e-6], "--timed")
    ['--arm p3o --seed 0 --lr 2e-06 --timed', '--arm auto --seed 0 --lr 2e-06 --timed']
    """
    lines = [f"--arm {arm} --seed {seed} --lr {rate:g}" for rate in rates for seed in seeds for arm in arms]
    return [f"{line} {more}".strip() for line in lines]


def read_list(path: Path) -> list[list[str]]:
    """The arguments of each job of a list; `#` begins a comment."""
    lines = [shlex.split(line, comments=True) for line in path.read_text().splitlines()]
    return [line for line in lines if line]


def jobs_that_fit(model: Path, work: Path) -> int:
    """How many jobs the disk has room for at once, one at least.

    A run keeps version 0, of 2 or 4 bytes a weight, and two checkpoints of 12; its rollouts are small beside them.
    """
    weights = 0
    for file in model.glob("*.safetensors"):
        with safe_open(file, framework="np") as opened:
            weights += sum(math.prod(opened.get_slice(name).get_shape()) for name in opened.keys())  # noqa: SIM118
    work.mkdir(parents=True, exist_ok=True)
    return max(1, shutil.disk_usage(work).free // max(1, BYTES_A_WEIGHT * weights))


class Queue:
    """Works off a list until the time is out: timed jobs alone on the device, others `parallel` at once.

    None is begun with less than `least` seconds left. One that fails beside others, perhaps for want of memory, is
    tried once more, alone and after the rest.

    Those that run beside each other share the device by CUDA's Multi-Process Service where that is installed: without
    it, one process at a time has the device.

    What runs when the time is out is killed and its file is not written. Next time it begins again; ours go on where
    they are not timed, and of TRL's only the evaluation is done where the training was over.
    """

    def __init__(
        self, script: Path, common: Sequence[str], *, seconds: float, parallel: int, least: float = 0.0
    ) -> None:
        self.script, self.common, self.parallel = script, list(common), max(1, parallel)
        self.end = time.monotonic() + seconds
        self.last_start = self.end - least
        self.running: dict[subprocess.Popen[bytes], tuple[list[str], bool]] = {}
        self.shared: Mapping[str, str] = {}  # environment of jobs that run beside each other

    def work(self, jobs: Sequence[tuple[list[str], bool]]) -> bool:
        """`jobs`: arguments, and whether it must be alone. True: all were worked on."""
        waiting = list(jobs)
        exit_when_told()
        with multi_process_service() if self.parallel > 1 else contextlib.nullcontext({}) as self.shared:
            return self._work(waiting)

    def _work(self, waiting: list[tuple[list[str], bool]]) -> bool:
        try:
            while self.running or (waiting and time.monotonic() < self.last_start):
                if time.monotonic() >= self.end:
                    break
                while waiting and time.monotonic() < self.last_start and self._has_room(alone=waiting[0][1]):
                    self._start(*waiting.pop(0))
                time.sleep(0.2)
                waiting += self._reap()
        finally:
            left = len(waiting) + len(self.running)
            for process in self.running:
                end(process)
        if left:
            print(f"the time is out: {left} jobs of the list are left")
        return not left

    def _has_room(self, *, alone: bool) -> bool:
        if alone or any(is_alone for _, is_alone in self.running.values()):
            return not self.running
        return len(self.running) < self.parallel

    def _start(self, arguments: list[str], alone: bool) -> None:
        command = [sys.executable, str(self.script), "run", *self.common, *arguments]
        environment = {**os.environ, **({} if alone else self.shared)}
        self.running[subprocess.Popen(command, start_new_session=True, env=environment)] = arguments, alone

    def _reap(self) -> list[tuple[list[str], bool]]:
        """Forget what has ended; returns those that failed beside others, to be tried alone."""
        ended = [process for process in self.running if process.poll() is not None]
        failed = [(self.running.pop(process), process.returncode) for process in ended]
        return [(arguments, True) for (arguments, alone), code in failed if code and not alone and self.parallel > 1]


# ---------------------------------------------------------------- the small size


def smoke_settings(work: Path) -> dict[str, Any]:
    """Settings of the small size, with its 32 training and 16 test rows written to `work`."""
    work.mkdir(parents=True, exist_ok=True)
    for name, first, count in (("train", 10, 32), ("test", 60, 16)):
        rows = [
            {"id": f"{name}-{i}", "problem": f"{first + i}+{17 + i}=", "answer": str(first + 17 + 2 * i)}
            for i in range(count)
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        path = work / f"{name}.jsonl"
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
    return {**SMOKE, "train": str(work / "train.jsonl"), "test": str(work / "test.jsonl")}
