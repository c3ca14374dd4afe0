"""Learning from rollouts that exist already, of this run's kind or another's: one pass, any objective.

The rollouts stay where they are and are never changed. The new run directory holds everything else: checkpoints,
metrics, ledger, evaluations, and `sources.json`, which says what was learned from. It is the conductor's protocol
without the generating, so the same command goes on after `kill -9`.

Versions. The policy that the new run starts from is its version 0. A rollout that the same run's version v made counts
as version v − s here, where s is the version of the starting policy in that run; so its age is the updates taken since
the start plus s − v, as if the run had gone on from there. A rollout of a later policy counts as fresh when its batch
comes up. Where the starting policy does not belong to the run that made the rollouts, the distance is unknown and
all of them count as version 0: age is the number of updates since the start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stalewise.config import RunConfig, make_config
from stalewise.config.run_directory import is_started, read_config
from stalewise.errors import ConfigError, ModelError, StoreError
from stalewise.models.loading import load_tokenizer, resolve_model, vocabulary_size
from stalewise.orchestrator.orchestrator import Orchestrator
from stalewise.staleness.schedule import Schedule, Step
from stalewise.store import (
    Batch,
    BatchManifest,
    Ranges,
    RolloutColumns,
    batch_directories,
    consumed,
    from_ranges,
    is_committed,
    ledger_path,
    open_batch,
    read_batch_manifest,
    read_ledger,
)
from stalewise.store.atomic import read_json, write_json_atomic
from stalewise.store.checkpoints import read_state
from stalewise.types import ProgressCallback

FORMAT = "stalewise.sources/1"
FILE = "sources.json"
READ_AGAIN = 8  # responses that are decoded again to see whether the tokenizer is the one that wrote them


@dataclass(frozen=True, slots=True)
class Source:
    """A generation batch to learn from, and the updates that do."""

    directory: Path
    manifest: BatchManifest
    start: int | None  # version of the starting policy in the run that made the batch; None: it is not of that run
    groups: int
    first_update: int
    updates: int
    left_out: Ranges = ()  # rollout ids that are not to be learned from

    @property
    def version(self) -> int:
        """The batch's version, counted from the policy that the new run starts from."""
        return 0 if self.start is None else min(self.manifest.version - self.start, self.first_update)

    def record(self) -> dict[str, Any]:
        """What `sources.json` says of it."""
        return {
            "directory": str(self.directory),
            "generation_batch": self.manifest.generation_batch,
            "version": self.manifest.version,
            "counts_as_version": self.version,
            "groups": self.groups,
            "first_update": self.first_update,
            "updates": self.updates,
            "shards": [shard.sha256 for shard in self.manifest.shards],
            **({"left_out": [list(interval) for interval in self.left_out]} if self.left_out else {}),
        }


@dataclass(frozen=True, slots=True)
class SourceSchedule(Schedule):
    """A schedule whose generation batches are the sources, in their order, each serving as many updates as it can."""

    sources: tuple[Source, ...] = ()

    @property
    def generation_batches(self) -> int:
        """How many batches there are."""
        return len(self.sources)

    def at(self, update: int) -> Step:
        """The step with this index, counted from 0."""
        for index, source in enumerate(self.sources):
            if update in self.updates_of(index):
                return Step(update, index, source.version, update - source.version)
        raise IndexError(f"update is {update}; expected 0 to {self.updates - 1}")

    def version_of(self, generation_batch: int) -> int:
        """The version that made this batch, counted from the starting policy."""
        return self.sources[generation_batch].version

    def updates_of(self, generation_batch: int) -> range:
        """The updates that learn from this batch."""
        source = self.sources[generation_batch]
        return range(source.first_update, source.first_update + source.updates)


class SourceBatch(Batch):
    """A batch whose versions are counted from the policy that the new run starts from, without what is left out."""

    def __init__(self, batch: Batch, source: Source) -> None:
        super().__init__(batch.directory, batch.manifest)
        self.source = source

    def column(self, name: str) -> npt.NDArray[Any]:
        """One light column of the rollouts that are to be learned from."""
        if not self.source.left_out:
            return super().column(name)
        return super().column(name)[~np.isin(super().column("rollout_id"), from_ranges(self.source.left_out))]

    def take(self, rollout_ids: npt.ArrayLike) -> RolloutColumns:
        """Fetch the given rollouts in the given order."""
        rows = super().take(rollout_ids)
        first, last = (self._counted(column) for column in (rows.version_first, rows.version_last))
        return replace(rows, version_first=first, version_last=last)

    def _counted(self, version: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        if self.source.start is None:
            return np.zeros_like(version)
        return np.minimum(version - np.int32(self.source.start), np.int32(self.source.first_update))


class OfflineOrchestrator(Orchestrator):
    """One sitting at a run that learns from `sources`."""

    def __init__(
        self, config: RunConfig, sources: Sequence[Source], checkpoint: Path | None, callback: ProgressCallback
    ) -> None:
        super().__init__(config, callback)
        self.sources = tuple(sources)
        self.checkpoint = checkpoint
        self.guard.judges_rewards = False  # the rollouts are of other policies
        self.schedule = SourceSchedule(config.schedule.updates, config.schedule.updates, sources=self.sources)

    def claim(self) -> None:
        """Also check that the directory learned from the same rollouts so far."""
        start = str(self.checkpoint.resolve()) if self.checkpoint else None
        record = {"format": FORMAT, "checkpoint": start, "batches": [source.record() for source in self.sources]}
        path = self.directory / FILE
        started = is_started(self.directory)
        if started and path.exists() and _without_places(read_json(path)) != _without_places(record):
            raise StoreError(
                f"{self.directory} learned from other rollouts or from another checkpoint ({path} says which): "
                "choose another name for the new run"
            )
        if started and not path.exists():
            raise StoreError(f"{self.directory} is a run with rollouts of its own: choose another name for the new run")
        super().claim()
        write_json_atomic(path, record)

    def missing_batch(self, version: int) -> int | None:
        """None: nothing is ever generated here."""
        return None

    def _batches_in_use(self, version: int) -> Iterator[int]:
        return iter(())

    def batch_directory(self, generation_batch: int) -> Path:
        """Where a source lies."""
        return self.sources[generation_batch].directory

    def _check_foreign(self, own: Path) -> None:
        pass  # nothing is ever sampled from it here

    def _open_batch(self, generation_batch: int) -> Batch:
        source = self.sources[generation_batch]
        return SourceBatch(open_rollouts(source.directory), source)

    def _first_policy(self) -> str:
        if self.checkpoint is None:
            return super()._first_policy()
        if (self.checkpoint / "manifest.json").exists():
            read_state(self.checkpoint)  # compares its files with their checksums
        return resolve_model(str(self.checkpoint.resolve()))

    def _write_first_checkpoint(self) -> None:
        policy = self._first_policy()
        for source in self.sources:
            check_tokens(open_rollouts(source.directory), policy)
        super()._write_first_checkpoint()


def plan_sources(
    config: RunConfig,
    rollouts: Sequence[Path],
    checkpoint: Path | None,
    *,
    unused: bool = False,
    log: Callable[[str], object] = lambda text: None,
) -> tuple[RunConfig, list[Source]]:
    """The batches to learn from with the updates of each, and the config with the schedule that follows.

    `unused` leaves out what the runs that the batches lie in have learned from.
    """
    if checkpoint is not None and config.model.adapter:
        raise ConfigError(f"model.adapter is for model.path, but {checkpoint} is to be started from: remove one")
    if config.guard.action in ("fresh", "both"):
        raise ConfigError(
            f'guard.action is "{config.guard.action}", but `learn` generates nothing: use "halve" or "stop"'
        )
    directories = [batch for path in rollouts for batch in _batches_of(path)]
    if len({directory.resolve() for directory in directories}) < len(directories):
        raise StoreError("a generation batch is named twice: one pass reads each rollout once")
    sources: list[Source] = []
    would_serve = 0
    for directory in directories:
        if config.directory.resolve() in directory.resolve().parents:
            raise StoreError(f"{directory} belongs to {config.directory}: choose another name for the new run")
        batch = open_batch(directory, verify=False)
        left_out = _used_of(directory, batch.manifest) if unused else ()
        fresh = ~np.isin(batch.column("rollout_id"), from_ranges(left_out))
        groups = len(np.unique(batch.column("group")[fresh]))
        first = sources[-1].first_update + sources[-1].updates if sources else 0
        would_serve += groups // config.batch.prompts
        updates = min(groups // config.batch.prompts, config.schedule.updates - first)
        if updates:
            start = _start_in(_run_of(directory), config, checkpoint)
            sources.append(Source(directory.resolve(), batch.manifest, start, groups, first, updates, left_out))
    if not sources:
        left = " that its run has not learned from" if unused else ""
        raise ConfigError(f"batch.prompts is {config.batch.prompts}, more than the groups{left} of any batch: lower it")
    total = sources[-1].first_update + sources[-1].updates
    if total < would_serve:
        log(f"these rollouts would serve {would_serve} updates: {total} are taken, as schedule.updates says")
    schedule = {"kind": "staged", "updates": total, "stages": len(sources)}
    return make_config({**config.model_dump(mode="json"), "schedule": schedule}, source="learn"), sources


def _batches_of(path: Path) -> list[Path]:
    """Committed generation batches of a run directory, or the one that the path is."""
    if (path / "rollouts").is_dir():
        found = [directory for directory in batch_directories(path / "rollouts") if is_committed(directory)]
        if not found:
            raise StoreError(f"{path} has no committed generation batch yet: `stalewise generate` makes one")
        return found
    if not path.is_dir():
        raise StoreError(f"{path} does not exist: name a run directory or a generation batch in its `rollouts`")
    read_batch_manifest(path)  # says what is wrong if it is none
    return [path]


def _used_of(directory: Path, manifest: BatchManifest) -> Ranges:
    """Rollouts of a batch that the run which it lies in has learned from."""
    run = _run_of(directory)
    if run is None:
        raise StoreError(f"{directory} lies in no run: which of its rollouts were used is in the ledger of one")
    return consumed(read_ledger(ledger_path(run)), manifest.generation_batch)


def _run_of(batch: Path) -> Path | None:
    """The run directory that a generation batch lies in, where it does."""
    run = batch.resolve().parent.parent
    return run if (run / "config.resolved.json").is_file() else None


def _start_in(run: Path | None, config: RunConfig, checkpoint: Path | None) -> int | None:
    """Version, in `run`, of the policy that the new run starts from; None where it is not one of its policies."""
    if run is None:
        return None
    if checkpoint is not None:
        inside = checkpoint.resolve().parent == run / "checkpoints"
        return read_state(checkpoint)["version"] if inside else None
    theirs = read_config(run)
    policies = [(resolve_model(c.model.path, c.task.name), c.model.adapter) for c in (theirs, config)]
    return 0 if policies[0] == policies[1] else None


def open_rollouts(directory: Path) -> Batch:
    """Open another run's batch; what is wrong with it has to be repaired there."""
    try:
        return open_batch(directory)
    except StoreError as error:
        raise StoreError(f"{error} (with the command of the run that made it: `learn` generates nothing)") from error


def check_tokens(batch: Batch, policy: str) -> None:
    """Refuse rollouts that were made with another tokenizer than the policy's."""
    size = vocabulary_size(policy)
    for rows in batch.iter_rows():
        largest = max(ids.max(initial=-1) for ids in (rows.prompt_ids, rows.response_ids))
        if largest >= size:
            raise ModelError(
                f"{batch.directory} holds token {largest}, but the vocabulary of {policy} ends at {size - 1}: "
                "the rollouts were made with another tokenizer"
            )
    tokenizer = load_tokenizer(policy)
    first = [rollout for _, rollout in zip(range(READ_AGAIN), batch.iter_rollouts(), strict=False)]
    read = [tokenizer.decode(list(rollout.response_ids), skip_special_tokens=True) for rollout in first]
    if all(text != rollout.text for text, rollout in zip(read, first, strict=True)):
        raise ModelError(
            f"the tokenizer of {policy} reads {read[0]!r} where {batch.directory} has {first[0].text!r}: "
            "the rollouts were made with another tokenizer"
        )


def _without_places(record: dict[str, Any]) -> dict[str, Any]:
    """What must stay the same: rollouts may be moved, their content not."""
    return {**record, "batches": [{**batch, "directory": ""} for batch in record["batches"]]}
