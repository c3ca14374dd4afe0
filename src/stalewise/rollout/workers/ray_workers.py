"""Workers on a Ray cluster: Ray finds the machines, starts one worker on each, and starts those again that are lost.

Nothing goes through Ray but the words of the command: the workers meet in the run directory or in the depot, as all do.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from stalewise.errors import EngineError, StalewiseError
from stalewise.rollout.workers.worker import WorkDone, work
from stalewise.types import NullCallback, ProgressCallback

RESTARTS = 16  # of one worker; what it had claimed is taken over meanwhile


def work_on_ray(
    source: str,
    *,
    workers: int,
    overrides: Mapping[str, Any] | None = None,
    once: bool = False,
    gpus: float | None = None,
    callback: ProgressCallback | None = None,
) -> list[WorkDone]:
    """Start workers, and wait until all have ended; each has `gpus` GPUs, one where the cluster has any.

    A cluster that is running is found by `RAY_ADDRESS`; without one, Ray starts on this machine, for the time being.
    """
    callback = callback or NullCallback()
    try:
        ray: Any = import_module("ray")  # an extra
    except ImportError as error:
        raise EngineError("Ray is not installed here: pip install 'stalewise[ray]'") from error
    started = not ray.is_initialized()
    if started:
        ray.init(include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        per_worker = gpus if gpus is not None else float(ray.cluster_resources().get("GPU", 0) >= 1)
        # Ray's own retries: the actor is started again on any machine, and its one task with it.
        actor = ray.remote(max_restarts=RESTARTS, max_task_retries=RESTARTS, num_cpus=1, num_gpus=per_worker)(_Actor)
        actors = [actor.remote() for _ in range(workers)]
        callback.log(f"{workers} workers on Ray for {source}")
        asked = [one.work.remote(source, f"ray-{i}", dict(overrides or {}), once) for i, one in enumerate(actors)]
        return [_told(answer) for answer in ray.get(asked)]
    except ray.exceptions.RayError as error:
        raise EngineError(
            f"Ray lost a worker more than {RESTARTS} times, or cannot start one: {' '.join(str(error).split())[:300]}; "
            "what is committed stays: run the same command again"
        ) from error
    finally:
        if started:
            ray.shutdown()


class _Actor:
    """One worker in a process of Ray's."""

    def work(self, source: str, worker: str, overrides: Mapping[str, Any], once: bool) -> WorkDone | str:
        """Work; what is the input's fault comes back as words, since trying again would not help."""
        try:
            return work(source, worker=worker, overrides=overrides, once=once)
        except StalewiseError as error:
            return str(error)


def _told(answer: WorkDone | str) -> WorkDone:
    if isinstance(answer, str):
        raise EngineError(f"a worker on Ray ended: {answer}")
    return answer
