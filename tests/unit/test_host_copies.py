"""Tensors that are about to be written to files. What only a GPU can show, benchmarks/check_gpu.py checks."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest
import torch

from stalewise.learn import host_copies as module
from stalewise.learn.host_copies import host_copies, locked_bytes, most_page_locked


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


def test_locked_memory_is_counted_as_torch_takes_it() -> None:
    assert [locked_bytes(torch.empty(n, dtype=torch.uint8)) for n in (1, 5, 64, 65)] == [1, 8, 64, 128]


def test_no_more_memory_is_locked_than_a_machine_can_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=8000))
    assert most_page_locked() == 1000
    monkeypatch.setattr(module, "MOST_BYTES", 10)
    assert most_page_locked() == 10
