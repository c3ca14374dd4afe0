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

import numpy as np
import pytest
import torch
from torch import Tensor

from batches import random_batch
from stalewise.objectives import Regularizers, constant_denominator, evaluate, group_advantages
from stalewise.objectives.regularizers import overlong_penalty

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what TRL and its dependencies warn of at import is theirs
    from trl.rewards.other_rewards import get_soft_overlong_punishment
    from trl.trainer.grpo_trainer import GRPOTrainer

MAX_TOKENS = 32


def trl_loss(
    batch: dict[str, Tensor],
    loss_type: str,
    *,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    level: str = "token",
    beta: float = 0.0,
    entropy_coef: float = 0.0,
) -> tuple[float, Tensor]:
    logp = batch["logp"].clone().requires_grad_()
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logp, entropy_like(logp), None),
        accelerator=SimpleNamespace(
            num_processes=1, sync_gradients=True, gather=lambda x: x, reduce=lambda x, reduction: x
        ),
        args=SimpleNamespace(delta=None, steps_per_generation=1, use_bias_correction_kl=False),
        model=SimpleNamespace(training=True),
        loss_type=loss_type,
        importance_sampling_level=level,
        epsilon_low=epsilon_low,
        epsilon_high=epsilon_high,
        max_completion_length=MAX_TOKENS,
        current_gradient_accumulation_steps=1,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        beta=beta,
        use_vllm=False,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=entropy_coef > 0,
        use_adaptive_entropy=False,
        entropy_coef=entropy_coef,
        state=SimpleNamespace(global_step=0),
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
        "ref_per_token_logps": batch["proximal_logp"],
        "num_items_in_batch": mask.sum().float(),
    }
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)  # pyright: ignore[reportArgumentType]
    (gradient,) = torch.autograd.grad(loss, logp)
    return loss.item(), gradient


def entropy_like(logp: Tensor) -> Tensor:
    """Stands for an entropy: positive, with a gradient."""
    return logp.square() + 0.5


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


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("loss_type", "name"), [("bnpo", "grpo"), ("dapo", "dapo"), ("cispo", "cispo")])
def test_a_divergence_from_a_reference_and_an_entropy_bonus_equal_trl(loss_type: str, name: str, seed: int) -> None:
    batch = random_batch(sequences=16, tokens=12, seed=seed)
    high = {"dapo": 0.28, "cispo": 5.0}.get(loss_type, 0.2)
    expected_loss, expected = trl_loss(batch, loss_type, epsilon_high=high, beta=0.07, entropy_coef=0.03)
    logp = batch["logp"].clone().requires_grad_()
    added = {"reference_logp": batch["proximal_logp"], "entropy": entropy_like(logp)}
    result = evaluate(name, **(batch | {"logp": logp}), **added, regularizers=Regularizers(kl=0.07, entropy=0.03))
    (gradient,) = torch.autograd.grad(result.loss, logp)
    assert result.loss.item() == pytest.approx(expected_loss, rel=1e-9)
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-12)


def test_the_penalty_on_long_responses_equals_trl() -> None:
    lengths = np.arange(1, 130)
    ours = overlong_penalty(lengths, max_tokens=100, margin=20)
    theirs = get_soft_overlong_punishment(max_completion_len=100, soft_punish_cache=20)([[1] * n for n in lengths])
    assert ours == pytest.approx(np.array(theirs), abs=1e-12)


def test_rewards_scaled_over_the_batch_equal_trl_but_for_the_sample_std() -> None:
    """Its `scale_rewards="batch"`: minus the group's mean, divided by the sample std of all rewards + 1e-4."""
    reward = torch.tensor([1.0, 0.0, 0.5, 1.0, 1.0, 1.0, 0.0, 0.0])
    ours = group_advantages(reward, torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]), kind="batch").advantage_N
    theirs = (reward - reward.view(2, 4).mean(dim=1).repeat_interleave(4)) / (reward.std() + 1e-4)
    torch.testing.assert_close(ours * (reward.std(correction=0) + 1e-6), theirs * (reward.std() + 1e-4))
