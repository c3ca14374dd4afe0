"""Workers on a Ray cluster, with a stand-in for Ray; with Ray itself in tests/on_ray."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from stalewise.errors import EngineError, StoreError
from stalewise.rollout.workers import rank_workers as ray_workers
from stalewise.rollout.workers.worker import WorkDone


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Actors that work in this process; which calls were made."""
    calls: list[str] = []

    def remote(**options: Any) -> Any:
        return lambda actor: SimpleNamespace(remote=lambda: SimpleNamespace(work=SimpleNamespace(remote=actor().work)))

    fake = SimpleNamespace(
        is_initialized=lambda: False,
        init=lambda **options: calls.append("init"),
        shutdown=lambda: calls.append("shutdown"),
        cluster_resources=dict,
        remote=remote,
        get=list,
        exceptions=SimpleNamespace(RayError=ZeroDivisionError),
    )
    monkeypatch.setitem(sys.modules, "ray", fake)
    return calls


def test_each_worker_says_what_it_did(ray: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_workers, "work", lambda source, worker, **options: WorkDone(worker, shards=1))
    assert [done.worker for done in ray_workers.work_on_ray("run", workers=2)] == ["ray-0", "ray-1"]
    assert ray == ["init", "shutdown"]


def test_an_error_in_the_input_is_not_tried_again(ray: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: str, **options: Any) -> WorkDone:
        raise StoreError("holds no run")

    monkeypatch.setattr(ray_workers, "work", fail)
    with pytest.raises(EngineError, match="a worker on Ray ended: holds no run"):
        ray_workers.work_on_ray("run", workers=1)
    assert ray == ["init", "shutdown"]


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(EngineError, match=r"pip install 'stalewise\[ray\]'"):
        ray_workers.work_on_ray("run", workers=1)
