"""Tasks: prompts and the verifiers that score responses. A task's module is imported when it is made."""

from __future__ import annotations

from typing import Any

from stalewise.errors import TaskError
from stalewise.tasks.base import CHAT, Task, Verifier, build, close_task
from stalewise.tasks.rows import Seen
from stalewise.tasks.verifiers import ErrorCounts, count_errors, make_verifier

__all__ = ["CHAT", "TASKS", "Task", "Verifier", "close_task", "make_evaluation_file", "make_task"]
__all__ += ["ErrorCounts", "Seen", "count_errors", "make_verifier"]

TASKS = {
    "arithmetic": "stalewise.tasks.arithmetic:Addition",
    "arithmetic-chat": "stalewise.tasks.arithmetic:AdditionChat",
    "arithmetic-steps": "stalewise.tasks.arithmetic:Steps",
    "gym": "stalewise.tasks.gym:GymTask",
    "hf": "stalewise.tasks.hf_datasets:HuggingFaceTask",
    "jsonl": "stalewise.tasks.jsonl:JsonlTask",
    "mixture": "stalewise.tasks.mixture:MixtureTask",
    "verifiers": "stalewise.tasks.environments.prime:PrimeTask",
}
OF_PROGRAMS = {"python": "stalewise.tasks.callables:registered_task"}  # only `stalewise.train` uses it, no file does


def make_task(name: str, *, seed: int = 0, **options: Any) -> Task:
    """Make a task by name; the options are those of its class. An unknown name or option is a TaskError.

    With the option `environment` its prompts begin episodes in that environment (docs/episodes.md), with the options
    `environment_options`.
    """
    environment = options.pop("environment", "")
    environment_options = options.pop("environment_options", None)
    task = build("task", name, TASKS | OF_PROGRAMS if name in OF_PROGRAMS else TASKS, {"seed": seed, **options})
    if environment:
        from stalewise.tasks.environments import make_environments

        task.environment = make_environments(environment, environment_options)
    elif environment_options:
        raise TaskError("environment_options are given, but no environment: name one in task.options.environment")
    return task


def make_evaluation_file(path: str, **options: Any) -> Task:
    """A task to evaluate on, made of all rows of a JSONL file; the options are those of the task jsonl."""
    return build("task", "jsonl", {"jsonl": "stalewise.tasks.jsonl:evaluation_file"}, {"path": path, **options})
