"""Tensors on their way from a GPU to a file: through page-locked memory, which is much faster."""

from __future__ import annotations

from collections.abc import Mapping

import psutil
import torch
from torch import Tensor

# torch keeps page-locked memory for the next time, and no other process can have it meanwhile.
MOST_BYTES = 8 * 2**30
MOST_SHARE = 1 / 8  # of the machine's memory


def most_page_locked() -> int:
    """Bytes of page-locked memory that copies may take."""
    return int(min(MOST_BYTES, MOST_SHARE * psutil.virtual_memory().total))


def host_copies(*files: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """The tensors of some files in the machine's memory, whole; what is there already is not copied.

    A tensor that has two names is copied once, and has both again.
    """
    room = most_page_locked()
    made: dict[tuple[object, ...], Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        nonlocal room
        same = tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
        if same not in made:
            fits = tensor.is_cuda and locked_bytes(tensor) <= room
            room -= locked_bytes(tensor) if fits else 0
            made[same] = _page_locked(tensor) if fits else tensor.cpu()
        return made[same]

    copies = [{name: copy(tensor) for name, tensor in file.items()} for file in files]
    for device in {tensor.device for file in files for tensor in file.values() if tensor.is_cuda}:
        torch.cuda.synchronize(device)
    return copies


def locked_bytes(tensor: Tensor) -> int:
    """What torch takes for a page-locked copy: the next power of two."""
    return 1 << max(tensor.nbytes - 1, 0).bit_length()


def _page_locked(tensor: Tensor) -> Tensor:
    """A copy that is enqueued; an ordinary one where the system locks no more memory."""
    try:
        there = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    except RuntimeError:
        return tensor.cpu()
    with torch.cuda.device(tensor.device):  # whose stream made it
        return there.copy_(tensor, non_blocking=True)
