"""`stalewise doctor`: checks a config on this machine in seconds, so that a run does not fail after an hour."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any, Literal

import psutil
from packaging.requirements import Requirement

from stalewise import __version__
from stalewise.config import RunConfig, make_config
from stalewise.config.run import stages_warning, temperature_warning
from stalewise.config.run_directory import check_identity
from stalewise.config.sections import ObjectiveSection
from stalewise.errors import ConfigError, StalewiseError
from stalewise.models import import_packages, pick_device, pick_precision, resolve_model
from stalewise.orchestrator.checkpoint_writer import fits_beside
from stalewise.orchestrator.evaluation import Suites
from stalewise.reporting.trackers import check_installed
from stalewise.rollout.sampler import Request, Sampler, token_limit
from stalewise.store.checkpoints import checkpoint_directory, versions
from stalewise.tasks import Task, close_task
from stalewise.tasks.callables import OnlyInProgramError, fingerprint
from stalewise.tasks.sandbox import scratch_folder
from stalewise.tasks.verifiers.python import FunctionVerifier, PythonVerifier
from stalewise.types import Prompt

# What needs torch and transformers, which take seconds to import, is imported where it is used: the checks that come
# before it are printed at once.

Status = Literal["ok", "warning", "bad"]
SHOWN = 1200  # characters of a prompt
GIB = 2**30
TOKEN_BYTES = 6  # bytes of a stored token: an id and a log-probability, compressed


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check."""

    name: str
    status: Status
    detail: str


def examine(config: RunConfig) -> Iterator[Check]:
    """Check everything a run needs, cheapest first. What depends on something bad is skipped."""
    yield from installation()
    with contextlib.ExitStack() as opened:
        yield from _Preflight(config, opened).checks()


def installation() -> Iterator[Check]:
    """Versions of the packages that stalewise depends on."""
    problems, versions_found = [], [f"stalewise {__version__}"]
    for requirement in map(Requirement, requires("stalewise") or []):
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
            versions_found.append(f"{requirement.name} {present}")
    advice = "; ".join(problems) + ": pip install --upgrade stalewise" if problems else ", ".join(versions_found)
    yield Check("installation", "bad" if problems else "ok", advice)


class _Preflight:
    """The checks of one config; later ones use the model directory, task and sampler that earlier ones found."""

    def __init__(self, config: RunConfig, opened: contextlib.ExitStack) -> None:
        self.config, self.opened = config, opened
        self.source = ""  # directory of the model
        self.checkpoint: int | None = None  # its bytes
        self.waits_on_host = 0
        self.rate_warning = ""
        self.task: Task | None = None
        self.sampler: Sampler | None = None

    def checks(self) -> Iterator[Check]:
        yield self._run("run directory", self._directory)
        if warning := stages_warning(self.config.schedule):
            yield Check("schedule", "warning", warning)
        if self.config.trackers:
            yield self._run("trackers", self._trackers)
        yield self._run("task", self._task)  # before the model, which may take minutes to arrive
        if (task := self.task) is not None:
            yield self._run("verifier", lambda: _verifier(task))
        yield self._run("objective", self._objective)
        if warning := temperature_warning(self.config.sampler.temperature, self.config.objective.policy_temperature):
            yield Check("temperature", "warning", warning)
        yield (device := self._run("device", self._device))
        if device.status != "bad":
            yield self._run("model directory", self._model_directory)
        if self.source and self.config.sampler.engine == "auto":
            yield self._run("engine", self._engine)
        if self.source:
            yield (memory := self._run("memory", self._memory))
            if (checkpoint := self.checkpoint) is not None:
                yield self._run("disk", lambda: self._disk(checkpoint))
                yield self._run("host memory", lambda: _host_memory(checkpoint, self.waits_on_host))
            if self.rate_warning:
                yield Check("learning rate", "warning", self.rate_warning)
            if self.config.model.trains_adapters:
                yield self._run("adapters", self._adapters)
            yield self._run("tokenizer", self._tokenizer)
            if memory.status != "bad":
                yield self._run("model", self._load)
        if task is None or (sampler := self.sampler) is None:
            return
        yield self._run("prompts", lambda: self._prompts(task, sampler))
        if self.config.evaluation.suite:
            yield self._run("suites", self._suites)
        yield self._run("first prompt", lambda: _first_prompt(task, sampler))
        if self.config.objective.kl:
            yield self._run("reference", self._reference)
        if self.config.sampler.foreign.share:
            yield self._run("foreign policy", lambda: self._foreign(task))
        yield self._run("sampling", lambda: _sampling(task, sampler))
        yield self._run("learning", lambda: self._learning(task, sampler))

    def _run(self, name: str, check: Callable[[], tuple[Status, str]]) -> Check:
        try:
            return Check(name, *check())
        except OnlyInProgramError as error:  # of a run from Python: its program has the function, this one does not
            return Check(name, "warning", f"not checked: {error}")
        except StalewiseError as error:
            return Check(name, "bad", str(error))
        except Exception as error:  # an error of the model or a package, with which `train` would end too
            return Check(name, "bad", f"{type(error).__name__}: {' '.join(str(error).split())}")

    def _objective(self) -> tuple[Status, str]:
        import_packages("torch")  # alone: the objective and the device are checked before transformers is imported
        section, without_variance = self.config.objective, self.config.batch.without_variance
        settings = check_objective(section, without_variance)
        named = ", ".join(f"{name} = {value}" for name, value in settings.items())
        added = "; ".join(["", *describe_regularizers(section)])
        return "ok", f"{section.name}: {named or 'no parameters'}{added}"

    def _directory(self) -> tuple[Status, str]:
        check_identity(self.config)
        found, updates = versions(self.config.directory), self.config.schedule.updates
        state = f"continues at update {found[-1]}" if found else "a new run"
        if found and found[-1] >= updates:
            state = f"has made all {updates} updates"
        return "ok", f"{self.config.directory}: {state}"

    def _trackers(self) -> tuple[Status, str]:
        check_installed(self.config.trackers)
        return "ok", ", ".join(self.config.trackers)

    def _device(self) -> tuple[Status, str]:
        import torch

        model = self.config.model
        device = pick_device(model.device)
        if self.config.sampler.engine == "vllm":
            from stalewise.rollout.factory import check_engine_devices

            check_engine_devices(self.config.sampler, self.config.model, self.config.schedule)
        precision = str(pick_precision(model.precision, device)).removeprefix("torch.")
        if model.precision == "bfloat16-only" and not model.trains_adapters:
            advice = "small updates are lost to rounding: use bfloat16, which keeps float32 weights, where they fit"
            return "warning", f"weights in bfloat16 have 8 bits, and {advice}"
        if device.type == "cuda":
            name, (free, total) = torch.cuda.get_device_name(device), torch.cuda.mem_get_info(device)
            return "ok", f"{name}, {free / GIB:.1f} of {total / GIB:.1f} GiB free, {precision}"
        if precision == "bfloat16":
            return "warning", "bfloat16 on a CPU is slower by orders of magnitude: use float32 or auto"
        return "ok", f"CPU, {torch.get_num_threads()} threads, {precision}"

    def _model_directory(self) -> tuple[Status, str]:
        self.source = resolve_model(self.config.model.path, self.config.task.name)
        return "ok", self.source

    def _engine(self) -> tuple[Status, str]:
        import_packages()
        from stalewise.orchestrator.setup import engine_of_run
        from stalewise.rollout.factory import check_engine_devices

        sampler, model, schedule = self.config.sampler, self.config.model, self.config.schedule
        engine, why = engine_of_run(self.config.directory, sampler, model, schedule, self.source)
        self.config = self.config.model_copy(update={"sampler": sampler.model_copy(update={"engine": engine})})
        check_engine_devices(self.config.sampler, model, schedule)  # that of the device saw "auto"
        return "ok", f"auto: {engine}, {why}"

    def _memory(self) -> tuple[Status, str]:
        import_packages()
        from stalewise.orchestrator.setup import check_vllm_room, rate_warning
        from stalewise.planning.memory import check_memory, estimate, free_bytes

        needed = estimate(self.config, self.source, alone=True)
        if needed is None:
            return "warning", f"unknown: the config of {self.source} does not say how large the model is"
        self.checkpoint, self.waits_on_host = needed.checkpoint, needed.waits_on_host
        if not self.config.model.trains_adapters:
            self.rate_warning = rate_warning(self.config.optimizer.learning_rate, needed.shape.parameters)
        check_vllm_room(self.config, self.source)
        if warning := check_memory(self.config, self.source):  # raises where `train` refuses
            return "warning", warning
        return "ok", f"{needed}; {free_bytes(pick_device(self.config.model.device)) / GIB:.2f} GiB are free"

    def _disk(self, checkpoint: int) -> tuple[Status, str]:
        config, schedule = self.config, self.config.schedule.schedule()
        rollouts = schedule.updates * config.batch.reserved * config.batch.group_size
        checkpoints = config.checkpoints.keep + schedule.lag + 2  # for coming batches, and one being written
        needed = checkpoints * checkpoint + rollouts * config.sampler.max_new_tokens * TOKEN_BYTES
        directory = config.directory.absolute()
        existing = next(parent for parent in (directory, *directory.parents) if parent.exists())
        free = shutil.disk_usage(existing).free
        figures = (
            f"{rollouts:,} rollouts and {checkpoints} checkpoints need up to {needed / GIB:.2f} GiB in {config.runs}; "
            f"{free / GIB:.2f} GiB are free"
        )
        if needed > free:
            return "bad", f"{figures}: free some, or set `runs` to another directory"
        return "warning" if needed > 0.8 * free else "ok", figures

    def _adapters(self) -> tuple[Status, str]:
        from stalewise.trainer.lora import check_adapter, describe_targets, need_peft

        model = self.config.model
        if model.adapter:
            doubts: list[str] = []
            found = check_adapter(Path(model.adapter).expanduser(), self.source, doubts.append)
            continued = f"training continues with {model.adapter}, of rank {found.r}"
            return "warning" if doubts else "ok", "; ".join([continued, *doubts])
        need_peft()
        return "ok", f"new ones of rank {model.lora.rank} on {describe_targets(model.lora, self.source)}"

    def _tokenizer(self) -> tuple[Status, str]:
        from transformers import AutoTokenizer

        from stalewise.models.loading import load_tokenizer

        tokenizer = load_tokenizer(self.source)
        own: Any = AutoTokenizer.from_pretrained(self.source, trust_remote_code=False)
        note = "" if own.pad_token_id is not None else " (the tokenizer defines no pad token)"
        return "ok", f"ends with {tokenizer.eos_token!r}, pads with {tokenizer.pad_token!r}{note}"

    def _load(self) -> tuple[Status, str]:
        from stalewise.rollout.factory import make_sampler

        sampler = self.opened.enter_context(contextlib.closing(make_sampler(self.config)))
        sampler.load(Path(self.source))
        self.sampler = sampler
        return "ok", f"loads as a causal language model from {self.config.model.path}"

    def _task(self) -> tuple[Status, str]:
        config, schedule = self.config, self.config.schedule.schedule()
        self.task = task = config.make_task()
        self.opened.callback(close_task, task)
        batches = range(schedule.generation_batches)
        needed = sum(len(schedule.prompts_of(g, config.batch.reserved)) for g in batches)
        held_out = len(task.evaluation_prompts(config.evaluation.prompts))
        training = "endless" if task.size is None else f"{task.size:,}"
        figures = f"{task.name}: {training} training prompts, {needed:,} needed; {held_out} held out"
        if held_out == 0:
            return "bad", f"{figures}: nothing to evaluate on"
        few = repeats = ""
        if held_out < config.evaluation.prompts:
            few = f", though evaluation.prompts is {config.evaluation.prompts}"
        if task.size is not None and needed > task.size:
            repeats = f": each training prompt is used {needed / task.size:.1f} times"
        return "warning" if few or repeats else "ok", f"{figures}{few}{repeats}"

    def _prompts(self, task: Task, sampler: Sampler) -> tuple[Status, str]:
        from stalewise.rollout.factory import check_context
        from stalewise.rollout.generate import shown_prompts

        prompts = self.config.longest_prompts(task)
        _, encoded = shown_prompts(task, prompts, sampler.tokenizer)
        check_context(self.config.sampler, Path(self.source), task, prompts)  # as `train` does
        sampler.check_lengths(encoded)
        longest, new = max(map(len, encoded)), self.config.sampler.max_new_tokens
        return "ok", f"the longest has {longest} tokens, and {new} new ones fit after it"

    def _suites(self) -> tuple[Status, str]:
        with contextlib.closing(Suites(self.config, lambda text: None)) as suites:
            suites.check(Path(self.source))  # as `train` does
            made = [f"{suite.label}: {suites.responses(suite):,} responses" for suite in self.config.evaluation.suite]
        return "ok", ", ".join(made)

    def _foreign(self, task: Task) -> tuple[Status, str]:
        from stalewise.rollout.factory import check_second_policy

        foreign, group_size = self.config.sampler.foreign, self.config.batch.group_size
        check_second_policy(self.config.sampler.foreign, Path(self.source), task)
        makes = f"makes {foreign.rollouts_per_group(group_size)} of the {group_size} rollouts of a group"
        return "ok", f"{foreign.path} has the same tokens and {makes}"

    def _reference(self) -> tuple[Status, str]:
        from stalewise.trainer.reference import check_reference, reference_path

        section, model = self.config.objective, self.config.model
        check_reference(section, model, self.config.task.name, self.source)
        found = reference_path(section, model, self.config.task.name) or "version 0 of the run"
        return "ok", f"{found}; its log-probabilities are computed once a stage, 4 bytes a token"

    def _learning(self, task: Task, sampler: Sampler) -> tuple[Status, str]:
        """Decode and learn a few tokens of the lengths that the run allows, and compare with plain forward passes."""
        from stalewise.orchestrator.model_check import check_model

        warnings: list[str] = []
        learns = self.config.learner.parallel != "sharded"  # a shard alone computes nothing
        with self._first_checkpoint(task) as checkpoint:
            found = check_model(self.config, checkpoint, task, sampler, warnings.append, learns=learns)
        return "warning" if warnings else "ok", "; ".join(warnings) or found

    @contextlib.contextmanager
    def _first_checkpoint(self, task: Task) -> Iterator[Path]:
        """The directory of what would be version 0: the model, or a temporary copy of it with adapters."""
        from stalewise.orchestrator.setup import write_first_checkpoint

        if not self.config.model.trains_adapters:
            yield Path(self.source)
            return
        with scratch_folder("doctor") as directory:
            config = make_config(self.config.model_dump(mode="json") | {"runs": directory})
            write_first_checkpoint(config, self.source, task, lambda text: None)
            yield checkpoint_directory(config.directory, 0)


def _host_memory(checkpoint: int, waits: int) -> tuple[Status, str]:
    figures = f"the copy of a checkpoint that is being written takes {checkpoint / GIB:.2f} GiB of host memory"
    if waits:
        figures += f"; learner.offload takes {waits / GIB:.2f} GiB for trainer and sampler"
    free = psutil.virtual_memory().available
    if waits > free:
        advice = "choose a smaller model, moments of 8 bits or adapters, or a device with more memory"
        return "bad", f"{figures}, and {free / GIB:.2f} GiB are free: {advice}"
    if fits_beside(checkpoint + waits):
        return "ok", figures
    return "warning", f"{figures}, and too little is free: each checkpoint is written while the run waits for it"


def _verifier(task: Task) -> tuple[Status, str]:
    prompts = task.prompts(0, min(4, task.size or 4))
    gold = [gold_response(task, prompt) for prompt in prompts]
    rewards = task.verifier.score(prompts, gold)
    for prompt, response, reward in zip(prompts, gold, rewards, strict=True):
        what = f"the answer {response[:60]!r} to {prompt.prompt_id}"
        if reward.error:
            return "bad", f"it fails on {what}: {reward.error}"
        if reward.value != 1:
            # The user's own function may need more than the bare answer.
            status: Status = "warning" if isinstance(task.verifier, PythonVerifier | FunctionVerifier) else "bad"
            return status, f"it gives {reward.value:g} to {what}, its own gold answer"
    return "ok", f"gives 1 to the gold answers of {len(prompts)} prompts"


def check_objective(objective: ObjectiveSection, without_variance: str = "keep") -> Mapping[str, Any]:
    """The objective's parameters with defaults filled in; ConfigError for an unknown name or value."""
    from stalewise.objectives import get_objective

    try:
        found = get_objective(objective.name)
        settings = found.settings(objective.params)
    except ValueError as error:
        raise ConfigError(f"objective: {error}") from error
    _, _, digest = objective.name.partition("@")
    if digest and digest != fingerprint(found.token_loss).digest:
        raise ConfigError(
            f"objective: {found.name} was changed since the run began: restore it, or choose another name"
        )
    if without_variance == "skip" and not found.ignores_zero_advantages:
        raise ConfigError(
            f'batch.without_variance is "skip", which leaves the gradient as it is, but {found.name} also learns from '
            'tokens with advantage 0: use "keep" or "drop"'
        )
    return settings


def describe_regularizers(section: ObjectiveSection) -> Iterator[str]:
    """The terms that are added to the objective, in words."""
    if section.kl:
        what = "the initial policy" if section.reference == "initial" else section.reference
        yield f"{section.kl:g} · KL to {what} ({section.kl_estimator}) in the {section.kl_in}"
    if section.entropy_bonus:
        yield f"entropy bonus {section.entropy_bonus:g}"
    if section.reward_weights:
        yield "reward = " + " + ".join(f"{weight:g} · {name}" for name, weight in section.reward_weights.items())
    if section.overlong_tokens:
        yield f"up to {section.overlong_penalty:g} less within {section.overlong_tokens} tokens of the limit"


def gold_response(task: Task, prompt: Prompt) -> str:
    """The task's worked-out solution where it has one, else the gold answer."""
    solution = getattr(task, "solution", None)
    return prompt.answer if solution is None else solution(prompt)


def _first_prompt(task: Task, sampler: Sampler) -> tuple[Status, str]:
    """The first prompt as the policy sees it, with its special tokens; the middle of a long one is left out."""
    from stalewise.models.loading import describe_prompt
    from stalewise.rollout.generate import shown_prompts

    _, (ids,) = shown_prompts(task, task.prompts(0, 1), sampler.tokenizer)
    text = describe_prompt(ids, sampler.tokenizer)
    half = SHOWN // 2
    shown = text if len(text) <= SHOWN else f"{text[:half]} … {text[-half:]}"
    return "ok", f"{len(ids)} tokens: {shown}"


def _sampling(task: Task, sampler: Sampler) -> tuple[Status, str]:
    from stalewise.rollout.generate import shown_prompts

    _, encoded = shown_prompts(task, task.prompts(0, 1), sampler.tokenizer)
    with token_limit(sampler, 1):
        response = sampler.sample([Request(encoded[0], seed=0)])[0]
    return "ok", f"the first token of a response is {response.token_ids[0]}, {response.text!r}"
