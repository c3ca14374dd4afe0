"""Tensors that are about to be written to files. What only a GPU can show, benchmarks/check_gpu.py checks."""

from __future__ import annotations

import contextlib

import pytest
import torch

from stalewise.models import transfer as module
from stalewise.models.transfer import fetch, host_copies


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
