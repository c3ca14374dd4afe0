"""Training on rollouts that exist already: one pass, with any objective.

The rollouts stay where they are and are never changed. The new run directory holds everything else, and
`sources.json`, which names the rollouts. The same command continues after `kill -9`, as in a run that generates.

Versions: the policy from which the new run starts is its version 0. Let s be the version of that policy in the run that
made the rollouts. A rollout that version v of that run made counts as version v − s; so its age is the updates since
the start plus s − v, as if that run had continued. A rollout of a later policy counts as fresh when its batch is used.
If another run made the starting policy, all rollouts count as version 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from stalewise import store
from stalewise.config import RunConfig, ScheduleSection, make_config
from stalewise.config.run import temperature_warning
from stalewise.config.run_directory import RESOLVED, is_started, read_config, run_nearby
from stalewise.config.sections import ModelSection
from stalewise.errors import ConfigError, ModelError, StoreError
from stalewise.models import resolve_model
from stalewise.models.loading import load_tokenizer, vocabulary_size
from stalewise.orchestrator.rollout_source import RolloutSource
from stalewise.staleness.schedule import BatchSpan, ListedSchedule, Schedule
from stalewise.store import atomic, checkpoints
from stalewise.store.manifest import BATCH_MANIFEST
from stalewise.store.reader import parts_of
from stalewise.store.records import SOURCES, read_record
from stalewise.store.reward_versions import FIRST, BatchRewards, find_version

if TYPE_CHECKING:
    from stalewise.orchestrator.orchestrator import Orchestrator

FORMAT = "stalewise.sources/1"
FILE = "sources.json"
RENAME = "choose another name for the new run"
DECODED = 8  # responses that are decoded again to check that the tokenizer is the same


@dataclass(frozen=True, slots=True)
class SourceBatch(BatchSpan):
    """A generation batch of another run to learn from."""

    directory: Path
    manifest: store.BatchManifest
    start: int | None  # version of the starting policy in the run that made the batch; None if it is of another run
    groups: int
    left_out: store.Ranges = ()  # ids of rollouts not to learn from
    rewards: BatchRewards | None = None  # None: the first ones

    @property
    def version(self) -> int:
        """The batch's version, counted from the starting policy."""
        return 0 if self.start is None else min(self.manifest.version - self.start, self.first_update)

    def record(self) -> dict[str, Any]:
        """The entry in `sources.json`."""
        return {
            "directory": str(self.directory),
            "generation_batch": self.manifest.generation_batch,
            "version": self.manifest.version,
            "counts_as_version": self.version,
            "groups": self.groups,
            "first_update": self.first_update,
            "updates": self.planned_updates,
            "shards": [shard.sha256 for shard in self.manifest.shards],
            **({"left_out": [list(interval) for interval in self.left_out]} if self.left_out else {}),
            **({"rewards": self.rewards.name, "rewards_sha256": self.rewards.sha256} if self.rewards else {}),
        }


class OfflineBatch(store.Batch):
    """A batch without the rollouts that are left out, with versions counted from the starting policy."""

    def __init__(self, source: SourceBatch) -> None:
        batch = _open_committed(source.directory)
        super().__init__(batch.directory, batch.manifest)
        self.source = source
        if source.rewards is not None:
            values = source.rewards.values(super().column("rollout_id"))
            known = values[~np.isnan(values)]
            mean, failed = float(known.mean()) if len(known) else None, len(values) - len(known)
            self.manifest = replace(batch.manifest, reward_mean=mean, verifier_errors=failed, extra={})

    def column(self, name: str) -> npt.NDArray[Any]:
        """One light column of the rollouts to learn from."""
        values = super().column(name)
        if name == "reward" and self.source.rewards is not None:
            values = self.source.rewards.values(super().column("rollout_id"))
        if not self.source.left_out:
            return values
        return values[~np.isin(super().column("rollout_id"), store.from_ranges(self.source.left_out))]

    def reward_parts(self) -> tuple[npt.NDArray[np.int64], dict[str, npt.NDArray[np.float64]]]:
        """Ids and parts of the rewards that are learned from."""
        return super().reward_parts() if self.source.rewards is None else parts_of([self.source.rewards.table])

    def take(self, rollout_ids: npt.ArrayLike) -> store.RolloutColumns:
        """Fetch the given rollouts in the given order."""
        rows, start, newest = super().take(rollout_ids), self.source.start, np.int32(self.source.first_update)
        columns = (rows.version_first, rows.version_last)
        first, last = (np.zeros_like(v) if start is None else np.minimum(v - np.int32(start), newest) for v in columns)
        reward = rows.reward if self.source.rewards is None else self.source.rewards.values(rows.rollout_id)
        return replace(rows, version_first=first, version_last=last, reward=reward)


class OfflineRollouts(RolloutSource):
    """Rollouts of other runs. The policy starts at `checkpoint`, or at the config's model."""

    is_own = False

    def __init__(self, sources: Sequence[SourceBatch], checkpoint: Path | None) -> None:
        self.sources, self.checkpoint = tuple(sources), checkpoint
        self.checked_policy: str | None = None

    def schedule(self, section: ScheduleSection, stages_path: Path) -> Schedule:
        """One pass through the batches."""
        return ListedSchedule(section.updates, section.updates, stages=self.sources)

    def check_directory(self, directory: Path) -> None:
        """Raise if the run learned from other rollouts; otherwise write `sources.json`."""
        start = str(self.checkpoint.resolve()) if self.checkpoint else None
        record = {"format": FORMAT, "checkpoint": start, "batches": [source.record() for source in self.sources]}
        path = directory / FILE
        if is_started(directory):
            if not path.exists():
                raise StoreError(f"{directory} is a run with rollouts of its own: {RENAME}")
            if _without_directories(read_record(path, SOURCES)) != _without_directories(record):
                other = "other rollouts or from another checkpoint"
                raise StoreError(f"{directory} learned from {other} (see {path}): {RENAME}")
        atomic.write_json_atomic(path, record, sealed=True)

    def first_policy(self, model: ModelSection, task: str) -> str:
        """The directory of the model that becomes version 0, once its checksums and its tokenizer were checked."""
        if self.checked_policy is None:
            start = self.checkpoint
            if start and (start / "manifest.json").exists():
                checkpoints.read_state(start)  # compares checksums
            policy = resolve_model(str(start.resolve())) if start else resolve_model(model.path, task)
            for source in self.sources:
                check_tokens(_open_committed(source.directory), policy)
            self.checked_policy = policy
        return self.checked_policy

    def batches_needed(self, schedule: Schedule, version: int) -> range:
        """None: all of them exist."""
        return range(0)

    def name_of(self, batch: store.Batch) -> str:
        """The name of a batch in this run: those of several runs may have the same name."""
        place = next(n for n, source in enumerate(self.sources) if source.directory == batch.directory.resolve())
        return f"{place:03d}-{batch.directory.name}"

    def open(self, run: Orchestrator, generation_batch: int) -> store.Batch:
        """Open a batch of another run and compare its files with their checksums."""
        return OfflineBatch(self.sources[generation_batch])


def plan_sources(
    config: RunConfig,
    rollouts: Sequence[Path],
    checkpoint: Path | None,
    *,
    unused: bool = False,
    rewards: str = FIRST,
    log: Callable[[str], object] = lambda text: None,
) -> tuple[RunConfig, list[SourceBatch]]:
    """The config with the schedule that these rollouts allow, and their batches; `unused` skips consumed rollouts."""
    if checkpoint is not None and config.model.adapter:
        raise ConfigError(f"model.adapter belongs to model.path, but training starts at {checkpoint}: remove one")
    if (action := config.guard.action) in ("fresh", "both"):
        raise ConfigError(f'guard.action is "{action}", but `learn` generates nothing: use "halve" or "stop"')
    if rewards != FIRST:
        _check_rewards(rewards, config.objective.reward_weights, config.batch.without_variance)
    directories = [batch for path in rollouts for batch in _batches_of(path)]
    if len({directory.resolve() for directory in directories}) < len(directories):
        raise StoreError("a generation batch is named twice: one pass reads each rollout once")
    sources, possible, total = list[SourceBatch](), 0, 0
    for directory in directories:
        if config.directory.resolve() in directory.resolve().parents:
            raise StoreError(f"{directory} belongs to {config.directory}: {RENAME}")
        batch = store.open_batch(directory, verify=False)
        above, left_out = directory.resolve().parent.parent, ()
        run = above if (above / RESOLVED).is_file() else None
        if unused:
            if run is None:
                raise StoreError(f"{directory} lies in no run, whose ledger would say which of its rollouts were used")
            left_out = store.consumed(store.read_ledger(store.ledger_path(run)), batch.manifest.generation_batch)
        fresh = ~np.isin(batch.column("rollout_id"), store.from_ranges(left_out))
        if config.batch.without_variance in ("drop", "refill"):  # fewer updates, each on as many groups with variance
            batch = batch.with_columns(reward_weights=config.objective.reward_weights)
            fresh &= batch.informative()
        groups = len(np.unique(batch.column("group")[fresh]))
        possible += groups // config.batch.prompts
        updates = min(groups // config.batch.prompts, config.schedule.updates - total)
        if updates:
            start = _start_in(run, config.model, config.task.name, checkpoint)
            span = (len(sources), total, updates)
            chosen = _rewards(run, rewards, batch)
            sources.append(SourceBatch(*span, directory.resolve(), batch.manifest, start, groups, left_out, chosen))
            total += updates
    if not sources:
        left = " that its run has not learned from" if unused else ""
        kind = "" if config.batch.without_variance in ("keep", "skip") else " with variance"
        raise ConfigError(
            f"batch.prompts is {config.batch.prompts}, more than the groups{kind}{left} of any batch: lower it"
        )
    for sampled in sorted({one.temperature for source in sources for one in source.manifest.samplers}):
        if warning := temperature_warning(sampled, config.objective.policy_temperature):
            log(warning)
    if rewards != FIRST:
        log(f"learning from the rewards {rewards!r}")
    if total < possible:
        log(f"these rollouts would serve {possible} updates: {total} are taken, as schedule.updates says")
    schedule = {"kind": "staged", "updates": total, "stages": len(sources)}
    return make_config({**config.model_dump(mode="json"), "schedule": schedule}, source="learn"), sources


def _check_rewards(name: str, weights: Mapping[str, float], without_variance: str) -> None:
    """Refuse settings that use the first rewards if the run learns from other ones."""
    if weights:
        raise ConfigError(
            f"objective.reward_weights weigh parts of the first rewards, but the rewards {name!r} are learned from: "
            "remove them; `stalewise rescore --weight PART=WEIGHT` makes weighted rewards"
        )
    if without_variance in ("drop", "refill"):
        raise ConfigError(
            f'batch.without_variance is "{without_variance}", which chooses groups by the first rewards, but the '
            f'rewards {name!r} are learned from: use "skip"'
        )


def _rewards(run: Path | None, name: str, batch: store.Batch) -> BatchRewards | None:
    """The rewards of a batch with this name; None for the first ones."""
    if name == FIRST:
        return None
    if run is None:
        raise StoreError(f"{batch.directory} lies in no run, which would have its rewards {name!r}")
    return find_version(run, name).rewards_of(batch.manifest, batch.directory)


def _batches_of(path: Path) -> list[Path]:
    """The committed generation batches of a run directory, or the batch that the path is."""
    if (path / "rollouts").is_dir():
        batches = list(filter(store.is_committed, store.batch_directories(path / "rollouts")))
        if not batches:
            raise StoreError(f"{path} has no committed generation batch yet: `stalewise generate` makes one")
        return batches
    if not path.exists():
        raise StoreError(f"{path} does not exist: name a run directory or a generation batch in its `rollouts`")
    if not (path / BATCH_MANIFEST).is_file() and not (path.is_dir() and path.parent.name == "rollouts"):
        nearby = run_nearby(path)
        raise StoreError(f"{path} is neither a run nor a generation batch: {nearby}, or a batch in its `rollouts`")
    store.read_batch_manifest(path)  # raises where it is not committed
    return [path]


def _start_in(run: Path | None, model: ModelSection, task: str, checkpoint: Path | None) -> int | None:
    """The version of the starting policy in `run`; None if it is not one of that run's policies."""
    if run is None:
        return None
    if checkpoint is not None:
        inside = checkpoint.resolve().parent == run / "checkpoints"
        return checkpoints.read_state(checkpoint)["version"] if inside else None
    theirs = read_config(run)
    first = (resolve_model(theirs.model.path, theirs.task.name), theirs.model.adapter)
    return 0 if first == (resolve_model(model.path, task), model.adapter) else None


def _open_committed(directory: Path) -> store.Batch:
    """Open another run's batch. Damage must be repaired by the command of that run."""
    try:
        return store.open_batch(directory)
    except StoreError as error:
        raise StoreError(f"{error} (with the command of the run that made it: `learn` generates nothing)") from error


def check_tokens(batch: store.Batch, policy: str) -> None:
    """Raise ModelError for rollouts of another tokenizer than the policy's."""
    size, why = vocabulary_size(policy), "the rollouts were made with another tokenizer"
    for rows in batch.iter_rows():
        largest = max(ids.max(initial=-1) for ids in (rows.prompt_ids, rows.response_ids))
        if largest >= size:
            end = f"the vocabulary of {policy} ends at {size - 1}"
            raise ModelError(f"{batch.directory} holds token {largest}, but {end}: {why}")
    tokenizer = load_tokenizer(policy)
    rollouts = list(islice(batch.iter_rollouts(), DECODED))
    texts = [tokenizer.decode(list(rollout.response_ids), skip_special_tokens=True) for rollout in rollouts]
    if all(text != rollout.text for text, rollout in zip(texts, rollouts, strict=True)):
        theirs = f"{batch.directory} has {rollouts[0].text!r}"
        raise ModelError(f"the tokenizer of {policy} reads {texts[0]!r} where {theirs}: {why}")


def _without_directories(record: dict[str, Any]) -> dict[str, Any]:
    """The part of `sources.json` that identifies the rollouts, without directories, which may be moved."""
    return {**record, "batches": [{**batch, "directory": ""} for batch in record["batches"]]}
