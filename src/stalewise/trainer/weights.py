"""Work beside other work: on a stream of its own, where the gaps between its kernels leave nobody waiting."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from stalewise.trainer.optimizer import copies, copy_to, distance, subtract_from


class SideStream:
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


# What is done to all trained weights, or to all of their gradients, at once.
# On a GPU an operation on a list of tensors is a dozen launches with a gap after each; on one tensor that holds them all
# it is one.


class Weights:
    """Trained weights and their gradients, each wherever it lies."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = list(parameters)
        self.before: list[Tensor] = []

    def zero_gradients(self) -> None:
        """As they are before the first backward pass: none."""
        for parameter in self.parameters:
            parameter.grad = None

    def gradient_norm(self) -> Tensor:
        """‖gradient‖ over all numbers that are here."""
        return get_total_norm([parameter.grad for parameter in self.parameters if parameter.grad is not None])

    def clip_gradients(self, most: float, norm: Tensor) -> None:
        """Make the gradient, whose norm this is, no longer than `most`."""
        clip_grads_with_norm_(self.parameters, most, norm)

    def remember(self) -> None:
        """Before a step: what the weights are."""
        self.before = copies([parameter.detach() for parameter in self.parameters])

    def moved(self) -> Tensor:
        """After a step: the norm of the change of all weights since `remember`, once."""
        before, self.before = self.before, []
        return distance(before, [parameter.detach() for parameter in self.parameters])


class FlatWeights(Weights):
    """The same with all gradients in one tensor, where they stay: what is captured in a graph knows their addresses.

    The weights, all of one precision, stay tensors of their own. They are copied beside what is done to the gradients.
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
        """They keep their places."""
        self.gradient.zero_()

    def gradient_norm(self) -> Tensor:
        """In one reduction."""
        return torch.linalg.vector_norm(self.gradient, dtype=torch.float32)

    def clip_gradients(self, most: float, norm: Tensor) -> None:
        """By the factor that `clip_grads_with_norm_` takes."""
        self.gradient.mul_((most / (norm + 1e-6)).clamp(max=1.0))

    def remember(self) -> None:
        """Its memory is asked for here, not aside, where it would stay; the step comes after a `join`."""
        whole, views = self._flat()
        self.before = [whole, *views]
        with self.side_stream.reading():
            copy_to(views, self.own)

    def moved(self) -> Tensor:
        """In one reduction."""
        (whole, *views), self.before = self.before, []
        subtract_from(views, self.own)
        return torch.linalg.vector_norm(whole, dtype=torch.float32).double()

    def _flat(self) -> tuple[Tensor, list[Tensor]]:
        """A tensor with room for as many numbers as there are weights, and its parts, each of the shape of one."""
        flat = self.own[0].new_empty(sum(self.sizes))
        parts = flat.split(self.sizes)
        return flat, [part.view(tensor.shape) for part, tensor in zip(parts, self.own, strict=True)]
