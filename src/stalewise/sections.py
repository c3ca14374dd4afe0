"""What a table of the config is, and the tables of sampling: one for every engine, and one for each engine's own."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

Url = Annotated[str, StringConstraints(pattern=r"^https?://[^/\s]+(/\S*)?$")]

# vLLM raises a lower temperature to this one without a word in its answer; ours must be the one that is recorded.
LEAST_VLLM_TEMPERATURE = 0.01
# Arguments of `vllm.LLM` that follow from other settings, or that the log-probabilities depend on.
SET_BY_US = frozenset(
    {
        *("model", "tokenizer", "dtype", "logprobs_mode", "generation_config", "enable_sleep_mode", "seed"),
        *("gpu_memory_utilization", "max_model_len", "tensor_parallel_size", "data_parallel_size"),
    }
)


class Section(BaseModel):
    """A table of the TOML file."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class VllmSection(Section):
    """The engine vllm: vLLM in processes of its own on this machine."""

    gpu_memory_utilization: float = Field(
        default=0.5, gt=0, le=1, description="Share of each GPU's memory that vLLM takes; the learner needs the rest."
    )
    max_model_len: int | None = Field(
        default=None, ge=2, description="Longest prompt and response together; the model's context unless said."
    )
    tensor_parallel: int = Field(default=1, ge=1, description="GPUs that one copy of the policy is spread over.")
    copies: int = Field(
        default=0, ge=0, description="Copies of the policy that share the requests; 0: as many as the GPUs hold."
    )
    while_learning: Literal["sleep", "close", "stay"] = Field(
        default="sleep",
        description="Its GPU memory while the learner works: sleep gives it back, close ends vLLM, stay keeps it.",
    )
    options: dict[str, Any] = Field(default_factory=dict, description="Further arguments of vllm.LLM.")

    @model_validator(mode="after")
    def _no_contradiction(self) -> Self:
        if taken := sorted(SET_BY_US & self.options.keys()):
            raise ValueError(f"options.{taken[0]} follows from other settings: remove it")
        return self


class ServerSection(Section):
    """The engine server: OpenAI-compatible servers that return token ids and log-probabilities."""

    urls: list[Url] = Field(
        default_factory=list, description="Where the servers are, as in http://localhost:8000; requests are shared out."
    )
    model: str = Field(default="", description="The model's name there; empty: the only one that the server has.")
    precision: Literal["float32", "bfloat16", "float16"] = Field(
        default="bfloat16", description="What the servers compute in: how closely they must agree with a checkpoint."
    )
    reload: Literal["vllm", "sglang", "command", "none"] = Field(
        default="vllm",
        description="How new weights get there: by vLLM's or SGLang's own request, by a command, or by someone else.",
    )
    command: list[str] = Field(
        default_factory=list,
        description="For reload = command: program and arguments; {checkpoint} and {url} are filled in.",
    )
    paths: dict[str, str] = Field(
        default_factory=dict,
        description="Beginnings of paths here and what they are on the servers, where checkpoints lie elsewhere there.",
    )
    concurrency: int = Field(default=64, ge=1, description="Requests that each server has at a time, at most.")
    timeout_s: float = Field(default=600.0, gt=0, description="Seconds that one request may take.")
    retries: int = Field(default=4, ge=0, description="Times that a failed request is tried again, ever more slowly.")
    wait_s: float = Field(
        default=300.0, ge=0, description="Seconds to wait for a server that was there and went away in the middle."
    )
    api_key_env: str = Field(default="", description="Environment variable that holds the key, where servers want one.")

    @model_validator(mode="after")
    def _no_contradiction(self) -> Self:
        if (self.reload == "command") != bool(self.command):
            raise ValueError('command and reload = "command" go together: say both or neither')
        if self.reload == "none" and self.precision != "float32":
            # Rounding hides which version of a run it is; only an engine's own answers before and after a reload tell.
            raise ValueError('reload = "none" needs servers in float32: say how else new weights get there')
        if len(set(self.urls)) < len(self.urls):
            raise ValueError("urls names a server twice: raise concurrency instead")
        return self


class ForeignSection(Section):
    """Another policy that makes a share of the rollouts; docs/engines.md."""

    path: str = Field(
        default="",
        description="A model as in model.path, of the same tokenizer; empty: none.",
    )
    share: float = Field(
        default=0.0, ge=0, lt=1, description="Share of every group that it samples: at least one rollout, never all."
    )

    @model_validator(mode="after")
    def _no_contradiction(self) -> Self:
        if bool(self.path) != bool(self.share):
            raise ValueError("path and a share above 0 go together: say both or neither")
        return self

    def places(self, group_size: int) -> int:
        """How many rollouts of a group it makes.

        >>> [ForeignSection(path="other", share=share).places(8) for share in (0.01, 0.5, 0.99)]
        [1, 4, 7]
        """
        return min(max(round(self.share * group_size), 1), group_size - 1) if self.share else 0


class SamplerSection(Section):
    """How rollouts are sampled."""

    engine: Literal["hf", "vllm", "server"] = Field(
        default="hf", description="What samples: transformers in this process, vLLM, or a server; docs/engines.md."
    )
    temperature: float = Field(default=1.0, gt=0, description="Temperature of sampling; the learner's policy has 1.")
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="Sample from the smallest set of tokens with this probability."
    )
    top_k: int = Field(default=0, ge=0, description="Sample from this many most probable tokens; 0: from all.")
    weights: Literal["exact", "fp8", "int8"] = Field(
        default="exact",
        description="Rollouts are sampled from these weights; fp8 and int8 round the matrices of the linear layers.",
    )
    max_new_tokens: int = Field(default=64, ge=1, description="A response is cut (truncated) at this many tokens.")
    rollouts_per_shard: int = Field(
        default=2048, ge=1, description="Rollouts that are decoded together and committed at once."
    )
    foreign: ForeignSection = Field(default_factory=ForeignSection)
    vllm: VllmSection = Field(default_factory=VllmSection)
    server: ServerSection = Field(default_factory=ServerSection)

    @model_validator(mode="after")
    def _no_contradiction(self) -> Self:
        if self.engine == "server" and not self.server.urls:
            raise ValueError('engine = "server" needs server.urls, as in ["http://localhost:8000"]')
        if self.engine != "hf" and self.temperature < LEAST_VLLM_TEMPERATURE:
            raise ValueError(f"vLLM samples at no temperature below {LEAST_VLLM_TEMPERATURE}: raise it, or engine = hf")
        if self.engine != "hf" and self.weights != "exact":
            raise ValueError(
                f'weights = "{self.weights}" needs engine = "hf": {self.engine} has the weights it is given'
            )
        if self.engine != "hf" and self.foreign.share:
            raise ValueError(f'foreign needs engine = "hf": {self.engine} has one policy at a time')
        return self


class WorkersSection(Section):
    """Generation by many processes or machines; docs/workers.md."""

    learner: Literal["shares", "waits"] = Field(
        default="shares",
        description="What `train` does while a batch is made: its share of it, or nothing but wait for the workers.",
    )
    lost_after_s: float = Field(
        default=60.0,
        ge=0.5,
        description="Seconds without a sign of life after which a worker's shards are made by another one.",
    )


# Words in the names of a client's arguments that hold secrets, which a run directory must not keep.
_SECRETS = ("secret", "password", "token", "key", "credential", "connection_string")


class StorageSection(Section):
    """Where rollouts and checkpoints also go, for machines that share no file system; docs/workers.md."""

    url: str = Field(
        default="", description="Any URL that fsspec knows, as in s3://bucket/run; empty: the run directory is all."
    )
    options: dict[str, Any] = Field(
        default_factory=dict,
        description='Arguments of fsspec\'s client, as in { endpoint_url = "http://localhost:9000" }; no secrets.',
    )

    @model_validator(mode="after")
    def _no_contradiction(self) -> Self:
        if self.url and "://" not in self.url:
            raise ValueError(f"url is {self.url!r}, no URL: say file:///absolute/path for a directory")
        if self.options and not self.url:
            raise ValueError("options have no meaning without a url: remove them or say it")
        if named := [name for name in self.options if any(word in name.lower() for word in _SECRETS)]:
            raise ValueError(
                f"options.{named[0]} would be written down in the run directory: give secrets by the environment, as "
                "in AWS_ACCESS_KEY_ID, or by the client's own files"
            )
        return self
