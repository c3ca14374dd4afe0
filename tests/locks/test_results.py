"""Experiments, their kept results, figures, pages and the table of all are in step; definitions are whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from experiments.lab.definition import Experiment, load_experiments
from experiments.lab.figures import figures
from experiments.lab.pages import render, results_table
from experiments.lab.results import LARGEST_BYTES
from experiments.lab.runner import ordered_jobs
from experiments.lab.verdicts import rules

ROOT = Path(__file__).parents[2]
EXPERIMENTS = load_experiments(ROOT / "experiments")
RENDER = "python -m experiments.lab all --render-only"


@pytest.mark.slow
@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda experiment: experiment.name)
def test_pages_and_figures_are_those_of_the_results(experiment: Experiment) -> None:
    stale = [path.name for path, text in render([experiment]).items() if not path.is_file() or path.read_text() != text]
    assert stale == [], RENDER


def test_the_table_is_that_of_the_results() -> None:
    assert (ROOT / "docs" / "results.md").read_text() == results_table(EXPERIMENTS), RENDER


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda experiment: experiment.name)
def test_a_definition_is_whole(experiment: Experiment) -> None:
    assert experiment.table.verdict in rules() and experiment.table.verdict in figures()
    assert experiment.settings == ["lab", "real"]
    assert experiment.setting("lab").seeds >= 5
    for setting in experiment.settings:
        assert ordered_jobs([experiment], setting)


def test_experiments_are_numbered_and_share_their_runs() -> None:
    assert [experiment.table.number for experiment in EXPERIMENTS] == list(range(1, len(EXPERIMENTS) + 1))
    together = len(ordered_jobs(EXPERIMENTS, "lab"))
    assert together < sum(len(ordered_jobs([experiment], "lab")) for experiment in EXPERIMENTS)


def test_kept_results_are_small() -> None:
    large = [path for path in (ROOT / "experiments").glob("*/results-*.json") if path.stat().st_size > LARGEST_BYTES]
    assert large == []
