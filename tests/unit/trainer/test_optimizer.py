"""AdamW with moments of each precision, learning-rate schedules, and operations on lists of tensors."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from stalewise.config import OptimizerSection
from stalewise.trainer import optimizer
from stalewise.trainer.optimizer import AdamW, add_to, buckets, learning_rate, moments_by_file, restore_moments


def test_learning_rate_schedules() -> None:
    # Warm-up of 2: ½, 1. Cosine over the 8 that follow: 1 at its first, ½ in the middle.
    cosine = OptimizerSection(learning_rate=2.0, warmup_updates=2, schedule="cosine")
    rates = [learning_rate(update, cosine, updates=10) for update in range(10)]
    assert rates[:3] == [1.0, 2.0, 2.0]
    assert rates[6] == pytest.approx(1.0)
    assert rates[9] == pytest.approx(1 + math.cos(7 / 8 * math.pi))
    linear = OptimizerSection(learning_rate=2.0, schedule="linear")
    assert [learning_rate(update, linear, updates=4) for update in range(4)] == [2.0, 1.5, 1.0, 0.5]
    assert learning_rate(3, OptimizerSection(learning_rate=2.0), updates=4) == 2.0


def test_amounts_of_lower_precision_are_added_in_that_of_the_totals() -> None:
    totals = [torch.full((2,), 1.0), torch.full((3,), 256.0)]
    add_to(totals, [torch.full((2,), 0.5), torch.full((3,), 1.0, dtype=torch.bfloat16)])
    assert [total.tolist() for total in totals] == [[1.5] * 2, [257.0] * 3]  # 257 is no bfloat16


def test_amounts_of_equal_precision_need_no_widening() -> None:
    totals = [torch.full((2,), 1.0, dtype=torch.bfloat16)]
    add_to(totals, [torch.full((2,), 0.5, dtype=torch.bfloat16)])  # as with bfloat16-only on a GPU
    assert totals[0].tolist() == [1.5, 1.5]


def weights() -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape)) for shape in ((3, 5), (7,), (), (2, 2, 2), (40, 300))]


def set_gradients(parameters: list[torch.nn.Parameter], number: int) -> None:
    torch.manual_seed(number)
    for parameter in parameters[1:]:  # the first never gets one
        parameter.grad = torch.randn(parameter.shape)


NO = torch.tensor(False)


def test_float32_moments_are_those_of_torch_to_the_last_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer, "BUCKET", 10)
    ours, theirs = weights(), weights()
    settings = OptimizerSection(weight_decay=0.1)
    adam, expected = AdamW(ours, settings), torch.optim.AdamW(theirs, weight_decay=0.1, fused=True)
    for number in range(1, 4):
        set_gradients(ours, number)
        set_gradients(theirs, number)
        before = [parameter.detach().clone() for parameter in theirs]
        expected.param_groups[0]["lr"] = 1e-3 * number
        expected.step()
        length = adam.step(1e-3 * number, NO, number)
        moved = torch.cat([(a - b.detach()).flatten() for a, b in zip(before, theirs, strict=True)]).double().norm()
        assert length.item() == pytest.approx(moved.item(), rel=1e-6)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)
    for one, other in zip(ours[1:], theirs[1:], strict=True):
        assert all(torch.equal(adam.state[one][name], expected.state[other][name]) for name in expected.state[other])
    assert ours[0] not in adam.state


@pytest.mark.parametrize("moments", ["float32", "bfloat16", "int8"])
def test_an_unusable_step_changes_nothing(moments: Any) -> None:
    ours = weights()
    adam = AdamW(ours, OptimizerSection(moments=moments))
    set_gradients(ours, 1)
    adam.step(1e-2, NO, 1)
    before = [parameter.detach().clone() for parameter in ours]
    set_gradients(ours, 2)
    assert ours[4].grad is not None
    ours[4].grad[0, 0] = torch.inf
    assert adam.step(1e-2, ~NO, 2).item() == 0
    assert all(torch.equal(a, b.detach()) for a, b in zip(before, ours, strict=True))


@pytest.mark.parametrize("moments", ["float32", "bfloat16", "int8"])
def test_moments_go_through_files_and_go_on_exactly(moments: Any, tmp_path: Path) -> None:
    ours, settings = weights(), OptimizerSection(moments=moments)
    adam = AdamW(ours, settings, seed=3)
    for number in (1, 2):
        set_gradients(ours, number)
        adam.step(1e-2, NO, number)
    names: dict[torch.Tensor, str] = {parameter: f"w{index}" for index, parameter in enumerate(ours)}
    for file, tensors in moments_by_file(adam, names, lambda name, own: own).items():
        save_file(tensors, tmp_path / file)
    resumed = [torch.nn.Parameter(parameter.detach().clone()) for parameter in ours]
    again = AdamW(resumed, settings, seed=3)
    named: dict[torch.Tensor, str] = {parameter: f"w{index}" for index, parameter in enumerate(resumed)}
    restore_moments(again, named, tmp_path, load_file, steps=2)
    for parameters, one in ((ours, adam), (resumed, again)):
        set_gradients(parameters, 3)
        one.step(1e-2, NO, 3)
    for a, b in zip(ours, resumed, strict=True):
        assert torch.equal(a, b)
        assert adam.state.get(a, {}).keys() == again.state.get(b, {}).keys()
        assert all(torch.equal(tensor, again.state[b][name]) for name, tensor in adam.state.get(a, {}).items())


def test_bytes_of_the_moments() -> None:
    # 40 × 300 numbers; in 8 bits 2 blocks a row, with a scale of 4 bytes for each moment.
    expected = {"float32": 8 * 12000, "bfloat16": 4 * 12000, "int8": 2 * 12000 + 2 * 4 * 80}
    for moments, size in expected.items():
        ours = weights()
        adam = AdamW(ours, OptimizerSection(moments=cast(Any, moments)))
        set_gradients(ours, 1)
        adam.step(1e-2, NO, 1)
        assert sum(tensor.nbytes for name, tensor in adam.state[ours[4]].items() if name != "step") == size


def test_buckets_keep_the_order_and_the_limit() -> None:
    tensors = [torch.zeros(size) for size in (4, 6, 1, 20, 3, 7)]
    assert [[len(tensor) for tensor in bucket] for bucket in buckets(tensors, 10)] == [[4, 6], [1], [20], [3, 7]]
    assert buckets([], 10) == []
