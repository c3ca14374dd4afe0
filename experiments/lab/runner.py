"""Runs the jobs of experiments in order of importance, and writes one results file per experiment."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.lab.definition import FILE, Experiment, Job
from experiments.lab.job_pool import JobPool, kept_path
from experiments.lab.results import collect, results_name, write_results

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


def ordered_jobs(experiments: Sequence[Experiment], setting: str, seeds: int | None = None) -> list[Job]:
    """Every job once, ordered by seed; within a seed, arms marked `late` come last."""
    found: list[tuple[tuple[int, bool, int], list[Job]]] = []
    for experiment in experiments:
        if setting in experiment.settings:
            for arm, seed, chain in experiment.jobs(setting, seeds):
                found.append(((seed, arm.late, len(found)), chain))
    ordered = (job for _, chain in sorted(found, key=lambda pair: pair[0]) for job in chain)
    return list({job.key: job for job in ordered}.values())


def default_workers(setting: str) -> int:
    """One process per core in the lab setting; one with a real model."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores if setting == "lab" else 1


def run_experiments(
    experiments: Sequence[Experiment],
    setting: str,
    *,
    out: Path,
    seeds: int | None = None,
    workers: int | None = None,
    deadline_s: float | None = None,
    keep_runs: bool = False,
    log: Callable[[str], object] = lambda text: None,
) -> LabResult:
    """Run the jobs that have no result yet, and write the results of each experiment under `out`."""
    start = time.perf_counter()
    jobs = ordered_jobs(experiments, setting, seeds)
    if not jobs:
        experiments[0].setting(setting)  # raises, naming the settings there are
    workers = workers or default_workers(setting)
    out.mkdir(parents=True, exist_ok=True)
    pool = JobPool(jobs, out, workers=workers, deadline_s=deadline_s, keep_runs=keep_runs, log=log)
    log(f"{setting}: {len(jobs)} jobs, {pool.total} to do, {workers} at a time")
    try:
        failed = pool.run()
    finally:
        seconds = time.perf_counter() - start
        machine = record_machine(out, setting, workers, seconds)
        results = write_experiment_results(experiments, setting, out, machine)
    done = sum(kept_path(out, job.key).is_file() for job in jobs)
    return LabResult(setting, len(jobs), done, failed, seconds, results)


def write_experiment_results(
    experiments: Sequence[Experiment], setting: str, out: Path, machine: list[dict[str, Any]]
) -> list[Path]:
    """Write the results of every experiment that has any in this setting."""
    written: list[Path] = []
    for experiment in experiments:
        if setting in experiment.settings:
            record = collect(experiment, setting, out, machine)
            if record["done"]:
                path = out / experiment.name / results_name(setting)
                write_results(record, path)
                written.append(path)
    return written


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
