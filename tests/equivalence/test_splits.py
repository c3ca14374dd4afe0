"""One optimizer batch has one gradient, however it is split: over micro-batches in any order, or over ranks."""

from __future__ import annotations

from functools import reduce
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from batches import SETTING_IDS, SETTINGS, random_batch
from ranks import finish, start
from stalewise.distributed import merge_over_ranks
from stalewise.objectives import (
    Regularizers,
    Tokens,
    get_objective,
    make_tokens,
    micro_batch_loss,
    micro_batch_sums,
    natural_denominator,
)

WIDTH = 5  # parameters of the toy policy
ADDED = Regularizers(kl=0.3, estimator="k3", entropy=0.2)


def policy_tokens(batch: dict[str, Any], parameters: Tensor, rows: Tensor) -> Tokens:
    """A policy whose log-probabilities are linear in its parameters, on some rows of the batch."""
    features = torch.linspace(-1, 1, batch["logp"].numel() * WIDTH).reshape(*batch["logp"].shape, WIDTH)
    part = {name: value[rows] for name, value in batch.items()} | {
        "reference_logp": batch["behaviour_logp"][rows] - 0.1
    }
    return make_tokens(**(part | {"logp": part["logp"] + 0.1 * features[rows] @ parameters}))


def gradient_over(
    name: str,
    params: dict[str, Any],
    batch: dict[str, Tensor],
    splits: list[Tensor],
    *,
    over_ranks: bool = False,
    regularizers: Regularizers = ADDED,
) -> tuple[Tensor, dict[str, float]]:
    """Both phases over the given micro-batches (of this rank)."""
    objective = get_objective(name)
    settings = objective.settings(params)
    parameters = torch.linspace(-0.5, 0.5, WIDTH).requires_grad_()
    with torch.no_grad():
        parts = [policy_tokens(batch, parameters, rows) for rows in splits]
        denominator = torch.stack([natural_denominator(part, objective.reduction) for part in parts]).sum()
        measured = [objective.first_pass(part, settings) for part in parts]
    statistics = reduce(lambda a, b: a.merge(b), measured) if measured[0] is not None else None  # type: ignore[union-attr]
    if over_ranks:
        dist.all_reduce(denominator)
        statistics = merge_over_ranks(statistics) if statistics is not None else None
    all_sums = []
    for rows in splits:
        tokens = policy_tokens(batch, parameters, rows)
        entropy_BT = tokens.logp_BT.sin() + 2.0  # some function of the parameters
        added = regularizers, entropy_BT
        loss, token_loss = micro_batch_loss(objective, tokens, statistics, settings, denominator, *added)
        loss.backward()
        all_sums.append(micro_batch_sums(tokens, token_loss, entropy_BT))
    sums = reduce(lambda a, b: a.merge(b), all_sums)
    gradient = parameters.grad
    assert gradient is not None
    if over_ranks:
        dist.all_reduce(gradient)
        sums = merge_over_ranks(sums)
    return gradient, sums.summary()


@pytest.mark.parametrize(("name", "params"), SETTINGS, ids=SETTING_IDS)
def test_micro_batches_in_any_order_give_one_gradient(name: str, params: dict[str, Any]) -> None:
    batch = random_batch(sequences=16, dtype=torch.float32)
    rows = torch.arange(16)
    whole, whole_stats = gradient_over(name, params, batch, [rows])
    assert whole.abs().max() > 1e-3
    shuffled = rows[torch.randperm(16, generator=torch.Generator().manual_seed(1))]
    for order in (rows, shuffled):
        for count in (2, 4, 16):
            gradient, stats = gradient_over(name, params, batch, list(order.chunk(count)))
            torch.testing.assert_close(gradient, whole, rtol=2e-5, atol=2e-6)
            assert stats == pytest.approx(whole_stats, rel=1e-5, nan_ok=True)


@pytest.mark.parametrize(
    "added", [Regularizers(kl=0.3), Regularizers(kl=0.3, estimator="k1"), Regularizers(entropy=0.2)]
)
def test_regularizers_change_the_gradient(added: Regularizers) -> None:
    batch, rows = random_batch(sequences=16, dtype=torch.float32), torch.arange(16)
    plain, _ = gradient_over("grpo", {}, batch, [rows], regularizers=Regularizers())
    assert (gradient_over("grpo", {}, batch, [rows], regularizers=added)[0] - plain).abs().max() > 1e-4


def rank_main(rank: int) -> None:
    dist.init_process_group("gloo")
    batch = random_batch(sequences=16, dtype=torch.float32)
    rows = torch.arange(16)
    mine = rows[:5] if rank == 0 else rows[5:]  # unequal shares on purpose
    for name, params in SETTINGS:
        whole, whole_stats = gradient_over(name, params, batch, [rows])
        gradient, stats = gradient_over(name, params, batch, list(mine.chunk(2)), over_ranks=True)
        torch.testing.assert_close(gradient, whole, rtol=2e-5, atol=2e-6)
        assert stats == pytest.approx(whole_stats, rel=1e-5, nan_ok=True), name
    dist.destroy_process_group()


def test_two_ranks_give_the_gradient_of_one() -> None:
    assert finish(start(2, rank_main)) == [0, 0]  # what a rank raised is on stderr
