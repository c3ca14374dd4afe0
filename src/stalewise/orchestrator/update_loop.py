"""Takes the updates between two checkpoints in order and logs them, until all are done or the rollouts are spent."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from stalewise.config import RunConfig
from stalewise.objectives.regularizers import overlong_penalty
from stalewise.orchestrator.run_log import RunLog
from stalewise.orchestrator.stages import DriftBudget
from stalewise.staleness.schedule import Schedule, Step
from stalewise.store import Batch, Selection, rollouts_of_updates
from stalewise.tasks.rows import MIXTURE, task_of
from stalewise.trainer.batch import UpdateBatch
from stalewise.trainer.pending_update import PendingUpdate, prefetch, updates_ahead
from stalewise.trainer.trainer import Trainer
from stalewise.types import ProgressCallback

RolloutIds = npt.NDArray[np.int64]
PreparedUpdate = tuple[Step, RolloutIds, UpdateBatch]


class RewardsByTask:
    """Mean rewards of the tasks of a mixture, as metrics; none if the batch has a single task."""

    def __init__(self, batch: Batch) -> None:
        prompt_ids = batch.column("prompt_id") if batch.manifest.task == MIXTURE else []
        self._ids = batch.column("rollout_id")
        self._task = np.array([task_of(str(prompt_id)) for prompt_id in prompt_ids])
        self._labels = sorted(set(self._task) - {""})
        self._reward = batch.column("reward") if self._labels else np.empty(0)

    def of(self, rollout_ids: RolloutIds) -> dict[str, float]:
        """`reward/TASK` and `rollouts/TASK` of each task of the batch; NaN where none of its rollouts has a reward."""
        if not self._labels:
            return {}
        rows = np.searchsorted(self._ids, rollout_ids)
        metrics: dict[str, float] = {}
        for label in self._labels:
            own = self._reward[rows][self._task[rows] == label]
            known = own[~np.isnan(own)]
            metrics[f"reward/{label}"] = float(known.mean()) if len(known) else math.nan
            metrics[f"rollouts/{label}"] = float(len(own))
        return metrics


class RewardParts:
    """Mean values of the parts of rewards, as metrics; none if rewards have no parts."""

    def __init__(self, batch: Batch) -> None:
        self._ids, self._parts = batch.reward_parts()

    def of(self, rollout_ids: RolloutIds) -> dict[str, float]:
        """`part/NAME` of each part of the batch; NaN where no rollout of the update has it."""
        rows = np.searchsorted(self._ids, rollout_ids)
        own = {name: values[rows] for name, values in self._parts.items()}
        known = {name: values[~np.isnan(values)] for name, values in own.items()}
        return {f"part/{name}": float(values.mean()) if len(values) else math.nan for name, values in known.items()}


@dataclass(frozen=True, slots=True)
class UpdateLoop:
    """Takes updates of a run and logs them."""

    schedule: Schedule
    run_log: RunLog
    budget: DriftBudget
    callback: ProgressCallback
    prompts_per_update: int
    spent_ess: float  # bound below which the rollouts of an open-ended schedule are spent
    check: Callable[[Mapping[str, float]], object] = lambda metrics: None  # raises where an update must not count

    def prepare(self, batch: Batch, trainer: Trainer, updates: range) -> Iterator[PreparedUpdate]:
        """The inputs of these updates: the first two are prepared at once, the others one update ahead."""
        rollouts = rollouts_of_updates(batch, self.prompts_per_update)
        steps = [self.schedule.at(update) for update in updates]
        ids = [rollouts[step.update - self.schedule.updates_of(step.generation_batch).start] for step in steps]
        by_task, parts = RewardsByTask(batch), RewardParts(batch)

        def make(rollout_ids: RolloutIds) -> UpdateBatch:
            made = trainer.prepare(batch.take(rollout_ids))
            return replace(made, statistics=made.statistics | by_task.of(rollout_ids) | parts.of(rollout_ids))

        inputs = prefetch(make, ids, trainer.device)
        prepared = zip(steps, ids, inputs, strict=True)
        return chain([next(prepared)], prepared)

    def run(self, prepared: Iterator[PreparedUpdate], trainer: Trainer) -> dict[str, Any] | None:
        """Take these updates. If the rollouts are spent before the end, stop and return the reason."""
        last = time.perf_counter()
        waiting: deque[tuple[Step, RolloutIds, PendingUpdate]] = deque()
        ahead = updates_ahead(trainer.device, may_end_early=self.schedule.is_open_ended)
        spent: dict[str, Any] | None = None
        for step, rollout_ids, inputs in prepared:
            waiting.append((step, rollout_ids, trainer.enqueue(inputs)))
            while len(waiting) > ahead:
                last = self._finish(*waiting.popleft(), since=last)
            if spent := self._spent(step):
                break
        for pending in waiting:
            last = self._finish(*pending, since=last)
        return spent or self._spent(self.schedule.at(trainer.version - 1))

    def _finish(self, step: Step, rollout_ids: RolloutIds, pending: PendingUpdate, *, since: float) -> float:
        """Wait for an update and log it; returns the time at which it was done."""
        metrics = pending.metrics()
        self.check(metrics)
        if "drift" in metrics:
            metrics |= self.budget.measure(metrics["drift"], self.run_log.drift_at(step.version))
        now = time.perf_counter()
        record = {"update": step.update, "generation_batch": step.generation_batch, **metrics, "seconds": now - since}
        self.run_log.log_update(step, rollout_ids, record)
        self.run_log.tokens.add(step.update, pending.tokens())
        if not self.schedule.is_open_ended:  # an open-ended stage ends long before the warning
            taken = self.run_log.taken_on(step.generation_batch)
            self.budget.check_ess([update.useful_share for update in taken])
        self.callback.metrics(step.update, record)
        self.callback.advance(1, describe_update(record) + self.budget.note(record))
        return now

    def _spent(self, step: Step) -> dict[str, Any] | None:
        """Why the stage of this update ends before all of its rollouts are used; None if it continues."""
        taken = self.run_log.taken_on(step.generation_batch)
        batch_budget = taken[-1].batch_budget if taken else math.nan
        return self.schedule.spent([update.useful_share for update in taken], batch_budget, self.spent_ess)


def selection_of(config: RunConfig, schedule: Schedule, generation_batch: int) -> Selection:
    """How informative groups are found and dealt to the updates of a batch."""
    section, limit = config.objective, config.sampler.max_new_tokens
    penalty = partial(
        overlong_penalty, max_tokens=limit, margin=section.overlong_tokens, factor=section.overlong_penalty
    )
    updates = len(schedule.prompts_of(generation_batch, 1))
    return Selection(updates, penalty) if section.overlong_tokens else Selection(updates)


def describe_update(record: Mapping[str, Any]) -> str:
    """An update on the progress line. An update without tokens to learn from has no effective sample size."""
    ess = record.get("ess", math.nan)
    return f"reward {record['reward']:.3f}  ESS {'–' if math.isnan(ess) else f'{ess:.3f}'}"


def release_trainer_memory(trainer: Trainer | None, run_log: RunLog, *, offload: bool) -> None:
    """Free the device memory that only updates need. With `offload` the whole trainer moves to host memory."""
    if trainer is not None and offload and not trainer.is_asleep:
        with run_log.timed("switch", reason="offload"):
            trainer.sleep()
    elif trainer is not None:
        trainer.release_logits()
