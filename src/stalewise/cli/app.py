"""The command line: parse, call, print. Data goes to stdout, everything else to stderr.

Nothing heavy is imported before a command needs it, so `stalewise --help` is quick.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from stalewise import __version__
from stalewise.errors import StalewiseError, StoppedByFirst

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


ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="TOML file; `stalewise init` writes one.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a setting, as in optimizer.learning_rate=1e-5."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object for a script.")]


def read_config_file(path: Path, settings: Sequence[str] | None) -> Any:
    from stalewise.config import load_config, parse_override

    return load_config(path, dict(parse_override(text) for text in settings or ()))


def print_json(record: Mapping[str, Any] | Sequence[Any]) -> None:
    typer.echo(json.dumps(record))


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)] = False):
    if version:
        typer.echo(f"stalewise {__version__}")
        raise typer.Exit
