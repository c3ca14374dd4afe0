"""A committed generation batch."""

from __future__ import annotations

import pytest

from stalewise import store
from stored_rollouts import make_batch


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory) -> store.Batch:
    return store.open_batch(make_batch(tmp_path_factory.mktemp("rollouts")))
