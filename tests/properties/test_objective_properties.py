"""What every objective must satisfy, whatever the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batches import SETTING_IDS, SETTINGS, random_batch
from stalewise.objectives import OBJECTIVES, evaluate
from stalewise.objectives.batch_statistics import WeightSums

every_setting = pytest.mark.parametrize(("name", "params"), SETTINGS, ids=SETTING_IDS)
some_examples = settings(max_examples=settings().max_examples * 2 // 5)  # of each of a dozen objectives
batches = st.builds(
    random_batch,
    sequences=st.integers(1, 8),
    tokens=st.integers(1, 10),
    drift=st.sampled_from([0.01, 0.3, 2.0]),
    seed=st.integers(0, 10_000),
)


def loss_and_gradient(name: str, params: dict[str, Any], batch: dict[str, Tensor], **more: Any) -> tuple[float, Tensor]:
    logp = batch["logp"].clone().requires_grad_()
    result = evaluate(name, **(batch | {"logp": logp}), params=params, **more)
    (gradient,) = torch.autograd.grad(result.loss, logp)
    return result.loss.item(), gradient


def assert_same(one: tuple[float, Tensor], other: tuple[float, Tensor]) -> None:
    assert one[0] == pytest.approx(other[0], rel=1e-9, abs=1e-12)
    torch.testing.assert_close(one[1], other[1], rtol=1e-9, atol=1e-12)


@every_setting
@some_examples
@given(batches, st.randoms(use_true_random=False))
def test_the_order_of_sequences_changes_nothing(
    name: str, params: dict[str, Any], batch: dict[str, Tensor], random: Any
) -> None:
    order = list(range(len(batch["advantage"])))
    random.shuffle(order)
    loss, gradient = loss_and_gradient(name, params, batch)
    permuted = loss_and_gradient(name, params, {key: value[order] for key, value in batch.items()})
    assert_same((loss, gradient[order]), permuted)


@every_setting
@some_examples
@given(batches, st.integers(0, 3), st.integers(0, 3))
def test_padding_may_be_anywhere(
    name: str, params: dict[str, Any], batch: dict[str, Tensor], left: int, right: int
) -> None:
    def shift(value: Tensor) -> Tensor:
        if value.ndim == 1:
            return value
        return torch.nn.functional.pad(value.double(), (left, right), value=0.0 if value.dtype is torch.bool else 7.0)

    loss, gradient = loss_and_gradient(name, params, batch)
    shifted_loss, shifted = loss_and_gradient(name, params, {key: shift(value) for key, value in batch.items()})
    width = gradient.shape[1]
    assert_same((loss, gradient), (shifted_loss, shifted[:, left : left + width]))
    assert shifted[:, :left].abs().sum() == 0
    assert shifted[:, left + width :].abs().sum() == 0


@every_setting
@some_examples
@given(batches)
def test_masking_a_sequence_equals_removing_it(name: str, params: dict[str, Any], batch: dict[str, Tensor]) -> None:
    more = random_batch(sequences=2, tokens=batch["logp"].shape[1], seed=1)
    joined = {key: torch.cat([batch[key], more[key]]) for key in batch}
    joined["mask"][len(batch["mask"]) :] = False
    loss, gradient = loss_and_gradient(name, params, joined)
    assert_same((loss, gradient[: len(batch["mask"])]), loss_and_gradient(name, params, batch))


@every_setting
@some_examples
@given(batches)
def test_masking_a_token_equals_removing_it(name: str, params: dict[str, Any], batch: dict[str, Tensor]) -> None:
    width = batch["logp"].shape[1]
    if width == 1:
        return
    batch = batch | {"mask": torch.ones_like(batch["mask"])}
    keep = [column for column in range(width) if column != width // 2]
    masked = batch | {"mask": batch["mask"].clone()}
    masked["mask"][:, width // 2] = False
    removed = {key: value[:, keep] if value.ndim == 2 else value for key, value in batch.items()}
    loss, gradient = loss_and_gradient(name, params, masked)
    assert_same((loss, gradient[:, keep]), loss_and_gradient(name, params, removed))


@every_setting
@some_examples
@given(batches)
def test_on_fresh_data_each_is_the_policy_gradient(name: str, params: dict[str, Any], batch: dict[str, Tensor]) -> None:
    fresh = batch | {"behaviour_logp": batch["logp"], "proximal_logp": batch["logp"]}
    _, gradient = loss_and_gradient(name, params, fresh)
    mask = batch["mask"].double()
    if OBJECTIVES[name].reduction == "sequence":
        weight = mask / mask.sum(dim=1, keepdim=True) / len(mask)
    else:
        weight = mask / mask.sum()
    torch.testing.assert_close(gradient, -batch["advantage"][:, None] * weight, rtol=1e-12, atol=1e-15)


@every_setting
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [60.0, -60.0])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_gradients_are_finite_for_log_ratios_of_sixty(
    name: str, params: dict[str, Any], dtype: torch.dtype, scale: float, sign: float
) -> None:
    logp = torch.tensor([[-61.0, -1.0], [-1.0, -61.0]], dtype=dtype)
    far = logp - scale * torch.tensor([[1.0, 0.0], [0.0, 0.5]], dtype=dtype)
    batch = {
        "logp": logp,
        "behaviour_logp": far,
        "proximal_logp": far,
        "advantage": sign * torch.ones(2, dtype=dtype),
        "mask": torch.ones(2, 2),
    }
    loss, gradient = loss_and_gradient(name, params, batch)
    assert torch.tensor(loss).isfinite()
    assert gradient.isfinite().all()


@every_setting
@some_examples
@given(batches)
def test_no_gradient_on_vetoed_or_masked_tokens(name: str, params: dict[str, Any], batch: dict[str, Tensor]) -> None:
    _, gradient = loss_and_gradient(name, params, batch)
    assert gradient[~batch["mask"]].abs().sum() == 0
    if name != "mu_grpo":
        return
    trigger = batch["mask"] & (batch["logp"] - batch["behaviour_logp"] < -9.3) & (batch["advantage"] < 0)[:, None]
    if params["scope"] != "post":
        assert gradient[trigger].abs().sum() == 0
    after = trigger.cumsum(dim=1) - trigger.int() > 0
    if params["scope"] != "trigger":
        assert gradient[after].abs().sum() == 0


@every_setting
@some_examples
@given(batches)
def test_float32_agrees_with_float64(name: str, params: dict[str, Any], batch: dict[str, Tensor]) -> None:
    # Rounding a log-ratio to float32 may move a token over a bound: keep the float32 numbers in both.
    single = {key: value.float() if value.dtype is torch.float64 else value for key, value in batch.items()}
    double = {key: value.double() if value.dtype is torch.float32 else value for key, value in single.items()}
    loss, gradient = loss_and_gradient(name, params, double)
    single_loss, single_gradient = loss_and_gradient(name, params, single)
    scale = gradient.abs().max().item()
    assert single_loss == pytest.approx(loss, rel=1e-4, abs=1e-4 * max(1.0, scale))
    torch.testing.assert_close(single_gradient.double(), gradient, rtol=1e-4, atol=1e-4 * scale)


log_weights = st.lists(st.floats(-50, 50), min_size=1, max_size=30)


def weight_sums(values: list[float]) -> WeightSums:
    return WeightSums.of(torch.tensor(values, dtype=torch.float64), torch.ones(len(values), dtype=torch.bool))


@given(log_weights)
def test_effective_sample_size_lies_between_one_over_n_and_one(values: list[float]) -> None:
    ess = weight_sums(values).effective_sample_size().item()
    assert 1 / len(values) * (1 - 1e-12) <= ess <= 1
    spread = max(values) - min(values)
    if spread == 0:
        assert ess == 1
    if spread > 1e-3:
        assert ess < 1


@given(log_weights, log_weights)
def test_merging_weights_is_concatenation(one: list[float], other: list[float]) -> None:
    merged = weight_sums(one).merge(weight_sums(other))
    assert merged.pack().tolist() == pytest.approx(weight_sums(one + other).pack().tolist(), rel=1e-12)


@given(log_weights, st.floats(-20, 20))
def test_effective_sample_size_does_not_depend_on_the_scale_of_the_weights(values: list[float], shift: float) -> None:
    shifted = weight_sums([value + shift for value in values]).effective_sample_size().item()
    assert shifted == pytest.approx(weight_sums(values).effective_sample_size().item(), rel=1e-9)
