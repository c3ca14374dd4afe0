"""The tables of a config: contradictions within a table are refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import ValidationError

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
    assert [ForeignSection(path="other", share=share).places(8) for share in (0.01, 0.5, 0.99)] == [1, 4, 7]
