"""Small work beside large: what it reads stays until it is joined, and nobody reads what it made before that."""

from __future__ import annotations

import contextlib
import weakref
from typing import ClassVar

import pytest
import torch

from stalewise.trainer.weights import SideStream


class Stream:
    """Stands in for a stream of a GPU and writes down who waited for whom."""

    waits: ClassVar[list[tuple[Stream, Stream]]] = []

    def __init__(self, device: object = None) -> None:
        self.device = device

    def wait_stream(self, other: Stream) -> None:
        Stream.waits.append((self, other))


class Read:
    """Something that is read."""


class Made(torch.Tensor):
    """A tensor that is told who reads it."""

    readers: ClassVar[list[object]] = []

    def record_stream(self, s: object) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        Made.readers.append(s)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Stream:
    Stream.waits, Made.readers = [], []
    stream = Stream()
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    return stream


def test_what_is_read_stays_until_both_streams_have_met(here: Stream) -> None:
    side_stream = SideStream(torch.device("cuda"))
    assert isinstance(side_stream.stream, Stream)
    read = Read()
    seen = weakref.ref(read)
    with side_stream.reading(read):
        assert Stream.waits == [(side_stream.stream, here)]  # it begins where the others are
        assert not torch.is_grad_enabled()
    del read
    assert seen() is not None
    side_stream.join(made := torch.zeros(1).as_subclass(Made))
    assert Stream.waits[1:] == [(here, side_stream.stream)] and seen() is None
    assert Made.readers == [here] and made is not None


def test_without_a_gpu_it_runs_where_it_stands(here: Stream) -> None:
    side_stream, read = SideStream(torch.device("cpu")), Read()
    with side_stream.reading(read):
        assert not torch.is_grad_enabled()
    side_stream.join(torch.zeros(1))
    assert not Stream.waits and torch.is_grad_enabled()
