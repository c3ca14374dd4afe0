"""Settings as keyword arguments: by their last name where that is unambiguous, as in `updates` or `learning_rate`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from stalewise.config.run import RunConfig, is_section, set_dotted
from stalewise.errors import ConfigError, nearest

# Names of which one meaning is far more common than the others.
COMMON = {"learning_rate": "optimizer.learning_rate"}
# What TRL's users type, and what it is called here.
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
    "num_iterations": 'updates_per_generation, with kind="synchronous", or stages',
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


def settings_record(keywords: Mapping[str, Any], dotted: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Nested settings of keywords and of dotted names; an unknown or ambiguous keyword is a ConfigError.

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
    if name in OF_TRL:
        raise ConfigError(f"{name} is no setting here: it is {OF_TRL[name]}")
    found = [key for key in [*_tables(), *_settings()] if key.rpartition(".")[2] == name]
    if not found:
        names = {key.rpartition(".")[2] for key in [*_tables(), *_settings()]}
        raise ConfigError(f"{name} is no setting; {nearest(name, names)}")
    depth = min(key.count(".") for key in found)
    nearest_ones = [key for key in found if key.count(".") == depth]
    if len(nearest_ones) > 1:
        choices = " or ".join(f'settings={{"{key}": …}}' for key in nearest_ones)
        raise ConfigError(f"{name} is the name of several settings: write {choices}")
    if nearest_ones[0] in _tables() and not isinstance(value, Mapping):
        raise ConfigError(f"{name} is a table of settings: pass a dict, not {value!r:.60}")
    return nearest_ones[0]


def _tables() -> list[str]:
    return [key for key, is_table in _keys(RunConfig) if is_table]


def _settings() -> list[str]:
    return [key for key, is_table in _keys(RunConfig) if not is_table]


def _keys(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, bool]]:
    """The dotted keys of all settings and tables."""
    for name, field in model.model_fields.items():
        table: Any = field.annotation
        yield f"{prefix}{name}", is_section(field)
        if is_section(field):
            yield from _keys(table, f"{prefix}{name}.")
