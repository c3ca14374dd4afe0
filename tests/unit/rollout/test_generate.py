"""One generation batch, with rollouts of one or two policies."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from policies import POLICY
from sampling import CUT, check_logp, generated, plan, policy_of
from stalewise import store
from stalewise.config import RunConfig
from stalewise.rollout import generate
from stalewise.rollout.engines.embedded import HFSampler
from stalewise.rollout.engines.request_queue import RequestQueue
from stalewise.rollout.factory import make_sampler
from stalewise.rollout.generate import BatchPlan, recall_lengths, score_responses
from stalewise.rollout.sampler import Request
from stalewise.store import batch_directories, open_batch
from stalewise.types import SamplerSettings


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


def test_a_resumed_run_knows_the_lengths_of_its_rollouts_and_draws_the_same(
    tiny_run: RunConfig, tmp_path: Path
) -> None:
    def made() -> HFSampler:
        device, settings = torch.device("cpu"), SamplerSettings()
        sampler = HFSampler(settings, max_new_tokens=8, device=device, dtype=torch.float32, slots=True)
        sampler.load(POLICY)
        assert not sampler.slots_problem
        return sampler

    plain, recalled = made(), made()
    recall_lengths(recalled, tiny_run.directory / "rollouts")
    batches = [open_batch(path) for path in batch_directories(tiny_run.directory / "rollouts")]
    rows = batches[-1].rows_of(batches[-1].manifest.shards[-1])
    prompt = tuple(rows.prompt(0).tolist())
    own = [rows.response_lengths[row] for row in range(len(rows)) if tuple(rows.prompt(row).tolist()) == prompt]
    assert recalled._history.expected([prompt]) == pytest.approx([np.mean(own)])
    assert np.isnan(plain._history.expected([prompt])[0]) and plain._history.mean is None
    # Another order: a prompt that is expected to be long begins first. Its tokens stay as they are.
    asked = [Request(rows.prompt(row).tolist(), seed=row) for row in range(len(rows))]
    recalled.recall([tuple(asked[-1].prompt_ids)], [500.0])
    orders = [RequestQueue(asked, 8, one._history) for one in (plain, recalled)]
    nothing = np.zeros(0, dtype=np.int64)
    first = [queue.next(1, queue.expected_lengths(nothing, nothing))[0] for queue in orders]
    assert first[0] != first[1]
    ours, theirs = plain.sample(asked), recalled.sample(asked)
    assert [one.token_ids.tolist() for one in ours] == [one.token_ids.tolist() for one in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert one.logp == pytest.approx(other.logp, abs=1e-5)
    never = make_sampler(tiny_run)
    recall_lengths(never, tmp_path)  # a CPU does not schedule: nothing is read
