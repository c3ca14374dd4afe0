"""`kill -9` at any moment loses nothing: the run goes on to bit-identical weights. `make soak` does this 200 times."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from ranks import CONTEXT

SCRIPTS = Path(__file__).parents[2] / "scripts"


def soaked(out: Path, settings: dict[str, Any]) -> None:
    """scripts/soak.py in a process of its own: it forks."""
    import torch

    torch.set_num_threads(1)
    sys.path.insert(0, str(SCRIPTS))
    soak: Any = import_module("soak")
    (out / "figures.json").write_text(json.dumps(soak.soak(out, **settings)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "objective", "kills"),
    [
        ("staged", "p3o", 3),
        ("synchronous", "mu_grpo", 3),
        pytest.param("synchronous", "p3o", 12, marks=pytest.mark.nightly),
        pytest.param("staged", "p3o", 12, marks=pytest.mark.nightly),
        pytest.param("staged", "decoupled_ppo", 6, marks=pytest.mark.nightly),
        pytest.param("spent", "mu_grpo", 6, marks=pytest.mark.nightly),
        pytest.param("collapsing", "p3o", 6, marks=pytest.mark.nightly),
        pytest.param("pipelined", "mu_grpo", 4, marks=pytest.mark.nightly),
    ],
)
def test_killed_runs_end_as_if_they_had_never_been_stopped(
    tmp_path: Path, kind: str, objective: str, kills: int
) -> None:
    settings = {"kills": kills, "seed": 1, "objective": objective, "kind": kind, "slow_writer": 0.2}
    if kind == "synchronous":  # the first kill comes .96 s after a commit was due, long after the next batch is made
        settings |= {"seed": 2, "slow_writer": 1.0}
    process = CONTEXT.Process(target=soaked, args=(tmp_path, settings))
    process.start()
    process.join()
    assert process.exitcode == 0  # what differed is on stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["identical"]
    assert figures["kills"] >= kills
    # A kill before the first checkpoint of the learner only starts the run anew: enough must come later, on a machine
    # whose other load moves them about.
    assert figures["kills_after_learning_began"] >= kills // 6
    assert figures["kills_while_writing"] > 0 or kills == 2  # while the run was ahead of its checkpoint
    if kind == "synchronous":
        assert figures["kills_while_rollouts_waited"] > 0
    assert (figures["rollbacks"] > 0) == (kind == "collapsing")
    assert figures["generation_batches"] > (3 if kind in ("spent", "pipelined") else 2)
