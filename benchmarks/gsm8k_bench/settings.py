"""What is compared: the arms, the numbers that all of them share, and the stalewise config that follows from them.

Imports no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# A number at the end is µ, the updates of a stage; without one a staged arm has `Settings.stage_updates`. `_x2`: twice
# the updates at the arm's own learning rate. They take a third of the time of TRL's run with half of them.
OURS = (
    *("mu_grpo", "mu_grpo_64", "mu_grpo_128", "p3o", "p3o_64", "auto"),
    *("synchronous", "grpo_tight", "random_reward", "mu_grpo_x2", "auto_x2"),
)
THEIRS = ("trl_vllm", "trl_generate")
ARMS = (*OURS, *THEIRS)
REFERENCE = "trl_vllm"
TWICE = "_x2"
CONTROLS = ("grpo_tight", "random_reward")  # in the table; never the best arm

FILES = ("model", "train", "test", "also_test")
SYSTEM = "Please reason step by step, and put your final answer within \\boxed{}."


@dataclass(frozen=True)
class Settings:
    """Every number that the arms share. What differs from the defaults is in the name of a job."""

    model: str = "qwen2.5-coder-0.5b-instruct"
    train: str = "gsm8k_train.jsonl"
    test: str = "gsm8k_test.jsonl"
    also_test: str = ""  # a second test set: all of it, greedy, the first and the last policy alone
    system: str = SYSTEM
    chat: bool = True
    verifier: str = "math"
    verifier_workers: int = 0  # processes that score; 0: the library's own number
    device: str = "auto"
    threads: int = 0
    updates: int = 128
    prompts: int = 16
    group_size: int = 8
    max_new_tokens: int = 400
    warmup: int = 8
    stage_updates: int = 16  # µ of the staged arms
    mu: int = 4  # updates on one generation batch: ours synchronous, and TRL
    evaluate_every: int = 32
    test_prompts: int = 1319
    test_samples: int = 4
    rollouts_per_shard: int = 4096
    trl_batch: int = 32  # rollouts per forward and backward pass in TRL; the rest is accumulation
    trl_checkpointing: bool = False
    vllm_memory: float = 0.2  # share of the device that vLLM takes beside TRL's learner
    vllm_sleep: bool = False
    vllm_cache_gb: float = 0.0  # for jobs that share a device: vLLM's cache in GB; 0: vLLM measures what is free

    @property
    def rollouts(self) -> int:
        """Of one update."""
        return self.prompts * self.group_size

    @property
    def evaluated(self) -> list[int]:
        """After how many updates accuracy is measured."""
        return sorted({*range(0, self.updates + 1, self.evaluate_every), self.updates})

    def updates_of(self, arm: str) -> int:
        return self.updates * (2 if arm.endswith(TWICE) else 1)

    def check(self, arm: str) -> None:
        """Refuse sizes that would leave the arms with unequal work."""
        if arm in THEIRS and self.rollouts % self.trl_batch:
            raise SystemExit(f"trl_batch is {self.trl_batch}, which does not divide the {self.rollouts} of an update")
        if arm in (*THEIRS, "synchronous") and self.updates % self.mu:
            raise SystemExit(f"updates is {self.updates}, no multiple of mu {self.mu}")
        if self.warmup >= self.updates:
            raise SystemExit(f"warmup is {self.warmup}, not below the {self.updates} updates")
        if self.also_test and not Path(self.also_test).is_file():  # it is read when the training is over
            raise SystemExit(f"also_test is {self.also_test}: there is no such file")

    def record(self) -> dict[str, Any]:
        """What is written down: files by their names alone."""
        found = dataclasses.asdict(self)
        return found | {key: Path(found[key]).name for key in FILES}


# Seconds instead of hours, on a CPU: to see that everything works. Its figures mean nothing.
SMOKE: dict[str, Any] = {
    "model": "arithmetic",
    "system": "",
    "chat": False,
    "device": "cpu",
    "updates": 8,
    "prompts": 4,
    "group_size": 4,
    "max_new_tokens": 8,
    "warmup": 2,
    "stage_updates": 4,
    "mu": 2,
    "evaluate_every": 4,
    "test_prompts": 16,
    "test_samples": 2,
    "rollouts_per_shard": 64,
    "trl_batch": 16,
}

SHORT = {
    "updates": "u",
    "prompts": "p",
    "group_size": "g",
    "max_new_tokens": "n",
    "stage_updates": "su",
    "mu": "mu",
    "trl_batch": "tb",
    "vllm_memory": "vm",
}


def job_name(arm: str, seed: int, rate: float, settings: Settings, *, base: Settings | None = None) -> str:
    """The name of a job's file; what differs from the defaults is in it.

    >>> job_name("p3o", 101, 2e-6, Settings())
    'p3o-s101-lr2e-06'
    >>> job_name("p3o", 101, 2e-6, Settings(prompts=64))
    'p3o-s101-lr2e-06-p64'
    """
    base = base or Settings()
    changed = [
        f"{short}{getattr(settings, key):g}"
        for key, short in SHORT.items()
        if getattr(settings, key) != getattr(base, key)
    ]
    return "-".join([arm, f"s{seed}", f"lr{rate:g}", *changed])


def method_of(arm: str, settings: Settings) -> tuple[str, int]:
    """The method of an arm, and µ where it is staged.

    >>> method_of("mu_grpo_64", Settings()), method_of("mu_grpo_x2", Settings()), method_of("grpo_tight", Settings())
    (('mu_grpo', 64), ('mu_grpo', 16), ('grpo_tight', 16))
    """
    method, _, updates = arm.rpartition("_")
    return (method, int(updates)) if updates.isdigit() else (tuned_as(arm), settings.stage_updates)


def tuned_as(arm: str) -> str:
    """The arm whose learning rate an arm has.

    >>> tuned_as("auto_x2"), tuned_as("mu_grpo_64")
    ('auto', 'mu_grpo_64')
    """
    return arm.removesuffix(TWICE)


def our_record(
    arm: str, settings: Settings, *, seed: int, rate: float, runs: Path, name: str, changes: Mapping[str, Any]
) -> dict[str, Any]:
    """The config of one run of ours, as nested tables; `changes` are dotted keys."""
    method, stage_updates = method_of(arm, settings)
    updates = settings.updates_of(arm)
    staged = {"kind": "staged", "updates": updates, "stages": -(-updates // stage_updates)}
    every = {"kind": "synchronous", "updates": updates, "updates_per_generation": settings.mu}
    shapes: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "mu_grpo": (staged, {"name": "mu_grpo"}),
        "p3o": (staged, {"name": "p3o"}),
        "grpo_tight": (staged, {"name": "grpo"}),
        "random_reward": (staged, {"name": "mu_grpo"}),
        "synchronous": (every, {"name": "grpo"}),
        "auto": ({"updates": updates}, {}),
    }
    schedule, objective = shapes[method]
    options = task_options(settings)
    if arm == "random_reward":
        chosen = {"function": "benchmarks.gsm8k_bench.rewards:random_reward"}
        options |= {"verifier": "python", "verifier_options": {**options.get("verifier_options", {}), **chosen}}
    record: dict[str, Any] = {
        "name": name,
        "runs": str(runs),
        "seed": seed,
        "recipe": "auto" if method == "auto" else "none",
        "model": {"path": settings.model, "device": settings.device, "threads": settings.threads},
        "task": {"name": "jsonl", "options": options},
        "schedule": schedule,
        "batch": {
            "prompts": settings.prompts,
            "group_size": settings.group_size,
            # Half of the groups have equal rewards here. Without passes over them the gradient is the same; P3O also
            # learns from them, by its divergence.
            "without_variance": "keep" if method == "p3o" else "skip",
        },
        "sampler": {"max_new_tokens": settings.max_new_tokens, "rollouts_per_shard": settings.rollouts_per_shard},
        "objective": objective,
        "optimizer": {
            "learning_rate": rate,
            "schedule": "cosine",
            "warmup_updates": settings.warmup,
            "max_grad_norm": 1.0,
        },
        "learner": {"tokens_per_micro_batch": 32768},
        # The clock leaves evaluations out, and checkpoints that nothing but an evaluation asks for.
        "checkpoints": {"every": settings.evaluate_every, "keep": 1},
        "evaluation": {
            "every": settings.evaluate_every,
            "prompts": settings.test_prompts,
            "samples": settings.test_samples,
        },
    }
    for key, value in changes.items():
        section, _, last = key.rpartition(".")
        (record.setdefault(section, {}) if section else record)[last] = value
    return record


def task_options(settings: Settings) -> dict[str, Any]:
    """Options of the task jsonl: the same prompts and the same verifier for every arm."""
    options: dict[str, Any] = {
        "path": settings.train,
        "evaluation_path": settings.test,
        "chat": settings.chat,
        "verifier": settings.verifier,
    }
    if settings.verifier_workers:
        options["verifier_options"] = {"workers": settings.verifier_workers}
    return options | ({"system": settings.system} if settings.system else {})
