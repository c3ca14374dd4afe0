"""Arrays that travel together arrive as they were, each at an address that kernels like."""

from __future__ import annotations

import numpy as np
import torch

from stalewise.models.transfer import ALIGNMENT, in_buffer, send

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
