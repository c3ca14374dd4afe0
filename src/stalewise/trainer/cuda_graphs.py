"""The body of a model, forward and backward, as CUDA graphs: one launch each where Python would make thousands.

A graph works on fixed addresses and sizes, so micro-batches are padded up to few different sizes. A size that comes up
for the first time is launched by Python, which sets up what must not be part of a graph; when it soon comes up again it
is captured. Graphs share their memory: a backward pass always follows its forward pass before the next begins. The
weights of linear layers are rounded once an update, not in every replay. Two halves of a micro-batch are branches of
one graph: while one of them waits for its next kernel, the other has the device. Axes: T tokens with padding, H hidden
numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from stalewise.models.graph_capture import recording
from stalewise.models.transfer import UNDISTURBED, in_buffer
from stalewise.trainer.fused_linears import RoundedWeights, Twins
from stalewise.trainer.micro_batch import ForwardInput, MicroBatch
from stalewise.trainer.optimizer import add_to
from stalewise.trainer.weights import FlatWeights

# They hold memory of the driver's. Sizes beyond these are launched by Python.
MOST_GRAPHS = 128
# Micro-batches. To capture takes longer than to launch: a size that is not back so soon may not come up often enough.
SOON = 32
LANES = 2  # passages of a micro-batch


@dataclass(slots=True)
class Captured:
    """Graphs of one size, and the tensors that they read and write."""

    buffer: Tensor  # which the passages are views of
    passages: list[ForwardInput]
    hidden_TH: Tensor
    gradient_TH: Tensor
    forward: torch.cuda.CUDAGraph
    backward: torch.cuda.CUDAGraph


class GraphedBody:
    """A callable that gives the last hidden states of a packed micro-batch; gradients go straight to `.grad`.

    The weights must stay where they are, and so must their gradients.
    """

    def __init__(self, model: Any, weights: FlatWeights, precision: torch.dtype) -> None:
        self.model, self.weights, self.precision = model, weights, precision
        # The output layer runs outside: a weight that only it has gets no gradient here.
        self.parameters = weights.parameters
        self.anchor = torch.zeros((), device=model.device, requires_grad=True)
        self.rounded = RoundedWeights(model.base_model, precision)
        self.lanes = [Twins(self.rounded) for _ in range(LANES)]
        # Of its own, and always the same: memory of a stream, such as a library's workspace, stays with it. The lanes
        # beside the first have the others.
        self.stream, *self.beside = (torch.cuda.Stream() for _ in range(LANES))
        self.calls = 0
        self.launched: dict[tuple[int, ...], int] = {}  # in which call each size was last learned from
        self.captured: dict[tuple[int, ...], Captured] = {}
        # Last hidden states and their gradients, of whichever size is at work.
        self.hidden_TH = self.gradient_TH = torch.empty(0, 0, device=model.device)
        self.pool: Any = None

    def __call__(self, part: MicroBatch) -> Tensor:
        """Last hidden states [T, H] of the micro-batch, passage by passage, padding included."""
        self.calls += 1
        captured = self._captured_for(part)
        if captured is None:
            return _Launch.apply(self.anchor, self, part)  # pyright: ignore[reportReturnType]
        captured.buffer.copy_(part.buffer[: len(captured.buffer)])  # to the addresses that the graphs read
        if torch.is_grad_enabled():
            return _Replay.apply(self.anchor, captured)  # pyright: ignore[reportReturnType]
        captured.forward.replay()
        return captured.hidden_TH

    def weights_changed(self) -> None:
        """What the graphs read is rounded anew; to be called after every step."""
        self.rounded.refresh()

    def _captured_for(self, part: MicroBatch) -> Captured | None:
        key = _size(part)
        is_soon = key in self.launched and self.calls - self.launched[key] <= SOON
        if is_soon and key not in self.captured and len(self.captured) < MOST_GRAPHS:
            with UNDISTURBED:
                self.captured[key] = self._capture(part)
        return self.captured.get(key)

    def _capture(self, part: MicroBatch) -> Captured:
        """Graphs of a size that was launched before, and has its place in what is shared."""
        forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        tokens = sum(one.input_ids_XW.numel() for one in part.passages)
        captured = Captured(*_copied(part), self.hidden_TH[:tokens], self.gradient_TH[:tokens], forward, backward)
        with recording(forward, self.stream, self.pool):
            hidden = self._forward(captured.passages)
            torch.cat([lane_TH.detach() for lane_TH in hidden], out=captured.hidden_TH)
        self.pool = forward.pool()
        with recording(backward, self.stream, self.pool):
            self._backward(hidden, captured.gradient_TH)
        return captured

    def launch(self, part: MicroBatch) -> tuple[list[Tensor], Tensor]:
        """Hidden states of each passage, for `launch_backward`, and those of all, [T, H]. By Python, without graphs."""
        with self._on_stream():
            hidden = self._forward(part.passages)
            tokens = sum(map(len, hidden))
            if tokens > len(self.hidden_TH):  # graphs that are there keep the ones that they were made with
                self.hidden_TH = hidden[0].new_empty(tokens, hidden[0].shape[1])
                self.gradient_TH = torch.empty_like(self.hidden_TH)
            torch.cat([lane_TH.detach() for lane_TH in hidden], out=self.hidden_TH[:tokens])
        return hidden, self.hidden_TH[:tokens]

    def launch_backward(self, part: MicroBatch, hidden: Sequence[Tensor], gradient_TH: Tensor) -> None:
        """Add up gradients as a replay would; from here on, this size can be captured."""
        own_TH = self.gradient_TH[: len(gradient_TH)].copy_(gradient_TH)
        with self._on_stream():
            self._backward(hidden, own_TH)
        self.launched[_size(part)] = self.calls

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Within: on the stream that captures, after what is enqueued so far and before what is enqueued later."""
        here = torch.cuda.current_stream()
        self.stream.wait_stream(here)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            here.wait_stream(self.stream)

    def _forward(self, passages: Sequence[ForwardInput]) -> list[Tensor]:
        """Last hidden states of each passage, which pass side by side."""
        enabled = self.precision is not torch.float32
        hidden: list[Tensor] = []
        count = len(passages)
        with self._side_by_side() as streams:
            for lane, stream, passage in zip(self.lanes[:count], streams[:count], passages, strict=True):
                # Without its cache: a weight that is not rounded here, it rounds anew in every replay, as it must.
                with (
                    torch.cuda.stream(stream),
                    torch.enable_grad(),
                    torch.autocast("cuda", dtype=self.precision, enabled=enabled, cache_enabled=False),
                    self.rounded.in_place(),
                    lane.in_place(self.model.base_model),
                ):
                    hidden.append(run_passages(self.model, [passage]))
        return hidden

    def _backward(self, hidden: Sequence[Tensor], gradient_TH: Tensor) -> None:
        found: list[list[Tensor | None]] = []
        gradients = gradient_TH.split([len(lane_TH) for lane_TH in hidden])
        # Whoever captures is within autocast, whoever launches is not; a gradient's precision is the forward pass's.
        with self._side_by_side() as streams, torch.autocast("cuda", enabled=False):
            lanes = zip(self.lanes[: len(hidden)], streams[: len(hidden)], hidden, gradients, strict=True)
            for lane, stream, lane_TH, gradient in lanes:
                with torch.cuda.stream(stream):
                    found.append(lane.gradients(lane_TH, self.parameters, gradient))
        here = torch.cuda.current_stream()
        for of_lane in found:  # one after the other, so that sums are the same every time
            if not torch.cuda.is_current_stream_capturing():  # which keeps all memory until it ends
                for gradient in (one for one in of_lane if one is not None):
                    gradient.record_stream(here)
            reached = [(total, g) for total, g in zip(self.weights.gradients, of_lane, strict=True) if g is not None]
            add_to([total for total, _ in reached], [amount for _, amount in reached])

    @contextlib.contextmanager
    def _side_by_side(self) -> Iterator[list[torch.cuda.Stream]]:
        """A stream for each lane; all begin where the one at hand is, and it goes on when all are done."""
        here = torch.cuda.current_stream()
        for stream in self.beside:
            stream.wait_stream(here)
        try:
            yield [here, *self.beside]
        finally:  # a capture that fails must end whole, or it hides why it failed
            for stream in self.beside:
                here.wait_stream(stream)


def run_passages(model: Any, passages: Sequence[ForwardInput]) -> Tensor:
    """Last hidden states [T, H] of all passages, one after the other."""
    bodies = (model.base_model(input_ids=one.input_ids_XW, use_cache=False, **one.arguments) for one in passages)
    hidden = [body.last_hidden_state.flatten(0, 1) for body in bodies]
    return hidden[0] if len(hidden) == 1 else torch.cat(hidden)


def _size(part: MicroBatch) -> tuple[int, ...]:
    """What micro-batches that one graph serves have in common."""
    first = part.passages[0]  # the others are as large
    return (
        len(part.passages),
        first.input_ids_XW.shape[1],
        len(first.arguments["key_M"]),
        len(first.arguments["cu_seq_lens_q"]),
        first.arguments["max_length_q"],
        first.arguments["max_length_k"],
    )


def _copied(part: MicroBatch) -> tuple[Tensor, list[ForwardInput]]:
    """The passages of a micro-batch at addresses of their own, and the buffer that holds them."""
    given = [value for one in part.passages for value in (one.input_ids_XW, *one.arguments.values())]
    tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
    end = max(tensor.storage_offset() * tensor.element_size() + tensor.nbytes for tensor in tensors)
    buffer = part.buffer[:end].clone()

    def moved(value: Any) -> Any:
        return tree_map_only(Tensor, lambda tensor: in_buffer(tensor, buffer), value)

    return buffer, [ForwardInput(moved(one.input_ids_XW), moved(dict(one.arguments))) for one in part.passages]


class _Launch(torch.autograd.Function):
    """Forward and backward pass as Python launches them, by the same code that is captured."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, body: GraphedBody, part: MicroBatch) -> Tensor:
        ctx.body, ctx.part = body, part
        ctx.hidden, hidden_TH = body.launch(part)
        return hidden_TH.view_as(hidden_TH)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        ctx.body.launch_backward(ctx.part, ctx.hidden, gradients[0])
        del ctx.hidden
        return None, None, None


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
