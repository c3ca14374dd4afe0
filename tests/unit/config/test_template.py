"""The template has every setting, and cannot drift from the config."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest

from stalewise.config import RunConfig, is_section, make_config
from stalewise.config.template import SUGGESTIONS, config_template, toml
from stalewise.tasks import TASKS


@pytest.mark.parametrize("task", TASKS)
def test_the_template_is_the_recipe_the_defaults_and_what_it_notes(task: str) -> None:
    record = tomllib.loads(config_template(task, name="mine"))
    expected: dict[str, Any] = make_config({"recipe": "auto"}).model_dump(mode="json") | {"name": "mine"}
    assert (expected["schedule"]["end"], expected["guard"]["action"]) == ("spent", "halve")
    expected["task"]["name"] = task
    for key, value in SUGGESTIONS.get(task, {}).items():
        section, _, setting = key.partition(".")
        expected[section][setting] = value
    assert make_config(record).model_dump(mode="json") == expected


def test_the_template_explains_every_setting() -> None:
    text = config_template()

    def explained(model: Any, prefix: str) -> None:
        for key, setting in model.model_fields.items():
            if is_section(setting):
                assert f"[{prefix}{key}]  # {setting.annotation.__doc__}" in text
                explained(setting.annotation, f"{prefix}{key}.")
                continue
            assert setting.description, f"{prefix}{key} has no description"
            assert f"# {setting.description}" in text
            assert re.search(rf"^(# )?{key} =", text, flags=re.MULTILINE)

    explained(RunConfig, "")


@pytest.mark.parametrize(
    "value", [1e-6, True, 'a"b\\c\nµ', [1, 2.5], {"a": {"b": ["x"]}}, 0, 3e-4, float("inf"), "", {}, []]
)
def test_values_survive_toml(value: object) -> None:
    assert tomllib.loads(f"value = {toml(value)}")["value"] == value
