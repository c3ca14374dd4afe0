"""One generation batch, with rollouts of one or two policies."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
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
from stalewise.errors import TaskError
from stalewise.rollout import generate
from stalewise.rollout.engines.embedded import HFSampler
from stalewise.rollout.engines.request_queue import RequestQueue
from stalewise.rollout.factory import make_sampler
from stalewise.rollout.generate import BatchPlan, recall_lengths, score_responses
from stalewise.rollout.sampler import Request, Response
from stalewise.store import batch_directories, open_batch
from stalewise.tasks import Verifier, make_task
from stalewise.types import FinishReason, Prompt, Reward, Rollout, SamplerSettings


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


class InHalves(HFSampler):
    """Hands out the second half of its responses when the first is scored."""

    def __init__(self, scored: threading.Event | None) -> None:
        super().__init__(CUT, max_new_tokens=8, device=torch.device("cpu"), dtype=torch.float32)
        self.streams, self.scored = scored is not None, scored

    def stream(
        self, requests: Sequence[Request], settings: SamplerSettings, on_ended: Callable[[Mapping[int, Response]], Any]
    ) -> list[Response]:
        responses = super().stream(requests, settings, lambda ended: None)
        half = len(responses) // 2
        on_ended({number: responses[number] for number in reversed(range(half))})
        if self.scored is not None:
            assert self.scored.wait(20), "nothing was scored before the last response had ended"
        on_ended({number: responses[number] for number in range(half, len(responses))})
        return responses


class Singly:
    """The verifier of arithmetic; it may be asked early."""

    scores_independently = True

    def __init__(self, verifier: Verifier, problem: Exception | None = None) -> None:
        self.scored, self.sizes, self._verifier, self._problem = threading.Event(), list[int](), verifier, problem

    def score(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[Reward]:
        self.sizes.append(len(responses))
        self.scored.set()
        if self._problem is not None:
            raise self._problem
        return self._verifier.score(prompts, responses)

    def close(self) -> None:
        self._verifier.close()


def early(problem: Exception | None = None) -> tuple[Any, Singly]:
    task: Any = make_task("arithmetic", seed=0)
    task.verifier = Singly(task.verifier, problem)
    return task, task.verifier


def test_responses_are_scored_while_others_are_sampled(tmp_path: Path) -> None:
    made: list[list[Rollout]] = []
    for name in ("early", "late"):
        task, verifier = early()
        sampler = InHalves(verifier.scored if name == "early" else None)
        generate.generate_batch(plan(None), checkpoint=POLICY, rollouts=tmp_path / name, task=task, sampler=sampler)
        assert sum(verifier.sizes) == 32
        assert verifier.sizes[0] == (8 if name == "early" else 16)
        made.append(list(open_batch(tmp_path / name / "g000000-v000000").iter_rollouts()))
    assert made[0] == made[1]


def test_an_evaluation_is_scored_while_others_are_sampled() -> None:
    found: list[list[Reward]] = []
    for is_early in (True, False):
        task, verifier = early()
        sampler = InHalves(verifier.scored if is_early else None)
        sampler.load(POLICY)
        options: dict[str, Any] = {"samples": 2, "seed": 0, "sampler": sampler, "rows_at_once": 8}
        _, responses, rewards = generate.sample_and_score(task, task.evaluation_prompts(14), **options)
        assert sum(verifier.sizes) == len(responses) == 28
        assert verifier.sizes[0] == (4 if is_early else 28)
        found.append(rewards)
    assert found[0] == found[1]


def test_a_verifier_that_fails_early_ends_the_batch(tmp_path: Path) -> None:
    task, verifier = early(TaskError("no such judge"))
    with pytest.raises(TaskError, match="no such judge"):
        generate.generate_batch(
            plan(None), checkpoint=POLICY, rollouts=tmp_path, task=task, sampler=InHalves(verifier.scored)
        )
    assert not list(tmp_path.rglob("*.parquet"))


def test_what_waits_to_be_scored_is_dropped_when_sampling_ends_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C need not wait for it."""
    task, verifier = early()

    def stopped(self: HFSampler, requests: Any, settings: Any, on_ended: Callable[[Any], Any]) -> list[Response]:
        ended = Response(np.zeros(1, np.int32), np.zeros(1, np.float32), "1", FinishReason.STOP)
        on_ended(dict.fromkeys(range(len(requests)), ended))
        verifier.scored.wait(20)
        raise KeyboardInterrupt

    monkeypatch.setattr(InHalves, "stream", stopped)
    monkeypatch.setattr(generate, "SCORED_AT_ONCE", 1)

    def slow(prompts: Sequence[Prompt], responses: Sequence[str]) -> list[Reward]:
        verifier.scored.set()
        time.sleep(0.05)
        return [Reward(1.0)]

    monkeypatch.setattr(verifier, "score", slow)
    sampler = InHalves(verifier.scored)
    sampler.load(POLICY)
    start = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        generate.sample_and_score(
            task, task.evaluation_prompts(14), samples=32, seed=0, sampler=sampler, rows_at_once=512
        )
    assert time.perf_counter() - start < 15  # all 448 would take 22 s


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
