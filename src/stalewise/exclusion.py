"""Which prompts a run was trained on, so that nobody judges it on them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from stalewise.errors import StalewiseError
from stalewise.files import read_json
from stalewise.rundirectory import read_config
from stalewise.store import batch_directories, is_committed, open_batch
from stalewise.tasks import Seen, make_task
from stalewise.tasks.overlap import named_ids, seen


def seen_in_training(run: Path, say: Callable[[str], object] = lambda text: None) -> Seen:
    """Ids and problems of all prompts that the run's rollouts answer, or will by the time it is complete.

    The problems come from the task, which has to be found again for that; where it is gone, `say` is told, and only
    the ids that the rollouts carry are known.
    """
    found = Seen()
    for directory in _sources(run):
        batches = [directory] if not (directory / "rollouts").is_dir() else batch_directories(directory / "rollouts")
        for batch in filter(is_committed, batches):
            found |= Seen(named_ids(map(str, open_batch(batch, verify=False).column("prompt_id"))))
        try:
            found |= _by_task(directory)
        except StalewiseError as error:
            say(f"what {directory} was trained on is known by its ids alone, not by its problems: {error}")
    return found


def _sources(run: Path) -> list[Path]:
    """Runs that made the rollouts, or single generation batches that lie in no run."""
    if not (run / "sources.json").is_file():
        return [run]
    batches = [Path(batch["directory"]) for batch in read_json(run / "sources.json")["batches"]]
    runs = [b.parent.parent if (b.parent.parent / "config.resolved.json").is_file() else b for b in batches]
    return list(dict.fromkeys(runs))


def _by_task(directory: Path) -> Seen:
    config = read_config(directory)
    task = make_task(config.task.name, seed=config.seed, **config.task.options)
    try:
        count = config.schedule.updates * config.batch.prompts
        return seen(task.prompts(0, count if task.size is None else min(count, task.size)))
    finally:
        task.verifier.close()
