from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from rotations import DEVICE


@pytest.fixture
def kernels() -> Any:
    """Those of `kernels/rope.py`, on a GPU or in Triton's interpreter."""
    pytest.importorskip("triton")
    if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("no GPU, and no TRITON_INTERPRET=1")
    from stalewise.models.kernels import rope

    return rope


@pytest.fixture
def compiled() -> Callable[[str], str]:
    """Runs a script that compiles kernels, for which no GPU is needed; what it prints."""

    def run(script: str) -> str:
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        command = [sys.executable, "-W", "ignore", "-c", script]
        found = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert found.returncode == 0, found.stderr[-2000:]
        return found.stdout

    return run
