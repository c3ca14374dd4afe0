"""A run that trained an adapter."""

from __future__ import annotations

import pytest

from stalewise.api import run
from stalewise.config import RunConfig, make_config
from tiny import tiny_record


@pytest.fixture(scope="session")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    lora = {"model": {"lora": {"rank": 4, "alpha": 8.0}}, "optimizer": {"learning_rate": 1e-2}}
    config = make_config(tiny_record(tmp_path_factory.mktemp("runs"), "adapted", **lora))
    run(config)
    return config
