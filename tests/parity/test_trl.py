"""The loss of TRL 1.16's GRPO trainer and ours, value and gradient, on the same tensors.

TRL's own `_compute_loss` runs here; only the model's forward pass is replaced by the log-probabilities at hand.
Differences in convention, each stated where it is bridged:
- its `grpo` takes a mean per response and then over responses; ours is the token mean, so theirs is `bnpo`;
- its `dapo` and `cispo` divide by the tokens of the generation batch, scaled to one accumulation window; with one
  micro-batch per generation that is our token mean;
- its bounds are distances from 1 (`epsilon`), ours are bounds on the ratio; its cispo cap is absolute, as ours is;
- its `dr_grpo` divides by B · max_completion_length: our `constant_denominator`;
- GSPO is `importance_sampling_level="sequence"` with the `grpo` reduction;
- its advantages divide by the sample std + 1e-4, ours by the population std + 1e-6: advantages are given here.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from batches import random_batch
from stalewise.objectives import constant_denominator, evaluate

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what TRL and its dependencies warn of at import is theirs
    from trl.trainer.grpo_trainer import GRPOTrainer

MAX_TOKENS = 32


def trl_loss(
    batch: dict[str, Tensor],
    loss_type: str,
    *,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    level: str = "token",
) -> tuple[float, Tensor]:
    logp = batch["logp"].clone().requires_grad_()
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logp, torch.zeros_like(logp), None),
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        args=SimpleNamespace(delta=None, steps_per_generation=1),
        model=SimpleNamespace(training=True),
        loss_type=loss_type,
        importance_sampling_level=level,
        epsilon_low=epsilon_low,
        epsilon_high=epsilon_high,
        max_completion_length=MAX_TOKENS,
        current_gradient_accumulation_steps=1,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        beta=0.0,
        use_vllm=False,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
    )
    mask = batch["mask"].long()
    inputs = {
        "prompt_ids": torch.zeros(len(mask), 1, dtype=torch.long),
        "prompt_mask": torch.ones(len(mask), 1, dtype=torch.long),
        "completion_ids": torch.zeros_like(mask),
        "completion_mask": mask,
        "advantages": batch["advantage"],
        "old_per_token_logps": batch["behaviour_logp"],
        "num_items_in_batch": mask.sum().float(),
    }
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)  # pyright: ignore[reportArgumentType]
    (gradient,) = torch.autograd.grad(loss, logp)
    return loss.item(), gradient


def our_loss(name: str, batch: dict[str, Tensor], **more: Any) -> tuple[float, Tensor]:
    logp = batch["logp"].clone().requires_grad_()
    result = evaluate(name, **(batch | {"logp": logp}), **more)
    (gradient,) = torch.autograd.grad(result.loss, logp)
    return result.loss.item(), gradient


CASES: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
    ("bnpo", {}, "grpo", {}),
    ("dapo", {"epsilon_high": 0.28}, "dapo", {}),
    ("dr_grpo", {}, "dr_grpo", {"denominator": constant_denominator(16, MAX_TOKENS)}),
    ("cispo", {"epsilon_high": 5.0}, "cispo", {}),
    ("grpo", {"level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4}, "gspo", {}),
    ("bnpo", {"epsilon_low": 1.0, "epsilon_high": 4.0}, "grpo", {"params": {"clip_low": 0.0, "clip_high": 5.0}}),
]


@pytest.mark.parametrize(("loss_type", "trl_settings", "name", "our_settings"), CASES)
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_gradient_equal_trl(
    loss_type: str, trl_settings: dict[str, Any], name: str, our_settings: dict[str, Any], seed: int
) -> None:
    batch = random_batch(sequences=16, tokens=12, seed=seed)
    expected_loss, expected_gradient = trl_loss(batch, loss_type, **trl_settings)
    loss, gradient = our_loss(name, batch, **our_settings)
    assert loss == pytest.approx(expected_loss, rel=1e-9)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-9, atol=1e-12)


def test_trl_grpo_is_our_grpo_with_a_mean_per_response() -> None:
    """The known difference, shown: dividing each token by its response's length turns ours into theirs."""
    batch = random_batch(sequences=16, tokens=12)
    expected_loss, _ = trl_loss(batch, "grpo")
    rows = [{key: value[i : i + 1] for key, value in batch.items()} for i in range(16)]
    ours = sum(our_loss("grpo", row)[0] for row in rows) / 16
    assert ours == pytest.approx(expected_loss, rel=1e-9)
    assert our_loss("grpo", batch)[0] != pytest.approx(expected_loss, rel=1e-3)
