"""Version 0 of a run: the policy that training begins with, as a checkpoint like all others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from stalewise.checkpoints import write_checkpoint
from stalewise.config import RunConfig
from stalewise.learn.logp import check_output_layer
from stalewise.learn.lora import save_first
from stalewise.models import encode_prompts, load_model, load_tokenizer
from stalewise.tasks import Task


def write_first_checkpoint(config: RunConfig, source: str, task: Task, say: Callable[[str], object]) -> dict[str, Any]:
    """Write what transformers loads from `source` as version 0 of the run; the learner's numbers of that.

    The checkpoint is whole and need not be read again. `say` hears what a user should know of it.
    """
    model = load_model(source, device=torch.device("cpu"))
    check_output_layer(model)  # now, and not when a whole stage has been generated
    tokenizer = load_tokenizer(source)
    # Version 0 keeps the tokenizer: one without the chat template that the task needs would stay in the run.
    encode_prompts(task.prompts(0, 1), tokenizer)

    def save(directory: Path) -> None:
        save_first(config, model, source, directory, say)
        tokenizer.save_pretrained(directory)

    state = {"steps": 0, "drift": 0.0, "source": config.model.path}
    write_checkpoint(config.directory, 0, save=save, state=state)
    return {"version": 0, **state}
