"""Compiles parts of a model where it pays: on GPUs that train for much longer than the minute of compiling."""

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

# Smaller models and shorter runs do not earn back the time of compiling.
WORTHWHILE_PARAMETERS = 50_000_000
WORTHWHILE_UPDATES = 512
# Bytes that a trainer holds per parameter before it learns: weights, gradients, moments, a copy, and weights and
# gradients in bfloat16; for a frozen one, weights. Graphs keep activations, which need about as much again.
TRAINED_BYTES, FROZEN_BYTES = 24, 6


def compiling_pays(choice: str, updates: int, model: Any) -> bool:
    """Whether layers are compiled: `choice` is `learner.compile`; `auto` compiles large models for long runs."""
    is_large = model.device.type == "cuda" and _parameters(model) >= WORTHWHILE_PARAMETERS
    pays = is_large and updates >= WORTHWHILE_UPDATES and can_compile()
    return choice in ("always", "layers") or (choice == "auto" and pays)


def recording_pays(choice: str, model: Any) -> bool:
    """Whether the trainer's passes are recorded as CUDA graphs; `auto` records if the GPU has the memory."""
    if choice != "auto" or model.device.type != "cuda":
        return choice in ("always", "graphs")
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    needed = TRAINED_BYTES * trained + FROZEN_BYTES * (_parameters(model) - trained)
    return 2 * needed <= torch.cuda.get_device_properties(model.device).total_memory


def _parameters(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def optimize_layers(model: Any, config: RunConfig, *, is_sharded: bool, log: Callable[[str], object]) -> bool:
    """Compile the layers if that pays, else fuse their norms; returns whether they are compiled."""
    # Layers sharded over ranks stay as they are: the gain was never measured there.
    compiled = not is_sharded and compiling_pays(config.learner.compile, config.schedule.updates, model)
    if compiled:
        compile_layers(model, config.learner.keep_activations)
    elif config.learner.keep_activations < 1:
        log("learner.keep_activations has no effect: it applies to compiled layers only")
    if model.device.type == "cuda" and not (compiled or is_sharded):
        fuse_norms(model)
    return compiled


def compile_layers(model: Any, keep_activations: float = 1.0, backend: str | Backend = "inductor") -> None:
    """Compile each layer by itself: they are alike, so one compilation serves all. Weights keep their names.

    `keep_activations` is the share of its activations that a layer may keep for the backward pass.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    chosen = lookup_backend(backend) if isinstance(backend, str) else backend
    if keep_activations < 1:
        chosen = partial(_compile_within, keep_activations, chosen)
    for module in model.modules():
        if type(module).__name__ in names:
            module.compile(dynamic=True, backend=chosen)


def _compile_within(keep_activations: float, backend: Backend, graph: Any, inputs: Any) -> Any:
    with functorch_config.patch(activation_memory_budget=keep_activations):
        return backend(graph, inputs)


def compile_pieces(model: Any, backend: str = "inductor") -> None:
    """Compile what is around attention, for decoding: a compiler cannot follow the writes to the cache."""
    for module in model.modules():
        if type(module).__name__.endswith(("RMSNorm", "MLP")):
            module.compile(dynamic=True, backend=backend)
