"""Work beside other work: on a stream of its own, where the gaps between its kernels leave nobody waiting."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


class Aside:
    """What is enqueued within `reading` runs beside what is enqueued after it; `join` waits for it, on the device.

    Without a GPU everything runs where it stands.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.held: list[object] = []

    @contextlib.contextmanager
    def reading(self, *read: object) -> Iterator[None]:
        """Work without gradients that reads these. They are held until `join`.

        Memory that is let go belongs to the next kernel of the stream that asked for it, whoever still reads it.
        """
        with torch.no_grad():
            if self.stream is None:
                yield
                return
            self.held.extend(read)
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                yield

    def join(self, *made: torch.Tensor) -> None:
        """What is enqueued after this comes after all of it, and may read what was made there."""
        if self.stream is not None:
            here = torch.cuda.current_stream()
            here.wait_stream(self.stream)
            for tensor in made:
                tensor.record_stream(here)
        self.held.clear()
