from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

# Stand-ins for packages must not be found by others; the engines' tests have an environment of their own.
collect_ignore = ["fakes", *(() if find_spec("vllm") else ("engines",))]


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    # Two pytest workers on two cores: more threads only wait for each other.
    torch.set_num_threads(1)
