"""One generation batch, with rollouts of one or two policies."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from policies import POLICY
from sampling import CUT, check_logp, generated, plan, policy_of
from stalewise import store
from stalewise.rollout import generate
from stalewise.rollout.generate import BatchPlan, score_responses


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
    batch: BatchPlan = plan(other)
    before = generated(tmp_path, batch)
    shard = tmp_path / "g000000-v000000" / "shard-00001.parquet"
    content = shard.read_bytes()
    shard.unlink()
    assert generated(tmp_path, batch) == before
    assert shard.read_bytes() == content


def test_seconds_of_shards_do_not_overlap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*arguments: Any) -> Any:
        time.sleep(0.2)
        return score_responses(*arguments)

    monkeypatch.setattr(generate, "score_responses", slow)
    start = time.perf_counter()
    generated(tmp_path, plan(None, prompts_per_shard=1))
    seconds = store.read_batch_manifest(tmp_path / "g000000-v000000").seconds
    assert 8 * 0.2 <= seconds <= time.perf_counter() - start
