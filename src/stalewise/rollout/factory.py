"""Makes samplers and batch plans from a config; checks that a generation batch can be trained on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from stalewise.config import RunConfig
from stalewise.config.run import RESPONSE_LIMIT
from stalewise.config.sections import (
    LEAST_VLLM_TEMPERATURE,
    ForeignSection,
    ModelSection,
    SamplerSection,
    ScheduleSection,
)
from stalewise.errors import ConfigError, StalewiseError
from stalewise.models import find_device, pick_device, pick_precision
from stalewise.models.compilation import should_compile
from stalewise.models.loading import context_length, load_model_config, load_tokenizer
from stalewise.rollout.engines.embedded import HFSampler
from stalewise.rollout.generate import PROMPTS_TO_COMPARE, BatchPlan, environment_of, shown_prompts
from stalewise.rollout.mixed_policy import MixedPolicySampler, check_tokenizers
from stalewise.rollout.policy_files import RAISE_LIMIT
from stalewise.rollout.sampler import Sampler, check_lengths
from stalewise.staleness.schedule import Schedule
from stalewise.store import Batch
from stalewise.store.reader import has_variance
from stalewise.tasks import ErrorCounts, Task
from stalewise.types import Prompt, SamplerSettings


def batch_plan(config: RunConfig, schedule: Schedule, generation_batch: int, attempt: int = 0) -> BatchPlan:
    """The plan of a generation batch; each `attempt` has its own seeds."""
    prompts = schedule.prompts_of(generation_batch, config.batch.reserved)
    planned = len(schedule.prompts_of(generation_batch, config.batch.prompts))
    return BatchPlan(
        generation_batch=generation_batch,
        version=schedule.version_of(generation_batch),
        first_prompt=prompts.start,
        prompts=planned,
        group_size=config.batch.group_size,
        prompts_per_shard=config.sampler.rollouts_per_shard // config.batch.group_size,
        seed=config.seed + (attempt << 32),
        foreign=config.sampler.foreign.path,
        foreign_rollouts=config.sampler.foreign.rollouts_per_group(config.batch.group_size),
        most_prompts=len(prompts) if config.batch.without_variance == "refill" else 0,
    )


def make_sampler(
    config: RunConfig,
    *,
    on_tokens: Callable[[int], object] = lambda count: None,
    log: Callable[[str], object] = lambda text: None,
) -> Sampler:
    """The sampler of this config; it calls `on_tokens` with the number of new tokens as it samples."""
    section, device = config.sampler, pick_device(config.model.device)
    if section.engine == "auto":  # training and `doctor` have picked an engine before
        section = section.model_copy(update={"engine": "hf"})
    precision = pick_precision(config.model.precision, device)
    is_server = section.engine == "server"  # its precision was fixed when it was started
    settings = SamplerSettings(
        name=section.engine,
        precision=section.server.precision if is_server else str(precision).removeprefix("torch."),
        temperature=section.temperature,
        top_p=section.top_p,
        top_k=section.top_k,
        weights=section.weights,
    )
    limit = section.max_new_tokens
    if section.engine == "vllm":
        from stalewise.rollout.engines.vllm import VllmSampler

        options = section.vllm
        return VllmSampler(settings, max_new_tokens=limit, options=options, device=device, on_tokens=on_tokens)
    if is_server:
        from stalewise.rollout.engines.server import ServerSampler

        return ServerSampler(settings, max_new_tokens=limit, options=section.server, on_tokens=on_tokens, log=log)

    # `updates` is 0, so that `auto` never compiles: a step with fused operators launches fewer kernels.
    compiles = partial(should_compile, config.learner.compile, 0)
    embedded = partial(HFSampler, settings, max_new_tokens=limit, device=device, dtype=precision)
    embedded = partial(embedded, on_tokens=on_tokens, should_compile=compiles)
    return MixedPolicySampler(embedded(), embedded()) if section.foreign.share else embedded()


def pick_engine(
    section: SamplerSection, model: ModelSection, schedule: ScheduleSection, source: str
) -> tuple[str, str]:
    """The engine that `auto` selects on this machine for the model at `source`, and the reason.

    The embedded engine was faster than vLLM in all comparisons where it decodes in slots (docs/engines.md). So vLLM is
    for models that cannot be decoded in slots, and for models that are too large for one GPU.
    """
    device = pick_device(model.device)
    if device.type != "cuda":
        return "hf", "there is no GPU"
    if find_spec("vllm") is None:
        return "hf", "vLLM is not installed"
    if section.foreign.share or section.weights != "exact" or section.temperature < LEAST_VLLM_TEMPERATURE:
        return "hf", "vLLM does not have what sampler.foreign, weights or temperature ask for"
    try:
        check_engine_devices(section.model_copy(update={"engine": "vllm"}), model, schedule)
    except StalewiseError:
        return "hf", "this pipelined run does not name GPUs for two engines of vLLM"
    dtype = pick_precision(model.precision, device)
    trial = HFSampler(SamplerSettings(), max_new_tokens=1, device=device, dtype=dtype)
    try:
        trial.load(Path(source))
        problem = trial.slots_problem
    except torch.OutOfMemoryError:
        problem = "its weights do not fit on one GPU"
    finally:
        trial.close()
    if problem:
        return "vllm", f"hf has no slots for this model: {problem}"
    return "hf", "it decodes this model in slots"


def check_engine_devices(sampler: SamplerSection, model: ModelSection, schedule: ScheduleSection) -> None:
    """Refuse a pipelined run in which two vLLM engines would use one GPU: the generator's and that of evaluations."""
    count = torch.cuda.device_count()
    if sampler.engine != "vllm" or schedule.kind != "pipelined" or not count:
        return
    from stalewise.rollout.engines.vllm import device_groups, gpu_numbers

    if count == 1:
        raise ConfigError(
            "with sampler.engine = vllm a pipelined run has two engines, each on its own GPUs, and this machine has "
            'one: use the engine hf, or schedule.kind = "staged" or "synchronous"'
        )
    section = sampler.vllm
    devices = {"model.device": model.device, "schedule.generator_device": schedule.generator_device}
    gpus: dict[str, set[int]] = {}
    for setting, name in devices.items():
        if not name or not name.startswith("cuda:"):
            raise ConfigError(
                f"{setting} is {name or 'not set'}: with sampler.engine = vllm a pipelined run has two engines, and "
                f"each needs its own GPUs: set model.device and schedule.generator_device to two of cuda:0 … "
                f"cuda:{count - 1}, or use the engine hf"
            )
        device = find_device(name, setting)
        device_groups(section.copies, section.tensor_parallel, device)  # raises where GPUs are missing
        gpus[setting] = set(gpu_numbers(section.copies, section.tensor_parallel, device, count))
    if shared := set.intersection(*gpus.values()):
        raise ConfigError(
            f"model.device = {devices['model.device']} and schedule.generator_device = "
            f"{devices['schedule.generator_device']} would put two vLLM engines on GPU {min(shared)} (sampler.vllm: "
            f"tensor_parallel {section.tensor_parallel}, copies {section.copies or 1}): choose GPUs further apart"
        )


def check_policy(section: SamplerSection, own: Path, task: Task, prompts: list[Prompt]) -> None:
    """Check a config against the policy at `own` before it is loaded: its context, and a second policy's tokens."""
    check_context(section, own, task, prompts)
    check_second_policy(section.foreign, own, task)


def check_context(
    section: SamplerSection, own: Path, task: Task, prompts: list[Prompt], setting: str = RESPONSE_LIMIT
) -> None:
    """Refuse prompts and responses beyond the context of the policy at `own`; messages name `setting` as the limit."""
    of_engine = section.vllm.max_model_len if section.engine == "vllm" else None
    limits = [limit for limit in (context_length(load_model_config(str(own))), of_engine) if limit is not None]
    # The prompts of episodes come from their environment, which is called only if they may be too long.
    if limits and (environment_of(task) is None or section.max_new_tokens >= min(limits)):
        shown, encoded = shown_prompts(task, prompts, load_tokenizer(str(own)))
        more = RAISE_LIMIT if of_engine == min(limits) else ""
        names = [prompt.prompt_id for prompt in shown]
        check_lengths(
            encoded, limit=min(limits), max_new_tokens=section.max_new_tokens, setting=setting, more=more, names=names
        )


def check_second_policy(section: ForeignSection, own: Path, task: Task) -> None:
    """Refuse a second policy (`sampler.foreign`) whose tokens differ from those of the policy at `own`."""
    if section.share:
        check_tokenizers(section.path, own, _first_prompts(task))


def _first_prompts(task: Task) -> list[Prompt]:
    return task.prompts(0, min(PROMPTS_TO_COMPARE, task.size or PROMPTS_TO_COMPARE))


def unscored_problem(batch: Batch, limit: float) -> str:
    """Why a generation batch has too few scores; an empty string if it has enough."""
    manifest = batch.manifest
    return ErrorCounts.of_record(manifest.extra, manifest.rows).over(limit) if manifest.verifier_errors else ""


def batch_problem(batch: Batch) -> str:
    """Why a generation batch cannot be trained on; an empty string if it can."""
    manifest = batch.manifest
    if manifest.verifier_errors == manifest.rows:
        kinds = ", ".join(f"{kind} ({count})" for kind, count in manifest.extra.get("verifier_error_kinds", {}).items())
        return f"the verifier failed on all {manifest.rows} responses: {kinds or 'see reward_error in the shards'}"
    if manifest.truncated == manifest.rows:
        return f"all {manifest.rows} responses are truncated (fraction 1.0): raise sampler.max_new_tokens"
    group, reward = batch.column("group"), batch.column("reward")
    if has_variance(reward, group).any():
        return ""
    groups = len(np.unique(group[~np.isnan(reward)]))
    return f"none of {groups} groups has variance; the mean reward is {manifest.reward_mean:.3f}"
