"""Training: the conductor at a run directory, until there is nothing left to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stalewise.calibration.planning import plan_for_training
from stalewise.calibration.settle import settle
from stalewise.conductor import Conductor
from stalewise.config import RunConfig
from stalewise.errors import ConfigError
from stalewise.files import RunLock
from stalewise.objectives import get_objective
from stalewise.pipeline import Pipelined
from stalewise.rundirectory import RunResult, is_started
from stalewise.watch import Silence, Watcher
from stalewise.workers.meeting import restore


def run(config: RunConfig, watcher: Watcher | None = None) -> RunResult:
    """Train as the config says, from wherever its run directory stands."""
    watcher = watcher or Silence()
    check_objective(config)  # before anything is loaded
    config = settle(config, watcher.say)
    if config.plan.strict and not is_started(config.directory):
        plan_for_training(config)  # refuses what is not known to be safe
    side = Pipelined if config.schedule.kind == "pipelined" else Conductor

    def make_conductor() -> Conductor:
        restore(config, watcher.say)  # with the directory's lock, and before anything is read from there
        return side(config, watcher)

    return conduct(config.directory, make_conductor)


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
