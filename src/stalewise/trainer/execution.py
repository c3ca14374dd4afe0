"""Runs a policy on its device and over its ranks: the parts of an update that depend on either.

This interface hides autocast, packed attention, compiled layers, CUDA graphs, the side stream, flat gradients, and the
collectives of replicated and sharded policies. No method waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from stalewise.config import RunConfig
from stalewise.config.sections import LearnerSection
from stalewise.errors import ModelError
from stalewise.models.attention import PACKED, needs_grids, supports_packing
from stalewise.models.compilation import kept_logits, optimize_layers, should_capture_graphs
from stalewise.objectives.diagnostics import TokenSums
from stalewise.trainer.cuda_graphs import GraphedBody
from stalewise.trainer.logprobs import KeptLogits, kernels_for, measure_logit_map, response_logp
from stalewise.trainer.lora import adapts_parameters
from stalewise.trainer.micro_batch import Layout, MicroBatch
from stalewise.trainer.optimizer import AdamW
from stalewise.trainer.parallel import SingleProcess, Sums
from stalewise.trainer.snapshot import Offload
from stalewise.trainer.weights import FlatWeights, SideStream, Weights


class Execution:
    """A model on its device, prepared for training, and its optimizer."""

    def __init__(
        self,
        model: Any,
        config: RunConfig,
        parallel: SingleProcess,
        device: torch.device,
        precision: torch.dtype,
        log: Callable[[str], object],
    ) -> None:
        self.model, self.config, self.parallel = model, config, parallel
        self.device, self.precision = device, precision
        self.kernels = kernels_for(device, measure_logit_map(model).at(config.objective.policy_temperature))
        if config.learner.gradient_checkpointing:
            recompute_activations(model)
        parallel.place(model, device)
        self.packed = supports_packing(model, precision)
        if self.packed:
            model.set_attn_implementation(PACKED)
        else:
            log(f"{type(model).__name__} does not support packing: its micro-batches are padded, which takes longer")
        parallel.find_trained()
        # Neither a compiler nor a graph can follow modules that change in the forward pass.
        self.is_plain = not (parallel.is_sharded or adapts_parameters(model))
        self.kept = KeptLogits(kept_logits(model, config.optimizer.moments))
        self.compiled = optimize_layers(model, config, is_sharded=not self.is_plain, log=log)
        self.side_stream = SideStream(device)
        self.log = log
        self.offload = Offload(device)
        self.graphs: GraphedBody | None = None
        self.weights = Weights(list(parallel.trained))
        if self.packed and self._can_use_graphs():
            self._use_graphs()
        self.optimizer = AdamW(parallel.trained, config.optimizer, config.seed)
        self.steps = 0
        self.had_graphs = False  # whether `wake` makes graphs again
        self.proximal: dict[str, Tensor] = {}  # weights of the proximal policy, for objectives that have one

    def _can_use_graphs(self) -> bool:
        """Float32 attention cannot be captured; flat gradients need one dtype."""
        fits = self.precision is not torch.float32 and len({weight.dtype for weight in self.parallel.trained}) == 1
        fits = fits and self.is_plain and self.device.type == "cuda"
        return fits and should_capture_graphs(self.config.learner.compile, self.model, self.config.optimizer.moments)

    def _use_graphs(self) -> None:
        recomputes = self.config.learner.gradient_checkpointing
        self.weights = FlatWeights(list(self.parallel.trained), self.side_stream)
        self.graphs = GraphedBody(self.model, self.weights, self.precision, recomputes=recomputes, log=self.log)

    def layout(self, token_budget: int, pad_id: int) -> Layout:
        """How micro-batches are arranged for this model and device."""
        graphs, grids = self.graphs is not None, needs_grids(self.device, self.precision)
        halves = graphs and self.compiled  # large kernels of plain layers leave no gaps for another half
        return Layout(token_budget, self.packed, grids, common_sizes=graphs, two_halves=halves, pad_id=pad_id)

    def forward(self, part: MicroBatch) -> tuple[Tensor, Tensor]:
        """Log-probabilities [B, T] of the response tokens with a gradient, and entropies [B, T].

        Entropies have a gradient where the objective has an entropy bonus. Run the backward pass before the next
        forward pass with a gradient, which uses the same memory.
        """
        return self._forward(part, self.graphs)

    def proximal_logp(self, part: MicroBatch) -> Tensor | None:
        """Log-probabilities under the proximal policy, without a gradient; None for an objective that has none."""
        if not self.proximal:
            return None
        with torch.no_grad(), self.parallel.swapped(self.proximal):
            return self._forward(part, None)[0]  # CUDA graphs read only the policy's own weights

    def _forward(self, part: MicroBatch, body: GraphedBody | None) -> tuple[Tensor, Tensor]:
        enabled = self.precision is not torch.float32
        cached = not self.parallel.is_sharded  # rounded weights would outlive the gathered ones
        with torch.autocast(self.device.type, dtype=self.precision, enabled=enabled, cache_enabled=cached):
            forward = self.parallel.as_forward(response_logp)
            with_entropy = self.config.objective.entropy_bonus > 0
            settings = {"body": body, "kept": self.kept, "entropy_gradient": with_entropy}
            return forward(self.model, part, dtype=self.precision, kernels=self.kernels, **settings)

    def sum_over_ranks(self, loss: Tensor, nonfinite: Tensor, sums: TokenSums, micro_batches: int) -> Sums:
        """Sum the gradients over ranks, and return loss and sums of the whole update."""
        self.parallel.sum_gradients()
        return self.parallel.gather_sums(loss, nonfinite, sums, micro_batches)

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scale the gradient down to `max_norm`; returns its norm before."""
        norm = self.parallel.global_norm(self.weights.gradient_norm())
        self.weights.clip_gradients(max_norm, norm)
        return norm

    def step(self, rate: float | Tensor, unusable: Tensor) -> Tensor:
        """Take an optimizer step, none where `unusable`; returns ‖Δθ‖."""
        self.optimizer.make_moments()
        self.steps += 1  # from here on weights change: running out of memory is final
        length = self.optimizer.step(rate, unusable, self.steps)
        if self.graphs is not None:
            self.graphs.weights_changed()
        return self.parallel.global_norm(length)

    def sleep(self) -> None:
        """Move all weights and moments to host memory, and drop graphs, gradients and the memory of kept logits.

        The model cannot run until `wake`.
        """
        if self.offload.away or self.parallel.is_sharded:
            return
        self.had_graphs = self.graphs is not None and self.graphs.captures
        self._drop_graphs()
        self.kept.release()
        moments = (tensor for state in self.optimizer.state.values() for tensor in state.values())
        trained = (weight for weight in self.model.parameters() if weight.requires_grad)
        self.offload.offload([*trained, *moments, *self.proximal.values()], self._frozen())
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def copy_frozen(self) -> None:
        """Copy frozen weights to host memory now, so that `sleep` need not."""
        if not self.offload.away and not self.parallel.is_sharded:
            self.offload.copy_frozen(self._frozen())

    def _frozen(self) -> list[Tensor]:
        return [weight for weight in self.model.parameters() if not weight.requires_grad]

    def wake(self) -> None:
        """Undo `sleep`."""
        if not self.offload.away:
            return
        self.offload.reload()
        if self.had_graphs:
            self._use_graphs()

    def _drop_graphs(self) -> None:
        """Drop graphs and gradients."""
        if self.graphs is not None and self.device.type == "cuda":
            torch.cuda.synchronize()  # their memory is given back at once, and a replay may still be running
        self.graphs = None
        self.side_stream.join()  # it holds activations
        self.weights = Weights(list(self.parallel.trained))
        self.weights.zero_gradients()

    def free_memory(self) -> None:
        """Drop graphs, flat gradients and the rest of an update that ran out of memory. No logits are kept any more."""
        self.kept.most_bytes = 0
        self.kept.release()
        self._drop_graphs()
        if not self.steps:  # some moments may be missing
            self.optimizer.state.clear()
        torch.cuda.empty_cache()


def recompute_activations(model: Any) -> None:
    """Let each layer recompute its activations in the backward pass instead of keeping them.

    transformers does so in training mode, which also turns on dropout and the noise of routers. Here only the layer's
    own flag is set, which transformers reads. It is off while the layer computes.
    """
    _check_recomputable(model)
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.gradient_checkpointing = layer.training = True
            vars(layer)["_gradient_checkpointing_func"] = partial(_recomputed, layer)


def _recomputed(layer: Any, function: Callable[..., Any], *inputs: Any) -> Any:
    def in_evaluation_mode(*inputs: Any) -> Any:
        layer.training = False
        try:
            return function(*inputs)
        finally:
            layer.training = True

    # Random states need not be restored, which a CUDA graph could not do: nothing is random in evaluation mode.
    return checkpoint(in_evaluation_mode, *inputs, use_reentrant=False, preserve_rng_state=False)


def check_trainable(model: Any, learner: LearnerSection) -> None:
    """Raise a ModelError for a model that cannot be trained, before anything is generated with it."""
    measure_logit_map(model)
    if learner.gradient_checkpointing:
        _check_recomputable(model)


def _check_recomputable(model: Any) -> None:
    """Refuse a model whose layers transformers cannot recompute."""
    if not any(isinstance(layer, GradientCheckpointingLayer) for layer in model.modules()):
        raise ModelError(
            f"transformers cannot recompute the activations of {type(model).__name__}: set "
            "learner.gradient_checkpointing = false"
        )
