"""Progress on stderr, and trackers."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from stalewise.config import make_config
from stalewise.errors import ConfigError
from stalewise.reporting.progress import Bars, Lines, Several, watching
from stalewise.store.json_lines import read_jsonl
from stalewise.types import NullCallback
from tiny import call, refused, tiny_record, write_config


def test_lines_are_one_per_phase() -> None:
    out = io.StringIO()
    lines = Lines(Console(file=out))
    lines.begin("generate", 4)
    lines.advance(2, "10 tokens")
    lines.advance(0, "12 tokens")
    assert out.getvalue() == ""
    lines.advance(2)
    lines.log("[bold]something[/bold]")
    lines.begin("learn", 3)
    lines.advance(1)
    lines.close()
    first, said, second = out.getvalue().splitlines()
    assert first.startswith("generate: 4/4 rollouts in ") and first.endswith("/s)  12 tokens")
    assert said == "[bold]something[/bold]"
    assert second.startswith("learn: 1/3 updates in ")


def test_bars_show_rate_and_time_left() -> None:
    out = io.StringIO()
    bars = Bars(Console(file=out, force_terminal=True, width=120))
    bars.advance(1)  # before anything began: nothing to move
    for what in ("generate", "learn"):
        bars.begin(what, 2)
        bars.advance(1, "reward 0.5")
        bars.advance(1, "[ESS] 0.9")
        bars.metrics(0, {})
    bars.log("version 4: accuracy 0.5 [0.4, 0.6]")
    bars.close()
    text = out.getvalue()
    for words in ("generate", "learn", "2/2", "/s", "[ESS] 0.9", "accuracy 0.5 [0.4, 0.6]"):
        assert words in text
    out.truncate(0)
    bars.begin("evaluate", 1000)
    bars.advance(1000)  # a rate after one step, too
    assert "1000/1000" in out.getvalue() and "/s" in out.getvalue()
    bars.begin("learn", 2)
    bars.advance(1)
    bars.close()
    assert "1/2" in out.getvalue()


def test_everybody_is_told() -> None:
    class Recorder(NullCallback):
        def __init__(self) -> None:
            self.told: list[Any] = []

        def begin(self, what: str, total: int) -> None:
            self.told.append((what, total))

        def advance(self, amount: int, note: str = "") -> None:
            self.told.append((amount, note))

        def metrics(self, update: int, record: dict[str, Any]) -> None:
            self.told.append((update, record))

        def log(self, message: str) -> None:
            self.told.append(message)

    recorders = [Recorder(), Recorder()]
    several = Several(recorders)
    several.begin("learn", 1)
    several.advance(1, "note")
    several.metrics(0, {"loss": 1.0})
    several.log("done")
    assert recorders[0].told == recorders[1].told == [("learn", 1), (1, "note"), (0, {"loss": 1.0}), "done"]


def test_tensorboard_gets_metrics_and_evaluations(tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    record = tiny_record(tmp_path) | {"trackers": ["tensorboard"]}
    assert call("train", write_config(tmp_path / "a.toml", record)).exit_code == 0
    events = event_accumulator.EventAccumulator(str(tmp_path / "tiny" / "tensorboard"))
    events.Reload()
    metrics = read_jsonl(tmp_path / "tiny" / "metrics.jsonl")
    logged = {(event.step, round(event.value, 5)) for event in events.Scalars("reward")}
    assert logged == {(line["update"], round(line["reward"], 5)) for line in metrics}
    assert [event.step for event in events.Scalars("evaluation/accuracy")] == [0, 4]
    assert "evaluation/pass@2" in events.Tags()["scalars"]


def test_a_tracker_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelerate.tracking.get_available_trackers", list)
    config = make_config(tiny_record(tmp_path) | {"trackers": ["wandb"]})
    with pytest.raises(ConfigError, match="pip install wandb"), watching(config):
        raise AssertionError("unreachable")
    path = write_config(tmp_path / "a.toml", tiny_record(tmp_path) | {"trackers": ["mlflow"]})
    assert "trackers names mlflow" in refused("train", path)
    assert not (tmp_path / "tiny").exists()
