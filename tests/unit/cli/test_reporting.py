"""Commands that read runs, and the alias of the lab."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from rundirs import write_run
from stalewise.cli import reporting
from stalewise.config import load_config
from stalewise.config.run import write_resolved
from tiny import call, called_json, refused, write_config


@pytest.mark.parametrize("command", ["report", "watch", "flips", "difficulty", "serve", "inspect", "verify", "eval"])
def test_what_is_no_run_is_answered_with_the_run_that_was_meant(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = write_config(tmp_path / "a.toml", {"name": "a", "runs": "runs"})
    not_a_run = "is not a run directory: it"
    if command != "eval":  # to which the others are models
        begin = f"{not_a_run} is a file; `stalewise train` makes its run, runs/a"
        assert refused(command, config) == f"{config} {begin}"
        write_resolved(load_config(config), Path("runs/a/config.resolved.json"))
        assert refused(command, "a.toml") == f"a.toml {not_a_run} is a file; name its run, runs/a"
        (tmp_path / "runs/a/rollouts").mkdir()
        for place, run in (
            ("runs", "a run in it, such as runs/a"),
            ("runs/a/rollouts", "the run that it belongs to, runs/a"),
        ):
            expected = f"{place} {not_a_run} has no config.resolved.json; name {run}"
            assert refused(command, place) == expected
    write_resolved(load_config(config), Path("runs/a/config.resolved.json"))
    assert refused(command, "runs/b") == f"runs/b {not_a_run} does not exist; there are in runs: a"


def test_a_report_says_as_json_where_it_is_and_what_stands_at_its_top(tmp_path: Path) -> None:
    run, young = write_run(tmp_path / "run"), write_run(tmp_path / "young", done=3)
    assert call("report", run).stdout == f"{run}/report/index.html\n"
    record = called_json("report", run)
    assert record["path"] == f"{run}/report/index.html" and record["ranking"] == ""
    (head,) = record["runs"]
    first = {"version": 0, "value": 0.4, "low": 0.4 - 0.05, "high": 0.4 + 0.05}
    assert head["first_accuracy"] == first and head["accuracy"]["version"] == 8
    # Two batches of 1024 rollouts with 4096 tokens; 10 s of generating and 20 s of learning.
    assert [head[key] for key in ("update", "updates", "rollouts", "tokens")] == [8, 8, 2048, 8192]
    assert (head["seconds"]["generate"], head["seconds"]["learn"]) == (10.0, 20.0)
    page = Path(record["path"]).read_text()
    assert all(head[key] and head[key] in page for key in ("verdict", "worked", "cost"))
    assert head["accuracy"] == called_json("watch", run)["accuracy"] and head["warnings"] == []
    both = called_json("report", run, young, "--output", tmp_path / "both.html")
    assert both["path"] == str(tmp_path / "both.html") and both["ranking"].startswith("run has the highest")
    assert [(one["name"], one["accuracy"]["version"], one["update"]) for one in both["runs"]] == [
        ("run", 8, 8),
        ("young", 0, 3),
    ]
    (run / "eval.jsonl").unlink()
    (unevaluated,) = called_json("report", run)["runs"]
    assert unevaluated["first_accuracy"] is None and unevaluated["accuracy"] is None


def test_the_sides_of_a_comparison(tmp_path: Path) -> None:
    assert "is not a run directory" in refused("compare", tmp_path, tmp_path)
    assert "name two run directories" in refused("compare", tmp_path)
    assert "name two run directories" in refused("compare", "--a", tmp_path)


def test_reproduce_runs_the_lab_of_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        ran.append((command[1:], options["env"]["PYTHONPATH"].split(":")[0]))
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.setattr(reporting.subprocess, "run", run)
    result = call("reproduce", "no-knob", "--setting", "real", "--render-only")
    assert result.exit_code == 3 and "is now `python -m experiments.lab`" in result.stderr
    root = str(Path(__file__).parents[3])
    assert ran == [(["-m", "experiments.lab", "no-knob", "--setting", "real", "--render-only"], root)]


def test_reproduce_needs_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(reporting, "__file__", str(tmp_path / "site-packages/stalewise/cli/reporting.py"))
    assert "part of the repository, not of the package" in refused("reproduce", "all")
