"""The grid of a sweep: its configs, and the outcome of a run."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import Any

import pytest

from rundirs import add_evaluation
from stalewise.config import make_config
from stalewise.errors import CalibrationError, StoreError
from stalewise.planning.calibration import CollapseRule
from stalewise.planning.grid import GridCell, find_collapse_of_run, outcome, rate_name, resolution_of
from stalewise.planning.sweep import sweep
from stalewise.store.atomic import write_json_atomic
from stalewise.store.json_lines import append_line
from sweeps import RULE, grid, tiny_config
from tiny import refused, tiny_record, write_config


def test_a_grid_is_of_ordinary_configs_whose_worst_age_is_its_staleness(runs: Path) -> None:
    config = tiny_config(runs, plan={"strict": True}, task={"options": {"largest": 30}})
    cells = grid(config, [16, 4], [1e-3, 3e-4], seeds=(1, 0))
    assert [cell.directory.name for cell in cells][:3] == [
        "S0004-lr3e-4-seed0",
        "S0004-lr3e-4-seed1",
        "S0016-lr3e-4-seed0",
    ]
    assert len(cells) == 8
    for cell in cells:
        assert cell.directory.parent == runs / "tiny-sweep"
        assert cell.config.schedule.schedule().worst_age == cell.staleness
        assert (cell.config.evaluation.every, cell.config.model.threads) == (2, 1)  # 32 evaluations of 64 updates
        assert cell.config.plan.strict is False
        assert (cell.config.guard.action, cell.config.guard.fraction, cell.config.guard.window) == ("stop", 0.5, 12)
    written = tomllib.loads(cells[0].write_config().read_text())
    assert make_config(written) == cells[0].config


def test_the_largest_staleness_is_that_of_one_generation(runs: Path) -> None:
    (cell,) = grid(tiny_config(runs), [64, 63], [1e-3])
    assert (cell.staleness, cell.config.schedule.updates_per_generation) == (63, 64)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["0", "1e-3"], "--staleness 0: expected 1 to 8, the updates of a run: no rollout gets older"),
        (["-3", "1e-3"], "--staleness -3: expected 1 to 8, the updates of a run: no rollout gets older"),
        (
            ["9", "1e-3"],
            "--staleness 9: expected 1 to 8, the updates of a run: no rollout gets older; --updates makes runs longer",
        ),
        (["3", "0"], "--lr 0: expected a learning rate above 0"),
        (["3", "nan"], "--lr nan: expected a learning rate above 0"),
        (["3;5", "1e-3"], "--staleness 3;5: expected numbers separated by commas, as in 4,16,64"),
        (["3", ","], "--staleness, --lr and --seeds each need at least one value"),
    ],
)
def test_a_grid_that_cannot_be_is_refused(tmp_path: Path, runs: Path, words: list[str], message: str) -> None:
    file = write_config(tmp_path / "tiny.toml", tiny_record(runs))
    assert refused("sweep", file, f"--staleness={words[0]}", f"--lr={words[1]}", "--updates", 8) == message
    assert not runs.exists()


def test_runs_of_another_sweep_are_not_taken_for_this_one(runs: Path) -> None:
    config = tiny_config(runs)
    (cell,) = grid(config, [3], [1e-3])
    write_json_atomic(
        cell.directory / "config.resolved.json", {"format": "stalewise.run/1", **cell.config.model_dump(mode="json")}
    )
    trained = cell.directory / "checkpoints" / "v000001"
    trained.mkdir(parents=True)
    (trained / "manifest.json").write_text("{}")
    with pytest.raises(StoreError, match=r"belongs to another config \(schedule.updates was 64 and is 32"):
        sweep(config, stalenesses=[3], learning_rates=[1e-3], updates=32)


def curve(*values: float, every: int = 4) -> list[dict[str, Any]]:
    return [{"version": every * i, "accuracy": {"value": value}} for i, value in enumerate(values)]


def test_a_collapse_is_dated_by_the_evaluation_that_fell_below() -> None:
    # Means of two: 0.8 at version 4, then 0.8, 0.45, and 0.1, below half of the best, at version 16 and after it.
    assert find_collapse_of_run(curve(0.8, 0.8, 0.8, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1), RULE) == 16
    assert find_collapse_of_run(curve(0.8, 0.8, 0.8, 0.1, 0.1, 0.1, 0.9, 0.9, 0.9), RULE) is None  # it came back
    assert find_collapse_of_run(curve(0.4, 0.5, 0.6, 0.7), RULE) is None
    assert find_collapse_of_run([], RULE) is None


def test_a_run_that_ends_below_the_line_has_collapsed() -> None:
    assert find_collapse_of_run(curve(0.8, 0.8, 0.8, 0.8, 0.1, 0.1), RULE) == 20
    assert find_collapse_of_run(curve(0.8, 0.8, 0.8, 0.8, 0.8, 0.1), RULE) is None  # the mean of two is above the line


def ended_run(cell: GridCell, accuracies: list[float], updates: int, norm: float = 5.0) -> GridCell:
    """The records of a run of the grid that moved by `norm`·η in each of so many updates."""
    step = norm * cell.config.optimizer.learning_rate
    for record in curve(*accuracies, every=cell.config.evaluation.every):
        add_evaluation(cell.directory, record["version"], record["accuracy"]["value"])
    for update in range(updates):
        append_line(cell.directory / "metrics.jsonl", {"update": update, "drift": (update + 1) * step})
    return cell


def test_what_became_of_a_run(runs: Path) -> None:
    whole, fallen = (ended_run(cell, [], 0) for cell in grid(tiny_config(runs), [3], [1e-3, 1e-2]))
    assert whole.config.evaluation.every == 2
    ended_run(whole, [0.4] * 33, 64)
    assert whole.is_complete and whole.updates_done == 64
    found = outcome(whole, RULE)
    assert (found.collapsed_at, found.best_accuracy, found.last_accuracy) == (None, 0.4, 0.4)
    assert found.update_norm_per_lr == pytest.approx(5.0)
    ended_run(fallen, [0.8, 0.8, 0.2, 0.1, 0.1], 8)
    append_line(fallen.directory / "metrics.jsonl", {"update": 8, "drift": 1e6})  # what comes after does not count
    assert not fallen.is_complete
    late = outcome(fallen, RULE)
    assert (late.collapsed_at, late.best_accuracy, late.last_accuracy) == (6, 0.8, 0.1)
    assert late.update_norm_per_lr == pytest.approx(5.0)


def test_a_run_that_ended_before_its_time_collapsed_there(runs: Path) -> None:
    first, later, end = grid(tiny_config(runs), [3], [1e-3, 1e-2, 1e-1])
    for cell, updates in ((first, 0), (later, 7), (end, 64)):
        ended_run(cell, [0.4] * (updates // 2 + 1), updates)
        write_json_atomic(cell.directory / "outcome.json", {"status": 4, "message": "not finite"})
    assert [outcome(cell, RULE).collapsed_at for cell in (first, later, end)] == [1, 8, 64]
    assert math.isnan(outcome(first, RULE).update_norm_per_lr)
    assert outcome(later, RULE).update_norm_per_lr == pytest.approx(5.0)


def test_a_run_that_never_moved_says_nothing(runs: Path) -> None:
    (cell,) = grid(tiny_config(runs), [3], [1e-3])
    ended_run(cell, [0.4] * 33, 64, norm=0.0)
    with pytest.raises(CalibrationError, match="never moved: no group has rewards that differ"):
        outcome(cell, RULE)


def test_a_learning_rate_is_named_with_all_its_digits() -> None:
    assert [rate_name(rate) for rate in (0.0003, 1e-5, 0.00125)] == ["3e-4", "1e-5", "1.25e-3"]


def test_the_resolution_of_a_collapse_is_that_of_the_mean_it_shows_in() -> None:
    assert resolution_of([0, 16, 32, 48], 48, CollapseRule(smoothing=2)) == 32
    assert resolution_of([0, 16], 7, CollapseRule()) == 1
