"""Tensors that wait in host memory while others need the device: the trainer's state during generation.

They keep their identity: only their data moves. Copies go through a little pinned memory by several threads, as in
`models/transfer.py`, since pinning all of it would take longer than copying.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from stalewise.models.transfer import PIECE, THREADS, fetch

SMALL = 1 << 12  # bytes: smaller tensors stay, such as the count of an optimizer's steps


class Offload:
    """Moves the data of tensors between a device and the host."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.away: list[Tensor] = []

    def leave(self, tensors: Iterable[Tensor]) -> None:
        """Move the data of these tensors to the host."""
        chosen = {id(one): one for one in tensors if one.nbytes > SMALL and one.is_contiguous()}
        self.away += chosen.values()
        here = [torch.empty(one.shape, dtype=one.dtype) for one in self.away]
        to_host(list(zip((one.detach() for one in self.away), here, strict=True)), self.device)
        for one, data in zip(self.away, here, strict=True):
            one.data = data

    def come_back(self) -> None:
        """Move it back to the device."""
        away, self.away = self.away, []
        there = [torch.empty(one.shape, dtype=one.dtype, device=self.device) for one in away]
        to_device(list(zip((one.detach() for one in away), there, strict=True)), self.device)
        for one, data in zip(away, there, strict=True):
            one.data = data


def to_host(pairs: Sequence[tuple[Tensor, Tensor]], device: torch.device) -> None:
    """Copy the first tensor of each pair, on the device, to the second, on the host."""
    if device.type == "cuda":
        fetch(pairs, device)
        return
    for source, target in pairs:
        target.copy_(source)


def to_device(pairs: Sequence[tuple[Tensor, Tensor]], device: torch.device) -> None:
    """Copy the first tensor of each pair, on the host, to the second, on the device; ends when all are there."""
    if device.type != "cuda":
        to_host(pairs, device)
        return
    split = ([tensor.view(-1).view(torch.uint8).split(PIECE) for tensor in pair] for pair in pairs)
    pieces = [piece for here, there in split for piece in zip(here, there, strict=True)]
    ready = torch.cuda.Event()
    ready.record()

    def work(first: int) -> None:
        with torch.cuda.device(device), torch.cuda.stream(stream := torch.cuda.Stream()):
            stream.wait_event(ready)  # the memory may have been another kernel's
            pinned = torch.empty(PIECE, dtype=torch.uint8, pin_memory=True)
            for here, there in pieces[first::THREADS]:
                np.copyto(pinned[: len(here)].numpy(), here.numpy())  # without Python's lock
                there.copy_(pinned[: len(here)], non_blocking=True)
                stream.synchronize()

    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(work, range(min(THREADS, len(pieces)))))
