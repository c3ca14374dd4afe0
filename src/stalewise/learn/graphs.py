"""The body of a model, forward and backward, as CUDA graphs: one launch each where Python would make thousands.

A graph works on fixed addresses and sizes, so micro-batches are padded up to few different sizes. Graphs are
captured when a size comes up first and share their memory: a backward pass always follows its forward pass before the
next begins. The weights of linear layers are rounded once an update, not in every replay. Axes: T tokens with padding,
H hidden numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stalewise.learn.batching import MicroBatch
from stalewise.learn.optimizer import add_to, copies
from stalewise.learn.rounded import RoundedWeights

# Each keeps its last hidden states, and took a third of a second to make. Sizes beyond these are launched by Python.
MOST_GRAPHS = 32


@dataclass(slots=True)
class Captured:
    """Graphs of one size, and the tensors that they read and write."""

    input_ids_1T: Tensor
    arguments: dict[str, Any]
    hidden_TH: Tensor
    gradient_TH: Tensor
    forward: torch.cuda.CUDAGraph
    backward: torch.cuda.CUDAGraph


class GraphedBody:
    """A callable that gives the last hidden states of a packed micro-batch; gradients go straight to `.grad`.

    The weights must stay where they are, and so must their gradients: zero them, never set them to None.
    """

    def __init__(self, model: Any, parameters: list[Tensor], precision: torch.dtype) -> None:
        self.model, self.precision = model, precision
        # The output layer runs outside: a weight that only it has gets no gradient here.
        self.parameters = parameters
        self.totals = [torch.zeros_like(parameter) for parameter in parameters]
        for parameter, total in zip(parameters, self.totals, strict=True):
            parameter.grad = total
        self.anchor = torch.zeros((), device=model.device, requires_grad=True)
        self.rounded = RoundedWeights(model.base_model, precision)
        self.captured: dict[tuple[int, ...], Captured] = {}
        self.twins: dict[Tensor, Tensor] = {}
        self.pool: Any = None

    def __call__(self, part: MicroBatch) -> Tensor:
        """Last hidden states [T, H] of the micro-batch, whose tokens come first."""
        captured = self._captured_for(part)
        if captured is None:
            body = self.model.base_model(input_ids=part.input_ids_XW, use_cache=False, **part.arguments)
            return body.last_hidden_state.squeeze(0)
        self._put(part, captured)
        if torch.is_grad_enabled():
            return _Replay.apply(self.anchor, captured)  # pyright: ignore[reportReturnType]
        captured.forward.replay()
        return captured.hidden_TH

    def weights_changed(self) -> None:
        """What the graphs read is rounded anew; to be called after every step."""
        self.rounded.refresh()

    def twin(self, parameter: Tensor | None) -> Any:
        """The same numbers and the same gradient, for use outside the graphs.

        Autograd ties a parameter to the stream of its first use; a tie to another stream than theirs would break a
        capture.
        """
        if parameter is None or not parameter.requires_grad:
            return parameter
        if parameter not in self.twins:
            self.twins[parameter] = parameter.detach().requires_grad_()
            self.twins[parameter].grad = parameter.grad
        return self.twins[parameter]

    def _captured_for(self, part: MicroBatch) -> Captured | None:
        given = part.arguments
        key = (
            part.input_ids_XW.shape[1],
            len(given["key_M"]),
            len(given["cu_seq_lens_q"]),
            given["max_length_q"],
            given["max_length_k"],
        )
        if key not in self.captured and len(self.captured) < MOST_GRAPHS:
            self.captured[key] = self._capture(part)
        return self.captured.get(key)

    def _put(self, part: MicroBatch, captured: Captured) -> None:
        """Write a micro-batch to the addresses that the graphs read."""
        captured.input_ids_1T.copy_(part.input_ids_XW)
        for name, value in part.arguments.items():
            if isinstance(value, Tensor):
                captured.arguments[name].copy_(value)

    def _capture(self, part: MicroBatch) -> Captured:
        device = part.input_ids_XW.device
        input_ids_1T = part.input_ids_XW.clone()
        arguments = {
            name: value.clone() if isinstance(value, Tensor) else value for name, value in part.arguments.items()
        }
        empty = torch.empty(0, device=device)
        forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        captured = Captured(input_ids_1T, arguments, empty, empty, forward, backward)
        with _kept(self.totals):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):  # what is set up at the first run must not be part of a graph
                for _ in range(2):
                    hidden_TH = self._forward(captured)
                    self._backward(hidden_TH, torch.zeros_like(hidden_TH))
                    del hidden_TH
            torch.cuda.current_stream().wait_stream(stream)
            torch.cuda.empty_cache()  # what lies in the cache of that stream is of use to nobody else
            with torch.cuda.graph(captured.forward, pool=self.pool):
                captured.hidden_TH = self._forward(captured)
            self.pool = captured.forward.pool()
            captured.gradient_TH = torch.zeros_like(captured.hidden_TH)
            with torch.cuda.graph(captured.backward, pool=self.pool):
                self._backward(captured.hidden_TH, captured.gradient_TH)
        captured.hidden_TH = captured.hidden_TH.detach()
        return captured

    def _forward(self, captured: Captured) -> Tensor:
        enabled = self.precision is not torch.float32
        # Without its cache: a weight that is not rounded here, it rounds anew in every replay, as it must.
        with (
            torch.enable_grad(),
            torch.autocast("cuda", dtype=self.precision, enabled=enabled, cache_enabled=False),
            self.rounded.in_place(),
        ):
            body = self.model.base_model(input_ids=captured.input_ids_1T, use_cache=False, **captured.arguments)
        return body.last_hidden_state.squeeze(0)

    def _backward(self, hidden_TH: Tensor, gradient_TH: Tensor) -> None:
        found = self.rounded.gradients(hidden_TH, self.parameters, gradient_TH)
        reached = [(total, g) for total, g in zip(self.totals, found, strict=True) if g is not None]
        add_to([total for total, _ in reached], [amount for _, amount in reached])


class _Replay(torch.autograd.Function):
    """Forward and backward pass by replaying their graphs."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, captured: Captured) -> Tensor:
        ctx.captured = captured
        captured.forward.replay()
        return captured.hidden_TH.view_as(captured.hidden_TH)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        ctx.captured.gradient_TH.copy_(gradients[0])
        ctx.captured.backward.replay()
        return None, None


@contextlib.contextmanager
def _kept(totals: list[Tensor]) -> Iterator[None]:
    """Totals are afterwards what they were before: trial runs add to them."""
    before = copies(totals)
    try:
        yield
    finally:
        for total, value in zip(totals, before, strict=True):
            total.copy_(value)
