"""Looks at a run directory, decides what is next, and does it.

The orchestrator keeps no state of its own. The next action follows from the newest checkpoint: evaluate it if that is
due; roll back if the run collapsed; obtain the generation batches that it needs; train up to the next checkpoint. Each
action commits its result, and a checkpoint is committed in the background. Nothing is committed before what it depends
on. After `kill -9` the same command continues, on a CPU to bit-identical weights.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from stalewise.config import RunConfig, write_resolved
from stalewise.config.run_directory import (
    RunResult,
    check_identity,
    environment,
    read_result,
    repair_advice,
)
from stalewise.config.sections import SuiteSection
from stalewise.distributed import ALONE, Ranks
from stalewise.errors import ModelError
from stalewise.models.loading import device_name
from stalewise.models.transfer import HostBuffers
from stalewise.orchestrator.checkpoint_writer import CheckpointWriter
from stalewise.orchestrator.collapse_guard import CollapseGuard
from stalewise.orchestrator.evaluation import Suites, definition_of, describe_evaluation, evaluate_checkpoint
from stalewise.orchestrator.model_check import check_model, report_problem, stage_problem
from stalewise.orchestrator.ranks import make_trainer
from stalewise.orchestrator.rollout_source import (
    HeldRollouts,
    RolloutSource,
    check_batch,
    check_scores,
    generate,
    with_columns,
)
from stalewise.orchestrator.run_log import RunLog
from stalewise.orchestrator.setup import (
    TASK_FILES,
    adopt_changes,
    check_vllm_room,
    drift_limits,
    log_changed_files,
    log_move,
    verify_before,
    write_first_checkpoint,
)
from stalewise.orchestrator.stages import DriftBudget, begin_stage, forget_stages
from stalewise.orchestrator.update_loop import UpdateLoop, release_trainer_memory
from stalewise.planning.memory import check_memory, offloads, pick_parallel
from stalewise.rollout.factory import check_engine_devices, check_policy, make_sampler
from stalewise.rollout.generate import ScoreCheck, recall_lengths
from stalewise.rollout.sampler import LiveSampler, OffloadableSampler
from stalewise.rollout.workers.coordinator import Coordinator, is_being_written
from stalewise.rollout.workers.rank_workers import coordinator_of
from stalewise.staleness.collapse import Assessment, Degradation
from stalewise.staleness.schedule import Schedule
from stalewise.staleness.spent import SPENT_ESS
from stalewise.store import (
    Batch,
    BatchManifest,
    batch_directory,
    committed_shards,
    is_committed,
    rewards_of_updates,
)
from stalewise.store.atomic import read_json, remove_temporaries, write_json_atomic
from stalewise.store.checkpoints import SpareFiles, checkpoint_directory, prune, read_state, versions, write_checkpoint
from stalewise.tasks import close_task
from stalewise.tasks.difficulty import COPY
from stalewise.trainer.lora import base_directory
from stalewise.trainer.reference import Reference, check_reference
from stalewise.trainer.trainer import NonFiniteUpdate, Trainer
from stalewise.types import ProgressCallback, report_evaluation


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
        self.config = config
        self.callback = callback
        self.directory = config.directory
        self.ranks = ranks
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
        self.scores = ScoreCheck()  # verifier errors of the current phase
        self.held = HeldRollouts()
        self.writer = CheckpointWriter(self.run_log, HostBuffers())
        self.writer.on_commit = self.held.commit
        # Caches of what is on disk:
        self.trainer: Trainer | None = None
        self.trainer_key = object()
        self.offloads = False  # whether trainer and sampler leave the device while the other one works
        self.budget: DriftBudget | None = None
        self.states: dict[int, dict[str, Any]] = {}  # states of checkpoints whose checksums were compared
        self.open_batches: dict[int, Batch] = {}  # generation batches whose checksums were compared
        self._reference: Reference | None = None

    def run(self) -> RunResult:
        """Take one action after the other until the run is complete."""
        try:
            self.check_before_loading()
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
        """Finish the checkpoint in the background, and end the processes of rollout source, verifier and sampler."""
        self.source.stop()
        self.writer.close(self.callback.log)
        self.coordinator.close()
        self.sampler.close()
        close_task(self.task)
        self.suites.close()

    def check_before_loading(self) -> None:
        """Check suites, engine, reference, context and memory; raises before anything is loaded."""
        if versions(self.directory)[-1:] == [self.schedule.updates]:
            return self.suites.check(Path(self.newest_policy()), self.run_log.suites)
        check_engine_devices(self.config.sampler, self.config.model, self.config.schedule)
        policy = self.newest_policy()
        check_vllm_room(self.config, policy, self.ranks.world)
        check_reference(self.config.objective, self.config.model, self.config.task.name, policy)
        if self.source.is_own:
            check_policy(self.config.sampler, Path(policy), self.task, self.config.longest_prompts(self.task))
        self.suites.check(Path(policy))
        self.offloads = self.ranks.world == 1 and offloads(self.config, policy)
        if warning := check_memory(self.config, policy, self.ranks.world, self.ranks.local_world):
            self.callback.log(warning)

    def prepare(self, *, learns: bool = True) -> None:
        """Check directory and policy, write version 0 if it is missing, and drop records of unsaved updates.

        Without `learns`, nothing will be trained in this process.
        """
        self.check_directory()
        if is_new := not versions(self.directory):
            with self.run_log.timed("switch", reason="first checkpoint"):
                self.states[0] = write_first_checkpoint(self.config, self.newest_policy(), self.task, self.callback.log)
        newest = versions(self.directory)[-1]
        if newest == 0:
            self._check_model(is_new=is_new, learns=learns)
        if not is_new:
            verify_before(self.directory, partial(self.checkpoint_at, newest), self.schedule.updates, self.callback.log)
        self.run_log.drop_updates(first=newest)
        self.schedule = forget_stages(self.schedule, self.run_log.stages_path, newest)
        if learns and 0 < newest < self.schedule.updates and not self.guard.rollbacks.ended_at(newest):
            self._remove_checkpoints(self.schedule.forget_after(newest - 1), newest)  # a killed process left them
        recall_lengths(self.sampler, self.directory / "rollouts")
        self.coordinator.publish()
        self.source.start(self)

    def _check_model(self, *, is_new: bool, learns: bool) -> None:
        """Compare decoding and training with plain forward passes. If they differ, remove the new version 0."""
        first = self.checkpoint_at(0)
        kind = pick_parallel(self.config, str(first), self.ranks.world, self.ranks.local_world)
        try:
            with self.run_log.timed("switch", reason="check") as notes:
                learns = learns and kind != "sharded"  # a shard alone cannot run a forward pass
                notes["found"] = check_model(
                    self.config, first, self.task, self.sampler, self.callback.log, learns=learns
                )
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
        here[TASK_FILES] = log_changed_files(
            self.config.task.options, self.run_log, self.config.schedule.updates, self.callback.log
        )
        write_json_atomic(self.directory / "environment.json", here, sealed=True)
        self.guard.rollbacks.finish()

    def newest_policy(self) -> str:
        """The directory of the newest checkpoint, or of the model that becomes version 0."""
        if existing := versions(self.directory):
            return str(checkpoint_directory(self.directory, existing[-1]))
        return self.source.first_policy(self.config.model, self.config.task.name)

    def batch_directory(self, generation_batch: int) -> Path:
        """The directory of a generation batch of this run."""
        version = self.schedule.version_of(generation_batch)
        root = self.directory / "rollouts"
        return self.held.location(batch_directory(root, version=version, generation_batch=generation_batch))

    def checkpoint_at(self, version: int) -> Path:
        """The directory of a checkpoint. Its checksums are compared once, so that no damaged policy is used."""
        directory = checkpoint_directory(self.directory, version)
        if version not in self.states:
            self.states[version] = read_state(directory)
        return directory

    def _batch_at(self, version: int) -> Batch:
        """The generation batch that this version learns from. Its checksums are compared once."""
        generation_batch = self.schedule.at(version).generation_batch
        batch = self.open_batches.get(generation_batch)
        if batch is None or not batch.directory.is_dir():  # it had a temporary name
            batch = with_columns(self, self.source.open(self, generation_batch), generation_batch)
            self.open_batches = {generation_batch: batch}
        return self.open_batches[generation_batch]

    def newest_version(self) -> int:
        """The version of the newest checkpoint, which may not be committed yet."""
        return versions(self.directory)[-1] if self.writer.version is None else self.writer.version

    def step(self) -> bool:
        """Take the next action. Returns False if the run is complete."""
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
        every = self.config.evaluation.every
        done = {record["version"] for record in self.run_log.evaluations}
        due = version in (0, self.schedule.updates) or (every > 0 and version % every == 0)
        return not done or (due and version not in done)

    def _assess(self, version: int) -> Assessment:
        """Which policies so far are good; the rewards of committed rollouts count before they are used."""
        rewards: list[tuple[float, float]] = []
        if version < self.schedule.updates and self.missing_batch(version) is None:
            first = self.schedule.updates_of(self.schedule.at(version).generation_batch).start
            rewards = rewards_of_updates(self._batch_at(version), self.config.batch.prompts)[version - first :]
        return self.guard.assess(self.schedule, version, rewards)

    def missing_batch(self, version: int) -> int | None:
        """The first generation batch that this version needs and that is not committed."""
        self._begin_stage(version)
        needed = self.source.batches_needed(self.schedule, version)
        return next((batch for batch in needed if not self.has_batch(batch)), None)

    def has_batch(self, generation_batch: int) -> bool:
        """Whether a generation batch of this run is committed, with the columns that learning needs."""
        directory = self.batch_directory(generation_batch)
        if not is_committed(directory) or self.reference is None:
            return is_committed(directory)
        column = self.reference.column(directory.name)
        return all(map(column.has, committed_shards(directory)))

    @property
    def reference(self) -> Reference | None:
        """The policy from which the objective measures a divergence; None without a divergence."""
        if self.config.objective.kl and self._reference is None:
            section, model = self.config.objective, self.config.model
            self._reference = Reference(section, model, self.config.task.name, self.directory)
        return self._reference

    def _begin_stage(self, version: int) -> None:
        def spent() -> dict[str, Any] | None:
            self.checkpoint_at(version)
            return self.states[version].get("spent")

        per_update = self.config.batch.reserved
        self.schedule = begin_stage(
            self.schedule, self.run_log.stages_path, version, spent=spent, per_update=per_update
        )

    def _next_stop(self, version: int) -> int:
        """The version of the next checkpoint: the end of the stage, or a multiple of a period in the config."""
        end = self.schedule.updates_of(self.schedule.at(version).generation_batch).stop
        periods = (self.config.checkpoints.every, self.config.evaluation.every, *self.suites.periods())
        return min([end, *((version // every + 1) * every for every in periods if every)])

    def _evaluate(self, version: int) -> None:
        settings = self.config.evaluation
        self.begin_phase("evaluate", len(self.task.evaluation_prompts(settings.prompts)) * settings.samples)
        result = evaluate_checkpoint(
            self.checkpoint_at(version),
            version=version,
            task=self.task,
            sampler=self.sampler,
            prompts=settings.prompts,
            samples=settings.samples,
            rows_at_once=self.config.sampler.rollouts_per_shard,
            scores=self.scores,
            load=self._load,
            reward_weights=self.config.objective.reward_weights,
        )
        self.run_log.log_event("evaluate", result.seconds, version=version)
        self.writer.join()  # a record must not be of a version that does not exist
        record = result.record()
        self.run_log.log_evaluation(record)
        self.run_log.commit()
        self.callback.advance(result.prompts * result.samples)
        report_evaluation(self.callback, record)
        self.callback.log(describe_evaluation(result))

    def _evaluate_suite(self, suite: SuiteSection, version: int) -> None:
        self.begin_phase("evaluate", self.suites.responses(suite))
        self.writer.join()  # suites read the policy from its files
        result = self.suites.evaluate(suite, self.checkpoint_at(version), version, self.sampler, self.scores)
        record = {**result.record(), "definition": definition_of(suite)}
        self.run_log.log_suite(record)
        self.run_log.log_event("evaluate", result.seconds, version=version, suite=suite.label)
        self.run_log.commit()
        self.callback.advance((result.prompts + result.excluded) * result.samples)
        report_evaluation(self.callback, record)
        self.callback.log(describe_evaluation(result))

    def begin_phase(self, what: str, total: int) -> None:
        """Report the start of a phase to the callback, and free device memory before sampling."""
        if what in ("generate", "evaluate"):
            release_trainer_memory(self.trainer, self.run_log, offload=self.offloads)
        self.tokens = 0
        task = self.config.task
        function = str((task.options.get("verifier_options") or {}).get("function", ""))
        advice = partial(repair_advice, self.directory, self.config.schedule.updates, function)
        self.scores = ScoreCheck(task.max_unscored, self.callback.log, advice)
        self.callback.begin(what, total)

    def _count_tokens(self, count: int) -> None:
        self.tokens += count
        self.writer.check()
        self.coordinator.check()
        self.advance(0)

    def advance(self, rollouts: int) -> None:
        """Report rollouts that were generated, with the tokens and verifier errors of this phase."""
        tokens = f"{self.tokens:,} tokens" if self.tokens else ""
        self.callback.advance(rollouts, "  ".join(filter(None, (tokens, self.scores.note))))

    def generate(self, generation_batch: int, checkpoint: Path | None = None) -> BatchManifest:
        """Generate what is missing of a batch, with the policy at `checkpoint` or with this run's own."""
        return generate(self, generation_batch, checkpoint)

    def load_for_generation(self, checkpoint: Path) -> None:
        """Load a policy into the sampler, and log the time."""
        with self.run_log.timed("switch", reason="sampler"):
            self._load(checkpoint)

    def _load(self, checkpoint: Path) -> None:
        """Load a policy into the sampler, from the trainer's memory if the trainer is at that version."""
        trainer = self.trainer
        if trainer is not None and checkpoint == checkpoint_directory(self.directory, trainer.version):
            key = (self.trainer_key, trainer.version)
            alone = not self.ranks.others
            if alone and isinstance(self.sampler, LiveSampler) and self.sampler.take(self.writer.policy(trainer), key):
                return
        pending = self.writer.version
        if pending is not None and checkpoint == checkpoint_directory(self.directory, pending):
            self.writer.join()
        self.sampler.load(checkpoint)

    def _train(self, version: int, stop: int) -> None:
        """Train up to `stop`, or until the rollouts are spent, and write a checkpoint."""
        with self.run_log.timed("switch", reason="learner"):
            if isinstance(self.sampler, OffloadableSampler):
                self.sampler.sleep(weights=self.offloads, drop=True)
            trainer = self._trainer_at(version)
            batch = self._batch_at(version)
            if version == 0:  # a process that was killed may have generated the batch and not checked it
                check_batch(self, batch)
            check_scores(self, batch)
            if self.budget is None:
                self.budget = DriftBudget(drift_limits(self.config), self.callback.log, self.run_log.budget_used())
            loop = UpdateLoop(
                self.schedule,
                self.run_log,
                self.budget,
                self.callback,
                prompts_per_update=self.config.batch.prompts,
                spent_ess=self.config.schedule.spent_ess or SPENT_ESS,
                check=self._check_update,
            )
            trainer.wake()  # before `prepare`, which lays batches out for the trainer's graphs
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
        """Copy the trainer's state to the host and write it in the background; if memory is short, write it now."""
        self.writer.free_buffers()
        version = trainer.version
        schedule = self.schedule
        ends = self.run_log.ends()
        write_tokens = self.run_log.tokens.detach(version)
        size = trainer.checkpoint_bytes()
        snapshot = self.writer.copy(trainer)

        def commit() -> dict[str, Any]:
            notes: dict[str, Any] = {}
            self.run_log.commit(ends)  # before the checkpoint, so that the loss of a record that led to it is noticed
            write_tokens()
            save = trainer.save if snapshot is None else partial(snapshot.write, spare=self.writer.spare)
            write_checkpoint(self.directory, version, save=save, state=state, notes=notes, size=size)
            if self.config.storage.url:  # workers on other machines wait for the checkpoint
                clean_up()
            return notes

        def clean_up() -> None:
            # By then the run may be at a later version, and later checkpoints may be committed. Neither may change what
            # is removed here.
            self._remove_checkpoints(schedule, version, None if snapshot is None else self.writer.spare_for(size))
            self.coordinator.publish()

        self.states[version] = {"version": version, **state}  # its checksums need not be compared
        if snapshot is None:
            self.writer.finish()
            commit()
            clean_up()
        else:
            self.writer.begin(version, commit, None if self.config.storage.url else clean_up, size)

    def _check_update(self, metrics: Mapping[str, float]) -> None:
        """Raise before anything is saved if the trainer's policy is not the sampler's; reserve memory for a copy."""
        self.writer.reserve(self.trainer)
        if self.source.is_own and (problem := stage_problem(self.config, metrics)):
            report_problem(self.config.model.check, problem, self.callback.log)

    def _trainer_at(self, version: int) -> Trainer:
        """The trainer at this version: the current one, or one that is loaded from the checkpoint."""
        if self.trainer is None or self.trainer.version != version:
            self.writer.join()
            checkpoint = self.checkpoint_at(version)
            if self.config.model.trains_adapters:
                base_directory(checkpoint)
                self.checkpoint_at(0)  # the base of the adapters must be there and undamaged
            self.run_log.drop_updates(first=version)  # a killed process may have logged updates that it did not save
            kind = pick_parallel(self.config, str(checkpoint), self.ranks.world, self.ranks.local_world)
            if change := self.run_log.log_world_size(self.ranks.world, kind):
                self.callback.log(change)
            self.trainer = make_trainer(
                self.config,
                checkpoint,
                self.states[version],
                self.ranks,
                kind,
                self.offloads,
                rate_factor=self.guard.rollbacks.learning_rate_factor,
                log=self.callback.log,
            )
            self.trainer_key = object()  # with the version, it identifies the weights that a sampler has taken
        return self.trainer

    def _remove_checkpoints(self, schedule: Schedule, version: int, spare: SpareFiles | None = None) -> None:
        """Remove old checkpoints, except those that make current and coming batches or that a rollback may need."""
        needed = self.guard.needed_versions(schedule, version)
        refers_to_start = self.reference is not None and self.reference.name == "initial"
        if self.config.model.trains_adapters or refers_to_start:  # the adapters' base is version 0, too
            needed.add(0)
        if version < schedule.updates and self.source.is_own:
            first = schedule.at(version).generation_batch  # a damaged batch is generated again
            last = min(first + schedule.lag, schedule.generation_batches - 1)
            makers = {schedule.version_of(batch) for batch in range(first, last + 1)}
            needed |= {maker for maker in makers if maker <= version}
        prune(self.directory, keep=self.config.checkpoints.keep, needed=needed, newest=version, spare=spare)

    def _roll_back(self, why: Degradation, assessment: Assessment) -> None:
        """Go back to the last good policy and continue from there as the config says."""
        self.writer.finish()
        # Neither the source nor workers may write to batches that are moved away.
        self.source.stop()
        self.coordinator.withdraw()
        to_version = self.guard.roll_back(self.schedule, why, assessment)
        self.trainer = None
        self.open_batches = {}
        self.states = {version: state for version, state in self.states.items() if version <= to_version}
        self.schedule = forget_stages(self.schedule, self.run_log.stages_path, to_version)
        rate = self.guard.rollbacks.learning_rate_factor * self.config.optimizer.learning_rate
        self.callback.log(f"collapsed: {why.describe()}; back to version {to_version}, learning rate {rate:.3g}")
        self.source.start(self)
