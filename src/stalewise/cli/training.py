"""The verbs that train and look at one run: demo, init, train, generate, learn, eval, inspect, doctor."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stalewise.cli.app import AsJson, ConfigFile, Settings, app, print_json, read_config_file
from stalewise.errors import ConfigError

if TYPE_CHECKING:
    from stalewise.rollout.workers.worker import WorkDone

TERMINATED = 143  # what a shell reports for a process that SIGTERM ended


@app.command()
def demo(
    as_json: AsJson = False,
    runs: Annotated[Path, typer.Option(help="Where the runs of the demo lie.")] = Path("runs/demo"),
) -> None:
    """Train the embedded policy in minutes: GRPO against two methods that learn in a few large stages."""
    from stalewise.cli.demo import main as run_demo
    from stalewise.cli.progress import watching

    with watching() as callback:
        run_demo(as_json=as_json, runs=runs, callback=callback)


@app.command()
def init(
    path: Annotated[Path, typer.Argument(help="File to write.")] = Path("stalewise.toml"),
    task: Annotated[str, typer.Option(help="Task to write it for.")] = "arithmetic",
) -> None:
    """Write a commented config."""
    from stalewise.config.template import config_template
    from stalewise.store.atomic import write_atomic

    text = config_template(task, name=_run_name(path))
    if path.exists():
        raise ConfigError(f"{path} exists already and is not overwritten: name another file or delete it")
    write_atomic(path, text)
    typer.echo(str(path))
    typer.echo(f"next: stalewise doctor {path}; then stalewise train {path}", err=True)


def _run_name(path: Path) -> str:
    name = "".join(character if character.isalnum() or character in "._-" else "_" for character in path.stem)
    return "run" if path.stem in ("", "stalewise") else name


@app.command()
def train(config: ConfigFile, settings: Settings = None, as_json: AsJson = False) -> None:
    """Train as a config says, from wherever its run directory stands."""
    checked = read_config_file(config, settings)
    from stalewise.api import run
    from stalewise.cli.progress import watching
    from stalewise.cli.tables import print_result
    from stalewise.orchestrator.ranks import join_ranks

    is_first = join_ranks(checked.model.device).is_first  # before trackers, which would join ranks themselves
    with watching(checked, is_first=is_first) as callback:
        result = run(checked, callback, say_plan=True)
    if is_first:
        print_result(result, as_json)


@app.command()
def generate(
    config: Annotated[
        str, typer.Argument(metavar="CONFIG", help="TOML file; for a worker also a run directory or a URL.")
    ],
    batch: Annotated[int | None, typer.Option(help="Batch to make; the next missing one unless said.")] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Checkpoint of this run, wherever it lies: make the batches of its version.")
    ] = None,
    worker: Annotated[
        str | None, typer.Option(metavar="NAME", help="Be one of many workers of a run, under this name.")
    ] = None,
    ray: Annotated[int | None, typer.Option(min=1, help="Start so many workers on a Ray cluster.")] = None,
    once: Annotated[bool, typer.Option("--once", help="Workers: end when no batch is asked for.")] = False,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Fill the store with rollouts, without learning: the next batch, or as a worker whatever a run asks for."""
    if batch is not None and checkpoint is not None:
        raise ConfigError("--batch and --checkpoint both say which batch to make: give one of them")
    if worker is not None or ray is not None:
        if batch is not None or checkpoint is not None or (worker is not None and ray is not None):
            raise ConfigError(
                "--worker, --ray, --batch and --checkpoint exclude each other: workers do what is asked for"
            )
        return work(config, worker, ray, once, settings or (), as_json)
    checked = read_config_file(Path(config), settings)
    from stalewise.api import generate
    from stalewise.cli.progress import watching
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
        typer.echo("nothing to generate: every batch whose policy exists is there", err=True)


@app.command()
def learn(
    config: ConfigFile,
    rollouts: Annotated[
        list[Path], typer.Option(help="Run directory or generation batch to learn from; may be given again.")
    ],
    checkpoint: Annotated[Path | None, typer.Option(help="Policy to start from, instead of model.path.")] = None,
    unused: Annotated[
        bool, typer.Option("--unused", help="Only rollouts that the runs which made them did not learn from.")
    ] = False,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Learn once through rollouts that exist already, with any objective, in a new run directory."""
    checked = read_config_file(config, settings)
    from stalewise.api import learn
    from stalewise.cli.progress import watching
    from stalewise.cli.tables import print_result
    from stalewise.orchestrator.ranks import join_ranks

    is_first = join_ranks(checked.model.device).is_first
    with watching(checked, is_first=is_first) as callback:
        result = learn(checked, rollouts, checkpoint=checkpoint, unused=unused, callback=callback)
    if is_first:
        print_result(result, as_json)


@app.command(name="eval")
def evaluate(
    model_or_run: Annotated[str, typer.Argument(help="Run directory, checkpoint, model directory or hub name.")],
    task: Annotated[str | None, typer.Option(help="Task to evaluate on; a run's own unless said.")] = None,
    file: Annotated[Path | None, typer.Option(help="JSONL file to evaluate on, all of its rows, instead.")] = None,
    option: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="Option of the task.")] = None,
    exclude_ids: Annotated[
        Path | None, typer.Option(help="File with ids to leave out, one on a line or in JSON objects.")
    ] = None,
    prompts: Annotated[int | None, typer.Option(min=1, help="Held-out prompts; all of a file's unless said.")] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Responses per prompt.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens after which a response is cut.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure accuracy on held-out prompts: avg@k and pass@k with intervals; what a run was trained on is left out."""
    from stalewise.api import evaluate
    from stalewise.cli.progress import watching
    from stalewise.cli.tables import print_evaluation
    from stalewise.config import parse_override

    if wrong := [text for text in option or () if "=" not in text]:
        raise ConfigError(f"--option {wrong[0]}: expected key=value, as in path=test.jsonl")
    if file is not None and task is not None:
        raise ConfigError("--file and --task both say what to evaluate on: give one of them")
    options = dict(parse_override(text) for text in option or ())
    with watching() as callback:
        result = evaluate(
            model_or_run,
            task=task,
            file=file,
            options=options,
            exclude_ids=exclude_ids,
            prompts=prompts,
            samples=samples,
            max_new_tokens=max_new_tokens,
            callback=callback,
        )
    print_json(result.record()) if as_json else print_evaluation(result)


@app.command()
def inspect(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    rollout: Annotated[int | None, typer.Option(help="Show this rollout, token by token.")] = None,
    group: Annotated[int | None, typer.Option(help="Show the rollouts of this group.")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Compare every shard with its checksum.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what is in a run: batches, checkpoints, updates, where time went; or one rollout."""
    from stalewise.cli import tables as show
    from stalewise.reporting.inspection import inspect_group, inspect_rollout, inspect_run

    if rollout is not None:
        record: Any = inspect_rollout(run, rollout)
        print_json(record) if as_json else show.print_rollout(record)
    elif group is not None:
        record = inspect_group(run, group)
        print_json(record) if as_json else show.print_group(record)
    else:
        record = inspect_run(run, verify=verify)
        print_json(record) if as_json else show.print_run(record)


@app.command()
def doctor(
    config: Annotated[Path | None, typer.Argument(help="Config to check; the default one unless said.")] = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Say what would go wrong with a config on this machine. Exit code 1 if anything would."""
    from stalewise.cli.tables import print_checks
    from stalewise.config import RunConfig

    problem = ""
    checked = RunConfig()
    try:
        checked = read_config_file(config, settings) if config is not None else checked
    except ConfigError as error:
        problem = str(error)
    if not print_checks(checked, problem, as_json):
        sys.exit(1)


def work(source: str, worker: str | None, ray: int | None, once: bool, settings: Sequence[str], as_json: bool) -> None:
    """Work until the run is complete, or until nothing is asked for; say what was done."""
    from stalewise.cli.progress import watching
    from stalewise.config import parse_override

    overrides = dict(parse_override(text) for text in settings)
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(TERMINATED)
    )  # takes leave: others need not wait for a sign of life
    with watching() as callback:
        if ray is not None:
            from stalewise.rollout.workers.ray_workers import work_on_ray

            done = work_on_ray(source, workers=ray, overrides=overrides, once=once, callback=callback)
        else:
            from stalewise.rollout.workers.worker import work as work_here

            done = [work_here(source, worker=worker or "", overrides=overrides, once=once, callback=callback)]
    if as_json:
        typer.echo(json.dumps([asdict(one) for one in done]))
    for one in done if not as_json else ():
        typer.echo(_words(one))


def _words(done: WorkDone) -> str:
    notes = [
        f"{count} {what}"
        for count, what in ((done.taken_over, "taken over"), (done.too_late, "too late and dropped"))
        if count
    ]
    more = f" ({', '.join(notes)})" if notes else ""
    return f"{done.worker}: {done.shards:,} shards with {done.rollouts:,} rollouts{more}"
