"""The rules of claims on GSM8K, on simulated runs: a true claim is shown where seeds hardly differ."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))  # experiments/ is no part of the package

from experiments.lab import power
from experiments.lab.verdicts import rules


@pytest.mark.parametrize("rule", power.SCENARIOS)
def test_a_true_claim_is_shown_where_seeds_hardly_differ(rule: str) -> None:
    random = np.random.default_rng(0)
    assert power.power(rule, 3, 0.001, 3, random) == 1.0
    assert power.power(rule, 3, 0.1, 3, random) == 0.0


@pytest.mark.parametrize("rule", ["mismatch_by_gain", "two_anchors_by_gain"])
def test_a_loss_below_half_of_the_gain_shows_nothing(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(power, "LOST", 0.3 * (power.END - power.START))
    assert power.power(rule, 6, 0.001, 3, np.random.default_rng(0)) == 0.0


def test_without_a_gain_nothing_can_be_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(power, "END", power.START - 0.02)
    made = power.simulated("mismatch_by_gain", 4, 0.001, np.random.default_rng(0))
    finding = rules()["mismatch_by_gain"](made)
    assert finding.p_shown is None and "a gain without mismatch" in finding.ours
