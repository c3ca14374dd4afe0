"""Arrays that travel together arrive as they were, each at an address that kernels like."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from stalewise.models.transfer import ALIGNMENT, in_buffer, send
from stalewise.trainer.prefetch import _one_ahead, one_ahead

CPU = torch.device("cpu")
ARRAYS = {
    "long": np.arange(7, dtype=np.int64)[None],
    "int": np.array([3, -1, 2], dtype=np.int32),
    "none": np.zeros((0, 0), dtype=np.int64),
    "float": np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3),
    "bool": np.array([[True, False, True]]),
    "view": np.arange(12, dtype=np.int64).reshape(3, 4).T,  # not contiguous
}


def test_arrays_arrive_as_they_were() -> None:
    buffer, there = send(ARRAYS, CPU)
    assert list(there) == list(ARRAYS)
    for name, array in ARRAYS.items():
        assert there[name].numpy().dtype == array.dtype
        np.testing.assert_array_equal(there[name].numpy(), array)
        assert (there[name].data_ptr() - buffer.data_ptr()) % ALIGNMENT == 0 or there[name].numel() == 0
    there["int"][0] = 9  # a view, not a copy
    assert buffer[there["int"].storage_offset() * 4] == 9
    assert send({}, CPU)[0].numel() == 0


def test_the_same_place_in_another_buffer() -> None:
    buffer, there = send(ARRAYS, CPU)
    other = buffer.clone()
    moved = {name: in_buffer(tensor, other) for name, tensor in there.items()}
    buffer.zero_()
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(moved[name].numpy(), array)


def test_one_is_made_ahead_and_no_more() -> None:
    made: list[tuple[int, str]] = []

    def make(number: int) -> int:
        made.append((number, threading.current_thread().name))
        return number * number

    with ThreadPoolExecutor(1, thread_name_prefix="ahead") as thread:
        found = _one_ahead(make, range(5), thread)
        assert next(found) == 0
        assert [number for number, _ in made] == [0, 1]  # at once: nothing is made beside the first
        assert next(found) == 1
        thread.submit(lambda: None).result()
        assert [number for number, _ in made] == [0, 1, 2]
        assert list(found) == [4, 9, 16]
    assert all(name.startswith("ahead") for _, name in made)
    assert list(one_ahead(make, range(3), CPU)) == [0, 1, 4]
    assert made[-1][1] == threading.current_thread().name  # without a GPU there is nobody to get ahead of


def test_what_goes_wrong_ahead_is_raised_where_it_is_asked_for() -> None:
    with ThreadPoolExecutor(1) as thread:
        found = _one_ahead(lambda number: 1 / number, [2, 0, 1], thread)
        assert next(found) == 0.5
        with pytest.raises(ZeroDivisionError):
            next(found)
