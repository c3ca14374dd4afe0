"""What stands in for a model's own body in the learner: recorded as CUDA graphs, or with rounded weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from stalewise.compilation import compiling_pays, recording_pays
from stalewise.config import RunConfig
from stalewise.learn.aside import Aside
from stalewise.learn.batching import MicroBatch
from stalewise.learn.graphs import GraphedBody, run_passages
from stalewise.learn.optimizer import add_to, copy_to
from stalewise.learn.rounded import RoundedWeights
from stalewise.learn.weights import FlatWeights, Weights


class Body(Protocol):
    """Gives the last hidden states of a micro-batch; gradients go straight to `.grad`."""

    def __call__(self, part: MicroBatch) -> Tensor:
        """Last hidden states [T, H], padding included."""
        ...

    def weights_changed(self) -> None:
        """To be called after every step."""
        ...


def pick_body(
    config: RunConfig, model: Any, parameters: Sequence[Tensor], precision: torch.dtype, aside: Aside
) -> tuple[Weights, Body | None]:
    """How the weights of a packed model that lies on one device are kept, and what stands in for its body.

    Recomputed activations and float32 attention do what a graph cannot hold, and gradients share one tensor there.
    """
    held = {weight.dtype for weight in parameters}
    fits = precision is not torch.float32 and len(held) == 1 and not config.learner.gradient_checkpointing
    if not fits or model.device.type != "cuda":
        return Weights(parameters), None
    if recording_pays(config, model):
        flat = FlatWeights(parameters, aside)
        return flat, GraphedBody(model, flat, precision)
    # Adapters leave most weights as they are: copies of those would be memory for nothing.
    whole = len(parameters) == len(list(model.parameters())) and held == {torch.float32}
    rounds = whole and not compiling_pays(config, model)
    return Weights(parameters), RoundedBody(model, parameters, precision) if rounds else None


class RoundedBody:
    """A body whose linear layers have rounded weights, and one product where they have one input.

    Autocast would round each weight at each use and each of its gradients back: on a GPU launches by the hundred.
    """

    def __init__(self, model: Any, parameters: Sequence[Tensor], precision: torch.dtype) -> None:
        self.model, self.parameters, self.precision = model, list(parameters), precision
        self.rounded = RoundedWeights(model.base_model, precision)
        self.anchor = torch.zeros((), device=model.device, requires_grad=True)

    def __call__(self, part: MicroBatch) -> Tensor:
        """Last hidden states [T, H] of the micro-batch."""
        through: Callable[..., Tensor] = _Through.apply  # pyright: ignore[reportAssignmentType]
        return through(self.anchor, self, part) if torch.is_grad_enabled() else self.forward(part)

    def forward(self, part: MicroBatch) -> Tensor:
        """The same, made of the rounded weights."""
        kind = self.model.device.type
        with torch.autocast(kind, dtype=self.precision, cache_enabled=False), self.rounded.in_place():
            return run_passages(self.model, part.passages)

    def weights_changed(self) -> None:
        """What is read in place of the weights is rounded anew."""
        self.rounded.refresh()

    @torch.no_grad()
    def add_gradients(self, found: Sequence[Tensor | None]) -> None:
        """Add what a pass gives to the gradients that are there; a few launches for all of them."""
        reached = [(weight, more) for weight, more in zip(self.parameters, found, strict=True) if more is not None]
        first = [(weight, more) for weight, more in reached if weight.grad is None]
        later = [(weight.grad, more) for weight, more in reached if weight.grad is not None]
        for weight, _ in first:
            weight.grad = torch.empty_like(weight)
        copy_to([weight.grad for weight, _ in first if weight.grad is not None], [more for _, more in first])
        add_to([total for total, _ in later], [more for _, more in later])


class _Through(torch.autograd.Function):
    """A pass through a RoundedBody, whose own graph autograd does not see."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, body: RoundedBody, part: MicroBatch) -> Tensor:
        with torch.enable_grad():
            ctx.hidden_TH = body.forward(part)
        ctx.body = body
        return ctx.hidden_TH.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        body, hidden_TH = ctx.body, ctx.hidden_TH
        ctx.hidden_TH = None
        body.add_gradients(body.rounded.gradients(hidden_TH, body.parameters, gradients[0], body.rounded.read))
        return None, None, None
