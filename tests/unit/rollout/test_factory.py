"""Samplers and checks that are made from a config."""

from __future__ import annotations

from pathlib import Path

import pytest

from stalewise.config import make_config
from stalewise.errors import EngineError
from stalewise.rollout.engines import http as endpoint
from stalewise.rollout.engines.server import ServerSampler
from stalewise.rollout.factory import make_sampler
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
