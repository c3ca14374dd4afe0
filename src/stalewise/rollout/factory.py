"""From a config to what generation needs, and what to say of a batch that can teach nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from stalewise.config import RunConfig
from stalewise.models.compilation import compiling_pays
from stalewise.models.loading import pick_device, pick_precision
from stalewise.rollout.engines.embedded import HFSampler
from stalewise.rollout.generate import PROMPTS_TO_COMPARE, BatchPlan
from stalewise.rollout.mixed_policy import MixedPolicySampler, check_foreign
from stalewise.rollout.sampler import Sampler
from stalewise.staleness.schedule import Schedule
from stalewise.store import Batch
from stalewise.tasks import Task
from stalewise.types import SamplerSettings


def batch_plan(config: RunConfig, schedule: Schedule, generation_batch: int, attempt: int = 0) -> BatchPlan:
    """Which rollouts a generation batch of this config holds; another `attempt` at it has other seeds."""
    prompts = schedule.prompts_of(generation_batch, config.batch.prompts)
    return BatchPlan(
        generation_batch=generation_batch,
        version=schedule.version_of(generation_batch),
        first_prompt=prompts.start,
        prompts=len(prompts),
        group_size=config.batch.group_size,
        prompts_per_shard=config.sampler.rollouts_per_shard // config.batch.group_size,
        seed=config.seed + (attempt << 32),
        foreign=config.sampler.foreign.path,
        foreign_places=config.sampler.foreign.places(config.batch.group_size),
    )


def make_sampler(
    config: RunConfig,
    *,
    on_tokens: Callable[[int], object] = lambda count: None,
    log: Callable[[str], object] = lambda text: None,
) -> Sampler:
    """The sampler of this config; `on_tokens` is told how many tokens were sampled, now and then."""
    device = pick_device(config.model.device)
    precision = pick_precision(config.model.precision, device)
    served = config.sampler.engine == "server"  # which computes in what it was started with
    settings = SamplerSettings(
        name=config.sampler.engine,
        precision=config.sampler.server.precision if served else str(precision).removeprefix("torch."),
        temperature=config.sampler.temperature,
        top_p=config.sampler.top_p,
        top_k=config.sampler.top_k,
        weights=config.sampler.weights,
    )
    limit = config.sampler.max_new_tokens
    if config.sampler.engine == "vllm":
        from stalewise.rollout.engines.vllm import VllmSampler

        return VllmSampler(settings, max_new_tokens=limit, options=config.sampler.vllm, on_tokens=on_tokens)
    if served:
        from stalewise.rollout.engines.server import ServerSampler

        served_by = config.sampler.server
        return ServerSampler(settings, max_new_tokens=limit, options=served_by, on_tokens=on_tokens, log=log)

    def embedded() -> HFSampler:
        return HFSampler(
            settings,
            max_new_tokens=limit,
            device=device,
            dtype=precision,
            on_tokens=on_tokens,
            compiling_pays=partial(compiling_pays, config),
        )

    return MixedPolicySampler(embedded(), embedded()) if config.sampler.foreign.share else embedded()


def check_foreign_of(config: RunConfig, own: Path, task: Task) -> None:
    """Refuse a foreign policy that does not fit the one at `own`, where the config has one; nothing is loaded."""
    if config.sampler.foreign.share:
        prompts = task.prompts(0, min(PROMPTS_TO_COMPARE, task.size or PROMPTS_TO_COMPARE))
        check_foreign(config.sampler.foreign.path, own, prompts)


def batch_problem(batch: Batch) -> str:
    """Why nothing can be learned from a generation batch, or an empty string."""
    manifest = batch.manifest
    if manifest.verifier_errors == manifest.rows:
        kinds = ", ".join(f"{kind} ({count})" for kind, count in manifest.extra.get("verifier_error_kinds", {}).items())
        return f"the verifier failed on all {manifest.rows} responses: {kinds or 'see reward_error in the shards'}"
    if manifest.truncated == manifest.rows:
        return f"all {manifest.rows} responses are truncated (fraction 1.0): raise sampler.max_new_tokens"
    group, reward = batch.column("group"), batch.column("reward")
    known = ~np.isnan(reward)
    distinct, group = np.unique(group[known], return_inverse=True)
    largest, smallest = np.full(len(distinct), -np.inf), np.full(len(distinct), np.inf)
    np.maximum.at(largest, group, reward[known])
    np.minimum.at(smallest, group, reward[known])
    if (largest == smallest).all():
        return f"none of {len(distinct)} groups has variance; the mean reward is {manifest.reward_mean:.3f}"
    return ""
