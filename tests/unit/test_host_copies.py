"""Tensors that are about to be written to files. What only a GPU can show, benchmarks/check_gpu.py checks."""

from __future__ import annotations

import os

import pytest
import torch

from stalewise.learn import host_copies as module
from stalewise.learn.host_copies import host_copies, most_page_locked


def test_what_is_on_the_host_is_not_copied() -> None:
    weight, moment = torch.ones(3), torch.zeros(3)
    policy, moments = host_copies({"w": weight}, {"m": moment})
    assert policy["w"] is weight and moments["m"] is moment


def test_a_weight_that_has_two_names_stays_one_tensor() -> None:
    weight = torch.arange(6.0)
    (found,) = host_copies({"embedding": weight.detach(), "output": weight.detach(), "row": weight.view(2, 3)})
    assert found["embedding"] is found["output"]  # or it would be written twice
    assert found["row"].shape == (2, 3)


def test_no_more_memory_is_locked_than_a_machine_can_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(os, "sysconf", sizes.__getitem__)
    assert most_page_locked() == 1000 * 4096 // 8
    monkeypatch.setattr(module, "MOST_BYTES", 10)
    assert most_page_locked() == 10
