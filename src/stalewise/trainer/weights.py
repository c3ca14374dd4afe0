"""Operations on all trained weights and gradients at once, and the side stream that some of them run on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


class SideStream:
    """A second CUDA stream. Work within `reading` runs at the same time as what follows it; `join` waits for it.

    Without a GPU, work runs immediately.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.held: list[object] = []

    @contextlib.contextmanager
    def reading(self, *read: object) -> Iterator[None]:
        """Run work that reads these objects and needs no gradients. The objects are kept until `join`.

        The allocator would give freed memory to the next kernel of the other stream while this one still reads it.
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
        """Make the current stream wait for the side stream, and let it read these tensors that were made there."""
        if self.stream is not None:
            here = torch.cuda.current_stream()
            here.wait_stream(self.stream)
            for tensor in made:
                tensor.record_stream(here)
        self.held.clear()


class Weights:
    """Trained weights and their gradients, as separate tensors."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = list(parameters)

    def zero_gradients(self) -> None:
        """Remove all gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def gradient_norm(self) -> Tensor:
        """‖gradient‖ over the weights of this rank."""
        return get_total_norm([parameter.grad for parameter in self.parameters if parameter.grad is not None])

    def clip_gradients(self, max_norm: float, norm: Tensor) -> None:
        """Scale the gradient down to `max_norm`, given its norm."""
        clip_grads_with_norm_(self.parameters, max_norm, norm)


class FlatWeights(Weights):
    """Weights of one precision with all gradients in one tensor, at addresses that CUDA graphs can hold.

    An operation on a list of tensors is a dozen launches on a GPU, with a gap after each; on one tensor it is one.
    """

    def __init__(self, parameters: Sequence[Tensor], side_stream: SideStream) -> None:
        super().__init__(parameters)
        self.side_stream = side_stream
        self.own = [parameter.detach() for parameter in self.parameters]  # made once: there may be hundreds
        self.sizes = [tensor.numel() for tensor in self.own]
        self.gradient, self.gradients = self._flat()
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient
        self.zero_gradients()

    def zero_gradients(self) -> None:
        """Fill all gradients with zeros, in place."""
        self.gradient.zero_()

    def gradient_norm(self) -> Tensor:
        """‖gradient‖ over the weights of this rank, in one reduction."""
        return torch.linalg.vector_norm(self.gradient, dtype=torch.float32)

    def clip_gradients(self, max_norm: float, norm: Tensor) -> None:
        """Scale the gradient down by the same factor as `clip_grads_with_norm_`."""
        self.gradient.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))

    def _flat(self) -> tuple[Tensor, list[Tensor]]:
        """An empty tensor with as many numbers as the weights have, and its views in the shapes of the weights."""
        flat = self.own[0].new_empty(sum(self.sizes))
        parts = flat.split(self.sizes)
        return flat, [part.view(tensor.shape) for part, tensor in zip(parts, self.own, strict=True)]
