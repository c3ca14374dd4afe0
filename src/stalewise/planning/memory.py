"""Estimates the memory a run needs on its device from the model's config, before anything is loaded.

docs/models.md has the formula. Learning and sampling take turns, so the larger of the two counts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors import SafetensorError, safe_open

from stalewise.config import LoraSection, RunConfig
from stalewise.config.sections import LearnerSection, ModelSection
from stalewise.errors import ModelError
from stalewise.models.loading import pick_device, pick_precision, pick_weights_dtype
from stalewise.objectives import get_objective
from stalewise.trainer.logprobs import CHUNK_ELEMENTS, PLAIN_KERNELS, kernels_for
from stalewise.trainer.lora import find_targets

GIB = 2**30
# Bytes that autograd keeps per token and layer, as multiples of H, F and K: counted with saved-tensor hooks on Llama
# layers of five shapes, exact to 1% (Qwen 3 keeps a fifth more, GPT-2 less), by (autocast, bytes per weight).
ACTIVATIONS = {(False, 4): (36, 16, 8), (True, 4): (32, 8, 4), (True, 2): (22, 8, 4)}
FEWEST_ROWS_ON_GPU = 64  # the embedded engine decodes at least these at a time, and more if they fit
COMFORTABLE = 0.8  # share of a device's memory up to which ranks replicate the policy
UNKNOWN_PROMPT = 128  # tokens of a prompt, if not measured


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a model that determine its memory."""

    parameters: int
    trained: int
    layers: int
    hidden: int
    inner: int
    keys: int  # numbers in the keys of one token and layer
    vocabulary: int
    adapted: int = 0  # numbers in matrices of experts and routers, which are computed anew with their adapters


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes by purpose."""

    shape: ModelShape
    certain: Mapping[str, int]
    learning: Mapping[str, int]
    sampling: Mapping[str, int]

    @property
    def least(self) -> int:
        """Bytes needed whatever the batches look like."""
        return sum(self.certain.values())

    @property
    def total(self) -> int:
        """Bytes needed at most."""
        return self.least + max(sum(self.learning.values()), sum(self.sampling.values()))

    @property
    def sampling_is_larger(self) -> bool:
        """Whether sampling needs more than learning."""
        return sum(self.sampling.values()) > sum(self.learning.values())

    def __str__(self) -> str:
        trained = "" if self.shape.trained == self.shape.parameters else f", {self.shape.trained / 1e6:,.2f} M trained"
        turns = self.sampling if self.sampling_is_larger else self.learning
        parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in {**self.certain, **turns}.items() if size)
        return (
            f"{self.shape.parameters / 1e6:,.1f} M parameters{trained}: at least {self.least / GIB:.2f} GiB and up to "
            f"{self.total / GIB:.2f} ({parts})"
        )


def model_shape(source: str, model: ModelSection) -> ModelShape | None:
    """The shape of the model at `source`, from its config; None if the config does not determine it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        described: Any = AutoConfig.from_pretrained(source)
        with torch.device("meta"):  # layers without data
            layers: Any = AutoModelForCausalLM.from_config(described)
        text = described.get_text_config()
        heads = int(getattr(text, "num_attention_heads", 1))
        width = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
        parameters = sum(parameter.numel() for parameter in layers.parameters())
        return ModelShape(
            parameters=parameters,
            trained=_adapter_parameters(layers, model) if model.trains_adapters else parameters,
            layers=int(text.num_hidden_layers),
            hidden=int(text.hidden_size),
            inner=int(getattr(text, "intermediate_size", None) or 4 * text.hidden_size),
            keys=int(getattr(text, "num_key_value_heads", None) or heads) * width,
            vocabulary=int(text.vocab_size),
            adapted=_adapted_parameters(layers, model) if model.trains_adapters else 0,
        )
    except ModelError:
        raise
    except Exception:  # custom code, unusual layers, a damaged file: loading reports it if it matters
        return None


def _adapter_parameters(layers: Any, model: ModelSection) -> int:
    if model.adapter:
        path = Path(model.adapter).expanduser() / "adapter_model.safetensors"
        try:
            with safe_open(path, framework="pt") as file:
                return sum(prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
        except (OSError, SafetensorError):
            return 0  # loading reports it
    return find_targets(layers, model.lora.targets).factors(model.lora.rank)


def _adapted_parameters(layers: Any, model: ModelSection) -> int:
    if not model.adapter:
        return sum(parameter.numel() for parameter in find_targets(layers, model.lora.targets).parameters.values())
    try:
        record = json.loads((Path(model.adapter).expanduser() / "adapter_config.json").read_text())
    except (OSError, ValueError):
        return 0  # loading reports it
    endings = tuple(f".{name}" for name in record.get("target_parameters") or ())
    return sum(weight.numel() for name, weight in layers.named_parameters() if f".{name}".endswith(endings))


def estimate(
    config: RunConfig, source: str, *, longest_prompt: int = UNKNOWN_PROMPT, shards: int = 1
) -> MemoryEstimate | None:
    """Memory of a run with the model at `source`; None if the model's config does not determine its shape.

    With `shards`, that many devices each hold a part of the trainer's weights, gradients and moments.
    """
    shape = model_shape(source, config.model)
    if shape is None:
        return None
    device = pick_device(config.model.device)
    precision = pick_precision(config.model.precision, device)
    weight = pick_weights_dtype(config.model.precision).itemsize
    adapters, embedded = config.model.trains_adapters, config.sampler.engine == "hf"  # others have their own processes
    trained = shape.trained * (4 if adapters else weight) // shards
    certain = {
        "weights": shape.parameters * weight // shards + (trained if adapters else 0),
        "gradients": trained,
        "moments": 2 * trained,
        "copy for the update's norm": trained,
        "proximal policy": trained if get_objective(config.objective.name).needs_proximal else 0,
        "sampler's weights": shape.parameters * precision.itemsize if embedded else 0,
    }
    autocast = precision is torch.bfloat16
    rows = min(config.sampler.rollouts_per_shard, FEWEST_ROWS_ON_GPU if device.type == "cuda" else 2**31)
    length = longest_prompt + config.sampler.max_new_tokens
    rollouts = config.batch.prompts * config.batch.group_size
    cache = rows * length * shape.layers * 2 * shape.keys * precision.itemsize
    return MemoryEstimate(
        shape=shape,
        certain=certain,
        learning=_learning(config.learner, rollouts * length, shape, device, autocast, weight),
        sampling={"keys and values": cache if embedded else 0},
    )


def _learning(
    learner: LearnerSection, most_tokens: int, shape: ModelShape, device: torch.device, autocast: bool, weight: int
) -> dict[str, int]:
    tokens = min(learner.tokens_per_micro_batch, most_tokens)
    of_hidden, of_inner, of_keys = ACTIVATIONS[autocast, weight]
    layer = tokens * (of_hidden * shape.hidden + of_inner * shape.inner + of_keys * shape.keys)
    inputs = shape.layers * tokens * shape.hidden * weight
    kept = inputs + layer if learner.gradient_checkpointing else shape.layers * layer
    chunk = min(tokens * shape.vocabulary, CHUNK_ELEMENTS.get(device.type, 1 << 24))
    # Fused kernels hold logits in the precision of the product; plain ones hold four float32 copies besides.
    product = 2 if autocast else 4
    logits = chunk * ((2 if autocast else 0) + 4 * 4 if kernels_for(device) is PLAIN_KERNELS else product)
    # Kept for the backward pass, of all layers or of one, besides the gradient of one layer.
    experts = shape.adapted * product * (2 if learner.gradient_checkpointing else shape.layers + 1) // shape.layers
    rounds = autocast and weight == 4
    records = device.type == "cuda" and learner.compile not in ("never", "layers")
    return {
        f"activations of {tokens} tokens": kept,
        "bfloat16 copies of the weights": 2 * shape.parameters if rounds else 0,
        "their gradients": 2 * shape.trained if rounds and records else 0,
        "logits": logits,
        **({"experts with their adapters": experts} if experts else {}),
    }


def free_bytes(device: torch.device) -> int:
    """Free memory of a device, or of the machine for a CPU."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available


def ways_out(config: RunConfig, source: str, needed: MemoryEstimate, free: int) -> str:
    """Advice on how to make the run fit, checked against the same estimate."""
    smaller = "choose a smaller model or a larger device"
    if needed.least > free:
        adapters, lower = "train adapters alone: model.lora.rank = 16", 'model.precision = "bfloat16-only"'
        rank, precision = {"lora": LoraSection(rank=16)}, {"precision": "bfloat16-only"}
        changes: dict[str, dict[str, Any]] = {adapters: rank, f"{adapters} with {lower}": rank | precision}
        if config.model.trains_adapters:  # the base is not trained and loses nothing
            changes = {f"set {lower}": precision}
        for change, settings in changes.items():
            model = config.model.model_copy(update=settings)
            changed = estimate(config.model_copy(update={"model": model}), source)
            if changed is not None and changed.least <= free:
                return f"{smaller}, or {change}"
        return smaller if config.model.trains_adapters else f"{smaller}: adapters alone would not fit either"
    if needed.sampling_is_larger:
        return f"if it runs out, lower sampler.rollouts_per_shard, or {smaller}"
    save = "" if config.learner.gradient_checkpointing else "set learner.gradient_checkpointing, or "
    return f"if it runs out, {save}lower learner.tokens_per_micro_batch, or {smaller}"


def pick_parallel(config: RunConfig, source: str, world: int, local_world: int) -> str:
    """How ranks hold the policy: alone, replicated or sharded. `auto` replicates it if that fits comfortably.

    Depends on the device's total memory, not on what is free now, so that a resumed run is split in the same way.
    """
    if world == 1:
        return "alone"
    if config.learner.parallel != "auto":
        return config.learner.parallel
    device = pick_device(config.model.device)
    needed = None if config.model.trains_adapters else estimate(config, source)
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        memory = psutil.virtual_memory().total // local_world
    return "replicated" if needed is None or needed.total <= COMFORTABLE * memory else "sharded"


def check_memory(config: RunConfig, source: str, world: int = 1, local_world: int = 1) -> str:
    """Refuse a model that is too large for its device before it is loaded; returns a warning if it may be."""
    device = pick_device(config.model.device)
    shards = world if pick_parallel(config, source, world, local_world) == "sharded" else 1
    needed, free = estimate(config, source, shards=shards), free_bytes(device)
    free //= 1 if device.type == "cuda" else local_world  # ranks on one machine share its memory
    if needed is None or needed.total <= free:
        return ""
    figures = f"{needed} on {device}, where {free / GIB:.2f} GiB are free: {ways_out(config, source, needed, free)}"
    if needed.least > free:
        raise ModelError(f"{source} is too large: {figures}")
    return f"memory may run out: {figures}"


def check_sampling_memory(model: ModelSection, engine: str, source: str) -> None:
    """Refuse to sample from a model whose weights alone are too large for the device, before they are loaded."""
    shape = model_shape(source, model) if engine == "hf" else None
    if shape is None:
        return
    device = pick_device(model.device)
    weights, free = shape.parameters * pick_precision(model.precision, device).itemsize, free_bytes(device)
    if weights > free:
        raise ModelError(
            f"{source} is too large: its weights take {weights / GIB:.2f} GiB on {device}, where {free / GIB:.2f} are "
            "free: choose a smaller model or a larger device"
        )
