"""Distance between the gradient on stale rollouts and the one on fresh rollouts, at the same parameters.

A policy learns from rollouts of version 0 until it is S updates old. There the trainer computes two gradients without a
step: on rollouts of version 0, and on fresh rollouts of the same prompts. Both are sample estimates, so their plain
distance would be mostly noise. Each is therefore computed on two halves of the prompts, and products use different
halves: (s₁ − f₁)·(s₂ − f₂) has the expectation ‖E s − E f‖².
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from experiments.lab.downsample import rounded
from torch import Tensor

from stalewise.api import run
from stalewise.config import RunConfig, make_config
from stalewise.rollout.factory import make_sampler
from stalewise.rollout.generate import BatchPlan, generate_batch
from stalewise.store import Batch, batch_directory, open_batch
from stalewise.store.checkpoints import checkpoint_directory, read_state
from stalewise.tasks import make_task
from stalewise.trainer.trainer import Trainer

OBJECTIVES: dict[str, dict[str, Any]] = {
    "relaxed clip": {"name": "grpo", "params": {"clip_low": 0.0, "clip_high": 5.0}},
    "tight clip": {"name": "grpo", "params": {}},
    "µ-GRPO": {"name": "mu_grpo", "params": {}},
    "P3O": {"name": "p3o", "params": {}},
}
FRESH_SEED = 1 << 40  # unlike the seed of any run, so that no rollout is sampled twice


def measure_bias(config: RunConfig, *, ages: Sequence[int], prompts: int) -> dict[str, Any]:
    """Train on one stage of version 0 with a checkpoint at each age, and measure at each."""
    record = config.model_dump(mode="json")
    record["checkpoints"] = {"every": math.gcd(*ages), "keep": len(range(0, max(ages) + 1, math.gcd(*ages))) + 1}
    config = make_config(record, source="bias")
    run(config)
    stale = _rollouts(config, 0, prompts)
    rows: list[dict[str, Any]] = []
    for age in ages:
        fresh = _rollouts(config, age, prompts)
        reference = _halves(config, age, fresh, OBJECTIVES["relaxed clip"])
        for name, objective in OBJECTIVES.items():
            gradients = _halves(config, age, stale, objective)
            drift = read_state(checkpoint_directory(config.directory, age))["drift"]
            rows.append({"age": age, "objective": name, "drift": rounded(drift), **distance(gradients, reference)})
    return {"rows": rows, "learning_rate": config.optimizer.learning_rate}


def distance(stale: tuple[Tensor, Tensor], fresh: tuple[Tensor, Tensor]) -> dict[str, float | None]:
    """Bias relative to the fresh gradient, cosine, and ratio of norms, from two halves of each gradient."""
    (s1, s2), (f1, f2) = ([half.double() for half in halves] for halves in (stale, fresh))
    norm_s, norm_f = float(s1 @ s2), float(f1 @ f2)
    across = float(s1 @ f2 + s2 @ f1) / 2
    bias = float((s1 - f1) @ (s2 - f2))
    nan = math.nan
    return {
        "bias": rounded(math.copysign(math.sqrt(abs(bias) / norm_f), bias) if norm_f > 0 else nan),
        "cosine": rounded(across / math.sqrt(norm_s * norm_f) if norm_s > 0 and norm_f > 0 else nan),
        "norm_ratio": rounded(math.sqrt(norm_s / norm_f) if norm_s > 0 and norm_f > 0 else nan),
        "cosine_of_halves": rounded(float(f1 @ f2 / (f1.norm() * f2.norm()))),
    }


def _rollouts(config: RunConfig, version: int, prompts: int) -> Batch:
    """Rollouts of a version on prompts its training did not use; existing ones are reused."""
    directory = config.directory / "bias"
    plan = BatchPlan(
        generation_batch=version,
        version=version,
        first_prompt=config.schedule.updates * config.batch.prompts,
        prompts=prompts,
        group_size=config.batch.group_size,
        prompts_per_shard=config.sampler.rollouts_per_shard // config.batch.group_size,
        seed=config.seed + FRESH_SEED + version,
    )
    task, sampler = make_task(config.task.name, seed=config.seed, **config.task.options), make_sampler(config)
    try:
        checkpoint = checkpoint_directory(config.directory, version)
        generate_batch(plan, checkpoint=checkpoint, rollouts=directory, task=task, sampler=sampler)
    finally:
        sampler.close()
        task.verifier.close()
    return open_batch(batch_directory(directory, version=version, generation_batch=version))


def _halves(config: RunConfig, age: int, batch: Batch, objective: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Gradients of an objective at the policy of this age, one for each half of the groups."""
    record = {**config.model_dump(mode="json"), "objective": {**objective}}
    trainer = Trainer(make_config(record, source="bias"), checkpoint_directory(config.directory, age))
    group, rollout_id = batch.column("group"), batch.column("rollout_id")
    odd = (group - group.min()) % 2 == 1
    first, second = (trainer.gradient(batch.take(np.sort(rollout_id[half]))) for half in (~odd, odd))
    return first, second
