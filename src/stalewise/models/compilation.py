"""Compiles or fuses parts of a model, captures CUDA graphs, and decides when either is worthwhile."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch._dynamo.backends.registry import lookup_backend
from torch._functorch import config as functorch_config

from stalewise.config import RunConfig
from stalewise.errors import ModelError
from stalewise.models.fused_ops import fuse_gates, fuse_norms, fuse_training_rotation, fuse_training_sums
from stalewise.models.kernels import can_compile

Backend = Callable[[Any, Any], Any]

# For smaller models and shorter runs, compiling takes more time than it saves.
WORTHWHILE_PARAMETERS = 50_000_000
WORTHWHILE_UPDATES = 512
# Compiled layers of larger models are no faster: those of 0.5B run 2% slower than plain ones with fused operators, and
# take 16 GB more (benchmarks/results/learner-h200.json).
LARGEST_COMPILED = 300_000_000
# Bytes that a trainer always holds per parameter: weights and gradients, both also in bfloat16, and MOMENT_BYTES; for a
# frozen parameter, weights alone. Graphs keep activations, which need about as much again.
TRAINED_BYTES, FROZEN_BYTES = 12, 6
MOMENT_BYTES = {"float32": 8, "bfloat16": 4, "int8": 2}
# Logits are kept for the backward pass up to this share of a GPU's memory, if the output layer has at least
# LARGE_OUTPUT of the parameters: computing the logits again takes a quarter of the layer's time.
KEPT_LOGITS, LARGE_OUTPUT = 1 / 16, 0.1
SHORT_SHARE = 0.25  # of a GPU's memory: cached memory is freed before a capture if less is free


def should_compile(choice: str, updates: int, model: Any) -> bool:
    """Whether to compile layers; `choice` is `learner.compile`, where `auto` compiles large models for long runs."""
    is_large = model.device.type == "cuda" and _parameters(model) >= WORTHWHILE_PARAMETERS
    is_worthwhile = is_large and updates >= WORTHWHILE_UPDATES and can_compile()
    return choice in ("always", "layers") or (choice == "auto" and is_worthwhile)


def should_capture_graphs(choice: str, model: Any, moments: str = "float32") -> bool:
    """Whether to capture the trainer's passes as CUDA graphs; with `auto`, if the GPU has enough memory."""
    if choice != "auto" or model.device.type != "cuda":
        return choice in ("always", "graphs")
    return fits_in_half(*_counts(model), moments, torch.cuda.get_device_properties(model.device).total_memory)


def kept_logits(model: Any, moments: str) -> int:
    """How many bytes of logits may be kept for the backward pass, which computes the others again."""
    if model.device.type != "cuda":
        return 0
    output = model.get_output_embeddings().weight.numel()
    return logit_budget(*_counts(model), output, moments, torch.cuda.get_device_properties(model.device).total_memory)


def logit_budget(parameters: int, trained: int, output: int, moments: str, memory: int) -> int:
    """`kept_logits` for given numbers of parameters: all, trained ones, and those of the output layer."""
    is_worthwhile = output >= LARGE_OUTPUT * parameters and fits_in_half(parameters, trained, moments, memory)
    return int(KEPT_LOGITS * memory) if is_worthwhile else 0


def fits_in_half(parameters: int, trained: int, moments: str, memory: int) -> bool:
    """Whether what a trainer always holds fits in half of a GPU's memory; micro-batches need the other half."""
    return 2 * ((TRAINED_BYTES + MOMENT_BYTES[moments]) * trained + FROZEN_BYTES * (parameters - trained)) <= memory


def _counts(model: Any) -> tuple[int, int]:
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return _parameters(model), trained


def _parameters(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def optimize_layers(model: Any, config: RunConfig, *, is_sharded: bool, log: Callable[[str], object]) -> bool:
    """Compile the layers if that is worthwhile, else fuse some operators; returns whether they are compiled."""
    # Layers that are sharded over ranks are left as they are: no gain was measured there.
    learner = config.learner
    compiled = not is_sharded and should_compile(learner.compile, config.schedule.updates, model)
    if learner.compile == "auto" and (learner.gradient_checkpointing or _parameters(model) > LARGEST_COMPILED):
        compiled = False
    if compiled:
        compile_layers(model, config.learner.keep_activations)
    elif config.learner.keep_activations < 1:
        log("learner.keep_activations has no effect: it applies to compiled layers only")
    if model.device.type == "cuda" and not (compiled or is_sharded):
        fuse_norms(model)
        fuse_gates(model)
        fuse_training_sums(model)
        fuse_training_rotation(model)
    return compiled


def compile_layers(model: Any, keep_activations: float = 1.0, backend: str | Backend = "inductor") -> None:
    """Compile each layer by itself: layers are alike, so one compilation is used for all. Weights keep their names.

    `keep_activations` is the share of its activations that a layer may keep for the backward pass.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    compiler = lookup_backend(backend) if isinstance(backend, str) else backend
    if keep_activations < 1:
        compiler = partial(_compile_with_budget, keep_activations, compiler)
    for module in model.modules():
        if type(module).__name__ in names:
            module.compile(dynamic=True, backend=compiler)


def _compile_with_budget(keep_activations: float, backend: Backend, graph: Any, inputs: Any) -> Any:
    with functorch_config.patch(activation_memory_budget=keep_activations):
        return backend(graph, inputs)


def compile_pieces(model: Any, backend: str = "inductor") -> None:
    """Compile norms and MLPs for decoding, but not attention: the compiler cannot trace its writes to the cache."""
    for module in model.modules():
        if type(module).__name__.endswith(("RMSNorm", "MLP")):
            module.compile(dynamic=True, backend=backend)


def free_cache_for_graphs() -> None:
    """Free cached GPU memory when little is free: a CUDA-graph pool cannot reuse the allocator's cache."""
    free, total = torch.cuda.mem_get_info()
    cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    if free < max(SHORT_SHARE * total, cached):
        gc.collect()
        free_cached()


def free_cached() -> None:
    """Free cached GPU memory, and wait until that is done."""
    torch.cuda.synchronize()  # expandable segments are unmapped only after the work of their stream
    torch.cuda.empty_cache()


@contextlib.contextmanager
def without_collecting() -> Iterator[None]:
    """Turn garbage collection off within the context: a graph or a pool that is freed would break a capture."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextlib.contextmanager
def recording(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: Any = None) -> Iterator[None]:
    """Capture the kernels launched within the context as a graph, without running them. Graphs may share a `pool`.

    `torch.cuda.graph` would first synchronise and free all cached memory, page-locked memory included. Allocating that
    again took longer than the capture.
    """
    free_cache_for_graphs()
    pool = torch.cuda.graph_pool_handle() if pool is None else pool
    with torch.cuda.stream(stream), without_collecting():
        # "thread_local": other threads, such as those that watch several devices, may call the driver meanwhile.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            yield
        except BaseException as error:
            try:
                _end_capture(graph, pool)
            except RuntimeError:
                if isinstance(error, torch.OutOfMemoryError):
                    raise ModelError(
                        "out of memory while a CUDA graph was recorded, after which this process cannot go on: "
                        "lower learner.tokens_per_micro_batch or sampler.rollouts_per_shard, then resume"
                    ) from error
            raise
        _end_capture(graph, pool)


def _end_capture(graph: torch.cuda.CUDAGraph, pool: Any) -> None:
    try:
        graph.capture_end()
    except RuntimeError:
        # Older releases of torch leave the allocator in capture mode, in which it refuses this pool.
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
        raise
