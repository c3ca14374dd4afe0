"""Our policy losses inside verl itself: `make test-verl`, in an environment of its own."""

from __future__ import annotations

import inspect
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from batches import random_batch
from stalewise.integrations.verl import NAMES, aggregation, policy_loss
from stalewise.objectives import get_objective

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what verl and its dependencies warn of at import is theirs
    from tensordict import TensorDict  # pyright: ignore[reportMissingImports]
    from verl.trainer.ppo import core_algos  # pyright: ignore[reportMissingImports]
    from verl.utils import tensordict_utils  # pyright: ignore[reportMissingImports]
    from verl.workers.config import ActorConfig, PolicyLossConfig  # pyright: ignore[reportMissingImports]
    from verl.workers.utils.losses import ppo_loss  # pyright: ignore[reportMissingImports]


def actor(mode: str, batch: dict[str, Any], **more: Any) -> Any:
    settings = {"loss_agg_mode": "token-mean", **more}
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=4,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=PolicyLossConfig(loss_mode=mode),
        **settings,
    )
    config.global_batch_info.update(
        {"dp_size": 1, "batch_num_tokens": int(batch["mask"].sum()), "global_batch_size": len(batch["mask"])}
    )
    return config


def called(mode: str, batch: dict[str, Any], **more: Any) -> tuple[float, Tensor]:
    """The registered loss as verl's worker calls it, and its gradient."""
    config = actor(mode, batch, **more)
    logp = batch["logp"].clone().requires_grad_()
    loss, _ = core_algos.get_policy_loss_fn(mode)(
        old_log_prob=batch["behaviour_logp"],
        log_prob=logp,
        advantages=batch["advantage"].unsqueeze(1) * batch["mask"],
        response_mask=batch["mask"],
        loss_agg_mode=config.loss_agg_mode,
        config=config,
        rollout_is_weights=None,
    )
    return loss.item(), torch.autograd.grad(loss, logp)[0]


def padded_batch() -> dict[str, Any]:
    """As wide as its longest response, which is how verl pads a micro-batch."""
    batch = random_batch(drift=0.2)
    width = int(batch["mask"].sum(dim=1).max())
    return {name: value if value.ndim == 1 else value[:, :width] for name, value in batch.items()}


@pytest.mark.parametrize("name", NAMES)
def test_verl_knows_every_objective_once_it_is_imported(name: str) -> None:
    assert f"stalewise_{name}" in core_algos.POLICY_LOSS_REGISTRY


def test_verl_finds_them_by_itself() -> None:
    code = (
        "import warnings; warnings.simplefilter('ignore'); import verl; from verl.trainer.ppo import core_algos; "
        "print(core_algos.get_policy_loss_fn('stalewise_p3o').__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.split()[-1:] == ["stalewise_p3o"], done.stderr


def test_the_signature_is_verls() -> None:
    theirs = inspect.signature(core_algos.compute_policy_loss_vanilla).parameters.values()
    ours = inspect.signature(policy_loss("grpo")).parameters.values()
    assert [(p.name, p.kind, p.default) for p in ours] == [(p.name, p.kind, p.default) for p in theirs]


@pytest.mark.parametrize(
    ("ours", "theirs", "more"),
    [
        ("stalewise_grpo", "vanilla", {"clip_ratio_c": 1e9}),
        ("stalewise_dapo", "vanilla", {"clip_ratio_c": 1e9, "clip_ratio_low": 0.2, "clip_ratio_high": 0.28}),
        (
            "stalewise_gspo",
            "gspo",
            {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4, "loss_agg_mode": "seq-mean-token-mean"},
        ),
        ("stalewise_dr_grpo", "vanilla", {"clip_ratio_c": 1e9, "loss_agg_mode": "seq-mean-token-sum-norm"}),
    ],
)
def test_what_verl_has_too_is_the_same(ours: str, theirs: str, more: dict[str, Any]) -> None:
    batch = padded_batch()
    loss, gradient = called(ours, batch, **more)
    their_loss, their_gradient = called(theirs, batch, **more)
    assert loss == pytest.approx(their_loss, abs=1e-7)
    assert torch.allclose(gradient, their_gradient, rtol=0, atol=1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_verls_worker_gets_a_loss_and_metrics(name: str) -> None:
    """`ppo_loss` is what verl's training worker calls for each micro-batch."""
    batch = padded_batch()
    mask, prompt = batch["mask"], 2
    length = mask.sum(dim=1)
    logp = batch["logp"].float().requires_grad_()
    data = TensorDict(
        {
            "prompts": nested([torch.ones(prompt, dtype=torch.long) for _ in length]),
            "responses": nested([torch.ones(int(n), dtype=torch.long) for n in length]),
            "response_mask": nested([torch.ones(int(n), dtype=torch.long) for n in length]),
            "old_log_probs": nested(
                [row[: int(n)].float() for row, n in zip(batch["behaviour_logp"], length, strict=True)]
            ),
            "advantages": nested(
                [a.float().expand(int(n)).clone() for a, n in zip(batch["advantage"], length, strict=True)]
            ),
        },
        batch_size=[len(mask)],
    )
    whole = {"dp_size": 1, "batch_num_tokens": int(mask.sum()), "global_batch_size": len(mask)}
    tensordict_utils.assign_non_tensor(data, **whole)
    # The output of position i predicts token i + 1: prompt − 1 places, the response, and one that predicts nothing.
    rows = [
        torch.cat([torch.zeros(prompt - 1), row[: int(n)], torch.zeros(1)]) for row, n in zip(logp, length, strict=True)
    ]
    config = actor(f"stalewise_{name}", batch, loss_agg_mode=aggregation(get_objective(name)))
    loss, metrics = ppo_loss(config, {"log_probs": nested(rows)}, data)
    expected, _ = called(f"stalewise_{name}", batch, loss_agg_mode=config.loss_agg_mode)
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert "stalewise/ess" in metrics
    loss.backward()
    assert logp.grad is not None and bool(logp.grad.any())


def nested(rows: list[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)
