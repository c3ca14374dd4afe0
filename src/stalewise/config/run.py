"""The config of a run: read from TOML, checked for contradictions, written as resolved JSON. Imports no torch.

It also resolves the keywords of `stalewise.train`, which are the last names of settings.
"""

from __future__ import annotations

import contextlib
import difflib
import heapq
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from stalewise.config import sections
from stalewise.config.sections import (
    LEAST_VLLM_TEMPERATURE,
    GuardSection,
    PlanSection,
    SamplerSection,
    ScheduleSection,
    Section,
)
from stalewise.errors import ConfigError, nearest
from stalewise.store.atomic import read_json, write_json_atomic
from stalewise.tasks import TASKS, Task, make_evaluation_file, make_task
from stalewise.tasks.base import used_prompts
from stalewise.tasks.difficulty import COPY, ChosenPrompts, read_table
from stalewise.tasks.mixture import MixtureTask
from stalewise.types import Prompt

FORMAT = "stalewise.run/1"
RESPONSE_LIMIT = "sampler.max_new_tokens"  # the setting that limits responses, unless a suite has its own limit
HERE = "{run}"  # placeholder for the run directory, so that it may be moved
_FILES = ("path", "evaluation_path")  # settings of the model and options of the task that name files
NAME = r"^\w[\w.\-]*$"
_PATTERNS = {
    NAME: "it may have letters, digits, _, - and ., and begins with a letter, a digit or _",
    sections.URL: "it should be the address of a server, as in http://127.0.0.1:8000",
}

# The settings that docs/control.md recommends. They replace the defaults; a config's own settings win.
RECIPES: dict[str, dict[str, dict[str, Any]]] = {
    "none": {},
    "auto": {
        "objective": {"name": "mu_grpo"},
        "schedule": {"end": "spent"},
        "guard": {"action": "halve"},
        "plan": {"learning_rate": "planned-if-calibrated"},
        "optimizer": {"schedule": "cosine"},
    },
}
WARM_UP_SHARE = 16  # with a recipe, one update in so many belongs to the warm-up


def with_recipe(record: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in the settings of the config's recipe; a schedule that sets its own kind or stages is kept.

    A learning rate that decays by the recipe also warms up.
    """
    filled = dict(record)
    for table, settings in RECIPES.get(str(record.get("recipe", "none")), {}).items():
        given = filled.get(table, {})
        if not isinstance(given, Mapping):
            continue
        has_stages = given.get("kind", "staged") != "staged" or given.get("stages") is not None
        if not (table == "schedule" and has_stages):
            filled[table] = {**settings, **given}
    optimizer, schedule = filled.get("optimizer"), filled.get("schedule", {})
    if record.get("recipe") == "auto" and isinstance(optimizer, dict) and optimizer.get("schedule") == "cosine":
        updates = schedule.get("updates") if isinstance(schedule, Mapping) else None
        default = sections.ScheduleSection.model_fields["updates"].default
        optimizer.setdefault("warmup_updates", (updates if isinstance(updates, int) else default) // WARM_UP_SHARE)
    return filled


class RunConfig(Section):
    """Everything that determines a run."""

    name: str = Field(default="run", description="Directory under `runs`.", min_length=1, max_length=120, pattern=NAME)
    runs: str = Field(default="runs", description="Directory of all runs.")
    seed: int = Field(
        default=0, ge=0, le=2**63 - 1, description="Determines prompts, sampling and the order of batches."
    )
    recipe: Literal["none", "auto"] = Field(
        default="none", description="auto: the settings that docs/control.md recommends, where this file sets none."
    )
    trackers: list[Literal["tensorboard", "wandb", "trackio", "mlflow"]] = Field(
        default_factory=list, description="Trackers that also receive the metrics, through accelerate."
    )
    model: sections.ModelSection = Field(default_factory=sections.ModelSection)
    task: sections.TaskSection = Field(default_factory=sections.TaskSection)
    schedule: ScheduleSection = Field(default_factory=ScheduleSection)
    batch: sections.BatchSection = Field(default_factory=sections.BatchSection)
    sampler: SamplerSection = Field(default_factory=SamplerSection)
    objective: sections.ObjectiveSection = Field(default_factory=sections.ObjectiveSection)
    optimizer: sections.OptimizerSection = Field(default_factory=sections.OptimizerSection)
    learner: sections.LearnerSection = Field(default_factory=sections.LearnerSection)
    checkpoints: sections.CheckpointSection = Field(default_factory=sections.CheckpointSection)
    evaluation: sections.EvaluationSection = Field(default_factory=sections.EvaluationSection)
    guard: GuardSection = Field(default_factory=GuardSection)
    plan: PlanSection = Field(default_factory=PlanSection)
    workers: sections.WorkersSection = Field(default_factory=sections.WorkersSection)
    storage: sections.StorageSection = Field(default_factory=sections.StorageSection)

    @model_validator(mode="before")
    @classmethod
    def _fill_in_recipe(cls, record: Any) -> Any:
        return with_recipe(record) if isinstance(record, Mapping) else record

    def _contradictions(self) -> Iterator[str]:
        if self.optimizer.warmup_updates > self.schedule.updates:
            yield (
                f"optimizer.warmup_updates is {self.optimizer.warmup_updates}, "
                f"more than the {self.schedule.updates} updates of the run"
            )
        if self.schedule.kind == "pipelined" and self.guard.action in ("fresh", "both"):
            yield (
                f'guard.action is "{self.guard.action}", but after a rollback of a pipelined run the policies that '
                'generated ahead are gone: use "halve" or "stop"'
            )
        if self.batch.without_variance == "skip" and self.objective.regularizes_loss:
            yield (
                'batch.without_variance is "skip", which leaves the gradient as it is, but objective.kl in the loss '
                'and objective.entropy_bonus also act on groups of equal rewards: use "keep" or "drop"'
            )
        if self.objective.overlong_tokens > self.sampler.max_new_tokens:
            yield (
                f"objective.overlong_tokens is {self.objective.overlong_tokens}, more than sampler.max_new_tokens "
                f"{self.sampler.max_new_tokens}: every response would be penalised"
            )
        if self.objective.reference == "base" and not self.model.trains_adapters:
            yield 'objective.reference is "base", but no adapter is trained: use "initial"'
        least = LEAST_VLLM_TEMPERATURE if self.sampler.is_external else 0.0
        if low := [suite.label for suite in self.evaluation.suite if 0 < suite.temperature < least]:
            yield f"evaluation.suite {low[0]}: vLLM samples at no temperature below {least}, except 0 (greedy)"
        if self.learner.parallel == "sharded" and self.model.trains_adapters:
            yield 'learner.parallel is "sharded", but adapters need "replicated": change one of the two'
        if self.sampler.rollouts_per_shard < self.batch.group_size:
            yield (
                f"sampler.rollouts_per_shard is {self.sampler.rollouts_per_shard}, less than batch.group_size "
                f"{self.batch.group_size}: a group must not be split over two shards"
            )

    @property
    def directory(self) -> Path:
        """The run's directory."""
        return Path(self.runs) / self.name

    def make_task(self, table: Path | None = None) -> Task:
        """The task of this config. Its prompts are chosen by the table of pass rates, if any, or its copy `table`."""
        task = make_task(self.task.name, seed=self.seed, **self.task.options)
        if not self.task.difficulty:
            return task
        low, high = self.task.pass_rates
        pass_rates = read_table(table or self.difficulty_path, read_json)
        return ChosenPrompts(task, pass_rates, low=low, high=high, by=self.task.by_pass_rate, seed=self.seed)

    def prompts_task(self, suite: sections.SuiteSection | None = None) -> Task:
        """The task of the run or of a suite, for reading prompts and answers only.

        Its verifier is replaced: no function of the config is imported, and no judge or environment is started.
        """
        options = _only_prompts(self.task.name, self.task.options)
        task = self.task.model_copy(update={"options": options})
        config = self.model_copy(update={"task": task})
        if suite is None:
            return config.make_task()
        suite_options = _only_prompts(suite.task or self.task.name, suite.options)
        return config.make_suite(suite.model_copy(update={"options": suite_options}))

    @property
    def difficulty_path(self) -> Path:
        """The path of the table of pass rates; a run that has begun uses its own copy."""
        copy = self.directory / COPY
        return copy if copy.is_file() and (self.directory / "checkpoints").is_dir() else Path(self.task.difficulty)

    def make_suite(self, suite: sections.SuiteSection) -> Task:
        """The task of a suite: its file, its task, or the run's own task."""
        if suite.file:
            return make_evaluation_file(suite.file, **{**self.task.form, **suite.options})
        if suite.task:
            return make_task(suite.task, seed=self.seed, **suite.options)
        return make_task(self.task.name, seed=self.seed, **{**self.task.options, **suite.options})

    def longest_prompts(self, task: Task, most: int = 256) -> list[Prompt]:
        """The longest prompts, in characters, that the run will use in training and evaluation.

        A task without an end makes prompts on request: its first prompts stand for all.
        """
        count = self.schedule.updates * self.batch.reserved
        used = task.used_prompts(count, most) if isinstance(task, MixtureTask) else used_prompts(task, count, most)
        return longest_of([*used, *task.evaluation_prompts(self.evaluation.prompts)], most)

    @property
    def longest_response(self) -> tuple[str, int]:
        """The largest limit of responses, in training or in a suite: the setting and its tokens."""
        limits = [(limit_setting(suite), suite.max_new_tokens or 0) for suite in self.evaluation.suite]
        return max([(RESPONSE_LIMIT, self.sampler.max_new_tokens), *limits], key=lambda limit: limit[1])

    def identity(self) -> dict[str, Any]:
        """The settings that must stay the same when a run is resumed; see `identity_of`."""
        return identity_of(self.model_dump(mode="json"))


def limit_setting(suite: sections.SuiteSection) -> str:
    """The name, for messages, of the setting that limits the responses of a suite."""
    return RESPONSE_LIMIT if suite.max_new_tokens is None else f"max_new_tokens of the suite {suite.label!r}"


def longest_of(prompts: Sequence[Prompt], most: int = 256) -> list[Prompt]:
    """The prompts with the most characters."""
    return heapq.nlargest(most, prompts, key=_characters)


def _characters(prompt: Prompt) -> int:
    """The approximate length of a prompt: its text and the messages before it."""
    return len(prompt.text) + sum(len(prompt.metadata.get(part, "")) for part in ("system", "history", "prefill"))


def _only_prompts(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a task that its prompts depend on."""
    if name not in TASKS or name == "verifiers":
        raise ConfigError(f"the prompts of the task {name!r} are known only to the program that made the run")
    scoring = ("verifier", "verifier_options", "environment", "environment_options")
    kept = {key: value for key, value in options.items() if key not in scoring}
    if name == "mixture":
        tables: list[Mapping[str, Any]] = kept["tasks"]
        own = [{**table, "options": _only_prompts(table["name"], table.get("options", {}))} for table in tables]
        return {**kept, "tasks": own}
    return kept | ({"verifier": "exact"} if "verifier" in options else {})


def identity_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a resolved config that must stay the same when a run is resumed.

    These may change: directories, trackers, settings of recording and checking, engines (each rollout records its own),
    and the index of a GPU. The kind of device and the number of threads may not: they change rounding. `auto` adapts
    to the machine, and `environment.json` records the result.
    """
    record = with_moved_files(record, HERE)
    free = ("format", "name", "runs", "trackers", "plan", "workers", "storage")
    engines = ("engine", *get_args(SamplerSection.model_fields["engine"].annotation))  # and each engine's table
    return {
        **_without(record, free),
        "model": _without(_with_kind(record.get("model", {}), "device"), ("check",)),
        "schedule": _with_kind(record.get("schedule", {}), "generator_device"),
        "task": _without(record["task"], ("max_unscored",)),
        "evaluation": _without(record.get("evaluation", {}), ("suite",)),
        "sampler": _without(record.get("sampler", {}), engines),
        "learner": _without(record.get("learner", {}), ("record_tokens", "parallel", "keep_activations", "offload")),
    }


def with_moved_files(record: Mapping[str, Any], directory: str) -> dict[str, Any]:
    """A resolved config in which files in the run directory, as `stalewise.train` writes them, are in `directory`.

    >>> record = {"runs": "runs", "name": "a", "model": {"path": "runs/a/model-1"}, "task": {"options": {"path": "b"}}}
    >>> with_moved_files(record, "copied")["model"], with_moved_files(record, "copied")["task"]
    ({'path': 'copied/model-1'}, {'options': {'path': 'b'}})
    """
    before = str(Path(str(record.get("runs", "runs"))) / str(record.get("name", "run"))) + "/"
    written = (f"{before}data/", f"{before}model-")  # not checkpoints, from which another run may have started

    def moved(table: Mapping[str, Any]) -> dict[str, Any]:
        inside = (key for key in _FILES if isinstance(table.get(key), str) and table[key].startswith(written))
        return {**table, **{key: f"{directory}/{table[key].removeprefix(before)}" for key in inside}}

    task = record.get("task", {})
    return {
        **record,
        "model": moved(record.get("model", {})),
        "task": {**task, "options": moved(task.get("options", {}))},
    }


def _without(record: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in keys}


def _with_kind(record: Mapping[str, Any], key: str) -> dict[str, Any]:
    """A table with the kind of its device, without the index: `cuda:1` becomes `cuda`."""
    device = record.get(key)
    return {**record, key: device.partition(":")[0]} if isinstance(device, str) else dict(record)


def is_section(field: FieldInfo) -> bool:
    """Whether a setting is a table."""
    return isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)


def load_config(path: str | Path, overrides: Mapping[str, Any] | None = None) -> RunConfig:
    """Read a TOML file; `overrides` maps dotted keys to values, as `--set optimizer.learning_rate=1e-5` gives them."""
    return make_config(read_toml(path, overrides), source=str(path))


def read_toml(path: str | Path, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Read a TOML file without checking its settings, and apply overrides; an unreadable file is a ConfigError."""
    try:
        record = tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        if Path(path).suffix != ".toml":
            missing = "does not exist: name a TOML file (`stalewise init` writes one) or a run directory"
            raise ConfigError(f"{path} {missing}") from None
        raise ConfigError(f"{path} does not exist; `stalewise init {path}` writes a commented one") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    for key, value in (overrides or {}).items():
        set_dotted(record, key, value)
    return record


def stages_warning(schedule: ScheduleSection) -> str:
    """A warning if rounding gives fewer stages than `schedule.stages`; otherwise an empty string.

    >>> stages_warning(ScheduleSection(updates=100, stages=30)).partition(":")[0]
    '100 updates make 25 stages of up to 4 updates, not schedule.stages = 30'
    """
    made, stages = schedule.schedule().generation_batches, schedule.stages
    if stages is None or made == stages:
        return ""
    return (
        f"{schedule.updates} updates make {made} stages of up to {-(-schedule.updates // stages)} updates, not "
        f"schedule.stages = {stages}: updates / stages is rounded up; choose stages that divide the updates"
    )


def temperature_warning(sampled: float, trained: float) -> str:
    """A warning if the policy is trained at another temperature than it is sampled at; otherwise an empty string.

    >>> temperature_warning(1.2, 1.0).partition(":")[0]
    'rollouts are sampled at temperature 1.2 and the policy is trained at 1'
    """
    if sampled == trained:
        return ""
    return (
        f"rollouts are sampled at temperature {sampled:g} and the policy is trained at {trained:g}: ratios differ from "
        "1 even on fresh rollouts, which can ruin a run (docs/engines.md): set objective.policy_temperature = "
        f"{sampled:g}, as TRL and verl do"
    )


def held_out_warning(task: str, held_out: int, asked: int) -> str:
    """A warning if a task holds out fewer prompts than `evaluation.prompts`; otherwise an empty string.

    >>> held_out_warning("arithmetic-chat", 14, 128).partition(":")[0]
    'evaluation.prompts is 128, but arithmetic-chat holds out 14'
    """
    if held_out >= asked:
        return ""
    return (
        f"evaluation.prompts is {asked}, but {task} holds out {held_out}: accuracy is measured on those; hold out "
        "more, or lower evaluation.prompts"
    )


def make_config(record: Mapping[str, Any], *, source: str = "config") -> RunConfig:
    """Make a config of a nested mapping; a ConfigError lists every problem with its key, value and remedy."""
    if key := _with_nul(record):
        raise ConfigError(f"{source}: {key} has a NUL character, which no path and no text may have: remove it")
    try:
        return RunConfig.model_validate(dict(record))
    except ValidationError as error:
        raise ConfigError(f"{source}: " + "; ".join(map(_explain, error.errors()))) from None


def _with_nul(value: Any, key: str = "") -> str:
    """The dotted key of the first text with a NUL character; empty: there is none."""
    if isinstance(value, str):
        return key if "\0" in value else ""
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    names = [(name, item) for name, item in items]
    if any("\0" in str(name) for name, _ in names):
        return f"{key or 'a key'}"
    return next(filter(None, (_with_nul(item, f"{key}.{name}".lstrip(".")) for name, item in names)), "")


def write_resolved(config: RunConfig, path: str | Path) -> None:
    """Write the config with all defaults filled in. JSON, since TOML has no null."""
    write_json_atomic(path, {"format": FORMAT, **config.model_dump(mode="json")}, sealed=True)


def parse_override(text: str) -> tuple[str, Any]:
    """Split `key=value`; the value is TOML, or a bare string.

    >>> parse_override("optimizer.learning_rate=1e-5")
    ('optimizer.learning_rate', 1e-05)
    >>> parse_override("objective.name=p3o")
    ('objective.name', 'p3o')
    """
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"--set {text}: expected key=value, as in optimizer.learning_rate=1e-5")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value


def set_dotted(record: dict[str, Any], key: str, value: Any) -> None:
    """Set a value in nested tables by its dotted key."""
    *sections, last = key.split(".")
    for section in sections:
        record = record.setdefault(section, {})
        if not isinstance(record, dict):
            raise ConfigError(f"{key}: {section} is a value, not a table")
    record[last] = value


def _settings_called(name: str) -> list[str]:
    """The settings that a name may mean: in another table, by its name in TRL, or by an abbreviation."""
    words = [name, *re.findall(r"[\w.]+", (OF_TRL | ABBREVIATIONS).get(name, ""))]
    found: list[str] = [COMMON[word] for word in words if word in COMMON]
    for word in words if not found else ():
        called = [key for key in setting_names() if word in (key, key.rpartition(".")[2])]
        depth = min((key.count(".") for key in called), default=0)
        found += [key for key in called if key.count(".") == depth]
    return sorted(set(found)) if len(set(found)) <= 4 else []


def _explain(problem: Any) -> str:
    key = ".".join(map(str, problem["loc"])) or "the whole"
    if problem["type"] == "extra_forbidden":
        model: Any = RunConfig
        for section in [name for name in problem["loc"][:-1] if isinstance(name, str)]:  # not positions in a list
            model = model.model_fields[section].annotation
            model = next(iter(get_args(model)), model)
        name = str(problem["loc"][-1])
        is_slip = bool(difflib.get_close_matches(name, model.model_fields, n=1, cutoff=0.85))  # `url` of `urls`
        meant = "" if is_slip else " or ".join(_settings_called(name))
        hint = f"did you mean {meant}?" if meant else nearest(name, model.model_fields)
        if key == f"objective.{name}" and hint.startswith("known: "):
            hint += f"; a parameter of the objective is objective.params.{name}"
        return f"{key} is not a setting; {hint}"
    message: str = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "value_error":
        return f"{key}: {message}" if problem["loc"] else message
    message = _PATTERNS.get(str(problem.get("ctx", {}).get("pattern")), message)
    return f"{key} is {problem['input']!r}: {message[0].lower()}{message[1:]}{_as_in(problem)}"


def _as_in(problem: Any) -> str:
    """A hint how to write a value as the list, table or number that the setting takes; empty: unknown."""
    text = problem["input"]
    if problem["type"] == "list_type" and isinstance(text, str):
        if text == "all-linear":  # PEFT's word
            return "; leave it out: an empty list names all linear layers but the output layer"
        return f", as in {json.dumps([text])}"
    if problem["type"] == "dict_type" and problem["loc"][-1] == "reward_weights":
        return ', as in {"correct": 1.0, "format": 0.1}, by the names of the reward parts'
    if problem["type"] in ("float_type", "int_type") and isinstance(text, str):
        with contextlib.suppress(ValueError):
            float(text)
            return ", without quotes"
    return ""


# Names of several settings, of which one is nearly always meant.
COMMON = {"learning_rate": "optimizer.learning_rate"}
# Names in TRL, and the names of the same settings here.
OF_TRL = {
    "args": "settings as keywords",
    "train_dataset": "dataset",
    "eval_strategy": 'settings={"evaluation.every": …}',
    "eval_steps": 'settings={"evaluation.every": …}',
    "save_steps": 'settings={"checkpoints.every": …}',
    "save_total_limit": 'settings={"checkpoints.keep": …}',
    "reward_funcs": "reward",
    "processing_class": "tokenizer",
    "max_steps": "updates",
    "num_train_epochs": "updates",
    "num_generations": "group_size",
    "max_completion_length": "max_new_tokens",
    "steps_per_generation": 'updates_per_generation, with kind="synchronous", or stages',
    "num_iterations": "stages (no rollout is used twice: fewer stages have more of them each)",
    "generation_batch_size": 'settings={"batch.prompts": …} times group_size',
    "per_device_train_batch_size": 'settings={"batch.prompts": …} (prompts per update) times group_size',
    "gradient_accumulation_steps": "tokens_per_micro_batch",
    "loss_type": "objective",
    "epsilon": 'params={"clip_low": …, "clip_high": …} for the clip, settings={"optimizer.epsilon": …} for AdamW',
    "beta": "kl",
    "entropy_coef": "entropy_bonus",
    "scale_rewards": 'advantage="group", "batch" or "mean"',
    "epsilon_high": 'params={"clip_high": …}',
    "lr_scheduler_type": 'optimizer={"schedule": …}',
    "warmup_steps": "warmup_updates",
    "output_dir": "runs and name",
    "run_name": "name",
    "report_to": "trackers",
    "use_vllm": 'engine="vllm"',
    "peft_config": 'lora={"rank": …}',
    "bf16": 'precision="bfloat16"',
    "mask_truncated_completions": 'truncated="mask"',
    "callbacks": "callback",
}
# Usual abbreviations and the symbols of the documentation, which spelling suggestions would not find.
ABBREVIATIONS = {
    "mu": 'stages, or updates_per_generation with kind="synchronous"',
    "eta": "learning_rate",
    "lr": "learning_rate",
    "batch_size": 'settings={"batch.prompts": …} (prompts per update) times group_size',
    "max_tokens": "max_new_tokens",
    "kl_coef": "kl",
}


def settings_record(keywords: Mapping[str, Any], dotted: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Nested settings from keywords and dotted names; an unknown or ambiguous keyword is a ConfigError.

    A keyword that is the name of a table takes a dict. `objective` and `task` also take a name.

    >>> settings_record({"updates": 8, "learning_rate": 1e-5}, {"checkpoints.every": 4})
    {'schedule': {'updates': 8}, 'optimizer': {'learning_rate': 1e-05}, 'checkpoints': {'every': 4}}
    """
    record: dict[str, Any] = {}
    for name, value in keywords.items():
        key = _key_of(name, value)
        values = {f"{key}.{each}": item for each, item in value.items()} if isinstance(value, Mapping) else {}
        for each, item in (values if key in _tables() else {key: value}).items():
            set_dotted(record, each, item)
    for key, value in (dotted or {}).items():
        if not isinstance(key, str):
            raise ConfigError(f"settings has the key {key!r}: expected a name such as 'checkpoints.every'")
        set_dotted(record, key, value)
    return record


def _key_of(name: str, value: Any) -> str:
    """The dotted key that a keyword means."""
    if name in ("objective", "task", "schedule") and isinstance(value, str):
        return f"{name}.kind" if name == "schedule" else f"{name}.name"
    if name in COMMON:
        return COMMON[name]
    if known := (OF_TRL | ABBREVIATIONS).get(name):
        raise ConfigError(f"{name} is not a setting here: use {known}")
    matching = [key for key in [*_tables(), *setting_names()] if key.rpartition(".")[2] == name]
    if not matching:
        names = {key.rpartition(".")[2] for key in [*_tables(), *setting_names()]}
        raise ConfigError(f"{name} is not a setting; {nearest(name, names)}")
    depth = min(key.count(".") for key in matching)
    least_nested = [key for key in matching if key.count(".") == depth]
    if len(least_nested) > 1:
        choices = " or ".join(f'settings={{"{key}": …}}' for key in least_nested)
        raise ConfigError(f"{name} is the name of several settings: write {choices}")
    if least_nested[0] in _tables() and not isinstance(value, Mapping):
        raise ConfigError(f"{name} is a table of settings: pass a dict, not {value!r:.60}")
    return least_nested[0]


def _tables() -> list[str]:
    return [key for key, is_table in _keys(RunConfig) if is_table]


def setting_names() -> list[str]:
    """The dotted keys of all settings that are not tables."""
    return [key for key, is_table in _keys(RunConfig) if not is_table]


def setting_values(key: str) -> list[str]:
    """Values to offer for a setting, as `--set` takes them: its choices, or its default, a word or a number."""
    section: Any = RunConfig
    *tables, name = key.split(".")
    for table in tables:
        section = section.model_fields[table].annotation
    field: FieldInfo = section.model_fields[name]
    if get_origin(field.annotation) is Literal:
        return [str(choice) for choice in get_args(field.annotation)]
    if field.annotation is bool:
        return ["true", "false"]
    default = field.get_default(call_default_factory=True)
    return [str(default)] if isinstance(default, str | int | float | Path) and str(default) else []


def _keys(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, bool]]:
    """The dotted keys of all settings and tables."""
    for name, field in model.model_fields.items():
        table: Any = field.annotation
        yield f"{prefix}{name}", is_section(field)
        if is_section(field):
            yield from _keys(table, f"{prefix}{name}.")
