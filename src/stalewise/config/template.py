"""The commented config that `stalewise init` writes, generated from the descriptions of the settings."""

from __future__ import annotations

import inspect
import json
import textwrap
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from stalewise.config import RunConfig, is_section
from stalewise.config.run import with_recipe
from stalewise.errors import TaskError, nearest
from stalewise.tasks import TASKS
from stalewise.tasks.base import load

_LANGUAGE_MODEL: dict[str, Any] = {
    "model.path": "Qwen/Qwen2.5-0.5B-Instruct",
    "sampler.max_new_tokens": 1024,
    "sampler.rollouts_per_shard": 256,
    "optimizer.learning_rate": 1e-6,
    "learner.gradient_checkpointing": True,
}
RECIPE = "auto"  # what docs/control.md recommends
OF_RECIPE = {
    f"{table}.{key}": value
    for table, settings in with_recipe({"recipe": RECIPE}).items()
    if table != "recipe"
    for key, value in settings.items()
}
# Settings of a task's template that differ from the defaults.
SUGGESTIONS: dict[str, dict[str, Any]] = {
    "arithmetic": {"sampler.max_new_tokens": 8, "optimizer.learning_rate": 3e-4},
    "arithmetic-steps": {"optimizer.learning_rate": 3e-4},
    "arithmetic-chat": {
        "model.path": "smollm2",
        "task.options": {"largest": 12},
        "sampler.max_new_tokens": 48,
        "optimizer.learning_rate": 4e-6,
        "evaluation.prompts": 31,
        "evaluation.samples": 16,
    },
    "jsonl": {**_LANGUAGE_MODEL, "task.options": {"path": "train.jsonl", "chat": True}},
    "hf": {
        **_LANGUAGE_MODEL,
        "task.options": {"path": "openai/gsm8k", "config": "main", "problem_field": "question", "chat": True},
    },
    "gym": {**_LANGUAGE_MODEL, "task.options": {"dataset": "chain_sum", "chat": True}},
}


def config_template(task: str = "arithmetic", name: str = "run") -> str:
    """A TOML file with every setting, its default and its meaning."""
    if task not in TASKS:
        raise TaskError(f"unknown task {task!r}; {nearest(task, TASKS)}")
    suggested = {"name": name, "recipe": RECIPE, "task.name": task, **SUGGESTIONS.get(task, {})}
    lines = [f"# {RunConfig.__doc__}", "# Delete what you do not change: these are the defaults, unless noted.", ""]
    return "\n".join([*lines, *_settings("", RunConfig, suggested)]) + "\n"


def _settings(prefix: str, model: type[BaseModel], suggested: dict[str, Any]) -> list[str]:
    """The lines of a table; nested tables come after plain settings, since TOML cannot return from them."""
    lines: list[str] = []
    tables: list[str] = []
    for key, field in model.model_fields.items():
        if is_section(field):
            section: Any = field.annotation
            tables += ["", f"[{prefix}{key}]  # {section.__doc__}", *_settings(f"{prefix}{key}.", section, suggested)]
        else:
            lines += _setting(prefix, key, field, suggested)
    return [*lines, *(_task_options(suggested["task.name"]) if prefix == "task." else []), *tables]


def _setting(prefix: str, key: str, field: FieldInfo, suggested: dict[str, Any]) -> list[str]:
    default = field.get_default(call_default_factory=True)
    item = next(iter(get_args(field.annotation)), None)
    if isinstance(item, type) and issubclass(item, BaseModel):  # a list of tables, which `key = []` would close
        return [f"# {field.description}", f"# {key} = []  # settings of each: {', '.join(item.model_fields)}"]
    value = suggested.get(prefix + key, default)
    assert value is not PydanticUndefined, f"{prefix}{key} has no default"
    choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    meaning = f"# {field.description}" + (f" One of: {', '.join(choices)}." if choices else "")
    if value is None:  # TOML has no null
        return [meaning, f"# {key} ="]
    if prefix + key in OF_RECIPE:  # uncommented it would override the recipe
        return [meaning, f"# {key} = {toml(OF_RECIPE[prefix + key])}  # by the recipe; without: {toml(default)}"]
    noted = "" if value == default else f"  # default: {toml(default)}"
    return [meaning, f"{key} = {toml(value)}{noted}"]


def _task_options(task: str) -> list[str]:
    """A comment with the task's options and their defaults."""
    parameters = inspect.signature(load(TASKS[task])).parameters
    known = [
        parameter.name if parameter.default in (parameter.empty, None) else f"{parameter.name} = {parameter.default!r}"
        for parameter in parameters.values()
        if parameter.name != "seed"
    ]
    text = f"Options of {task}: {', '.join(known)}." if known else f"{task} has no options."
    return [f"# {line}" for line in textwrap.wrap(text, width=110)]


def toml(value: Any) -> str:
    """Write a value as TOML.

    >>> toml({"path": "a.jsonl", "chat": True, "betas": (0.9, 0.999)})
    '{ path = "a.jsonl", chat = true, betas = [0.9, 0.999] }'
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {toml(item)}' for key, item in value.items())} }}" if value else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml, value))}]"
    return repr(value)
