from __future__ import annotations

from pathlib import Path

import pytest

from stalewise.config import RunConfig, make_config
from tiny import tiny_record


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A finished run, to be read and not to be changed: 4 updates on 2 generation batches of 8 groups of 4."""
    from stalewise.api import run

    config = make_config(tiny_record(tmp_path_factory.mktemp("runs"), checkpoints={"keep": 8}))
    run(config)
    return config


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"
