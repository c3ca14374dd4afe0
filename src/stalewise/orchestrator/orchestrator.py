"""Looks at a run directory, decides what is next, and does it.

The orchestrator keeps no state of its own. What is next follows from the newest checkpoint: evaluate it if that is due;
roll back if the run collapsed; obtain the generation batches that it needs; train up to the next checkpoint. Each of
these commits its result, a checkpoint in the background; nothing is committed before what it depends on. After
`kill -9` the same command continues, on a CPU to bit-identical weights.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from stalewise.config import RunConfig, write_resolved
from stalewise.config.run_directory import RunResult, check_identity, environment, read_result
from stalewise.config.sections import SuiteSection
from stalewise.distributed import ALONE, Ranks
from stalewise.errors import ModelError, TaskError
from stalewise.models.loading import device_name
from stalewise.models.transfer import HostBuffers
from stalewise.orchestrator.checkpoint_writer import CheckpointWriter
from stalewise.orchestrator.collapse_guard import CollapseGuard
from stalewise.orchestrator.evaluation import Suites, definition_of, describe_evaluation, evaluate_checkpoint
from stalewise.orchestrator.model_check import check_model, report_problem, stage_problem
from stalewise.orchestrator.ranks import compute_reference, make_trainer
from stalewise.orchestrator.rollout_source import HeldRollouts, RolloutSource
from stalewise.orchestrator.run_log import RunLog
from stalewise.orchestrator.setup import (
    adopt_changes,
    check_vllm_room,
    drift_limits,
    log_move,
    verify_before,
    write_first_checkpoint,
)
from stalewise.orchestrator.stages import DriftBudget, begin_stage, forget_stages
from stalewise.orchestrator.update_loop import UpdateLoop, rest, selection_of
from stalewise.planning.memory import check_memory, offloads, pick_parallel
from stalewise.rollout.factory import (
    batch_plan,
    batch_problem,
    check_engine_devices,
    check_policy,
    make_sampler,
    unscored_problem,
)
from stalewise.rollout.generate import (
    BatchPlan,
    DeferredShards,
    HeldShards,
    Refill,
    ScoreCheck,
    generate_batch,
    recall_lengths,
)
from stalewise.rollout.sampler import LiveSampler, OffloadableSampler
from stalewise.rollout.workers.coordinator import Coordinator, is_being_written
from stalewise.rollout.workers.rank_workers import coordinator_of
from stalewise.rollout.workers.shard_queue import ShardQueue
from stalewise.staleness.collapse import Assessment, Degradation
from stalewise.staleness.schedule import Schedule
from stalewise.staleness.spent import SPENT_ESS
from stalewise.store import (
    Batch,
    BatchManifest,
    batch_directory,
    committed_shards,
    is_committed,
    open_batch,
    rewards_of_updates,
)
from stalewise.store.atomic import read_json, remove_temporaries, write_json_atomic
from stalewise.store.checkpoints import SpareFiles, checkpoint_directory, prune, read_state, versions, write_checkpoint
from stalewise.tasks import close_task
from stalewise.tasks.difficulty import COPY
from stalewise.trainer.lora import base_directory
from stalewise.trainer.reference import Reference, check_reference
from stalewise.trainer.trainer import NonFiniteUpdate, Trainer
from stalewise.types import ProgressCallback


class Orchestrator:
    """One process executing a run. The caller holds the `RunLock` of its directory."""

    def __init__(
        self,
        config: RunConfig,
        callback: ProgressCallback,
        source: RolloutSource | None = None,
        *,
        ranks: Ranks = ALONE,
        journal: str = "journal.jsonl",
    ) -> None:
        self.config, self.callback, self.directory, self.ranks = config, callback, config.directory, ranks
        if config.model.threads:
            torch.set_num_threads(config.model.threads)
        self.source = source or RolloutSource()
        self.run_log = RunLog(self.directory, journal)
        self.schedule = self.source.schedule(config.schedule, self.run_log.stages_path)
        self.guard = CollapseGuard(
            config.guard, self.run_log, evaluated_every=config.evaluation.every, uses_rewards=self.source.is_own
        )
        self.task = config.make_task()
        self.sampler = make_sampler(config, on_tokens=self._count_tokens, log=callback.log)
        self.coordinator = coordinator_of(Coordinator(config, journal.removesuffix(".jsonl"), callback.log), ranks)
        self.suites = Suites(config, callback.log)
        self.tokens = 0  # sampled in the current phase
        self.scores = ScoreCheck()  # of the current phase
        self.writer, self.held = CheckpointWriter(self.run_log, HostBuffers()), HeldRollouts()
        self.writer.on_commit = self.held.commit
        # Caches of what is on disk:
        self.trainer: Trainer | None = None
        self.trainer_key = object()
        self.offloads = False  # whether trainer and sampler leave the device while the other one works
        self.budget: DriftBudget | None = None
        self.states: dict[int, dict[str, Any]] = {}  # of checkpoints whose checksums were compared
        self.open_batches: dict[int, Batch] = {}  # likewise
        self._reference: Reference | None = None

    def run(self) -> RunResult:
        """Do what is next until the run is complete."""
        try:
            self.check_memory()
            self.prepare()
            while self.step():
                pass
            self.writer.finish()
            self.coordinator.complete()
            self.run_log.commit()
            return read_result(self.directory, self.schedule.updates)
        finally:
            self.close()

    def close(self) -> None:
        """Finish the checkpoint in the background; end the processes of rollout source, verifier and sampler."""
        self.source.stop()
        self.writer.close(self.callback.log)
        self.coordinator.close()
        self.sampler.close()
        close_task(self.task)
        self.suites.close()

    def check_memory(self) -> None:
        """Raise before anything is loaded where the model is too large, or cannot do what the config asks for."""
        if versions(self.directory)[-1:] == [self.schedule.updates]:
            return self.suites.check(Path(self.newest_policy()), self.run_log.suites)
        check_engine_devices(self.config.sampler, self.config.model, self.config.schedule)
        check_vllm_room(self.config, policy := self.newest_policy(), self.ranks.world)
        check_reference(self.config.objective, self.config.model, self.config.task.name, policy)
        if self.source.is_own:
            check_policy(self.config.sampler, Path(policy), self.task, self.config.longest_prompts(self.task))
        self.suites.check(Path(policy))
        self.offloads = self.ranks.world == 1 and offloads(self.config, policy)
        if warning := check_memory(self.config, policy, self.ranks.world, self.ranks.local_world):
            self.callback.log(warning)

    def prepare(self, *, learns: bool = True) -> None:
        """Check directory and policy, write version 0 if missing, and drop records of updates that were not saved."""
        self.check_directory()
        if is_new := not versions(self.directory):
            with self.run_log.timed("switch", reason="first checkpoint"):
                self.states[0] = write_first_checkpoint(self.config, self.newest_policy(), self.task, self.callback.log)
        newest = versions(self.directory)[-1]
        if newest == 0:
            self._check_model(is_new=is_new, learns=learns)
        if not is_new:
            verify_before(self.directory, partial(self._checkpoint, newest), self.schedule.updates, self.callback.log)
        self.run_log.drop_updates(first=newest)
        self.schedule = forget_stages(self.schedule, self.run_log.stages_path, newest)
        if learns and 0 < newest < self.schedule.updates and not self.guard.rollbacks.ended_at(newest):
            self._remove_checkpoints(self.schedule.forget_after(newest - 1), newest)  # what a kill has left
        recall_lengths(self.sampler, self.directory / "rollouts")
        self.coordinator.publish()
        self.source.start(self)

    def _check_model(self, *, is_new: bool, learns: bool) -> None:
        """Compare decoding and learning with plain forward passes; where they differ, leave no run behind."""
        first = self._checkpoint(0)
        kind = pick_parallel(self.config, str(first), self.ranks.world, self.ranks.local_world)
        try:
            with self.run_log.timed("switch", reason="check") as notes:
                learns = learns and kind != "sharded"  # a shard alone computes nothing
                what = (self.config, first, self.task, self.sampler, self.callback.log)
                notes["found"] = check_model(*what, learns=learns)
        except ModelError:
            if is_new:
                shutil.rmtree(first)  # a copy of model.path; without it another config may have this name
            raise

    def check_directory(self) -> None:
        """Check that the directory belongs to this config, and write the config and the environment into it."""
        self.source.check_directory(self.directory)
        remove_temporaries(self.directory, spare=partial(is_being_written, self.directory))
        check_identity(self.config)
        if adopt_changes(self.config.model_dump(mode="json"), self.run_log, self.callback.log):
            self.schedule = self.source.schedule(self.config.schedule, self.run_log.stages_path)
        if self.config.task.difficulty and not versions(self.directory):
            write_json_atomic(self.directory / COPY, read_json(self.config.task.difficulty), sealed=True)
        write_resolved(self.config, self.directory / "config.resolved.json")
        here = environment(device_name(self.config.model.device), torch.get_num_threads(), self.ranks.world)
        log_move(self.directory, here, self.callback.log)
        write_json_atomic(self.directory / "environment.json", here, sealed=True)
        self.guard.rollbacks.finish()

    def newest_policy(self) -> str:
        """The directory of the newest checkpoint, or of the model that becomes version 0."""
        if found := versions(self.directory):
            return str(checkpoint_directory(self.directory, found[-1]))
        return self.source.first_policy(self.config.model, self.config.task.name)

    def batch_directory(self, generation_batch: int) -> Path:
        """The directory of a generation batch of this run."""
        version = self.schedule.version_of(generation_batch)
        root = self.directory / "rollouts"
        return self.held.place(batch_directory(root, version=version, generation_batch=generation_batch))

    def _checkpoint(self, version: int) -> Path:
        """The directory of a checkpoint, whose checksums are compared once: no damaged policy is ever used."""
        directory = checkpoint_directory(self.directory, version)
        if version not in self.states:
            self.states[version] = read_state(directory)
        return directory

    def _batch_at(self, version: int) -> Batch:
        """The generation batch that this version learns from, whose checksums are compared once."""
        generation_batch = self.schedule.at(version).generation_batch
        known = self.open_batches.get(generation_batch)
        if known is None or not known.directory.is_dir():  # it had a temporary name
            batch = self._with_columns(self.source.open(self, generation_batch), generation_batch)
            self.open_batches = {generation_batch: batch}
        return self.open_batches[generation_batch]

    def newest_version(self) -> int:
        """The version of the newest checkpoint, which may still be being written."""
        return versions(self.directory)[-1] if self.writer.version is None else self.writer.version

    def step(self) -> bool:
        """Do the next thing. False: the run is complete."""
        self.writer.check()
        version = self.newest_version()
        if self._evaluation_is_due(version):
            self._evaluate(version)
        elif suite := self.suites.due(version, self.schedule.updates, self.run_log.suites):
            self._evaluate_suite(suite, version)
        elif self.guard.is_on and (assessment := self._assess(version)).degradation is not None:
            self._roll_back(assessment.degradation, assessment)
        elif version == self.schedule.updates:
            self._begin_stage(version)
            return False
        elif (missing := self.missing_batch(version)) is not None:
            self.source.obtain(self, missing)
        else:
            self._train(version, self._next_stop(version))
        return True

    def _evaluation_is_due(self, version: int) -> bool:
        every, done = self.config.evaluation.every, {record["version"] for record in self.run_log.evaluations}
        due = version in (0, self.schedule.updates) or (every > 0 and version % every == 0)
        return not done or (due and version not in done)

    def _assess(self, version: int) -> Assessment:
        """Which policies so far are good; rollouts that are committed and not yet used count."""
        rewards: list[tuple[float, float]] = []
        if version < self.schedule.updates and self.missing_batch(version) is None:
            first = self.schedule.updates_of(self.schedule.at(version).generation_batch).start
            rewards = rewards_of_updates(self._batch_at(version), self.config.batch.prompts)[version - first :]
        return self.guard.assess(self.schedule, version, rewards)

    def missing_batch(self, version: int) -> int | None:
        """The first generation batch that this version needs and that is not committed."""
        self._begin_stage(version)
        needed = self.source.batches_needed(self.schedule, version)
        return next((g for g in needed if not self.has_batch(g)), None)

    def has_batch(self, generation_batch: int) -> bool:
        """Whether a generation batch of this run is committed, with the columns that learning needs."""
        directory = self.batch_directory(generation_batch)
        if not is_committed(directory) or self.reference is None:
            return is_committed(directory)
        column = self.reference.column(directory.name)
        return all(map(column.has, committed_shards(directory)))

    @property
    def reference(self) -> Reference | None:
        """The policy from which the objective measures a divergence; None where it measures none."""
        if self.config.objective.kl and self._reference is None:
            section, model = self.config.objective, self.config.model
            self._reference = Reference(section, model, self.config.task.name, self.directory)
        return self._reference

    def _with_columns(self, batch: Batch, generation_batch: int, *, computes: bool = True) -> Batch:
        """The batch with what learning reads besides its shards; what is missing of it is computed now."""
        batch.weights = self.config.objective.reward_weights
        if self.config.batch.without_variance in ("drop", "refill"):
            batch.selection = selection_of(self.config, self.schedule, generation_batch)
        if not computes or self.reference is None:
            return batch
        batch.reference = self.reference.column(self.source.name_of(batch))
        if all(map(batch.reference.has, batch.manifest.shards)):
            return batch
        if isinstance(self.sampler, OffloadableSampler):
            self.sampler.sleep(weights=self.offloads)  # the reference takes its place
        rest(self.trainer, self.run_log, offload=self.offloads)
        with self.run_log.timed("switch", reason="reference") as notes:
            budget = self.config.learner.tokens_per_micro_batch
            notes["tokens"] = compute_reference(self.reference, batch, batch.reference, budget, self.ranks)
        self.callback.log(
            f"{batch.directory.name}: log-probabilities of {notes['tokens']:,} tokens under the reference "
            f"{self.reference.name}"
        )
        return batch

    def _begin_stage(self, version: int) -> None:
        def spent() -> dict[str, Any] | None:
            self._checkpoint(version)
            return self.states[version].get("spent")

        path, per_update = self.run_log.stages_path, self.config.batch.reserved
        self.schedule = begin_stage(self.schedule, path, version, spent=spent, per_update=per_update)

    def _next_stop(self, version: int) -> int:
        """The version of the next checkpoint: the end of the stage, a multiple of `every`, or an evaluation."""
        end = self.schedule.updates_of(self.schedule.at(version).generation_batch).stop
        every = (self.config.checkpoints.every, self.config.evaluation.every, *self.suites.periods())
        periods = filter(None, every)
        return min([end, *((version // every + 1) * every for every in periods)])

    def _evaluate(self, version: int) -> None:
        settings = self.config.evaluation
        self.begin_phase("evaluate", len(self.task.evaluation_prompts(settings.prompts)) * settings.samples)
        result = evaluate_checkpoint(
            self._checkpoint(version),
            version=version,
            task=self.task,
            sampler=self.sampler,
            prompts=settings.prompts,
            samples=settings.samples,
            rows_at_once=self.config.sampler.rollouts_per_shard,
            scores=self.scores,
            load=self._load,
        )
        self.run_log.log_event("evaluate", result.seconds, version=version)
        self.writer.join()  # no record of a version that does not exist
        self.run_log.log_evaluation(result.record())
        self.run_log.commit()
        self.callback.advance(result.prompts * result.samples)
        self.callback.log(describe_evaluation(result))

    def _evaluate_suite(self, suite: SuiteSection, version: int) -> None:
        self.begin_phase("evaluate", self.suites.responses(suite))
        self.writer.join()  # suites read the policy from its files
        result = self.suites.evaluate(suite, self._checkpoint(version), version, self.sampler, self.scores)
        self.run_log.log_suite({**result.record(), "definition": definition_of(suite)})
        self.run_log.log_event("evaluate", result.seconds, version=version, suite=suite.label)
        self.run_log.commit()
        self.callback.advance((result.prompts + result.excluded) * result.samples)
        self.callback.log(describe_evaluation(result))

    def begin_phase(self, what: str, total: int) -> None:
        """Tell the callback what begins, with how many rollouts or updates; make room on the device for sampling."""
        if what in ("generate", "evaluate"):
            rest(self.trainer, self.run_log, offload=self.offloads)
        self.tokens, self.scores = 0, ScoreCheck(self.config.task.max_unscored, self.callback.log)
        self.callback.begin(what, total)

    def _count_tokens(self, count: int) -> None:
        self.tokens += count
        self.writer.check()
        self.coordinator.check()
        self._advance(0)

    def _advance(self, rollouts: int) -> None:
        tokens = f"{self.tokens:,} tokens" if self.tokens else ""
        self.callback.advance(rollouts, "  ".join(filter(None, (tokens, self.scores.note))))

    def generate(self, generation_batch: int, checkpoint: Path | None = None) -> BatchManifest:
        """Generate what is missing of a batch, with the policy at `checkpoint` or with this run's own."""
        is_here = checkpoint is None  # else version 0 may not be, under which a reference column would be computed
        plan = batch_plan(self.config, self.schedule, generation_batch, self.guard.rollbacks.attempt(generation_batch))
        self.begin_phase("generate", plan.prompts * plan.group_size)
        with self.run_log.timed("generate", generation_batch=generation_batch, version=plan.version) as notes:
            checkpoint = checkpoint or self._checkpoint(plan.version)
            queue = self._order(plan, checkpoint)
            manifest = generate_batch(
                plan,
                checkpoint=checkpoint,
                rollouts=self.directory / "rollouts",
                task=self.task,
                sampler=self.sampler,
                on_shard=self._advance,
                source=queue,
                check=self.scores,
                load=self._load_for_generation,
                refill=(refill := self._refill(plan, checkpoint, queue)),
            )
            ordered = queue.source if isinstance(queue, DeferredShards) else queue
            if refill is not None:
                ordered = refill.last or ordered
                if refill.prompts:  # 0: the batch was complete already
                    notes |= {"refilled_prompts": refill.prompts - plan.prompts}
                    self.callback.log(f"generation batch {generation_batch}: {refill.describe(plan.prompts, manifest)}")
            notes |= {"rollouts": manifest.rows, "tokens": manifest.tokens}
            if isinstance(ordered, ShardQueue):
                notes |= self.coordinator.complete_batch(ordered)
        batch = open_batch(self.batch_directory(generation_batch), verify=False)
        self._check_batch(self._with_columns(batch, generation_batch, computes=is_here))
        return manifest

    def _refill(
        self, plan: BatchPlan, checkpoint: Path, first: ShardQueue | DeferredShards[ShardQueue]
    ) -> Refill | None:
        """What makes a batch longer until each update has enough groups with variance; None where nothing does."""
        if not plan.most_prompts:
            return None

        def order(longer: BatchPlan) -> ShardQueue:
            before = first.source if isinstance(first, DeferredShards) else first
            if isinstance(latest := refill.last or before, ShardQueue):
                self.coordinator.end_order(latest)
            refill.last = self.coordinator.order_batch(longer, checkpoint)
            return refill.last

        dealt = selection_of(self.config, self.schedule, plan.generation_batch)
        refill = Refill(plan.prompts, self.config.objective.reward_weights, dealt, order)
        return refill

    def _order(self, plan: BatchPlan, checkpoint: Path) -> ShardQueue | DeferredShards[ShardQueue]:
        """The shards of a batch. Those of a policy that is still being written are ordered when it is committed."""
        if self.writer.version != plan.version:
            return self.coordinator.order_batch(plan, checkpoint)
        directory = self.batch_directory(plan.generation_batch)

        def order(taken: Sequence[int]) -> ShardQueue | HeldShards:
            # What was sampled faster than the policy is written waits for it, and the run goes on.
            may_wait = not directory.exists() and not plan.most_prompts and self.reference is None
            if may_wait and self.writer.is_writing:
                return self.held.hold(directory, taken, partial(self.coordinator.provenance, plan, checkpoint))
            self.writer.join()
            return self.coordinator.order_batch(plan, checkpoint, taken)

        # Other ranks, workers and engines read the policy from the directory or the object store; a foreign policy is
        # compared with its files; shards that exist already are compared with it.
        alone = not (self.ranks.others or self.config.storage.url or plan.foreign_rollouts)
        takes = isinstance(self.sampler, LiveSampler) and self.config.workers.learner == "shares"
        is_new = not committed_shards(directory)
        if alone and takes and is_new:
            return DeferredShards(order)
        self.writer.join()
        return self.coordinator.order_batch(plan, checkpoint)

    def _load_for_generation(self, checkpoint: Path) -> None:
        with self.run_log.timed("switch", reason="sampler"):
            self._load(checkpoint)

    def _load(self, checkpoint: Path) -> None:
        """Load a policy into the sampler: from the trainer's memory where the trainer is at that version."""
        trainer, pending = self.trainer, self.writer.version
        if trainer is not None and checkpoint == checkpoint_directory(self.directory, trainer.version):
            key, alone = (self.trainer_key, trainer.version), not self.ranks.others
            if alone and isinstance(self.sampler, LiveSampler) and self.sampler.take(self.writer.policy(trainer), key):
                return
        if pending is not None and checkpoint == checkpoint_directory(self.directory, pending):
            self.writer.join()
        self.sampler.load(checkpoint)

    def _check_batch(self, batch: Batch) -> None:
        """Warn about rollouts from which nothing can be learned; raise where that is so from the start."""
        self._check_scores(batch)
        problem = batch_problem(batch)
        if problem and self.writer.version is None and versions(self.directory)[-1:] == [0]:
            command = f"stalewise inspect {self.directory} --group {batch.column('group')[0]}"
            shown = f"the rollouts are kept: `{command}` shows responses and rewards"
            raise TaskError(f"nothing can be learned from {self.task.name}: {problem}; {shown}")
        if problem:
            self.callback.log(f"{batch.directory.name}: {problem}")

    def _check_scores(self, batch: Batch) -> None:
        """Raise where too many rollouts have no score: those that have one are a selection."""
        if self.source.is_own and (unscored := unscored_problem(batch, self.config.task.max_unscored)):
            kept = f"with a repaired verifier choose another name, or delete {self.directory}"
            raise TaskError(f"{batch.directory.name}: {unscored}; the rollouts are kept as they are: {kept}")

    def _train(self, version: int, stop: int) -> None:
        """Train up to `stop`, or until the rollouts are spent, and write a checkpoint."""
        with self.run_log.timed("switch", reason="learner"):
            if isinstance(self.sampler, OffloadableSampler):
                self.sampler.sleep(weights=self.offloads, drop=True)
            trainer, batch = self._trainer_at(version), self._batch_at(version)
            if version == 0:  # the process that generated it may have been killed before it checked
                self._check_batch(batch)
            self._check_scores(batch)
            if self.budget is None:
                self.budget = DriftBudget(drift_limits(self.config), self.callback.log, self.run_log.budget_used())
            per_update, bound = self.config.batch.prompts, self.config.schedule.spent_ess or SPENT_ESS
            loop = UpdateLoop(
                self.schedule, self.run_log, self.budget, self.callback, per_update, bound, self._check_update
            )
            trainer.wake()  # first: batches are laid out for its graphs
            prepared = loop.prepare(batch, trainer, range(version, stop))
        self.begin_phase("learn", stop - version)
        start = time.perf_counter()
        try:
            spent = loop.run(prepared, trainer)
        except NonFiniteUpdate as error:
            self.trainer = None
            if not self.guard.is_on:
                raise
            self.callback.log(str(error))
            failed = self.run_log.updates[-1].update + 1 if self.run_log.updates else 0
            self._roll_back(Degradation("an update was not finite", failed + 1), self._assess(version))
            return
        stop = trainer.version
        self.run_log.log_event("learn", time.perf_counter() - start, first=version, stop=stop)
        with self.run_log.timed("switch", reason="checkpoint", version=stop):
            self._save(trainer, trainer.state() | ({"spent": spent} if spent else {}))

    def _save(self, trainer: Trainer, state: dict[str, Any]) -> None:
        """Copy the trainer's state to the host and write it in the background; at once where memory is short."""
        self.writer.free_buffers()
        version, schedule, ends = trainer.version, self.schedule, self.run_log.ends()
        write_tokens, size = self.run_log.tokens.detach(version), trainer.checkpoint_bytes()
        snapshot = self.writer.copy(trainer)

        def commit() -> dict[str, Any]:
            notes: dict[str, Any] = {}
            self.run_log.commit(ends)  # before the checkpoint: no record that led to it can be lost unnoticed
            write_tokens()
            save = trainer.save if snapshot is None else partial(snapshot.write, spare=self.writer.spare)
            write_checkpoint(self.directory, version, save=save, state=state, notes=notes, size=size)
            if self.config.storage.url:  # workers elsewhere wait for it
                clean_up()
            return notes

        def clean_up() -> None:
            # The run may be further by then, and later checkpoints committed: neither may change what is removed.
            self._remove_checkpoints(schedule, version, None if snapshot is None else self.writer.spare_for(size))
            self.coordinator.publish()

        self.states[version] = {"version": version, **state}  # its checksums are made as it is written
        if snapshot is None:
            self.writer.finish()
            commit()
            clean_up()
        else:
            self.writer.begin(version, commit, None if self.config.storage.url else clean_up, size)

    def _check_update(self, metrics: Mapping[str, float]) -> None:
        """Stop, before anything is saved, where the learner is not the policy that sampled; get memory for a copy."""
        self.writer.reserve(self.trainer)
        if self.source.is_own and (problem := stage_problem(self.config, metrics)):
            report_problem(self.config.model.check, problem, self.callback.log)

    def _trainer_at(self, version: int) -> Trainer:
        """The trainer at this version: the current one, or one made from the checkpoint."""
        if self.trainer is None or self.trainer.version != version:
            self.writer.join()
            checkpoint = self._checkpoint(version)
            if self.config.model.trains_adapters:
                base_directory(checkpoint)
                self._checkpoint(0)  # the base of the adapters must be there and undamaged
            self.run_log.drop_updates(first=version)  # a killed process may have logged more: they are taken again
            kind = pick_parallel(self.config, str(checkpoint), self.ranks.world, self.ranks.local_world)
            if change := self.run_log.log_world_size(self.ranks.world, kind):
                self.callback.log(change)
            what = (self.config, checkpoint, self.states[version], self.ranks, kind)
            rate_factor = self.guard.rollbacks.learning_rate_factor
            self.trainer = make_trainer(*what, self.offloads, rate_factor=rate_factor, log=self.callback.log)
            self.trainer_key = object()  # with the version, it identifies the weights that a sampler has taken
        return self.trainer

    def _remove_checkpoints(self, schedule: Schedule, version: int, spare: SpareFiles | None = None) -> None:
        """Keep those that make current and coming batches, and those to which a run may roll back from `version`."""
        needed = self.guard.needed_versions(schedule, version)
        refers_to_start = self.reference is not None and self.reference.name == "initial"
        if self.config.model.trains_adapters or refers_to_start:  # the adapters' base is version 0, too
            needed.add(0)
        if version < schedule.updates and self.source.is_own:
            first = schedule.at(version).generation_batch  # should it get damaged, it is made again
            last = min(first + schedule.lag, schedule.generation_batches - 1)
            needed |= {maker for g in range(first, last + 1) if (maker := schedule.version_of(g)) <= version}
        prune(self.directory, keep=self.config.checkpoints.keep, needed=needed, newest=version, spare=spare)

    def _roll_back(self, why: Degradation, assessment: Assessment) -> None:
        """Go back to the last good policy and continue from there as the config says."""
        self.writer.finish()
        self.source.stop()  # it must not write to batches that are moved away
        self.coordinator.withdraw()  # nor may workers
        to_version = self.guard.roll_back(self.schedule, why, assessment)
        self.trainer, self.open_batches = None, {}
        self.states = {version: state for version, state in self.states.items() if version <= to_version}
        self.schedule = forget_stages(self.schedule, self.run_log.stages_path, to_version)
        rate = self.guard.rollbacks.learning_rate_factor * self.config.optimizer.learning_rate
        self.callback.log(f"collapsed: {why.describe()}; back to version {to_version}, learning rate {rate:.3g}")
        self.source.start(self)
