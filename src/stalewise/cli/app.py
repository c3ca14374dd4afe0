"""The typer app, its error handling, and options that commands share.

Commands import what they need when they run, so that `stalewise --help` is quick.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import shlex
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from stalewise import __version__
from stalewise.errors import StalewiseError, StoppedByFirst, StoreError, visible

if TYPE_CHECKING:
    from stalewise.config import RunConfig

SIMILAR = 0.65  # similarity, from 0 to 1, above which an option is suggested for an unknown one
INTERRUPTED = 130  # exit status of a process ended by Ctrl-C
RESUMABLE = ("demo", "train", "generate", "learn", "probe", "sweep")
OUT_OF_MEMORY = (
    "the device ran out of memory; committed work is kept: lower learner.tokens_per_micro_batch or "
    "sampler.rollouts_per_shard, choose a smaller model, or stop other processes on the device"
)
# Errors that any file may have, which are printed without a traceback.
EXPLAINED = (errno.ENAMETOOLONG, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS)


def _memory_problem(error: RuntimeError | MemoryError) -> str | None:
    """The failed allocation, on a GPU or a CPU; None for any other error."""
    # torch raises its own error for GPUs only. It is recognised by name, since importing torch would be slow.
    if type(error).__name__ == "OutOfMemoryError":
        return str(error).partition(". ")[0]
    for pattern in (r"\w+: can't allocate memory[^.]*", r".*Cannot allocate memory"):
        if match := re.search(pattern, str(error)):
            return match[0]
    return (str(error) or "of the machine") if isinstance(error, MemoryError) else None


def _print_error(message: str) -> None:
    """Print an error as one line without control characters."""
    typer.echo(f"error: {visible(' '.join(message.split()))}", err=True)


@contextlib.contextmanager
def _noting_interrupts(group: Group) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # where signals cannot be handled
        yield
        return
    before, ignoring = signal.getsignal(signal.SIGINT), sys.unraisablehook
    handler = signal.default_int_handler if before is signal.SIG_DFL else before  # see `stalewise.__main__`

    def interrupt(number: int, frame: Any) -> None:
        group.was_interrupted = True
        if callable(handler):
            handler(number, frame)

    def ignored(what: Any) -> None:
        if not issubclass(what.exc_type, KeyboardInterrupt):
            ignoring(what)
        else:  # Python drops an exception in a destructor: send the signal again a moment later
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()

    signal.signal(signal.SIGINT, before if before is signal.SIG_IGN else interrupt)
    sys.unraisablehook = ignored
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        sys.unraisablehook = ignoring


# Placeholders for the values of options, by Python type; a flag takes no value.
PLACEHOLDERS = {"bool": "", "str": "TEXT", "path": "PATH", "file": "PATH", "int": "INTEGER", "float": "NUMBER"}


def placeholder(shown: str) -> str:
    """A word in capitals for typer's name of a type, such as `<list[Path]>`; choices stay as they are."""
    name = shown.strip("<>").removeprefix("list[").removesuffix("]").removesuffix(" range")
    return name if "|" in name else PLACEHOLDERS.get(name.lower(), name.upper())


def _with_placeholders(parameters: list[Any], ctx: Any) -> list[Any]:
    for parameter in parameters:
        if not hasattr(parameter, "display_type"):  # before typer 0.29, which shows no Python types
            continue
        shown = placeholder(parameter.display_type(ctx))
        if parameter.param_type_name == "argument":  # its name says what it is
            parameter.metavar = parameter.metavar or parameter.name.upper()
            vars(parameter)["display_type_rich"] = lambda ctx, shown=shown: shown if "|" in shown else ""
        elif parameter.metavar is None:
            parameter.metavar = shown
    return parameters


class Command(TyperCommand):
    """A command whose help shows choices, PATH or INTEGER for values of options; not `<bool>` or `<list[Path]>`."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Parameters with a placeholder for their values."""
        return _with_placeholders(super().get_params(ctx), ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Suggest an option for an unknown one, and `--set` for settings if the command takes it."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if type(error).__name__ == "NoSuchOption":  # click's class, or typer's copy of it
                takes_settings = any("--set" in parameter.opts for parameter in self.params)
                _name_what_was_meant(error, self.name or "", takes_settings=takes_settings)
            raise


# How to choose a version in commands without --version.
VERSIONS_OF = {
    "eval": "A version is named by its checkpoint in place of the run: stalewise eval RUN/checkpoints/v000064",
    "flips": "Versions are chosen with --before and --after",
    "fork": "The checkpoint is chosen with --at",
}


def _name_what_was_meant(error: Any, command: str, *, takes_settings: bool) -> None:
    similar = [option for option in error.possibilities or () if _is_similar(option, error.option_name)]
    hint = ""
    if error.option_name in ("--version", "--checkpoint", "--at"):
        hint = VERSIONS_OF.get(command, "")
    elif takes_settings:
        from stalewise.config import setting_names

        wanted = error.option_name.lstrip("-").replace("-", "_")
        meant = [name for name in setting_names() if wanted in (name, name.rpartition(".")[2])]
        hint = f"A setting is given as {' or '.join(f'--set {name}=VALUE' for name in meant)}" if meant else ""
    if takes_settings and not hint and not similar:
        error.message += ". Settings are given with --set, as in --set optimizer.learning_rate=1e-5"
    error.message += f". {hint}" if hint else ""
    error.possibilities = [] if hint else similar


def _is_similar(option: str, wanted: str) -> bool:
    """Whether an option may be meant; dashes are not compared."""
    name, typed = option.lstrip("-"), wanted.lstrip("-")
    return name != "help" and (name.startswith(typed) or SequenceMatcher(None, typed, name).ratio() >= SIMILAR)


# Commands in the order of `stalewise --help`, by purpose.
PANELS = {
    "Train": ("demo", "init", "doctor", "train"),
    "Look at a run": ("watch", "report", "serve", "inspect", "flips", "compare", "eval", "verify"),
    "Reuse a run": ("fork", "learn", "rescore", "difficulty", "generate"),
    "Choose staleness and learning rate": ("probe", "sweep", "plan"),
    "Publish": ("export", "push"),
}


class Group(TyperGroup):
    """Prints a StalewiseError as one line; other exceptions are bugs and keep their traceback."""

    was_interrupted = False

    def list_commands(self, ctx: Any) -> list[str]:
        """The names of the commands, in the order of the help, each with its panel."""
        for panel, names in PANELS.items():
            for name in names:
                vars(self.commands[name])["rich_help_panel"] = panel
        shown = [name for names in PANELS.values() for name in names]
        return [*shown, *(name for name in super().list_commands(ctx) if name not in shown)]

    def get_params(self, ctx: Any) -> list[Any]:
        """Parameters with a placeholder for their values, as for a command."""
        return _with_placeholders(super().get_params(ctx), ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep the arguments, to print the command after Ctrl-C."""
        ctx.meta["stalewise.arguments"] = list(args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        self.was_interrupted = False
        with _noting_interrupts(self):
            return self._invoke(ctx)

    def _invoke(self, ctx: Any) -> Any:
        try:
            try:
                return super().invoke(ctx)
            except Exception as error:  # a library may turn Ctrl-C during its import into another error
                if self.was_interrupted and not isinstance(error, StalewiseError | typer.Exit):
                    raise KeyboardInterrupt from error
                raise
        except StoppedByFirst as error:  # the first rank has printed the reason
            raise typer.Exit(error.exit_code) from error
        except StalewiseError as error:
            _print_error(str(error))
            raise typer.Exit(error.exit_code) from error
        except OSError as error:
            if error.errno not in EXPLAINED:
                raise
            where = "the output" if error.filename is None else str(error.filename)[:200]  # a stream has no name
            _print_error(f"{where}: {error.strerror}")
            raise typer.Exit(StalewiseError.exit_code) from error
        except (RuntimeError, MemoryError) as error:
            if (what := _memory_problem(error)) is None:
                raise
            _print_error(f"{OUT_OF_MEMORY} ({what})")
            raise typer.Exit(StalewiseError.exit_code) from error
        except KeyboardInterrupt:
            arguments = ctx.meta["stalewise.arguments"]
            if arguments and arguments[0] in RESUMABLE:
                command = shlex.join(["stalewise", *arguments])
                typer.echo(f"interrupted: committed work is kept; the same command resumes:\n  {command}", err=True)
            else:
                typer.echo("interrupted", err=True)
            raise typer.Exit(INTERRUPTED) from None


class App(typer.Typer):
    """A typer app whose commands are of the class `Command`."""

    def command(self, name: str | None = None, **options: Any) -> Any:
        """Register a command."""
        return super().command(name, **{"cls": Command, **options})


def complete_setting(incomplete: str) -> list[str]:
    """Shell completion of `--set`: settings with this prefix; for a single setting also its values.

    If `name=` were the only completion, the shell would add a space after it.
    """
    from stalewise.config import setting_names, setting_values
    from stalewise.config.sections import OBJECTIVE_NAMES

    known = {"objective.name": OBJECTIVE_NAMES, "task.name": TASK_NAMES}
    key, equals, _ = incomplete.partition("=")
    names = [name for name in setting_names() if name == key or (name.startswith(key) and not equals)]
    offered = [f"{name}=" for name in names]
    if len(names) == 1:
        values = known[names[0]].split(", ") if names[0] in known else setting_values(names[0])
        offered += [f"{names[0]}={value}" for value in values]
    return [text for text in offered if text.startswith(incomplete)]


# Help texts use these lists, since importing the tasks would be slow.
VERIFIER_NAMES = "code, exact, judge, math, number, python"
TASK_NAMES = "arithmetic, arithmetic-chat, arithmetic-steps, gym, hf, jsonl, mixture, verifiers"


def complete_task(incomplete: str) -> list[str]:
    """Shell completion of `--task`: tasks with this prefix."""
    from stalewise.tasks import TASKS

    return [name for name in TASKS if name.startswith(incomplete)]


def complete_verifier(incomplete: str) -> list[str]:
    """Shell completion of `--verifier`: verifiers with this prefix."""
    return [name for name in VERIFIER_NAMES.split(", ") if name.startswith(incomplete)]


app = App(
    cls=Group,
    help="Reinforcement-learning post-training of language models on stale rollouts, in a few large stages.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="TOML file, or a run directory to continue.")]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a setting, as in optimizer.learning_rate=1e-5; may be repeated.",
        autocompletion=complete_setting,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
RunDirectory = Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")]


def overrides(settings: Sequence[str] | None) -> dict[str, Any]:
    """The values of `--set KEY=VALUE` by key."""
    from stalewise.config import parse_override

    return dict(parse_override(text) for text in settings or ())


def read_config_file(path: Path, settings: Sequence[str] | None) -> RunConfig:
    """Read a config file or the config of a run directory, with the values of `--set`."""
    from stalewise.config import load_config
    from stalewise.config.run_directory import not_a_run, read_config_at, runs_in

    if path.is_dir():
        return read_config_at(path, overrides(settings))
    if not path.exists() and path.suffix != ".toml" and runs_in(path.parent):
        raise StoreError(not_a_run(path))
    return load_config(path, overrides(settings))


def load_packages() -> None:
    """Import torch and transformers. That takes seconds, so a terminal shows it."""
    from stalewise.models import import_packages

    if sys.stderr.isatty():
        typer.echo("loading torch and transformers …", err=True)
    import_packages()


def print_json(record: Mapping[str, Any] | Sequence[Any]) -> None:
    """Print one line of JSON; unknown and infinite numbers become null."""
    typer.echo(json.dumps(without_nan(record), allow_nan=False))


def without_nan(value: Any) -> Any:
    """Replace numbers that are not finite by None, since JSON has only null."""
    if isinstance(value, Mapping):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)] = False):
    if version:
        typer.echo(f"stalewise {__version__}")
        raise typer.Exit
