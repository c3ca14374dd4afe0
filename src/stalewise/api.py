"""The public verbs as functions: train, run, fork, rescore and others. The command line prints their results."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from stalewise.config import RunConfig, load_config
from stalewise.config.run import temperature_warning
from stalewise.config.run_directory import RunResult, is_started, read_config, read_config_at
from stalewise.distributed import Ranks
from stalewise.errors import ConfigError, StoreError, TaskError
from stalewise.orchestrator import python_objects
from stalewise.orchestrator.evaluation import (
    Evaluation,
    evaluate_planned,
    plan_evaluation,
    plan_suites,
)
from stalewise.orchestrator.fork import fork
from stalewise.orchestrator.offline import OfflineRollouts, plan_sources
from stalewise.orchestrator.orchestrator import Orchestrator
from stalewise.orchestrator.pipelined import BackgroundGeneration
from stalewise.orchestrator.preflight import check_objective
from stalewise.orchestrator.ranks import join_ranks, run_on_all_ranks
from stalewise.orchestrator.rescore import ROWS_TASKS
from stalewise.orchestrator.rescore import rescore as score_again
from stalewise.orchestrator.rollout_source import RolloutSource
from stalewise.orchestrator.setup import claim, resolve_settings
from stalewise.planning.memory import check_sampling_memory
from stalewise.planning.planner import plan_for_training
from stalewise.reporting.progress import watching
from stalewise.rollout.factory import check_policy
from stalewise.rollout.workers.coordinator import restore
from stalewise.store import BatchManifest, checkpoints
from stalewise.store.reward_versions import RewardVersion
from stalewise.tasks import callables
from stalewise.tasks.sandbox import scratch_folder
from stalewise.tasks.verifiers import VERIFIERS
from stalewise.types import ProgressCallback

__all__ = ["evaluate", "evaluate_suites", "fork", "generate", "learn", "rescore", "run", "train"]

P = ParamSpec("P")
R = TypeVar("R")


def _accepts_watcher(verb: Callable[P, R]) -> Callable[P, R]:
    """Accept `callback` under its old name `watcher`, with a warning. To be removed after one release."""

    @functools.wraps(verb)
    def wrapper(*arguments: P.args, **keywords: P.kwargs) -> R:
        if "watcher" in keywords:
            message = f"stalewise.{verb.__name__}(watcher=…) is deprecated: use callback=…"
            warnings.warn(message, DeprecationWarning, stacklevel=2)
            keywords["callback"] = keywords.pop("watcher")
        return verb(*arguments, **keywords)

    return wrapper


@_accepts_watcher
def run(
    config: RunConfig | str | Path, callback: ProgressCallback | None = None, *, say_plan: bool = False
) -> RunResult:
    """Train as the config says, continuing from its run directory, on all ranks that were launched.

    `config` may be the path of a TOML file, or a run directory. `callback` receives the progress; by default it goes to
    stderr. `say_plan` logs the plan of a new run: what is known about its speed and its safety.
    """
    checked = _read(config)

    def train(ranks: Ranks, progress: ProgressCallback) -> RunResult:
        check_objective(checked.objective, checked.batch.without_variance)  # before anything is loaded
        resolved = resolve_settings(checked, progress.log)
        if warning := temperature_warning(resolved.sampler.temperature, resolved.objective.policy_temperature):
            progress.log(warning)  # also of a fork that changes one of the two
        if (say_plan or resolved.plan.strict) and not is_started(resolved.directory):
            plan = plan_for_training(resolved)  # raises where plan.strict is set and the run is not known to be safe
            for line in plan.lines if say_plan else ():
                progress.log(line)
        source = BackgroundGeneration() if resolved.schedule.kind == "pipelined" else RolloutSource()
        with claim(resolved.directory):
            restore(resolved, progress.log)
            return Orchestrator(resolved, progress, source, ranks=ranks).run()

    is_first = join_ranks(checked.model.device).is_first
    with _progress(callback, watching(checked, is_first=is_first)) as progress:
        return run_on_all_ranks(checked, functools.partial(train, progress=progress))


def _read(config: Any) -> RunConfig:
    """The config, or that of a TOML file or a run directory."""
    if isinstance(config, RunConfig):
        return config
    if not isinstance(config, str | Path):
        kind = type(config).__name__
        advice = "stalewise.make_config makes one of a dict" if isinstance(config, Mapping) else "load_config reads one"
        raise ConfigError(f"config has type {kind}: expected a RunConfig, a TOML file or a run directory; {advice}")
    return read_config_at(config, {}) if Path(config).is_dir() else load_config(config)


def _progress(
    callback: ProgressCallback | None, default: contextlib.AbstractContextManager[ProgressCallback]
) -> contextlib.AbstractContextManager[ProgressCallback]:
    """The callback, or if there is none, the default."""
    if callback is None:
        return default
    _check_callback(callback)
    return contextlib.nullcontext(callback)


def _check_callback(callback: ProgressCallback | None) -> None:
    names = () if callback is None else ("begin", "advance", "metrics", "log")
    if missing := [name for name in names if not hasattr(callback, name)]:
        raise ConfigError(
            f"callback={callback!r:.60} has no method {missing[0]}: pass an object with the methods of "
            "stalewise.types.ProgressCallback, such as one of a class that inherits from stalewise.types.NullCallback"
        )


def train(
    model: Any,
    dataset: Any = None,
    reward: Any = None,
    *,
    tokenizer: Any = None,
    eval_dataset: Any = None,
    task: Any = None,
    objective: Any = None,
    callback: ProgressCallback | None = None,
    settings: Mapping[str, Any] | None = None,
    **keywords: Any,
) -> RunResult:
    """Train on objects of a Python program, continuing from the run directory; docs/python.md has examples.

    Args:
        model: a directory, a hub name, an embedded policy (`embedded:arithmetic`), or a loaded `PreTrainedModel`.
        dataset: a list of dicts, a `datasets.Dataset`, a file or a hub name. Rows have `prompt` and `answer`, unless
            `prompt_field` and `answer_field` name others; one row in ten is held out, unless `held_out` says otherwise.
        reward: a function `(prompt, response, answer, **row)` that returns a number, or a dict with `reward` and
            further numbers, which are kept; it may be a coroutine function. Or a list of such functions, whose rewards
            are added and kept by their names; or the name of a verifier, as "math".
        tokenizer: of a loaded model.
        eval_dataset: rows to evaluate on, instead of held-out ones.
        task: a name, a class or an object with the methods of `stalewise.tasks.Task`, instead of a data set.
        objective: a name, or a function registered with `stalewise.objective`.
        callback: receives the progress; by default it goes to stderr.
        settings: settings by their dotted names, as in {"checkpoints.every": 8}.
        keywords: settings by their last names, as `updates`, `stages`, `learning_rate`, `group_size`,
            `max_new_tokens`, `runs`, `name`; and how rows become prompts: `template`, `chat`, `system`, `id_field`,
            `split`, `eval_split`, `dataset_config`, `exclude_ids`, `verifier_options`.

    The same call continues a run that was interrupted. One with another function, data set or model is refused.
    """
    _check_callback(callback)
    config = python_objects.config_of(
        model,
        dataset,
        reward,
        tokenizer=tokenizer,
        eval_dataset=eval_dataset,
        task=task,
        objective=objective,
        settings=settings,
        keywords=keywords,
    )
    is_first = join_ranks(config.model.device).is_first
    with _progress(callback, watching(config, is_first=is_first)) as progress:
        try:
            return run(config, progress)
        except KeyboardInterrupt:
            progress.log(f"interrupted: committed work is in {config.directory}, and the same call resumes")
            raise


@_accepts_watcher
def generate(
    config: RunConfig | str | Path,
    *,
    batch: int | None = None,
    checkpoint: str | Path | None = None,
    callback: ProgressCallback | None = None,
) -> list[BatchManifest]:
    """Generate rollouts without training. Committed rollouts are not made again.

    Without further arguments this makes the next generation batch that is missing, if any; with `batch`, that one.
    With `checkpoint`, a checkpoint of this run at any path, it makes the batches of that version: another machine can
    generate from a copied checkpoint, and the rollouts are copied back.
    """
    config = _read(config)
    with contextlib.ExitStack() as stack:
        progress = stack.enter_context(_progress(callback, watching(config)))
        config = resolve_settings(config, progress.log)
        stack.enter_context(claim(config.directory))
        if checkpoint is None:
            restore(config, progress.log)
        orchestrator = stack.enter_context(contextlib.closing(Orchestrator(config, progress)))
        if checkpoint is not None:
            orchestrator.check_directory()
            batches = _batches_of_checkpoint(orchestrator, Path(checkpoint))
            _check_sampling(orchestrator, Path(checkpoint))
            return [orchestrator.generate(g, Path(checkpoint)) for g in batches]
        _check_sampling(orchestrator, Path(orchestrator.newest_policy()))
        orchestrator.prepare(learns=False)
        newest = checkpoints.versions(config.directory)[-1]
        missing = orchestrator.missing_batch(newest) if newest < orchestrator.schedule.updates else None
        if batch is None:
            return [] if missing is None else [orchestrator.generate(missing)]
        count = orchestrator.schedule.generation_batches
        if not 0 <= batch < count:
            raise StoreError(f"generation batch {batch} does not exist: this schedule has 0 to {count - 1}")
        version = orchestrator.schedule.version_of(batch)
        if version not in checkpoints.versions(config.directory):
            raise StoreError(
                f"generation batch {batch} is made by version {version}, which {config.directory} does not have: "
                "`stalewise train` makes it in its turn"
            )
        return [orchestrator.generate(batch)]


def _check_sampling(orchestrator: Orchestrator, policy: Path) -> None:
    """Raise if nothing can be generated, before anything is loaded or written."""
    section, task = orchestrator.config.sampler, orchestrator.task
    check_policy(section, policy, task, orchestrator.config.longest_prompts(task))
    check_sampling_memory(orchestrator.config.model, section.engine, str(policy), section.max_new_tokens)


def _batches_of_checkpoint(orchestrator: Orchestrator, checkpoint: Path) -> list[int]:
    if not (checkpoint / "manifest.json").is_file():
        raise StoreError(f"{checkpoint} is not a checkpoint of a run: to generate with another model, set model.path")
    version, schedule = checkpoints.read_state(checkpoint)["version"], orchestrator.schedule
    if schedule.is_open_ended and not schedule.generation_batches:
        raise StoreError('with schedule.end = "spent" stages are found in training: generate where the run is')
    batches = [g for g in range(schedule.generation_batches) if schedule.version_of(g) == version]
    if not batches:
        makers = sorted({schedule.version_of(g) for g in range(schedule.generation_batches)})
        raise StoreError(f"version {version} makes no generation batch of this schedule; versions that do: {makers}")
    return batches


@_accepts_watcher
def learn(
    config: RunConfig | str | Path,
    rollouts: str | Path | Iterable[str | Path],
    *,
    checkpoint: str | Path | None = None,
    unused: bool = False,
    rewards: str = "first",
    callback: ProgressCallback | None = None,
) -> RunResult:
    """Train once through existing rollouts: of run directories, or of single generation batches, in this order.

    The result is a run directory without rollouts of its own. Updates: for each batch its groups divided by
    `batch.prompts`, rounded down, and at most `schedule.updates` in all. The policy starts at `config.model.path` or at
    `checkpoint`, with a fresh optimizer; `stalewise.orchestrator.offline` explains how ages are counted. `unused`
    leaves out what the runs that made the rollouts have learned from. `rewards` names a version that `rescore` made of
    their rewards; "first" are those that they were generated with.
    """
    named = [rollouts] if isinstance(rollouts, str | Path) else rollouts
    paths, start = [Path(path) for path in named], None if checkpoint is None else Path(checkpoint)
    checked = _read(config)

    def train(ranks: Ranks, progress: ProgressCallback) -> RunResult:
        check_objective(checked.objective, checked.batch.without_variance)  # before anything is loaded
        resolved = resolve_settings(checked, progress.log)
        planned, sources = plan_sources(resolved, paths, start, unused=unused, rewards=rewards, log=progress.log)
        with claim(planned.directory):
            return Orchestrator(planned, progress, OfflineRollouts(sources, start), ranks=ranks).run()

    is_first = join_ranks(checked.model.device).is_first
    with _progress(callback, watching(checked, is_first=is_first)) as progress:
        return run_on_all_ranks(checked, functools.partial(train, progress=progress))


def rescore(
    run: str | Path,
    reward: Any = None,
    *,
    options: Mapping[str, Any] | None = None,
    answers: str | Path | Mapping[str, str] | None = None,
    weights: Mapping[str, float] | None = None,
    name: str | None = None,
    callback: ProgressCallback | None = None,
) -> RewardVersion:
    """Score the rollouts of a run again, as a version `name` of their rewards beside the first.

    `reward` is the name of a verifier, with its `options`, or a function as in `train`. The other arguments are
    those of `stalewise.orchestrator.rescore.rescore`.
    """
    if callable(reward):
        if read_config(run).task.name not in ROWS_TASKS:
            raise TaskError("a reward function needs a run that was trained on rows, whose fields it names")
        found = callables.fingerprint(reward)
        options = {**(options or {}), "function": callables.register(reward, found)}
        reward = "function"
    elif reward is not None and reward not in VERIFIERS:
        raise TaskError(f"reward={reward!r} is not a verifier: pass a function, or {', '.join(VERIFIERS)}")
    keywords = {"options": options, "answers": answers, "weights": weights, "name": name}
    with _progress(callback, watching()) as progress:
        return score_again(run, reward, **keywords, callback=progress)


@_accepts_watcher
def evaluate(
    model: Any = None,
    dataset: Any = None,
    reward: Any = None,
    *,
    tokenizer: Any = None,
    task: Any = None,
    file: str | Path | None = None,
    options: Mapping[str, Any] | None = None,
    prompts: int | None = None,
    samples: int | None = None,
    max_new_tokens: int | None = None,
    temperature: float = 1.0,
    top_p: float = 1.0,
    exclude_ids: str | Path | None = None,
    callback: ProgressCallback | None = None,
    **keywords: Any,
) -> Evaluation:
    """Accuracy on held-out prompts of a model, of a checkpoint, or of a run's newest checkpoint. Nothing is kept.

    `model` is a run directory, a checkpoint or a model as in `train`. A run, or a checkpoint in one, has a task and
    settings; another model needs `task`, unless it is the embedded policy of one. `file` (JSONL) or `dataset`, as in
    `train`, evaluates on all their rows instead, in the form of a run that was trained on rows; `reward` scores them,
    and `keywords` say how rows become prompts. Prompts that training has seen are left out and counted, and so are
    those whose ids the file `exclude_ids` lists. `unknown` in the result says where the prompts that training has seen
    are unknown. Temperature 0 is greedy, with one sample.
    """
    model = keywords.pop("model_or_run", model)
    with scratch_folder("evaluate") as scratch:
        files = python_objects.RunFiles(Path(scratch))
        name, file, options = files.to_evaluate(model, tokenizer, dataset, reward, file, options, keywords)
        sampling = {"temperature": temperature, "top_p": top_p, "samples": samples, "max_new_tokens": max_new_tokens}
        asked = {"task": task, "file": file, "options": options, "prompts": prompts, "exclude_ids": exclude_ids}
        for what, number in {"prompts": prompts, "samples": samples, "max_new_tokens": max_new_tokens}.items():
            if number is not None and number < 1:
                raise ConfigError(f"{what}={number}: expected at least 1")
        plan = plan_evaluation(name, **asked, sampling=sampling)
        with contextlib.closing(plan), _progress(callback, watching()) as progress:
            (result,) = evaluate_planned(plan, progress)
        return result


def evaluate_suites(
    model: str | Path,
    suites: Sequence[Mapping[str, Any] | str] | None = None,
    *,
    exclude_ids: str | Path | None = None,
    callback: ProgressCallback | None = None,
) -> dict[str, Evaluation]:
    """Evaluate a model, a checkpoint or a run's newest checkpoint on several suites; results by their names.

    A suite is a table of settings as in `[[evaluation.suite]]`, or the name of one of the run's own. Without `suites`,
    all of the run's own are evaluated. Nothing is written.
    """
    with (
        contextlib.closing(plan_suites(model, suites, exclude_ids)) as plan,
        _progress(callback, watching()) as progress,
    ):
        return {result.suite: result for result in evaluate_planned(plan, progress)}
