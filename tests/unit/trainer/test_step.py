"""One update: gradient, clipping, step and numbers, which do not depend on how it is split."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from stalewise.objectives import OBJECTIVES
from stalewise.objectives.diagnostics import TokenSums
from stalewise.store import RolloutColumns
from stalewise.trainer.micro_batch import Layout, MicroBatch, micro_batches
from stalewise.trainer.step import compute_gradients, update
from stalewise.trainer.trainer import NonFiniteUpdate, Trainer
from trainer_inputs import (
    POLICY,
    config,
    gradient_after_update,
    rollouts,
)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_token_budget_changes_gradients_only_by_rounding(name: str) -> None:
    whole, whole_metrics = gradient_after_update(name, 100_000)
    split, split_metrics = gradient_after_update(name, 40)
    assert whole.norm() > 1e-3
    assert (split - whole).norm() <= 2e-4 * whole.norm()
    assert split_metrics == pytest.approx(whole_metrics, rel=1e-3, abs=1e-4, nan_ok=True)


def test_gradients_do_not_depend_on_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = gradient_after_update("grpo", 100_000)
    calls: list[int] = []

    def padded(rows: RolloutColumns, layout: Layout, device: torch.device, **options: Any) -> Iterator[MicroBatch]:
        for part in micro_batches(rows, replace(layout, common_sizes=True, two_halves=True), device, **options):
            calls.append(len(part.inputs))
            yield part

    monkeypatch.setattr("stalewise.trainer.packing.HALVES_RATIO", 1.5)
    monkeypatch.setattr("stalewise.trainer.batch.micro_batches", padded)
    found, _ = gradient_after_update("grpo", 60)
    assert calls.count(2) > 1 and (found - whole).norm() <= 2e-4 * whole.norm()


def test_an_update_says_what_happened() -> None:
    trainer = Trainer(config(objective={"name": "grpo"}), POLICY)
    before = [parameter.detach().clone() for parameter in trainer.names]
    rows = rollouts()
    metrics = trainer.update(rows)
    change = math.sqrt(sum(((p - b) ** 2).sum().item() for p, b in zip(trainer.names, before, strict=True)))
    assert metrics["update_norm"] == pytest.approx(change, rel=1e-5)
    assert metrics["update_norm_per_lr"] == pytest.approx(change / 1e-3, rel=1e-5)
    assert metrics["drift"] == trainer.drift == metrics["update_norm"]
    assert metrics["reward"] == rows.reward.mean()
    assert metrics["truncated_fraction"] == rows.truncated.mean()
    assert metrics["tokens"] == len(rows.response_ids)
    assert (metrics["age_mean"], metrics["age_max"], metrics["taken"], trainer.version) == (0.0, 0.0, 1.0, 1)
    assert trainer.update(rows)["age_max"] == 1.0


def test_the_gradient_norm_is_limited() -> None:
    trainer = Trainer(config(optimizer={"learning_rate": 1e-3, "max_grad_norm": 0.01}), POLICY)
    metrics = trainer.update(rollouts())
    clipped = math.sqrt(sum((p.grad**2).sum().item() for p in trainer.names if p.grad is not None))
    assert metrics["grad_norm"] > 0.01
    assert clipped == pytest.approx(0.01, rel=1e-3)


def test_vcpo_shortens_the_step_by_the_root_of_the_sequence_ess() -> None:
    optimizer = {"learning_rate": 1e-3, "step_control": "vcpo"}
    metrics = Trainer(config(optimizer=optimizer), POLICY).update(rollouts())
    assert 0 < metrics["step_factor"] < 0.99
    assert metrics["step_factor"] == pytest.approx(math.sqrt(metrics["ess_sequence"]))
    full = Trainer(config(), POLICY).update(rollouts())
    assert metrics["update_norm"] == pytest.approx(metrics["step_factor"] * full["update_norm"], rel=1e-3)


def test_a_controlled_rate_is_of_the_kind_that_a_fused_step_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(config(optimizer={"learning_rate": 1e-3, "step_control": "vcpo"}), POLICY)
    step, rates = trainer.optimizer.step, list[Any]()
    monkeypatch.setattr(trainer.optimizer, "step", lambda rate, *rest: (rates.append(rate), step(rate, *rest))[1])
    trainer.update(rollouts())
    assert rates[0].dtype is torch.float32


def test_non_finite_updates_stop_and_change_nothing() -> None:
    trainer = Trainer(config(), POLICY)
    rows = rollouts()
    rows.behaviour_logp[3] = -500.0  # a ratio of e^497
    before = [parameter.detach().clone() for parameter in trainer.names]
    with pytest.raises(NonFiniteUpdate, match=r"update 0: 1 tokens with a non-finite ratio \(rollout 0 token 3\)"):
        trainer.update(rows)
    assert all(torch.equal(p, b) for p, b in zip(trainer.names, before, strict=True))
    assert trainer.version == 0


@pytest.mark.parametrize("value", [-500.0, math.inf])
def test_any_ratio_that_is_not_finite_stops_the_step(value: float) -> None:
    trainer, rows = Trainer(config(), POLICY), rollouts()
    before = [parameter.detach().clone() for parameter in trainer.names]
    rows.behaviour_logp[3] = value
    with pytest.raises(NonFiniteUpdate, match=r"1 tokens with a non-finite ratio \(rollout 0 token 3\)"):
        trainer.update(rows)
    assert all(torch.equal(p, b) for p, b in zip(trainer.names, before, strict=True))


def test_the_numbers_of_an_update_leave_beside_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, held, left = Trainer(config(), POLICY), list[object](), list[bool]()
    within = False

    @contextlib.contextmanager
    def reading(*read: object) -> Iterator[None]:
        nonlocal within
        held[:], within = read, True
        yield
        within = False

    norms = list[torch.Tensor]()
    take = trainer.optimizer.step
    monkeypatch.setattr(trainer.execution.side_stream, "reading", reading)
    monkeypatch.setattr(trainer.optimizer, "step", lambda *given: norms.append(take(*given)) or norms[0])
    monkeypatch.setattr("stalewise.trainer.step.to_host", lambda vector: left.append(within) or (lambda: vector))
    trainer.update(rollouts())
    assert left == [True]
    numbers, places, sums = held
    assert isinstance(numbers, tuple) and numbers[3] is norms[0] and isinstance(sums, TokenSums)
    assert isinstance(places, torch.Tensor)


def test_an_update_from_its_parts_is_that_of_the_trainer() -> None:
    whole, parts = (Trainer(config(learner={"tokens_per_micro_batch": 60}), POLICY) for _ in range(2))
    batch = parts.prepare(rollouts())
    loss, nonfinite, sums, values = compute_gradients(parts.execution, parts.rule, batch.ranks[0], batch.micro_batches)
    gradient = torch.cat([weight.grad.flatten() for weight in parts.names if weight.grad is not None])
    assert torch.equal(gradient, whole.gradient(rollouts())) and nonfinite.tolist() == [-1] * len(batch.micro_batches)
    metrics = whole.update(rollouts())
    assert (metrics["loss"], metrics["tokens"]) == (loss.item(), sums.summary()["tokens"])
    assert values is not None and values()[0].shape == (1, metrics["tokens"])
    numbers, _ = update(parts.execution, parts.rule, batch.ranks[0], batch.micro_batches, rate=1e-3)
    assert numbers()[:4].tolist() == [metrics[name] for name in ("loss", "grad_norm", "step_factor", "update_norm")]
    assert all(torch.equal(one, other) for one, other in zip(parts.names, whole.names, strict=True))


def test_without_a_record_no_token_values_are_gathered() -> None:
    trainer = Trainer(config(learner={"record_tokens": False}), POLICY)
    assert not trainer.rule.record_tokens and trainer.enqueue(rollouts()).tokens() is None
