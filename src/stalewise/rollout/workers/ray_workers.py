"""Workers on a Ray cluster: Ray finds the machines, starts one worker on each, and restarts lost ones.

Only the arguments of the command go through Ray: the workers share the run directory or the object store, as always.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from stalewise.errors import EngineError, StalewiseError
from stalewise.rollout.workers.worker import WorkDone, work
from stalewise.types import NullCallback, ProgressCallback

RESTARTS = 16  # of one worker; meanwhile others take over its claims


def work_on_ray(
    source: str,
    *,
    workers: int,
    overrides: Mapping[str, Any] | None = None,
    once: bool = False,
    gpus: float | None = None,
    callback: ProgressCallback | None = None,
) -> list[WorkDone]:
    """Start workers and wait for all to end; each has `gpus` GPUs (by default one if the cluster has any).

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
        actor = ray.remote(max_restarts=RESTARTS, max_task_retries=RESTARTS, num_cpus=1, num_gpus=per_worker)(_Actor)
        actors = [actor.remote() for _ in range(workers)]
        (callback or NullCallback()).log(f"{workers} workers on Ray for {source}")
        futures = [one.work.remote(source, f"ray-{i}", dict(overrides or {}), once) for i, one in enumerate(actors)]
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
    """One worker in a process of Ray's."""

    def work(self, source: str, worker: str, overrides: Mapping[str, Any], once: bool) -> WorkDone | str:
        """Work; an error in the input is returned as text, since a retry would not help."""
        try:
            return work(source, worker=worker, overrides=overrides, once=once)
        except StalewiseError as error:
            return str(error)
