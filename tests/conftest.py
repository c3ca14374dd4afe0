from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

# Stand-ins for packages must not be found by others; the tests of engines, verl and Ray have packages of their own.
ELSEWHERE = {"engines": "vllm", "in_verl": "verl", "on_ray": "ray"}
collect_ignore = ["fakes", *(tests for tests, package in ELSEWHERE.items() if not find_spec(package))]


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    # Two pytest workers on two cores: more threads only wait for each other.
    torch.set_num_threads(1)
