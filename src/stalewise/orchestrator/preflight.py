"""What would go wrong with a config on this machine, found in seconds instead of after an hour."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any, Literal

import torch
from packaging.requirements import Requirement

from stalewise.config import RunConfig
from stalewise.config.run_directory import check_identity
from stalewise.errors import StalewiseError
from stalewise.models.loading import encode_prompts, load_tokenizer, pick_device, pick_precision, resolve_model
from stalewise.orchestrator.setup import check_objective
from stalewise.planning.memory import GIB, ModelShape, estimate, free_bytes, ways_out
from stalewise.reporting.trackers import check_installed
from stalewise.rollout.factory import batch_plan, check_second_policy, make_sampler
from stalewise.rollout.sampler import Request, Sampler
from stalewise.store.checkpoints import versions
from stalewise.tasks import Task, make_task
from stalewise.tasks.verifiers.python import PythonVerifier
from stalewise.trainer.lora import check_adapter, need_peft
from stalewise.types import Prompt

Status = Literal["ok", "warning", "bad"]
PROMPTS = 256  # training prompts that are looked at
# Weights, and two moments of each that is trained.
WEIGHT_BYTES, MOMENT_BYTES = 4, 8
# A stored token is an id and a log-probability; compression makes about this of it.
TOKEN_BYTES = 6


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at."""

    name: str
    status: Status
    detail: str


def examine(config: RunConfig) -> Iterator[Check]:
    """Look at everything a run will need, cheapest first. What depends on something bad is not looked at."""
    yield from installation()
    yield _guarded("objective", lambda: _objective(config))
    yield _guarded("run directory", lambda: _directory(config))
    if config.trackers:
        yield _guarded("trackers", lambda: _trackers(config))
    yield (device := _guarded("device", lambda: _device(config)))
    model, task = _Result(), _Result()
    try:
        if device.status != "bad":
            yield from _examine_model(config, model)
        yield _guarded("task", lambda: _task(config, task))
        if task.value is None:
            return
        yield _guarded("verifier", lambda: _verifier(task.value))
        if model.value is not None:
            yield _guarded("prompts", lambda: _prompts(config, task.value, model.value))
            if config.sampler.foreign.share:
                yield _guarded("foreign policy", lambda: _foreign(config, task.value))
            yield _guarded("sampling", lambda: _sampling(task.value, model.value))
    finally:
        if model.value is not None:
            model.value.close()
        if task.value is not None:
            task.value.verifier.close()


class _Result:
    """What a check found on its way, for the checks after it."""

    value: Any = None


def _guarded(name: str, check: Callable[[], Check]) -> Check:
    try:
        return check()
    except StalewiseError as error:
        return Check(name, "bad", str(error))


# ---------------------------------------------------------------- this machine


def installation() -> Iterator[Check]:
    """Versions of what stalewise depends on."""
    wanted = [Requirement(text) for text in requires("stalewise") or []]
    problems, found = [], [f"stalewise {version('stalewise')}"]
    for requirement in wanted:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            present = version(requirement.name)
        except PackageNotFoundError:
            problems.append(f"{requirement.name} is not installed")
            continue
        if not requirement.specifier.contains(present, prereleases=True):
            problems.append(f"{requirement.name} is {present}, {requirement.specifier} is needed")
        if requirement.name in ("torch", "transformers"):
            found.append(f"{requirement.name} {present}")
    advice = "; ".join(problems) + ": pip install --upgrade stalewise" if problems else ", ".join(found)
    yield Check("installation", "bad" if problems else "ok", advice)


def _device(config: RunConfig) -> Check:
    device = pick_device(config.model.device)
    precision = str(pick_precision(config.model.precision, device)).removeprefix("torch.")
    if config.model.precision == "bfloat16-only" and not config.model.trains_adapters:
        advice = "small updates are lost to rounding: say bfloat16, which keeps float32 weights, where they fit"
        return Check("device", "warning", f"weights in bfloat16 have 8 bits, and {advice}")
    if device.type == "cuda":
        name, memory = torch.cuda.get_device_name(device), torch.cuda.mem_get_info(device)
        return Check("device", "ok", f"{name}, {memory[0] / GIB:.1f} of {memory[1] / GIB:.1f} GiB free, {precision}")
    if precision == "bfloat16":
        return Check("device", "warning", "bfloat16 on a CPU is slower by orders of magnitude: say float32 or auto")
    return Check("device", "ok", f"CPU, {torch.get_num_threads()} threads, {precision}")


def _directory(config: RunConfig) -> Check:
    check_identity(config)
    found = versions(config.directory)
    state = f"goes on at update {found[-1]}" if found else "a new run"
    return Check("run directory", "ok", f"{config.directory}: {state}")


def _objective(config: RunConfig) -> Check:
    settings = check_objective(config)
    named = ", ".join(f"{name} = {value}" for name, value in settings.items())
    return Check("objective", "ok", f"{config.objective.name}: {named or 'no parameters'}")


def _trackers(config: RunConfig) -> Check:
    check_installed(config.trackers)
    return Check("trackers", "ok", ", ".join(config.trackers))


# ---------------------------------------------------------------- the policy


def _examine_model(config: RunConfig, model: _Result) -> Iterator[Check]:
    source = _Result()

    def resolve() -> Check:
        source.value = resolve_model(config.model.path, config.task.name)
        return Check("model directory", "ok", source.value)

    yield _guarded("model directory", resolve)
    if source.value is None:
        return
    needed = _Result()
    yield (memory := _guarded("memory", lambda: _memory(config, source.value, needed)))
    if needed.value is not None:
        yield _disk(config, needed.value.shape)
    if config.model.trains_adapters:
        yield _guarded("adapters", lambda: _adapters(config, source.value))
    yield _guarded("tokenizer", lambda: _tokenizer(source.value))
    if memory.status != "bad":
        yield _guarded("model", lambda: _load(config, source.value, model))


def _memory(config: RunConfig, source: str, result: _Result) -> Check:
    result.value = needed = estimate(config, source)
    if needed is None:
        return Check("memory", "warning", f"unknown: the config of {source} does not say how large the model is")
    free = free_bytes(pick_device(config.model.device))
    figures = f"{needed}; {free / GIB:.2f} GiB are free"
    if needed.total <= free:
        return Check("memory", "ok", figures)
    status: Status = "bad" if needed.least > free else "warning"
    return Check("memory", status, f"{figures}: {ways_out(config, source, needed, free)}")


def _adapters(config: RunConfig, source: str) -> Check:
    if config.model.adapter:
        doubts: list[str] = []
        found = check_adapter(Path(config.model.adapter).expanduser(), source, doubts.append)
        on = f"{config.model.adapter}, of rank {found.r}, goes on being trained"
        return Check("adapters", "warning" if doubts else "ok", "; ".join([on, *doubts]))
    need_peft()
    return Check("adapters", "ok", f"new ones of rank {config.model.lora.rank} are trained, and nothing else")


def _disk(config: RunConfig, shape: ModelShape) -> Check:
    schedule = config.schedule.schedule()
    rollouts = schedule.updates * config.batch.prompts * config.batch.group_size
    checkpoints = config.checkpoints.keep + schedule.lag + 2  # those that batches to come need, and one being written
    checkpoint = shape.parameters * WEIGHT_BYTES + shape.trained * MOMENT_BYTES
    needed = checkpoints * checkpoint + rollouts * config.sampler.max_new_tokens * TOKEN_BYTES
    place = config.directory.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    figures = (
        f"{rollouts:,} rollouts and {checkpoints} checkpoints need up to {needed / GIB:.2f} GiB in {config.runs}; "
        f"{free / GIB:.2f} GiB are free"
    )
    if needed > free:
        return Check("disk", "bad", f"{figures}: free some, or say another place with runs = …")
    return Check("disk", "warning" if needed > 0.8 * free else "ok", figures)


def _tokenizer(source: str) -> Check:
    from transformers import AutoTokenizer

    tokenizer = load_tokenizer(source)
    own: Any = AutoTokenizer.from_pretrained(source)
    pads = f"pads with {tokenizer.pad_token!r}" + ("" if own.pad_token_id is not None else ", having no token for it")
    return Check("tokenizer", "ok", f"ends with {tokenizer.eos_token!r}, {pads}")


def _load(config: RunConfig, source: str, model: _Result) -> Check:
    sampler = make_sampler(config)
    sampler.load(Path(source))
    model.value = sampler
    return Check("model", "ok", f"loads as a causal language model from {config.model.path}")


# ---------------------------------------------------------------- the task


def _task(config: RunConfig, result: _Result) -> Check:
    task = make_task(config.task.name, seed=config.seed, **config.task.options)
    result.value = task
    schedule = config.schedule.schedule()
    plans = [batch_plan(config, schedule, g) for g in range(schedule.generation_batches)]
    needed = sum(plan.prompts for plan in plans)
    held_out = len(task.evaluation_prompts(config.evaluation.prompts))
    training = "endless" if task.size is None else f"{task.size:,}"
    figures = f"{task.name}: {training} training prompts, {needed:,} needed; {held_out} held out"
    if held_out == 0:
        return Check("task", "bad", f"{figures}: nothing to evaluate on")
    if held_out < config.evaluation.prompts:
        return Check("task", "warning", f"{figures}, though evaluation.prompts is {config.evaluation.prompts}")
    if task.size is not None and needed > task.size:
        return Check("task", "warning", f"{figures}: each is used {needed / task.size:.1f} times")
    return Check("task", "ok", figures)


def _prompts(config: RunConfig, task: Task, sampler: Sampler) -> Check:
    looked_at = min(PROMPTS, task.size or PROMPTS)
    prompts = [*task.prompts(0, looked_at), *task.evaluation_prompts(config.evaluation.prompts)]
    encoded = encode_prompts(prompts, sampler.tokenizer)
    sampler.check_lengths(encoded)
    longest = max(map(len, encoded))
    room = config.sampler.max_new_tokens
    detail = f"the longest of {len(prompts)} has {longest} tokens, and {room} new ones fit after it"
    return Check("prompts", "ok", detail)


def _foreign(config: RunConfig, task: Task) -> Check:
    foreign, group_size = config.sampler.foreign, config.batch.group_size
    check_second_policy(config.sampler.foreign, Path(resolve_model(config.model.path, config.task.name)), task)
    makes = f"makes {foreign.places(group_size)} of the {group_size} rollouts of a group"
    return Check("foreign policy", "ok", f"{foreign.path} has the same tokens and {makes}")


def _verifier(task: Task) -> Check:
    prompts = task.prompts(0, min(4, task.size or 4))
    gold = [gold_response(task, prompt) for prompt in prompts]
    rewards = task.verifier.score(prompts, gold)
    for prompt, response, reward in zip(prompts, gold, rewards, strict=True):
        what = f"the answer {response[:60]!r} to {prompt.prompt_id}"
        if reward.error:
            return Check("verifier", "bad", f"it fails on {what}: {reward.error}")
        if reward.value != 1:
            # A function of the user's may want more than the bare answer.
            status: Status = "warning" if isinstance(task.verifier, PythonVerifier) else "bad"
            return Check("verifier", status, f"it gives {reward.value:g} to {what}, its own gold answer")
    return Check("verifier", "ok", f"gives 1 to the gold answers of {len(prompts)} prompts")


def gold_response(task: Task, prompt: Prompt) -> str:
    """What the task itself would answer: its worked-out solution where it writes one, else the gold answer."""
    solution = getattr(task, "solution", None)
    return prompt.answer if solution is None else solution(prompt)


def _sampling(task: Task, sampler: Sampler) -> Check:
    encoded = encode_prompts(task.prompts(0, 1), sampler.tokenizer)
    limit, sampler.max_new_tokens = sampler.max_new_tokens, 1
    response = sampler.sample([Request(encoded[0], seed=0)])[0]
    sampler.max_new_tokens = limit
    return Check("sampling", "ok", f"the first token of a response is {response.token_ids[0]}, {response.text!r}")
