"""The updates between two checkpoints: taken in order, each written down, until they or the rollouts are spent."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from stalewise.config import RunConfig
from stalewise.orchestrator.drift_budget import DriftBudget
from stalewise.orchestrator.run_log import RunLog
from stalewise.orchestrator.stages import SPENT_ESS
from stalewise.staleness.schedule import Schedule, Step
from stalewise.staleness.spent import StageSchedule, fresh_ess, is_spent, remaining_ess
from stalewise.store import Batch, rollouts_of_updates
from stalewise.trainer.batch import UpdateBatch
from stalewise.trainer.pending_update import PendingUpdate, prefetch, updates_ahead
from stalewise.trainer.trainer import Trainer
from stalewise.types import ProgressCallback

Ready = tuple[Step, npt.NDArray[np.int64], UpdateBatch]  # an update, its rollouts, and what the learner makes of them


@dataclass(frozen=True, slots=True)
class UpdateLoop:
    """Takes updates of a run and keeps its records."""

    config: RunConfig
    schedule: Schedule
    records: RunLog
    budget: DriftBudget
    callback: ProgressCallback

    def make_ready(self, batch: Batch, trainer: Trainer, updates: range) -> Iterator[Ready]:
        """What these updates learn from; the first two are ready at once, the others while those before are taken."""
        dealt = rollouts_of_updates(batch, self.config.batch.prompts)
        steps = [self.schedule.at(update) for update in updates]
        ids = [dealt[step.update - self.schedule.updates_of(step.generation_batch).start] for step in steps]
        prepared = prefetch(lambda rollout_ids: trainer.prepare(batch.take(rollout_ids)), ids, trainer.device)
        ready = zip(steps, ids, prepared, strict=True)
        return chain([next(ready)], ready)

    def learn(self, ready: Iterator[Ready], trainer: Trainer) -> dict[str, Any] | None:
        """Take these updates; where the rollouts are spent before, stop there and say by which numbers."""
        last = time.perf_counter()
        waiting: deque[tuple[Step, npt.NDArray[np.int64], PendingUpdate]] = deque()
        ahead = updates_ahead(trainer.device, may_end_early=isinstance(self.schedule, StageSchedule))
        spent: dict[str, Any] | None = None
        for step, rollout_ids, prepared in ready:
            waiting.append((step, rollout_ids, trainer.enqueue(prepared)))
            while len(waiting) > ahead:
                last = self._record(*waiting.popleft(), since=last)
            if spent := self._spent(step):
                break
        for rest in waiting:
            last = self._record(*rest, since=last)
        return spent or self._spent(self.schedule.at(trainer.version - 1))

    def _record(self, step: Step, rollout_ids: npt.NDArray[np.int64], pending: PendingUpdate, *, since: float) -> float:
        """Wait for an update and write down what happened; the time at which it was over."""
        metrics = pending.metrics()
        if "drift" in metrics:
            metrics |= self.budget.measure(metrics["drift"], self.records.drift_at(step.version))
        now = time.perf_counter()
        record = {"update": step.update, "generation_batch": step.generation_batch, **metrics, "seconds": now - since}
        self.records.update(step, rollout_ids, record)
        self.records.tokens.add(step.update, pending.tokens())
        if not isinstance(self.schedule, StageSchedule):  # which ends a stage long before
            self.budget.look_at([one.ess for one in self.records.taken_on(step.generation_batch)])
        self.callback.metrics(step.update, record)
        note = f"reward {record['reward']:.3f}  ESS {record.get('ess', float('nan')):.3f}"
        self.callback.advance(1, note + self.budget.note(record))
        return now

    def _spent(self, step: Step) -> dict[str, Any] | None:
        """Why the stage of this update is over before its rollouts are used up; None where it goes on."""
        if not isinstance(self.schedule, StageSchedule):
            return None
        taken = self.records.taken_on(step.generation_batch)
        ess, bound = [one.ess for one in taken], self.config.schedule.spent_ess or SPENT_ESS
        planned = self.schedule.stages[-1].planned_updates
        numbers = {"ess": remaining_ess(ess), "fresh_ess": fresh_ess(ess), "bound": bound, "planned_updates": planned}
        if is_spent(ess, bound):
            return {"reason": "effective sample size", **numbers}
        if taken and taken[-1].batch_budget >= 1.0:
            return {"reason": "drift", **numbers, "batch_budget": taken[-1].batch_budget}
        return None
