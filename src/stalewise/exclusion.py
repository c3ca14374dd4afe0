"""Which prompts a run and those that it comes from were trained on, so that nobody judges it on them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from stalewise.config import RunConfig, TaskSection, load_config
from stalewise.errors import StalewiseError
from stalewise.files import read_json
from stalewise.gguf import is_gguf
from stalewise.models import embedded_policies
from stalewise.rundirectory import EXPORT_CONFIG, EXPORT_FORMAT, EXPORT_RECORD, read_config
from stalewise.smollm2 import NAME as SMOLLM2
from stalewise.store import batch_directories, is_committed, open_batch
from stalewise.tasks import Seen, make_task
from stalewise.tasks.overlap import named_ids, seen

Say = Callable[[str], object]

ADVICE = "leave out with --exclude-ids what it must not be judged on"


def seen_in_training(policy: Path, say: Say = lambda text: None, *, apart: TaskSection | None = None) -> Seen:
    """Ids and problems of all prompts that the rollouts of a run answer, or will by the time it is complete.

    Also those of the runs that its policy comes from: the one whose checkpoint it started from, and so on. `policy` is
    a run directory, a checkpoint, or another model directory. Runs of the task `apart` are passed over, since a task
    holds its own prompts apart.

    The problems come from the tasks, which have to be found again for that; where one is gone, `say` is told, and only
    the ids that the rollouts carry are known. It is also told where the line cannot be followed.
    """
    found, known, read, waiting = Seen(), set[Path](), set[Path](), [policy]
    while waiting:
        place = waiting.pop()
        run = _run_of(place)
        if (run or place.resolve()) in known:  # a line that comes back to itself has an end, too
            continue
        known.add(run or place.resolve())
        if run is None:
            found |= _seen_outside(place, say)
            continue
        for directory in [source for source in _sources(run) if source.resolve() not in read]:
            found |= _seen_in(directory, say, apart)
            read.add(directory.resolve())
        try:
            waiting += _beginnings(run)
        except StalewiseError as error:
            say(f"what {run} started from is not known: {error}; {ADVICE}")
    return found


def _run_of(place: Path) -> Path | None:
    """The run that a directory is, or whose checkpoint (or the adapter in one) it is or was: old ones are removed."""
    place = place.resolve()
    candidates = [place, *(near.parent.parent for near in (place, place.parent) if near.parent.name == "checkpoints")]
    return next((run for run in candidates if (run / "config.resolved.json").is_file()), None)


def _beginnings(run: Path) -> list[Path]:
    """Directories of the model and the adapter that a run started from; a model with a name, or in GGUF, has none."""
    sources = read_json(run / "sources.json") if (run / "sources.json").is_file() else {}
    if checkpoint := sources.get("checkpoint"):
        return [Path(checkpoint)]
    model = read_config(run).model
    paths = [path for path in (model.path, model.adapter) if path not in ("", "auto", SMOLLM2, *embedded_policies())]
    return [Path(path).expanduser() for path in paths if not is_gguf(path)]


def _sources(run: Path) -> list[Path]:
    """Runs that made the rollouts, or single generation batches that lie in no run."""
    if not (run / "sources.json").is_file():
        return [run]
    batches = [Path(batch["directory"]) for batch in read_json(run / "sources.json")["batches"]]
    runs = [b.parent.parent if (b.parent.parent / "config.resolved.json").is_file() else b for b in batches]
    return list(dict.fromkeys(runs))


def _seen_in(directory: Path, say: Say, apart: TaskSection | None) -> Seen:
    """What the rollouts of a run, or of a batch that lies in none, answer."""
    if not directory.is_dir():
        say(f"{directory} was learned from and is not there: what it asked is not known; {ADVICE}")
        return Seen()
    found = Seen()
    try:
        config = read_config(directory)
        if config.task == apart:
            return found
        found |= _by_task(config)
    except StalewiseError as error:
        say(f"what {directory} was trained on is known by its ids alone, not by its problems: {error}")
    batches = [directory] if not (directory / "rollouts").is_dir() else batch_directories(directory / "rollouts")
    for batch in filter(is_committed, batches):
        found |= Seen(named_ids(map(str, open_batch(batch, verify=False).column("prompt_id"))))
    return found


def _by_task(config: RunConfig) -> Seen:
    task = make_task(config.task.name, seed=config.seed, **config.task.options)
    try:
        count = config.schedule.updates * config.batch.prompts
        return seen(task.prompts(0, count if task.size is None else min(count, task.size)))
    finally:
        task.verifier.close()


def _seen_outside(directory: Path, say: Say) -> Seen:
    """What can be told of a policy that lies in no run: of an export what its config says, of other models nothing."""
    if (directory / EXPORT_RECORD).is_file():
        record = read_json(directory / EXPORT_RECORD)
        is_policy = record.get("format") == EXPORT_FORMAT and "version" in record  # rollouts have none
        return _seen_by_exported(directory, record, say) if is_policy else Seen()
    if (directory / "state.json").is_file():
        say(f"{directory} is a checkpoint whose run is not there: what it was trained on is not known; {ADVICE}")
    elif not directory.is_dir() and not _is_hub_name(directory):
        say(f"{directory}, where training began, is not there: what it was trained on is not known; {ADVICE}")
    return Seen()


def _seen_by_exported(directory: Path, record: dict[str, Any], say: Say) -> Seen:
    """The prompts that its task makes again: an export says neither what the rollouts asked nor what came before."""
    earlier = "" if record["base"].get("is_itself", True) else f", which began as {record['base']['words']}"
    name = f"{directory} is an export of version {record['version']} of the run {record['run']}{earlier}"
    try:
        found = _by_task(load_config(directory / EXPORT_CONFIG))
    except StalewiseError as error:
        say(f"{name}: what it was trained on is not known ({error}); evaluate the run instead, or {ADVICE}")
        return Seen()
    say(f"{name}: of what it was trained on only the task's prompts are known; evaluate the run instead, or {ADVICE}")
    return found


def _is_hub_name(path: Path) -> bool:
    """Whether what is not here may be a model's name on a hub: of an owner that is no directory here, or of none."""
    owner = path.parts[0]
    return len(path.parts) <= 2 and not owner.startswith((".", "/", "~")) and not Path(owner).is_dir()
