"""Copies between host and device. What only a GPU can show, benchmarks/check_gpu.py checks."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch

from stalewise.models import transfer as module
from stalewise.models.transfer import ALIGNMENT, fetch, host_copies, in_buffer, send

CPU = torch.device("cpu")
ARRAYS = {
    "long": np.arange(7, dtype=np.int64)[None],
    "int": np.array([3, -1, 2], dtype=np.int32),
    "none": np.zeros((0, 0), dtype=np.int64),
    "float": np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3),
    "bool": np.array([[True, False, True]]),
    "view": np.arange(12, dtype=np.int64).reshape(3, 4).T,  # not contiguous
}


def test_arrays_arrive_as_they_were() -> None:
    buffer, there = send(ARRAYS, CPU)
    assert list(there) == list(ARRAYS)
    for name, array in ARRAYS.items():
        assert there[name].numpy().dtype == array.dtype
        np.testing.assert_array_equal(there[name].numpy(), array)
        assert (there[name].data_ptr() - buffer.data_ptr()) % ALIGNMENT == 0 or there[name].numel() == 0
    there["int"][0] = 9  # a view, not a copy
    assert buffer[there["int"].storage_offset() * 4] == 9
    assert send({}, CPU)[0].numel() == 0


def test_the_same_place_in_another_buffer() -> None:
    buffer, there = send(ARRAYS, CPU)
    other = buffer.clone()
    moved = {name: in_buffer(tensor, other) for name, tensor in there.items()}
    buffer.zero_()
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(moved[name].numpy(), array)


def test_what_is_on_the_host_is_not_copied() -> None:
    weight, moment = torch.ones(3), torch.zeros(3)
    policy, moments = host_copies({"w": weight}, {"m": moment})
    assert policy["w"] is weight and moments["m"] is moment


def test_a_weight_that_has_two_names_stays_one_tensor() -> None:
    weight = torch.arange(6.0)
    (found,) = host_copies({"embedding": weight.detach(), "output": weight.detach()})
    assert found["embedding"] is found["output"]  # or it would be written twice


def test_other_views_of_the_same_memory_are_not_taken_for_it() -> None:
    square = torch.arange(4.0).view(2, 2)
    others = {"flat": square.view(4), "turned": square.T, "whole": square.view(torch.int32)}
    (found,) = host_copies({"square": square, **others})
    for name, expected in others.items():
        assert found[name].dtype is expected.dtype and torch.equal(found[name], expected), name


class Stream:
    """Without a device everything has happened at once."""

    def wait_event(self, event: Stream) -> None: ...
    def synchronize(self) -> None: ...
    def record(self) -> None: ...


@pytest.mark.parametrize("piece", [3, 64, 1 << 20])
def test_every_byte_of_every_tensor_arrives(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty
    for name in ("Stream", "Event"):
        monkeypatch.setattr(torch.cuda, name, Stream)
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory=False, **options: empty(*shape, **options))
    monkeypatch.setattr(module, "PIECE", piece)
    torch.manual_seed(0)
    shapes = [(100,), (7, 9), (), (0, 4), (1,), (30, 5)]
    there = [torch.randn(shape).to(dtype) for shape in shapes for dtype in (torch.float32, torch.bfloat16, torch.int64)]
    here = [torch.zeros_like(tensor) for tensor in there]
    fetch(list(zip(there, here, strict=True)), torch.device("cpu"))
    assert all(torch.equal(a, b) for a, b in zip(there, here, strict=True))
