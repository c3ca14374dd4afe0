"""Commands that train or examine one run: demo, init, train, fork, generate, learn, rescore, eval, inspect, doctor."""

from __future__ import annotations

import contextlib
import math
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stalewise.cli.app import (
    TASK_NAMES,
    VERIFIER_NAMES,
    AsJson,
    ConfigFile,
    RunDirectory,
    Settings,
    app,
    complete_task,
    complete_verifier,
    load_packages,
    overrides,
    print_json,
    read_config_file,
)
from stalewise.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from stalewise.config import RunConfig
    from stalewise.config.run_directory import RunResult
    from stalewise.rollout.workers.worker import WorkDone
    from stalewise.types import ProgressCallback

TERMINATED = 143  # exit status of a process ended by SIGTERM


@app.command()
def demo(
    as_json: AsJson = False,
    runs: Annotated[Path, typer.Option(help="Directory of the demo's runs.")] = Path("runs/demo"),
) -> None:
    """Train the embedded policy in minutes: GRPO against two methods that use a few large stages."""
    load_packages()
    from stalewise.cli.demo import main as run_demo
    from stalewise.reporting.progress import watching

    with watching() as callback:
        run_demo(as_json=as_json, runs=runs, callback=callback)


@app.command()
def init(
    path: Annotated[Path, typer.Argument(help="File to write.")] = Path("stalewise.toml"),
    task: Annotated[str, typer.Option(help=f"Task: {TASK_NAMES}.", autocompletion=complete_task)] = "arithmetic",
) -> None:
    """Write a commented config."""
    from stalewise.config.template import config_template
    from stalewise.store.atomic import write_atomic

    stem = "".join(character if character.isalnum() or character in "._-" else "_" for character in path.stem)
    text = config_template(task, name="run" if stem in ("", "stalewise") else stem)
    if path.exists():
        raise ConfigError(f"{path} exists and is not overwritten: name another file or delete it")
    write_atomic(path, text)
    typer.echo(str(path))
    typer.echo(f"next: stalewise doctor {path}; then stalewise train {path}", err=True)


@app.command()
def train(config: ConfigFile, settings: Settings = None, as_json: AsJson = False) -> None:
    """Train with a config; resumes its run directory."""
    checked = read_config_file(config, settings)
    load_packages()
    from stalewise.api import run

    _run_and_print(checked, lambda callback: run(checked, callback, say_plan=True), as_json)


def _run_and_print(config: RunConfig, train: Callable[[ProgressCallback], RunResult], as_json: bool) -> None:
    from stalewise.cli.tables import print_result
    from stalewise.orchestrator.ranks import join_ranks
    from stalewise.reporting.progress import watching

    # Before the trackers, which would start torch.distributed themselves.
    is_first = join_ranks(config.model.device).is_first
    with watching(config, is_first=is_first) as callback:
        result = train(callback)
    if is_first:
        print_result(result, as_json)
        if not as_json:
            typer.echo(f"next: stalewise report {result.directory}, or stalewise serve {result.directory}", err=True)


@app.command()
def fork(
    run: RunDirectory,
    at: Annotated[int | None, typer.Option(metavar="VERSION", help="Checkpoint; default: the newest.")] = None,
    settings: Settings = None,
    unset: Annotated[
        list[str] | None, typer.Option(metavar="KEY", help="Setting to reset to its default; may be repeated.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the new run; default: RUN-vVERSION.")] = None,
    as_json: AsJson = False,
) -> None:
    """Make a new run that starts from a checkpoint of another run, with its optimizer and its usable rollouts."""
    from stalewise.config.run_directory import is_of_program, read_fork
    from stalewise.orchestrator.fork import fork

    changes = overrides(settings)
    config = fork(
        run, at=at, settings=changes, unset=unset or (), name=name, log=lambda text: typer.echo(text, err=True)
    )
    if as_json:
        return print_json({"directory": str(config.directory), **read_fork(config.directory)})
    typer.echo(str(config.directory))
    following = f"stalewise train {config.directory}"
    if is_of_program(config.model_dump(mode="json")):
        following = f'stalewise.train(…, name="{config.name}") in the program that has the objects of {run}'
    typer.echo(f"next: {following}", err=True)


@app.command()
def generate(
    config: Annotated[str, typer.Argument(help="TOML file; for workers also a run directory or a URL.")],
    batch: Annotated[int | None, typer.Option(help="Batch to generate; default: the next missing one.")] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Checkpoint of this run, at any path: generate the batches of its version.")
    ] = None,
    worker: Annotated[str | None, typer.Option(metavar="NAME", help="Join a run as a worker with this name.")] = None,
    ray: Annotated[int | None, typer.Option(min=1, help="Start this many workers on a Ray cluster.")] = None,
    once: Annotated[bool, typer.Option("--once", help="Workers: exit when no batch is requested.")] = False,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Generate rollouts without learning: the next batch, or as a worker all batches that a run requests."""
    if batch is not None and checkpoint is not None:
        raise ConfigError("--batch and --checkpoint both choose the batch: give one of them")
    if worker is not None or ray is not None:
        if batch is not None or checkpoint is not None or (worker is not None and ray is not None):
            raise ConfigError("--worker, --ray, --batch and --checkpoint exclude each other: give one of them")
        return _work(config, worker, ray, once, settings, as_json)
    checked = read_config_file(Path(config), settings)
    load_packages()
    from stalewise.api import generate
    from stalewise.reporting.progress import watching
    from stalewise.store.manifest import manifest_record

    with watching(checked) as callback:
        manifests = generate(checked, batch=batch, checkpoint=checkpoint, callback=callback)
    if as_json:
        print_json([manifest_record(manifest) for manifest in manifests])
    for manifest in manifests if not as_json else ():
        reward = "unknown" if manifest.reward_mean is None else f"{manifest.reward_mean:.3f}"
        name = f"generation batch {manifest.generation_batch} of version {manifest.version}"
        typer.echo(f"{name}: {manifest.rows:,} rollouts, {manifest.tokens:,} tokens, mean reward {reward}")
    if not manifests:
        typer.echo("nothing to generate: every batch of an existing policy is complete", err=True)


@app.command()
def learn(
    config: ConfigFile,
    rollouts: Annotated[
        list[Path] | None, typer.Option(help="Run directory or generation batch; required, may be repeated.")
    ] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="Policy to start from instead of model.path.")] = None,
    unused: Annotated[bool, typer.Option("--unused", help="Only rollouts that their own runs did not use.")] = False,
    rewards: Annotated[
        str, typer.Option(metavar="NAME", help="Name of the rewards, as `rescore` made them.")
    ] = "first",
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Learn from existing rollouts in one pass, with any objective, in a new run directory."""
    if not rollouts:
        raise ConfigError(
            "learn needs rollouts: `stalewise learn CONFIG --rollouts RUN`, where CONFIG is the TOML file of the new "
            "run and RUN the directory of the run that has them, or a generation batch in its `rollouts`"
        )
    checked = read_config_file(config, settings)
    load_packages()
    from stalewise.api import learn

    options: dict[str, Any] = {"checkpoint": checkpoint, "unused": unused, "rewards": rewards}
    _run_and_print(checked, lambda callback: learn(checked, rollouts, callback=callback, **options), as_json)


@app.command()
def rescore(
    run: RunDirectory,
    verifier: Annotated[
        str | None,
        typer.Option(
            help=f"Verifier: {VERIFIER_NAMES}; default: the run's own in its present form.",
            autocompletion=complete_verifier,
        ),
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Option of the verifier; may be repeated.")
    ] = None,
    answers: Annotated[Path | None, typer.Option(help="JSONL file of corrected gold answers: id and answer.")] = None,
    weight: Annotated[
        list[str] | None, typer.Option(metavar="PART=VALUE", help="Weight of a reward part; may be repeated.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of these rewards; default: r1, r2, …")] = None,
    as_json: AsJson = False,
) -> None:
    """Score the rollouts of a run again, with another verifier, answers or weights; the first rewards stay."""
    from stalewise.orchestrator.rescore import rescore
    from stalewise.reporting.progress import watching
    from stalewise.reporting.summary import describe_rewards

    if wrong := [text for text in (*(option or ()), *(weight or ())) if text.find("=") < 1]:
        raise ConfigError(f"{wrong[0]}: expected key=value, as in --option which=first or --weight correct=1")
    weights = overrides(weight) if weight else None
    for part, value in (weights or {}).items():
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise ConfigError(f"--weight {part}={value}: expected a number")
    with watching() as callback:
        made = rescore(
            run, verifier, options=overrides(option), answers=answers, weights=weights, name=name, callback=callback
        )
    if as_json:
        return print_json({"name": made.name, "directory": str(made.directory), **made.record})
    typer.echo(describe_rewards(made.record, made.name))
    typer.echo(f"next: stalewise learn CONFIG --rollouts {run} --rewards {made.name}", err=True)


@app.command(name="eval")
def evaluate(
    model_or_run: Annotated[str, typer.Argument(help="Run directory, checkpoint, model directory or hub name.")],
    task: Annotated[
        list[str] | None,
        typer.Option(help=f"Task; default: the run's. One of {TASK_NAMES}.", autocompletion=complete_task),
    ] = None,
    file: Annotated[
        list[Path] | None, typer.Option(help="JSONL file to evaluate on instead of a task, with all rows.")
    ] = None,
    suite: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Suite of the run, or all; may be repeated.")
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Option of the task; may be repeated.")
    ] = None,
    exclude_ids: Annotated[
        Path | None, typer.Option(help="File of prompt ids to leave out, one per line or in JSON objects.")
    ] = None,
    prompts: Annotated[
        int | None, typer.Option(min=1, help="Number of prompts; default: the run's, or all of a file.")
    ] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Responses per prompt; default: the run's, or 4.")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest response in tokens; default: the run's, or 64.")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0, help="Sampling temperature; 0: greedy.")] = 1.0,
    top_p: Annotated[float, typer.Option(min=1e-6, max=1, help="Nucleus sampling; 1: off.")] = 1.0,
    as_json: AsJson = False,
) -> None:
    """Measure avg@k, pass@k and majority@k on held-out prompts, with intervals; tasks and files may be repeated."""
    if wrong := [text for text in option or () if "=" not in text]:
        raise ConfigError(f"--option {wrong[0]}: expected key=value, as in path=test.jsonl")
    _check_model_or_run(model_or_run)
    from stalewise.cli.tables import print_evaluation, print_lines, suite_table
    from stalewise.orchestrator.evaluation import evaluate_planned, plan_evaluation, plan_suites
    from stalewise.reporting.progress import watching

    options, tasks, files, suites = overrides(option), task or [], file or [], suite or []
    sampling: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "max_new_tokens": max_new_tokens}
    sampling |= {"samples": samples}
    if len(tasks) + len(files) <= 1 and not suites:
        source = {"task": tasks[0] if tasks else None, "file": files[0] if files else None, "options": options}
        plan = plan_evaluation(model_or_run, **source, prompts=prompts, sampling=sampling, exclude_ids=exclude_ids)
    else:
        common = {**sampling, "options": options, "prompts": prompts or 0}
        tables = [{"task": name, **common} for name in tasks] + [{"file": str(path), **common} for path in files]
        named = None if "all" in suites and not tables else [name for name in suites if name != "all"]
        plan = plan_suites(model_or_run, None if named is None else [*named, *tables], exclude_ids)
    with contextlib.closing(plan), watching() as callback:
        callback.log(f"evaluating {plan}")
        load_packages()
        results = evaluate_planned(plan, callback)
    if plan.is_single:
        return print_json(results[0].record()) if as_json else print_evaluation(results[0])
    records = [result.record() for result in results]
    print_json(records) if as_json else print_lines(suite_table(records))


def _check_model_or_run(name: str) -> None:
    """Raise an error for a name of no run, checkpoint or model, before torch is imported."""
    from stalewise.models import resolve_model

    path = Path(name).expanduser()
    if any((path / file).is_file() for file in ("config.resolved.json", "state.json")):
        return
    from stalewise.config.run_directory import not_a_run, runs_in

    # A missing directory among runs is a misspelt run rather than a name on a hub.
    if not path.exists() and path.parent != Path() and runs_in(path.parent):
        raise StoreError(not_a_run(path))
    resolve_model(name)


@app.command()
def inspect(
    run: RunDirectory,
    rollout: Annotated[int | None, typer.Option(help="Show this rollout, token by token.")] = None,
    group: Annotated[int | None, typer.Option(help="Show the rollouts of this group.")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Verify the checksum of every shard.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the batches, checkpoints, updates and times of a run, or one rollout or group."""
    from stalewise.cli import tables
    from stalewise.reporting.inspection import inspect_group, inspect_rollout, inspect_run

    if rollout is not None:
        record = inspect_rollout(run, rollout)
        print_json(record) if as_json else tables.print_rollout(record)
    elif group is not None:
        records = inspect_group(run, group)
        print_json(records) if as_json else tables.print_group(records)
    else:
        record = inspect_run(run, verify=verify)
        print_json(record) if as_json else tables.print_run(record)


@app.command()
def verify(run: RunDirectory, as_json: AsJson = False) -> None:
    """Compare every file of a run with its checksum. Exit status 1 if one is damaged."""
    from stalewise.cli.tables import print_verification
    from stalewise.reporting.verification import verify_run

    verification = verify_run(run)
    print_json(verification.record()) if as_json else print_verification(verification)
    if verification.damaged:
        raise typer.Exit(1)


@app.command()
def doctor(
    config: Annotated[
        Path | None, typer.Argument(help="Config file or run directory; default: the embedded policy and task.")
    ] = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Check a config on this machine. Exit status 1 if a check fails."""
    from stalewise.cli.tables import print_checks
    from stalewise.config import RunConfig, make_config
    from stalewise.config.run import settings_record

    checked, problem = RunConfig(), ""
    try:
        if config is None:
            checked = make_config(settings_record({}, overrides(settings)), source="--set")
        else:
            checked = read_config_file(config, settings)
    except ConfigError as error:
        problem = str(error)
    if not print_checks(checked, problem, as_json):
        raise typer.Exit(1)


def _work(source: str, worker: str | None, ray: int | None, once: bool, settings: Any, as_json: bool) -> None:
    """Generate for a run until it is complete, or with `once` until no batch is requested."""
    load_packages()
    from stalewise.orchestrator.ranks import help_with_reference
    from stalewise.reporting.progress import watching

    # Exit normally, so that the worker signs off, and other workers do not wait for its heartbeat to expire.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    with watching() as callback:
        options: dict[str, Any] = {"overrides": overrides(settings), "once": once, "callback": callback}
        options["afterwards"] = help_with_reference
        if ray is not None:
            from stalewise.rollout.workers.rank_workers import work_on_ray

            done = work_on_ray(source, workers=ray, **options)
        else:
            from stalewise.rollout.workers.worker import work

            done = [work(source, worker=worker or "", **options)]
    if as_json:
        print_json([asdict(work_done) for work_done in done])
    for work_done in done if not as_json else ():
        typer.echo(_describe_work(work_done))


def _describe_work(done: WorkDone) -> str:
    counts = {"taken over": done.taken_over, "too late and dropped": done.too_late}
    notes = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    return f"{done.worker}: {done.shards:,} shards with {done.rollouts:,} rollouts" + (f" ({notes})" if notes else "")
