"""A committed generation batch, and a record of what is flushed to the disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stalewise import store
from stored_rollouts import make_batch


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory) -> store.Batch:
    return store.open_batch(make_batch(tmp_path_factory.mktemp("rollouts")))


@pytest.fixture
def flushed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files and directories that are flushed from now on, without what makes them temporary."""
    names, fsync = list[str](), os.fsync

    def record(descriptor: int) -> None:
        names.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name.split(".tmp-")[0])
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    return names
