"""A stand-in for CUDA's Multi-Process Service, which writes down what it is told."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def fake_service(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put it on the path; it writes its directory and what it is told to `directory / "service"`."""
    control = directory / "bin" / "nvidia-cuda-mps-control"
    control.parent.mkdir()
    control.write_text(f'#!/bin/sh\necho "$CUDA_MPS_PIPE_DIRECTORY" "$@" $([ $# = 0 ] && cat) >> {directory}/service\n')
    control.chmod(0o755)
    monkeypatch.setenv("PATH", f"{control.parent}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
