"""One generation batch, with rollouts of one or two policies."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from policies import POLICY, moved
from stalewise import store
from stalewise.models.loading import load_model
from stalewise.rollout.engines.embedded import HFSampler
from stalewise.rollout.engines.quantize import fake_quantize
from stalewise.rollout.generate import BatchPlan, generate_batch
from stalewise.rollout.mixed_policy import MixedPolicySampler
from stalewise.tasks import make_task
from stalewise.types import Rollout, SamplerSettings

CPU = torch.device("cpu")


CUT = SamplerSettings(temperature=0.7, top_k=6, top_p=0.9)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy with the tokenizer of the embedded one and other weights."""
    return moved(POLICY, tmp_path_factory.mktemp("policies") / "other", by=0.3)


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
    more = {} if foreign is None else {"foreign": str(foreign), "foreign_places": places}
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


@pytest.mark.parametrize("weights", ["exact", "int8"])
def test_the_last_places_of_every_group_are_of_the_other_policy(tmp_path: Path, other: Path, weights: str) -> None:
    settings = replace(CUT, weights=weights)
    made = generated(tmp_path / "both", plan(other), settings)
    assert [rollout.sampler.policy for rollout in made] == ["", "", str(other), str(other)] * 8
    assert {replace(rollout.sampler, policy="") for rollout in made} == {settings}
    assert {rollout.version_first for rollout in made} == {0}
    own, foreign = policy_of(POLICY, weights), policy_of(other, weights)
    for rollout in made:
        model = foreign if rollout.sampler.policy else own
        check_logp(model, rollout.prompt_ids, rollout.response_ids, rollout.behaviour_logp, settings)
    # With or without another policy, the run's own says the same.
    alone = generated(tmp_path / "alone", plan(None), settings)
    same = [mixed.response_ids == pure.response_ids for mixed, pure in zip(made, alone, strict=True)]
    assert all(same[place] for place in range(32) if place % 4 < 2) and not all(same)
    manifest = store.read_batch_manifest(tmp_path / "both" / "g000000-v000000")
    assert manifest.samplers == (settings, replace(settings, policy=str(other)))


def test_a_shard_that_is_made_again_comes_out_the_same(tmp_path: Path, other: Path) -> None:
    before = generated(tmp_path, plan(other))
    shard = tmp_path / "g000000-v000000" / "shard-00001.parquet"
    content = shard.read_bytes()
    shard.unlink()
    assert generated(tmp_path, plan(other)) == before
    assert shard.read_bytes() == content
