"""Experiments, their kept results, figures, pages and the table of all are in step; definitions are whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from experiments.lab import pages
from experiments.lab.definition import Experiment, load_experiments
from experiments.lab.pages import render, results_table
from experiments.lab.plan import next_jobs
from experiments.lab.results import LARGEST_BYTES
from experiments.lab.verdicts import rules

ROOT = Path(__file__).parents[2]
EXPERIMENTS = load_experiments(ROOT / "experiments")
RENDER = "python -m experiments.lab all --render-only"


@pytest.fixture(scope="module", autouse=True)
def judged_once() -> Iterator[None]:
    """The same results for pages, figures and the table."""
    judged = pages.found(EXPERIMENTS)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pages, "found", lambda experiments: judged)
        yield


@pytest.mark.slow
def test_pages_and_figures_are_those_of_the_results() -> None:
    stale = [path.name for path, text in render(EXPERIMENTS).items() if not path.is_file() or path.read_text() != text]
    assert stale == [], RENDER


def test_the_table_is_that_of_the_results() -> None:
    kept, table = (ROOT / "docs" / "results.md").read_text(), results_table(EXPERIMENTS)
    if table is None:  # results of the superseded design stay until there are new ones
        assert "**Superseded.**" in kept
    else:
        assert kept == table, RENDER


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda experiment: experiment.name)
def test_a_definition_follows_the_design(experiment: Experiment) -> None:
    assert experiment.table.verdict in rules() and "lab" in experiment.settings
    for job in next_jobs([experiment], "lab", lambda key: None):
        config = job.config
        assert job.kind == "policy" or (config["evaluation"]["prompts"] >= 500 and config["evaluation"]["samples"] >= 4)
        assert config["optimizer"]["warmup_updates"] > 0
        assert config["optimizer"]["schedule"] == ("constant" if experiment.name == "the-law" else "cosine")
        assert job.kind == "policy" or config["seed"] in (101, 102) or config["seed"] >= 200
    if experiment.name != "the-law":  # which compares no methods
        tight = [arm for arm in experiment.arms("lab").values() if arm.settings.get("objective") == {"name": "grpo"}]
        assert tight, "a tight clip belongs in every comparison"


def test_experiments_are_numbered_and_share_their_runs() -> None:
    assert [experiment.table.number for experiment in EXPERIMENTS] == list(range(1, len(EXPERIMENTS) + 1))
    together = len(next_jobs(EXPERIMENTS, "lab", lambda key: None))
    assert together < sum(len(next_jobs([experiment], "lab", lambda key: None)) for experiment in EXPERIMENTS)


def test_kept_results_are_small() -> None:
    large = [path for path in (ROOT / "experiments").glob("*/results-*.json") if path.stat().st_size > LARGEST_BYTES]
    assert large == []
