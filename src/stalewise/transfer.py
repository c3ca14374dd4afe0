"""Arrays on their way to a device, and back.

A copy costs the host as much for ten numbers as for ten thousand, so they travel together: one pinned buffer, one copy,
and a view of it for each array.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 64  # bytes; kernels read several numbers at once where addresses allow it
# While a CUDA graph is captured no other thread may ask the driver for anything.
UNDISTURBED = threading.Lock()


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """A tensor with the numbers of `array`; the copy to a GPU is enqueued, not waited for."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def to_host(tensor: Tensor) -> Tensor:
    """Its numbers on the host, apart from it; from a GPU they are on their way, and to be waited for."""
    here = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return here.copy_(tensor, non_blocking=True)


def send(arrays: Mapping[str, np.ndarray], device: torch.device) -> tuple[Tensor, dict[str, Tensor]]:
    """The same numbers on the device: a buffer of bytes, and for each array its view of it. Not waited for."""
    starts, end = dict[str, int](), 0
    for name, array in arrays.items():
        starts[name] = end
        end += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    with UNDISTURBED:
        here = torch.zeros(end, dtype=torch.uint8, pin_memory=device.type == "cuda")
        whole = here.numpy()
        for name, array in arrays.items():
            whole[starts[name] : starts[name] + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        buffer = here.to(device, non_blocking=True)
        del here, whole  # pinned memory is given back by a call to the driver, too
    return buffer, {name: _view(buffer, starts[name], array) for name, array in arrays.items()}


def in_buffer(tensor: Tensor, buffer: Tensor) -> Tensor:
    """The view of another buffer that `tensor` is of its own."""
    start = tensor.storage_offset() * tensor.element_size()
    return buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def _view(buffer: Tensor, start: int, array: np.ndarray) -> Tensor:
    dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
    return buffer[start : start + array.nbytes].view(dtype).view(array.shape)
