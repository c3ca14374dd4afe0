"""What is compared: one set of settings for both sides, and the stalewise config that follows from it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stalewise.config import RunConfig, make_config


@dataclass(frozen=True)
class Settings:
    """Every number that both sides share; `our_settings` are stalewise's own, as dotted keys of its config."""

    device: str = "cpu"
    model: str = "auto"
    task: str = "arithmetic"
    prompts: int = 32
    group_size: int = 8
    max_new_tokens: int = 8
    updates: int = 64
    stages: int = 4
    extra_stages: int = 1  # beyond `updates`, with our µ, for a target that is reached late
    trl_mu: int = 4  # updates on one generation batch in TRL's usual loop
    learning_rate: float = 3e-4
    objective: str = "mu_grpo"
    seeds: tuple[int, ...] = (0, 1, 2)
    threads: int = 0
    evaluations: int = 8  # besides the one before the first update
    held_out_samples: int = 8
    all_samples: int = 0  # on training and held-out questions together; 0: not measured
    learner_warmup: int = 4
    learner_updates: int = 12
    trl_batches: tuple[int, ...] = (256,)  # rollouts per device and forward pass to try
    trl_checkpointing: int = 1  # 0: without it alone, though it is TRL's default
    pool: int = 2048
    sampler_repeats: int = 2
    generate_batches: tuple[int, ...] = (64, 256, 1024)
    generate_rows: int = 1024  # at least as many responses are timed at each batch size
    idle_updates: int = 10
    steady_updates: int = 0  # learner, memory and idle share are those of a run this long; 0: of `updates`
    matmul_size: int = 2048
    our_settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def cuda(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def rollouts(self) -> int:
        """Of one update."""
        return self.prompts * self.group_size

    @property
    def mu(self) -> int:
        """Updates on one generation batch in our schedule."""
        return self.updates // self.stages

    def updates_of(self, method: str) -> int:
        """Updates of a whole run; equal updates are compared, whatever comes after them."""
        return self.updates + (0 if method == "trl" else self.extra_stages * self.mu)

    def evaluated(self, method: str) -> list[int]:
        """After how many updates accuracy is measured."""
        return list(range(0, self.updates_of(method) + 1, self.evaluate_every))

    @property
    def evaluate_every(self) -> int:
        return self.updates // self.evaluations

    def check(self) -> None:
        """Refuse sizes that would leave the two sides with unequal work."""
        for name, divisor in (("stages", self.stages), ("evaluations", self.evaluations), ("trl_mu", self.trl_mu)):
            if self.updates % divisor:
                raise SystemExit(f"updates is {self.updates}, no multiple of {name} {divisor}")
        for name in ("learner_warmup", "learner_updates"):
            if getattr(self, name) % self.trl_mu:
                raise SystemExit(f"{name} is {getattr(self, name)}, no multiple of trl_mu {self.trl_mu}")
        for batch in self.trl_batches:
            if self.rollouts % batch:
                raise SystemExit(f"trl_batches holds {batch}, which does not divide the {self.rollouts} of an update")

    def identity(self) -> dict[str, Any]:
        """What must be equal for results to belong into one file: everything but which seeds were done so far."""
        record = dataclasses.asdict(self)
        del record["seeds"]
        return record


CPU = Settings(threads=os.cpu_count() or 1)

CUDA = Settings(
    device="cuda",
    model="smollm2",
    task="arithmetic-chat",
    max_new_tokens=64,
    updates=64,
    learning_rate=1e-5,
    held_out_samples=64,
    all_samples=8,
    learner_warmup=24,  # by then nearly every size of an update has come up once, and has its CUDA graphs
    learner_updates=24,
    trl_batches=(256,),
    pool=32_768,  # half of a stage of a run of `steady_updates`
    sampler_repeats=2,
    generate_batches=(8192, 16_384, 32_768),  # 1024 was half as fast as 4096, and that two thirds of 8192
    generate_rows=256,
    idle_updates=64,
    matmul_size=8192,
    steady_updates=1024,
)

# Seconds instead of minutes, to see that everything works; its figures mean nothing.
QUICK: dict[str, Any] = {
    "prompts": 4,
    "updates": 16,
    "seeds": (0,),
    "evaluations": 4,
    "held_out_samples": 2,
    "learner_warmup": 4,
    "learner_updates": 4,
    "trl_batches": (32,),
    "pool": 128,
    "sampler_repeats": 1,
    "generate_batches": (64,),
    "generate_rows": 64,
    "idle_updates": 4,
    "matmul_size": 512,
}


def from_record(record: Mapping[str, Any]) -> Settings:
    """The inverse of `dataclasses.asdict`, through JSON."""
    lists = {key: tuple(value) for key, value in record.items() if isinstance(value, list)}
    return Settings(**{**record, **lists})


def our_config(
    settings: Settings,
    work: Path,
    name: str,
    *,
    model: str = "",
    seed: int = 0,
    changes: Mapping[str, Mapping[str, Any]] | None = None,
) -> RunConfig:
    """The config of one stalewise run of the comparison; `changes` replace settings of sections."""
    record: dict[str, Any] = {
        "name": name,
        "runs": str(work / "runs"),
        "seed": seed,
        "model": {"path": model or settings.model, "device": settings.device, "threads": settings.threads},
        "task": {"name": settings.task},
        "schedule": {"kind": "staged", "updates": settings.updates, "stages": settings.stages},
        "batch": {"prompts": settings.prompts, "group_size": settings.group_size},
        "sampler": {"max_new_tokens": settings.max_new_tokens},
        "objective": {"name": settings.objective},
        "optimizer": {"learning_rate": settings.learning_rate},
        "evaluation": {"prompts": 1, "samples": 1},  # ours are measured afterwards, with the others' and in one way
        "checkpoints": {"keep": settings.updates + 1},
    }
    for section, values in (changes or {}).items():
        record[section] = {**record.get(section, {}), **values}
    for key, value in settings.our_settings.items():
        section, _, last = key.rpartition(".")
        (record.setdefault(section, {}) if section else record)[last] = value
    return make_config(record, source="benchmark")
