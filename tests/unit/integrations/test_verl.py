"""The policy losses with tensors at hand; tests/in_verl has verl itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from batches import SETTING_IDS, SETTINGS, random_batch
from stalewise.errors import ConfigError
from stalewise.integrations.verl import NAMES, aggregation, policy_loss
from stalewise.objectives import constant_denominator, evaluate, get_objective

RUNS = [(name, params) for name, params in SETTINGS if name in NAMES]
IDS = [label for label, (name, _) in zip(SETTING_IDS, SETTINGS, strict=True) if name in NAMES]


def verl_arguments(batch: dict[str, Any], logp: Tensor) -> dict[str, Tensor]:
    return {
        "old_log_prob": batch["behaviour_logp"],
        "log_prob": logp,
        "advantages": batch["advantage"].unsqueeze(1) * batch["mask"],
        "response_mask": batch["mask"],
    }


def config_of(batch: dict[str, Any], **more: Any) -> Any:
    whole = {"dp_size": 1, "batch_num_tokens": int(batch["mask"].sum()), "global_batch_size": len(batch["mask"])}
    return SimpleNamespace(global_batch_info={**whole, "loss_scale_factor": None, **more})


def expected(name: str, params: dict[str, Any], batch: dict[str, Any]) -> tuple[Any, Tensor]:
    logp = batch["logp"].clone().requires_grad_()
    constant = constant_denominator(*batch["mask"].shape) if get_objective(name).constant_denominator else None
    given = {**batch, "logp": logp, "proximal_logp": None}
    result = evaluate(name, **given, params=params, denominator=constant)
    return result, torch.autograd.grad(result.loss, logp)[0]


@pytest.mark.parametrize(("name", "params"), RUNS, ids=IDS)
def test_a_batch_in_one_piece_has_our_loss_gradient_and_diagnostics(name: str, params: dict[str, Any]) -> None:
    batch = random_batch()
    result, gradient = expected(name, params, batch)
    logp = batch["logp"].clone().requires_grad_()
    loss, metrics = policy_loss(name, **params)(**verl_arguments(batch, logp), config=config_of(batch))
    assert loss.item() == pytest.approx(result.loss.item(), abs=1e-12)
    assert torch.allclose(torch.autograd.grad(loss, logp)[0], gradient, rtol=0, atol=1e-12)
    assert metrics == pytest.approx({f"stalewise/{key}": value for key, value in result.stats.items()}, nan_ok=True)


@pytest.mark.parametrize("name", [name for name in NAMES if get_objective(name).measure is None])
def test_micro_batches_on_two_ranks_add_up_to_the_whole(name: str) -> None:
    """verl averages the gradients of ranks and adds those of micro-batches: here four of four responses, on two."""
    batch = random_batch()
    result, gradient = expected(name, {}, batch)
    logp = batch["logp"].clone().requires_grad_()
    config = config_of(batch, dp_size=2)
    total = torch.zeros((), dtype=torch.float64)
    for rows in torch.arange(len(logp)).split(4):
        part = {key: value[rows] for key, value in batch.items()}
        total = total + policy_loss(name)(**verl_arguments(part, logp[rows]), config=config)[0] / 2
    assert total.item() == pytest.approx(result.loss.item(), abs=1e-12)
    assert torch.allclose(torch.autograd.grad(total, logp)[0], gradient, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["p3o", "m2po"])
def test_statistics_of_a_part_are_refused(name: str) -> None:
    batch = random_batch()
    part = {key: value[:4] for key, value in batch.items()}
    with pytest.raises(ConfigError, match="all 16 responses of an update, but this micro-batch has 8"):
        policy_loss(name)(**verl_arguments(part, part["logp"]), config=config_of(batch, dp_size=2))


def test_weights_of_the_rollout_engine_multiply_the_loss_of_a_token() -> None:
    batch = random_batch()
    given = verl_arguments(batch, batch["logp"])
    plain, _ = policy_loss("grpo")(**given)
    weighted, _ = policy_loss("grpo")(**given, rollout_is_weights=torch.full_like(batch["logp"], 0.5))
    assert weighted.item() == pytest.approx(plain.item() / 2)


def test_another_reduction_is_refused() -> None:
    batch = random_batch()
    given = verl_arguments(batch, batch["logp"])
    assert [aggregation(get_objective(name)) for name in ("grpo", "gspo", "dr_grpo")] == [
        *("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm")
    ]
    with pytest.raises(ConfigError, match="gspo needs seq-mean-token-mean: set it to that"):
        policy_loss("gspo")(**given, loss_agg_mode="token-mean")


def test_advantages_that_differ_within_a_response_are_refused() -> None:
    batch = random_batch()
    given = verl_arguments(batch, batch["logp"])
    given["advantages"][:, 0] += 1
    with pytest.raises(ConfigError, match=r"algorithm\.adv_estimator"):
        policy_loss("grpo")(**given)


def test_what_verl_cannot_run_is_refused() -> None:
    assert {"decoupled_ppo", "p3o_two_anchor"}.isdisjoint(NAMES)
    with pytest.raises(ConfigError, match="needs a proximal policy"):
        policy_loss("decoupled_ppo")
    with pytest.raises(ValueError, match="has no parameter 'cap'"):
        policy_loss("grpo", cap=2.0)
