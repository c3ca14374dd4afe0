"""Drift against its limits, and warnings before they are reached."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from callbacks import Listener
from stalewise.api import run
from stalewise.config import RunConfig, make_config
from stalewise.orchestrator.orchestrator import Orchestrator
from stalewise.orchestrator.stages import DriftBudget
from stalewise.store.atomic import write_json_atomic
from stalewise.store.checkpoints import versions
from stalewise.store.json_lines import read_jsonl
from tiny import tiny_record


def made(runs: Path, name: str = "run", **changes: Mapping[str, Any]) -> RunConfig:
    return make_config(tiny_record(runs, name, **{"optimizer": {"learning_rate": 1e-3}, **changes}))


def test_the_budget_warns_once_before_each_limit() -> None:
    said: list[str] = []
    budget = DriftBudget((1.0, 4.0), said.append)
    assert budget.measure(0.5, 0.0) == {"batch_drift": 0.5, "batch_budget": 0.5, "horizon_budget": 0.125}
    assert not said
    budget.measure(0.9, 0.0)
    budget.measure(0.95, 0.0)
    assert (
        len(said) == 1
        and "drift within this generation batch is at 90% of its limit" in said[0]
        and "smaller stages" in said[0]
    )
    budget.measure(3.5, 2.4)
    assert len(said) == 2 and "drift over the run is at" in said[1]
    assert DriftBudget.note({"batch_budget": 0.43, "horizon_budget": 0.12}) == "  budget 43% of batch, 12% of run"


def test_the_budget_warns_where_one_more_step_would_cross_a_limit() -> None:
    said: list[str] = []
    budget = DriftBudget((1.0, 100.0), said.append)
    budget.measure(0.3, 0.0)
    assert not said  # what was used before the first look is not known to be one step
    budget.measure(0.7, 0.0)
    assert len(said) == 1 and "drift within this generation batch is at 70%" in said[0]


def test_a_stage_whose_rollouts_have_lost_half_their_worth_is_told_once() -> None:
    said: list[str] = []
    budget = DriftBudget(None, said.append)
    falling = [1.0, 0.9, 0.8, 0.6, 0.45, 0.4, 0.3]
    for seen in range(len(falling)):
        budget.check_ess(falling[: seen + 1])
    assert len(said) == 1 and "is 45% of its initial value" in said[0] and 'schedule.end = "spent"' in said[0]
    DriftBudget(None, said.append).check_ess(falling)  # another sitting, in the same stage
    DriftBudget(None, said.append).check_ess([0.5, 0.5, 0.5, 0.5])  # low from the start: not age
    DriftBudget(None, said.append).check_ess([])
    assert len(said) == 1


def test_a_warning_of_an_earlier_sitting_is_not_repeated(runs: Path) -> None:
    config = made(runs, evaluation={"every": 2})
    limits = {"format": "stalewise.limits/1", "limits": [1e-6, 1e-6]}  # any update is beyond them
    write_json_atomic(config.directory / "limits.json", limits)
    first, second = Listener(), Listener()
    orchestrator = Orchestrator(config, first)
    orchestrator.prepare()
    while versions(config.directory) != [0, 2]:
        orchestrator.step()
    orchestrator.close()
    run(config, second)
    warned = [
        [text for text in listener.said if "drift over the run" in text or "drift within" in text]
        for listener in (first, second)
    ]
    assert [len(texts) for texts in warned] == [2, 0]


def test_a_budget_that_is_not_known_is_not_shown() -> None:
    found = DriftBudget(None, print).measure(0.5, 0.25)
    assert found["batch_drift"] == 0.25 and math.isnan(found["batch_budget"]) and math.isnan(found["horizon_budget"])
    assert DriftBudget.note(found) == ""
    said: list[str] = []
    half = DriftBudget((0.0, 1.0), said.append).measure(0.95, 0.0)  # one of two
    assert math.isnan(half["batch_budget"]) and DriftBudget.note(half) == "  budget 95% of run"
    assert len(said) == 1 and "drift over the run" in said[0]


def test_drift_within_a_batch_is_counted_from_the_policy_that_made_it(tiny_run: RunConfig) -> None:
    metrics = read_jsonl(tiny_run.directory / "metrics.jsonl")
    assert [record["batch_drift"] for record in metrics[:2]] == [record["drift"] for record in metrics[:2]]
    assert metrics[2]["batch_drift"] == pytest.approx(metrics[2]["drift"] - metrics[1]["drift"])
