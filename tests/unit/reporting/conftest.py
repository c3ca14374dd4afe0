"""Runs with rollouts for the tests of the browser."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout_runs import consume, small_run
from stalewise.reporting.browser import RunServer, make_server
from stalewise.store import batch_directories, token_log_directory


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_run(tmp_path_factory.mktemp("browser") / "small")


@pytest.fixture
def own(run: Path, tmp_path: Path) -> Path:
    """A copy of the run, to be changed."""
    return Path(shutil.copytree(run, tmp_path / "own"))


@pytest.fixture
def halved(own: Path) -> Path:
    """Updates 4 and 5 were taken back and happened again on the same batch, in another order."""
    rollback = own / "rollbacks" / "r001"
    rollback.mkdir()
    batch = batch_directories(own / "rollouts")[1]
    scratch = own / "scratch"
    consume(scratch, batch, 1, range(4, 6), per_update=20)
    shutil.move(scratch / "ledger" / "updates.jsonl", rollback / "updates.jsonl")
    shutil.move(token_log_directory(scratch), rollback / "tokens")
    return own


@pytest.fixture
def server(run: Path) -> Iterator[RunServer]:
    with make_server(run) as made:
        threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True).start()
        yield made
        made.shutdown()
