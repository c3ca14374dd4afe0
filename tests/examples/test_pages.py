"""The examples of README and of pages run as they are printed, in one namespace and in their order."""

from __future__ import annotations

import linecache
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest

from stalewise.config import make_config
from stalewise.objectives import registry
from tiny import call

ROOT = Path(__file__).parents[2]


def blocks(page: str, heading: str = "") -> list[str]:
    """The python blocks of a page, or the first one after a heading."""
    text = (ROOT / page).read_text()
    part = text.partition(f"{heading}\n")[2] if heading else text
    found = re.findall(r"^```python\n(.*?)^```", part, flags=re.MULTILINE | re.DOTALL)
    assert found, f"{page} has no examples under {heading!r}"
    return found[:1] if heading else found


def run_blocks(page: str, heading: str = "") -> dict[str, Any]:
    space: dict[str, Any] = {"__name__": "__main__"}
    for number, source in enumerate(blocks(page, heading)):
        name = f"<{page}, example {number}>"
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)  # as a notebook does
        exec(compile(source, name, "exec"), space)
    return space


def run_commands(page: str) -> int:
    """Run the lines of shell blocks that call stalewise; returns how many."""
    shell = re.findall(r"^```sh\n(.*?)^```", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    commands = [line for block in shell for line in block.splitlines() if line.startswith("stalewise ")]
    for command in commands:
        result = call(*shlex.split(command, comments=True)[1:])
        assert result.exit_code == 0, (command, result.stderr)
    return len(commands)


@pytest.fixture(autouse=True)
def _in_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_CUSTOM", {})


def test_readme_trains_on_a_list_with_a_lambda(tmp_path: Path) -> None:
    (example,) = blocks("README.md", "### From Python")
    assert len(example.splitlines()) <= 15
    result = run_blocks("README.md", "### From Python")["result"]
    assert result.evaluations[0]["accuracy"]["value"] < 0.5 < result.accuracy  # 0.396 and 0.734 when it was written
    assert (tmp_path / "runs/sums/checkpoints").is_dir()


def test_training_from_python(tmp_path: Path) -> None:
    space = run_blocks("docs/python.md")
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"sums", "graded", "settings", "mine"}
    assert space["result"].updates == 2
    assert space["found"].prompts == 8


def test_evaluation(tmp_path: Path) -> None:
    (table,) = re.findall(r"^```toml\n(.*?)^```", (ROOT / "docs/evaluation.md").read_text(), re.MULTILINE | re.DOTALL)
    assert [suite.label for suite in make_config(tomllib.loads(table)).evaluation.suite] == ["greedy", "test"]
    space = run_blocks("docs/evaluation.md")
    assert set(space["result"].suites) == {"greedy", "test"}
    assert space["found"]["greedy"].accuracy.value == space["result"].suites["greedy"]["accuracy"]["value"]
    assert run_commands("docs/evaluation.md") == 5


def test_templates(tmp_path: Path) -> None:
    (table,) = re.findall(r"^```toml\n(.*?)^```", (ROOT / "docs/templates.md").read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "train.jsonl").write_text("".join(f'{{"problem": "{n}?", "answer": "{n}"}}\n' for n in range(20)))
    assert make_config(tomllib.loads(table)).make_task().size == 18
    run_blocks("docs/templates.md")
    shown = call("doctor", "runs/templates").stdout
    assert re.search(r"first prompt +\d+ tokens: 0;12\+13=;25;\d\d\+\d\d=;#", shown), shown
    assert run_commands("docs/templates.md") == 2


def test_episodes() -> None:
    table, _ = re.findall(r"^```toml\n(.*?)^```", (ROOT / "docs/episodes.md").read_text(), re.MULTILINE | re.DOTALL)
    task = make_config(tomllib.loads(table)).make_task()
    assert task.environment.factory.endswith(":Calculator")  # pyright: ignore[reportAttributeAccessIssue]
    assert run_blocks("docs/episodes.md")["game"].tries == 2
