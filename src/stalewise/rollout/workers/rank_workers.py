"""Generation by all ranks of one launch: the first rank orders a batch, and each rank makes part of its shards.

The ranks claim shards as workers do, so other workers may join. A lost rank is noticed within a few tokens.
On a Ray cluster, Ray starts one worker per machine (`work_on_ray`) and restarts lost workers.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from stalewise.config import make_config
from stalewise.distributed import Message, Ranks, explain_lost_ranks
from stalewise.errors import EngineError, RankError, StalewiseError, StoppedByFirst
from stalewise.rollout.factory import make_sampler
from stalewise.rollout.generate import BatchPlan
from stalewise.rollout.sampler import OffloadableSampler, Sampler
from stalewise.rollout.workers.coordinator import Coordinator
from stalewise.rollout.workers.shard_queue import POLL_S, ShardQueue, WorkerSession
from stalewise.rollout.workers.work_order import WorkOrder, config_digest, plan_record, read_plan
from stalewise.rollout.workers.worker import Afterwards, RolloutWorker, RunLocation, WorkDone, work
from stalewise.tasks import Task, close_task
from stalewise.tasks.sandbox import scratch_folder
from stalewise.types import NullCallback, ProgressCallback

ENGINE = "hf"  # other engines use several devices by themselves
RESTARTS = 16  # of one worker on Ray; meanwhile other workers take over its claims


def coordinator_of(coordinator: Coordinator, ranks: Ranks) -> Coordinator:
    """A coordinator for all ranks, if there are several and each can have its own sampler."""
    config = coordinator.config
    shared = ranks.others and config.sampler.engine == ENGINE and config.workers.learner == "shares"
    return RankCoordinator(coordinator, ranks) if shared else coordinator


class RankCoordinator(Coordinator):
    """The coordinator of the first rank, which has all ranks make part of a batch."""

    def __init__(self, coordinator: Coordinator, ranks: Ranks) -> None:
        super().__init__(coordinator.config, coordinator.role, coordinator.log)
        self.ranks = ranks
        self.made: dict[int, int] = {}  # shards of the present batch, by rank; only ranks that have reported
        self._has_warned = False

    def order_batch(self, plan: BatchPlan, checkpoint: Path, taken: Sequence[int] = ()) -> ShardQueue:
        """Order a generation batch, and tell all ranks to make part of it."""
        queue = super().order_batch(plan, checkpoint, taken)
        queue.processes, queue.check = self.ranks.world, self.check
        queue.present()  # removes shards of another order before the other ranks see them
        self._warn_of_few_shards(plan)
        config = self.config.model_dump(mode="json")
        self.ranks.send_to_all(
            "generate", config=config, role=self.role, plan=plan_record(plan), policy=queue.order.policy
        )
        self.made = {}
        for rank in self.ranks.others:
            self.ranks.listen(rank)
        return queue

    def check(self) -> None:
        """Receive reports of ranks; raise if a rank is lost or has failed."""
        for rank in self.ranks.others:
            if self.ranks.has_heard(rank):
                with explain_lost_ranks(self.ranks):
                    report = self.ranks.receive(rank)
                if report.what == "failed":
                    raise RankError(f"rank {rank} cannot generate: {report.record['error']}")
                self.made[rank] = report.record["shards"]

    def end_order(self, queue: ShardQueue) -> dict[str, Any]:
        """Remove an order after all ranks have reported: a rank that begins late must still find the order."""
        while len(self.made) < len(self.ranks.others):
            self.check()
            time.sleep(POLL_S)
        shards = [len(queue.made_here), *(self.made[rank] for rank in self.ranks.others)]
        return super().end_order(queue) | {"shards": shards}

    def _warn_of_few_shards(self, plan: BatchPlan) -> None:
        if plan.shards >= self.ranks.world or self._has_warned:
            return
        self._has_warned = True
        fitting = max(plan.prompts // self.ranks.world, 1) * plan.group_size
        self.log(
            f"only {plan.shards} of {self.ranks.world} ranks generate, since the batch has no more shards: start a run "
            f"with sampler.rollouts_per_shard = {fitting} or less to use more ranks"
        )


class RolloutRank:
    """Generation on a rank other than the first; `with RolloutRank(ranks) as rank`. Task and sampler are made once."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.task: Task | None = None
        self.sampler: Sampler | None = None

    def __enter__(self) -> RolloutRank:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.sampler is not None:
            self.sampler.close()
        if self.task is not None:
            close_task(self.task)

    def generate(self, message: Message) -> None:
        """Make shards of a generation batch until it is complete, then report; errors are raised on the first rank."""
        self.ranks.listen()
        try:
            shards = self._make(message)
        except RankError:
            raise
        except Exception as error:
            expected = isinstance(error, StalewiseError)
            self.ranks.send(0, "failed", {"error": str(error) if expected else f"{type(error).__name__}: {error}"})
            if not expected:
                raise  # only this rank has the traceback
        else:
            self.ranks.send(0, "generated", {"shards": shards})

    def _make(self, message: Message) -> int:
        record = message.record
        config = make_config(record["config"], source="the first rank's config")
        if config.model.threads:
            torch.set_num_threads(config.model.threads)
        self.task = self.task or config.make_task()
        self.sampler = self.sampler or make_sampler(config, on_tokens=lambda count: self.check())
        location = RunLocation.of_config(config)
        name = f"rank {self.ranks.rank} on {socket.gethostname()}"
        role = f"{record['role']}.rank-{self.ranks.rank}"
        with (
            scratch_folder("rank") as scratch,
            WorkerSession(location.object_store, name, role=role, lost_after_s=config.workers.lost_after_s) as session,
        ):
            tools = session, self.task, self.sampler, Path(scratch), NullCallback()
            worker = RolloutWorker(location, *tools, processes=self.ranks.world, check=self.check)
            worker.make(WorkOrder(read_plan(record["plan"]), record["policy"], config_digest(config)))
        if isinstance(self.sampler, OffloadableSampler):
            self.sampler.sleep()  # training comes next
        return worker.done.shards

    def check(self) -> None:
        """Raise if the first rank is lost or ended the run; it sends nothing else until all ranks have reported."""
        if self.ranks.has_heard():
            with explain_lost_ranks(self.ranks):
                raise StoppedByFirst(self.ranks.receive().record["exit_code"])


def work_on_ray(
    source: str,
    *,
    workers: int,
    overrides: Mapping[str, Any] | None = None,
    once: bool = False,
    gpus: float | None = None,
    callback: ProgressCallback | None = None,
    afterwards: Afterwards | None = None,
) -> list[WorkDone]:
    """Start workers on Ray and wait until all have ended. Each has `gpus` GPUs; default: 1 if the cluster has any.

    `RAY_ADDRESS` names a running cluster; without it, Ray is started on this machine.
    """
    try:
        ray: Any = import_module("ray")  # an extra
    except ImportError as error:
        raise EngineError("Ray is not installed here: pip install 'stalewise[ray]'") from error
    started = not ray.is_initialized()
    if started:
        ray.init(include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        per_worker = gpus if gpus is not None else float(ray.cluster_resources().get("GPU", 0) >= 1)
        # Ray's own retries: the actor is restarted on any machine, and its one task with it.
        remote = ray.remote(max_restarts=RESTARTS, max_task_retries=RESTARTS, num_cpus=1, num_gpus=per_worker)
        actor_class = remote(_Actor)
        actors = [actor_class.remote() for _ in range(workers)]
        (callback or NullCallback()).log(f"{workers} workers on Ray for {source}")
        options = (dict(overrides or {}), once, afterwards)
        futures = [actor.work.remote(source, f"ray-{number}", *options) for number, actor in enumerate(actors)]
        results = ray.get(futures)
    except ray.exceptions.RayError as error:
        raise EngineError(
            f"Ray lost a worker more than {RESTARTS} times, or cannot start one: {' '.join(str(error).split())[:300]}; "
            "committed shards are kept: run the same command again"
        ) from error
    finally:
        if started:
            ray.shutdown()
    if errors := [result for result in results if isinstance(result, str)]:
        raise EngineError(f"a worker on Ray ended: {errors[0]}")
    return results


class _Actor:
    """One worker in a process that Ray started."""

    def work(
        self, source: str, worker: str, overrides: Mapping[str, Any], once: bool, afterwards: Afterwards | None
    ) -> WorkDone | str:
        """Work; an error of ours is returned as text, since Ray would retry a task that raises, and fail again."""
        try:
            return work(source, worker=worker, overrides=overrides, once=once, afterwards=afterwards)
        except StalewiseError as error:
            return str(error)
