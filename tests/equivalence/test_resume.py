"""`kill -9` at any moment loses nothing: the run goes on to bit-identical weights. `make soak` does this 200 times."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parents[2] / "scripts" / "soak.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "objective", "kills"),
    [
        ("staged", "p3o", 6),
        ("staged", "decoupled_ppo", 3),
        ("spent", "mu_grpo", 3),
        ("collapsing", "p3o", 4),
        ("pipelined", "mu_grpo", 2),
    ],
)
def test_killed_runs_end_as_if_they_had_never_been_stopped(kind: str, objective: str, kills: int) -> None:
    command = [sys.executable, str(SOAK), "--kills", str(kills), "--seed", "1", "--objective", objective]
    command += ["--kind", kind]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["identical"]
    assert figures["kills"] >= kills
    # A kill before the first checkpoint of the learner only starts the run anew: enough must come later, on a machine
    # whose other load moves them about.
    assert figures["kills_after_learning_began"] >= (1 if kind == "pipelined" else kills // 6)
    assert (figures["rollbacks"] > 0) == (kind == "collapsing")
    assert figures["generation_batches"] > (3 if kind in ("spent", "pipelined") else 2)
