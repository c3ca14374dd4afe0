"""Runs one job: a training run, the run that makes a policy for others, or an evaluation of the start."""

from __future__ import annotations

import gc
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from experiments.lab.definition import POLICY, digest, run_config
from experiments.lab.job_pool import kept_path, policy_path
from experiments.lab.plan import FIRST_SEED
from experiments.lab.policy_checkpoints import begin_again, write_policies_alone
from experiments.lab.raw_logprobs import RawLogprobs
from experiments.lab.run_summary import summarize_run

from stalewise.config import RunConfig
from stalewise.models import resolve_model
from stalewise.orchestrator.collapse_guard import Collapsed
from stalewise.orchestrator.evaluation import evaluate_checkpoint
from stalewise.orchestrator.orchestrator import Orchestrator
from stalewise.orchestrator.setup import resolve_settings
from stalewise.rollout.engines.embedded import HFSampler
from stalewise.rollout.factory import make_sampler
from stalewise.rollout.mixed_policy import MixedPolicySampler
from stalewise.store.atomic import (
    RunLock,
    commit_directory,
    make_directory,
    read_json,
    temporary_name,
    write_json_atomic,
)
from stalewise.store.checkpoints import checkpoint_directory, read_state, versions
from stalewise.tasks import make_task
from stalewise.trainer.trainer import NonFiniteUpdate
from stalewise.types import NullCallback

OF_REAL_MODELS = "jsonl", "arithmetic-chat"  # the tasks of their runs
CHECKED: set[tuple[str, str]] = set()  # real models and weights that a run of this process was begun with
SAMPLERS_SHARE = 0.5  # of a worker's part of the GPU: its slots fill half of that, and the rest is for learning


def run_job(job: Mapping[str, Any], out: Path, workers: int = 1) -> dict[str, Any]:
    """Run a job and write its result, also of a run that an update that is not finite, or the guard, ends.

    `workers` processes run jobs at the same time: each takes its part of a GPU's memory.
    """
    start, cpu = time.perf_counter(), time.process_time()
    foreign = None
    if str(job["config"]["sampler"]["foreign"]["path"]).startswith(POLICY):
        foreign = str(policy_path(out, job["needs"][0]))
    config = run_config(job["config"], name=job["key"], runs=out / "runs", foreign=foreign)
    record = _KINDS[job["kind"]](config, job["options"], out, workers)
    seconds = {"wall_seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu}
    result = {"kind": job["kind"], **record, **{name: round(value, 2) for name, value in seconds.items()}}
    write_json_atomic(kept_path(out, job["key"]), result)
    return result


def free_memory() -> None:
    """Give back what the last job held."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _train(config: RunConfig, options: Mapping[str, Any], out: Path, workers: int = 1) -> dict[str, Any]:
    """A run, resumed where it stands (a real model's begins again).

    `pass_samples`: then pass@k of its last policy with that many samples.
    """
    try:
        _run(config, out, workers, raw_logprobs=options.get("raw_logprobs", False))
    except (NonFiniteUpdate, Collapsed) as error:
        return summarize_run(config.directory, ended=str(error))
    record = summarize_run(config.directory)
    if samples := options.get("pass_samples"):
        last = checkpoint_directory(config.directory, versions(config.directory)[-1])
        record["pass_at"] = _pass_at(config, last, samples, workers, seed=config.seed - FIRST_SEED)
    return record


def _run(config: RunConfig, out: Path, workers: int, *, raw_logprobs: bool) -> None:
    """Train. Pipelined schedules generate in this process, too, between updates: ages are the same, and a second
    process would take another core.
    """
    resolved, alone = resolve_settings(config, NullCallback().log), config.task.name in OF_REAL_MODELS
    policy, first = (resolved.model.path, resolved.sampler.weights), first_path(resolved, out)
    if alone:
        begin_again(resolved)
        if policy in CHECKED:  # each check takes 6 s of 0.5B
            resolved = resolved.model_copy(update={"model": resolved.model.model_copy(update={"check": "off"})})
    with RunLock(resolved.directory):
        orchestrator = Orchestrator(resolved, NullCallback())
        if alone:
            write_policies_alone(orchestrator)
            if first.is_file():  # all runs begin with the same evaluation
                orchestrator.run_log.log_evaluation(read_json(first))
        if raw_logprobs:
            orchestrator.sampler = RawLogprobs.like(orchestrator.sampler)
        leave_room(orchestrator.sampler, workers)
        orchestrator.run()
    CHECKED.add(policy)
    if alone and not first.is_file():
        write_json_atomic(first, next(one for one in orchestrator.run_log.evaluations if one["version"] == 0))


def first_path(config: RunConfig, out: Path) -> Path:
    """The evaluation of the policy that runs start from: what it depends on is the same for most of them."""
    asked: dict[str, Any] = config.evaluation.model_dump(mode="json", include={"prompts", "samples"})
    asked |= {"task": config.task.model_dump(mode="json"), "model": config.model.model_dump(mode="json")}
    asked |= config.sampler.model_dump(mode="json", include={"engine", "weights", "max_new_tokens"})
    return out / "first" / f"{digest(asked)}.json"


def leave_room(sampler: object, workers: int) -> None:
    """Let a sampler count with its part of a GPU that several processes share: it would take what is free."""
    both = [sampler.own, sampler._second] if isinstance(sampler, MixedPolicySampler) else [sampler]
    for one in both if workers > 1 and torch.cuda.is_available() else ():
        if isinstance(one, HFSampler):
            one.most_bytes = SAMPLERS_SHARE * torch.cuda.mem_get_info()[1] / workers / len(both)


def _policy(config: RunConfig, options: Mapping[str, Any], out: Path, workers: int) -> dict[str, Any]:
    """A run whose last policy is kept for others."""
    record, path = _train(config, options, out, workers), policy_path(out, config.name)
    if not path.is_dir():
        last = checkpoint_directory(config.directory, versions(config.directory)[-1])
        read_state(last)  # compares checksums
        make_directory(path.parent)
        temporary = temporary_name(path)
        shutil.copytree(last, temporary)
        commit_directory(temporary, path)
    return record


def _evaluate(config: RunConfig, options: Mapping[str, Any], out: Path, workers: int) -> dict[str, Any]:
    """pass@k of the policy that runs start from, by other random numbers for each seed: it has a spread, too."""
    first = Path(resolve_model(config.model.path, config.task.name))
    return {"pass_at": _pass_at(config, first, options["pass_samples"], workers, seed=config.seed - FIRST_SEED)}


def _pass_at(config: RunConfig, checkpoint: Path, samples: int, workers: int, seed: int = 0) -> dict[str, Any]:
    task, sampler = make_task(config.task.name, seed=config.seed, **config.task.options), make_sampler(config)
    leave_room(sampler, workers)
    try:
        result = evaluate_checkpoint(
            checkpoint,
            version=0,
            task=task,
            sampler=sampler,
            prompts=config.evaluation.prompts,
            samples=samples,
            seed=seed,
            rows_at_once=config.sampler.rollouts_per_shard,
        )
    finally:
        sampler.close()
        task.verifier.close()
    return {str(k): asdict(interval) for k, interval in result.pass_at.items()}


_KINDS = {"train": _train, "policy": _policy, "evaluate": _evaluate}
