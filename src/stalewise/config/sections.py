"""The tables of a config. `stalewise init` writes the fields' descriptions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import PurePath
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from stalewise.staleness.schedule import Schedule, pipelined, staged, synchronous

URL = r"^https?://[^/\s]+(/\S*)?$"
Url = Annotated[str, StringConstraints(pattern=URL)]
# Larger values are typing errors: they multiply into sizes that no machine holds, or into loops that never end.
MOST_UPDATES = 1_000_000
MOST_PROMPTS = 1_000_000
MOST_RESPONSES = 65_536  # to one prompt
MOST_TOKENS = 1 << 20  # in a response
MOST_PER_UPDATE = 1 << 24  # responses
MOST = 2**31 - 1  # for settings where a large number means "no limit"

BelowOne = Annotated[float, Field(ge=0, lt=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]

# vLLM silently raises a lower temperature to this one; the recorded temperature must be the real one.
LEAST_VLLM_TEMPERATURE = 0.01
# Arguments of `vllm.LLM` that follow from other settings, or that the log-probabilities depend on.
SET_BY_US = {"model", "tokenizer", "dtype", "logprobs_mode", "generation_config", "enable_sleep_mode", "seed"}
SET_BY_US |= {"gpu_memory_utilization", "max_model_len", "tensor_parallel_size", "data_parallel_size"}
# Parts of the names of client arguments that hold secrets, which a run directory must not keep.
_SECRETS = ("secret", "password", "token", "key", "credential", "connection_string")

# Options of tasks over rows that say how a row becomes a prompt and is scored.
_FORM = ("problem_field", "answer_field", "id_field", "template", "chat", "system", "prefill", "few_shot")
_FORM += ("chat_template_kwargs", "verifier", "verifier_options")


class Section(BaseModel):
    """A table of the TOML file."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def _contradictions(self) -> Iterator[str]:
        """Problems of settings that are valid one by one but contradict each other; a ValueError reports the first."""
        yield from ()

    @model_validator(mode="after")
    def _no_contradiction(self) -> Self:
        for problem in self._contradictions():
            raise ValueError(problem)
        return self


def _default(section: BaseModel, name: str) -> Any:
    return type(section).model_fields[name].default


class LoraSection(Section):
    """Low-rank adapters, trained instead of all weights; docs/models.md."""

    rank: int = Field(
        default=0, ge=0, le=65_536, description="Rank of the adapters; 0: no adapters, all weights are trained."
    )
    alpha: float = Field(default=32.0, gt=0, description="Scale of the adapter: its product is times alpha / rank.")
    targets: list[str] = Field(
        default_factory=list,
        description="Names of the matrices to adapt, e.g. q_proj; empty: all but embeddings and output layer.",
    )

    def _contradictions(self) -> Iterator[str]:
        if self.rank == 0 and (self.targets or self.alpha != type(self).model_fields["alpha"].default):
            yield "alpha and targets have no meaning without a rank: set rank above 0 or remove them"


class ModelSection(Section):
    """The policy to train."""

    path: str = Field(
        default="auto", description="Directory, GGUF file, hub name, smollm2 or embedded policy; auto: the task's."
    )
    adapter: str = Field(default="", description="Directory of a PEFT adapter of the model to continue training from.")
    precision: Literal["auto", "float32", "bfloat16", "bfloat16-only"] = Field(
        default="auto",
        description="Precision of forward and backward passes; bfloat16-only: also of the weights; auto: by device.",
    )
    device: str = Field(default="auto", description="Device: auto, cpu, cuda or cuda:N.")
    threads: int = Field(
        default=0, ge=0, le=4096, description="CPU threads; 0: torch decides. Bit-identical runs need the same number."
    )
    check: Literal["refuse", "warn", "off"] = Field(
        default="refuse",
        description="If log-probabilities differ from those of a plain forward pass: refuse to train, warn, or no "
        "check (off).",
    )
    lora: LoraSection = Field(default_factory=LoraSection)

    def _contradictions(self) -> Iterator[str]:
        if self.adapter and self.lora.rank:
            yield "adapter brings its own rank, alpha and targets: remove the table lora"

    @property
    def trains_adapters(self) -> bool:
        """Whether adapters are trained instead of all weights."""
        return bool(self.lora.rank or self.adapter)


class TaskSection(Section):
    """The task to train on."""

    name: str = Field(
        default="arithmetic", description="arithmetic[-steps|-chat], jsonl, hf, gym, verifiers, mixture; docs/tasks.md."
    )
    options: dict[str, Any] = Field(default_factory=dict, description="Options of the task; docs/tasks.md lists them.")
    difficulty: str = Field(
        default="", description="Table of pass rates (`stalewise difficulty`) that chooses prompts; empty: all prompts."
    )
    pass_rates: tuple[Fraction, Fraction] = Field(
        default=(0.1, 0.9),
        strict=False,
        description="With difficulty: train on prompts with a pass rate in this range.",
    )
    by_pass_rate: Literal["range", "sample"] = Field(
        default="range",
        description="With difficulty: all prompts in the range (range), or more of those near one half (sample).",
    )
    max_unscored: float = Field(
        default=0.2, ge=0, le=1, description="Stop when more than this fraction of responses could not be scored."
    )

    def _contradictions(self) -> Iterator[str]:
        changed = {name for name in ("pass_rates", "by_pass_rate") if getattr(self, name) != _default(self, name)}
        if changed and not self.difficulty:
            yield f"{min(changed)} has no meaning without difficulty: name a table or remove it"
        if self.pass_rates[0] >= self.pass_rates[1]:
            yield f"pass_rates is {list(self.pass_rates)}: expected two numbers from 0 to 1, the first one smaller"

    @property
    def form(self) -> dict[str, Any]:
        """Options of a task over rows that say how a row becomes a prompt; evaluation files are read with them."""
        return {key: self.options[key] for key in _FORM if self.name in ("jsonl", "hf") and key in self.options}


class BatchSection(Section):
    """How many rollouts one update learns from."""

    prompts: int = Field(default=32, ge=1, le=MOST_PROMPTS, description="Prompts per update.")
    group_size: int = Field(default=8, ge=2, le=MOST_RESPONSES, description="Rollouts per prompt.")
    without_variance: Literal["keep", "skip", "drop", "refill"] = Field(
        default="keep",
        description="Groups whose rewards are all equal: keep; skip their forward pass (same gradient); drop; or "
        "refill with other prompts.",
    )
    refill_limit: float | None = Field(
        default=None, gt=1, le=1000, description="For refill: at most this multiple of the prompts; default: 3."
    )

    def _contradictions(self) -> Iterator[str]:
        if self.refill_limit is not None and self.without_variance != "refill":
            yield 'refill_limit has no meaning without without_variance = "refill": remove it'
        if (responses := self.reserved * self.group_size) > MOST_PER_UPDATE:
            yield (
                f"an update would have {responses:,} responses (prompts × group_size, with refill_limit): "
                f"{MOST_PER_UPDATE:,} are the most"
            )

    @property
    def reserved(self) -> int:
        """Prompts that an update may need, including those that replace groups without variance."""
        factor = (self.refill_limit or 3.0) if self.without_variance == "refill" else 1.0
        return math.ceil(self.prompts * factor)


class VllmSection(Section):
    """The engine vllm: vLLM in its own processes on this machine."""

    gpu_memory_utilization: float = Field(
        default=0.5, gt=0, le=1, description="Fraction of each GPU's memory for vLLM; the trainer needs the rest."
    )
    max_model_len: int | None = Field(
        default=None, ge=2, le=MOST, description="Longest prompt + response; default: the model's."
    )
    tensor_parallel: int = Field(default=1, ge=1, le=4096, description="GPUs per copy of the policy.")
    copies: int = Field(default=0, ge=0, le=4096, description="Copies of the policy; 0: as many as fit on the GPUs.")
    while_learning: Literal["sleep", "drop", "close", "stay"] = Field(
        default="sleep",
        description="vLLM while the trainer works: sleep (weights in host memory), drop (no weights), close (ends the "
        "process), stay (keeps its GPU memory).",
    )
    options: dict[str, Any] = Field(default_factory=dict, description="Further arguments of vllm.LLM.")

    def _contradictions(self) -> Iterator[str]:
        if taken := sorted(SET_BY_US & self.options.keys()):
            yield f"options.{taken[0]} follows from other settings: remove it"


class ServerSection(Section):
    """The engine server: OpenAI-compatible servers that return token ids and log-probabilities."""

    urls: list[Url] = Field(
        default_factory=list, description="Server URLs, e.g. http://localhost:8000; requests are spread over them."
    )
    model: str = Field(default="", description="Name of the model on the servers; empty: the only one they serve.")
    precision: Literal["float32", "bfloat16", "float16"] = Field(
        default="bfloat16", description="Precision of the servers, for comparing them with a checkpoint."
    )
    reload: Literal["vllm", "sglang", "command", "none"] = Field(
        default="vllm",
        description="How servers get new weights: vLLM's API, SGLang's API, a command, or without stalewise (none).",
    )
    command: list[str] = Field(
        default_factory=list, description="For reload = command: program and arguments, with {checkpoint} and {url}."
    )
    paths: dict[str, str] = Field(
        default_factory=dict, description="Local path prefixes and the paths of the same directories on the servers."
    )
    concurrency: int = Field(default=64, ge=1, le=65_536, description="Maximum concurrent requests per server.")
    timeout_s: float = Field(default=600.0, gt=0, description="Time limit of one request in seconds.")
    retries: int = Field(default=4, ge=0, le=1000, description="Retries of a failed request, with growing delays.")
    wait_s: float = Field(default=300.0, ge=0, description="Seconds to wait for a server that went away during a run.")
    api_key_env: str = Field(default="", description="Environment variable with the API key, if the servers need one.")

    def _contradictions(self) -> Iterator[str]:
        if (self.reload == "command") != bool(self.command):
            yield 'command and reload = "command" go together: set both or neither'
        if self.reload == "none" and self.precision != "float32":
            # Rounding hides which checkpoint is served. Only the answers before and after a reload tell, and here
            # stalewise reloads nothing.
            yield 'reload = "none" needs servers in float32: choose another reload'
        if len(set(self.urls)) < len(self.urls):
            yield "urls names a server twice: raise concurrency instead"


class ForeignSection(Section):
    """A second policy that samples a fraction of the rollouts; docs/engines.md."""

    path: str = Field(default="", description="Second policy, as in model.path; same tokenizer; empty: none.")
    share: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Fraction of each group that the second policy samples: at least one rollout, never all.",
    )

    def _contradictions(self) -> Iterator[str]:
        if bool(self.path) != bool(self.share):
            yield "path and a share above 0 go together: set both or neither"

    def rollouts_per_group(self, group_size: int) -> int:
        """How many rollouts of a group it samples."""
        return min(max(round(self.share * group_size), 1), group_size - 1) if self.share else 0


class SamplerSection(Section):
    """How rollouts are sampled."""

    engine: Literal["hf", "vllm", "server", "auto"] = Field(
        default="hf", description="Engine: hf (in this process), vllm, server, or auto: the faster of hf and vllm."
    )
    temperature: float = Field(
        default=1.0, gt=0, description="Sampling temperature; for training see objective.policy_temperature."
    )
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="Nucleus sampling: keep tokens of this total probability."
    )
    top_k: int = Field(default=0, ge=0, le=MOST, description="Sample from this many most probable tokens; 0: from all.")
    weights: Literal["exact", "fp8", "int8"] = Field(
        default="exact", description="Weights to sample with; fp8 and int8 quantize the linear layers."
    )
    max_new_tokens: int = Field(
        default=64, ge=1, le=MOST_TOKENS, description="Longest response in tokens; longer ones are truncated."
    )
    rollouts_per_shard: int = Field(
        default=2048, ge=1, le=MOST_PER_UPDATE, description="Rollouts decoded together and committed, in whole groups."
    )
    foreign: ForeignSection = Field(default_factory=ForeignSection)
    vllm: VllmSection = Field(default_factory=VllmSection)
    server: ServerSection = Field(default_factory=ServerSection)

    def _contradictions(self) -> Iterator[str]:
        if self.engine == "server" and not self.server.urls:
            yield 'engine = "server" needs server.urls, as in ["http://localhost:8000"]'
        if self.is_external and self.temperature < LEAST_VLLM_TEMPERATURE:
            yield f"vLLM samples at no temperature below {LEAST_VLLM_TEMPERATURE}: raise it, or engine = hf"
        if self.is_external and self.weights != "exact":
            yield f'weights = "{self.weights}" needs engine = "hf": {self.engine} loads its own weights'
        if self.is_external and self.foreign.share:
            yield f'foreign needs engine = "hf": {self.engine} has one policy at a time'

    @property
    def is_external(self) -> bool:
        """Whether the engine has processes and limits of its own; `auto` may be one that has not."""
        return self.engine in ("vllm", "server")


# Descriptions and completion use this list, since importing the objectives would import torch.
OBJECTIVE_NAMES = "grpo, dapo, dr_grpo, gspo, cispo, tis, decoupled_ppo, topr, m2po, mu_grpo, p3o, p3o_two_anchor"


class ObjectiveSection(Section):
    """The loss that an update minimises."""

    name: str = Field(default="mu_grpo", description=f"Objective: {OBJECTIVE_NAMES}; docs/objectives.md.")
    params: dict[str, Any] = Field(default_factory=dict, description="Parameters of the objective; others: defaults.")
    advantage: Literal["auto", "group", "mean", "leave_one_out", "batch"] = Field(
        default="auto", description="Baseline and scale of advantages; auto: what the objective prescribes."
    )
    policy_temperature: float = Field(
        default=1.0,
        gt=0,
        description="Temperature of the policy in training; TRL and verl use the sampling temperature.",
    )
    truncated: Literal["keep", "zero", "mask"] = Field(
        default="keep", description="Truncated responses: train as usual, set advantage to 0, or leave out of the loss."
    )
    proximal_every: int = Field(
        default=8, ge=1, description="Updates between snapshots of the proximal policy, for objectives that have one."
    )
    kl: float = Field(
        default=0.0,
        ge=0,
        description="Coefficient of the KL divergence from the reference policy; 0: none. docs/regularizers.md",
    )
    kl_estimator: Literal["k1", "k2", "k3"] = Field(
        default="k3", description="Estimator of the KL divergence; k1 suits kl_in = reward."
    )
    kl_in: Literal["loss", "reward"] = Field(
        default="loss", description="Where the KL counts: per token in the loss, or per response in the reward."
    )
    reference: str = Field(
        default="initial", description="initial (version 0), base (the model without its adapter), or another model."
    )
    entropy_bonus: float = Field(default=0.0, ge=0, description="Coefficient of the entropy bonus; 0: none.")
    reward_weights: dict[str, float] = Field(
        default_factory=dict,
        description="Weights of the reward's parts, by name: the reward becomes their weighted sum; empty: it stays.",
    )
    overlong_tokens: int = Field(
        default=0, ge=0, description="Penalise responses that end within this many tokens of the limit; 0: none."
    )
    overlong_penalty: float = Field(default=1.0, gt=0, description="Penalty at the limit, in units of reward.")

    def _contradictions(self) -> Iterator[str]:
        if not self.kl and (self.reference != "initial" or self.kl_in != "loss" or self.kl_estimator != "k3"):
            yield "reference, kl_in and kl_estimator have no meaning without kl: set kl above 0 or remove them"
        if self.overlong_penalty != 1.0 and not self.overlong_tokens:
            yield "overlong_penalty has no meaning without overlong_tokens: set them or remove it"
        if self.reward_weights and not any(self.reward_weights.values()):
            yield "reward_weights are all 0, so every reward would be 0: give one part a weight"
        if not self.reference.strip():
            yield 'reference is empty: write "initial", "base" or the directory or name of a model'

    @property
    def regularizes_loss(self) -> bool:
        """Whether the loss has terms that do not depend on advantages."""
        return bool(self.entropy_bonus or (self.kl and self.kl_in == "loss"))


class OptimizerSection(Section):
    """The optimizer, AdamW."""

    learning_rate: float = Field(default=1e-4, gt=0, description="Peak learning rate.")
    schedule: Literal["constant", "cosine", "linear"] = Field(default="constant", description="Decay after warm-up.")
    warmup_updates: int = Field(default=0, ge=0, description="Updates of linear warm-up.")
    betas: tuple[BelowOne, BelowOne] = Field(default=(0.9, 0.999), description="AdamW's betas.", strict=False)
    epsilon: float = Field(default=1e-8, gt=0, description="AdamW's ε.")
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW's weight decay.")
    max_grad_norm: float = Field(default=1.0, gt=0, description="Gradients with a larger norm are scaled down to it.")
    moments: Literal["float32", "bfloat16", "int8"] = Field(
        default="float32", description="Precision of AdamW's moments; fewer bits save memory; docs/models.md."
    )
    step_control: Literal["none", "vcpo"] = Field(
        default="none", description="Scale of each step; vcpo: √(effective sample size of its sequences)."
    )


class LearnerSection(Section):
    """How the trainer uses the machine."""

    tokens_per_micro_batch: int = Field(
        default=16384, ge=1, le=MOST, description="Tokens per forward and backward pass."
    )
    gradient_checkpointing: bool = Field(default=False, description="Recompute activations instead of keeping them.")
    compile: Literal["auto", "always", "layers", "graphs", "never"] = Field(
        default="auto",
        description="On a GPU, compile layers and record CUDA graphs (always), only one of the two (layers, graphs), "
        "or neither (never); auto: what pays off in a run of this length.",
    )
    keep_activations: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="Fraction of activations that compiled layers keep for the backward pass; lower saves memory, "
        "costs time.",
    )
    parallel: Literal["auto", "replicated", "sharded"] = Field(
        default="auto",
        description="Each rank holds all weights (replicated) or a part (sharded); auto: by device memory.",
    )
    offload: Literal["auto", "always", "never"] = Field(
        default="auto",
        description="On a GPU, keep the trainer in host memory while generating, and the sampler's weights off the GPU "
        "while training; auto: if both do not fit.",
    )
    record_tokens: bool = Field(
        default=True, description="Record each token's log-probability at its update, for `stalewise serve`."
    )


class CheckpointSection(Section):
    """Which checkpoints are kept."""

    every: int = Field(default=32, ge=1, description="Updates between checkpoints; every stage also ends with one.")
    keep: int = Field(default=2, ge=1, description="Newest checkpoints to keep; the final one is always kept.")


class SuiteSection(Section):
    """One [[evaluation.suite]]: a held-out set with its own sampling; docs/evaluation.md."""

    name: str = Field(default="", description="Name in tables; default: the task, or the file without its extension.")
    task: str = Field(default="", description="A task, as in task.name; default: the run's own.")
    file: str = Field(default="", description="JSONL file to evaluate on instead; same fields as the run's rows.")
    options: dict[str, Any] = Field(default_factory=dict, description="Options of the task or the file.")
    prompts: int = Field(
        default=0, ge=0, le=MOST_PROMPTS, description="Prompts; 0: a whole file, or evaluation.prompts of a task."
    )
    samples: int | None = Field(
        default=None, ge=1, le=MOST_RESPONSES, description="Responses per prompt; default: 4, or 1 if greedy."
    )
    temperature: float = Field(default=1.0, ge=0, description="Sampling temperature; 0: greedy.")
    top_p: float = Field(default=1.0, gt=0, le=1, description="Nucleus sampling.")
    max_new_tokens: int | None = Field(
        default=None, ge=1, le=MOST_TOKENS, description="Longest response in tokens; default: sampler.max_new_tokens."
    )
    every: int = Field(default=0, ge=0, description="Updates between evaluations; 0: only at the start and the end.")

    def _contradictions(self) -> Iterator[str]:
        if self.task and self.file:
            yield "task and file both choose the prompts: give one of them"
        if self.temperature == 0 and (self.samples or 1) > 1:
            yield f"samples is {self.samples}, but greedy responses (temperature = 0) are all the same: remove one"
        if self.temperature == 0 and self.top_p < 1:
            yield "top_p has no meaning at temperature 0: remove it"

    @property
    def label(self) -> str:
        """The suite's name in tables."""
        return self.name or self.task or (PurePath(self.file).stem if self.file else "own task")

    @property
    def responses(self) -> int:
        """Responses per prompt."""
        return self.samples or (1 if self.temperature == 0 else 4)


class EvaluationSection(Section):
    """How held-out accuracy is measured."""

    every: int = Field(default=0, ge=0, description="Updates between evaluations; 0: only at the start and the end.")
    prompts: int = Field(default=128, ge=1, le=MOST_PROMPTS, description="Held-out prompts.")
    samples: int = Field(
        default=4, ge=1, le=MOST_RESPONSES, description="Sampled responses per prompt, at temperature 1."
    )
    suite: list[SuiteSection] = Field(
        default_factory=list[SuiteSection], description="Further held-out sets, one table [[evaluation.suite]] each."
    )

    def _contradictions(self) -> Iterator[str]:
        labels = [suite.label for suite in self.suite]
        if twice := next((label for label in labels if labels.count(label) > 1), ""):
            yield f"two suites are called {twice!r}: give each a name"


class WorkersSection(Section):
    """Generation by several processes or machines; docs/workers.md."""

    learner: Literal["shares", "waits"] = Field(
        default="shares", description="While workers generate, `train` also generates (shares) or only waits (waits)."
    )
    lost_after_s: float = Field(
        default=60.0, ge=0.5, description="Seconds without a heartbeat until other workers take its shards."
    )


class StorageSection(Section):
    """Remote storage of rollouts and checkpoints, for machines without a shared file system; docs/workers.md."""

    url: str = Field(default="", description="URL that fsspec can open, e.g. s3://bucket/run; empty: none.")
    options: dict[str, Any] = Field(
        default_factory=dict,
        description='Arguments of the storage client, e.g. { endpoint_url = "http://localhost:9000" }; no secrets.',
    )

    def _contradictions(self) -> Iterator[str]:
        if self.url and "://" not in self.url:
            yield f"url is {self.url!r}, no URL: write file:///absolute/path for a directory"
        if self.options and not self.url:
            yield "options have no meaning without a url: set url or remove them"
        if named := [name for name in self.options if any(part in name.lower() for part in _SECRETS)]:
            yield (
                f"options.{named[0]} would be written to the run directory: pass secrets in the environment, "
                "e.g. AWS_ACCESS_KEY_ID, or in the client's own files"
            )


class ScheduleSection(Section):
    """When rollouts are generated."""

    kind: Literal["staged", "synchronous", "pipelined"] = Field(
        default="staged", description="A few large stages, a new batch every few updates, or generation ahead."
    )
    updates: int = Field(default=128, ge=1, le=MOST_UPDATES, description="Optimizer updates of the whole run.")
    stages: int | None = Field(default=None, ge=1, description="Number of stages of a staged run; default: 4.")
    updates_per_generation: int | None = Field(
        default=None,
        ge=1,
        le=MOST_UPDATES,
        description="Updates per generation batch (µ) of a synchronous or pipelined run; default: 4.",
    )
    lag: int | None = Field(
        default=None,
        ge=1,
        le=8,
        description="Generation batches by which generation runs ahead of training; default: 1.",
    )
    generator_device: str | None = Field(
        default=None, description="Device that generates in a pipelined run; default: model.device."
    )
    end: Literal["count", "spent"] = Field(
        default="count",
        description="A stage ends after its planned updates (count), or when its rollouts are too stale (spent).",
    )
    spent_ess: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="For end = spent: a stage ends below this fraction of its first effective sample size; "
        "default: 0.9.",
    )

    def _contradictions(self) -> Iterator[str]:
        allowed = {
            "staged": {"stages"},
            "synchronous": {"updates_per_generation"},
            "pipelined": {"updates_per_generation", "lag", "generator_device"},
        }[self.kind]
        for name in ("stages", "updates_per_generation", "lag", "generator_device"):
            if name not in allowed and getattr(self, name) is not None:
                yield f"{name} has no meaning in a {self.kind} schedule: remove it or change kind"
        if self.end == "spent" and (self.kind != "staged" or self.stages is not None):
            yield 'end = "spent" determines the stages of a staged run: remove stages, set kind = "staged"'
        if self.end == "count" and self.spent_ess is not None:
            yield 'spent_ess has no meaning without end = "spent": remove it'
        batches = -(-self.updates // (self.updates_per_generation or 4))
        if self.kind == "pipelined" and (self.lag or 1) >= batches:
            yield (
                f"lag is {self.lag or 1}, but {self.updates} updates have only {batches} generation batches: the first "
                "policy would make all of them; lower lag or updates_per_generation, or raise updates"
            )
        if self.stages is not None and self.stages > self.updates:
            yield f"stages is {self.stages} but there are only {self.updates} updates"

    def schedule(self) -> Schedule:
        """The schedule of these settings, as far as it is known before the run."""
        if self.kind == "staged":
            return staged(self.updates, self.stages if self.stages is not None else min(4, self.updates))
        per_generation = self.updates_per_generation or 4
        if self.kind == "synchronous":
            return synchronous(self.updates, per_generation)
        return pipelined(self.updates, per_generation, self.lag or 1)


class GuardSection(Section):
    """The reaction to a collapse of the run; docs/control.md explains the detection."""

    action: Literal["off", "stop", "halve", "fresh", "both"] = Field(
        default="off",
        description="On collapse: off; stop; or roll back to the last good checkpoint and halve the learning rate "
        "(halve), regenerate the rollouts (fresh), or both.",
    )
    rollbacks: int = Field(default=4, ge=1, description="Maximum number of rollbacks of a run.")
    fraction: float = Field(
        default=0.9,
        gt=0,
        lt=1,
        description="A policy is bad if its reward or accuracy is significantly below this fraction of the best.",
    )
    window: int = Field(default=8, ge=1, description="Consecutive updates on bad policies that count as a collapse.")


class PlanSection(Section):
    """How a calibration limits the learning rate."""

    calibration: str = Field(default="", description="File; empty: the matching one in `calibrations` under `runs`.")
    learning_rate: Literal["given", "planned", "planned-if-calibrated"] = Field(
        default="given", description="optimizer.learning_rate as given, or the largest that the calibration calls safe."
    )
    risk: float = Field(default=0.05, gt=0, le=0.5, description="Largest probability of breaking each constraint.")
    strict: bool = Field(default=False, description="Refuse to train if the plan is not safe.")
