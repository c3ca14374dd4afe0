"""The conductor: looks at the run directory and does what is next. It keeps no state of its own.

What is next follows from the newest checkpoint v: evaluate it if that is due; take the run back where it has collapsed;
make the generation batches whose policy exists by now; learn up to the next place where a checkpoint is due. Each of
these commits what it did, so after `kill -9` the same command goes on, and on a CPU ends in weights equal to the bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from stalewise.config import RunConfig, write_resolved
from stalewise.config.run_directory import RunResult, check_identity, environment, read_result
from stalewise.distributed import ALONE, Ranks
from stalewise.errors import TaskError
from stalewise.models.loading import device_name, resolve_model
from stalewise.orchestrator.collapse_guard import CollapseGuard
from stalewise.orchestrator.drift_budget import DriftBudget
from stalewise.orchestrator.evaluation import describe_evaluation, evaluate_checkpoint
from stalewise.orchestrator.ranks import make_trainer
from stalewise.orchestrator.run_log import RunLog
from stalewise.orchestrator.setup import limits_of_run, write_first_checkpoint
from stalewise.orchestrator.stages import begin_stage, first_schedule, forget_stages
from stalewise.orchestrator.update_loop import UpdateLoop
from stalewise.planning.memory import check_memory, pick_parallel
from stalewise.rollout.factory import batch_plan, batch_problem, check_second_policy, make_sampler
from stalewise.rollout.generate import generate_batch
from stalewise.rollout.sampler import OffloadableSampler
from stalewise.rollout.workers.coordinator import Coordinator, is_being_written
from stalewise.rollout.workers.rank_workers import coordinator_of
from stalewise.staleness.collapse import Judgement, Trouble
from stalewise.staleness.spent import StageSchedule
from stalewise.store import Batch, BatchManifest, batch_directory, is_committed, open_batch, rewards_of_updates
from stalewise.store.atomic import RunLock, remove_temporaries, write_json_atomic
from stalewise.store.checkpoints import checkpoint_directory, prune, read_state, versions, write_checkpoint
from stalewise.tasks import make_task
from stalewise.trainer.lora import base_directory
from stalewise.trainer.trainer import NonFiniteUpdate, Trainer
from stalewise.types import ProgressCallback


class Orchestrator:
    """One sitting at a run directory. `act` does the next thing and says whether there was one."""

    def __init__(self, config: RunConfig, callback: ProgressCallback, journal: str = "journal.jsonl") -> None:
        self.config = config
        if config.model.threads:
            torch.set_num_threads(config.model.threads)
        self.callback, self.directory = callback, config.directory
        self.ranks = ALONE  # those that the learner is spread over; whoever conducts several says so
        self.records = RunLog(self.directory, journal)
        self.schedule = first_schedule(config, self.records.stages_path)
        self.guard = CollapseGuard(config, self.records)
        self.budget: DriftBudget | None = None
        self.task = make_task(config.task.name, seed=config.seed, **config.task.options)
        self.tokens = 0  # sampled since the watcher was last told that something begins
        self.sampler = make_sampler(config, on_tokens=self._tell_tokens, log=callback.log)
        self.coordinator = Coordinator(config, journal.removesuffix(".jsonl"), callback.log)
        self.trainer: Trainer | None = None
        self.states: dict[int, dict[str, Any]] = {}  # of checkpoints whose files were compared with their checksums
        self.open_batches: dict[int, Batch] = {}  # likewise

    def close(self) -> None:
        """End the processes that the task's verifier and the sampler own."""
        self.coordinator.close()
        self.sampler.close()
        self.task.verifier.close()

    def _begin(self, what: str, total: int) -> None:
        self.tokens = 0
        self.callback.begin(what, total)

    def _tell_tokens(self, count: int) -> None:
        self.tokens += count
        self.coordinator.check()
        self.callback.advance(0, f"{self.tokens:,} tokens")

    # ------------------------------------------------------------ what is there

    def prepare(self) -> None:
        """Check that the directory belongs to this config, and put version 0 into it."""
        self.claim()
        if not versions(self.directory):
            with self.records.timed("switch", reason="first checkpoint"):
                self._write_first_checkpoint()
        newest = versions(self.directory)[-1]
        self.records.forget_updates(before=newest)  # an earlier sitting may have gone further: it happens again
        if isinstance(self.schedule, StageSchedule):
            self.schedule = forget_stages(self.schedule, self.records.stages_path, newest)
        self.coordinator.publish()

    def check_memory(self) -> None:
        """Stop before anything is loaded where the model is too large for the device, or a foreign one does not fit."""
        if versions(self.directory)[-1:] == [self.schedule.updates]:
            return
        self._check_foreign(Path(source := self.newest_policy()))
        if warning := check_memory(self.config, source, self.ranks.world, self.ranks.local_world):
            self.callback.log(warning)

    def _check_foreign(self, own: Path) -> None:
        check_second_policy(self.config.sampler.foreign, own, self.task)

    def claim(self) -> None:
        """Check that the directory belongs to this config, and write down whose it is."""
        remove_temporaries(self.directory, spare=is_being_written)
        check_identity(self.config)
        write_resolved(self.config, self.directory / "config.resolved.json")
        here = environment(device_name(self.config.model.device), torch.get_num_threads(), self.ranks.world)
        write_json_atomic(self.directory / "environment.json", here)
        self.guard.rollbacks.finish()

    def newest_policy(self) -> str:
        """Where the newest policy lies, or the one that becomes version 0."""
        found = versions(self.directory)[-1:]
        return str(checkpoint_directory(self.directory, found[0])) if found else self._first_policy()

    def _first_policy(self) -> str:
        """Where the policy that becomes version 0 is loaded from."""
        return resolve_model(self.config.model.path, self.config.task.name)

    def _write_first_checkpoint(self) -> None:
        self.states[0] = write_first_checkpoint(self.config, self._first_policy(), self.task, self.callback.log)

    def act(self) -> bool:
        """Do the next thing. False: the run is complete."""
        version = versions(self.directory)[-1]
        if self._evaluation_is_due(version):
            self._evaluate(version)
        elif self.guard.is_on and (judgement := self._judge(version)).trouble is not None:
            self._take_back(judgement.trouble, judgement)
        elif version == self.schedule.updates:
            self._begin_stage(version)
            return False
        elif (missing := self.missing_batch(version)) is not None:
            self.obtain(missing)
        else:
            self._learn(version, self._next_stop(version))
        return True

    def _evaluation_is_due(self, version: int) -> bool:
        every = self.config.evaluation.every
        due = version in (0, self.schedule.updates) or (every > 0 and version % every == 0)
        return due and version not in {record["version"] for record in self.records.evaluations}

    def missing_batch(self, version: int) -> int | None:
        """The first generation batch that is not there though the policy that makes it is."""
        self._begin_stage(version)
        current = self.schedule.at(version).generation_batch
        last = min(current + self.schedule.lag, self.schedule.generation_batches - 1)
        for generation_batch in range(current, last + 1):
            if not is_committed(self.batch_directory(generation_batch)):
                return generation_batch
        return None

    def _begin_stage(self, version: int) -> None:
        """Where stages are found on the way: begin the one of this version; at the end, say how the last one ended."""
        if isinstance(self.schedule, StageSchedule):
            self._checkpoint(version)
            path, spent = self.records.stages_path, self.states[version].get("spent")
            per_update = self.config.batch.prompts
            self.schedule = begin_stage(self.schedule, path, version, spent=spent, per_update=per_update)

    def _next_stop(self, version: int) -> int:
        """Where the next checkpoint is due: the end of the stage, a multiple of `every`, or an evaluation."""
        stops = [self.schedule.updates_of(self.schedule.at(version).generation_batch).stop]
        for every in (self.config.checkpoints.every, self.config.evaluation.every):
            if every:
                stops.append((version // every + 1) * every)
        return min(stops)

    def batch_directory(self, generation_batch: int) -> Path:
        """Where a generation batch lies."""
        version = self.schedule.version_of(generation_batch)
        return batch_directory(self.directory / "rollouts", version=version, generation_batch=generation_batch)

    # ------------------------------------------------------------ the three things

    def _evaluate(self, version: int) -> None:
        settings = self.config.evaluation
        self._begin("evaluate", settings.prompts * settings.samples)
        result = evaluate_checkpoint(
            self._checkpoint(version),
            version=version,
            task=self.task,
            sampler=self.sampler,
            prompts=settings.prompts,
            samples=settings.samples,
            rows_at_once=self.config.sampler.rollouts_per_shard,
        )
        self.records.evaluation(result.record())
        self.records.journal("evaluate", result.seconds, version=version)
        self.callback.advance(result.prompts * result.samples)
        self.callback.log(describe_evaluation(result))

    def obtain(self, generation_batch: int) -> None:
        """See to it that a generation batch is there."""
        self.generate(generation_batch)

    def generate(self, generation_batch: int, checkpoint: Path | None = None) -> BatchManifest:
        """Make what is missing of a generation batch, with the policy at `checkpoint` or with this run's own."""
        plan = batch_plan(self.config, self.schedule, generation_batch, self.guard.rollbacks.attempt(generation_batch))
        self._begin("generate", plan.prompts * plan.group_size)
        with self.records.timed("generate", generation_batch=generation_batch, version=plan.version) as notes:
            checkpoint = checkpoint or self._checkpoint(plan.version)
            queue = self.coordinator.order_batch(plan, checkpoint)
            manifest = generate_batch(
                plan,
                checkpoint=checkpoint,
                rollouts=self.directory / "rollouts",
                task=self.task,
                sampler=self.sampler,
                on_shard=self.callback.advance,
                source=queue,
            )
            notes |= {"rollouts": manifest.rows, "tokens": manifest.tokens, **self.coordinator.complete_batch(queue)}
        self._check_batch(open_batch(self.batch_directory(generation_batch), verify=False))
        return manifest

    def _check_batch(self, batch: Batch) -> None:
        """Say it where rollouts can teach nothing; stop where that is so from the start."""
        problem = batch_problem(batch)
        if problem and versions(self.directory)[-1:] == [0]:
            raise TaskError(f"nothing can be learned from {self.task.name}: {problem}; the rollouts are kept")
        if problem:
            self.callback.log(f"{batch.directory.name}: {problem}")

    def _open_batch(self, generation_batch: int) -> Batch:
        return open_batch(self.batch_directory(generation_batch))

    def _learn(self, version: int, stop: int) -> None:
        """Learn up to `stop`, or until the rollouts are spent; where a step goes wrong, the guard has a word."""
        with self.records.timed("switch", reason="learner"):
            if isinstance(self.sampler, OffloadableSampler):
                self.sampler.sleep()
            trainer = self._trainer_at(version)
            batch = self._batch_at(version)
            if version == 0:  # the sitting that generated it may have been told already, and have gone on all the same
                self._check_batch(batch)
            limits = limits_of_run(self.config)
            self.budget = self.budget or DriftBudget(limits, self.callback.log, self.records.budget_used())
            stretch = UpdateLoop(self.config, self.schedule, self.records, self.budget, self.callback)
            ready = stretch.make_ready(batch, trainer, range(version, stop))
        self._begin("learn", stop - version)
        start = time.perf_counter()
        try:
            spent = stretch.learn(ready, trainer)
        except NonFiniteUpdate as error:
            self.trainer = None
            if not self.guard.is_on:
                raise
            self.callback.log(str(error))
            failed = self.records.remembered[-1].update + 1 if self.records.remembered else 0
            trouble = Trouble("an update was not finite", failed + 1)
            self._take_back(trouble, self._judge(version))
            return
        stop = trainer.version
        self.records.journal("learn", time.perf_counter() - start, first=version, stop=stop)
        with self.records.timed("switch", reason="checkpoint") as notes:
            state = trainer.state() | ({"spent": spent} if spent else {})
            self.records.tokens.commit(stop)
            write_checkpoint(self.directory, stop, save=trainer.save, state=state, notes=notes)
            self.states[stop] = {"version": stop, **state}  # whole, since this sitting wrote it
            prune(self.directory, keep=self.config.checkpoints.keep, needed=self._needed_versions(stop))
            self.coordinator.publish()

    # ------------------------------------------------------------ when it goes wrong

    def _judge(self, version: int) -> Judgement:
        """What is known about the policies so far; rollouts that are there and not learned from yet count."""
        ahead: list[tuple[float, float]] = []
        if version < self.schedule.updates and self.missing_batch(version) is None:
            rewards = rewards_of_updates(self._batch_at(version), self.config.batch.prompts)
            ahead = rewards[version - self.schedule.updates_of(self.schedule.at(version).generation_batch).start :]
        return self.guard.judge(self.schedule, version, ahead)

    def _take_back(self, trouble: Trouble, judgement: Judgement) -> None:
        """Go back to the last policy that is known to be good, and on from there as the config says."""
        self.coordinator.withdraw()  # nobody may work by an order whose policy is about to go
        to_version = self.guard.take_back(self.schedule, trouble, judgement)
        self.trainer = None
        self.open_batches = {}
        self.states = {version: state for version, state in self.states.items() if version <= to_version}
        if isinstance(self.schedule, StageSchedule):
            self.schedule = first_schedule(self.config, self.records.stages_path)
        rate = self.guard.rollbacks.learning_rate_factor * self.config.optimizer.learning_rate
        self.callback.log(f"collapsed: {trouble.describe()}; back to version {to_version}, learning rate {rate:.3g}")

    def _needed_versions(self, version: int) -> set[int]:
        """Checkpoints that must stay: those that make generation batches, and the latest that is known to be good."""
        needed = {self.schedule.version_of(g) for g in self._batches_in_use(version)}
        needed |= {0} if self.config.model.trains_adapters else set()  # what lies beneath the adapters
        return needed | self.guard.needed_versions(self.schedule, version)

    def _batches_in_use(self, version: int) -> Iterator[int]:
        """Generation batches whose policy must stay: the next to be made; the current one, should it get damaged."""
        if version == self.schedule.updates:
            return iter(())
        first = self.schedule.at(version).generation_batch
        last = min(first + self.schedule.lag, self.schedule.generation_batches - 1)
        return (g for g in range(first, last + 1) if self.schedule.version_of(g) <= version)

    def _checkpoint(self, version: int) -> Path:
        """Where this version lies, once its files are known to be whole: nothing may be made by a damaged policy."""
        directory = checkpoint_directory(self.directory, version)
        if version not in self.states:
            self.states[version] = read_state(directory)
        return directory

    def _batch_at(self, version: int) -> Batch:
        """The generation batch that this version learns from; its checksums are compared once in a sitting."""
        generation_batch = self.schedule.at(version).generation_batch
        if generation_batch not in self.open_batches:
            self.open_batches = {generation_batch: self._open_batch(generation_batch)}
        return self.open_batches[generation_batch]

    def _trainer_at(self, version: int) -> Trainer:
        """The learner at this version: the one at hand, or one made from the checkpoint.

        In the second case a sitting before this one may have gone further; what it recorded will happen again.
        """
        if self.trainer is None or self.trainer.version != version:
            checkpoint = self._checkpoint(version)
            if self.config.model.trains_adapters:
                base_directory(checkpoint)
                self._checkpoint(0)  # what lies beneath the adapters must be there, and whole
            self.records.forget_updates(before=version)
            kind = pick_parallel(self.config, str(checkpoint), self.ranks.world, self.ranks.local_world)
            if change := self.records.log_world_size(self.ranks.world, kind):
                self.callback.log(change)
            rate_factor, log = self.guard.rollbacks.learning_rate_factor, self.callback.log
            state, ranks = self.states[version], self.ranks
            self.trainer = make_trainer(self.config, checkpoint, state, ranks, kind, rate_factor=rate_factor, log=log)
        return self.trainer

    def result(self) -> RunResult:
        """What the directory holds now that the run is complete."""
        self.coordinator.complete()
        return read_result(self.directory, self.schedule.updates)


def conduct(directory: Path, make_orchestrator: Callable[[], Orchestrator], ranks: Ranks = ALONE) -> RunResult:
    """Do what is next in a run directory until nothing is."""
    with RunLock(directory):
        orchestrator = make_orchestrator()
        orchestrator.ranks, orchestrator.coordinator = ranks, coordinator_of(orchestrator.coordinator, ranks)
        try:
            orchestrator.check_memory()
            orchestrator.prepare()
            while orchestrator.act():
                pass
            return orchestrator.result()
        finally:
            orchestrator.close()
