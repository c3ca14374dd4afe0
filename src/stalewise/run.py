"""The conductor: looks at the run directory and does what is next. It keeps no state of its own.

What is next follows from the newest checkpoint v: evaluate it if that is due; make the generation batches whose policy
exists by now; learn up to the next place where a checkpoint is due. Each of the three commits what it did, so after
`kill -9` the same command goes on, and on a CPU ends in the same weights to the bit.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from stalewise.checkpoints import checkpoint_directory, prune, read_state, versions, write_checkpoint
from stalewise.config import RunConfig, write_resolved
from stalewise.errors import ConfigError, TaskError
from stalewise.evaluate import describe_evaluation, evaluate_checkpoint
from stalewise.files import RunLock, append_line, read_jsonl, remove_temporaries, truncate_jsonl, write_json_atomic
from stalewise.generate.loop import generate_batch
from stalewise.generate.sampler import Sleeper
from stalewise.generate.setup import batch_plan, batch_problem, make_sampler
from stalewise.learn.learner import Learner
from stalewise.learn.logp import check_output_layer
from stalewise.learn.lora import base_directory, save_first
from stalewise.learn.pending import PendingUpdate
from stalewise.memory import check_memory
from stalewise.models import load_model, load_tokenizer, pick_device, resolve_model
from stalewise.objectives import get_objective
from stalewise.rundirectory import RunResult, check_identity, environment, read_result
from stalewise.staleness.schedule import Step
from stalewise.store import (
    Batch,
    BatchManifest,
    LedgerEntry,
    append_entry,
    batch_directory,
    deal,
    is_committed,
    ledger_path,
    open_batch,
    to_ranges,
    truncate_ledger,
)
from stalewise.tasks import make_task
from stalewise.watch import Silence, Watcher


def run(config: RunConfig, watcher: Watcher | None = None) -> RunResult:
    """Train as the config says, from wherever its run directory stands."""
    check_objective(config)  # before anything is loaded
    return conduct(config.directory, lambda: Conductor(config, watcher or Silence()))


def check_objective(config: RunConfig) -> Mapping[str, Any]:
    """The objective's parameters with defaults filled in; a name or value that is not known is a ConfigError."""
    try:
        return get_objective(config.objective.name).settings(config.objective.params)
    except ValueError as error:
        raise ConfigError(f"objective: {error}") from error


def conduct(directory: Path, make_conductor: Callable[[], Conductor]) -> RunResult:
    """Do what is next in a run directory until nothing is."""
    with RunLock(directory):
        conductor = make_conductor()
        try:
            conductor.check_memory()
            conductor.prepare()
            while conductor.act():
                pass
            return conductor.result()
        finally:
            conductor.close()


class Conductor:
    """One sitting at a run directory. `act` does the next thing and says whether there was one."""

    def __init__(self, config: RunConfig, watcher: Watcher) -> None:
        self.config = config
        if config.model.threads:
            torch.set_num_threads(config.model.threads)
        self.watcher = watcher
        self.directory = config.directory
        self.schedule = config.schedule.schedule()
        self.task = make_task(config.task.name, seed=config.seed, **config.task.options)
        self.tokens = 0  # sampled since the watcher was last told that something begins
        self.sampler = make_sampler(config, on_tokens=self._tell_tokens)
        self.learner: Learner | None = None
        self.states: dict[int, dict[str, Any]] = {}  # of checkpoints whose files were compared with their checksums
        self.open_batches: dict[int, Batch] = {}  # likewise

    def close(self) -> None:
        """End the processes that the task's verifier and the sampler own."""
        self.sampler.close()
        self.task.verifier.close()

    def _begin(self, what: str, total: int) -> None:
        self.tokens = 0
        self.watcher.begin(what, total)

    def _tell_tokens(self, count: int) -> None:
        self.tokens += count
        self.watcher.advance(0, f"{self.tokens:,} tokens")

    # ------------------------------------------------------------ what is there

    def prepare(self) -> None:
        """Check that the directory belongs to this config, and put version 0 into it."""
        self.claim()
        if not versions(self.directory):
            with self._timed("switch", reason="first checkpoint"):
                self._write_first_checkpoint()

    def check_memory(self) -> None:
        """Stop before anything is loaded where the model is too large for the device; say it where it may be."""
        found = versions(self.directory)[-1:]
        if found == [self.schedule.updates]:
            return
        source = str(checkpoint_directory(self.directory, found[0])) if found else self._first_policy()
        if warning := check_memory(self.config, source):
            self.watcher.say(warning)

    def claim(self) -> None:
        """Check that the directory belongs to this config, and write down whose it is."""
        remove_temporaries(self.directory)
        check_identity(self.config)
        write_resolved(self.config, self.directory / "config.resolved.json")
        write_json_atomic(self.directory / "environment.json", self._environment())

    def _environment(self) -> dict[str, Any]:
        device = pick_device(self.config.model.device)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        return environment(name, torch.get_num_threads())

    def _first_policy(self) -> str:
        """Where the policy that becomes version 0 is loaded from."""
        return resolve_model(self.config.model.path, self.config.task.name)

    def _write_first_checkpoint(self) -> None:
        source = self._first_policy()
        model = load_model(source, device=torch.device("cpu"))
        check_output_layer(model)  # now, and not when a whole stage has been generated
        tokenizer = load_tokenizer(source)

        def save(directory: Path) -> None:
            save_first(self.config, model, source, directory)
            tokenizer.save_pretrained(directory)

        state = {"steps": 0, "drift": 0.0, "source": self.config.model.path}
        write_checkpoint(self.directory, 0, save=save, state=state)

    def act(self) -> bool:
        """Do the next thing. False: the run is complete."""
        version = versions(self.directory)[-1]
        if self._evaluation_is_due(version):
            self._evaluate(version)
        elif version == self.schedule.updates:
            return False
        elif (missing := self.missing_batch(version)) is not None:
            self.generate(missing)
        else:
            self._learn(version, self._next_stop(version))
        return True

    def _evaluation_is_due(self, version: int) -> bool:
        every = self.config.evaluation.every
        due = version in (0, self.schedule.updates) or (every > 0 and version % every == 0)
        done = {record["version"] for record in read_jsonl(self.directory / "eval.jsonl")}
        return due and version not in done

    def missing_batch(self, version: int) -> int | None:
        """The first generation batch that is not there though the policy that makes it is."""
        current = self.schedule.at(version).generation_batch
        last = min(current + self.schedule.lag, self.schedule.generation_batches - 1)
        for generation_batch in range(current, last + 1):
            if not is_committed(self._batch_directory(generation_batch)):
                return generation_batch
        return None

    def _next_stop(self, version: int) -> int:
        """Where the next checkpoint is due: the end of the stage, a multiple of `every`, or an evaluation."""
        stops = [self.schedule.updates_of(self.schedule.at(version).generation_batch).stop]
        for every in (self.config.checkpoints.every, self.config.evaluation.every):
            if every:
                stops.append((version // every + 1) * every)
        return min(stops)

    def _batch_directory(self, generation_batch: int) -> Path:
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
        append_line(self.directory / "eval.jsonl", result.record())
        self._journal("evaluate", result.seconds, version=version)
        self.watcher.advance(result.prompts * result.samples)
        self.watcher.say(describe_evaluation(result))

    def generate(self, generation_batch: int, checkpoint: Path | None = None) -> BatchManifest:
        """Make what is missing of a generation batch, with the policy at `checkpoint` or with this run's own."""
        plan = batch_plan(self.config, generation_batch)
        self._begin("generate", plan.prompts * plan.group_size)
        with self._timed("generate", generation_batch=generation_batch, version=plan.version) as notes:
            manifest = generate_batch(
                plan,
                checkpoint=checkpoint or self._checkpoint(plan.version),
                rollouts=self.directory / "rollouts",
                task=self.task,
                sampler=self.sampler,
                on_shard=self.watcher.advance,
            )
            notes |= {"rollouts": manifest.rows, "tokens": manifest.tokens}
        self._check_batch(open_batch(self._batch_directory(generation_batch), verify=False))
        return manifest

    def _check_batch(self, batch: Batch) -> None:
        """Say it where rollouts can teach nothing; stop where that is so from the start."""
        problem = batch_problem(batch)
        if problem and versions(self.directory)[-1:] == [0]:
            raise TaskError(f"nothing can be learned from {self.task.name}: {problem}; the rollouts are kept")
        if problem:
            self.watcher.say(f"{batch.directory.name}: {problem}")

    def _open_batch(self, generation_batch: int) -> Batch:
        return open_batch(self._batch_directory(generation_batch))

    def _learn(self, version: int, stop: int) -> None:
        with self._timed("switch", reason="learner"):
            if isinstance(self.sampler, Sleeper):
                self.sampler.sleep()
            learner = self._learner_at(version)
            batch = self._batch_at(version)
            if version == 0:  # the sitting that generated it may have been told already, and have gone on all the same
                self._check_batch(batch)
            dealt = rollouts_of_updates(batch, self.config)
        self._begin("learn", stop - version)
        start = last = time.perf_counter()
        waiting: deque[tuple[Step, npt.NDArray[np.int64], PendingUpdate]] = deque()
        # A GPU works on an update while the one before it is read and written down.
        ahead = 1 if learner.device.type == "cuda" else 0
        for update in range(version, stop):
            step = self.schedule.at(update)
            rollout_ids = dealt[update - self.schedule.updates_of(step.generation_batch).start]
            waiting.append((step, rollout_ids, learner.enqueue(batch.take(rollout_ids))))
            while len(waiting) > (ahead if update + 1 < stop else 0):
                last = self._record(*waiting.popleft(), since=last)
        self._journal("learn", time.perf_counter() - start, first=version, stop=stop)
        with self._timed("switch", reason="checkpoint"):
            state = learner.state()
            write_checkpoint(self.directory, stop, save=learner.save, state=state)
            self.states[stop] = {"version": stop, **state}  # whole, since this sitting wrote it
            needed = {self.schedule.version_of(g) for g in self._batches_in_use(stop)}
            needed |= {0} if self.config.model.trains_adapters else set()  # what lies beneath the adapters
            prune(self.directory, keep=self.config.checkpoints.keep, needed=needed)

    def _batches_in_use(self, version: int) -> Iterator[int]:
        """Generation batches whose policy must stay: the next to be made; the current one, should it get damaged."""
        first = version // self.schedule.updates_per_generation
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

    def _learner_at(self, version: int) -> Learner:
        """The learner at this version: the one at hand, or one made from the checkpoint.

        In the second case a sitting before this one may have gone further; what it recorded will happen again.
        """
        if self.learner is None or self.learner.version != version:
            checkpoint = self._checkpoint(version)
            if self.config.model.trains_adapters:
                base_directory(checkpoint)
                self._checkpoint(0)  # what lies beneath the adapters must be there, and whole
            truncate_jsonl(self.directory / "metrics.jsonl", lambda record: record["update"] < version)
            truncate_ledger(ledger_path(self.directory), before=version)
            self.learner = Learner(self.config, checkpoint, say=self.watcher.say)
            self.learner.restore(checkpoint, self.states[version])
        return self.learner

    def _record(self, step: Step, rollout_ids: npt.NDArray[np.int64], pending: PendingUpdate, *, since: float) -> float:
        """Wait for an update and write down what happened; the time at which it was over."""
        metrics = pending.metrics()
        now = time.perf_counter()
        record = {"update": step.update, "generation_batch": step.generation_batch, **metrics, "seconds": now - since}
        entry = LedgerEntry(step.update, step.generation_batch, step.version, step.age, to_ranges(rollout_ids))
        append_entry(ledger_path(self.directory), entry)
        append_line(self.directory / "metrics.jsonl", record)
        self.watcher.metrics(step.update, record)
        self.watcher.advance(1, f"reward {record['reward']:.3f}  ESS {record.get('ess', float('nan')):.3f}")
        return now

    # ------------------------------------------------------------ what is written down

    def _journal(self, event: str, seconds: float, **notes: Any) -> None:
        append_line(
            self.directory / "journal.jsonl", {"time": time.time(), "event": event, "seconds": seconds, **notes}
        )

    @contextlib.contextmanager
    def _timed(self, event: str, **notes: Any) -> Iterator[dict[str, Any]]:
        more: dict[str, Any] = {}
        start = time.perf_counter()
        yield more
        self._journal(event, time.perf_counter() - start, **notes, **more)

    def result(self) -> RunResult:
        """What the directory holds now that the run is complete."""
        return read_result(self.directory, self.schedule.updates)


def rollouts_of_updates(batch: Batch, config: RunConfig) -> list[npt.NDArray[np.int64]]:
    """Rollout ids of each update on a generation batch: whole groups, in the order they were generated."""
    rollout_ids = batch.column("rollout_id")
    return [rollout_ids[rows] for rows in deal(batch.column("group"), config.batch.prompts)]
