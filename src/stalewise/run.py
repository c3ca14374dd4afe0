"""Training: the conductor at a run directory, until there is nothing left to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stalewise.calibration.planning import plan_for_training
from stalewise.calibration.settle import settle
from stalewise.conductor import Conductor
from stalewise.config import RunConfig
from stalewise.distributed import ALONE, Ranks
from stalewise.errors import ConfigError
from stalewise.files import RunLock
from stalewise.objectives import get_objective
from stalewise.pipeline import Pipelined
from stalewise.rundirectory import RunResult, is_started
from stalewise.together import together
from stalewise.watch import Silence, Watcher
from stalewise.workers.meeting import restore
from stalewise.workers.ranks import meeting_of


def run(config: RunConfig, watcher: Watcher | None = None, *, say_plan: bool = False) -> RunResult:
    """Train as the config says, from wherever its run directory stands; on all processes that were launched for it.

    `say_plan`: tell the watcher, before a new run, what is known of how it will go.
    """
    return together(config, lambda ranks: _train(config, watcher or Silence(), ranks, say_plan))


def _train(config: RunConfig, watcher: Watcher, ranks: Ranks, say_plan: bool) -> RunResult:
    check_objective(config)  # before anything is loaded
    config = settle(config, watcher.say)
    if (say_plan or config.plan.strict) and not is_started(config.directory):
        plan = plan_for_training(config)  # refuses what is not known to be safe, where that is asked for
        for line in plan.lines if say_plan else ():
            watcher.say(line)
    side = Pipelined if config.schedule.kind == "pipelined" else Conductor

    def make_conductor() -> Conductor:
        restore(config, watcher.say)  # with the directory's lock, and before anything is read from there
        return side(config, watcher)

    return conduct(config.directory, make_conductor, ranks)


def check_objective(config: RunConfig) -> Mapping[str, Any]:
    """The objective's parameters with defaults filled in; a name or value that is not known is a ConfigError."""
    try:
        return get_objective(config.objective.name).settings(config.objective.params)
    except ValueError as error:
        raise ConfigError(f"objective: {error}") from error


def conduct(directory: Path, make_conductor: Callable[[], Conductor], ranks: Ranks = ALONE) -> RunResult:
    """Do what is next in a run directory until nothing is."""
    with RunLock(directory):
        conductor = make_conductor()
        conductor.ranks, conductor.meeting = ranks, meeting_of(conductor.meeting, ranks)
        try:
            conductor.check_memory()
            conductor.prepare()
            while conductor.act():
                pass
            return conductor.result()
        finally:
            conductor.close()
