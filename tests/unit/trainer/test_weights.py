"""What is done to all weights at once: in one tensor or in many, it is the same."""

from __future__ import annotations

import contextlib
import weakref
from typing import ClassVar

import pytest
import torch

from stalewise.trainer.weights import FlatWeights, SideStream, Weights

CPU = torch.device("cpu")


def parameters() -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape)) for shape in ((3, 5), (7,), (), (2, 2, 2))]


def both() -> list[Weights]:
    return [Weights(parameters()), FlatWeights(parameters(), SideStream(CPU))]


def backward(weights: Weights, factor: float) -> None:
    loss = sum((parameter.square() * factor).sum() for parameter in weights.parameters)
    assert isinstance(loss, torch.Tensor)
    loss.backward()


@pytest.mark.parametrize("most", [1.0, 1e6])
def test_gradients_have_one_norm_and_are_clipped_alike(most: float) -> None:
    plain, flat = both()
    for weights in (plain, flat):
        backward(weights, 1.0)
        backward(weights, 2.0)  # on top
    norms = [weights.gradient_norm() for weights in (plain, flat)]
    assert norms[0] == pytest.approx(norms[1].item(), rel=1e-6)
    expected = torch.cat([6 * parameter.detach().flatten() for parameter in parameters()]).norm()
    assert norms[1] == pytest.approx(expected.item(), rel=1e-6)
    for weights, norm in zip((plain, flat), norms, strict=True):
        weights.clip_gradients(most, norm)
    for one, other in zip(plain.parameters, flat.parameters, strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    assert flat.gradient_norm() == pytest.approx(min(most, expected.item()), rel=1e-5)


def test_gradients_in_one_tensor_stay_where_they_are() -> None:
    flat = FlatWeights(parameters(), SideStream(CPU))
    places = [parameter.grad.data_ptr() for parameter in flat.parameters if parameter.grad is not None]
    backward(flat, 1.0)
    assert flat.gradient.count_nonzero() == flat.gradient.numel()
    flat.zero_gradients()
    assert flat.gradient.count_nonzero() == 0
    assert places == [gradient.data_ptr() for gradient in flat.gradients]
    assert all(p.grad is gradient for p, gradient in zip(flat.parameters, flat.gradients, strict=True))


def test_norms_of_low_precision_are_not_rounded_to_it() -> None:
    flat = FlatWeights([torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))], SideStream(CPU))
    flat.gradient.fill_(1.0)
    assert flat.gradient_norm().item() == pytest.approx(3**0.5, rel=1e-6)


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
