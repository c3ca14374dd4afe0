"""TensorBoard, Weights & Biases, trackio and MLflow, through accelerate's trackers; `config/run.py` lists their names.

accelerate imports torch, so it is imported when a tracker is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from stalewise.config import RunConfig
from stalewise.config.run_directory import flatten
from stalewise.errors import ConfigError
from stalewise.types import NullCallback

PROJECT = "stalewise"


class Trackers(NullCallback):
    """A progress callback that logs the metrics of each update, and each evaluation, to the config's trackers.

    TensorBoard writes to `tensorboard/` in the run directory; the others use the project `stalewise`.
    """

    def __init__(self, config: RunConfig) -> None:
        check_installed(config.trackers)
        self._trackers: list[Any] = [_tracker(name, config.name, config.directory) for name in config.trackers]
        settings = flatten(config.model_dump(mode="json"))
        settings = {key: value for key, value in settings.items() if isinstance(value, str | int | float | bool)}
        for tracker in self._trackers:
            tracker.start()
            if tracker.name != "tensorboard":  # there it would be another run in the list, without curves
                tracker.store_init_configuration(settings)

    def metrics(self, update: int, record: dict[str, Any]) -> None:
        """Log the numbers of an update."""
        numbers = {key: v for key, v in record.items() if isinstance(v, int | float) and not isinstance(v, bool)}
        self._log({key: value for key, value in numbers.items() if key != "update"}, update)

    def evaluation(self, record: dict[str, Any]) -> None:
        """Log the accuracy and pass@k of an evaluation, or all measures of a suite; and the accuracy of each task."""
        if suite := record.get("suite"):
            prefix = f"suites/{suite}"
            values = {f"{prefix}/{name}": interval["value"] for name, interval in measures_of(record).items()}
        else:
            prefix = "evaluation"
            values = {f"{prefix}/accuracy": record["accuracy"]["value"]}
            values |= {f"{prefix}/pass@{k}": interval["value"] for k, interval in record["pass_at"].items()}
        for label, measures in record.get("by_task", {}).items():
            values[f"{prefix}/{label}/accuracy"] = measures["accuracy"]["value"]
        self._log(values, record["version"])

    def close(self) -> None:
        """Flush and end the trackers."""
        for tracker in self._trackers:
            tracker.finish()

    def _log(self, values: dict[str, Any], step: int) -> None:
        for tracker in self._trackers:
            tracker.log(values, step=step)


def measures_of(record: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """The measures of an evaluation by their usual names: avg@k, pass@k for each k, majority@k; each an interval."""
    samples = record["samples"]
    measures = {f"avg@{samples}": record["accuracy"]}
    measures |= {f"pass@{k}": interval for k, interval in record["pass_at"].items()}
    return measures | ({f"majority@{samples}": record["majority"]} if record.get("majority") else {})


def check_installed(names: Iterable[str]) -> None:
    """Raise a ConfigError for a tracker whose package is not installed."""
    from accelerate.tracking import get_available_trackers
    from accelerate.utils import LoggerType

    for name in names:
        if LoggerType(name) not in get_available_trackers():
            raise ConfigError(f"trackers names {name}, whose package is not installed: pip install {name}")


def _tracker(name: str, run: str, directory: Path) -> Any:
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    make: Any = LOGGER_TYPE_TO_CLASS[name]
    if name == "tensorboard":
        return make(name, logging_dir=str(directory))
    return make(experiment_name=PROJECT, run_name=run) if name == "mlflow" else make(PROJECT, name=run)
