"""Arrays on their way to a device, and back.

A copy costs the host as much for ten numbers as for ten thousand, so they travel together: one pinned buffer, one copy,
and a view of it for each array.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

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


# Tensors on their way from a GPU to a file: in pieces through a little page-locked memory, by several threads.
# The driver's own way to ordinary memory takes one thread, and most of its time is that of the system, which makes the
# memory; so is most of what it takes to lock all of it.

PIECE = 2**24  # bytes
THREADS = 8


def host_copies(*files: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """The tensors of some files in the machine's memory, whole; what is there already is not copied.

    A tensor that has two names is copied once, and has both again.
    """
    there: dict[tuple[object, ...], Tensor] = {}
    here: dict[tuple[object, ...], Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        same = tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
        if same not in here and tensor.is_cuda:
            here[same], there[same] = torch.empty(tensor.shape, dtype=tensor.dtype), tensor.detach().contiguous()
        elif same not in here:
            here[same] = tensor.cpu()
        return here[same]

    copies = [{name: copy(tensor) for name, tensor in file.items()} for file in files]
    for device in {tensor.device for tensor in there.values()}:
        chosen = [same for same, tensor in there.items() if tensor.device == device]
        fetch([(there[same], here[same]) for same in chosen], device)
    return copies


def fetch(pairs: Sequence[tuple[Tensor, Tensor]], device: torch.device) -> None:
    """Copy the first of each two, which is on the device, to the second; both are contiguous."""
    pieces = [piece for there, here in pairs for piece in _pieces(_bytes(there), _bytes(here))]
    ready = torch.cuda.Event()
    with torch.cuda.device(device):
        ready.record()

    def work(first: int) -> None:
        with torch.cuda.device(device), torch.cuda.stream(stream := torch.cuda.Stream()):
            stream.wait_event(ready)
            locked = _locked_piece()
            for there, here in pieces[first::THREADS]:
                locked[: len(there)].copy_(there, non_blocking=True)
                stream.synchronize()
                np.copyto(here.numpy(), locked[: len(there)].numpy())  # without Python's lock

    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(work, range(min(THREADS, len(pieces)))))


def _locked_piece() -> Tensor:
    """An ordinary one, which is slower, where the system locks no more memory."""
    try:
        return torch.empty(PIECE, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:
        return torch.empty(PIECE, dtype=torch.uint8)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _pieces(there: Tensor, here: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(there.split(PIECE), here.split(PIECE), strict=True)) if len(there) else []
