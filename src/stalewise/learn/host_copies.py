"""Tensors on their way from a GPU to a file: through page-locked memory, which takes them ten times as fast."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from torch import Tensor

# torch keeps page-locked memory for the next time, and no other process can have it meanwhile.
MOST_BYTES = 8 * 2**30
MOST_SHARE = 1 / 8  # of the machine's memory


def most_page_locked() -> int:
    """Bytes of page-locked memory that copies may take."""
    return int(min(MOST_BYTES, MOST_SHARE * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")))


def host_copies(*files: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """The tensors of some files in the machine's memory, whole; what is there already is not copied.

    A tensor that has two names is copied once, and has both again.
    """
    room, made = most_page_locked(), dict[tuple[int, torch.Size], Tensor]()

    def copy(tensor: Tensor) -> Tensor:
        nonlocal room
        place = tensor.data_ptr(), tensor.shape
        if place not in made:
            room -= tensor.nbytes
            made[place] = _copy(tensor, page_locked=room >= 0)
        return made[place]

    copies = [{name: copy(tensor) for name, tensor in file.items()} for file in files]
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return copies


def _copy(tensor: Tensor, *, page_locked: bool) -> Tensor:
    """A copy on the host, which with page-locked memory is only enqueued."""
    if tensor.device.type != "cuda" or not page_locked:
        return tensor.cpu()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
