from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from policies import POLICY, moved
from stalewise.rollout.workers.shard_queue import WorkerSession
from stalewise.store.object_store import DirectoryStore


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy with the tokenizer of the embedded one and other weights; not to be changed."""
    return moved(POLICY, tmp_path_factory.mktemp("policies") / "other", by=0.3)


@pytest.fixture
def sessions(tmp_path: Path) -> Iterator[tuple[DirectoryStore, list[WorkerSession]]]:
    object_store = DirectoryStore(tmp_path)
    opened = [WorkerSession(object_store, name, lost_after_s=0.6).__enter__() for name in ("a", "b", "c")]
    yield object_store, opened
    for session in opened:
        session.__exit__()
