from __future__ import annotations

import gc
import os
import signal
from importlib.util import find_spec

import pytest

gc.disable()  # until all is imported: of what is made by then nearly nothing is garbage

# Under `nohup`, or in the background of a shell without job control, SIGINT is ignored, and children inherit that.
# Tests interrupt children: with a handler here, a child starts with the default disposition.
signal.signal(signal.SIGINT, signal.default_int_handler)

# What fsync guards against, a power cut, no test can cause: after a kill the page cache is still there. On a slow disk
# it takes most of the time. That it is called, and when, is tested in tests/unit/store/test_atomic.py.
os.fsync = lambda descriptor: None

if find_spec("hypothesis"):  # not in the environments of engines
    from hypothesis import settings

    # No deadline of one example: a busy machine would decide. `make nightly` tries thirteen times as many.
    settings.register_profile("day", deadline=None, max_examples=15)
    settings.register_profile("night", deadline=None, max_examples=200)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "day"))

# Stand-ins for packages must not be found by others; the tests of engines, verl and Ray have packages of their own.
ELSEWHERE = {"engines": "vllm", "in_verl": "verl", "on_ray": "ray"}
collect_ignore = ["fakes", *(tests for tests, package in ELSEWHERE.items() if not find_spec(package))]


def pytest_collection_finish() -> None:
    # Half a million objects of imported packages stay to the end: without this, every collection walks all of them.
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.set_threshold(10_000, 20, 20)  # in place of 700: collecting took a twentieth of all time


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    # Two pytest workers on two cores: more threads only wait for each other.
    import torch  # here, not above: the process that only hands out tests has no use for it

    torch.set_num_threads(1)
