"""The examples of README and of pages run as they are printed, in one namespace and in their order."""

from __future__ import annotations

import json
import linecache
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import stalewise
from judge_server import judge_server
from stalewise.config import load_config, make_config
from stalewise.objectives import registry
from tiny import call, tiny_record, write_config

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]
NO_GUIDES = {
    "docs/benchmarks.md",
    "docs/experiments.md",
    "docs/log.md",
}  # their commands take hours, on machines named there
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
NEEDS = re.compile(r"(?:#|--) Needs (.+)\.\n")  # the first line of a block that these tests do not run

_ran: set[tuple[str, str]] = set()  # page and block, by the test that runs now


def blocks(page: str, kind: str = "python") -> list[str]:
    """The blocks of one kind on a page; of Python those without prompts, which tests/locks runs as doctests."""
    found = [text for name, text in FENCED.findall((ROOT / page).read_text()) if name == kind]
    return [text for text in found if not text.startswith(">>> ")]


def to_run(page: str) -> list[str]:
    """Blocks that can be run here: TOML is loaded in tests/unit/config, and other kinds are not code."""
    return [text for kind in ("python", "sh", "sql") for text in blocks(page, kind) if not NEEDS.match(text)]


def run_blocks(
    page: str, *numbers: int, space: dict[str, Any] | None = None, replaced: tuple[str, str] = ("", "")
) -> dict[str, Any]:
    """Run the Python blocks of a page, or those with these numbers, in one namespace."""
    space = {"__name__": "__main__"} if space is None else space
    found = blocks(page)
    assert found, f"{page} has no examples"
    for number in numbers or range(len(found)):
        printed = found[number]
        source = printed.replace(*replaced) if replaced[0] else printed
        name = f"<{page}, example {number}>"
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)  # as a notebook does
        exec(compile(source, name, "exec"), space)
        _ran.add((page, printed))
    return space


def run_commands(page: str, later: tuple[str, ...] = ()) -> int:
    """Run the commands of a page as they are printed, but those for another test; returns how many."""
    count = 0
    for block in blocks(page, "sh"):
        if NEEDS.match(block):
            continue
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:2] == ["pip", "install"]:
                assert_installable(words[2:])
            elif words and " ".join(words) not in later:
                assert words[0] == "stalewise", f"{page}: {line}: run it here, or begin its block with '# Needs ….'"
                run_command(words[1:], line)
                count += 1
        _ran.add((page, block))
    return count


def run_command(words: list[str], line: str) -> None:
    if words[0] == "serve":
        assert "/report" in served_page(words)
        return
    result = call(*words)
    assert result.exit_code == 0, (line, result.stderr)


def served_page(words: list[str]) -> str:
    """Serve a run on a free port until it has answered once."""
    command = [sys.executable, "-m", "stalewise", *words, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "BROWSER": "true"}) as server:
        assert server.stdout is not None
        try:
            address = next(found[0] for line in server.stdout if (found := re.search(r"http://\S+", line)))
            with urllib.request.urlopen(address, timeout=60) as answer:
                return answer.read().decode()
        finally:
            server.send_signal(signal.SIGINT)


def assert_installable(words: list[str]) -> None:
    """The extras that `pip install "stalewise[…]"` names are there."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = [name for word in words for found in re.findall(r"^stalewise\[(.+)\]$", word) for name in found.split(",")]
    assert set(named) <= set(extras), f"{named}: there is no such extra"


@pytest.fixture(autouse=True)
def _in_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run in an empty directory; a page of which a test runs something is run whole."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_CUSTOM", {})
    _ran.clear()
    yield
    for page in sorted({page for page, _ in _ran}):
        left = [text for text in to_run(page) if (page, text) not in _ran]
        assert left == [], f"{page} has blocks that its test does not run"


def test_every_page_with_code_is_run_here() -> None:
    run = set(re.findall(r'run_(?:blocks|commands)\("([\w/]+\.md)"', Path(__file__).read_text()))
    run |= set(re.findall(r'^ +page = "([\w/]+\.md)"$', Path(__file__).read_text(), re.MULTILINE))
    with_code = {page for page in PAGES if page not in NO_GUIDES and to_run(page)}
    assert sorted(with_code - run) == []


def test_what_is_not_run_says_what_it_needs() -> None:
    found = [(page, need) for page in PAGES for kind in ("python", "sh", "sql") for need in _needs(page, kind)]
    assert sorted(found) == sorted(NOT_RUN)


def test_an_extra_that_is_not_there_is_found() -> None:
    assert_installable(["torch", "stalewise[math,datasets]"])
    with pytest.raises(AssertionError, match="there is no such extra"):
        assert_installable(["stalewise[maths]"])


def _needs(page: str, kind: str) -> list[str]:
    return [found[1] for block in blocks(page, kind) if (found := NEEDS.match(block))]


def programs() -> dict[str, set[str]]:
    """The options that pages which are no guides print, by program."""
    found: dict[str, set[str]] = {}
    for page in sorted(NO_GUIDES):
        for block in blocks(page, "sh"):
            for line in block.replace("\\\n", " ").splitlines():
                command = shlex.split(line, comments=True)
                if "python" not in command:
                    continue
                words = command[command.index("python") + 1 :]
                program = " ".join(words[: 2 if words[0] == "-m" else 1])
                found.setdefault(program, set()).update(word for word in words if word.startswith("--"))
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("program", programs())
def test_options_of_what_takes_hours_are_there(program: str) -> None:
    def shown_by(*commands: str) -> str:
        command = [sys.executable, *program.split(), *commands, "--help"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    shown = shown_by()
    for commands in re.findall(r"^usage: .*\{([\w,]+)\} \.\.\.$", shown, re.MULTILINE):
        shown += "".join(map(shown_by, commands.split(",")))
    assert programs()[program] <= set(re.findall(r"--[\w-]+", shown))


# One row for each block that begins with "# Needs ….".
NOT_RUN = [
    ("README.md", "a GPU, and the network for model and data"),
    ("docs/benchmarks.md", "a GPU, vLLM 0.25 (DIRECTORY) and both files of GSM8K, with `problem` and `answer`"),
    ("docs/choosing.md", "a few dozen runs"),
    ("docs/engines.md", "vLLM"),
    ("docs/engines.md", "vLLM"),
    ("docs/hub.md", "the network"),
    ("docs/hub.md", "the network"),
    ("docs/integrations.md", "verl"),
    ("docs/models.md", "the network"),
    ("docs/ranks.md", "several GPUs"),
    ("docs/staleness.md", "a few dozen runs"),
    ("docs/store_format.md", "DuckDB"),
    ("docs/tasks.md", "the network"),
    ("docs/workers.md", "a second GPU"),
    ("docs/workers.md", "an object store"),
    ("docs/workers.md", "Ray"),
]


@pytest.mark.parametrize("updates", [4, pytest.param(32, marks=pytest.mark.nightly)])
def test_readme_trains_on_a_list_with_a_lambda(tmp_path: Path, updates: int) -> None:
    (example,) = blocks("README.md")
    assert len(example.splitlines()) <= 15 and example.count(" updates=32,\n") == 1
    result = run_blocks("README.md", replaced=("updates=32", f"updates={updates}"))["result"]
    assert result.updates == updates
    if updates == 32:  # 0.396 and 0.734 when it was written
        assert result.evaluations[0]["accuracy"]["value"] < 0.5 < result.accuracy
    assert (tmp_path / "runs/sums/checkpoints").is_dir()
    assert run_commands("README.md", later=("stalewise demo",)) == 0


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_readme_demo(tmp_path: Path) -> None:
    assert "stalewise demo" in blocks("README.md", "sh")[0]
    result = call("demo")
    assert result.exit_code == 0, result.stderr
    assert list(tmp_path.glob("runs/**/*.html"))


def test_readme_trains_gsm8k_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its config, on two rows in the layout of the hub instead of 8,792."""
    (table,) = blocks("README.md", "toml")
    assert tomllib.loads(table) == tomllib.loads((ROOT / "configs/gsm8k_1.5b.toml").read_text())
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    copy = tmp_path / "copies/openai/gsm8k"
    for split in ("train", "test"):
        row = {"question": f"A {split} question?", "answer": "It is 8 × 9 = <<8*9=72>>72.\n#### 72"}
        (copy / "main").mkdir(parents=True, exist_ok=True)
        datasets.Dataset.from_list([row]).to_parquet(str(copy / f"main/{split}.parquet"))
    files = "".join(f"\n  - split: {split}\n    path: main/{split}.parquet" for split in ("train", "test"))
    (copy / "README.md").write_text(f"---\nconfigs:\n- config_name: main\n  data_files:{files}\n---\n")
    monkeypatch.setenv("STALEWISE_DATASETS", str(tmp_path / "copies"))
    config = load_config(ROOT / "configs/gsm8k_1.5b.toml")
    assert f"stalewise serve {config.directory} " in blocks("README.md", "sh")[1]
    task = config.make_task()
    (prompt,), (held_out,) = task.prompts(0, 1), task.evaluation_prompts(9)
    assert (prompt.text, held_out.text) == ("A train question?", "A test question?")
    assert prompt.metadata["format"] == "chat"
    assert [reward.value for reward in task.verifier.score([prompt] * 2, ["so 72", "so 71"])] == [1, 0]


@pytest.mark.nightly
def test_training_from_python(tmp_path: Path) -> None:
    space = run_blocks("docs/python.md")
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"sums", "graded", "both", "settings", "mine"}
    assert space["result"].updates == 2
    assert space["found"].prompts == 8


@pytest.mark.nightly
def test_evaluation(tmp_path: Path) -> None:
    (table,) = re.findall(r"^```toml\n(.*?)^```", (ROOT / "docs/evaluation.md").read_text(), re.MULTILINE | re.DOTALL)
    assert [suite.label for suite in make_config(tomllib.loads(table)).evaluation.suite] == ["greedy", "test"]
    space = run_blocks("docs/evaluation.md")
    assert set(space["result"].suites) == {"greedy", "test"}
    assert space["found"]["greedy"].accuracy.value == space["result"].suites["greedy"]["accuracy"]["value"]
    assert run_commands("docs/evaluation.md") == 5


@pytest.mark.nightly
def test_forks(tmp_path: Path) -> None:
    space = run_blocks("docs/fork.md", 0)
    assert run_commands("docs/fork.md") == 5
    run_blocks("docs/fork.md", 1, space=space)
    assert space["result"].updates == 4
    run_blocks("docs/fork.md", 2, space=space)
    names = ["after", "before", "first", "longer", "lower", "warm"]
    assert [path.name for path in sorted((tmp_path / "runs").iterdir())] == names


@pytest.mark.nightly
def test_rescoring(tmp_path: Path) -> None:
    space = run_blocks("docs/rescore.md", 0)
    assert run_commands("docs/rescore.md") == 4
    assert {path.name for path in (tmp_path / "runs/first/rewards").iterdir()} == {"with-format", "last-number"}
    run_blocks("docs/rescore.md", 1, space=space)
    assert space["made"].record["mean_after"] > space["made"].record["mean_before"]


@pytest.mark.nightly
def test_mixtures(tmp_path: Path) -> None:
    (table,) = re.findall(r"^```toml\n(.*?)^```", (ROOT / "docs/mixtures.md").read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "mixed.toml").write_text(table)
    run_blocks("docs/mixtures.md", 0)
    assert run_commands("docs/mixtures.md") == 3
    space = run_blocks("docs/mixtures.md", 1)
    by_task = space["result"].evaluations[-1]["by_task"]
    assert {label: one["prompts"] for label, one in by_task.items()} == {"arithmetic": 12, "small": 4}


@pytest.mark.nightly
def test_templates(tmp_path: Path) -> None:
    (table,) = re.findall(r"^```toml\n(.*?)^```", (ROOT / "docs/templates.md").read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "train.jsonl").write_text("".join(f'{{"problem": "{n}?", "answer": "{n}"}}\n' for n in range(20)))
    assert make_config(tomllib.loads(table)).make_task().size == 18
    run_blocks("docs/templates.md")
    shown = call("doctor", "runs/templates").stdout
    assert re.search(r"first prompt +\d+ tokens: 0;12\+13=;25;\d\d\+\d\d=;#", shown), shown
    assert run_commands("docs/templates.md") == 2


@pytest.mark.nightly
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


@pytest.mark.nightly
def test_informative_groups(tmp_path: Path) -> None:
    page = "docs/informative_groups.md"
    (table,) = re.findall(r"^```toml\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    assert make_config(tomllib.loads(table)).batch.reserved == 96
    space = run_blocks(page, 0)
    assert run_commands(page) == 3
    run_blocks(page, 1, space=space)
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
@pytest.mark.parametrize("updates", [4, pytest.param(32, marks=pytest.mark.nightly)])
def test_first_run(tmp_path: Path, updates: int) -> None:
    assert write_tables("docs/first_run.md", tmp_path) == ["first"]
    table = (tmp_path / "first.toml").read_text()
    assert table.count("\nupdates = 32 ") == 1
    (tmp_path / "first.toml").write_text(table.replace("updates = 32", f"updates = {updates}"))
    assert run_commands("docs/first_run.md") == 6
    records = [json.loads(line) for line in (tmp_path / "runs/first/eval.jsonl").read_text().splitlines()]
    assert records[-1]["version"] == updates
    first, last = (record["accuracy"]["value"] for record in (records[0], records[-1]))
    assert updates < 32 or (first < 0.45 and last > 0.7)  # 0.4 → 0.8, as the page says
    assert (tmp_path / "policy/model.safetensors").is_file()


@pytest.mark.nightly
def test_your_data(tmp_path: Path) -> None:
    space = run_blocks("docs/your_data.md")
    assert space["result"].updates == 8
    assert write_tables("docs/your_data.md", tmp_path) == ["from_files"]
    assert run_commands("docs/your_data.md") == 2
    make_config(tomllib.loads((ROOT / "configs/gsm8k_jsonl.toml").read_text()))


@pytest.mark.nightly
def test_choosing(tmp_path: Path) -> None:
    assert write_tables("docs/choosing.md", tmp_path) == ["auto"]
    assert run_commands("docs/choosing.md") == 3
    assert list((tmp_path / "runs/calibrations").glob("*.json"))


@pytest.mark.nightly
def test_long_responses(tmp_path: Path) -> None:
    assert write_tables("docs/long_responses.md", tmp_path) == ["long"]
    assert run_commands("docs/long_responses.md") == 2


@pytest.mark.nightly
def test_debugging(tmp_path: Path) -> None:
    run_blocks("docs/debugging.md")
    assert run_commands("docs/debugging.md") == 7


@pytest.mark.nightly
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


@pytest.mark.nightly
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


@pytest.mark.nightly
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


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four updates in two stages, with the checkpoints of each."""
    record = tiny_record(tmp_path_factory.mktemp("pages"), "my_run", evaluation={"every": 2}, checkpoints={"keep": 8})
    return stalewise.run(make_config(record)).directory


def copied(run: Path, *names: str) -> None:
    for name in names:
        shutil.copytree(run, Path("runs") / name)


def test_browser(finished: Path) -> None:
    copied(finished, "my_run")
    rows = run_blocks("docs/browser.md")["rows"]
    assert rows["rollout_id"].to_pylist() == [32, 33]
    assert run_commands("docs/browser.md") == 2


@pytest.mark.slow
@pytest.mark.nightly
def test_cluster() -> None:
    shutil.copytree(ROOT / "configs/clusters", "configs/clusters")
    assert run_commands("docs/cluster.md") == 3


@pytest.mark.nightly
def test_engines(tmp_path: Path) -> None:
    write_config(tmp_path / "my_run.toml", tiny_record(tmp_path / "runs"))
    assert run_commands("docs/engines.md") == 1


@pytest.mark.nightly
def test_hub(tmp_path: Path, finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    copied(finished, "my_run")
    lora = {"path": "embedded:arithmetic", "lora": {"rank": 2, "alpha": 4.0}}
    stalewise.run(make_config(tiny_record(tmp_path / "runs", "with_lora", model=lora)))
    assert run_commands("docs/hub.md") == 5
    assert (tmp_path / "mirror/me/my-policy/model.safetensors").is_file()
    assert (tmp_path / "adapter/adapter_model.safetensors").is_file()
    run_blocks("docs/hub.md")


def test_install() -> None:
    assert run_commands("docs/install.md") == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.nightly
def test_integrations(tmp_path: Path) -> None:
    space = run_blocks("docs/integrations.md")
    assert space["trainer"].state.global_step == 4 and space["again"].state.global_step == 2


def test_reports(finished: Path, tmp_path: Path) -> None:
    copied(finished, "a", "b", "a0", "a1", "a2", "b0", "b1", "b2")
    assert run_commands("docs/reports.md") == 8
    assert (tmp_path / "comparison.html").is_file()
    assert run_blocks("docs/reports.md")["result"].words


@pytest.mark.nightly
def test_staleness(tmp_path: Path) -> None:
    write_config(tmp_path / "my_run.toml", tiny_record(tmp_path / "runs"))
    assert run_commands("docs/staleness.md") == 1
    assert list((tmp_path / "runs/calibrations").glob("*.json"))


def test_store_format(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    copied(finished, "demo")
    space = run_blocks("docs/store_format.md")
    assert len(space["frame"]) == 16 and len(space["rollouts"]) == 64 and len(space["rows"].rollout_id) == 32


def test_tasks(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copied(finished, "my_run")
    (tmp_path / "aime.jsonl").write_text('{"id": "a", "problem": "12+13=", "answer": "25"}\n')
    space = run_blocks("docs/tasks.md")
    assert capsys.readouterr().out == "all 4 responses were scored\n"
    answer = space["prompts"][0].answer
    assert space["short_and_right"](f" {answer}", answer)["right"] == 1
    assert run_commands("docs/tasks.md") == 1


@pytest.mark.nightly
def test_workers(tmp_path: Path) -> None:
    write_config(tmp_path / "config.toml", tiny_record(tmp_path / "runs", "my-run"))
    assert run_commands("docs/workers.md") == 2
