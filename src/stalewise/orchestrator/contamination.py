"""The prompts that a policy was trained on, so that it is not evaluated on them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from stalewise.config import RunConfig, TaskSection, load_config
from stalewise.config.run_directory import EXPORT_CONFIG, EXPORT_FORMAT, EXPORT_RECORD, read_config, read_fork
from stalewise.errors import StalewiseError
from stalewise.models import embedded_policy
from stalewise.models.gguf import SMOLLM2, is_gguf
from stalewise.store import atomic, batch_directories, is_committed, open_batch
from stalewise.store.records import SOURCES, read_record
from stalewise.tasks import Seen, close_task
from stalewise.tasks.rows import named_ids, seen

Log = Callable[[str], object]

ADVICE = "exclude with --exclude-ids what it must not be evaluated on"


def seen_in_training(policy: Path, log: Log = lambda text: None, *, apart: TaskSection | None = None) -> Seen:
    """Ids and problems of all prompts that a policy was trained on, or will be once its run is complete.

    `policy` is a run directory, a checkpoint, or another model directory. Earlier runs count too: the run whose
    checkpoint it started from, and so on. Runs of the task `apart` are skipped, since a task holds its own prompts out.
    `log` gets a message if only ids are known, because a task is gone, or if an earlier run cannot be found.
    """
    prompts = Seen()
    visited: set[Path] = set()
    read: set[Path] = set()
    waiting = [policy]
    while waiting:
        path = waiting.pop()
        run = _run_of(path)
        if (run or path.resolve()) in visited:  # runs may refer to each other in a circle
            continue
        visited.add(run or path.resolve())
        if run is None:
            prompts |= _seen_outside(path, log)
            continue
        for directory in [source for source in _sources(run) if source.resolve() not in read]:
            prompts |= _seen_in(directory, log, apart)
            read.add(directory.resolve())
        try:
            waiting += _origins(run)
        except StalewiseError as error:
            log(f"the policy that {run} started from is unknown: {error}; {ADVICE}")
    return prompts


def _run_of(path: Path) -> Path | None:
    """The run of a run directory, or of a checkpoint or the adapter in one, even if the checkpoint was removed."""
    path = path.resolve()
    candidates = [path, *(near.parent.parent for near in (path, path.parent) if near.parent.name == "checkpoints")]
    return next((run for run in candidates if (run / "config.resolved.json").is_file()), None)


def _origins(run: Path) -> list[Path]:
    """Directories of the model and the adapter that a run started from; none for a built-in model or a GGUF file."""
    sources = read_record(run / "sources.json", SOURCES) if (run / "sources.json").is_file() else {}
    if checkpoint := sources.get("checkpoint"):
        return [Path(checkpoint)]
    model, forked = read_config(run).model, read_fork(run)
    before = [Path(forked["run"])] if forked else []
    paths = [path for path in (model.path, model.adapter) if path not in ("", "auto", SMOLLM2)]
    paths = [path for path in paths if not embedded_policy(path)]
    return [*before, *(Path(path).expanduser() for path in paths if not is_gguf(path))]


def _sources(run: Path) -> list[Path]:
    """The runs that made the rollouts, or single generation batches outside of a run."""
    if not (run / "sources.json").is_file():
        return [run]
    batches = [Path(batch["directory"]) for batch in read_record(run / "sources.json", SOURCES)["batches"]]
    runs = [b.parent.parent if (b.parent.parent / "config.resolved.json").is_file() else b for b in batches]
    return list(dict.fromkeys(runs))


def _seen_in(directory: Path, log: Log, apart: TaskSection | None) -> Seen:
    """The prompts of the rollouts of a run, or of a batch outside of a run."""
    if not directory.is_dir():
        log(f"{directory} was learned from and does not exist: its prompts are unknown; {ADVICE}")
        return Seen()
    prompts = Seen()
    try:
        config = read_config(directory)
        if config.task == apart:
            return prompts
        prompts |= _training_prompts(config)
    except StalewiseError as error:
        log(f"of the prompts that {directory} was trained on only the ids are known, not the problems: {error}")
    batches = [directory] if not (directory / "rollouts").is_dir() else batch_directories(directory / "rollouts")
    for batch in filter(is_committed, batches):
        prompts |= Seen(named_ids(map(str, open_batch(batch, verify=False).column("prompt_id"))))
    return prompts


def _training_prompts(config: RunConfig) -> Seen:
    task = config.make_task()
    try:
        count = config.schedule.updates * config.batch.prompts
        return seen(task.prompts(0, count if task.size is None else min(count, task.size)))
    finally:
        close_task(task)


def _seen_outside(directory: Path, log: Log) -> Seen:
    """The prompts of a policy outside of a run: for an export those of its config, for other models none."""
    if (directory / EXPORT_RECORD).is_file():
        record = atomic.read_json(directory / EXPORT_RECORD)
        is_policy = record.get("format") == EXPORT_FORMAT and "version" in record  # exported rollouts have no version
        return _seen_by_exported(directory, record, log) if is_policy else Seen()
    if (directory / "state.json").is_file():
        log(f"{directory} is a checkpoint whose run does not exist: what it was trained on is unknown; {ADVICE}")
    elif not directory.is_dir() and not _is_hub_name(directory):
        log(f"{directory}, where training began, does not exist: what it was trained on is unknown; {ADVICE}")
    return Seen()


def _seen_by_exported(directory: Path, record: dict[str, Any], log: Log) -> Seen:
    """The prompts of its task: an export names neither the rollouts' prompts nor earlier runs."""
    earlier = "" if record["base"].get("is_itself", True) else f", which began as {record['base']['words']}"
    name = f"{directory} is an export of version {record['version']} of the run {record['run']}{earlier}"
    try:
        prompts = _training_prompts(load_config(directory / EXPORT_CONFIG))
    except StalewiseError as error:
        log(f"{name}: what it was trained on is unknown ({error}); evaluate the run instead, or {ADVICE}")
        return Seen()
    log(f"{name}: only the task's prompts are known to have been trained on; evaluate the run instead, or {ADVICE}")
    return prompts


def _is_hub_name(path: Path) -> bool:
    """Whether a path that does not exist may be the name of a model on a hub."""
    owner = path.parts[0]
    return len(path.parts) <= 2 and not owner.startswith((".", "/", "~")) and not Path(owner).is_dir()
