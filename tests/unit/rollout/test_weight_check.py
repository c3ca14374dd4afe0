"""The probe tells policies apart, also in half precision."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from policies import POLICY, moved
from stalewise.rollout.engines import http as endpoint
from stalewise.rollout.engines.weight_check import AnswerHistory, PolicyCheck, expected_logps, mismatch, probe_ids
from stalewise.rollout.policy_files import read_policy_files


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return moved(POLICY, tmp_path_factory.mktemp("other") / "v000004", by=0.003)


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(endpoint, "POLL_S", 0.02)


def test_half_precision_is_told_from_the_checkpoint_before(other: Path) -> None:
    policy, moved = read_policy_files(POLICY), read_policy_files(other)
    ids = probe_ids(policy, None)
    assert len(ids) == 64
    assert not {0, 1} & set(ids)  # padding and end of sequence
    assert probe_ids(policy, 16) == ids[:15]
    right, before = expected_logps(moved, ids), expected_logps(policy, ids)
    noise = np.random.default_rng(0).normal(scale=0.01, size=right.shape)
    away = float(np.sqrt(np.mean((right - before) ** 2)))
    assert 0.02 < away < 0.4  # within the tolerance of bfloat16: distance alone would let the old policy pass
    others = {"v000000": before}
    assert mismatch(right + noise, right, others, "bfloat16") == ""
    assert "are those of v000000" in mismatch(before + noise, right, others, "bfloat16")
    assert "off by" in mismatch(before, right, {}, "float32")
    assert "off by inf" in mismatch(right * np.nan, right, {}, "bfloat16")


def test_an_engine_that_gives_the_same_digits_for_another_checkpoint_did_not_load_it(other: Path) -> None:
    policy, after = read_policy_files(POLICY), read_policy_files(other)
    check, history = PolicyCheck("bfloat16"), AnswerHistory()
    rounded = expected_logps(policy, check.token_ids(policy)) + np.random.default_rng(0).normal(scale=0.1, size=64)
    assert check.mismatch(policy, rounded, history) == ""
    # Rounding hides that these are not the numbers of the other checkpoint, but they are the same as before.
    assert check.mismatch(after, rounded, AnswerHistory()) == ""
    assert "v000004" not in check.mismatch(after, rounded, history)
    assert "are those of arithmetic, to the last digit" in check.mismatch(after, rounded, history)
    again = expected_logps(after, check.token_ids(after)) + np.random.default_rng(1).normal(scale=0.1, size=64)
    assert check.mismatch(after, again, history) == ""
    history.repeat(after, again, "bfloat16")
    assert not history.has_changed(after, again + 1e-4)
    assert history.has_changed(after, again + 2e-3)
    history.repeat(after, again + 1e-3, "bfloat16")  # an engine that repeats itself less closely is given more room
    assert not history.has_changed(after, again + 2e-3)
