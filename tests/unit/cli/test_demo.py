from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stalewise.api import evaluate
from stalewise.cli import demo
from stalewise.config import make_config


def test_the_demo_prints_what_scripts_rely_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    short: dict[str, dict[str, Any]] = {
        name: {**schedule, **({"stages": 2} if schedule["kind"] == "staged" else {})}
        for name, schedule in demo.RUNS.items()
    }
    monkeypatch.setattr(demo, "RUNS", short)
    # Eight evaluations of 1,024 responses would be most of the time; `make nightly` runs the demo as it is.
    small: dict[str, Any] = {"prompts": 64, "samples": 4}
    monkeypatch.setattr(demo, "evaluate", lambda model, **given: evaluate(model, **{**given, **small}))
    monkeypatch.setattr(demo, "make_config", lambda record: make_config({**record, "evaluation": small}))
    monkeypatch.setattr(demo.demo_config, "__kwdefaults__", {"prompts": 4, "updates": 8})
    demo.main(as_json=True, runs=tmp_path)
    printed = json.loads(capsys.readouterr().out)
    assert 0.3 < printed["base_accuracy"] < 0.5
    assert list(printed["runs"]) == ["grpo", "mu_grpo", "p3o"]
    for name, figures in printed["runs"].items():
        assert {"accuracy", "seconds", "generate_seconds", "learn_seconds", "updates"} <= figures.keys()
        assert figures["updates"] == 8
        parts = figures["generate_seconds"] + figures["learn_seconds"] + figures["switch_seconds"]
        assert figures["seconds"] == pytest.approx(parts)
        assert len(list((tmp_path / name / "rollouts").iterdir())) == 2
    assert Path(printed["report"]).is_file()
    demo.main(as_json=False, runs=tmp_path)  # done already: only the table is new
    table = capsys.readouterr().out
    assert "mu_grpo" in table
    assert str(Path(printed["report"])) in table.replace("\n", "")


def test_the_three_runs_share_one_schedule_of_the_learning_rate(tmp_path: Path) -> None:
    configs = [demo.demo_config(name, tmp_path) for name in demo.RUNS]
    optimizers = {
        (one.optimizer.learning_rate, one.optimizer.schedule, one.optimizer.warmup_updates) for one in configs
    }
    assert optimizers == {(6e-4, "cosine", 16)}
