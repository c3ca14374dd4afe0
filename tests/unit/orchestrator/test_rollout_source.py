"""Where rollouts come from: which batches each source wants before training continues."""

from __future__ import annotations

from pathlib import Path

import pytest

from stalewise.config import ScheduleSection
from stalewise.config.sections import ModelSection
from stalewise.models import EMBEDDED
from stalewise.orchestrator.offline import OfflineRollouts
from stalewise.orchestrator.pipelined import BackgroundGeneration
from stalewise.orchestrator.rollout_source import RolloutSource
from stalewise.staleness.schedule import Schedule


@pytest.mark.parametrize(
    ("source", "needed"),
    [
        (RolloutSource(), [range(3), range(1, 4), range(3, 4)]),
        (BackgroundGeneration(), [range(1), range(1, 2), range(3, 4)]),
        (OfflineRollouts([], None), [range(0), range(0), range(0)]),
    ],
)
def test_the_batches_that_must_exist_before_training_continues(source: RolloutSource, needed: list[range]) -> None:
    schedule = Schedule(updates=8, updates_per_generation=2, lag=2)
    assert [source.batches_needed(schedule, version) for version in (0, 2, 7)] == needed


def test_rollouts_are_of_the_runs_own_policies_unless_they_are_of_other_runs() -> None:
    assert RolloutSource().is_own and BackgroundGeneration().is_own and not OfflineRollouts([], None).is_own


def test_a_run_starts_from_the_model_of_its_config(tmp_path: Path) -> None:
    source = RolloutSource()
    assert source.first_policy(ModelSection(path="arithmetic"), "arithmetic") == str(EMBEDDED / "arithmetic")
    assert source.schedule(ScheduleSection(updates=6, stages=2), tmp_path / "none") == Schedule(6, 3)
