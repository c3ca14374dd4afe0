"""Where the rollouts of a run come from: the part of an orchestrator that differs between kinds of runs.

`generate` makes one generation batch: it plans the batch, orders its shards from ranks and workers, samples and scores
them, adds rounds until enough groups have variance, and checks that something can be learned from the result.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stalewise.config import ScheduleSection
from stalewise.config.sections import ModelSection
from stalewise.errors import TaskError
from stalewise.models import resolve_model
from stalewise.orchestrator.ranks import compute_reference
from stalewise.orchestrator.stages import read_schedule
from stalewise.orchestrator.update_loop import release_trainer_memory, selection_of
from stalewise.rollout.factory import batch_plan, batch_problem, unscored_problem
from stalewise.rollout.generate import BatchPlan, DeferredShards, HeldShards, Refill, generate_batch
from stalewise.rollout.sampler import LiveSampler, OffloadableSampler
from stalewise.rollout.workers.shard_queue import ShardQueue
from stalewise.staleness.schedule import Schedule
from stalewise.store import Batch, BatchManifest, committed_shards, complete_manifests, open_batch
from stalewise.store.atomic import commit_directory, explain_write_errors, temporary_name
from stalewise.store.checkpoints import versions

if TYPE_CHECKING:
    from stalewise.orchestrator.orchestrator import Orchestrator


class RolloutSource:
    """Generates each batch in this process, between updates. `pipelined` and `offline` have the other sources."""

    is_own = True  # policies of this run make the rollouts, so rewards are those of its policies

    def schedule(self, section: ScheduleSection, stages_path: Path) -> Schedule:
        """The schedule of the run; for an open-ended one, with the stages so far."""
        return read_schedule(section, stages_path)

    def check_directory(self, directory: Path) -> None:
        """Raise a StoreError if the run directory belongs to another source."""

    def first_policy(self, model: ModelSection, task: str) -> str:
        """The directory of the model that becomes version 0."""
        return resolve_model(model.path, task)

    def start(self, run: Orchestrator) -> None:
        """Begin work in the background, if the source has any."""

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


def generate(run: Orchestrator, generation_batch: int, checkpoint: Path | None = None) -> BatchManifest:
    """Generate what is missing of a batch, with the policy at `checkpoint` or with the run's own."""
    is_here = checkpoint is None  # otherwise version 0 may be missing here, which a reference column may need
    plan = batch_plan(run.config, run.schedule, generation_batch, run.guard.rollbacks.attempt(generation_batch))
    run.begin_phase("generate", plan.prompts * plan.group_size)
    with run.run_log.timed("generate", generation_batch=generation_batch, version=plan.version) as notes:
        checkpoint = checkpoint or run.checkpoint_at(plan.version)
        queue = _order_shards(run, plan, checkpoint)
        refill = _make_refill(run, plan, checkpoint, queue)
        manifest = generate_batch(
            plan,
            checkpoint=checkpoint,
            rollouts=run.directory / "rollouts",
            task=run.task,
            sampler=run.sampler,
            on_shard=run.advance,
            source=queue,
            check=run.scores,
            load=run.load_for_generation,
            refill=refill,
        )
        ordered = queue.source if isinstance(queue, DeferredShards) else queue
        if refill is not None:
            ordered = refill.last or ordered
            if refill.prompts:  # 0: the batch was complete already
                notes |= {"refilled_prompts": refill.prompts - plan.prompts}
                run.callback.log(f"generation batch {generation_batch}: {refill.describe(plan.prompts, manifest)}")
        notes |= {"rollouts": manifest.rows, "tokens": manifest.tokens}
        if isinstance(ordered, ShardQueue):
            notes |= run.coordinator.complete_batch(ordered)
    batch = open_batch(run.batch_directory(generation_batch), verify=False)
    check_batch(run, with_columns(run, batch, generation_batch, computes=is_here))
    return manifest


def _order_shards(run: Orchestrator, plan: BatchPlan, checkpoint: Path) -> ShardQueue | DeferredShards[ShardQueue]:
    """Order the shards of a batch; if its policy is still being written, when that is committed."""
    if run.writer.version != plan.version:
        return run.coordinator.order_batch(plan, checkpoint)
    directory = run.batch_directory(plan.generation_batch)

    def order(taken: Sequence[int]) -> ShardQueue | HeldShards:
        # Rollouts that are sampled before their policy is written are held, and the run learns from them meanwhile.
        may_wait = not directory.exists() and not plan.most_prompts and run.reference is None
        if may_wait and run.writer.is_writing:
            return run.held.hold(directory, taken, partial(run.coordinator.provenance, plan, checkpoint))
        run.writer.join()
        return run.coordinator.order_batch(plan, checkpoint, taken)

    # Other ranks, workers and engines read the policy from the directory or the object store. A foreign policy is
    # compared with its files, and so are shards that exist already.
    alone = not (run.ranks.others or run.config.storage.url or plan.foreign_rollouts)
    takes = isinstance(run.sampler, LiveSampler) and run.config.workers.learner == "shares"
    is_new = not committed_shards(directory)
    if alone and takes and is_new:
        return DeferredShards(order)
    run.writer.join()
    return run.coordinator.order_batch(plan, checkpoint)


def _make_refill(
    run: Orchestrator, plan: BatchPlan, checkpoint: Path, first: ShardQueue | DeferredShards[ShardQueue]
) -> Refill | None:
    """Adds rounds to a batch until each update has enough groups with variance; None if the plan allows no more."""
    if not plan.most_prompts:
        return None

    def order(longer: BatchPlan) -> ShardQueue:
        before = first.source if isinstance(first, DeferredShards) else first
        if isinstance(latest := refill.last or before, ShardQueue):
            run.coordinator.end_order(latest)
        refill.last = run.coordinator.order_batch(longer, checkpoint)
        return refill.last

    selection = selection_of(run.config, run.schedule, plan.generation_batch)
    refill = Refill(plan.prompts, run.config.objective.reward_weights, selection, order)
    return refill


def with_columns(run: Orchestrator, batch: Batch, generation_batch: int, *, computes: bool = True) -> Batch:
    """The batch with what learning reads besides its shards.

    With `computes`, missing parts of a reference column are computed; otherwise the batch gets no reference.
    """
    weights = run.config.objective.reward_weights
    selection = None
    if run.config.batch.without_variance in ("drop", "refill"):
        selection = selection_of(run.config, run.schedule, generation_batch)
    reference = run.reference
    if not computes or reference is None:
        return batch.with_columns(reward_weights=weights, selection=selection)
    column = reference.column(run.source.name_of(batch))
    batch = batch.with_columns(reward_weights=weights, selection=selection, reference=column)
    if all(map(column.has, batch.manifest.shards)):
        return batch
    if isinstance(run.sampler, OffloadableSampler):
        run.sampler.sleep(weights=run.offloads)  # the reference needs its memory
    release_trainer_memory(run.trainer, run.run_log, offload=run.offloads)
    with run.run_log.timed("switch", reason="reference") as notes:
        budget = run.config.learner.tokens_per_micro_batch
        notes["tokens"] = compute_reference(reference, batch, column, budget, run.ranks)
    run.callback.log(
        f"{batch.directory.name}: log-probabilities of {notes['tokens']:,} tokens under the reference {reference.name}"
    )
    return batch


def check_batch(run: Orchestrator, batch: Batch) -> None:
    """Warn about rollouts from which nothing can be learned; raise if that is so from the start of the run."""
    check_scores(run, batch)
    problem = batch_problem(batch)
    if problem and run.writer.version is None and versions(run.directory)[-1:] == [0]:
        command = f"stalewise inspect {run.directory} --group {batch.column('group')[0]}"
        raise TaskError(
            f"nothing can be learned from {run.task.name}: {problem}; the rollouts are kept: `{command}` shows "
            "responses and rewards"
        )
    if problem:
        run.callback.log(f"{batch.directory.name}: {problem}")


def check_scores(run: Orchestrator, batch: Batch) -> None:
    """Raise if too many rollouts have no score: the others would be a biased selection."""
    if run.source.is_own and (unscored := unscored_problem(batch, run.config.task.max_unscored)):
        raise TaskError(
            f"{batch.directory.name}: {unscored}; the rollouts are kept as they are: with a repaired verifier choose "
            f"another name, or delete {run.directory}"
        )


class HeldRollouts:
    """Generation batches whose policy is still being written: the run learns from them, and commits them after it.

    They have temporary names until then, so a process that is killed leaves nothing of them.
    """

    def __init__(self) -> None:
        self._held: dict[Path, tuple[HeldShards, Callable[[], Mapping[str, Any]]]] = {}

    def hold(self, directory: Path, taken: Sequence[int], provenance: Callable[[], Mapping[str, Any]]) -> HeldShards:
        """The shards of a batch, with `taken` marked as taken; `provenance` goes into their manifests at the commit."""
        if directory not in self._held:
            self._held[directory] = HeldShards(temporary_name(directory) / directory.name), provenance
        shards, _ = self._held[directory]
        shards.take(list(taken), len(taken))
        return shards

    def location(self, directory: Path) -> Path:
        """The present directory of a batch: the temporary one if the batch is held."""
        return self._held[directory][0].directory if directory in self._held else directory

    def commit(self) -> None:
        """Rename the batches to their own names, once their policy is committed."""
        while self._held:
            directory, (shards, provenance) = self._held.popitem()
            if shards.directory.is_dir():
                complete_manifests(shards.directory, provenance())
                _remove_leftovers(directory)
                commit_directory(shards.directory, directory)
                with contextlib.suppress(OSError):  # the next start removes it
                    shards.directory.parent.rmdir()


def _remove_leftovers(directory: Path) -> None:
    """Remove shards under this name: a late worker made them for an order that was withdrawn."""
    if directory.exists():
        left = temporary_name(directory)
        with explain_write_errors(directory, 0):
            directory.rename(left)
        shutil.rmtree(left, ignore_errors=True)
