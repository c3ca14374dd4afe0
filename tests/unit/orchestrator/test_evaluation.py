from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import binomtest

from stalewise.errors import TaskError
from stalewise.models import EMBEDDED
from stalewise.orchestrator.evaluation import (
    average,
    bootstrap,
    describe_evaluation,
    evaluate_checkpoint,
    pass_at_k,
    scores_by_prompt,
)
from stalewise.rollout.engines.embedded import HFSampler
from stalewise.store.records import is_by_prompt
from stalewise.tasks import Seen, make_task
from stalewise.types import SamplerSettings


def test_pass_at_k_is_the_share_of_k_subsets_with_a_right_answer() -> None:
    score = np.array([[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]])
    for k in range(1, 5):
        by_hand = [np.mean([max(row[list(chosen)]) for chosen in combinations(range(4), k)]) for row in score]
        assert pass_at_k(score, k).value == pytest.approx(np.mean(by_hand))
    # k = 2: 1 − C(2,2)/C(4,2) = 5/6; 0; 1 − C(3,2)/C(4,2) = 1/2.
    assert pass_at_k(score, 2).value == pytest.approx((5 / 6 + 0 + 1 / 2) / 3)
    for k in (0, 5):
        with pytest.raises(ValueError, match=f"k is {k}; expected 1 to 4"):
            pass_at_k(score, k)


def test_scores_by_prompt_skip_samples_without_a_score() -> None:
    scores = scores_by_prompt(["a", "b"], np.array([[1.0, 0.0], [math.nan, 0.5]]))
    assert json.dumps(scores) == '{"prompt_ids": ["a", "b"], "score": [1, 0.5], "scored": [2, 1]}'


def test_scores_by_prompt_can_be_read_again_whatever_their_size() -> None:
    assert is_by_prompt(scores_by_prompt(["a", "b"], np.array([[1e15] * 16, [-3.0] * 16])))


def test_partial_credit_does_not_pass() -> None:
    assert pass_at_k(np.array([[0.5, 0.9]]), 2).value == 0.0


def test_samples_without_a_score_are_left_out_of_the_average_and_never_pass() -> None:
    score = np.array([[1.0, math.nan], [0.0, 1.0], [math.nan, math.nan]])
    assert average(score).value == pytest.approx((1.0 + 0.5) / 2)
    assert pass_at_k(score, 1).value == pytest.approx((0.5 + 0.5 + 0.0) / 3)


def test_bootstrap_intervals_have_the_width_of_the_standard_error() -> None:
    values = np.random.default_rng(0).random(400)
    interval = bootstrap(values)
    standard_error = values.std() / math.sqrt(400)
    assert interval.value == values.mean()
    assert interval.high - interval.low == pytest.approx(2 * 1.96 * standard_error, rel=0.1)
    assert bootstrap(values) == interval  # the same data, the same interval


@pytest.mark.parametrize("prompts", [1, 2, 30, 500])
def test_where_all_prompts_score_alike_at_an_end_the_interval_is_the_exact_binomial_one(prompts: int) -> None:
    none, everything = average(np.zeros((prompts, 3))), pass_at_k(np.ones((prompts, 3)), 2)
    assert (none.value, none.low, everything.value, everything.high) == (0.0, 0.0, 1.0, 1.0)
    # No right answer to any prompt happens with probability 2.5% where a share `high` of all prompts is answered.
    assert (1 - none.high) ** prompts == pytest.approx(0.025)
    assert everything.low == pytest.approx(1 - none.high)
    exact = binomtest(0, prompts).proportion_ci(0.95, method="exact")
    assert (none.low, none.high) == pytest.approx((exact.low, exact.high))


@pytest.mark.parametrize("value", [0.25, 0.5, 1 / 3, -1.0, 3.0])
@pytest.mark.parametrize("prompts", [1, 2, 9, 200])
def test_prompts_that_all_score_alike_do_not_make_the_interval_certain(value: float, prompts: int) -> None:
    interval = bootstrap(np.full(prompts, value))
    least, largest = min(0.0, value), max(1.0, value)
    # A share of other prompts that all draws miss with probability 2.5%, if those score as low or high as can be.
    missed = 1 - 0.025 ** (1 / prompts)
    assert interval.value == pytest.approx(value)
    assert interval.low == pytest.approx((1 - missed) * value + missed * least)
    assert interval.high == pytest.approx((1 - missed) * value + missed * largest)
    assert interval.low < interval.high


def test_one_prompt_has_wide_intervals_however_many_samples() -> None:
    score = np.array([[1.0, 0.0] * 500])
    for interval in (average(score), pass_at_k(score, 1)):
        assert interval.value == 0.5
        assert interval.low < 0.02 and interval.high > 0.98


def test_values_that_differ_by_rounding_alone_are_alike() -> None:
    values = np.array([0.1 + 0.2, 0.3, 0.3])
    assert bootstrap(values).high > 0.5


def test_a_mean_of_no_scores_is_unknown() -> None:
    interval = average(np.full((3, 2), math.nan))
    assert math.isnan(interval.value) and math.isnan(interval.low) and math.isnan(interval.high)


def sampler() -> HFSampler:
    return HFSampler(SamplerSettings(), max_new_tokens=8, device=torch.device("cpu"), dtype=torch.float32)


def test_the_embedded_policy_has_the_accuracy_that_it_was_made_with() -> None:
    result = evaluate_checkpoint(
        EMBEDDED / "arithmetic", version=0, task=make_task("arithmetic"), sampler=sampler(), prompts=200, samples=4
    )
    assert 0.33 < result.accuracy.low < result.accuracy.value < result.accuracy.high < 0.50
    assert result.pass_at[1].value == pytest.approx(result.accuracy.value)
    assert result.pass_at[1].value < result.pass_at[2].value < result.pass_at[4].value
    assert list(result.pass_at) == [1, 2, 4]
    assert (result.prompts, result.samples, result.truncated_fraction, result.verifier_errors) == (200, 4, 0.0, 0)
    assert describe_evaluation(result).startswith(f"version 0: accuracy {result.accuracy.value:.3f} [")
    lists = result.record()["by_prompt"]
    assert lists["prompt_ids"] == [prompt.prompt_id for prompt in make_task("arithmetic").evaluation_prompts(200)]
    assert sum(lists["score"]) / sum(lists["scored"]) == pytest.approx(result.accuracy.value)
    assert lists["scored"] == [4] * 200
    assert len(json.dumps(lists)) < 200 * 40  # some bytes more than the ids
    assert len(repr(result)) < 1000


def test_excluded_prompts_are_not_evaluated() -> None:
    task = make_task("arithmetic")
    ids = [prompt.prompt_id for prompt in task.evaluation_prompts(10)]
    settings: dict[str, Any] = {"version": 0, "task": task, "sampler": sampler(), "prompts": 10, "samples": 1}
    result = evaluate_checkpoint(EMBEDDED / "arithmetic", **settings, exclude=Seen(frozenset(ids[:4])))
    assert (result.prompts, result.excluded) == (6, 4)
    assert "4 prompts left out" in describe_evaluation(result)
    part = {"a": {"accuracy": {"value": 0.5}}, "b": {"accuracy": {"value": math.nan}}}
    assert "a 0.500" in describe_evaluation(replace(result, by_task=part))
    assert "b unknown" in describe_evaluation(replace(result, by_task=part))
    with pytest.raises(TaskError, match="no held-out prompts left to evaluate on: training has seen all 10, or they"):
        evaluate_checkpoint(EMBEDDED / "arithmetic", **settings, exclude=Seen(frozenset(ids)))


def test_a_verifier_that_always_fails_stops_the_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_verifier.py").write_text("def score(prompt, response):\n    raise ValueError('broken')\n")
    (tmp_path / "data.jsonl").write_text(
        "\n".join(f'{{"problem": "{i}+{i}=", "answer": "{2 * i}"}}' for i in range(40))
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    options = {"path": str(tmp_path / "data.jsonl"), "held_out": 0.5, "verifier": "python"}
    task = make_task("jsonl", **options, verifier_options={"function": "broken_verifier:score"})
    try:
        with pytest.raises(TaskError, match=r"failed on all .* ValueError"):
            evaluate_checkpoint(EMBEDDED / "arithmetic", version=0, task=task, sampler=sampler(), prompts=8, samples=1)
    finally:
        task.verifier.close()
