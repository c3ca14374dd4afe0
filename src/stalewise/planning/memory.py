"""How much memory a run needs on its device, from the model's config alone: said before anything is loaded.

The formula, in bytes; docs/models.md explains it. P parameters, T of them trained (with LoRA: the adapters'), w bytes
per weight (4, with `bfloat16-only` 2; adapters always 4), s bytes per number of the sampler:

    certain    P·w weights + T·w gradients + 2T·w moments + T·w copy for the norm of the update
               + T·w where the objective has a proximal policy + P·s the sampler's weights
    learning   tokens · layers · (h·H + f·F + k·K) activations, of one layer with gradient checkpointing
               + 2P bfloat16 copies of the weights under autocast, 2T for their gradients where CUDA graphs are recorded
               + the logits of one chunk
    sampling   rows · tokens · layers · 2K·s keys and values

with H the hidden width, F the inner width of the feed-forward layers and K the width of the keys. Learning and sampling
take turns, so the larger counts. What h, f and k are was measured (`ACTIVATIONS`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors import SafetensorError, safe_open

from stalewise.config import LoraSection, RunConfig
from stalewise.errors import ModelError
from stalewise.models.loading import pick_device, pick_precision, pick_weights_dtype
from stalewise.objectives import get_objective
from stalewise.trainer.logprobs import CHUNK_ELEMENTS, PLAIN_KERNELS, kernels_for
from stalewise.trainer.lora import target_layers

GIB = 2**30
# Bytes that autograd keeps per token and layer, as multiples of H, F and K: counted with saved-tensor hooks on Llama
# layers of five shapes, exact to 1% (Qwen 3 keeps a fifth more, GPT-2 less), by (autocast, bytes per weight).
ACTIVATIONS = {(False, 4): (36, 16, 8), (True, 4): (32, 8, 4), (True, 2): (22, 8, 4)}
# The embedded engine takes as many rows at a time as fit on a GPU, and no fewer than these.
FEWEST_ROWS_ON_GPU = 64
COMFORTABLE = 0.8  # share of a device's memory that a policy on every rank may need
UNKNOWN_PROMPT = 128  # tokens of a prompt, where nobody has looked yet


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the estimate needs to know of a model."""

    parameters: int
    trained: int
    layers: int
    hidden: int
    inner: int
    keys: int  # numbers in the keys of one token and layer
    vocabulary: int


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes by what they are for."""

    shape: ModelShape
    certain: Mapping[str, int]
    learning: Mapping[str, int]
    sampling: Mapping[str, int]

    @property
    def least(self) -> int:
        """What the run cannot do without, whatever its batches look like."""
        return sum(self.certain.values())

    @property
    def total(self) -> int:
        """What it may need at most."""
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


def model_shape(source: str, config: RunConfig) -> ModelShape | None:
    """The shape of the model that `source` names, from its config; None where that does not say it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        described: Any = AutoConfig.from_pretrained(source)
        with torch.device("meta"):  # layers without data
            model: Any = AutoModelForCausalLM.from_config(described)
        return _shape(model, described.get_text_config(), config)
    except ModelError:
        raise
    except Exception:  # code of its own, layers that differ, a damaged file: where it matters, loading will say so
        return None


def _shape(model: Any, text: Any, config: RunConfig) -> ModelShape:
    heads = int(getattr(text, "num_attention_heads", 1))
    width = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return ModelShape(
        parameters=parameters,
        trained=_adapter_parameters(model, config) if config.model.trains_adapters else parameters,
        layers=int(text.num_hidden_layers),
        hidden=int(text.hidden_size),
        inner=int(getattr(text, "intermediate_size", None) or 4 * text.hidden_size),
        keys=int(getattr(text, "num_key_value_heads", None) or heads) * width,
        vocabulary=int(text.vocab_size),
    )


def _adapter_parameters(model: Any, config: RunConfig) -> int:
    if config.model.adapter:
        path = Path(config.model.adapter).expanduser() / "adapter_model.safetensors"
        try:
            with safe_open(path, framework="pt") as file:
                return sum(prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
        except (OSError, SafetensorError):
            return 0  # loading it will say so
    layers = target_layers(model, config.model.lora.targets).values()
    return sum(config.model.lora.rank * sum(layer.weight.shape) for layer in layers)


def estimate(
    config: RunConfig, source: str, *, longest_prompt: int = UNKNOWN_PROMPT, shards: int = 1
) -> Estimate | None:
    """What a run of this config with the model at `source` needs on its device; None where its config does not say.

    With `shards`, each of so many devices holds a part of the learner's weights and of what belongs to them.
    """
    shape = model_shape(source, config)
    if shape is None:
        return None
    device = pick_device(config.model.device)
    precision = pick_precision(config.model.precision, device)
    weight = pick_weights_dtype(config.model.precision).itemsize
    adapters = config.model.trains_adapters
    trained = shape.trained * (4 if adapters else weight)
    embedded = config.sampler.engine == "hf"  # others have processes, or machines, of their own
    trained //= shards
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
    cache = rows * length * shape.layers * 2 * shape.keys * precision.itemsize
    return Estimate(
        shape=shape,
        certain=certain,
        learning=_learning(config, shape, device, autocast, weight, length),
        sampling={"keys and values": cache if embedded else 0},
    )


def _learning(
    config: RunConfig, shape: ModelShape, device: torch.device, autocast: bool, weight: int, length: int
) -> dict[str, int]:
    tokens = min(config.learner.tokens_per_micro_batch, config.batch.prompts * config.batch.group_size * length)
    of_hidden, of_inner, of_keys = ACTIVATIONS[autocast, weight]
    layer = tokens * (of_hidden * shape.hidden + of_inner * shape.inner + of_keys * shape.keys)
    kept = shape.layers * layer
    if config.learner.gradient_checkpointing:
        kept = shape.layers * tokens * shape.hidden * weight + layer
    chunk = min(tokens * shape.vocabulary, CHUNK_ELEMENTS.get(device.type, 1 << 24))
    # In the precision of the product, where their gradient will be; or as float32, with their surprise, that with the
    # other sign, and its exponential.
    product = 2 if autocast else 4
    logits = chunk * ((2 if autocast else 0) + 4 * 4 if kernels_for(device) is PLAIN_KERNELS else product)
    rounds = autocast and weight == 4
    records = device.type == "cuda" and config.learner.compile not in ("never", "layers")
    return {
        f"activations of {tokens} tokens": kept,
        "bfloat16 copies of the weights": 2 * shape.parameters if rounds else 0,
        "their gradients": 2 * shape.trained if rounds and records else 0,
        "logits": logits,
    }


def free_bytes(device: torch.device) -> int:
    """What is free there now."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available


def ways_out(config: RunConfig, source: str, needed: Estimate, free: int) -> str:
    """What would make the run fit, where it is not done yet; only what does by the same estimate."""
    smaller = "choose a smaller model or a larger device"
    if needed.least > free:
        if way := _way_with_adapters(config, source, free):
            return f"{smaller}, or {way}"
        return smaller if config.model.trains_adapters else f"{smaller}: adapters alone would not fit either"
    if needed.sampling_is_larger:
        return f"if it runs out, lower sampler.rollouts_per_shard, or {smaller}"
    save = "" if config.learner.gradient_checkpointing else "set learner.gradient_checkpointing, or "
    return f"if it runs out, {save}lower learner.tokens_per_micro_batch, or {smaller}"


def _way_with_adapters(config: RunConfig, source: str, free: int) -> str:
    """How training nothing but adapters would fit, or an empty string."""
    adapters, lower = "train adapters alone: model.lora.rank = 16", 'model.precision = "bfloat16-only"'
    rank: dict[str, Any] = {"lora": LoraSection(rank=16)}
    ways = {adapters: rank, f"{adapters} with {lower}": {**rank, "precision": "bfloat16-only"}}
    if config.model.trains_adapters:
        ways = {f"set {lower}": {"precision": "bfloat16-only"}}  # which costs weights that nobody trains nothing
    for way, changes in ways.items():
        settings = config.model.model_copy(update=changes)
        changed = estimate(config.model_copy(update={"model": settings}), source)
        if changed is not None and changed.least <= free:
            return way
    return ""


def pick_parallel(config: RunConfig, source: str, world: int, local_world: int) -> str:
    """How the policy lies on the ranks; `auto`: replicated where that fits comfortably, by what the device has in all.

    What is free at the moment decides nothing: a run that goes on would otherwise be taken apart in another way.
    """
    if world == 1:
        return "alone"
    if config.learner.parallel != "auto":
        return config.learner.parallel
    device = pick_device(config.model.device)
    needed = None if config.model.trains_adapters else estimate(config, source)
    if device.type == "cuda":
        room = torch.cuda.get_device_properties(device).total_memory
    else:
        room = psutil.virtual_memory().total // local_world
    return "replicated" if needed is None or needed.total <= COMFORTABLE * room else "sharded"


def check_memory(config: RunConfig, source: str, world: int = 1, local_world: int = 1) -> str:
    """Refuse a model that is too large for its device, before it is loaded; a word of warning where it may be."""
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


def check_sampling_memory(config: RunConfig, source: str) -> None:
    """Refuse to sample from a model whose weights alone are too large for the device, before they are loaded."""
    shape = model_shape(source, config) if config.sampler.engine == "hf" else None
    if shape is None:
        return
    device = pick_device(config.model.device)
    weights, free = shape.parameters * pick_precision(config.model.precision, device).itemsize, free_bytes(device)
    if weights > free:
        raise ModelError(
            f"{source} is too large: its weights take {weights / GIB:.2f} GiB on {device}, where {free / GIB:.2f} are "
            "free: choose a smaller model or a larger device"
        )
