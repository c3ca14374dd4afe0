"""Writes docs/settings.md from the model of a config and docs/commands.md from the command line.

    python scripts/reference.py

`tests/locks/test_documents.py` fails where the pages differ from what this writes.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from stalewise.cli import app
from stalewise.cli.app import Command
from stalewise.config import RunConfig, is_section
from stalewise.config.template import toml

DOCS = Path(__file__).parents[1] / "docs"
SETTINGS = """\
# Settings

<!-- Made by scripts/reference.py: change the code and run it. -->

Every setting of a config file, with its default. `stalewise init` writes a file with all of them; an unknown key is an
error. On the command line: `--set optimizer.learning_rate=1e-5`; in Python: `settings={…}`, or its last name ([training
from Python](python.md#settings)). A recipe changes defaults ([control](control.md#the-recipe)).

"""
COMMANDS = """\
# Commands

<!-- Made by scripts/reference.py: change the code and run it. -->

`stalewise COMMAND --help` shows the same. Data goes to standard output and everything else to standard error. Exit
status: 0; 1 where a check fails; 2 for bad input; 3 where a plan is unknown; 4 where a run collapsed and the guard
stopped it, or an update was not finite; 5 where a rank ended; 130 after Ctrl-C. `stalewise --install-completion`
completes commands, options, files, settings and their values in bash, zsh and fish.

"""


def settings_page() -> str:
    """Every setting: its name, default, choices and meaning."""
    return SETTINGS + "\n".join(_tables("", RunConfig))


def _tables(prefix: str, model: type[BaseModel]) -> list[str]:
    title = f"## `[{prefix.rstrip('.')}]`" if prefix else "## Top level"
    lines = [title, "", _cell(inspect.getdoc(model) or "", escape=False), ""]
    rows, nested = [], []
    for key, field in model.model_fields.items():
        if is_section(field):
            section: Any = field.annotation
            nested += _tables(f"{prefix}{key}.", section)
        else:
            rows.append(f"| `{key}` | {_default(field)} | {_cell(field.description or '')}{_choices(field)} |")
    if rows:
        lines += ["| setting | default | meaning |", "|---|---|---|", *rows, ""]
    return [*lines, *nested]


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    return "none" if value is None else f"`{_cell(toml(value))}`"


def _choices(field: FieldInfo) -> str:
    if get_origin(field.annotation) is not Literal:
        return ""
    return f" One of {', '.join(f'`{choice}`' for choice in get_args(field.annotation))}."


def _cell(text: str, escape: bool = True) -> str:
    text = " ".join(text.split())
    return text.replace("|", "\\|") if escape else text


def commands_page() -> str:
    """Every command: what it does, its arguments and options."""
    group: Any = typer.main.get_command(app)
    parts = [_command(name, group.commands[name]) for name in sorted(group.commands) if not group.commands[name].hidden]
    return COMMANDS + "\n".join(parts)


def _command(name: str, command: Command) -> str:
    context = typer.Context(command, info_name=f"stalewise {name}")  # pyright: ignore[reportArgumentType]
    usage, rows = [f"stalewise {name}"], []
    for parameter in command.get_params(context):
        if "--help" in parameter.opts:
            continue
        if parameter.param_type_name == "argument":
            shown = (parameter.metavar or parameter.name).upper() + ("…" if parameter.nargs == -1 else "")
            usage.append(shown if parameter.required else f"[{shown}]")
            label = f"`{shown}`"
        else:
            label = f"`{' '.join([*parameter.opts, parameter.metavar or '']).strip()}`"
        rows.append(f"| {_cell(label)} | {_shown_default(parameter)} | {_cell(parameter.help or '')} |")
    table = ["| argument or option | default | meaning |", "|---|---|---|", *rows]
    what = _cell(command.help or "", escape=False)
    return "\n".join([f"## {name}", "", what, "", f"    {' '.join(usage)} [OPTIONS]", "", *table, ""])


def _shown_default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    value = parameter.default
    return "" if value is None or value is False or value == "" else f"`{value}`"


PAGES = {"settings.md": settings_page, "commands.md": commands_page}


def main() -> None:
    """Write the pages."""
    for name, page in PAGES.items():
        (DOCS / name).write_text(page())


if __name__ == "__main__":
    main()
