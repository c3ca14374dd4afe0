"""Runs one job: training, learning from stored rollouts, an evaluation, a bias measurement, or a warm start."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from experiments.lab.bias import measure_bias
from experiments.lab.definition import WARM, run_config
from experiments.lab.job_pool import kept_path, warm_path
from experiments.lab.run_summary import summarize_run
from experiments.lab.warm_start import warm_start

from stalewise.api import learn, run
from stalewise.config import RunConfig
from stalewise.errors import ConfigError
from stalewise.models.loading import resolve_model
from stalewise.orchestrator.evaluation import evaluate_checkpoint
from stalewise.rollout.factory import make_sampler
from stalewise.rollout.generate import sample_for_evaluation
from stalewise.statistics import bootstrap
from stalewise.store import batch_directories
from stalewise.store.atomic import write_json_atomic
from stalewise.store.checkpoints import checkpoint_directory, versions
from stalewise.tasks import make_evaluation_file, make_task
from stalewise.trainer.trainer import NonFiniteUpdate
from stalewise.types import SamplerSettings


def run_job(job: Mapping[str, Any], out: Path) -> dict[str, Any]:
    """Run a job and write its result. A run that stops at a non-finite update has a result too."""
    start = time.perf_counter()
    try:
        record = _KINDS[job["kind"]](job, out)
    finally:
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
    result = {"kind": job["kind"], **record, "wall_seconds": round(time.perf_counter() - start, 2)}
    write_json_atomic(kept_path(out, job["key"]), result)
    return result


def _config(job: Mapping[str, Any], out: Path) -> RunConfig:
    path = job["config"]["model"]["path"]
    # By key, so that a changed definition does not find the policy of the old one.
    model = str(warm_path(out, job["needs"][0])) if path.startswith(WARM) else None
    return run_config(job["config"], name=job["key"], runs=out / "runs", model=model)


def _train(job: Mapping[str, Any], out: Path) -> dict[str, Any]:
    config = _config(job, out)
    try:
        run(config)
    except NonFiniteUpdate as error:
        return summarize_run(config.directory, ended=str(error))
    return summarize_run(config.directory)


def _learn(job: Mapping[str, Any], out: Path) -> dict[str, Any]:
    """Learn from the first generation batches of another run, starting from its initial policy."""
    config = _config(job, out)
    batches = batch_directories(out / "runs" / job["needs"][-1] / "rollouts")[: job["options"].get("batches", 1)]
    try:
        learn(config, batches)
    except NonFiniteUpdate as error:
        return summarize_run(config.directory, ended=str(error))
    return summarize_run(config.directory)


def _evaluate(job: Mapping[str, Any], out: Path) -> dict[str, Any]:
    """pass@k of the first or last policy of a run, on its task or on a file named by an environment variable."""
    options, config = dict(job["options"]), _config(job, out)
    directory = out / "runs" / job["needs"][-1]
    if options.pop("policy", "last") == "first":  # its checkpoint may be pruned, but it is the model itself
        version, checkpoint = 0, Path(resolve_model(config.model.path, config.task.name))
    else:
        version = versions(directory)[-1]
        checkpoint = checkpoint_directory(directory, version)
    if variable := options.pop("file_variable", ""):
        return _outside_check(config, checkpoint, variable, **options)
    task, sampler = make_task(config.task.name, seed=config.seed, **config.task.options), make_sampler(config)
    try:
        rows = config.sampler.rollouts_per_shard
        result = evaluate_checkpoint(
            checkpoint, version=version, task=task, sampler=sampler, rows_at_once=rows, **options
        )
    finally:
        sampler.close()
        task.verifier.close()
    return {
        "pass_at": {str(k): asdict(interval) for k, interval in result.pass_at.items()},
        "accuracy": asdict(result.accuracy),
        "prompts": result.prompts,
        "samples": result.samples,
    }


def _outside_check(
    config: RunConfig, checkpoint: Path, variable: str, *, prompts: int, max_new_tokens: int
) -> dict[str, Any]:
    """Accuracy of greedy answers to the first questions of a file."""
    if not os.environ.get(variable):
        raise ConfigError(f"{variable} is not set: set it to the JSONL file to evaluate on; see docs/experiments.md")
    system = "Reason step by step, and write the answer as the last number."
    task = make_evaluation_file(os.environ[variable], chat=True, system=system, verifier="number")
    sampler = make_sampler(config)
    sampler.max_new_tokens = max_new_tokens
    try:
        sampler.load(checkpoint)
        asked, responses = sample_for_evaluation(
            task,
            task.evaluation_prompts(prompts),
            samples=1,
            seed=0,
            sampler=sampler,
            rows_at_once=config.sampler.rollouts_per_shard,
            settings=SamplerSettings(top_k=1),
        )
        rewards = task.verifier.score(asked, [response.text for response in responses])
    finally:
        sampler.close()
        task.verifier.close()
    value = np.array([reward.value for reward in rewards], np.float64)
    return {"accuracy": asdict(bootstrap(np.nan_to_num(value))), "prompts": len(value), "samples": 1}


def _bias(job: Mapping[str, Any], out: Path) -> dict[str, Any]:
    return measure_bias(_config(job, out), **job["options"])


def _warm(job: Mapping[str, Any], out: Path) -> dict[str, Any]:
    options = {name: value for name, value in job["options"].items() if name != "name"}
    return warm_start(warm_path(out, job["key"]), **options)


_KINDS = {"train": _train, "learn": _learn, "evaluate": _evaluate, "bias": _bias, "warm": _warm}
