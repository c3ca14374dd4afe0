"""Compiling parts of a model, where that pays: a minute's work for a GPU that trains for many."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch._dynamo.backends.registry import lookup_backend
from torch._functorch import config as functorch_config

from stalewise.config import RunConfig
from stalewise.models.fused_ops import fuse_norms
from stalewise.models.kernels import can_compile

Backend = Callable[[Any, Any], Any]

# Below these a run is over before compiled layers have earned the time that compiling takes.
WORTHWHILE_PARAMETERS = 50_000_000
WORTHWHILE_UPDATES = 512
# A learner holds so many bytes for each parameter before it learns: weights, gradients, moments, a copy, and weights
# and gradients once more in bfloat16; of a frozen one, weights. Graphs keep activations, which want as much room.
TRAINED_BYTES, FROZEN_BYTES = 24, 6


def compiling_pays(config: RunConfig, model: Any) -> bool:
    """Whether layers are compiled: what `learner.compile` says; `auto`: where run and model are large enough."""
    chosen = config.learner.compile
    return chosen in ("always", "layers") or (chosen == "auto" and _is_large(config, model))


def recording_pays(config: RunConfig, model: Any) -> bool:
    """Whether the learner's passes are recorded as CUDA graphs: likewise; `auto`: where there is room for them."""
    chosen = config.learner.compile
    return chosen in ("always", "graphs") or (chosen == "auto" and _has_room(model))


def _is_large(config: RunConfig, model: Any) -> bool:
    """Whether a model on a GPU and a run are so large that they gain what compiling takes."""
    long = config.schedule.updates >= WORTHWHILE_UPDATES
    return model.device.type == "cuda" and _parameters(model) >= WORTHWHILE_PARAMETERS and long and can_compile()


def _has_room(model: Any) -> bool:
    if model.device.type != "cuda":
        return False
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    needed = TRAINED_BYTES * trained + FROZEN_BYTES * (_parameters(model) - trained)
    return 2 * needed <= torch.cuda.get_device_properties(model.device).total_memory


def _parameters(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def compile_layers(model: Any, keep_activations: float = 1.0, backend: str | Backend = "inductor") -> None:
    """Compile each layer by itself: they are alike, so one compilation serves all. Names of weights do not change.

    `keep_activations` is the share of what a layer would keep for its backward pass that it may keep.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    chosen = lookup_backend(backend) if isinstance(backend, str) else backend
    if keep_activations < 1:
        chosen = partial(_compile_within, keep_activations, chosen)
    for module in model.modules():
        if type(module).__name__ in names:
            module.compile(dynamic=True, backend=chosen)


def _compile_within(keep_activations: float, backend: Backend, graph: Any, inputs: Any) -> Any:
    """The backend, with a bound on activations where forward and backward pass are told apart."""
    with functorch_config.patch(activation_memory_budget=keep_activations):
        return backend(graph, inputs)


def compile_pieces(model: Any, backend: str = "inductor") -> None:
    """Compile what lies around attention: decoding writes to a cache on the way, which a compiler cannot follow."""
    for module in model.modules():
        if type(module).__name__.endswith(("RMSNorm", "MLP")):
            module.compile(dynamic=True, backend=backend)


# The layers of a model for the learner: compiled where that pays, else each norm made one operator.


def optimize_layers(model: Any, config: RunConfig, *, is_sharded: bool, log: Callable[[str], object]) -> bool:
    """Make the layers as fast as they can be for this run; whether they are compiled.

    Those whose weights lie on several ranks are left as they are: what either gains there was never measured.
    """
    compiled = not is_sharded and compiling_pays(config, model)
    if compiled:
        compile_layers(model, config.learner.keep_activations)
    elif config.learner.keep_activations < 1:
        log("learner.keep_activations changes nothing here: it is for compiled layers")
    if model.device.type == "cuda" and not (compiled or is_sharded):
        fuse_norms(model)
    return compiled
