"""Episodes: what came from outside is read by the policy, and is in no loss, gradient, veto or diagnostic."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batches import SETTING_IDS, SETTINGS, random_batch
from stalewise.models.attention import supports_packing
from stalewise.models.loading import load_model
from stalewise.objectives import evaluate
from stalewise.store import RolloutColumns
from stalewise.trainer import execution
from stalewise.trainer.trainer import Trainer
from trainer_inputs import CPU, POLICY, config, plain_logp, rollouts

batches = st.builds(
    random_batch, sequences=st.integers(1, 6), tokens=st.integers(1, 8), drift=st.sampled_from([0.01, 0.3, 2.0])
)
every_setting = pytest.mark.parametrize(("name", "params"), SETTINGS, ids=SETTING_IDS)


def loss_and_gradient(name: str, params: dict[str, Any], batch: dict[str, Any]) -> tuple[float, Tensor]:
    logp = batch["logp"].clone().requires_grad_()
    result = evaluate(name, **(batch | {"logp": logp}), params=params)
    (gradient,) = torch.autograd.grad(result.loss, logp)
    return result.loss.item(), gradient


def with_holes(batch: dict[str, Tensor], random: Any) -> tuple[dict[str, Tensor], Tensor]:
    """The batch with tokens from outside between its own, holding anything; and the columns of its own tokens."""
    width = batch["logp"].shape[1]
    total = width + random.randint(1, 4)
    own = torch.tensor(sorted(random.sample(range(total), width)))
    wide: dict[str, Tensor] = {}
    for key, value in batch.items():
        if value.ndim == 1:
            wide[key] = value
            continue
        junk = False if value.dtype is torch.bool else random.choice([float("nan"), float("inf"), -30.0, 0.0])
        wide[key] = torch.full((len(value), total), junk, dtype=value.dtype)
        wide[key][:, own] = value
    return wide, own


@every_setting
@settings(max_examples=settings().max_examples * 2 // 5)
@given(batches, st.randoms(use_true_random=False))
def test_tokens_from_outside_change_no_loss_and_get_no_gradient(
    name: str, params: dict[str, Any], batch: dict[str, Tensor], random: Any
) -> None:
    wide, own = with_holes(batch, random)
    loss, gradient = loss_and_gradient(name, params, wide)
    expected = loss_and_gradient(name, params, batch)
    assert loss == pytest.approx(expected[0], rel=1e-9, abs=1e-12)
    torch.testing.assert_close(gradient[:, own], expected[1], rtol=1e-9, atol=1e-12)
    outside = torch.ones(gradient.shape[1], dtype=torch.bool)
    outside[own] = False
    assert gradient[:, outside].abs().sum() == 0
    cases: list[dict[str, Any]] = [dict(wide), dict(batch)]
    stats = [evaluate(name, **one, params=params).stats for one in cases]
    assert stats[0] == pytest.approx(stats[1], nan_ok=True, rel=1e-9)


def test_the_suffix_of_a_veto_goes_on_in_later_turns() -> None:
    # Two turns of two tokens with a tool's answer between; the second token of the first turn is a trigger.
    behaviour = torch.full((1, 6), -1.0)
    logp = torch.tensor([[-1.0, -15.0, -50.0, -50.0, -1.0, -1.0]], requires_grad=True)
    mask = torch.tensor([[1, 1, 0, 0, 1, 1]])
    batch: dict[str, Any] = {"behaviour_logp": behaviour, "advantage": torch.tensor([-1.0]), "mask": mask}
    result = evaluate("mu_grpo", logp=logp, **batch)
    (gradient,) = torch.autograd.grad(result.loss, logp)
    # Loss: −r·A / 4 tokens = 1/4 of the first token alone; its gradient is r / 4.
    assert gradient.tolist() == [[pytest.approx(0.25), 0.0, 0.0, 0.0, 0.0, 0.0]]
    assert result.stats["veto_fraction"] == pytest.approx(3 / 4)  # the trigger and the whole second turn
    # A tool's answer that the policy would never write triggers nothing.
    quiet = torch.tensor([[-1.0, -1.0, -50.0, -50.0, -1.0, -1.0]])
    assert evaluate("mu_grpo", logp=quiet, **batch).stats["veto_fraction"] == 0


def episodes(seed: int) -> RolloutColumns:
    """Rollouts whose middle thirds came from outside, where they are long enough."""
    rows = rollouts(seed=seed)
    trained = np.ones(len(rows.response_ids), dtype=np.bool_)
    for row in range(len(rows)):
        first, last = rows.response_offsets[row : row + 2]
        third = (last - first) // 3
        trained[first + third : first + 2 * third] = False
    return replace(rows, trained=trained, behaviour_logp=np.where(trained, rows.behaviour_logp, 0).astype(np.float32))


def gradient(rows: RolloutColumns, name: str, budget: int = 60, **params: float) -> tuple[Tensor, dict[str, float]]:
    made = config(objective={"name": name, "params": params}, learner={"tokens_per_micro_batch": budget})
    trainer = Trainer(made, POLICY)
    metrics = trainer.update(rows)
    return torch.cat([one.grad.flatten() for one in trainer.names if one.grad is not None]), metrics


def plain_gradient(rows: RolloutColumns) -> Tensor:
    """Of Σ −A·r over the policy's tokens / their number, row by row through the whole model."""
    model = load_model(str(POLICY), device=CPU)
    total = torch.zeros(())
    reward = torch.from_numpy(rows.reward).view(-1, 4)
    advantage = (
        ((reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True, correction=0) + 1e-6)).flatten().float()
    )
    for row in range(len(rows)):
        ids = torch.from_numpy(np.r_[rows.prompt(row), rows.response(row)].astype(np.int64))[None]
        logp = model(input_ids=ids).logits[0, len(rows.prompt(row)) - 1 : -1].log_softmax(-1)
        logp = logp.gather(1, ids[0, len(rows.prompt(row)) :, None])[:, 0]
        ratio = (logp - torch.from_numpy(rows.logp(row))).exp()
        total = total - (advantage[row] * ratio * torch.from_numpy(rows.is_trained(row))).sum()
    (total / int(rows.trained.sum())).backward()
    return torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None])


@pytest.mark.parametrize("packed", [True, False])
def test_the_gradient_of_episodes_is_that_of_a_plain_forward_pass(
    packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution, "supports_packing", supports_packing if packed else lambda *_: False)
    rows = episodes(seed=3)
    found, metrics = gradient(rows, "m2po", threshold=1e9)  # which clips nothing: the loss is −A·r
    assert metrics["tokens"] == rows.trained.sum() < len(rows.trained)
    assert metrics["response_length"] == pytest.approx(rows.trained_lengths.mean())
    norm = min(1.0, 1.0 / metrics["grad_norm"])
    torch.testing.assert_close(found, norm * plain_gradient(rows), rtol=2e-3, atol=2e-6)


@pytest.mark.parametrize("name", ["mu_grpo", "gspo", "p3o"])
def test_a_mask_of_ones_is_a_single_turn(name: str) -> None:
    rows = rollouts(seed=5)
    marked = replace(rows, trained=np.ones(len(rows.response_ids), dtype=np.bool_))
    assert torch.equal(gradient(rows, name)[0], gradient(marked, name)[0])


def test_a_tool_is_heard_through_the_context_alone() -> None:
    rows = episodes(seed=4)
    # Log-probabilities of tokens from outside are never read.
    noise = np.where(rows.trained, rows.behaviour_logp, -7.0).astype(np.float32)
    first, _ = gradient(rows, "mu_grpo")
    assert torch.equal(first, gradient(replace(rows, behaviour_logp=noise), "mu_grpo")[0])
    # The number of micro-batches changes nothing, with holes as without.
    torch.testing.assert_close(first, gradient(rows, "mu_grpo", budget=2000)[0], rtol=1e-4, atol=1e-7)
    # Other words of a tool do, where the policy writes after them.
    other = np.where(rows.trained, rows.response_ids, (rows.response_ids + 1) % 15 + 3).astype(np.int32)
    assert not torch.equal(first, gradient(replace(rows, response_ids=other), "mu_grpo")[0])


def test_the_token_record_has_nothing_for_tokens_from_outside() -> None:
    rows = episodes(seed=6)
    trainer = Trainer(config(objective={"name": "mu_grpo"}, learner={"tokens_per_micro_batch": 60}), POLICY)
    record = trainer.enqueue(rows).tokens()
    assert record is not None
    ordered = record.rows.take(record.order)
    assert not record.logp[~ordered.trained].any() and not record.flags[~ordered.trained].any()
    expected = plain_logp(ordered)[ordered.trained]
    np.testing.assert_allclose(record.logp[ordered.trained], expected, rtol=1e-3, atol=1e-4)


def test_random_batches_have_no_holes_of_their_own() -> None:  # what the first test compares with
    mask = random_batch()["mask"]
    assert not (mask[:, 1:] & ~mask[:, :-1]).any()
