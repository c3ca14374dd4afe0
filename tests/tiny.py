"""A run of a few seconds, and the command line in this process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from typer import testing
from typer.main import get_command
from typer.testing import CliRunner, Result

from stalewise.cli import app
from stalewise.config.template import toml

# The command line is made once, as in a process of its own: from the signatures of all commands, which takes 57 ms.
testing._get_command = cache(get_command)  # pyright: ignore[reportPrivateImportUsage]

TINY: dict[str, dict[str, Any]] = {
    "schedule": {"kind": "staged", "updates": 4, "stages": 2},
    "batch": {"prompts": 4, "group_size": 4},
    "sampler": {"max_new_tokens": 8, "rollouts_per_shard": 16},
    "evaluation": {"prompts": 8, "samples": 2},
    "optimizer": {"learning_rate": 3e-4},
}
# It would be a quarter of such a run. Tests of the check, of `doctor`, of the demo and of other families have it on.
UNCHECKED: dict[str, dict[str, Any]] = {"model": {"check": "off"}}


def tiny_record(runs: Path, name: str = "tiny", **changes: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings; a change replaces the settings of a section that it names."""
    tables = {key: dict(value) for key, value in {**TINY, **UNCHECKED}.items()}
    record: dict[str, Any] = {"name": name, "runs": str(runs), **tables}
    for section, settings in changes.items():
        record[section] = {**record.get(section, {}), **settings}
    return record


def write_config(path: Path, record: Mapping[str, Any]) -> Path:
    plain = [f"{key} = {toml(value)}" for key, value in record.items() if not isinstance(value, Mapping)]
    tables = [f"{key} = {toml(value)}" for key, value in record.items() if isinstance(value, Mapping)]
    path.write_text("\n".join([*plain, *tables]) + "\n")
    return path


def call(*words: object) -> Result:
    """`stalewise …` in this process; an exception that is no StalewiseError is raised here."""
    result = CliRunner().invoke(app, [str(word) for word in words], prog_name="stalewise")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def called_json(*words: object) -> Any:
    result = call(*words, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def refused(*words: object) -> str:
    """The one line that a command which refuses its input prints; progress of what went well may stand before it."""
    result = call(*words)
    assert result.exit_code == 2, (result.exit_code, result.stderr)
    assert result.stdout == ""
    *_, last = result.stderr.splitlines()
    assert last.startswith("error: ")
    assert "Traceback" not in result.stderr
    return last.removeprefix("error: ")
