"""Where the rollouts of a run come from: the part of an orchestrator that differs between kinds of runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from stalewise.config import ScheduleSection
from stalewise.config.sections import ModelSection
from stalewise.models.loading import resolve_model
from stalewise.orchestrator.stages import read_schedule
from stalewise.staleness.schedule import Schedule
from stalewise.store import Batch, open_batch

if TYPE_CHECKING:
    from stalewise.orchestrator.orchestrator import Orchestrator


class RolloutSource:
    """Generates each batch in this process, between updates. `pipelined` and `offline` have the other sources."""

    is_own = True  # rollouts are made by policies of this run: their rewards are rewards of these policies

    def schedule(self, section: ScheduleSection, stages_path: Path) -> Schedule:
        """The schedule of the run, as far as it is known."""
        return read_schedule(section, stages_path)

    def check_directory(self, directory: Path) -> None:
        """Raise StoreError where the run directory belongs to another source."""

    def first_policy(self, model: ModelSection, task: str) -> str:
        """The directory of the model that becomes version 0."""
        return resolve_model(model.path, task)

    def start(self, run: Orchestrator) -> None:
        """Begin work in the background, where there is any."""

    def stop(self) -> None:
        """End work in the background."""

    def batches_needed(self, schedule: Schedule, version: int) -> range:
        """The generation batches that must exist before this version can be trained further."""
        current = schedule.at(version).generation_batch
        return range(current, min(current + schedule.lag + 1, schedule.generation_batches))

    def obtain(self, run: Orchestrator, generation_batch: int) -> None:
        """Return when this generation batch is committed."""
        run.generate(generation_batch)

    def name_of(self, batch: Batch) -> str:
        """The name of a batch in this run."""
        return batch.directory.name

    def open(self, run: Orchestrator, generation_batch: int) -> Batch:
        """Open a committed generation batch and compare its files with their checksums."""
        return open_batch(run.batch_directory(generation_batch))
