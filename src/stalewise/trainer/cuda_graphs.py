"""The body of a model, forward and backward, as CUDA graphs: one launch each instead of thousands from Python.

A graph has fixed addresses and sizes, so micro-batches are padded to few sizes. A new size is launched eagerly, which
sets up what must not be part of a graph; a size that soon recurs is captured. Graphs and eager launches share their
memory: each backward pass follows its forward pass before the next begins. Two halves of a micro-batch are branches of
one graph: while one waits for its next kernel, the other runs. Axes: T tokens with padding, H hidden size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from stalewise.models.compilation import free_cache_for_graphs, recording, without_collecting
from stalewise.models.loading import model_body
from stalewise.models.transfer import CAPTURE_LOCK, in_buffer
from stalewise.trainer.fused_linears import RoundedWeights, StreamParameters
from stalewise.trainer.micro_batch import MicroBatch
from stalewise.trainer.optimizer import add_to
from stalewise.trainer.weights import FlatWeights

# Graphs take driver memory. Sizes beyond these are launched eagerly.
MOST_GRAPHS = 128
# Micro-batches. Capturing takes longer than launching: a size that recurs later than this may not recur often enough.
SOON = 32
LANES = 2  # calls of the model in one micro-batch


@dataclass(slots=True)
class SizeGraphs:
    """The graphs of one size, and the tensors that they read and write."""

    buffer: Tensor  # the inputs are views of it
    inputs: list[dict[str, Any]]
    hidden_TH: Tensor
    gradient_TH: Tensor
    forward: torch.cuda.CUDAGraph
    backward: torch.cuda.CUDAGraph


class GraphedBody:
    """Computes the last hidden states of a packed micro-batch. The backward pass adds to `weights.gradients`."""

    def __init__(
        self,
        model: Any,
        weights: FlatWeights,
        precision: torch.dtype,
        *,
        recomputes: bool = False,
        log: Callable[[str], object] = lambda text: None,
    ) -> None:
        """`recomputes`: the backward pass runs layers again, which must find the weights of the forward pass."""
        self.model, self.weights, self.precision = model, weights, precision
        self.recomputes, self.log = recomputes, log
        self.captures = True  # False after a capture that failed
        # The output layer runs outside: a weight of it alone gets no gradient here.
        self.parameters = weights.parameters
        self.anchor = torch.zeros((), device=model.device, requires_grad=True)
        self.rounded = RoundedWeights(model_body(model), precision)
        self.lanes = [StreamParameters(self.rounded) for _ in range(LANES)]
        # Always the same streams: memory of a stream, such as a library's workspace, stays with it. The first captures
        # and runs the first lane.
        self.stream, *self.other_streams = _streams(model.device.index)
        self.calls = 0
        self.launched: dict[tuple[int, ...], int] = {}  # the call in which each size last ran backward
        self.captured: dict[tuple[int, ...], SizeGraphs] = {}
        # Last hidden states and their gradients, shared by all sizes.
        self.hidden_TH = self.gradient_TH = torch.empty(0, 0, device=model.device)
        # Memory of graphs and eager launches. To the allocator memory of a graph is free, so nothing else is put here.
        self.pool = torch.cuda.MemPool()
        self.largest = 0  # tokens of a micro-batch that was launched

    def __call__(self, part: MicroBatch) -> Tensor:
        """Last hidden states [T, H] of all calls of a micro-batch, padding included."""
        self.calls += 1
        graphs = self._graphs_for(part)
        if graphs is not None:
            graphs.buffer.copy_(part.buffer[: len(graphs.buffer)])  # to the addresses that the graphs read
        return _BodyPass.apply(self.anchor, self, part, graphs)  # pyright: ignore[reportReturnType]

    def weights_changed(self) -> None:
        """Round the weights anew; call it after every step."""
        self.rounded.refresh()

    def _graphs_for(self, part: MicroBatch) -> SizeGraphs | None:
        key = _size(part)
        is_soon = key in self.launched and self.calls - self.launched[key] <= SOON
        if self.captures and is_soon and key not in self.captured and len(self.captured) < MOST_GRAPHS:
            try:
                with CAPTURE_LOCK:
                    self.captured[key] = self._capture(part)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:  # an operator that a graph cannot hold: launching it is always possible
                self.captures = False
                self.log(f"CUDA graphs are off, since a pass could not be captured: {str(error).splitlines()[0]}")
        return self.captured.get(key)

    def _capture(self, part: MicroBatch) -> SizeGraphs:
        """Capture a size that was launched before, so that the shared tensors are large enough."""
        forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        tokens = part.padded_tokens
        graphs = SizeGraphs(*_copied(part), self.hidden_TH[:tokens], self.gradient_TH[:tokens], forward, backward)
        with recording(forward, self.stream, self.pool.id):
            hidden = self._forward(graphs.inputs)
            torch.cat([lane_TH.detach() for lane_TH in hidden], out=graphs.hidden_TH)
        with recording(backward, self.stream, self.pool.id):
            self._backward(hidden, graphs.gradient_TH)
        return graphs

    def launch(self, part: MicroBatch) -> tuple[list[Tensor], Tensor]:
        """Eager forward pass: hidden states of each call, for `launch_backward`, and of all calls, [T, H]."""
        if part.padded_tokens > self.largest:  # the pool may have to grow, and cannot take memory that lies unused
            free_cache_for_graphs()
            self.largest = part.padded_tokens
        with self._on_stream():
            try:
                with self._shared_memory():
                    hidden = self._forward(part.inputs)
            except torch.OutOfMemoryError:  # there the allocator frees nothing to try again
                torch.cuda.empty_cache()
                with self._shared_memory():
                    hidden = self._forward(part.inputs)
            tokens = sum(map(len, hidden))
            if tokens > len(self.hidden_TH):  # existing graphs keep the tensors they were captured with
                self.hidden_TH = hidden[0].new_empty(tokens, hidden[0].shape[1])
                self.gradient_TH = torch.empty_like(self.hidden_TH)
            torch.cat([lane_TH.detach() for lane_TH in hidden], out=self.hidden_TH[:tokens])
        return hidden, self.hidden_TH[:tokens]

    def launch_backward(self, part: MicroBatch, hidden: Sequence[Tensor], gradient_TH: Tensor) -> None:
        """Eager backward pass; from here on, this size can be captured."""
        own_TH = self.gradient_TH[: len(gradient_TH)].copy_(gradient_TH)
        with self._on_stream(), self._shared_memory():
            self._backward(hidden, own_TH)
        self.launched[_size(part)] = self.calls

    @contextlib.contextmanager
    def _shared_memory(self) -> Iterator[None]:
        """Allocate from the memory of graphs, unless a capture failed: torch may not have left their pool in order."""
        if not self.captures:
            yield
            return
        with without_collecting(), torch.cuda.use_mem_pool(self.pool):
            yield

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Run on the capturing stream, in order with the work before and after."""
        here = torch.cuda.current_stream()
        self.stream.wait_stream(here)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            here.wait_stream(self.stream)

    def _forward(self, inputs: Sequence[dict[str, Any]]) -> list[Tensor]:
        """Last hidden states of each call, one call per lane."""
        enabled = self.precision is not torch.float32
        hidden, count = list[Tensor](), len(inputs)
        with self._parallel_streams() as streams:
            for lane, stream, call in zip(self.lanes[:count], streams[:count], inputs, strict=True):
                # Without autocast's cache: weights that are not rounded here must be rounded in every replay.
                with (
                    torch.cuda.stream(stream),
                    torch.enable_grad(),
                    torch.autocast("cuda", dtype=self.precision, enabled=enabled, cache_enabled=False),
                    self.rounded.swapped_in(),
                    lane.swapped_in(model_body(self.model)),
                ):
                    hidden.append(hidden_states(self.model, [call]))
        return hidden

    def _backward(self, hidden: Sequence[Tensor], gradient_TH: Tensor) -> None:
        computed: list[list[Tensor | None]] = []
        gradients = gradient_TH.split([len(lane_TH) for lane_TH in hidden])
        # Captures are within autocast and eager launches are not; gradients have the forward pass's precision in both.
        with self._parallel_streams() as streams, torch.autocast("cuda", enabled=False):
            lanes = zip(self.lanes[: len(hidden)], streams[: len(hidden)], hidden, gradients, strict=True)
            for lane, stream, lane_TH, gradient in lanes:
                with torch.cuda.stream(stream), self._same_weights(lane):
                    computed.append(lane.gradients(lane_TH, self.parameters, gradient))
        here = torch.cuda.current_stream()
        for of_lane in computed:  # one after the other, so that sums are reproducible
            # A capture keeps all memory until it ends. In the pool of graphs nothing is recorded: there it is enough
            # that lanes begin and end with this stream.
            if not torch.cuda.is_current_stream_capturing():
                for gradient in (one for one in of_lane if one is not None):
                    gradient.record_stream(here)
            reached = [(total, g) for total, g in zip(self.weights.gradients, of_lane, strict=True) if g is not None]
            add_to([total for total, _ in reached], [amount for _, amount in reached])

    @contextlib.contextmanager
    def _same_weights(self, lane: StreamParameters) -> Iterator[None]:
        """The weights of the forward pass, where layers run again."""
        if not self.recomputes:
            yield
            return
        with self.rounded.swapped_in(), lane.swapped_in(model_body(self.model)):
            yield

    @contextlib.contextmanager
    def _parallel_streams(self) -> Iterator[list[torch.cuda.Stream]]:
        """A stream for each lane: they fork from the current stream and join it again."""
        here = torch.cuda.current_stream()
        for stream in self.other_streams:
            stream.wait_stream(here)
        try:
            yield [here, *self.other_streams]
        finally:  # a failed capture must be joined, or it hides why it failed
            for stream in self.other_streams:
                here.wait_stream(stream)


@cache
def _streams(device: int | None) -> list[torch.cuda.Stream]:
    """One stream for each lane, always the same ones for a device: libraries keep a workspace for each stream."""
    return [torch.cuda.Stream(device) for _ in range(LANES)]


def hidden_states(model: Any, inputs: Sequence[dict[str, Any]]) -> Tensor:
    """Last hidden states [T, H] of all calls, concatenated."""
    outputs = (model_body(model)(use_cache=False, **call) for call in inputs)
    hidden = [output.last_hidden_state.flatten(0, 1) for output in outputs]
    return hidden[0] if len(hidden) == 1 else torch.cat(hidden)


def _size(part: MicroBatch) -> tuple[int, ...]:
    """The sizes that all micro-batches of one graph share."""
    first = part.inputs[0]  # the others have the same size
    lengths = first["input_ids"].shape[1], len(first["key_M"]), len(first["cu_seq_lens_q"])
    return len(part.inputs), *lengths, first["max_length_q"], first["max_length_k"]


def _copied(part: MicroBatch) -> tuple[Tensor, list[dict[str, Any]]]:
    """A copy of the inputs of a micro-batch, and the buffer that holds it."""
    tensors = [leaf for leaf in tree_leaves(list(part.inputs)) if isinstance(leaf, Tensor)]
    end = max(tensor.storage_offset() * tensor.element_size() + tensor.nbytes for tensor in tensors)
    buffer = part.buffer[:end].clone()
    return buffer, tree_map_only(Tensor, lambda tensor: in_buffer(tensor, buffer), list(part.inputs))


class _BodyPass(torch.autograd.Function):
    """Forward and backward pass: by replaying graphs, or without them by the code that is captured."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, body: GraphedBody, part: MicroBatch, graphs: SizeGraphs | None) -> Tensor:
        ctx.body, ctx.part, ctx.graphs = body, part, graphs
        if graphs is None:
            ctx.hidden, hidden_TH = body.launch(part)
        else:
            graphs.forward.replay()
            hidden_TH = graphs.hidden_TH
        return hidden_TH.view_as(hidden_TH)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        if ctx.graphs is None:
            ctx.body.launch_backward(ctx.part, ctx.hidden, gradients[0])
            del ctx.hidden
        else:
            ctx.graphs.gradient_TH.copy_(gradients[0])
            ctx.graphs.backward.replay()
        return None, None, None, None
