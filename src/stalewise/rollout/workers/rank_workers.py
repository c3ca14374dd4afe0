"""A generation batch made by all ranks of one launch: the first one orders it, and each takes its share.

They meet where workers meet, so whoever else wants to may work at the batch, too. While they generate all of them
listen: the first rank for what the others report, those for its word that it is over. One that is gone, or cannot go
on, is noticed by the rest within a few tokens.
"""

from __future__ import annotations

import socket
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from stalewise.config import RunConfig, make_config
from stalewise.distributed import Message, Ranks, noticing
from stalewise.errors import RankError, StalewiseError, StoppedByFirst
from stalewise.rollout.factory import make_sampler
from stalewise.rollout.generate import BatchPlan
from stalewise.rollout.sampler import OffloadableSampler, Sampler
from stalewise.rollout.workers.claims import Session
from stalewise.rollout.workers.coordinator import Coordinator
from stalewise.rollout.workers.shard_queue import POLL_S, ShardQueue
from stalewise.rollout.workers.work_order import WorkOrder, config_digest
from stalewise.rollout.workers.worker import RankFolder, Worker
from stalewise.tasks import Task, make_task
from stalewise.types import NullCallback

ENGINE = "hf"  # the others are on many devices by themselves


def coordinator_of(coordinator: Coordinator, ranks: Ranks) -> Coordinator:
    """The meeting that has all ranks generate, where there are several and each can have a sampler of its own."""
    config = coordinator.config
    if not ranks.others or config.sampler.engine != ENGINE or config.workers.learner != "shares":
        return coordinator
    return RankCoordinator(coordinator, ranks)


class RankCoordinator(Coordinator):
    """The first rank's side: whoever asks it for a share has the others take theirs."""

    def __init__(self, coordinator: Coordinator, ranks: Ranks) -> None:
        super().__init__(coordinator.config, coordinator.role, coordinator.log)
        self.ranks = ranks
        self.made: dict[int, int] = {}  # shards of the present batch, by rank that has reported
        self._has_said = False

    def share(self, plan: BatchPlan, checkpoint: Path) -> ShardQueue:
        """Order a generation batch of all ranks."""
        share = super().share(plan, checkpoint)
        share.among, share.check = self.ranks.world, self.check
        share.present()  # removes what was made for another order, before others count on it
        self._say_shards(plan)
        config = self.config.model_dump(mode="json")
        self.ranks.tell_all("generate", config=config, role=self.role, plan=asdict(plan), policy=share.order.policy)
        self.made = {}
        for rank in self.ranks.others:
            self.ranks.listen(rank)
        return share

    def check(self) -> None:
        """Take reports; raise where a rank is gone or cannot go on."""
        for rank in self.ranks.others:
            if self.ranks.has_heard(rank):
                with noticing(self.ranks):
                    report = self.ranks.hear(rank)
                if report.what == "failed":
                    raise RankError(f"rank {rank} cannot generate: {report.record['error']}")
                self.made[rank] = report.record["shards"]

    def fulfilled(self, share: ShardQueue) -> dict[str, Any]:
        """Also wait until all ranks have reported: one that begins late must still find the order."""
        while len(self.made) < len(self.ranks.others):
            self.check()
            time.sleep(POLL_S)
        return super().fulfilled(share) | {
            "shards": [len(share.made_here), *(self.made[rank] for rank in self.ranks.others)]
        }

    def _say_shards(self, plan: BatchPlan) -> None:
        """Say it once where a generation batch has fewer shards than there are ranks."""
        if plan.shards >= self.ranks.world or self._has_said:
            return
        self._has_said = True
        fitting = max(plan.prompts // self.ranks.world, 1) * plan.group_size
        self.log(
            f"only {plan.shards} of {self.ranks.world} ranks generate, since the batch has no more shards: start a run "
            f"with sampler.rollouts_per_shard = {fitting} or less to have more of them"
        )


class RolloutRank:
    """The side of a rank that is led; `with Hand(ranks) as hand`. Its task and its sampler are made once."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.task: Task | None = None
        self.sampler: Sampler | None = None

    def __enter__(self) -> RolloutRank:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.sampler is not None:
            self.sampler.close()
        if self.task is not None:
            self.task.verifier.close()

    def generate(self, message: Message) -> None:
        """Take a share of a generation batch, stay until the batch is whole, and report; the first rank says errors."""
        self.ranks.listen()
        try:
            shards = self._make(message)
        except RankError:
            raise
        except Exception as error:
            ours = not isinstance(error, StalewiseError)
            self.ranks.tell(0, "failed", {"error": f"{type(error).__name__}: {error}" if ours else str(error)})
            if ours:
                raise  # where it happened can only be seen here; all end by it
        else:
            self.ranks.tell(0, "generated", {"shards": shards})

    def _make(self, message: Message) -> int:
        record = message.record
        config = make_config(record["config"], source="the first rank's config")
        task, sampler = self._tools(config)
        place = RankFolder.of_run(config)
        name, role = f"rank {self.ranks.rank} on {socket.gethostname()}", f"{record['role']}.rank-{self.ranks.rank}"
        with (
            tempfile.TemporaryDirectory(prefix="stalewise-rank-") as scratch,
            Session(place.object_store, name, role=role, lost_after_s=config.workers.lost_after_s) as session,
        ):
            among, check = self.ranks.world, self.check
            worker = Worker(place, session, task, sampler, Path(scratch), NullCallback(), among=among, check=check)
            worker.fulfil(WorkOrder(BatchPlan(**record["plan"]), record["policy"], config_digest(config)))
        if isinstance(sampler, OffloadableSampler):
            sampler.sleep()  # what comes next is learning
        return worker.done.shards

    def _tools(self, config: RunConfig) -> tuple[Task, Sampler]:
        if config.model.threads:
            torch.set_num_threads(config.model.threads)
        self.task = self.task or make_task(config.task.name, seed=config.seed, **config.task.options)
        self.sampler = self.sampler or make_sampler(config, on_tokens=lambda count: self.check())
        return self.task, self.sampler

    def check(self) -> None:
        """Raise where the first rank is gone, or has ended the run: it says nothing else before all have reported."""
        if self.ranks.has_heard():
            with noticing(self.ranks):
                raise StoppedByFirst(self.ranks.hear().record["exit_code"])
