"""TensorBoard, Weights & Biases, trackio and MLflow, through accelerate's trackers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, get_available_trackers
from accelerate.utils import LoggerType

from stalewise.config import RunConfig
from stalewise.config.run_directory import flat
from stalewise.errors import ConfigError
from stalewise.store.atomic import read_jsonl

PROJECT = "stalewise"


class Trackers:
    """A watcher that passes metrics on to the config's trackers: per update, and held-out accuracy as it comes.

    TensorBoard's files go to `tensorboard/` in the run directory. The others know a project `stalewise`, in which the
    run has its own name; where they send it is their own settings' business.
    """

    def __init__(self, config: RunConfig) -> None:
        self._evaluations = config.directory / "eval.jsonl"
        self._seen = len(read_jsonl(self._evaluations))  # what an earlier sitting has logged
        check_installed(config.trackers)
        self._trackers: list[Any] = [_tracker(name, config) for name in config.trackers]
        settings = {key: value for key, value in flat(config.model_dump(mode="json")).items() if _is_plain(value)}
        for tracker in self._trackers:
            tracker.start()
            if tracker.name != "tensorboard":  # there it would be one more run in the list, with no curve
                tracker.store_init_configuration(settings)

    def begin(self, what: str, total: int) -> None:
        """Do nothing."""

    def advance(self, amount: int, note: str = "") -> None:
        """Do nothing."""

    def metrics(self, update: int, record: dict[str, Any]) -> None:
        """Log the numbers of an update."""
        self._log({key: value for key, value in record.items() if _is_number(value) and key != "update"}, update)

    def log(self, message: str) -> None:
        """Log evaluations that came since: the conductor says something after each."""
        records = read_jsonl(self._evaluations)
        for record in records[self._seen :]:
            passed = {f"evaluation/pass@{k}": interval["value"] for k, interval in record["pass_at"].items()}
            self._log({"evaluation/accuracy": record["accuracy"]["value"], **passed}, record["version"])
        self._seen = len(records)

    def close(self) -> None:
        """Flush and end them."""
        for tracker in self._trackers:
            tracker.finish()

    def _log(self, values: dict[str, Any], step: int) -> None:
        for tracker in self._trackers:
            tracker.log(values, step=step)


def check_installed(names: Iterable[str]) -> None:
    """Refuse a tracker whose package is not there, and say how to get it."""
    for name in names:
        if LoggerType(name) not in get_available_trackers():
            raise ConfigError(f"trackers names {name}, whose package is not installed: pip install {name}")


def _tracker(name: str, config: RunConfig) -> GeneralTracker:
    make: Any = LOGGER_TYPE_TO_CLASS[name]
    if name == "tensorboard":
        return make(name, logging_dir=str(config.directory))
    if name == "mlflow":
        return make(experiment_name=PROJECT, run_name=config.name)
    return make(PROJECT, name=config.name)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_plain(value: object) -> bool:
    return isinstance(value, str | int | float | bool)
