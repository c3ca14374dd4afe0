"""Runs the jobs of experiments in order of importance, and writes one results file per experiment."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.lab.definition import FILE, Experiment
from experiments.lab.job_pool import JobPool, is_done, kept_path
from experiments.lab.plan import Kept, next_jobs
from experiments.lab.results import collect, read_results, results_name, write_results

from stalewise.errors import ConfigError
from stalewise.store.atomic import read_json, write_json_atomic


@dataclass(frozen=True, slots=True)
class LabResult:
    """Outcome of the jobs of some experiments in one setting."""

    setting: str
    jobs: int
    done: int
    failed: dict[str, str]
    seconds: float
    results: list[Path]


def default_experiments() -> Path:
    """`experiments/` of the working directory where it holds definitions, otherwise that of this checkout."""
    here = Path("experiments")
    return here if any(here.glob(f"*/{FILE}")) else Path(__file__).parents[1]


def default_workers(setting: str) -> int:
    """One process per core in the lab setting; one with a real model."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores if setting == "lab" else 1


def kept_results(out: Path) -> Kept:
    """Results of jobs in a directory, each read once."""
    known: dict[str, dict[str, Any]] = {}

    def kept(key: str) -> dict[str, Any] | None:
        if key not in known and kept_path(out, key).is_file():
            known[key] = read_json(kept_path(out, key))
        return known.get(key)

    return kept


def take_kept(source: Path, out: Path) -> int:
    """Take over the results of jobs that were done elsewhere; returns how many."""
    taken = 0
    for path in source.glob("*.json"):
        if not kept_path(out, path.stem).is_file():
            if not {"evaluations", "pass_at"} & {*(result := read_json(path))}:
                raise ConfigError(f"--kept: {path} is no result of a job; name a directory OUT/kept")
            write_json_atomic(kept_path(out, path.stem), result)
            taken += 1
    return taken


def take_results(experiments: Sequence[Experiment], setting: str, root: Path, out: Path) -> int:
    """Take over the jobs of results files; returns how many. Earlier files do not name their jobs.

    Jobs whose settings have changed since have other keys and run again.
    """
    taken = 0
    for experiment in experiments:
        found = read_results(root / experiment.name / results_name(setting))
        trials = {} if found is None else found.tuning.get("trials", {})
        runs = [] if found is None else [run for arm in found.record["arms"] for run in arm["seeds"].values()]
        for key, result in (*trials.items(), *((run.get("key"), run) for run in runs)):
            if key and not kept_path(out, key).is_file():
                write_json_atomic(kept_path(out, key), {name: part for name, part in result.items() if name != "key"})
                taken += 1
    return taken


def run_experiments(
    experiments: Sequence[Experiment],
    setting: str,
    *,
    out: Path,
    workers: int | None = None,
    deadline_s: float | None = None,
    keep_runs: bool = False,
    log: Callable[[str], object] = lambda text: None,
) -> LabResult:
    """Run the jobs that have no result yet, and write the results of each experiment under `out`."""
    start = time.perf_counter()
    chosen = [one for one in experiments if setting in one.settings]
    if not chosen:
        experiments[0].setting(setting)  # raises, naming the settings there are
    workers, kept = workers or default_workers(setting), kept_results(out)
    out.mkdir(parents=True, exist_ok=True)

    def plan():
        return next_jobs(chosen, setting, kept)

    pool = JobPool(plan, out, workers=workers, deadline_s=deadline_s, keep_runs=keep_runs, log=log)
    log(f"{setting}: {len(pool.jobs)} jobs known, {len(pool.waiting)} to do, {workers} at a time")
    try:
        failed = pool.run()
    finally:
        seconds = time.perf_counter() - start
        machine = record_machine(out, setting, workers, seconds)
        results = [write_experiment(one, setting, out, kept, machine) for one in chosen]
    jobs = plan()
    done = sum(is_done(out, job) for job in jobs)
    return LabResult(setting, len(jobs), done, failed, seconds, results)


def write_experiment(
    experiment: Experiment, setting: str, out: Path, kept: Kept, machine: Sequence[dict[str, Any]]
) -> Path:
    """Write the results of an experiment, as far as there are any."""
    path = out / experiment.name / results_name(setting)
    write_results(collect(experiment, setting, out, kept, machine), path)
    return path


def record_machine(out: Path, setting: str, workers: int, seconds: float) -> list[dict[str, Any]]:
    """Add this process to the record of machines: cores, jobs at a time, and seconds summed over equal machines."""
    path = out / f"machine-{setting}.json"
    machines: list[dict[str, Any]] = read_json(path).get("sittings", []) if path.is_file() else []
    here = {"cores": os.cpu_count(), "workers": workers}
    same = next((one for one in machines if here.items() <= one.items()), None)
    if same is None:
        machines.append(here | {"seconds": round(seconds, 1)})
    else:
        same["seconds"] = round(same["seconds"] + seconds, 1)
    write_json_atomic(path, {"sittings": machines})
    return machines
