"""The command line: parse, call, print. Data goes to stdout, everything else to stderr.

Nothing heavy is imported before a command needs it, so `stalewise --help` is quick.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from stalewise import __version__
from stalewise.errors import ConfigError, StalewiseError, StoppedByFirst

INTERRUPTED = 130  # what a shell reports for a process that Ctrl-C ended
CAN_GO_ON = ("demo", "train", "generate", "learn", "probe", "sweep", "reproduce")
OUT_OF_MEMORY = (
    "the device ran out of memory; what was committed is kept: lower learner.tokens_per_micro_batch or "
    "sampler.rollouts_per_shard, choose a smaller model, or end what else is on the device"
)


class Group(TyperGroup):
    """Prints errors that are the input's fault as one line; others are ours and keep their traceback."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep the words of the command, to be able to repeat them."""
        ctx.meta["stalewise.words"] = list(args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Call the command."""
        try:
            return super().invoke(ctx)
        except StoppedByFirst as error:  # which has said why
            raise typer.Exit(error.exit_code) from error
        except StalewiseError as error:
            typer.echo(f"error: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(error.exit_code) from error
        except RuntimeError as error:
            if type(error).__name__ != "OutOfMemoryError":  # torch's, which is not imported for this
                raise
            typer.echo(f"error: {OUT_OF_MEMORY} ({str(error).partition('. ')[0]})", err=True)
            raise typer.Exit(StalewiseError.exit_code) from error
        except KeyboardInterrupt:
            words = ctx.meta["stalewise.words"]
            typer.echo("interrupted", err=True, nl=False)
            if words and words[0] in CAN_GO_ON:
                again = shlex.join(["stalewise", *words])
                typer.echo(": what was committed is kept; run the same command again to go on:", err=True)
                typer.echo(f"  {again}", err=True, nl=False)
            typer.echo("", err=True)
            raise typer.Exit(INTERRUPTED) from None


app = typer.Typer(
    cls=Group,
    help="Reinforcement-learning post-training of language models on stale rollouts, in a few large stages.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the command line."""
    app(prog_name="stalewise")


ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="TOML file; `stalewise init` writes one.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a setting, as in optimizer.learning_rate=1e-5."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object for a script.")]


def _config(path: Path, settings: Sequence[str] | None) -> Any:
    from stalewise.config import load_config, parse_override

    return load_config(path, dict(parse_override(text) for text in settings or ()))


def _print_json(record: Mapping[str, Any] | Sequence[Any]) -> None:
    typer.echo(json.dumps(record))


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)] = False):
    if version:
        typer.echo(f"stalewise {__version__}")
        raise typer.Exit


@app.command()
def demo(
    as_json: AsJson = False,
    runs: Annotated[Path, typer.Option(help="Where the runs of the demo lie.")] = Path("runs/demo"),
) -> None:
    """Train the embedded policy in minutes: GRPO against two methods that learn in a few large stages."""
    from stalewise.demo import main as run_demo
    from stalewise.progress import watching

    with watching() as watcher:
        run_demo(as_json=as_json, runs=runs, watcher=watcher)


@app.command()
def init(
    path: Annotated[Path, typer.Argument(help="File to write.")] = Path("stalewise.toml"),
    task: Annotated[str, typer.Option(help="Task to write it for.")] = "arithmetic",
) -> None:
    """Write a commented config."""
    from stalewise.files import write_atomic
    from stalewise.template import config_template

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
    checked = _config(config, settings)
    from stalewise.cli.show import print_result
    from stalewise.progress import watching
    from stalewise.run import run
    from stalewise.together import meet

    is_first = meet(checked).is_first  # before the trackers, which would look for the others themselves
    with watching(checked, is_first=is_first) as watcher:
        result = run(checked, watcher, say_plan=True)
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
        from stalewise.cli.work import work

        if batch is not None or checkpoint is not None or (worker is not None and ray is not None):
            raise ConfigError(
                "--worker, --ray, --batch and --checkpoint exclude each other: workers do what is asked for"
            )
        return work(config, worker, ray, once, settings or (), as_json)
    checked = _config(Path(config), settings)
    from stalewise.progress import watching
    from stalewise.store.manifest import manifest_record
    from stalewise.verbs import generate

    with watching(checked) as watcher:
        manifests = generate(checked, batch=batch, checkpoint=checkpoint, watcher=watcher)
    if as_json:
        _print_json([manifest_record(manifest) for manifest in manifests])
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
    checked = _config(config, settings)
    from stalewise.cli.show import print_result
    from stalewise.progress import watching
    from stalewise.together import meet
    from stalewise.verbs import learn

    is_first = meet(checked).is_first
    with watching(checked, is_first=is_first) as watcher:
        result = learn(checked, rollouts, checkpoint=checkpoint, unused=unused, watcher=watcher)
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
    from stalewise.cli.show import print_evaluation
    from stalewise.config import parse_override
    from stalewise.progress import watching
    from stalewise.verbs import evaluate

    if wrong := [text for text in option or () if "=" not in text]:
        raise ConfigError(f"--option {wrong[0]}: expected key=value, as in path=test.jsonl")
    if file is not None and task is not None:
        raise ConfigError("--file and --task both say what to evaluate on: give one of them")
    options = dict(parse_override(text) for text in option or ())
    with watching() as watcher:
        result = evaluate(
            model_or_run,
            task=task,
            file=file,
            options=options,
            exclude_ids=exclude_ids,
            prompts=prompts,
            samples=samples,
            max_new_tokens=max_new_tokens,
            watcher=watcher,
        )
    _print_json(result.record()) if as_json else print_evaluation(result)


@app.command()
def inspect(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    rollout: Annotated[int | None, typer.Option(help="Show this rollout, token by token.")] = None,
    group: Annotated[int | None, typer.Option(help="Show the rollouts of this group.")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Compare every shard with its checksum.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what is in a run: batches, checkpoints, updates, where time went; or one rollout."""
    from stalewise.cli import show
    from stalewise.inspection import inspect_group, inspect_rollout, inspect_run

    if rollout is not None:
        record: Any = inspect_rollout(run, rollout)
        _print_json(record) if as_json else show.print_rollout(record)
    elif group is not None:
        record = inspect_group(run, group)
        _print_json(record) if as_json else show.print_group(record)
    else:
        record = inspect_run(run, verify=verify)
        _print_json(record) if as_json else show.print_run(record)


@app.command()
def doctor(
    config: Annotated[Path | None, typer.Argument(help="Config to check; the default one unless said.")] = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Say what would go wrong with a config on this machine. Exit code 1 if anything would."""
    from stalewise.cli.show import print_checks
    from stalewise.config import RunConfig

    problem = ""
    checked = RunConfig()
    try:
        checked = _config(config, settings) if config is not None else checked
    except ConfigError as error:
        problem = str(error)
    if not print_checks(checked, problem, as_json):
        sys.exit(1)


from stalewise.cli import hub as hub  # noqa: E402  its verbs register themselves here
from stalewise.cli import look as look  # noqa: E402  likewise
from stalewise.cli import plans as plans  # noqa: E402  likewise
from stalewise.cli import reproduce as reproduce  # noqa: E402  likewise
from stalewise.cli import serve as serve  # noqa: E402  likewise
