"""The ranks of a launch, without others: the environment, messages, and one process alone."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from stalewise import distributed
from stalewise.distributed import (
    ALONE,
    VARIABLES,
    Launch,
    child_environment,
    explain_lost_ranks,
    launched,
    merge_over_ranks,
)
from stalewise.errors import ConfigError, RankError
from stalewise.objectives.batch_statistics import WeightSums


def test_the_environment_names_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert launched() == Launch() and launched().is_first
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="WORLD_SIZE is 2 but RANK is not set"):
        launched()
    for name, value in {"RANK": "1", "MASTER_ADDR": "here", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert launched() == Launch(rank=1, world=2, local_rank=1, local_world=2)
    assert not set(VARIABLES) & child_environment().keys()


def test_a_launch_is_read_without_torch() -> None:
    code = "import sys, stalewise.distributed as d; d.launched(); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_message_survives_its_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    array = np.arange(6, dtype=np.int32).reshape(2, 3)[:, ::2]  # not contiguous
    sent = list(distributed._encode("update", {"rate": 0.5}, {"x": array}))
    monkeypatch.setattr("torch.distributed.recv", lambda tensor, src, group: tensor.copy_(sent.pop(0)))
    message = ALONE._receive_now(0)
    assert (message.what, message.record) == ("update", {"rate": 0.5})
    assert message.arrays["x"].tolist() == [[0, 2], [3, 5]]


def test_one_process_merges_nothing_and_has_no_others() -> None:
    sums = WeightSums.of(torch.zeros(3), torch.ones(3).bool())
    assert merge_over_ranks(sums) is sums
    assert list(ALONE.others) == [] and ALONE.is_first and not ALONE.has_heard()


def test_the_error_of_a_collective_is_a_lost_rank() -> None:
    two = distributed.Ranks(Launch(rank=1, world=2))
    with pytest.raises(RankError, match="rank 1 lost its connection to another rank"), explain_lost_ranks(two):
        raise RuntimeError("[gloo] Connection closed by peer")
    assert not two.is_whole
    with pytest.raises(RuntimeError, match="shapes"), explain_lost_ranks(two):
        raise RuntimeError("shapes differ")
    with pytest.raises(RuntimeError, match="gloo"), explain_lost_ranks(ALONE):
        raise RuntimeError("gloo")
