"""Run directories: their config, comparison with another config, and the result of a finished run."""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from stalewise import __version__
from stalewise.config.run import (
    FORMAT,
    HERE,
    RunConfig,
    identity_of,
    load_config,
    make_config,
    set_dotted,
    with_moved_files,
)
from stalewise.config.sections import ScheduleSection
from stalewise.config.template import toml
from stalewise.errors import StalewiseError, StoreError
from stalewise.staleness.schedule import ForkedSchedule, PastBatch, Schedule
from stalewise.store.atomic import check_format, read_json
from stalewise.store.checkpoints import checkpoint_directory, versions
from stalewise.store.manifest import (
    batch_directories,
    committed_shards,
    is_committed,
    parse_batch_name,
    read_batch_manifest,
)
from stalewise.store.records import EVALUATION, JOURNAL, SUITE, read_records

RESOLVED = "config.resolved.json"
# Files of a directory that `stalewise export` makes: the record that identifies it, and the run's settings.
EXPORT_FORMAT = "stalewise.export/1"
EXPORT_RECORD = "stalewise.json"
EXPORT_CONFIG = "training_config.toml"
REWARD_FUNCTION = "task.options.verifier_options.function"
# Settings that refer to objects of a program, and how messages name them.
_OF_PROGRAMS = {
    REWARD_FUNCTION: "reward function (the run's own is in python/reward.py)",
    "task.options.path": "data set (the run's own is in data/)",
    "task.options.evaluation_path": "evaluation data set (the run's own is in data/)",
    "task.options.task": "task (the run's own is in python/task.py)",
    "objective.name": "objective (the run's own is in python/objective.py)",
    "model.path": "model",
}
# Settings that may change in a run at any time; the change is recorded in the journal.
IN_PLACE = ("evaluation.", "checkpoints.")
# Settings that rollouts do not depend on: they may change until the first update.
OF_TRAINING = ("optimizer.", "objective.", "guard.", "learner.", "recipe")
# Settings that a fork takes from its checkpoint.
OF_THE_CHECKPOINT = ("model.path", "model.adapter", "model.lora", "optimizer.moments")
# Events in the journal that take no time.
NOTES = frozenset({"ranks", "config", "fork"})
FORK_FORMAT = "stalewise.fork/1"
FORK = "fork.json"
LIMITS_FORMAT = "stalewise.limits/1"
LIMITS_FILE = "limits.json"  # the drift budgets
REFERENCE_FILE = "reference.json"  # the weights of the reference policy
_WAY_ON = "restore it to continue, or choose another name=… for a new run"


@dataclass(frozen=True, slots=True)
class RunResult:
    """The result of a finished run."""

    directory: Path
    updates: int
    evaluations: list[dict[str, Any]]  # records of eval.jsonl, oldest first
    seconds: dict[str, float]  # generate, learn, switch, evaluate: summed over all resumes

    def __repr__(self) -> str:
        """One line: the number of evaluations, since each has the score of every prompt."""
        accuracy = f"accuracy={self.accuracy:.4g}, " if self.evaluations else ""
        shown = f"directory={str(self.directory)!r}, updates={self.updates}, {accuracy}"
        return f"RunResult({shown}evaluations={len(self.evaluations)})"

    @property
    def accuracy(self) -> float:
        """Held-out accuracy of the final policy."""
        return self.evaluations[-1]["accuracy"]["value"]

    @property
    def suites(self) -> dict[str, dict[str, Any]]:
        """The last evaluation on each suite, by its name: records of suites.jsonl."""
        return {record["suite"]: record for record in read_records(self.directory / "suites.jsonl", SUITE)}

    @property
    def unscored(self) -> float:
        """Fraction of the rollouts that could not be scored and were left out; 0 if there are no rollouts."""
        batches = filter(is_committed, batch_directories(self.directory / "rollouts"))
        manifests = [read_batch_manifest(batch) for batch in batches]
        return sum(manifest.verifier_errors for manifest in manifests) / (
            sum(manifest.rows for manifest in manifests) or 1
        )

    @property
    def checkpoint(self) -> Path:
        """The directory of the final policy, which transformers loads."""
        return checkpoint_directory(self.directory, self.updates)


def read_result(directory: Path, updates: int) -> RunResult:
    """Read the result of a finished run from its directory."""
    seconds: dict[str, float] = {"generate": 0.0, "learn": 0.0, "switch": 0.0, "evaluate": 0.0}
    for record in read_records(directory / "journal.jsonl", JOURNAL):
        if record["event"] not in NOTES:
            seconds[record["event"]] = seconds.get(record["event"], 0.0) + record["seconds"]
    return RunResult(directory, updates, read_records(directory / "eval.jsonl", EVALUATION), seconds)


def read_config(directory: str | Path) -> RunConfig:
    """The config of a run directory."""
    record = read_resolved(directory)
    del record["format"]
    return make_config(with_moved_files(record, str(Path(directory))), source=str(Path(directory) / RESOLVED))


def read_config_at(directory: str | Path, overrides: Mapping[str, Any]) -> RunConfig:
    """The config to continue a run directory at its present location, with overrides by dotted names."""
    path = Path(os.path.normpath(directory))
    record = {**read_config(path).model_dump(mode="json"), "runs": str(path.parent), "name": path.name}
    for key, value in overrides.items():
        set_dotted(record, key, value)
    return make_config(record, source=str(path))


def read_resolved(directory: str | Path) -> dict[str, Any]:
    """The config of a run directory as it is stored."""
    path = Path(directory) / RESOLVED
    is_closed = os.path.isdir(directory) and not os.access(directory, os.X_OK)
    if not os.path.isfile(path) and not is_closed:
        raise StoreError(not_a_run(directory))
    record = read_json(path)
    check_format(path, record.get("format"), FORMAT)
    return record


def not_a_run(directory: str | Path) -> str:
    """Error message for a path that is not a run directory, with a suggestion."""
    what = f"has no {RESOLVED}" if os.path.isdir(directory) else "does not exist"
    if os.path.isfile(directory):
        what = "is a file"
    return f"{directory} is not a run directory: it {what}; {run_nearby(directory)}"


def run_nearby(path: str | Path) -> str:
    """Suggest the run directory that was probably meant."""
    path = Path(path)
    if os.path.isfile(path) and (run := _run_of_config(path)) is not None:
        begun = "name its run" if os.path.isfile(run / RESOLVED) else "`stalewise train` makes its run"
        return f"{begun}, {run}"
    for above in (path.parent, *path.parent.parents[:2]):
        if os.path.isfile(above / RESOLVED):
            return f"name the run that it belongs to, {above}"
    if inside := runs_in(path):
        return f"name a run in it, such as {inside[0]}"
    if not os.path.exists(path) and (beside := runs_in(path.parent)):
        more = f" and {len(beside) - 8} more" if len(beside) > 8 else ""
        return f"there are in {path.parent}: {', '.join(run.name for run in beside[:8])}{more}"
    return "name the directory of a run"


def runs_in(path: Path) -> list[Path]:
    """The run directories in a directory, by name."""
    with contextlib.suppress(OSError, ValueError):  # a directory that cannot be read, a name that none can have
        return sorted(entry.parent for entry in path.glob(f"*/{RESOLVED}"))
    return []


def _run_of_config(path: Path) -> Path | None:
    """The run directory that a config file names; None if the file is no config."""
    with contextlib.suppress(StalewiseError):
        return load_config(path).directory if path.suffix == ".toml" else None
    return None


def is_started(directory: Path) -> bool:
    """Whether a run directory holds a checkpoint or a generation batch, complete or not."""
    parents = [directory / "checkpoints", directory / "rollouts"]
    return any(not entry.name.startswith(".") for parent in parents if parent.is_dir() for entry in parent.iterdir())


def check_identity(config: RunConfig) -> None:
    """Raise a StoreError if a run directory was made with another config or format."""
    path = config.directory / RESOLVED
    if not path.exists():
        if versions(config.directory):
            raise StoreError(f"{path} is missing, though the run has begun: restore it, or choose another name")
        return
    recorded = read_json(path)
    check_format(path, recorded.get("format"), FORMAT, advice="choose another name")
    if not is_started(config.directory):
        return  # after a failed start, e.g. with a wrong model path, the config may still change
    changes = changed_settings(config.model_dump(mode="json"), recorded)
    if may_still_change(config.directory, changes):
        return
    differences = _describe_changes(changes)
    if changed := _changed_in_program(differences):
        if "model.path" not in changes and _is_unused_fork(config.directory):
            return
        advice = _fork_in_program(config.directory, config.schedule.updates, changes)
        raise StoreError(
            f"{config.directory} was begun with {changed}: {_WAY_ON}{advice and f'; the changed program {advice}'}"
        )
    forked = _fork_advice(config.directory, config.schedule.updates, changes)
    if forked and is_of_program(recorded):
        forked = f"{forked.removesuffix('; or ')}, by the same call with its name; or "
    advice = f"{forked}choose another name, or delete the directory to start anew"
    raise StoreError(f"{config.directory} belongs to another config ({'; '.join(differences[:3])}): {advice}")


def is_of_program(record: Mapping[str, Any]) -> bool:
    """Whether a run's config names objects that only a program has: `stalewise train` cannot continue it."""
    task, objective = record.get("task", {}), record.get("objective", {})
    options = task.get("options") or {}
    named = ((options.get("verifier_options") or {}).get("function"), options.get("task"), objective.get("name"))
    return any("@" in str(name) and ":" not in str(name) for name in named)


def may_still_change(directory: Path, keys: Iterable[str]) -> bool:
    """Whether these settings may change in a run: nothing was trained, and no rollouts depend on them."""
    if versions(directory)[-1:] not in ([], [0]):
        return not list(keys)
    generated = any(map(committed_shards, batch_directories(directory / "rollouts")))
    return not generated or all(key.startswith(OF_TRAINING) for key in keys)


def _is_unused_fork(directory: Path) -> bool:
    """Whether this is a fork without an update or rollouts of its own: it takes new objects of a program."""
    forked = read_fork(directory)
    if not forked or versions(directory)[-1:] != [forked["version"]]:
        return False
    present = filter(committed_shards, batch_directories(directory / "rollouts"))
    made = (batch.name for batch in present if parse_batch_name(batch).version >= forked["version"])
    return {*made} <= {*forked["rollouts"]}


def _fork_in_program(directory: Path, updates: int, changes: Mapping[str, tuple[Any, Any]]) -> str:
    """Where and how a run goes on with a program's new objects; empty if a fork cannot take them."""
    existing = versions(directory)
    newest = [version for version in existing if version < updates][-1:]
    if (
        not newest
        or (directory / "sources.json").is_file()
        or any(key.startswith(OF_THE_CHECKPOINT) for key in changes)
    ):
        return ""
    is_last = newest == existing[-1:]
    call = f'stalewise.fork("{directory}"{"" if is_last else f", at={newest[0]}"}, name="{directory.name}-2")'
    start = "the last checkpoint" if is_last else f"version {newest[0]}"
    return f"goes on from {start}: {call}, then the same call with that name"


def repair_advice(directory: Path, updates: int, function: str) -> str:
    """How the responses that a failing reward function could not score are sampled again."""
    if "@" not in function:
        return "the same command samples them again"
    may_change = may_still_change(directory, [REWARD_FUNCTION]) or _is_unused_fork(directory)
    forked = "" if may_change else _fork_in_program(directory, updates, {})
    return f"a repaired function {forked}" if forked else "the same call samples them again"


def _fork_advice(directory: Path, updates: int, changes: Mapping[str, tuple[Any, Any]]) -> str:
    """Advice with the command that forks the run with these changes; empty if a fork cannot apply them."""
    newest = [version for version in versions(directory) if version < updates][-1:]
    learned = (directory / "sources.json").is_file()
    if not newest or learned or any(key.startswith(OF_THE_CHECKPOINT) for key in changes):
        return ""
    words = ["stalewise", "fork", str(directory), "--at", str(newest[0])]
    for key, (_, new) in changes.items():
        words += ["--unset", key] if new is None else ["--set", f"{key}={toml(new)}"]
    return f"`{shlex.join(words)}` continues from version {newest[0]} as a new run; or "


def changed_settings(
    record: Mapping[str, Any], recorded: Mapping[str, Any], but: Container[str] = ()
) -> dict[str, tuple[Any, Any]]:
    """Settings that identify a run and differ between two resolved configs: the values before and after."""
    # A setting that is newer than the run had its default value. A removed option is a difference, too.
    old, new = flatten(RunConfig().identity()) | flatten(identity_of(recorded)), flatten(identity_of(record))
    return {
        key: (old.get(key), new.get(key))
        for key in {**new, **old}
        if old.get(key) != new.get(key) and key not in but and not key.startswith(IN_PLACE)
    }


def identity_differences(config: RunConfig, recorded: Mapping[str, Any], but: Container[str] = ()) -> list[str]:
    """How a config differs from the resolved config of a run, ignoring the settings `but`."""
    return _describe_changes(changed_settings(config.model_dump(mode="json"), recorded, but))


def _describe_changes(changes: Mapping[str, tuple[Any, Any]]) -> list[str]:
    return [f"{key} was {old!r} and is {new!r}" for key, (old, new) in changes.items()]


def _changed_in_program(differences: list[str]) -> str:
    """The objects of a program (`stalewise.train`) that differ from the run's; empty if anything else differs, too."""
    keys = {text.partition(" ")[0] for text in differences if "@" in text or HERE in text}
    changed = [what for key, what in _OF_PROGRAMS.items() if key in keys]
    return f"another {' and another '.join(changed)}" if len(changed) == len(differences) else ""


def all_changes(record: Mapping[str, Any], recorded: Mapping[str, Any]) -> dict[str, list[Any]]:
    """All settings that differ between two resolved configs of a run, except name and directory: before and after."""
    before, after = (flatten(with_moved_files(resolved, HERE)) for resolved in (recorded, record))
    before = flatten(RunConfig().model_dump(mode="json")) | before
    ignored = ("format", "name", "runs")
    return {
        key: [before.get(key), after.get(key)]
        for key in {**before, **after}
        if key not in ignored and before.get(key) != after.get(key)
    }


def read_fork(directory: Path) -> dict[str, Any]:
    """The contents of `fork.json`: what a forked run started from; empty for any other run."""
    path = directory / FORK
    record = read_json(path) if path.is_file() else {}
    if record:
        check_format(path, record.get("format"), FORK_FORMAT)
    return record


def schedule_of(section: ScheduleSection, directory: Path) -> Schedule:
    """The schedule of a run, as far as it is known beforehand; a fork's begins with the batches of its parent run."""
    planned = section.schedule()
    if section.end == "spent" or not (forked := read_fork(directory).get("schedule")):
        return planned
    past = tuple(PastBatch(*batch) for batch in forked["past"])
    first = past[-1].first_update + past[-1].planned_updates if past else 0
    left = section.updates - first
    stages = None if section.stages is None else min(section.stages, left)
    rest = section.model_copy(update={"updates": left, "stages": stages}).schedule()
    return ForkedSchedule(
        section.updates, rest.updates_per_generation, rest.lag, past=past, first_prompt=forked["first_prompt"]
    )


def flatten(record: Mapping[str, Any], prefix: str = "", *, keep_empty: bool = False) -> dict[str, Any]:
    """Nested tables as one table with dotted keys; empty tables are left out, or with `keep_empty` are values."""
    merged: dict[str, Any] = {}
    for key, value in record.items():
        if isinstance(value, dict) and (value or not keep_empty):
            merged |= flatten(value, f"{prefix}{key}.", keep_empty=keep_empty)
        else:
            merged[f"{prefix}{key}"] = value
    return merged


def environment(device: str, threads: int, world_size: int) -> dict[str, Any]:
    """Versions and hardware that the numbers of a run may depend on besides its config."""
    return {
        "stalewise": __version__,
        "python": platform.python_version(),
        **{package: version(package) for package in ("torch", "transformers", "numpy", "pyarrow")},
        "platform": platform.platform(),
        "machine": platform.machine(),
        "device": device,
        "threads": threads,
        "world_size": world_size,
    }
