from __future__ import annotations

import os
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
