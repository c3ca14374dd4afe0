"""Helpers for tests of tasks."""

import json
from pathlib import Path
from typing import Any

from stalewise.types import Prompt


def ids(prompts: list[Prompt]) -> list[str]:
    return [prompt.prompt_id for prompt in prompts]


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
