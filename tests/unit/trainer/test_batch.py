"""Which rollouts an update learns from, and what its loss is divided by."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from stalewise.errors import StoreError
from stalewise.trainer.trainer import Trainer
from trainer_inputs import (
    POLICY,
    config,
    rollouts,
)


def test_rollouts_without_a_reward_are_left_out_and_counted() -> None:
    rows = rollouts()
    rows.reward[5] = math.nan
    metrics = Trainer(config(), POLICY).update(rows)
    assert metrics["verifier_error_fraction"] == pytest.approx(1 / 12)
    kept = [row for row in range(12) if row != 5]
    assert metrics["loss"] == pytest.approx(Trainer(config(), POLICY).update(rows.take(kept))["loss"], rel=1e-4)
    assert metrics["reward"] == pytest.approx(np.nanmean(rows.reward))


def test_a_batch_that_teaches_nothing_changes_nothing() -> None:
    trainer = Trainer(config(objective={"name": "p3o"}), POLICY)
    before = [parameter.detach().clone() for parameter in trainer.names]
    rows = rollouts()
    rows.reward[:] = 1.0
    assert trainer.update(rows)["taken"] == 0.0
    rows.reward[:] = math.nan
    assert trainer.update(rows)["taken"] == 0.0
    assert trainer.version == 2
    assert all(torch.equal(p, b) for p, b in zip(trainer.names, before, strict=True))


def test_dapo_drops_groups_without_variance_from_the_denominator() -> None:
    rows = rollouts()
    rows.reward[:4] = 1.0
    dapo = Trainer(config(objective={"name": "dapo"}), POLICY).update(rows)
    grpo = Trainer(config(objective={"name": "grpo"}), POLICY).update(rows)
    assert dapo["tokens"] == rows.response_lengths[4:].sum()
    assert grpo["tokens"] == rows.response_lengths.sum()
    assert dapo["degenerate_fraction"] == grpo["degenerate_fraction"] == pytest.approx(1 / 3)


def test_truncated_responses_can_be_masked() -> None:
    rows = rollouts()
    metrics = Trainer(config(objective={"truncated": "mask"}), POLICY).update(rows)
    assert metrics["tokens"] == rows.response_lengths[~rows.truncated].sum()


def test_dr_grpo_divides_by_a_constant() -> None:
    rows = rollouts(drift=0.0)
    trainer = Trainer(config(objective={"name": "dr_grpo"}), POLICY)
    metrics = trainer.update(rows)
    centred = rows.reward - np.repeat(rows.reward.reshape(3, 4).mean(axis=1), 4)
    # Fresh data: r = 1, so the loss is −Σ_tokens A / (12 · 64).
    assert metrics["loss"] == pytest.approx(-(centred * rows.response_lengths).sum() / (12 * 64), abs=1e-5)


def test_an_empty_response_is_named() -> None:
    rows = rollouts()
    lengths = rows.response_lengths
    lengths[5] = 0
    keep = np.repeat(np.arange(len(rows)) != 5, rows.response_lengths)
    empty = replace(
        rows,
        response_ids=rows.response_ids[keep],
        behaviour_logp=rows.behaviour_logp[keep],
        response_offsets=np.r_[0, lengths.cumsum()],
    )
    with pytest.raises(StoreError, match="rollout 5 has no prompt or no response tokens"):
        Trainer(config(), POLICY).update(empty)
