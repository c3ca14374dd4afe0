"""Metrics and evaluations reach the trackers of the config."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stalewise.config import make_config
from stalewise.errors import ConfigError
from stalewise.reporting.trackers import Trackers, check_installed
from tiny import tiny_record


class Recorder:
    """A tracker that keeps what it gets."""

    name = "wandb"
    calls: list[tuple[Any, ...]]

    def __init__(self, project: str, name: str) -> None:
        self.calls = [("made", project, name)]

    def start(self) -> None:
        self.calls.append(("start",))

    def store_init_configuration(self, settings: dict[str, Any]) -> None:
        self.calls.append(("settings", settings["optimizer.learning_rate"]))

    def log(self, values: dict[str, Any], step: int) -> None:
        self.calls.append((step, values))

    def finish(self) -> None:
        self.calls.append(("finish",))


def test_numbers_and_evaluations_are_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelerate.tracking.LOGGER_TYPE_TO_CLASS", {"wandb": Recorder})
    monkeypatch.setattr("stalewise.reporting.trackers.check_installed", lambda names: None)
    config = make_config(tiny_record(tmp_path) | {"trackers": ["wandb"]})
    trackers = Trackers(config)
    trackers.metrics(3, {"update": 3, "reward": 0.5, "taken": True, "note": "text"})
    accuracy = {"value": 0.5, "low": 0.25, "high": 0.75}
    record = {"version": 4, "samples": 1, "accuracy": accuracy, "pass_at": {1: accuracy}, "suite": ""}
    trackers.evaluation(record)
    by_task = {"sums": {"accuracy": {**accuracy, "value": 0.75}}}
    trackers.evaluation(record | {"suite": "hard", "majority": {**accuracy, "value": 1.0}, "by_task": by_task})
    trackers.close()
    (recorder,) = trackers._trackers
    evaluation = (4, {"evaluation/accuracy": 0.5, "evaluation/pass@1": 0.5})
    suite = {"avg@1": 0.5, "pass@1": 0.5, "majority@1": 1.0, "sums/accuracy": 0.75}
    of_suite = (4, {f"suites/hard/{name}": value for name, value in suite.items()})
    start = [("made", "stalewise", "tiny"), ("start",), ("settings", config.optimizer.learning_rate)]
    assert recorder.calls == [*start, (3, {"reward": 0.5}), evaluation, of_suite, ("finish",)]


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelerate.tracking.get_available_trackers", list)
    with pytest.raises(ConfigError, match="trackers names mlflow, whose package is not installed: pip install mlflow"):
        check_installed(["mlflow"])


def test_the_module_imports_without_torch() -> None:
    code = "import sys, stalewise.reporting.trackers; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
