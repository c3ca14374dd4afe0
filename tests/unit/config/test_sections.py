"""The tables of a config: contradictions within a table are refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import ValidationError

from stalewise.config.run import make_config, set_dotted
from stalewise.config.sections import (
    ForeignSection,
    LoraSection,
    ModelSection,
    SamplerSection,
    Section,
    ServerSection,
    StorageSection,
    VllmSection,
)
from stalewise.errors import ConfigError

CONTRADICTIONS: list[tuple[type[Section], dict[str, Any], str]] = [
    (LoraSection, {"targets": ["q_proj"]}, "alpha and targets have no meaning without a rank"),
    (ModelSection, {"adapter": "a", "lora": {"rank": 2}}, "adapter brings its own rank"),
    (VllmSection, {"options": {"seed": 1}}, "options.seed follows from other settings"),
    (ServerSection, {"reload": "command"}, 'command and reload = "command" go together'),
    (ServerSection, {"reload": "none"}, 'reload = "none" needs servers in float32'),
    (ServerSection, {"urls": ["http://a", "http://a"]}, "urls names a server twice"),
    (ServerSection, {"urls": ["ftp://a"]}, "String should match pattern"),
    (ForeignSection, {"share": 0.5}, "path and a share above 0 go together"),
    (SamplerSection, {"engine": "server"}, "needs server.urls"),
    (SamplerSection, {"engine": "vllm", "temperature": 0.001}, "vLLM samples at no temperature below 0.01"),
    (SamplerSection, {"engine": "vllm", "weights": "fp8"}, 'weights = "fp8" needs engine = "hf"'),
    (SamplerSection, {"engine": "vllm", "foreign": {"path": "a", "share": 0.5}}, 'foreign needs engine = "hf"'),
    (StorageSection, {"url": "bucket"}, "no URL: write file:///absolute/path"),
    (StorageSection, {"url": "s3://b", "options": {"secret_key": "x"}}, "pass secrets in the environment"),
]


# Settings that multiply into sizes or loops: each has a largest value.
SIZES = """seed model.threads model.lora.rank batch.prompts batch.group_size sampler.top_k sampler.max_new_tokens
sampler.rollouts_per_shard sampler.vllm.tensor_parallel sampler.vllm.copies sampler.vllm.max_model_len
sampler.server.concurrency sampler.server.retries learner.tokens_per_micro_batch evaluation.prompts evaluation.samples
schedule.updates schedule.stages schedule.updates_per_generation batch.refill_limit"""


@pytest.mark.parametrize("key", SIZES.split())
def test_a_number_that_no_machine_could_serve_is_refused_by_its_name(key: str) -> None:
    record: dict[str, Any] = {"schedule": {"kind": "synchronous"}} if key.endswith("per_generation") else {}
    if key == "batch.refill_limit":
        record = {"batch": {"without_variance": "refill"}}
    set_dotted(record, key, 1e20 if key == "batch.refill_limit" else 10**20)
    message = rf"^config: ({re.escape(key)} is 1\S+: input should be less|schedule: stages is 1\d+ but)"
    with pytest.raises(ConfigError, match=message):
        make_config(record)


def test_an_update_has_at_most_so_many_responses() -> None:
    fits: dict[str, Any] = {"prompts": 4096, "group_size": 4096}
    make_config({"batch": fits, "sampler": {"rollouts_per_shard": 4096}})
    message = (
        r"batch: an update would have 50,331,648 responses \(prompts × group_size, with refill_limit\): 16,777,216"
    )
    with pytest.raises(ConfigError, match=message):
        make_config({"batch": {**fits, "without_variance": "refill"}, "sampler": {"rollouts_per_shard": 4096}})


@pytest.mark.parametrize(
    ("section", "record", "message"), CONTRADICTIONS, ids=[case[2][:30] for case in CONTRADICTIONS]
)
def test_a_contradiction_is_refused(section: type[Section], record: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(message)):
        section.model_validate(record)


def test_adapters_are_trained_with_a_rank_or_from_an_adapter() -> None:
    cases: list[dict[str, Any]] = [{}, {"lora": {"rank": 2}}, {"adapter": "directory"}]
    assert [ModelSection(**case).trains_adapters for case in cases] == [False, True, True]


def test_a_foreign_policy_samples_at_least_one_rollout_of_a_group_and_never_all() -> None:
    assert [ForeignSection(path="other", share=share).rollouts_per_group(8) for share in (0.01, 0.5, 0.99)] == [1, 4, 7]
