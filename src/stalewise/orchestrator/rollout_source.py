"""Where the rollouts of a run come from: the part of an orchestrator that differs between kinds of runs."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stalewise.config import ScheduleSection
from stalewise.config.sections import ModelSection
from stalewise.models import resolve_model
from stalewise.orchestrator.stages import read_schedule
from stalewise.rollout.generate import HeldShards
from stalewise.staleness.schedule import Schedule
from stalewise.store import Batch, complete_manifests, open_batch
from stalewise.store.atomic import commit_directory, explain_write_errors, temporary_name

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


class HeldRollouts:
    """Generation batches of a policy whose checkpoint is still being written: learned from, and committed after it.

    They have temporary names until then, so a process that is killed leaves nothing of them.
    """

    def __init__(self) -> None:
        self._held: dict[Path, tuple[HeldShards, Callable[[], Mapping[str, Any]]]] = {}

    def hold(self, directory: Path, taken: Sequence[int], provenance: Callable[[], Mapping[str, Any]]) -> HeldShards:
        """The shards of a batch, of which some are taken; `provenance` will be in their manifests."""
        if directory not in self._held:
            self._held[directory] = HeldShards(temporary_name(directory) / directory.name), provenance
        shards, _ = self._held[directory]
        shards.take(list(taken), len(taken))
        return shards

    def place(self, directory: Path) -> Path:
        """Where a batch is now."""
        return self._held[directory][0].directory if directory in self._held else directory

    def commit(self) -> None:
        """Give the batches their names: their policy is committed."""
        while self._held:
            directory, (shards, provenance) = self._held.popitem()
            if shards.directory.is_dir():
                complete_manifests(shards.directory, provenance())
                _make_way(directory)
                commit_directory(shards.directory, directory)
                with contextlib.suppress(OSError):  # the next start removes it
                    shards.directory.parent.rmdir()


def _make_way(directory: Path) -> None:
    """Remove shards of this name, for which there was no order: a late worker made them for a withdrawn one."""
    if directory.exists():
        left = temporary_name(directory)
        with explain_write_errors(directory, 0):
            directory.rename(left)
        shutil.rmtree(left, ignore_errors=True)
