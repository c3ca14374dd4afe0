"""Real vLLM on the CPU: its server, and policies that it can reload there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from servers import VllmServer

from policies import POLICY, moved
from stalewise.models.loading import load_model, load_tokenizer

# On two cores: no pinning of threads to the same core, no compiling, and no second process for the offline engine.
QUICK = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


@pytest.fixture(scope="session")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded policy with an output layer of its own: vLLM does not reload a tied one in place on a CPU."""
    path = tmp_path_factory.mktemp("policies") / "untied"
    model = load_model(str(POLICY), device=torch.device("cpu"))
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.save_pretrained(path)
    load_tokenizer(str(POLICY)).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def untied_moved(untied: Path) -> Path:
    return moved(untied, untied.with_name("untied-moved"), by=0.02)


@pytest.fixture(scope="session", autouse=True)
def starting(untied: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """The server, which tests of the offline engine wait for, too, and which one test kills."""
    os.environ.update(QUICK, VLLM_ENABLE_V1_MULTIPROCESSING="0")  # the offline engine's processes inherit it
    server = VllmServer(untied, tmp_path_factory.mktemp("server") / "log")
    server.start()
    yield server
    server.kill()


@pytest.fixture
def server(starting: VllmServer) -> VllmServer:
    return starting.wait()
