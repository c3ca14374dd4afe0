"""Rollouts that are off-policy for other reasons than age: temperature, rounded weights, another policy.

Whatever the reason, the stored log-probability is of the distribution that the token was drawn from, and the learner
needs no word about it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stalewise
from policies import POLICY, moved, requests
from sampling import CPU, generated, plan, short_sampler
from stalewise import store
from stalewise.config import make_config
from stalewise.config.run_directory import is_started
from stalewise.errors import ConfigError, ModelError, StoreError
from stalewise.models.loading import load_model
from stalewise.orchestrator.preflight import examine
from stalewise.rollout.engines.embedded import HFSampler
from stalewise.rollout.mixed_policy import MixedPolicySampler, check_tokenizers
from stalewise.rollout.sampler import Response
from stalewise.store.json_lines import read_jsonl
from stalewise.trainer.logprobs import response_logp
from stalewise.trainer.micro_batch import Layout, micro_batches
from stalewise.types import SamplerSettings
from tiny import call, tiny_record


def change(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    record = json.loads(path.read_text())
    edit(record)
    path.write_text(json.dumps(record))


def swap_digits(tokenizer: dict[str, Any]) -> None:
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["7"], vocabulary["8"] = vocabulary["8"], vocabulary["7"]


def begin_with_eos(tokenizer: dict[str, Any]) -> None:
    single = tokenizer["post_processor"]["single"]
    single.insert(0, {"SpecialToken": {"id": "<eos>", "type_id": 0}})
    tokenizer["post_processor"]["special_tokens"] = {"<eos>": {"id": "<eos>", "ids": [1], "tokens": ["<eos>"]}}


OTHER_TOKENS: list[tuple[str, Callable[[dict[str, Any]], object], str]] = [
    ("tokenizer.json", swap_digits, "another vocabulary than the policy of the run ('7' is 11 there and 10 here)"),
    (
        "tokenizer_config.json",
        lambda record: record.update(bos_token="="),
        "special tokens are [0, 1, 2, 15] and those of the policy of the run [0, 1, 2]",
    ),
    (
        "generation_config.json",
        lambda record: record.update(eos_token_id=[1, 5]),
        "ends responses with (1, 5), and the policy of the run with (1,)",
    ),
    (
        "config.json",
        lambda record: record.update(vocab_size=20),
        "20 logits, more than the 18 of the policy of the run",
    ),
    ("tokenizer.json", begin_with_eos, "makes other tokens of prompt arithmetic/"),
]


def trained(runs: Path, **sampler: Any) -> tuple[Path, list[dict[str, Any]]]:
    config = make_config(tiny_record(runs, sampler=sampler))
    stalewise.run(config)
    return config.directory, read_jsonl(config.directory / "metrics.jsonl")


def mismatch(metrics: list[dict[str, Any]]) -> float:
    """Of the first update, whose rollouts are of the policy that learns."""
    assert metrics[0]["age_max"] == 0
    return metrics[0]["mismatch_mean"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose rollouts are of exactly the policy that learns."""
    directory, metrics = trained(tmp_path_factory.mktemp("exact"))
    assert 0 <= mismatch(metrics) < 1e-5
    return directory


def test_the_other_policy_makes_way_for_the_learner_and_comes_back(other: Path) -> None:
    own, foreign = short_sampler(), HFSampler(SamplerSettings(), max_new_tokens=8, device=CPU, dtype=torch.float32)
    sampler, asked = MixedPolicySampler(own, foreign), requests(8)
    settings = SamplerSettings(policy=str(other))

    def said() -> list[list[Response]]:
        return [sampler.sample(asked), sampler.sample(asked, settings)]

    assert foreign._model is None  # nothing is loaded that nobody asks for
    first = said()
    assert first[0] != first[1]
    sampler.sleep()
    assert foreign._model is None and own._model is not None
    assert said() == first
    sampler.sleep(weights=True)
    assert foreign._model is None and own._offload.is_away
    assert said() == first
    sampler.max_new_tokens = 1
    assert {len(response.token_ids) for responses in said() for response in responses} == {1}


def test_how_many_places_a_share_comes_to() -> None:
    def places(share: float, group_size: int) -> int:
        section = {"foreign": {"path": "arithmetic-steps", "share": share}}
        return make_config({"sampler": section}).sampler.foreign.rollouts_per_group(group_size)

    assert [places(0.5, size) for size in (2, 4, 8)] == [1, 2, 4]
    assert [places(0.01, size) for size in (2, 8)] == [1, 1]
    assert [places(0.99, size) for size in (2, 8)] == [1, 7]
    assert make_config({}).sampler.foreign.rollouts_per_group(8) == 0


@pytest.mark.parametrize(("file", "edit", "message"), OTHER_TOKENS, ids=[message for _, _, message in OTHER_TOKENS])
def test_a_policy_with_other_tokens_is_refused_before_anything_is_generated(
    tmp_path: Path, file: str, edit: Callable[[dict[str, Any]], object], message: str
) -> None:
    policy = moved(POLICY, tmp_path / "policy", by=0.1)
    change(policy / file, edit)
    with pytest.raises(ModelError, match=re.escape(message)) as refusal:
        generated(tmp_path / "rollouts", plan(policy))
    assert str(refusal.value).startswith(f"sampler.foreign.path is {policy}, wh")
    assert "choose a policy with the same tokenizer" in str(refusal.value)
    assert not (tmp_path / "rollouts").exists()


def test_a_path_that_leads_nowhere_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"^sampler\.foreign\.path: .*nowhere is not a directory; embedded policies: .*arithmetic"
    ):
        check_tokenizers(str(tmp_path / "nowhere"), POLICY, [])


def test_a_foreign_policy_is_looked_at_before_anything_is_made(runs: Path, tmp_path: Path) -> None:
    foreign = {"foreign": {"path": str(tmp_path / "nowhere"), "share": 0.5}}
    config = make_config(tiny_record(runs, sampler=foreign))
    with pytest.raises(ModelError, match=r"^sampler\.foreign\.path: .*nowhere is not a directory"):
        stalewise.run(config)
    assert not is_started(config.directory) and not (config.directory / "eval.jsonl").exists()


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        ({"weights": "fp4"}, "sampler.weights is 'fp4': input should be 'exact', 'fp8' or 'int8'"),
        ({"weights": "fp8", "engine": "vllm"}, 'weights = "fp8" needs engine = "hf"'),
        ({"weights": "int8", "engine": "server", "server": {"urls": ["http://a"]}}, 'weights = "int8" needs engine'),
        ({"foreign": {"path": "arithmetic", "share": 0.5}, "engine": "vllm"}, 'foreign needs engine = "hf"'),
        (
            {"foreign": {"path": "a", "share": 0.5}, "engine": "server", "server": {"urls": ["http://a"]}},
            'foreign needs engine = "hf"',
        ),
        ({"foreign": {"path": "a", "share": 1.0}}, "sampler.foreign.share is 1.0: input should be less than 1"),
        ({"foreign": {"path": "a", "share": -0.1}}, "sampler.foreign.share is -0.1: input should be greater than"),
        ({"foreign": {"path": "a", "share": 0.0}}, "sampler.foreign: path and a share above 0 go together"),
        ({"foreign": {"path": "a"}}, "sampler.foreign: path and a share above 0 go together"),
        ({"foreign": {"share": 0.5}}, "sampler.foreign: path and a share above 0 go together"),
        ({"foreign": {"part": 0.5}}, "sampler.foreign.part is not a setting; did you mean path"),
    ],
)
def test_settings_that_make_no_sense_are_named(sampler: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        make_config({"sampler": sampler})


def test_what_rollouts_are_sampled_from_is_part_of_a_runs_identity() -> None:
    plain = make_config({}).identity()
    assert make_config({"sampler": {"engine": "vllm", "vllm": {"copies": 2}}}).identity() == plain
    assert make_config({"sampler": {"weights": "fp8"}}).identity() != plain
    assert make_config({"sampler": {"foreign": {"path": "a", "share": 0.5}}}).identity() != plain


@torch.no_grad()
@pytest.mark.parametrize(
    "settings",
    [
        SamplerSettings(temperature=0.7),
        SamplerSettings(temperature=1.3),
        SamplerSettings(weights="fp8", temperature=1.2),
    ],
)
def test_the_importance_ratio_of_the_learner_is_1_on_average(tmp_path: Path, settings: SamplerSettings) -> None:
    generated(tmp_path, plan(None, prompts=400, prompts_per_shard=400), settings)
    batch = store.open_batch(tmp_path / "g000000-v000000")
    rows = batch.take(batch.column("rollout_id"))
    model = load_model(str(POLICY), device=CPU)
    surplus, inverse, tokens = [], [], 0
    for part in micro_batches(rows, Layout(token_budget=4096, packed=False), CPU):
        logp_BT, _ = response_logp(model, part)
        log_ratio_BT = (logp_BT - part.behaviour_logp_BT) * part.mask_BT
        surplus += (log_ratio_BT.exp() - 1).sum(dim=1).tolist()
        inverse += ((-log_ratio_BT).exp() - 1).sum(dim=1).tolist()
        tokens += int(part.mask_BT.sum())
    # Given what was said before, the next token's ratio has mean 1: so the sum of r − 1 over a response has mean 0.
    error = math.sqrt(len(surplus)) * np.std(surplus) / tokens
    assert abs(sum(surplus) / tokens) < 4 * error
    # The other way round it has not, by far: this would see log-probabilities of another distribution.
    assert sum(inverse) / tokens > 8 * error > 0


@pytest.mark.parametrize(
    ("sampler", "least"),
    [
        ({"weights": "fp8"}, 0.001),
        pytest.param({"temperature": 0.7}, 0.01, marks=pytest.mark.nightly),
        pytest.param({"weights": "int8"}, 0.0003, marks=pytest.mark.nightly),
        pytest.param({"foreign": {"path": "arithmetic-steps", "share": 0.5}}, 0.1, marks=pytest.mark.nightly),
        ({"weights": "fp8", "temperature": 1.2, "foreign": {"path": "arithmetic-steps", "share": 0.25}}, 0.01),
    ],
)
def test_a_run_learns_and_sees_the_mismatch(
    tmp_path: Path, undisturbed: Path, sampler: dict[str, Any], least: float
) -> None:
    directory, metrics = trained(tmp_path, **sampler)
    assert [record["taken"] for record in metrics] == [1] * 4
    assert mismatch(metrics) > least
    assert metrics[0]["ess"] < 1 and metrics[0]["nonfinite"] == 0
    # Held-out accuracy is of the run's own policy, exact and at temperature 1.
    evaluated = [read_jsonl(run / "eval.jsonl")[0] for run in (undisturbed, directory)]
    assert evaluated[0]["accuracy"] == evaluated[1]["accuracy"]
    assert evaluated[0]["response_length"] == evaluated[1]["response_length"]
    shown = call("inspect", directory, "--rollout", 3).stdout
    assert f"weights {sampler.get('weights', 'exact')}" in shown
    assert ("policy arithmetic-steps" in shown) == ("foreign" in sampler)
    assert "policy" not in call("inspect", directory, "--rollout", 0).stdout


def test_a_run_does_not_go_on_with_another_policy_beside_it(tmp_path: Path, other: Path) -> None:
    first = {"foreign": {"path": "arithmetic-steps", "share": 0.5}}
    trained(tmp_path, **first)
    with pytest.raises(StoreError, match=r"another config \(sampler\.foreign\.path was 'arithmetic-steps' and is"):
        trained(tmp_path, foreign={"path": str(other), "share": 0.5})


def test_the_doctor_looks_at_the_other_policy(tmp_path: Path, other: Path) -> None:
    def found(path: str) -> Any:
        section = {"foreign": {"path": path, "share": 0.5}}
        checks = {check.name: check for check in examine(make_config(tiny_record(tmp_path, sampler=section)))}
        return checks["foreign policy"]

    assert found(str(other)).status == "ok"
    assert found(str(other)).detail.endswith("has the same tokens and makes 2 of the 4 rollouts of a group")
    assert found(str(tmp_path / "nowhere")).status == "bad"


def test_the_mismatch_of_the_engines_is_measured_at_the_start_of_every_stage(tmp_path: Path) -> None:
    config = make_config(tiny_record(tmp_path))
    stalewise.run(config)
    found = [line["mismatch_mean"] for line in read_jsonl(config.directory / "metrics.jsonl")]
    known = [value is not None and math.isfinite(value) for value in found]
    assert known == [True, False, True, False]
    assert 0 < found[2] < 1e-4
