"""The examples of README and of pages run as they are printed, in one namespace and in their order."""

from __future__ import annotations

import json
import linecache
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest

from judge_server import judge_server
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


def run_blocks(page: str, heading: str = "", replaced: tuple[str, str] = ("", "")) -> dict[str, Any]:
    space: dict[str, Any] = {"__name__": "__main__"}
    for number, printed in enumerate(blocks(page, heading)):
        source = printed.replace(*replaced) if replaced[0] else printed
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
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"sums", "graded", "both", "settings", "mine"}
    assert space["result"].updates == 2
    assert space["found"].prompts == 8


def test_evaluation(tmp_path: Path) -> None:
    (table,) = re.findall(r"^```toml\n(.*?)^```", (ROOT / "docs/evaluation.md").read_text(), re.MULTILINE | re.DOTALL)
    assert [suite.label for suite in make_config(tomllib.loads(table)).evaluation.suite] == ["greedy", "test"]
    space = run_blocks("docs/evaluation.md")
    assert set(space["result"].suites) == {"greedy", "test"}
    assert space["found"]["greedy"].accuracy.value == space["result"].suites["greedy"]["accuracy"]["value"]
    assert run_commands("docs/evaluation.md") == 5


def test_forks(tmp_path: Path) -> None:
    space = run_blocks("docs/fork.md", "tests/examples/test_pages.py`.\n")
    assert run_commands("docs/fork.md") == 5
    exec(blocks("docs/fork.md")[1], space)
    assert space["result"].updates == 4
    assert [path.name for path in sorted((tmp_path / "runs").iterdir())] == ["first", "longer", "lower", "warm"]


def test_rescoring(tmp_path: Path) -> None:
    space = run_blocks("docs/rescore.md", "tests/examples/test_pages.py`.\n")
    assert run_commands("docs/rescore.md") == 4
    assert {path.name for path in (tmp_path / "runs/first/rewards").iterdir()} == {"with-format", "last-number"}
    exec(blocks("docs/rescore.md")[1], space)
    assert space["made"].record["mean_after"] > space["made"].record["mean_before"]


def test_mixtures(tmp_path: Path) -> None:
    (table,) = re.findall(r"^```toml\n(.*?)^```", (ROOT / "docs/mixtures.md").read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "mixed.toml").write_text(table)
    exec(blocks("docs/mixtures.md")[0], {})
    assert run_commands("docs/mixtures.md") == 3
    space = run_blocks("docs/mixtures.md", "in any other run.\n")
    by_task = space["result"].evaluations[-1]["by_task"]
    assert {label: one["prompts"] for label, one in by_task.items()} == {"arithmetic": 12, "small": 4}


def test_templates(tmp_path: Path) -> None:
    (table,) = re.findall(r"^```toml\n(.*?)^```", (ROOT / "docs/templates.md").read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "train.jsonl").write_text("".join(f'{{"problem": "{n}?", "answer": "{n}"}}\n' for n in range(20)))
    assert make_config(tomllib.loads(table)).make_task().size == 18
    run_blocks("docs/templates.md")
    shown = call("doctor", "runs/templates").stdout
    assert re.search(r"first prompt +\d+ tokens: 0;12\+13=;25;\d\d\+\d\d=;#", shown), shown
    assert run_commands("docs/templates.md") == 2


def test_regularizers(tmp_path: Path) -> None:
    (table,) = re.findall(r"^```toml\n(.*?)^```", (ROOT / "docs/regularizers.md").read_text(), re.MULTILINE | re.DOTALL)
    assert make_config(tomllib.loads(table)).objective.reward_weights == {"correct": 1.0, "format": 0.1}
    run_blocks("docs/regularizers.md")
    records = [json.loads(line) for line in (tmp_path / "runs/regularized/metrics.jsonl").read_text().splitlines()]
    assert records[0]["kl_reference"] == 0 < records[-1]["kl_reference"]
    assert (
        "0.1 · KL to the initial policy (k3) in the loss; entropy bonus 0.01"
        in call("doctor", "runs/regularized").stdout
    )
    assert run_commands("docs/regularizers.md") == 2


def test_informative_groups(tmp_path: Path) -> None:
    page = "docs/informative_groups.md"
    (table,) = re.findall(r"^```toml\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    assert make_config(tomllib.loads(table)).batch.reserved == 96
    first, second = blocks(page)
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(first, page, "exec"), space)
    assert run_commands(page) == 3
    exec(compile(second, page, "exec"), space)
    assert json.loads((tmp_path / "runs/second/difficulty.json").read_text())["prompts"]
    assert space["second"].updates == 4


def write_tables(page: str, directory: Path) -> list[str]:
    """Write each TOML block of a page under the name that it has; returns the names."""
    found = re.findall(r"^```toml\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    names = [str(tomllib.loads(table)["name"]) for table in found]
    for name, table in zip(names, found, strict=True):
        (directory / f"{name}.toml").write_text(table)
    return names


@pytest.mark.slow
def test_first_run(tmp_path: Path) -> None:
    assert write_tables("docs/first_run.md", tmp_path) == ["first"]
    assert run_commands("docs/first_run.md") == 6
    records = [json.loads(line) for line in (tmp_path / "runs/first/eval.jsonl").read_text().splitlines()]
    first, last = (record["accuracy"]["value"] for record in (records[0], records[-1]))
    assert first < 0.45 and last > 0.7  # 0.4 → 0.8, as the page says
    assert (tmp_path / "policy/model.safetensors").is_file()


def test_your_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    space = run_blocks("docs/your_data.md")
    assert space["result"].updates == 8
    assert write_tables("docs/your_data.md", tmp_path) == ["from_files"]
    monkeypatch.syspath_prepend(tmp_path)
    assert run_commands("docs/your_data.md") == 2
    make_config(tomllib.loads((ROOT / "configs/gsm8k_jsonl.toml").read_text()))


def test_choosing(tmp_path: Path) -> None:
    assert write_tables("docs/choosing.md", tmp_path) == ["auto"]
    assert run_commands("docs/choosing.md") == 3
    assert list((tmp_path / "runs/calibrations").glob("*.json"))


def test_long_responses(tmp_path: Path) -> None:
    assert write_tables("docs/long_responses.md", tmp_path) == ["long"]
    assert run_commands("docs/long_responses.md") == 2


def test_debugging(tmp_path: Path) -> None:
    run_blocks("docs/debugging.md")
    assert run_commands("docs/debugging.md") == 7


def test_reuse(tmp_path: Path) -> None:
    space = run_blocks("docs/reuse.md")
    assert len(space["rollouts"]) == 64 and space["again"].updates == 4
    assert run_commands("docs/reuse.md") == 3
    assert (tmp_path / "table.json").is_file()


def printed_in_comments(page: str) -> list[str]:
    """What the lines of a page's examples that print say that they print."""
    lines = [
        line for block in blocks(page) for line in block.splitlines() if line.startswith("print(") and "  # " in line
    ]
    return [line.rpartition("  # ")[2] for line in lines]


def test_code_rewards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs/code_rewards.md").read_text()
    (table,) = re.findall(r"^```toml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    row = '{"problem": "%s", "answer": "x = 1", "tests": ["assert x == 1"]}\n'
    (tmp_path / "mbpp.jsonl").write_text("".join(row % number for number in range(20)))
    for source in (table, (ROOT / "configs/mbpp.toml").read_text()):
        task = make_config(tomllib.loads(source)).make_task()
        assert task.verifier.score(task.prompts(0, 1), ["```python\nx = 2\n```"])[0].value == 0
    run_blocks("docs/code_rewards.md")
    told = printed_in_comments("docs/code_rewards.md")
    shown = [line for line in capsys.readouterr().out.splitlines() if line]
    assert told[4] == "bubblewrap, namespaces or landlock" and shown[4] in told[4]
    assert [told[:4], told[5:]] == [shown[:4], shown[5:]]


def test_judge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs/judge.md").read_text()
    (table,), (rubric,) = (
        re.findall(rf"^```{kind}\n(.*?)^```", text, re.MULTILINE | re.DOTALL) for kind in ("toml", "text")
    )
    (tmp_path / "rubric.txt").write_text(rubric)
    rows = "".join(f'{{"problem": "{n}?", "answer": "{n}", "level": "hard"}}\n' for n in range(20))
    (tmp_path / "train.jsonl").write_text(rows)
    with judge_server(lambda text, number: "Score: 4" if "level hard" in text else "Mostly right.\nScore: 8") as server:
        replaced = ("http://localhost:8000/v1", server.url)
        task = make_config(tomllib.loads(table.replace(*replaced))).make_task()
        assert task.verifier.score(task.prompts(0, 1), ["x"])[0].value == 0.75
        run_blocks("docs/judge.md", replaced=replaced)
    assert capsys.readouterr().out == "0.8 {'score': 8.0}\nMostly right.\nScore: 8\n"


def test_episodes() -> None:
    table, _ = re.findall(r"^```toml\n(.*?)^```", (ROOT / "docs/episodes.md").read_text(), re.MULTILINE | re.DOTALL)
    task = make_config(tomllib.loads(table)).make_task()
    assert task.environment.factory.endswith(":Calculator")  # pyright: ignore[reportAttributeAccessIssue]
    assert run_blocks("docs/episodes.md")["game"].tries == 2
