"""Each verb as a function: `generate`, `learn`, `evaluate`. Training is `stalewise.run`, reporting `stalewise.report`.

The command line calls these and prints what they return.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from stalewise.checkpoints import checkpoint_directory, read_state, versions
from stalewise.config import RunConfig, make_config
from stalewise.errors import StoreError, TaskError
from stalewise.evaluate import Evaluation, evaluate_checkpoint
from stalewise.files import RunLock
from stalewise.generate.setup import make_sampler
from stalewise.models import embedded_policies, resolve_model
from stalewise.relearn import Relearner, plan_sources
from stalewise.run import Conductor, check_objective, conduct
from stalewise.rundirectory import RunResult, read_config
from stalewise.store import BatchManifest
from stalewise.tasks import make_task
from stalewise.watch import Silence, Watcher


def generate(
    config: RunConfig,
    *,
    batch: int | None = None,
    checkpoint: str | Path | None = None,
    watcher: Watcher | None = None,
) -> list[BatchManifest]:
    """Fill the store without learning; what is committed already is not made again.

    Without further arguments this makes the next generation batch that is missing (none where all are there); with
    `batch`, that one. With `checkpoint`, a checkpoint of this run that may lie anywhere, it makes the batches which
    that version is to make: another machine can generate from a copied checkpoint, and its rollouts are copied back.
    """
    with RunLock(config.directory):
        conductor = Conductor(config, watcher or Silence())
        try:
            if checkpoint is not None:
                conductor.claim()
                wanted = _batches_of_checkpoint(conductor, Path(checkpoint))
                return [conductor.generate(g, Path(checkpoint)) for g in wanted]
            conductor.prepare()
            newest = versions(config.directory)[-1]
            if batch is None:
                missing = conductor.missing_batch(newest) if newest < conductor.schedule.updates else None
                return [] if missing is None else [conductor.generate(missing)]
            _check_batch_number(conductor, batch)
            return [conductor.generate(batch)]
        finally:
            conductor.close()


def _batches_of_checkpoint(conductor: Conductor, checkpoint: Path) -> list[int]:
    if not (checkpoint / "manifest.json").is_file():
        raise StoreError(f"{checkpoint} is no checkpoint of a run: to generate with another model, say model.path")
    version = read_state(checkpoint)["version"]
    schedule = conductor.schedule
    wanted = [g for g in range(schedule.generation_batches) if schedule.version_of(g) == version]
    if not wanted:
        makers = sorted({schedule.version_of(g) for g in range(schedule.generation_batches)})
        raise StoreError(f"version {version} makes no generation batch of this schedule; versions that do: {makers}")
    return wanted


def _check_batch_number(conductor: Conductor, batch: int) -> None:
    count = conductor.schedule.generation_batches
    if not 0 <= batch < count:
        raise StoreError(f"generation batch {batch} does not exist: this schedule has 0 to {count - 1}")
    version = conductor.schedule.version_of(batch)
    if version not in versions(conductor.directory):
        raise StoreError(
            f"generation batch {batch} is made by version {version}, which {conductor.directory} does not have: "
            "`stalewise train` comes there in its turn"
        )


def learn(
    config: RunConfig,
    rollouts: Iterable[str | Path],
    *,
    checkpoint: str | Path | None = None,
    watcher: Watcher | None = None,
) -> RunResult:
    """Learn once through rollouts that exist: of run directories, or of single generation batches, in this order.

    The result is a run directory like any other, except that its rollouts lie elsewhere. Updates: for each batch its
    groups divided by `batch.prompts`, rounded down, and at most `schedule.updates` in all. The policy starts at
    `config.model.path` or at `checkpoint`, with a fresh optimizer. `stalewise.relearn` says how ages are counted.
    """
    check_objective(config)  # before anything is loaded
    start = None if checkpoint is None else Path(checkpoint)
    planned, sources = plan_sources(config, [Path(path) for path in rollouts], start)
    return conduct(planned.directory, lambda: Relearner(planned, sources, start, watcher or Silence()))


def evaluate(
    model_or_run: str | Path,
    *,
    task: str | None = None,
    options: Mapping[str, Any] | None = None,
    prompts: int | None = None,
    samples: int | None = None,
    max_new_tokens: int | None = None,
    watcher: Watcher | None = None,
) -> Evaluation:
    """Accuracy on held-out prompts of a model, of a checkpoint, or of a run's newest checkpoint. Nothing is written.

    A run, or a checkpoint in one, brings its task and settings along; for another model `task` has to be said, unless
    it is the embedded policy of one.
    """
    checkpoint, version, config = _policy(str(model_or_run), task)
    config = _with_settings(config, task, options, prompts, samples, max_new_tokens)
    chosen = make_task(config.task.name, seed=config.seed, **config.task.options)
    sampler = make_sampler(config)
    watcher = watcher or Silence()
    watcher.begin("evaluate", config.evaluation.prompts * config.evaluation.samples)
    try:
        result = evaluate_checkpoint(
            checkpoint,
            version=version,
            task=chosen,
            sampler=sampler,
            prompts=config.evaluation.prompts,
            samples=config.evaluation.samples,
            rows_at_once=config.sampler.rollouts_per_shard,
        )
    finally:
        sampler.close()
        chosen.verifier.close()
    watcher.advance(result.prompts * result.samples)
    return result


def _policy(name: str, task: str | None) -> tuple[Path, int, RunConfig]:
    """Where the policy lies, which version it is, and the config it comes with."""
    path = Path(name).expanduser()
    if (path / "config.resolved.json").is_file():
        found = versions(path)
        if not found:
            raise StoreError(f"{path} has no checkpoint yet")
        checkpoint = checkpoint_directory(path, found[-1])
        read_state(checkpoint)  # compares its files with their checksums
        return checkpoint, found[-1], read_config(path)
    run = path.resolve().parent.parent
    if (path / "state.json").is_file() and (run / "config.resolved.json").is_file():
        return path, read_state(path)["version"], read_config(run)
    if task is None and name not in embedded_policies():
        raise TaskError(f"{name} is no run directory: say which task to evaluate it on, as in --task arithmetic")
    return Path(resolve_model(name)), 0, make_config({"model": {"path": name}, "task": {"name": task or name}})


def _with_settings(
    config: RunConfig,
    task: str | None,
    options: Mapping[str, Any] | None,
    prompts: int | None,
    samples: int | None,
    max_new_tokens: int | None,
) -> RunConfig:
    record = config.model_dump(mode="json")
    if task is not None and task != config.task.name:
        record["task"] = {"name": task, "options": {}}
    record["task"]["options"] |= dict(options or {})
    for section, key, value in (
        ("evaluation", "prompts", prompts),
        ("evaluation", "samples", samples),
        ("sampler", "max_new_tokens", max_new_tokens),
    ):
        if value is not None:
            record[section][key] = value
    return make_config(record, source="evaluate")
