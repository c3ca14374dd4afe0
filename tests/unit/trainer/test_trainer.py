"""Checkpoints, the proximal policy, and what happens when memory runs out."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from stalewise.errors import ModelError
from stalewise.trainer.logprobs import (
    response_logp,
)
from stalewise.trainer.optimizer import AdamW
from stalewise.trainer.trainer import Trainer
from stalewise.trainer.weights import FlatWeights, Weights
from trainer_inputs import (
    POLICY,
    config,
    rollouts,
    tokens_of,
)


@pytest.mark.parametrize("name", ["mu_grpo", "p3o_two_anchor"])
def test_going_on_from_a_checkpoint_is_exact(name: str, tmp_path: Path) -> None:
    settings = config(objective={"name": name, "proximal_every": 3})
    batches = [rollouts(seed=seed) for seed in range(5)]
    straight = Trainer(settings, POLICY)
    for rows in batches:
        straight.update(rows)
    first = Trainer(settings, POLICY)
    for rows in batches[:2]:
        first.update(rows)
    first.save(tmp_path)
    second = Trainer(settings, tmp_path)
    second.restore(tmp_path, {"version": 2, **first.state()})
    for rows in batches[2:]:
        second.update(rows)
    assert all(torch.equal(a, b) for a, b in zip(straight.names, second.names, strict=True))
    assert straight.drift == second.drift


def test_the_proximal_policy_is_a_snapshot_of_every_few_updates() -> None:
    trainer = Trainer(config(objective={"name": "decoupled_ppo", "proximal_every": 2}), POLICY)
    snapshots = []
    for seed in range(4):
        trainer.update(rollouts(seed=seed))
        snapshots.append(torch.cat([tensor.flatten() for tensor in trainer.execution.proximal.values()]).clone())
    assert torch.equal(snapshots[0], snapshots[1])
    assert not torch.equal(snapshots[1], snapshots[2])
    assert torch.equal(snapshots[2], snapshots[3])


def test_half_the_token_budget_after_running_out_of_memory_and_then_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    largest, told = [60], []

    def limited(model: Any, part: Any, **options: Any) -> Any:
        if sum(tokens_of(part)) > largest[0]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return response_logp(model, part, **options)

    monkeypatch.setattr("stalewise.trainer.execution.response_logp", limited)
    settings = config(learner={"tokens_per_micro_batch": 100}, objective={"name": "grpo"})
    trainer = Trainer(settings, POLICY, log=told.append)
    metrics = trainer.update(rollouts())
    assert told == ["out of memory with 84 tokens in a micro-batch: from here on at most 42"]
    monkeypatch.undo()
    plain = Trainer(config(objective={"name": "grpo"}), POLICY).update(rollouts())
    assert metrics["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-4)
    monkeypatch.setattr("stalewise.trainer.execution.response_logp", limited)
    largest[0] = 20
    with pytest.raises(ModelError, match="out of memory with 42 tokens a micro-batch: lower learner"):
        trainer.update(rollouts())


def test_a_budget_that_no_micro_batch_fills_is_not_what_is_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, tokens, told = rollouts(groups=12), list[int](), list[str]()

    def limited(model: Any, part: Any, **options: Any) -> Any:
        tokens.append(sum(tokens_of(part)))
        if tokens[-1] > largest:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return response_logp(model, part, **options)

    monkeypatch.setattr("stalewise.trainer.execution.response_logp", limited)
    largest = 300
    Trainer(config(objective={"name": "grpo"}), POLICY, log=told.append).update(rows)
    assert tokens[0] > largest >= max(tokens[1:]) and told[0].endswith(f"from here on at most {tokens[0] // 2}")
    largest = 0  # and where nothing helps, one message says so
    with pytest.raises(ModelError, match=r"out of memory with \d+ tokens a micro-batch: lower learner"):
        Trainer(config(objective={"name": "grpo"}), POLICY).update(rows)


def test_updates_can_be_prepared_in_another_thread_and_before_memory_runs_out() -> None:
    one, other = Trainer(config(), POLICY), Trainer(config(), POLICY)
    batches = [rollouts(groups=12, seed=seed) for seed in range(3)]
    with ThreadPoolExecutor(1) as thread:
        prepared = list(thread.map(one.prepare, batches))
    expected = [other.update(rows) for rows in batches[:2]]
    assert [one.enqueue(ready).metrics() for ready in prepared[:2]] == expected
    for trainer in (one, other):
        trainer.token_budget = 100
    assert len(prepared[2].micro_batches) == 1
    assert one.enqueue(prepared[2]).metrics() == other.update(batches[2])


def test_out_of_memory_after_the_step_is_not_a_reason_to_take_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(AdamW, "_float32_step", fail)
    trainer = Trainer(config(), POLICY)
    with pytest.raises(ModelError, match="out of memory after a step"):
        trainer.update(rollouts())
    assert trainer.steps == 1


def test_memory_that_ends_within_the_first_step_leaves_no_half_made_state(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, plain = Trainer(config(), POLICY), Trainer(config(), POLICY)
    take = trainer.optimizer.make_moments

    def fail_once() -> Any:
        monkeypatch.setattr(trainer.optimizer, "make_moments", take)
        trainer.optimizer.state[next(iter(trainer.names))] = {"step": torch.zeros(())}  # half made
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(trainer.optimizer, "make_moments", fail_once)
    trainer.execution.weights = FlatWeights(list(trainer.names), trainer.execution.side_stream)
    assert trainer.update(rollouts())["update_norm"] == pytest.approx(plain.update(rollouts())["update_norm"], rel=1e-3)
    assert trainer.token_budget < plain.token_budget // 2
    assert type(trainer.execution.weights) is Weights  # the one tensor of all gradients is let go
