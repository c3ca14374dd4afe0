"""Keys that several segments see: the operator against plain indexing and its gradient."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from stalewise.models import kernels
from stalewise.models.attention import packed_arguments
from stalewise.models.kernels.gather import _gather_keys, copies_of, gather_keys

KEYS = np.array([0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 4, 5])  # a prompt of three tokens and two responses


def gathered(dtype: torch.dtype, gather: Any = gather_keys) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Keys and values [6, 2, 4] that want gradients, and what the operator makes of them."""
    torch.manual_seed(0)
    tensors = [torch.randn(6, 2, 4, dtype=dtype, requires_grad=True) for _ in range(2)]
    copies = [torch.from_numpy(x) for x in copies_of(KEYS, 6)]
    return tensors, list(gather(*tensors, torch.from_numpy(KEYS), *copies))


@pytest.mark.parametrize("gather", [gather_keys, _gather_keys])
def test_gathering_is_indexing_and_so_is_its_gradient(gather: Any) -> None:
    (key, value), found = gathered(torch.float32, gather)
    expected = [key[KEYS], value[KEYS]]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    weights = [torch.randn_like(x) for x in expected]
    mine, plain = (
        torch.autograd.grad([(x * w).sum() for x, w in zip(out, weights, strict=True)], [key, value])
        for out in (found, expected)
    )
    for a, b in zip(mine, plain, strict=True):
        torch.testing.assert_close(a, b)
    assert not torch.allclose(mine[0], mine[1])


def test_keys_and_values_may_differ_in_shape() -> None:
    key, value = (torch.randn(6, 2, width, requires_grad=True) for width in (4, 3))
    copies = [torch.from_numpy(x) for x in copies_of(KEYS, 6)]
    found = gather_keys(key, value, torch.from_numpy(KEYS), *copies)
    mine = torch.autograd.grad([x.square().sum() for x in found], [key, value])
    plain = torch.autograd.grad([x[KEYS].square().sum() for x in (key, value)], [key, value])
    for a, b in zip(mine, plain, strict=True):
        torch.testing.assert_close(a, b)


def test_copies_are_added_up_in_float32() -> None:
    (key, _), (found, _) = gathered(torch.bfloat16)
    gradient = torch.zeros_like(found)
    gradient[[0, 3, 7], 0, 0] = torch.tensor([256.0, 1.0, 1.0], dtype=torch.bfloat16)  # 256 + 1 is 256 in bfloat16
    (added,) = torch.autograd.grad(found, [key], gradient)
    assert added[0, 0, 0] == 258


@pytest.mark.parametrize(
    "check",
    [
        "test_schema",
        "test_autograd_registration",
        "test_faketensor",
        pytest.param("test_aot_dispatch_dynamic", marks=pytest.mark.nightly),  # 15 s of compiling
    ],
)
def test_the_operator_is_sound(check: str) -> None:
    tensors, _ = gathered(torch.float32)
    copies = [torch.from_numpy(x) for x in copies_of(KEYS, 6)]
    torch.library.opcheck(_gather_keys, (*tensors, torch.from_numpy(KEYS), *copies), test_utils=check)


def test_a_compiler_meets_the_operator() -> None:
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    tensors, expected = gathered(torch.float32)
    copies = [torch.from_numpy(x) for x in copies_of(KEYS, 6)]
    compiled: Any = torch.compile(gather_keys, backend=backend)
    found = compiled(*tensors, torch.from_numpy(KEYS), *copies)
    assert any("stalewise.gather_keys" in name for name in seen)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("grids", [True, False])
def test_copies_are_known_where_keys_are_gathered(grids: bool) -> None:
    made = packed_arguments(np.array([3, 1, 2]), np.array([3, 4, 5]), KEYS, torch.device("cpu"), grids=grids)
    assert len(made["copy_M"]) == (0 if grids else len(KEYS)) and len(made["copy_start"]) == (0 if grids else 7)


def test_triton_is_read_ahead_where_it_is_and_nothing_happens_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    monkeypatch.setitem(sys.modules, "triton.runtime.cache", SimpleNamespace(triton_key=lambda: read.append("key")))
    monkeypatch.setattr(kernels, "can_compile", lambda: True)
    kernels.warm_up_triton().join()
    assert read == ["key"]
    monkeypatch.setitem(sys.modules, "triton.runtime.cache", None)  # where a later release has it, nobody knows
    kernels.warm_up_triton().join()
    monkeypatch.setattr(kernels, "can_compile", lambda: False)
    kernels.warm_up_triton().join()
    assert read == ["key"]
