"""Samplers and checks that are made from a config."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stalewise.config import make_config
from stalewise.errors import ConfigError, EngineError, ModelError, StalewiseError
from stalewise.models import EMBEDDED, compilation
from stalewise.rollout import factory
from stalewise.rollout.engines import http as endpoint
from stalewise.rollout.engines.server import ServerSampler
from stalewise.rollout.factory import check_engine_devices, check_policy, make_sampler, pick_engine
from tiny import tiny_record


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(endpoint, "POLL_S", 0.02)


def test_the_engine_of_the_config_is_the_one_that_is_made(runs: Path) -> None:
    section = {"engine": "server", "server": {"urls": ["http://localhost:1/v1/"]}}
    sampler = make_sampler(make_config(tiny_record(runs, sampler=section)))
    assert isinstance(sampler, ServerSampler)
    assert sampler._servers[0].endpoint.url == "http://localhost:1"
    assert (sampler.settings.name, sampler.settings.precision) == ("server", "bfloat16")
    with pytest.raises(EngineError, match="vLLM is not installed"):
        make_sampler(make_config(tiny_record(runs, sampler={"engine": "vllm"})))


def test_the_sampler_is_compiled_only_if_asked_for(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "can_compile", lambda: True)
    large = SimpleNamespace(device=torch.device("cuda"), parameters=lambda: [torch.empty(10**9, device="meta")])
    assert compilation.should_compile("auto", 4096, large)  # the learner's
    for choice in ("auto", "always"):
        long = {"learner": {"compile": choice}, "schedule": {"kind": "staged", "updates": 4096, "stages": 4}}
        sampler: Any = make_sampler(make_config(tiny_record(runs) | long))
        assert sampler._should_compile(large) is (choice == "always")


PIPELINED: dict[str, Any] = {"schedule": {"kind": "pipelined", "generator_device": "cuda:1"}}


@pytest.mark.parametrize(
    ("device", "vllm", "sections", "found", "engine", "why"),
    [
        ("cpu", True, {}, "", "hf", "there is no GPU"),
        ("cuda", False, {}, "", "hf", "vLLM is not installed"),
        ("cuda", True, {"sampler": {"weights": "int8"}}, "other caches", "hf", "vLLM does not have"),
        ("cuda", True, {}, "", "hf", "it decodes this model in slots"),
        ("cuda", True, {}, "other caches", "vllm", "hf has no slots for this model: other caches"),
        ("cuda", True, {}, torch.OutOfMemoryError(), "vllm", "its weights do not fit on one GPU"),
        ("cuda", True, PIPELINED, "other caches", "hf", "this pipelined run does not name GPUs for two engines"),
        ("cuda", True, PIPELINED | {"model": {"device": "cuda:0"}}, "other caches", "vllm", "hf has no slots"),
    ],
)
def test_auto_is_the_embedded_engine_where_it_has_slots(
    device: str,
    vllm: bool,
    sections: dict[str, Any],
    found: Any,
    engine: str,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed = list[bool]()

    class Tried:
        slots_problem = found

        def __init__(self, settings: object, **_: object) -> None:
            assert not closed

        def load(self, source: Path) -> None:
            assert source == Path("policy")
            if isinstance(found, Exception):
                raise found

        def close(self) -> None:
            closed.append(True)

    config = make_config({**sections, "sampler": {"engine": "auto", **sections.get("sampler", {})}})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(factory, "pick_device", lambda name: torch.device(device))
    monkeypatch.setattr(factory, "pick_precision", lambda *_: torch.bfloat16)
    monkeypatch.setattr(factory, "find_spec", lambda name: object() if vllm else None)
    monkeypatch.setattr(factory, "HFSampler", Tried)
    chosen, said = pick_engine(config.sampler, config.model, config.schedule, "policy")
    assert chosen == engine and why in said
    assert len(closed) == ("slot" in said or "fit" in said)


@pytest.mark.parametrize(
    ("learner", "generator", "tensor_parallel", "message"),
    [
        ("cuda:0", "cuda:1", 1, ""),
        ("cuda:2", "cuda:0", 2, ""),
        ("auto", "cuda:1", 1, "model.device is auto: with sampler.engine = vllm a pipelined run has two engines"),
        ("cuda:0", None, 1, "schedule.generator_device is not set"),
        ("cuda:1", "cuda:1", 1, "would put two vLLM engines on GPU 1"),
        ("cuda:0", "cuda:3", 2, "needs 1 copies on 2 GPUs each from cuda:3 on, and there are 4"),
        ("cuda:1", "cuda:0", 2, "would put two vLLM engines on GPU 1"),
        ("cuda:0", "cuda:x", 1, "schedule.generator_device is 'cuda:x': expected"),
        (
            "cuda:0",
            "cuda:4",
            1,
            "schedule.generator_device is 'cuda:4': GPUs are counted from 0, and",
        ),
    ],
)
def test_two_engines_never_claim_one_gpu(
    learner: str,
    generator: str | None,
    tensor_parallel: int,
    message: str,
    runs: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    record = tiny_record(runs, sampler={"engine": "vllm", "vllm": {"tensor_parallel": tensor_parallel}})
    schedule = {"kind": "pipelined", "updates": 4, "updates_per_generation": 2, "generator_device": generator}
    config = make_config({**record, "model": {"device": learner}, "schedule": schedule})
    if message:
        with pytest.raises(StalewiseError, match=message):
            check_engine_devices(config.sampler, config.model, config.schedule)
    else:
        check_engine_devices(config.sampler, config.model, config.schedule)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match=r"this machine has one: use the engine hf, or schedule\.kind"):
        check_engine_devices(config.sampler, config.model, config.schedule)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    check_engine_devices(config.sampler, config.model, config.schedule)  # vLLM on CPUs claims no GPU
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    alone = make_config({**record, "model": {"device": learner}})
    check_engine_devices(alone.sampler, alone.model, alone.schedule)


def test_responses_beyond_the_context_of_vllm_are_refused_before_it_is_started(runs: Path) -> None:
    """The policy's context is 128, its longest prompt 6."""

    def check(new_tokens: int, **vllm: Any) -> None:
        sampler = {"engine": "vllm", "max_new_tokens": new_tokens, "vllm": vllm}
        config = make_config(tiny_record(runs, sampler=sampler))
        task = config.make_task()
        check_policy(config.sampler, EMBEDDED / "arithmetic", task, config.longest_prompts(task))

    check(122)
    check(90, max_model_len=96)
    with pytest.raises(ModelError, match=r"context of 128: .* to at most 122$"):
        check(123, max_model_len=4096)
    with pytest.raises(ModelError, match=r"context of 96: .* at most 90 \(or raise sampler\.vllm\.max_model_len\)$"):
        check(91, max_model_len=96)
