"""Schedules and recipes of a config."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import ValidationError

from stalewise.config import make_config
from stalewise.config.run import RECIPES, with_recipe
from stalewise.config.sections import ScheduleSection


@pytest.mark.parametrize(
    ("settings", "batches"),
    [
        ({"updates": 3}, 3),  # 4 stages, but at most one per update
        ({"updates": 12, "stages": 3}, 3),
        ({"kind": "synchronous", "updates": 10}, 3),  # 4 updates each, the last has 2
        ({"kind": "pipelined", "updates": 12, "updates_per_generation": 3}, 4),
    ],
)
def test_the_settings_give_a_schedule(settings: dict[str, Any], batches: int) -> None:
    schedule = ScheduleSection(**settings).schedule()
    assert (schedule.updates, schedule.generation_batches) == (settings["updates"], batches)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "synchronous", "stages": 2}, "stages has no meaning in a synchronous schedule"),
        ({"end": "spent", "stages": 2}, 'end = "spent" determines the stages of a staged run'),
        ({"spent_ess": 0.5}, 'spent_ess has no meaning without end = "spent"'),
    ],
)
def test_a_contradiction_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(message)):
        ScheduleSection(**settings)


def test_a_recipe_fills_in_what_a_config_leaves_open() -> None:
    assert with_recipe({"seed": 1}) == {"seed": 1}
    filled = with_recipe({"recipe": "auto", "guard": {"action": "stop"}, "schedule": {"updates": 8}})
    assert filled["guard"] == {"action": "stop"}
    assert filled["schedule"] == {"updates": 8, "end": "spent"}
    assert filled["plan"] == RECIPES["auto"]["plan"]
    for schedule in ({"stages": 2}, {"kind": "synchronous"}):  # with stages of its own
        assert with_recipe({"recipe": "auto", "schedule": schedule})["schedule"] == schedule
    assert with_recipe({"recipe": "auto", "guard": 3})["guard"] == 3  # refused later, by its type


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"schedule": "cosine", "warmup_updates": 8}),  # of the default, 128 updates
        ({"schedule": {"updates": 64}}, {"schedule": "cosine", "warmup_updates": 4}),
        ({"optimizer": {"warmup_updates": 0}}, {"schedule": "cosine", "warmup_updates": 0}),
        ({"optimizer": {"schedule": "constant"}}, {"schedule": "constant"}),
        (
            {"optimizer": {"learning_rate": 1e-5}, "schedule": {"updates": 8}},
            {"learning_rate": 1e-5, "warmup_updates": 0},
        ),
    ],
)
def test_the_recipe_warms_up_and_decays(given: dict[str, Any], expected: dict[str, Any]) -> None:
    assert expected.items() <= with_recipe({"recipe": "auto", **given})["optimizer"].items()
    optimizer = make_config({"recipe": "auto", **given}).optimizer
    assert expected.items() <= optimizer.model_dump().items()
