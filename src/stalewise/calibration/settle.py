"""The learning rate that a run is made with, where its config leaves that to the plan."""

from __future__ import annotations

from collections.abc import Callable

from stalewise.calibration.planning import budget_limits, law_learning_rate, rests_on_collapses, rounded_down
from stalewise.config import RunConfig, make_config
from stalewise.errors import CalibrationError
from stalewise.files import read_json, write_json_atomic
from stalewise.rundirectory import is_started, read_config

FORMAT = "stalewise.limits/1"
FILE = "limits.json"  # in the run directory


def settle(config: RunConfig, say: Callable[[str], object] = lambda text: None) -> RunConfig:
    """The config with the planned learning rate filled in; one that says its own is left alone.

    A run that has begun goes on with the rate it began with, whatever was calibrated since.
    """
    if config.plan.learning_rate == "given":
        return config
    if is_started(config.directory):
        return with_rate(config, read_config(config.directory).optimizer.learning_rate)
    try:
        rate = law_learning_rate(config)
    except CalibrationError as error:
        if config.plan.learning_rate == "planned":
            raise
        say(f"optimizer.learning_rate stays {config.optimizer.learning_rate:g}, as given: {error}")
        return config
    given = config.optimizer.learning_rate
    if config.plan.learning_rate != "planned" and rate < given and not rests_on_collapses(config):
        say(
            f"optimizer.learning_rate stays {given:g}, as given: up to {rounded_down(rate)} is known to be safe, but "
            "no run of the sweep says that more is not"
        )
        return config
    say(f"plan: optimizer.learning_rate is {rate:.3g}, the largest that is safe")
    return with_rate(config, rate)


def limits_of_run(config: RunConfig) -> tuple[float, float] | None:
    """What a run is watched against, written down when it first learns: a calibration that is made later, or a
    model that was moved away, must not change what a run that goes on does.
    """
    path = config.directory / FILE
    if not path.is_file():
        write_json_atomic(path, {"format": FORMAT, "limits": budget_limits(config)})
    limits = read_json(path)["limits"]
    return None if limits is None else (limits[0], limits[1])


def with_rate(config: RunConfig, rate: float) -> RunConfig:
    """The config with another learning rate."""
    record = config.model_dump(mode="json")
    record["optimizer"]["learning_rate"] = rate
    return make_config(record, source="plan")
