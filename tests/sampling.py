"""Samplers on the CPU, batches that they generate, and log-probabilities as they ought to be."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from policies import POLICY
from stalewise import store
from stalewise.models import EMBEDDED
from stalewise.models.loading import encode_prompts, load_model
from stalewise.rollout.engines.embedded import HFSampler, fake_quantize
from stalewise.rollout.generate import BatchPlan, generate_batch
from stalewise.rollout.mixed_policy import MixedPolicySampler
from stalewise.rollout.sampler import Request
from stalewise.tasks import make_task
from stalewise.types import Rollout, SamplerSettings

CPU = torch.device("cpu")
CUT = SamplerSettings(temperature=0.7, top_k=6, top_p=0.9)


def short_sampler(settings: SamplerSettings | None = None, *, slots: bool = False) -> HFSampler:
    sampler = HFSampler(settings or SamplerSettings(), max_new_tokens=8, device=CPU, dtype=torch.float32, slots=slots)
    sampler.load(POLICY)
    assert bool(sampler.slots_problem) != slots
    return sampler


def steps_requests(sampler: HFSampler, count: int) -> list[Request]:
    prompts = make_task("arithmetic-steps", seed=0).prompts(0, count)
    return [Request(ids, seed) for seed, ids in enumerate(encode_prompts(prompts, sampler.tokenizer))]


def steps_sampler(
    settings: SamplerSettings | None = None, max_new_tokens: int = 64, *, slots: bool = False
) -> HFSampler:
    settings = settings or SamplerSettings()
    sampler = HFSampler(settings, max_new_tokens=max_new_tokens, device=CPU, dtype=torch.float32, slots=slots)
    sampler.load(EMBEDDED / "arithmetic-steps")
    assert bool(sampler.slots_problem) != slots
    return sampler


def by_hand(logits: np.ndarray, settings: SamplerSettings) -> np.ndarray:
    """Log-probabilities after temperature, top_k and top_p, one token after the other; −inf on those cut away."""
    probability = np.exp(logits.astype(np.float64) / settings.temperature)
    order = np.argsort(-probability)
    kept = order[: settings.top_k or None]
    total, so_far, chosen = probability[kept].sum(), 0.0, []
    for token in kept:
        if so_far >= settings.top_p * total:
            break
        chosen.append(token)
        so_far += probability[token]
    result = np.full(len(logits), -math.inf)
    result[chosen] = np.log(probability[chosen] / so_far)
    return result


def policy_of(checkpoint: Path, weights: str) -> Any:
    """A model whose linear layers were rounded by name, without the sampler's code for that."""
    model = load_model(str(checkpoint), device=CPU)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if weights != "exact" and "_proj." in name:
                parameter.copy_(fake_quantize(parameter, weights))
    return model


@torch.no_grad()
def check_logp(model: Any, prompt_ids: Any, response_ids: Any, logp: Any, settings: SamplerSettings) -> None:
    ids = torch.tensor([[*prompt_ids, *response_ids]])
    logits = model(input_ids=ids).logits[0, len(prompt_ids) - 1 : -1].numpy()
    expected = [by_hand(row, settings)[token] for row, token in zip(logits, response_ids, strict=True)]
    assert np.array(logp) == pytest.approx(expected, abs=1e-4)


def plan(foreign: Path | None, places: int = 2, **changes: Any) -> BatchPlan:
    own: dict[str, Any] = {"first_prompt": 0, "prompts": 8, "group_size": 4, "prompts_per_shard": 4, "seed": 3}
    more = {} if foreign is None else {"foreign": str(foreign), "foreign_rollouts": places}
    return BatchPlan(generation_batch=0, version=0, **{**own, **more, **changes})


def generated(rollouts: Path, batch: BatchPlan, settings: SamplerSettings = CUT) -> list[Rollout]:
    task = make_task("arithmetic", seed=0)
    sampler = MixedPolicySampler(
        *(HFSampler(settings, max_new_tokens=8, device=CPU, dtype=torch.float32) for _ in range(2))
    )
    try:
        generate_batch(batch, checkpoint=POLICY, rollouts=rollouts, task=task, sampler=sampler)
    finally:
        sampler.close()
        task.verifier.close()
    return list(store.open_batch(rollouts / "g000000-v000000").iter_rollouts())
