from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    # Two pytest workers on two cores: more threads only wait for each other.
    torch.set_num_threads(1)
