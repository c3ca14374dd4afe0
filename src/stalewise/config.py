"""One model of a run. TOML in, resolved JSON beside the run out; an unknown key is an error with the nearest name.

Every field is a sentence. Contradictions are found here, before anything is loaded. Imports no torch.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from stalewise.control import GuardSection, PlanSection, ScheduleSection, with_recipe
from stalewise.errors import ConfigError, nearest
from stalewise.files import write_json_atomic
from stalewise.sections import SamplerSection, Section, StorageSection, WorkersSection

FORMAT = "stalewise.run/1"


Share = Annotated[float, Field(ge=0, lt=1)]


class LoraSection(Section):
    """Low-rank adapters, trained instead of all weights; docs/models.md."""

    rank: int = Field(default=0, ge=0, description="Rank of the adapters; 0: there are none, all weights are trained.")
    alpha: float = Field(default=32.0, gt=0, description="An adapter's product is scaled by alpha / rank.")
    targets: list[str] = Field(
        default_factory=list,
        description="Last names of the linear layers that get one, as in q_proj; empty: all but the output layer.",
    )

    @model_validator(mode="after")
    def _no_contradiction(self) -> Self:
        if self.rank == 0 and (self.targets or self.alpha != type(self).model_fields["alpha"].default):
            raise ValueError("alpha and targets have no meaning without a rank: set rank above 0 or remove them")
        return self


class ModelSection(Section):
    """Which policy to train."""

    path: str = Field(
        default="auto",
        description="Hugging Face directory, GGUF file, hub name, smollm2, or embedded policy; auto: the task's own.",
    )
    adapter: str = Field(
        default="", description="Directory of a PEFT adapter for that model, to start from and to go on training."
    )
    precision: Literal["auto", "float32", "bfloat16", "bfloat16-only"] = Field(
        default="auto",
        description="Forward and backward passes; weights stay float32, but for bfloat16-only. "
        "auto: bfloat16 on GPUs that have it.",
    )
    device: str = Field(default="auto", description="auto, cpu, cuda or cuda:N.")
    threads: int = Field(
        default=0, ge=0, description="CPU threads; 0: torch decides. Runs are equal to the bit at equal threads only."
    )
    lora: LoraSection = Field(default_factory=LoraSection)

    @model_validator(mode="after")
    def _no_contradiction(self) -> Self:
        if self.adapter and self.lora.rank:
            raise ValueError("adapter brings its own rank, alpha and targets: remove the table lora")
        return self

    @property
    def trains_adapters(self) -> bool:
        """Whether adapters are trained, and not all weights."""
        return bool(self.lora.rank or self.adapter)


class TaskSection(Section):
    """What to train it on."""

    name: str = Field(
        default="arithmetic", description="arithmetic, arithmetic-steps, arithmetic-chat, jsonl, hf or gym."
    )
    options: dict[str, Any] = Field(default_factory=dict, description="Options of that task; docs/tasks.md lists them.")


class BatchSection(Section):
    """How many rollouts one update learns from."""

    prompts: int = Field(default=32, ge=1, description="Prompts per update.")
    group_size: int = Field(default=8, ge=2, description="Rollouts per prompt.")


class ObjectiveSection(Section):
    """What an update minimises."""

    name: str = Field(default="mu_grpo", description="A name of docs/objectives.md.")
    params: dict[str, Any] = Field(default_factory=dict, description="Its parameters; defaults where none is given.")
    advantage: Literal["auto", "group", "mean", "leave_one_out"] = Field(
        default="auto", description="Baseline and scale of advantages; auto: as the objective prescribes."
    )
    truncated: Literal["keep", "zero", "mask"] = Field(
        default="keep", description="What becomes of truncated responses."
    )
    proximal_every: int = Field(
        default=8, ge=1, description="Updates between snapshots of the proximal policy, for objectives that have one."
    )


class OptimizerSection(Section):
    """How an update is taken."""

    learning_rate: float = Field(default=1e-4, gt=0, description="Peak learning rate of AdamW.")
    schedule: Literal["constant", "cosine", "linear"] = Field(default="constant", description="After warm-up.")
    warmup_updates: int = Field(default=0, ge=0, description="Updates of linear warm-up.")
    betas: tuple[Share, Share] = Field(default=(0.9, 0.999), description="AdamW's averages.", strict=False)
    epsilon: float = Field(default=1e-8, gt=0, description="AdamW's ε.")
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW's decay.")
    max_grad_norm: float = Field(default=1.0, gt=0, description="Gradients with a larger norm are scaled down to it.")
    step_control: Literal["none", "vcpo"] = Field(
        default="none", description="vcpo: scale each step by the root of the effective sample size of its responses."
    )


class LearnerSection(Section):
    """How the machine is used for learning."""

    tokens_per_micro_batch: int = Field(default=16384, ge=1, description="Tokens that pass through the model at once.")
    gradient_checkpointing: bool = Field(default=False, description="Recompute activations instead of keeping them.")
    compile: Literal["auto", "always", "layers", "graphs", "never"] = Field(
        default="auto",
        description="Compile layers and record passes as CUDA graphs (layers, graphs: one of the two); auto: on a GPU, "
        "the one where the run is long enough to gain, the other where there is room.",
    )
    keep_activations: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="Share of what compiled layers would keep for the backward pass that they may; less saves memory.",
    )
    parallel: Literal["auto", "replicated", "sharded"] = Field(
        default="auto",
        description="With several ranks: all weights on each, or a part of each weight; auto: by what a device holds.",
    )
    record_tokens: bool = Field(
        default=True, description="Write down each token's log-probability at its update; the browser shows ratios."
    )


class CheckpointSection(Section):
    """What is kept of the policy."""

    every: int = Field(default=32, ge=1, description="Updates between checkpoints; every stage also ends with one.")
    keep: int = Field(default=2, ge=1, description="Newest checkpoints to keep; the final one is always among them.")


class EvaluationSection(Section):
    """How held-out accuracy is measured."""

    every: int = Field(
        default=0, ge=0, description="Updates between evaluations; 0: only before the first and after the last."
    )
    prompts: int = Field(default=128, ge=1, description="Held-out prompts.")
    samples: int = Field(default=4, ge=1, description="Sampled responses per prompt, at temperature 1.")


class RunConfig(Section):
    """Everything that determines a run."""

    name: str = Field(
        default="run", description="Directory of the run under `runs`.", min_length=1, pattern=r"^\w[\w.\-]*$"
    )
    runs: str = Field(default="runs", description="Where run directories lie.")
    seed: int = Field(default=0, ge=0, description="Prompts, sampling and order of batches follow from it.")
    recipe: Literal["none", "auto"] = Field(
        default="none", description="auto: what docs/control.md recommends, for all settings that are not said here."
    )
    trackers: list[Literal["tensorboard", "wandb", "trackio", "mlflow"]] = Field(
        default_factory=list, description="Where metrics also go, through accelerate."
    )
    model: ModelSection = Field(default_factory=ModelSection)
    task: TaskSection = Field(default_factory=TaskSection)
    schedule: ScheduleSection = Field(default_factory=ScheduleSection)
    batch: BatchSection = Field(default_factory=BatchSection)
    sampler: SamplerSection = Field(default_factory=SamplerSection)
    objective: ObjectiveSection = Field(default_factory=ObjectiveSection)
    optimizer: OptimizerSection = Field(default_factory=OptimizerSection)
    learner: LearnerSection = Field(default_factory=LearnerSection)
    checkpoints: CheckpointSection = Field(default_factory=CheckpointSection)
    evaluation: EvaluationSection = Field(default_factory=EvaluationSection)
    guard: GuardSection = Field(default_factory=GuardSection)
    plan: PlanSection = Field(default_factory=PlanSection)
    workers: WorkersSection = Field(default_factory=WorkersSection)
    storage: StorageSection = Field(default_factory=StorageSection)

    @model_validator(mode="before")
    @classmethod
    def _fill_in_recipe(cls, record: Any) -> Any:
        return with_recipe(record) if isinstance(record, Mapping) else record

    @model_validator(mode="after")
    def _no_contradiction(self) -> Self:
        if self.optimizer.warmup_updates > self.schedule.updates:
            raise ValueError(
                f"optimizer.warmup_updates is {self.optimizer.warmup_updates}, "
                f"more than the {self.schedule.updates} updates of the run"
            )
        if self.schedule.kind == "pipelined" and self.guard.action in ("fresh", "both"):
            raise ValueError(
                f'guard.action is "{self.guard.action}", but the policies that made rollouts ahead are gone when a '
                'pipelined run is taken back: use "halve" or "stop"'
            )
        if self.learner.parallel == "sharded" and self.model.trains_adapters:
            raise ValueError(
                'learner.parallel is "sharded", but adapters are trained on replicas of the model: say "replicated", '
                "or train all weights"
            )
        if self.sampler.rollouts_per_shard % self.batch.group_size:
            raise ValueError(
                f"sampler.rollouts_per_shard is {self.sampler.rollouts_per_shard}, no multiple of "
                f"batch.group_size {self.batch.group_size}: a group must not be split over two shards"
            )
        return self

    @property
    def directory(self) -> Path:
        """Where the run lives."""
        return Path(self.runs) / self.name

    def identity(self) -> dict[str, Any]:
        """What must be equal for a run to go on: all but where it lies, who watches, what is noted, what samples where,
        on how many devices it learns.

        Each rollout records the engine that made it.
        """
        return identity_of(self.model_dump(mode="json"))


def identity_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a resolved config that must stay the same while a run goes on."""
    elsewhere = ("format", "name", "runs", "trackers", "plan", "workers", "storage")
    kept = {key: value for key, value in record.items() if key not in elsewhere}
    engine = ("engine", *get_args(SamplerSection.model_fields["engine"].annotation))  # and each engine's own table
    kept["sampler"] = {key: value for key, value in record.get("sampler", {}).items() if key not in engine}
    free = ("record_tokens", "parallel", "keep_activations")
    kept["learner"] = {key: value for key, value in record.get("learner", {}).items() if key not in free}
    return kept


def is_section(field: FieldInfo) -> bool:
    """Whether a setting is a table of its own."""
    return isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)


def load_config(path: str | Path, overrides: Mapping[str, Any] | None = None) -> RunConfig:
    """Read a TOML file; `overrides` are dotted keys with TOML values, as `--set optimizer.learning_rate=1e-5` gives."""
    return make_config(read_toml(path, overrides), source=str(path))


def read_toml(path: str | Path, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Read a TOML file as it is, with overrides put in; what cannot be read is a ConfigError."""
    try:
        record = tomllib.loads(Path(path).read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; `stalewise init {path}` writes a commented one") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    for key, value in (overrides or {}).items():
        set_dotted(record, key, value)
    return record


def make_config(record: Mapping[str, Any], *, source: str = "config") -> RunConfig:
    """Check a nested mapping; every problem is a ConfigError that names key, value and what to do."""
    try:
        return RunConfig.model_validate(dict(record))
    except ValidationError as error:
        problems = [_explain(problem) for problem in error.errors()]
        raise ConfigError(f"{source}: " + "; ".join(problems)) from None


def write_resolved(config: RunConfig, path: str | Path) -> None:
    """Write the config with every default filled in. JSON, since TOML has no null."""
    write_json_atomic(path, {"format": FORMAT, **config.model_dump(mode="json")})


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
    """Put a value into nested tables, as `--set optimizer.learning_rate=1e-5` does."""
    *sections, last = key.split(".")
    for section in sections:
        record = record.setdefault(section, {})
        if not isinstance(record, dict):
            raise ConfigError(f"{key}: {section} is a value, not a table")
    record[last] = value


def _explain(problem: Any) -> str:
    place = ".".join(str(part) for part in problem["loc"]) or "the whole"
    if problem["type"] == "extra_forbidden":
        *sections, key = problem["loc"]
        return f"{place} is no setting; {nearest(str(key), _fields_of(sections))}"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "value_error":
        return f"{place}: {message}" if problem["loc"] else message
    return f"{place} is {problem['input']!r}: {message[0].lower()}{message[1:]}"


def _fields_of(sections: list[str]) -> list[str]:
    model: type[BaseModel] = RunConfig
    for section in sections:
        annotation = model.model_fields[str(section)].annotation
        assert isinstance(annotation, type) and issubclass(annotation, BaseModel)
        model = annotation
    return list(model.model_fields)
