"""TRL trainers of the small policy, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datasets import Dataset
from trl.trainer.grpo_config import GRPOConfig

from policies import POLICY
from stalewise.integrations.trl import StaleGRPOTrainer
from stalewise.models.loading import load_tokenizer
from stalewise.tasks import make_task

PROMPTS = 8
GROUP = 4
TASK = make_task("arithmetic", seed=0)
QUESTIONS = {prompt.text: prompt for prompt in TASK.prompts(0, 256)}


def arguments(directory: Path, **changes: Any) -> GRPOConfig:
    settings: dict[str, Any] = {
        "output_dir": str(directory / "trl"),
        "max_steps": 1,
        "per_device_train_batch_size": PROMPTS * GROUP,
        "num_generations": GROUP,
        "max_completion_length": 8,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "shuffle_dataset": False,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
    }
    return GRPOConfig(**settings | changes)


def correct(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    return [float(QUESTIONS[prompt].answer == text) for prompt, text in zip(prompts, completions, strict=True)]


def make_trainer(directory: Path, model: Path = POLICY, **more: Any) -> StaleGRPOTrainer:
    changes = {name: more.pop(name) for name in list(more) if name in GRPOConfig.__dataclass_fields__}
    given: dict[str, Any] = {
        "reward_funcs": correct,
        "train_dataset": Dataset.from_dict({"prompt": list(QUESTIONS)}),
        "processing_class": load_tokenizer(str(POLICY)),
    }
    return StaleGRPOTrainer(model=str(model), args=arguments(directory, **changes), **given | more)
