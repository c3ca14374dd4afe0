"""Running experiments: the jobs of all of them in order of importance, and their results in one file each."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.lab.crew import Crew, kept_path
from experiments.lab.definition import Experiment, Job
from experiments.lab.results import collect, results_name, write_results

from stalewise.store.atomic import read_json, write_json_atomic


@dataclass(frozen=True, slots=True)
class Reproduced:
    """What became of the jobs of some experiments in one setting."""

    setting: str
    jobs: int
    done: int
    failed: dict[str, str]
    seconds: float
    results: list[Path]


def default_experiments() -> Path:
    """Where the experiments are: in the working directory, or in the checkout that this package is of."""
    here = Path("experiments")
    return here if here.is_dir() else Path(__file__).parents[3] / "experiments"


def ordered_jobs(experiments: Sequence[Experiment], setting: str, seeds: int | None = None) -> list[Job]:
    """Every job once: the first seed of all arms, then the second; what is marked late comes last within its seed."""
    found: list[tuple[tuple[int, bool, int], list[Job]]] = []
    for experiment in experiments:
        if setting in experiment.settings:
            for arm, seed, chain in experiment.jobs(setting, seeds):
                found.append(((seed, arm.late, len(found)), chain))
    ordered = (job for _, chain in sorted(found, key=lambda pair: pair[0]) for job in chain)
    return list({job.key: job for job in ordered}.values())


def default_workers(setting: str) -> int:
    """A process for each core in the lab; one with a real model, unless said."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores if setting == "lab" else 1


def reproduce(
    experiments: Sequence[Experiment],
    setting: str,
    *,
    out: Path,
    seeds: int | None = None,
    workers: int | None = None,
    deadline_s: float | None = None,
    keep_runs: bool = False,
    log: Callable[[str], object] = lambda text: None,
) -> Reproduced:
    """Do what is not done yet, and write the results of each experiment under `out`."""
    start = time.perf_counter()
    jobs = ordered_jobs(experiments, setting, seeds)
    if not jobs:
        experiments[0].setting(setting)  # says which settings there are
    workers = workers or default_workers(setting)
    out.mkdir(parents=True, exist_ok=True)
    crew = Crew(jobs, out, workers=workers, deadline_s=deadline_s, keep_runs=keep_runs, log=log)
    log(f"{setting}: {len(jobs)} jobs, {crew.total} to do, {workers} at a time")
    try:
        failed = crew.run()
    finally:
        seconds = time.perf_counter() - start
        machine = note_machine(out, setting, workers, seconds)
        results = write_all(experiments, setting, out, machine)
    done = sum(kept_path(out, job.key).is_file() for job in jobs)
    return Reproduced(setting, len(jobs), done, failed, seconds, results)


def write_all(experiments: Sequence[Experiment], setting: str, out: Path, machine: list[dict[str, Any]]) -> list[Path]:
    """Results of all experiments that have any in this setting."""
    written: list[Path] = []
    for experiment in experiments:
        if setting in experiment.settings:
            record = collect(experiment, setting, out, machine)
            if record["done"]:
                path = out / experiment.name / results_name(setting)
                write_results(record, path)
                written.append(path)
    return written


def note_machine(out: Path, setting: str, workers: int, seconds: float) -> list[dict[str, Any]]:
    """What the jobs were done on: cores, jobs at a time and seconds, over all sittings."""
    path = out / f"machine-{setting}.json"
    sittings: list[dict[str, Any]] = read_json(path).get("sittings", []) if path.is_file() else []
    here = {"cores": os.cpu_count(), "workers": workers}
    alike = next((one for one in sittings if here.items() <= one.items()), None)
    if alike is None:
        sittings.append(here | {"seconds": round(seconds, 1)})
    else:
        alike["seconds"] = round(alike["seconds"] + seconds, 1)
    write_json_atomic(path, {"sittings": sittings})
    return sittings
