"""Estimates the memory a run needs on its device from the model's config, before anything is loaded.

docs/models.md has the formula. Learning, sampling and the forward passes of a reference take turns, so the largest of
them counts. In a pipelined run on one device, learning and the other two happen at once. With `learner.offload` the
trainer is in host memory while the sampler works, and the sampler's weights are freed while the trainer works.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors import SafetensorError, safe_open

from stalewise.config import LoraSection, RunConfig
from stalewise.config.sections import ModelSection, ObjectiveSection, SamplerSection, ScheduleSection
from stalewise.errors import ModelError
from stalewise.models import find_device, pick_device, pick_precision
from stalewise.models.compilation import MOMENT_BYTES, fits_in_half, logit_budget
from stalewise.models.kernels import can_compile
from stalewise.models.loading import pick_weights_dtype
from stalewise.objectives import get_objective
from stalewise.rollout.engines.paged_cache import (
    FEWEST_ROWS,
    FIRST_GUESS,
    LOGITS_BYTES,
    RECORD_BYTES,
    SLEEP_SHARE,
    cache_size,
)
from stalewise.staleness.schedule import Schedule
from stalewise.trainer.logprobs import CHUNK_ELEMENTS, PLAIN_KERNELS, kept_rows, kernels_for
from stalewise.trainer.lora import find_targets
from stalewise.trainer.reference import reference_path

GIB = 2**30
# Bytes that autograd keeps per token and layer, as multiples of H, F and K: counted with saved-tensor hooks on Llama
# layers of five shapes, exact to 1% (Qwen 3 keeps a fifth more, GPT-2 less), by (autocast, bytes per weight).
ACTIVATIONS = {(False, 4): (36, 16, 8), (True, 4): (32, 8, 4), (True, 2): (22, 8, 4)}
# The same with fused norms, gates and rotations, on a GPU. Keys and values are copied for each response to a prompt.
FUSED_ACTIVATIONS = {(False, 4): (36, 16, 8), (True, 4): (16, 6, 6), (True, 2): (12, 6, 6)}
ADAPTER_ACTIVATIONS = (12, 2, 0)  # each adapter keeps its own copy of its input
FUSED_ADAPTER_ACTIVATIONS = (6, 0, 0)  # measured at 0.5B
GRADIENTS_OF_A_LAYER = 0.5  # further memory of a layer's backward pass, as a share of its activations
# CUDA's context, libraries and graphs in one process, beyond torch's reserved memory; measured by benchmarks/memory.py.
PROCESS_BYTES = 850 << 20
SAMPLERS_WEIGHTS = "sampler's weights"
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
    waits: int = 0  # bytes that are in host memory while sampling: all of the certain ones, or none
    at_once: bool = False  # learning and sampling at the same time, in two processes
    spare: int = 0  # bytes of further keys and values, which the embedded engine takes where they are free
    stays: int = 0  # bytes of keys and values that are kept while learning
    reference: Mapping[str, int] = field(default_factory=dict[str, int])  # while its column is computed
    one_response: int = 0  # bytes of keys and values of the longest response with its prompt, in the embedded engine
    any_response: int = 0  # the same for the longest response of any suite, if that is longer
    may_wait: int = 0  # bytes that could be in host memory while sampling
    process: int = 0  # bytes of this process besides tensors, which free memory does not include

    @property
    def least(self) -> int:
        """Bytes that are needed for batches of any size."""
        return sum(self.certain.values())

    @property
    def checkpoint(self) -> int:
        """Bytes of a checkpoint, and of its copy in host memory: those of the trainer without gradients."""
        return sum(self.certain[part] for part in ("weights", "moments", "proximal policy"))

    @property
    def waits_on_host(self) -> int:
        """Bytes of host memory that an offloaded trainer takes, and beside a reference also the sampler.

        Gradients are not kept, and the next policy replaces the sampler's weights.
        """
        beside = self.samplers_weights if self.reference else 0
        return self.checkpoint + beside if self.waits else 0

    @property
    def total(self) -> int:
        """Bytes with which the run certainly works."""
        return self._bytes(0, 0)

    @property
    def peak(self) -> int:
        """Bytes that the run takes on a device where nothing else runs, as the device counts them."""
        return self._bytes(self.spare, self.stays) + self.process

    def _bytes(self, spare: int, stays: int) -> int:
        learning, sampling = sum(self.learning.values()) + stays, sum(self.sampling.values()) + spare
        sampling = max(sampling, sum(self.reference.values()) + stays)
        return self.least + (learning + sampling if self.at_once else max(learning, sampling - self.waits))

    @property
    def samplers_weights(self) -> int:
        """Bytes of the embedded engine's weights, which are certain unless they leave the device while learning."""
        return self.certain.get(SAMPLERS_WEIGHTS, 0) + self.sampling.get(SAMPLERS_WEIGHTS, 0)

    def in_turns(self) -> MemoryEstimate:
        """The same with the trainer's state in host memory while sampling, and no sampler's weights while learning."""
        weights = {SAMPLERS_WEIGHTS: self.samplers_weights}
        certain = {name: size for name, size in self.certain.items() if name not in weights}
        return replace(self, certain=certain, sampling=weights | dict(self.sampling), waits=self.may_wait)

    def left_for_slots(self, memory: int) -> int:
        """Bytes of a device's memory that are left for the embedded engine's slots.

        A generator on the trainer's device cannot measure this: when it begins, the trainer holds little yet.
        """
        held = self.least - self.waits + self.sampling.get(SAMPLERS_WEIGHTS, 0)
        return max(0, memory - held - (sum(self.learning.values()) if self.at_once else 0))

    @property
    def for_one_response(self) -> int:
        """Bytes needed to sample even one response, with everything offloaded that can be."""
        held = sum(size for name, size in self.certain.items() if name != SAMPLERS_WEIGHTS)
        return held - self.may_wait + self.samplers_weights + self.any_response

    @property
    def largest(self) -> str:
        """Which of learning, sampling and the reference needs most; "both" where they happen at once."""
        if self.at_once:
            return "both"
        sizes = {"learning": sum(self.learning.values()), "sampling": sum(self.sampling.values()) - self.waits}
        sizes["the reference"] = sum(self.reference.values()) - self.waits
        return max(sizes, key=sizes.__getitem__)

    def __str__(self) -> str:
        trained = "" if self.shape.trained == self.shape.parameters else f", {self.shape.trained / 1e6:,.2f} M trained"
        both = {**self.learning, **max(self.sampling, self.reference, key=lambda sizes: sum(sizes.values()))}
        parts = {"learning": self.learning, "sampling": self.sampling, "the reference": self.reference, "both": both}
        turns = parts[self.largest]
        more = f"; on a GPU where nothing else runs it takes {self.peak / GIB:.2f}" if self.process else ""
        shown = turns if self.waits and turns is not self.learning else {**self.certain, **turns}
        parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in shown.items() if size)
        freed = self.sampling.get(SAMPLERS_WEIGHTS, 0)
        away = f", while learning {self.samplers_weights / GIB:.2f} are freed" if freed else ""
        # Gradients are freed as well, but not kept in host memory.
        waits = f"; while sampling {self.checkpoint / GIB:.2f} wait in host memory{away}" if self.waits else ""
        return (
            f"{self.shape.parameters / 1e6:,.1f} M parameters{trained}: at least {self.least / GIB:.2f} GiB and up to "
            f"{self.total / GIB:.2f} ({parts}{waits}){more}"
        )


def model_shape(source: str, model: ModelSection) -> ModelShape | None:
    """The shape of the model at `source`, from its config; None if the config does not determine it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        described: Any = AutoConfig.from_pretrained(source, trust_remote_code=False)
        with torch.device("meta"):  # layers without data
            layers: Any = AutoModelForCausalLM.from_config(described, trust_remote_code=False)
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
    config: RunConfig, source: str, *, longest_prompt: int = UNKNOWN_PROMPT, shards: int = 1, alone: bool = False
) -> MemoryEstimate | None:
    """Memory of a run with the model at `source`; None if the model's config does not determine its shape.

    With `shards`, that many devices each hold a part of the trainer's weights, gradients and moments. `alone`: there is
    one rank, whose trainer and sampler take turns on the device where `learner.offload` says so.
    """
    shape = model_shape(source, config.model)
    if shape is None:
        return None
    device = pick_device(config.model.device)
    precision = pick_precision(config.model.precision, device)
    weight = pick_weights_dtype(config.model.precision).itemsize
    adapters = config.model.trains_adapters
    embedded = not config.sampler.is_external  # other engines have their own processes
    trained, moments = shape.trained * (4 if adapters else weight) // shards, config.optimizer.moments
    certain = {
        "weights": shape.parameters * weight // shards + (trained if adapters else 0),
        "gradients": trained,
        # Moments that are called float32 have the precision of the weights.
        "moments": 2 * trained if moments == "float32" else shape.trained * MOMENT_BYTES[moments] // shards,
        "proximal policy": trained if get_objective(config.objective.name).needs_proximal else 0,
        SAMPLERS_WEIGHTS: shape.parameters * precision.itemsize if embedded else 0,
    }
    autocast = precision is torch.bfloat16
    length = longest_prompt + config.sampler.max_new_tokens
    rollouts = config.batch.prompts * config.batch.group_size
    rows = min(config.sampler.rollouts_per_shard, rollouts * _updates_of_a_batch(config.schedule.schedule()))
    token_bytes = shape.layers * 2 * shape.keys * precision.itemsize
    paged = _least_tokens(config.sampler.max_new_tokens, rows, longest_prompt)
    sampling = {"keys and values": (paged if device.type == "cuda" else rows * length) * token_bytes * embedded}
    at_once = embedded and config.schedule.kind == "pipelined" and generator_elsewhere(config.schedule, device) is None
    process = PROCESS_BYTES if device.type == "cuda" else 0
    if at_once:
        certain |= {"the generator's weights": shape.parameters * precision.itemsize, "its process": process}
    can_leave = alone and config.learner.offload != "never" and device.type == "cuda" and not at_once
    needed = MemoryEstimate(
        shape=shape,
        certain=certain,
        learning=_learning(config, length, shape, device, autocast, weight),
        sampling=sampling,
        at_once=at_once,
        one_response=length * token_bytes if embedded else 0,
        any_response=(longest_prompt + config.longest_response[1]) * token_bytes if embedded else 0,
        may_wait=sum(certain.values()) - certain[SAMPLERS_WEIGHTS] if can_leave else 0,
        process=process,
    )
    if config.objective.kl:
        other = _reference_shape(config.objective, config.model, config.task.name) or shape
        tokens = min(config.learner.tokens_per_micro_batch, rows * length)
        needed = replace(needed, reference=_reference(other, tokens, needed.learning["logits"], autocast, weight))
    if can_leave and _takes_turns(config.learner.offload, needed, device):
        needed = needed.in_turns()
    if not embedded or device.type != "cuda":
        return needed
    requests = {"requests": rows, "prompts": -(-rows // config.batch.group_size), "prompt_room": longest_prompt}
    slots = _slot_bytes(needed, token_bytes, new_tokens=config.sampler.max_new_tokens, **requests)
    kept = slots <= SLEEP_SHARE * device_memory(device) and not at_once and not needed.waits
    return replace(needed, spare=max(0, slots - sampling["keys and values"]), stays=slots if kept else 0)


def _least_tokens(new_tokens: int, rows: int, longest_prompt: int) -> int:
    """Tokens whose keys and values a GPU should hold: of one response, and of 64 as long as the engine expects.

    Blocks are taken as responses grow, so that longer ones than expected wait, and nothing is reserved for them.
    """
    return max(longest_prompt + new_tokens, min(rows, FEWEST_ROWS) * (longest_prompt + min(new_tokens, FIRST_GUESS)))


def generator_elsewhere(schedule: ScheduleSection, device: torch.device) -> torch.device | None:
    """The device of a pipelined run's generator; None if it is `device`, the trainer's."""
    if schedule.kind != "pipelined" or schedule.generator_device is None:
        return None
    # Found, not picked: it must not become this process's device.
    found = find_device(schedule.generator_device, "schedule.generator_device")
    return None if (found.type, found.index or 0) == (device.type, device.index or 0) else found


def _slot_bytes(needed: MemoryEstimate, token_bytes: int, *, new_tokens: int, **requests: int) -> int:
    """Bytes that the embedded engine takes for its slots on a GPU: as many rollouts at once as there are or fit."""
    row_bytes = needed.shape.vocabulary * LOGITS_BYTES + new_tokens * RECORD_BYTES
    sizes = {"token_bytes": token_bytes, "row_bytes": row_bytes, "new_tokens": new_tokens, **requests}
    try:
        return cache_size(needed.left_for_slots(device_memory(torch.device("cuda"))), **sizes).nbytes
    except ModelError:  # not even one fits, as `total` shows
        return 0


def _updates_of_a_batch(schedule: Schedule) -> int:
    """Updates that learn from the largest generation batch."""
    return max(len(schedule.updates_of(batch)) for batch in range(schedule.generation_batches))


def _learning(
    config: RunConfig, length: int, shape: ModelShape, device: torch.device, autocast: bool, weight: int
) -> dict[str, int]:
    """Bytes of a micro-batch; `length` is that of the longest prompt with its response."""
    learner, on_gpu = config.learner, device.type == "cuda"
    rollouts = config.batch.prompts * config.batch.group_size
    tokens = min(learner.tokens_per_micro_batch, rollouts * length)
    if on_gpu:  # packed: prompts count once, and micro-batches are about equally large
        response = config.sampler.max_new_tokens
        packed = rollouts * response + config.batch.prompts * (length - response)
        parts = -(-packed // learner.tokens_per_micro_batch)
        tokens = min(tokens, -(-packed // parts) + length)
    fused = on_gpu and can_compile()
    multiples = (FUSED_ACTIVATIONS if fused else ACTIVATIONS)[autocast, weight]
    if config.model.trains_adapters:
        adapters = FUSED_ADAPTER_ACTIVATIONS if fused else ADAPTER_ACTIVATIONS
        multiples = [sum(pair) for pair in zip(multiples, adapters, strict=True)]
    layer = tokens * sum(n * size for n, size in zip(multiples, (shape.hidden, shape.inner, shape.keys), strict=True))
    inputs = shape.layers * tokens * shape.hidden * weight
    kept = inputs + layer if learner.gradient_checkpointing else shape.layers * layer
    kept += int(GRADIENTS_OF_A_LAYER * layer) if fused else 0
    memory, moments, output = device_memory(device), config.optimizer.moments, shape.hidden * shape.vocabulary
    leaves_room = on_gpu and fits_in_half(shape.parameters, shape.trained, moments, memory)
    kept_logits = logit_budget(shape.parameters, shape.trained, output, moments, memory) if on_gpu else 0
    product = 2 if autocast else 4
    logits = kept_rows(tokens) * shape.vocabulary * product
    output_gradient = 0 if config.model.trains_adapters or not on_gpu else 4 * output
    if logits > kept_logits:
        chunk = min(tokens * shape.vocabulary, CHUNK_ELEMENTS.get(device.type, 1 << 24))
        # Fused kernels hold logits in the precision of the product; plain ones hold four float32 copies besides.
        plain = kernels_for(device) is PLAIN_KERNELS
        logits = chunk * ((2 if autocast else 0) + 4 * 4 if plain else product)
        output_gradient = output_gradient * 3 // 2  # the product of a chunk besides, in bfloat16
    # Kept for the backward pass, of all layers or of one, besides the gradient of one layer.
    experts = shape.adapted * product * (2 if learner.gradient_checkpointing else shape.layers + 1) // shape.layers
    rounds = autocast and weight == 4
    records = on_gpu and (learner.compile in ("always", "graphs") or (learner.compile == "auto" and leaves_room))
    return {
        f"activations of {tokens} tokens": kept,
        "bfloat16 copies of the weights": 2 * shape.parameters if rounds else 0,
        "their gradients": 2 * shape.trained if rounds and records else 0,
        "logits": logits,
        "gradient of the output layer": output_gradient,
        **({"experts with their adapters": experts} if experts else {}),
    }


def _reference(shape: ModelShape, tokens: int, logits: int, autocast: bool, weight: int) -> dict[str, int]:
    """A second policy in forward passes over micro-batches as large as the trainer's, without kept activations."""
    multiples = ACTIVATIONS[autocast, weight]  # of one layer
    layer = sum(n * size for n, size in zip(multiples, (shape.hidden, shape.inner, shape.keys), strict=True))
    return {
        "the reference's weights": shape.parameters * weight,
        "bfloat16 copies of its weights": 2 * shape.parameters if autocast and weight == 4 else 0,
        "its activations": tokens * layer,
        "its logits": logits,
    }


def _reference_shape(objective: ObjectiveSection, model: ModelSection, task: str) -> ModelShape | None:
    """The shape of a reference that is another model than the policy; None if it has the policy's."""
    path = reference_path(objective, model, task)
    return model_shape(path, model.model_copy(update={"lora": LoraSection(), "adapter": ""})) if path else None


def device_memory(device: torch.device) -> int:
    """All memory of a device, or of the machine for a CPU."""
    if device.type != "cuda":
        return psutil.virtual_memory().total
    return torch.cuda.get_device_properties(device).total_memory


def offloads(config: RunConfig, source: str) -> bool:
    """Whether trainer and sampler leave the device while the other one works; `auto`: if both would not fit.

    Depends on the device's total memory, not on what is free now.
    """
    device = pick_device(config.model.device)
    if config.learner.offload != "auto" or device.type != "cuda":
        return config.learner.offload == "always" and device.type == "cuda"
    needed = estimate(config, source)
    return needed is not None and not needed.at_once and _takes_turns("auto", needed, device)


def _takes_turns(offload: str, needed: MemoryEstimate, device: torch.device) -> bool:
    """Whether to offload, from an estimate without offloading. Learning gains room only from the sampler's weights."""
    learning = sum(needed.learning.values()) if needed.samplers_weights else 0
    largest = max(learning, sum(needed.sampling.values()), needed.any_response, sum(needed.reference.values()))
    return offload == "always" or needed.least + largest > device_memory(device)


def free_bytes(device: torch.device) -> int:
    """Free memory of a device, or of the machine for a CPU."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available


Changes = dict[str, dict[str, Any]]  # new values by section and key


def ways_out(
    config: RunConfig, source: str, needed: MemoryEstimate, free: int, world: int = 1, local_world: int = 1
) -> str:
    """Advice on how to make the run fit on this many ranks, checked against the same estimate."""
    smaller = "choose a smaller model or a larger device"
    fitting = partial(_settings_that_fit, config, source, world, local_world)
    if needed.least > free:
        if ways := fitting(_savings(config), lambda changed: changed.least <= free):
            return f"{smaller}, or set {', or '.join(ways)}"
        return smaller if config.model.trains_adapters else f"{smaller}: adapters alone would not fit either"
    ways = fitting(_savings(config), lambda changed: changed.total <= free)
    if needed.largest == "sampling":
        shorter = fitting(_sampling_savings(config.sampler), lambda changed: changed.total <= free)
        advice = f"lower sampler.rollouts_per_shard or sampler.max_new_tokens, or {smaller}"
        ways = [*shorter, *ways]
    else:
        saves = needed.largest != "the reference" and not config.learner.gradient_checkpointing
        first = "set learner.gradient_checkpointing, or " if saves else ""
        advice = f"{first}lower learner.tokens_per_micro_batch, or {smaller}"
    fits = f"; these would fit: {', or '.join(ways)}" if ways else ""
    return f"if it runs out, {advice}{fits}"


def _settings_that_fit(
    config: RunConfig,
    source: str,
    world: int,
    local_world: int,
    candidates: Mapping[str, Changes],
    fits: Callable[[MemoryEstimate], bool],
) -> list[str]:
    """The descriptions of the candidates with which the run fits, in their order.

    A candidate is left out if it gives the same settings other values than one before, or changes more than that.
    """
    fitting: dict[str, Changes] = {}
    for description, changes in candidates.items():
        if any(_settings(changes) == _settings(other) or _contains(changes, other) for other in fitting.values()):
            continue
        sections = {name: getattr(config, name).model_copy(update=values) for name, values in changes.items()}
        changed = config.model_copy(update=sections)
        shards = world if pick_parallel(changed, source, world, local_world) == "sharded" else 1
        needed = estimate(changed, source, shards=shards, alone=world == 1)
        if needed is not None and fits(needed):
            fitting[description] = changes
    return list(fitting)


def _settings(changes: Changes) -> list[str]:
    """The dotted names of the changed settings."""
    return [f"{section}.{key}" for section, values in changes.items() for key in values]


def _contains(changes: Changes, other: Changes) -> bool:
    """Whether all of the other changes are among these."""
    return all(values.items() <= changes.get(section, {}).items() for section, values in other.items())


def _sampling_savings(sampler: SamplerSection) -> dict[str, Changes]:
    """Smaller shards and shorter responses, at a quarter, a sixteenth and a 64th of the setting; by description."""
    settings = ("rollouts_per_shard", "max_new_tokens")
    values = [(key, getattr(sampler, key) // divisor) for key in settings for divisor in (4, 16, 64)]
    return {f"sampler.{key} = {value}": {"sampler": {key: value}} for key, value in values if value >= 16}


def _savings(config: RunConfig) -> dict[str, Changes]:
    """Settings that save memory of the trainer, by description; those that change least come first."""
    learner = config.learner
    bfloat16 = {"precision": "bfloat16-only"}
    checkpointing: Changes = {"learner": {"gradient_checkpointing": True}}
    candidates: dict[str, Changes] = {}
    if pick_device(config.model.device).type == "cuda" and learner.offload != "always":
        candidates['learner.offload = "always"'] = {"learner": {"offload": "always"}}
    if not learner.gradient_checkpointing:
        candidates["learner.gradient_checkpointing = true"] = checkpointing
    tokens = learner.tokens_per_micro_batch // 4
    if tokens >= 512:
        candidates[f"learner.tokens_per_micro_batch = {tokens}"] = {"learner": {"tokens_per_micro_batch": tokens}}
    if config.model.trains_adapters:  # the base is not trained, so bfloat16 loses no updates
        candidates['model.precision = "bfloat16-only"'] = {"model": bfloat16}
        return candidates
    if config.optimizer.moments != "int8":
        int8: Changes = {"optimizer": {"moments": "int8"}}
        candidates['optimizer.moments = "int8"'] = int8
        if not learner.gradient_checkpointing:
            both = 'optimizer.moments = "int8" with learner.gradient_checkpointing = true'
            candidates[both] = int8 | checkpointing
    adapters = {"lora": LoraSection(rank=16)}
    candidates["model.lora.rank = 16, which trains adapters alone"] = {"model": adapters}
    candidates['model.lora.rank = 16 with model.precision = "bfloat16-only"'] = {"model": adapters | bfloat16}
    return candidates


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
    memory = device_memory(device) // (1 if device.type == "cuda" else local_world)
    return "replicated" if needed is None or needed.total <= COMFORTABLE * memory else "sharded"


def check_memory(config: RunConfig, source: str, world: int = 1, local_world: int = 1) -> str:
    """Refuse a model that is too large for its device before it is loaded; returns a warning if it may be."""
    device = pick_device(config.model.device)
    shards = world if pick_parallel(config, source, world, local_world) == "sharded" else 1
    needed = estimate(config, source, shards=shards, alone=world == 1)
    free = free_bytes(device) // (1 if device.type == "cuda" else local_world)  # ranks on one machine share its memory
    if needed is not None:
        _check_generator(config.sampler.max_new_tokens, source, needed, generator_elsewhere(config.schedule, device))
    if needed is None or max(needed.total, needed.for_one_response) <= free:  # the longest response may be in a suite
        return ""
    figures = f"{needed} on {device}, where {free / GIB:.2f} GiB are free: "
    advice = ways_out(config, source, needed, free, world, local_world)
    if needed.least > free:
        for_sampling = needed.samplers_weights + needed.one_response
        note = " to train; generating alone would fit" if 0 < for_sampling <= free else ""
        raise ModelError(f"{source} is too large{note}: {figures}{advice}")
    if needed.for_one_response > free:
        others = _settings_that_fit(
            config, source, world, local_world, _savings(config), lambda c: max(c.least, c.for_one_response) <= free
        )
        raise ModelError(_too_long_responses(source, config.longest_response, needed, free, others, figures))
    return f"memory may run out: {figures}{advice}"


def _too_long_responses(
    source: str, longest: tuple[str, int], needed: MemoryEstimate, free: int, others: list[str], figures: str
) -> str:
    """The error for a device on which the longest response does not fit; `others` are settings with which it would."""
    setting, new_tokens = longest
    room = needed.any_response - (needed.for_one_response - free)
    fitting = int(room / needed.any_response * (UNKNOWN_PROMPT + new_tokens)) - UNKNOWN_PROMPT
    ways = [*(["lower it"] if fitting > 0 else []), *(f"set {way}" for way in others)]
    most = f"at most {setting} = {fitting} would fit" if fitting > 0 else "no token would fit"
    return (
        f"{source} fits for training but not for sampling: one response of {setting} = {new_tokens} "
        f"takes {needed.any_response / GIB:.2f} GiB of keys and values, and {room / GIB:.2f} are there for them "
        f"({most}): {figures}{', or '.join([*ways, 'choose a smaller model or a larger device'])}"
    )


def _check_generator(new_tokens: int, source: str, needed: MemoryEstimate, elsewhere: torch.device | None) -> None:
    """Refuse a pipelined run whose generator has its own device, where weights and one response do not fit."""
    weights, response = needed.samplers_weights, needed.one_response
    # All of its memory: to ask for what is free there would take some.
    if elsewhere is None or weights + response <= (memory := device_memory(elsewhere)):
        return
    raise ModelError(
        f"{source} does not fit for sampling on schedule.generator_device = {elsewhere}: its weights take "
        f"{weights / GIB:.2f} GiB, one response of sampler.max_new_tokens = {new_tokens} "
        f"{response / GIB:.2f} GiB of keys and values, and the device has {memory / GIB:.2f} GiB: choose another "
        "device or a smaller model" + (", or lower max_new_tokens" if weights < memory else "")
    )


def check_sampling_memory(model: ModelSection, engine: str, source: str, new_tokens: int) -> None:
    """Refuse to sample where the weights and one response are too large for the device, before anything is loaded."""
    shape = model_shape(source, model) if engine in ("hf", "auto") else None
    if shape is None:
        return
    device = pick_device(model.device)
    itemsize, free = pick_precision(model.precision, device).itemsize, free_bytes(device)
    weights, token_bytes = shape.parameters * itemsize, shape.layers * 2 * shape.keys * itemsize
    response, left = (UNKNOWN_PROMPT + new_tokens) * token_bytes, free - weights
    if response <= left:
        return
    fitting = left // token_bytes - UNKNOWN_PROMPT
    with_response = f", one response of max_new_tokens = {new_tokens} {response / GIB:.2f} GiB of keys and values"
    raise ModelError(
        f"{source} is too large: its weights take {weights / GIB:.2f} GiB{with_response if left >= 0 else ''} on "
        f"{device}, where {free / GIB:.2f} are free: "
        + (f"at most max_new_tokens = {fitting} would fit: lower it, or " if fitting > 0 else "")
        + "choose a smaller model or a larger device"
    )
