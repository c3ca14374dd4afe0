"""Recording a CUDA graph, with a driver that only notes what it is asked for."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import pytest
import torch

from stalewise.errors import ModelError
from stalewise.models.compilation import recording


class Graph:
    def __init__(self, asked: list[str]) -> None:
        self.asked = asked

    def capture_begin(self, **options: Any) -> None:
        assert options.pop("capture_error_mode") == "thread_local"
        self.asked.append(f"begin {options}, collecting {gc.isenabled()}")

    def capture_end(self) -> None:
        self.asked.append("end")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    asked: list[str] = []
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: asked.append(name))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (30, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 40)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 20)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 9))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)

    def end(*given: object) -> None:
        asked.append(f"left {given}")

    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)
    return asked


def record(asked: list[str], **options: Any) -> None:
    with recording(Graph(asked), None, **options):  # pyright: ignore[reportArgumentType]
        asked.append("work")


def test_what_is_kept_for_later_stays_where_memory_is_not_short(asked: list[str]) -> None:
    record(asked)
    assert asked == ["begin {'pool': (0, 9)}, collecting False", "work", "end"]
    assert gc.isenabled()


@pytest.mark.parametrize(("free", "reserved"), [(24, 40), (30, 51)])  # in all; less than what lies about
def test_where_memory_is_short_all_of_it_is_given_back_first(
    free: int, reserved: int, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: reserved)
    record(asked, pool=(0, 7))
    assert asked == ["synchronize", "empty_cache", "begin {'pool': (0, 7)}, collecting False", "work", "end"]


def test_a_recording_that_fails_is_ended(asked: list[str]) -> None:
    with pytest.raises(torch.OutOfMemoryError), recording(Graph(asked), None):  # pyright: ignore[reportArgumentType]
        raise torch.OutOfMemoryError
    assert asked[-1] == "end" and gc.isenabled()


class BrokenGraph(Graph):
    def capture_end(self) -> None:
        super().capture_end()
        raise RuntimeError("operation failed due to a previous error during capture")


@pytest.mark.parametrize(
    ("within", "said"),
    [
        (torch.OutOfMemoryError(), (ModelError, "lower learner.tokens_per_micro_batch")),
        (ValueError("wrong"), (ValueError, "wrong")),
    ],
)
def test_a_recording_that_cannot_be_ended_says_what_went_wrong_within(
    within: Exception, said: tuple[type[Exception], str], asked: list[str]
) -> None:
    broken: Any = BrokenGraph(asked)
    with pytest.raises(said[0], match=said[1]), recording(broken, None):  # pyright: ignore[reportArgumentType]
        raise within
    assert asked[-2:] == ["end", "left (3, (0, 9))"] and gc.isenabled()


def test_a_recording_that_only_its_end_fails_says_so(asked: list[str]) -> None:
    broken: Any = BrokenGraph(asked)
    with pytest.raises(RuntimeError, match="previous error"), recording(broken, None):  # pyright: ignore[reportArgumentType]
        asked.append("work")
    assert asked[-2:] == ["end", "left (3, (0, 9))"]


def test_garbage_is_not_collected_afterwards_where_it_was_not_before(asked: list[str]) -> None:
    gc.disable()
    try:
        record(asked)
        assert not gc.isenabled()
    finally:
        gc.enable()
