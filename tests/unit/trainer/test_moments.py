"""Moments in fewer bits: rounding is right on average, and steps follow those with float32 moments."""

from __future__ import annotations

import pytest
import torch

from stalewise.trainer import moments
from stalewise.trainer.moments import StepNumbers, new_moments, step, step_key, to_bfloat16, to_codes

KINDS = ("bfloat16", "int8")


def numbers(number: int = 1, *, rate: float = 1e-2, usable: float = 1.0, key: int = 0) -> StepNumbers:
    beta1, beta2 = 0.9, 0.999
    scalars = torch.tensor([rate, 1 - beta1**number, (1 - beta2**number) ** 0.5, usable])
    return StepNumbers(beta1, beta2, 1e-8, 0.0, scalars, key)


def test_bfloat16_is_one_of_two_neighbours_and_right_on_average() -> None:
    # 1 + 1/512 lies a quarter of the way from 1 to the next bfloat16, 1 + 1/128.
    number = torch.tensor([1 + 1 / 512, -(1 + 1 / 512)])
    rounded = torch.stack([to_bfloat16(number, torch.full((2,), bits)).float() for bits in range(0, 65536, 64)])
    assert set(rounded[:, 0].tolist()) == {1.0, 1 + 1 / 128}
    assert (rounded[:, 0] > 1).float().mean() == pytest.approx(0.25, abs=1e-3)
    assert torch.equal(rounded[:, 1], -rounded[:, 0])
    exact = torch.tensor([0.0, 0.5, -3.0])
    assert torch.equal(to_bfloat16(exact, torch.full((3,), 65535)).float(), exact)


@pytest.mark.parametrize(("most", "power"), [(127, 2), (255, 4)])
def test_codes_are_right_on_average_and_exact_at_the_ends(most: int, power: int) -> None:
    size = torch.tensor([[0.0, 1e-6, 0.013, 0.4, 1.7, 2.0]])
    scale = torch.tensor([[2.0]])
    draws = [to_codes(size, scale, torch.full((1, 6), bits), most, power) for bits in range(0, 65536, 64)]
    values = torch.stack([2.0 * (code / most) ** power for code in draws])
    torch.testing.assert_close(values.mean(dim=0), size, rtol=3e-3, atol=2.0 / most**power)
    assert all(code[0, 0] == 0 and code[0, 5] == most for code in draws)
    assert (values.amax(dim=0) - values.amin(dim=0) <= 2.0 * power / most).all()  # neighbouring codes


def test_a_block_of_zeros_stays_one() -> None:
    weight = torch.ones(2, 300)
    held = new_moments(weight, "int8")
    step(weight, torch.zeros(2, 300), held, numbers())
    assert torch.equal(weight, torch.ones(2, 300))
    assert not any(tensor.any() for tensor in held.values())


def test_a_second_moment_never_vanishes_beside_a_large_one() -> None:
    weight, gradient = torch.zeros(1, 256), torch.full((1, 256), 1e-9)
    gradient[0, 0] = 1e3
    held = new_moments(weight, "int8")
    for number in range(1, 20):
        step(weight, gradient, held, numbers(number, key=number))
    assert held["exp_avg_sq"].min() >= 1
    assert weight.abs().max() < 19 * 1e-2 * 1.1  # no number moves by more than AdamW lets it


@pytest.mark.parametrize("kind", KINDS)
def test_steps_follow_those_with_float32_moments(kind: str) -> None:
    torch.manual_seed(0)
    goal, weight = torch.randn(4, 300), torch.zeros(4, 300)
    exact = torch.nn.Parameter(weight.clone())
    optimizer = torch.optim.AdamW([exact], lr=1e-2, weight_decay=0.0)
    held, distance = new_moments(weight, kind), list[float]()
    for number in range(1, 201):
        noise = 0.3 * torch.randn(4, 300)
        step(weight, weight - goal + noise, held, numbers(number, key=step_key(0, number, 0)))
        exact.grad = exact.detach() - goal + noise
        optimizer.step()
        distance.append((weight - exact.detach()).norm().item())
    moved = exact.detach().norm().item()
    assert max(distance) < 0.05 * moved
    assert (weight - goal).norm().item() == pytest.approx((exact.detach() - goal).norm().item(), rel=0.03)


def test_a_moving_average_does_not_stand_still() -> None:
    """0.999 of a bfloat16 rounds to the same bfloat16: only by chance does the second moment fall."""
    weight = torch.zeros(8, 256)
    held = new_moments(weight, "bfloat16")
    held["exp_avg_sq"].fill_(1.0)
    for number in range(1, 501):
        step(weight, torch.zeros(8, 256), held, numbers(number, key=step_key(0, number, 0)))
    assert held["exp_avg_sq"].float().mean().item() == pytest.approx(0.999**500, rel=0.02)


@pytest.mark.parametrize("kind", KINDS)
def test_working_in_pieces_changes_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    weight, gradient = torch.randn(6, 5, 60), torch.randn(6, 5, 60)
    whole, held = weight.clone(), new_moments(weight, kind)
    square = step(whole, gradient, held, numbers(key=7))
    assert square.item() == pytest.approx((whole - weight).double().square().sum().item(), rel=1e-6)
    monkeypatch.setattr(moments, "PIECE", 2 * 300)
    pieces, held_pieces = weight.clone(), new_moments(weight, kind)
    step(pieces, gradient, held_pieces, numbers(key=7))
    assert torch.equal(pieces, whole) and all(torch.equal(held[name], held_pieces[name]) for name in held)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_is_not_to_be_taken_changes_nothing(kind: str) -> None:
    torch.manual_seed(0)
    weight = torch.randn(3, 300)
    held = new_moments(weight, kind)
    step(weight, torch.randn(3, 300), held, numbers())
    before = [weight.clone(), *(tensor.clone() for tensor in held.values())]
    square = step(weight, torch.full((3, 300), torch.nan), held, numbers(2, usable=0.0))
    assert square.item() == 0
    assert all(torch.equal(one, other) for one, other in zip(before, [weight, *held.values()], strict=True))


def test_keys_differ_by_seed_step_and_tensor() -> None:
    keys = {step_key(seed, number, tensor) for seed in range(10) for number in range(10) for tensor in range(10)}
    assert len(keys) == 1000 and all(0 <= key < 1 << 32 for key in keys)
