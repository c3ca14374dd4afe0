"""The command line: what goes to stdout and what to stderr, what scripts read, and what people see meanwhile."""

from __future__ import annotations

import errno
import io
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import stalewise.store.writer
from stalewise.cli import app
from stalewise.cli.progress import Bars, Lines, Several, watching
from stalewise.config import RunConfig, load_config, make_config
from stalewise.errors import ConfigError
from stalewise.planning.memory import ModelShape
from stalewise.store import batch_directories, write_shard
from stalewise.store.atomic import explain_write_errors, read_jsonl
from stalewise.store.checkpoints import versions
from stalewise.tasks import TASKS
from stalewise.types import NullCallback
from tiny import call, called_json, refused, tiny_record, write_config

COMMANDS = [
    "demo",
    "init",
    "train",
    "generate",
    "learn",
    "eval",
    "inspect",
    "report",
    "watch",
    "serve",
    "reproduce",
    "compare",
    "export",
    "push",
    "probe",
    "sweep",
    "plan",
    "doctor",
]


def test_help_is_quick_and_brings_no_torch_along() -> None:
    code = "import sys, stalewise.cli; print(*{'torch', 'transformers', 'pyarrow', 'pydantic'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr
    start = time.process_time()
    result = call("--help")
    assert time.process_time() - start < 1
    assert all(command in result.stdout for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str) -> None:
    result = call(command, "--help")
    assert result.exit_code == 0
    assert f"stalewise {command}" in result.stdout
    assert "--json" in result.stdout or command in ("init", "report", "serve")


def test_version_and_unknown_commands() -> None:
    assert call("--version").stdout == f"stalewise {stalewise.__version__}\n"
    unknown = call("trian", "x.toml")
    assert unknown.exit_code == 2
    assert (unknown.stdout, "train" in unknown.stderr) == ("", True)


# ---------------------------------------------------------------- training


def test_a_run_from_init_to_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = call("init", "first.toml")
    assert (made.exit_code, made.stdout) == (0, "first.toml\n")
    assert "stalewise train first.toml" in made.stderr
    settings = ["schedule.updates=2", "schedule.stages=1", "batch.prompts=4", "batch.group_size=4"]
    small = [*settings, "evaluation.prompts=4", "evaluation.samples=2", "objective.name=grpo"]
    words = ["train", "first.toml", *(word for setting in small for word in ("--set", setting))]
    trained = call(*words)
    assert trained.exit_code == 0, trained.stderr
    assert trained.stdout.splitlines()[-1] == "runs/first"
    assert "version 2: accuracy" in trained.stdout
    shown = [line.split(" in ")[0] for line in trained.stderr.splitlines()]
    assert "optimizer.learning_rate stays 0.0003, as given" in shown[0]  # by the recipe
    assert "`stalewise sweep CONFIG --staleness 1 --lr 3e-4" in shown[1]  # what the run is based on: nothing
    assert [line for line in shown[2:] if not line.startswith("version")] == [
        "evaluate: 8/8 responses",
        "generate: 32/32 rollouts",
        "learn: 2/2 updates",
        "evaluate: 8/8 responses",
    ]
    again = called_json(*words)
    assert (again["directory"], again["updates"]) == ("runs/first", 2)
    assert [record["version"] for record in again["evaluations"]] == [0, 2]
    assert set(again["seconds"]) == {"generate", "learn", "switch", "evaluate"}
    report = call("report", "runs/first", "--output", "report.html")
    assert (report.exit_code, report.stdout) == (0, "report.html\n")
    assert "first" in (tmp_path / "report.html").read_text()


def test_init_never_overwrites_and_knows_the_tasks(tmp_path: Path) -> None:
    path = tmp_path / "my config.toml"
    for task in TASKS:
        path.unlink(missing_ok=True)
        assert call("init", path, "--task", task).exit_code == 0
        assert load_config(path).task.name == task
        assert load_config(path).name == "my_config"
    before = path.read_text()
    assert "exists already and is not overwritten" in refused("init", path)
    assert path.read_text() == before
    assert "did you mean arithmetic" in refused("init", tmp_path / "b.toml", "--task", "arithmetik")


def test_a_full_disk_is_one_line_and_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write_config(tmp_path / "a.toml", tiny_record(tmp_path))

    def full(path: Path, data: memoryview) -> bool:
        if path.name == "shard-00001.parquet":
            with explain_write_errors(path, data.nbytes):
                raise OSError(errno.ENOSPC, "No space left on device")
        return create(path, data)

    create = stalewise.store.writer.create_atomic
    with monkeypatch.context() as patch:
        patch.setattr(stalewise.store.writer, "create_atomic", full)
        message = refused("train", config)
    assert message.startswith("disk full while writing ")
    assert message.endswith("bytes; run the same command again")
    assert "shard-00001.parquet: free " in message
    first = batch_directories(tmp_path / "tiny" / "rollouts")[0] / "shard-00000.parquet"
    modified = first.stat().st_mtime_ns
    assert call("train", config).exit_code == 0
    assert first.stat().st_mtime_ns == modified


@pytest.mark.parametrize("command", ["train", "inspect"])
def test_ctrl_c_says_how_to_go_on_where_one_can(
    command: str, tiny_run: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    config = write_config(tmp_path / "a b.toml", tiny_record(tmp_path))
    monkeypatch.setattr("stalewise.rollout.generate.write_shard", interrupt)
    monkeypatch.setattr("stalewise.reporting.inspection.inspect_run", interrupt)
    target = config if command == "train" else tiny_run.directory
    result = call(command, target)
    assert (result.exit_code, result.stdout) == (130, "")
    if command == "train":
        *_, said, again = result.stderr.splitlines()
        assert said == "interrupted: what was committed is kept; run the same command again to go on:"
        assert again == f"  stalewise train '{config}'"
        assert versions(tmp_path / "tiny") == [0]
    else:
        assert result.stderr == "interrupted\n"


def test_other_exceptions_keep_their_traceback(tiny_run: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr("stalewise.reporting.inspection.inspect_run", fail)
    with pytest.raises(ZeroDivisionError, match="ours"):
        call("inspect", tiny_run.directory)


# ---------------------------------------------------------------- generate, learn, eval


def test_generate_and_learn(tmp_path: Path) -> None:
    config = write_config(tmp_path / "a.toml", tiny_record(tmp_path))
    made = called_json("generate", config)
    assert [(batch["generation_batch"], batch["rows"]) for batch in made] == [(0, 32)]
    line = call("generate", config, "--batch", 0).stdout
    assert line.startswith("generation batch 0 of version 0: 32 rollouts, ")
    nothing = call("generate", config)
    assert (nothing.exit_code, nothing.stdout) == (0, "")
    assert "nothing to generate" in nothing.stderr
    assert "give one of them" in refused("generate", config, "--batch", 0, "--checkpoint", tmp_path)
    other = ["--set", "name=other", "--set", "objective.name=p3o"]
    learned = called_json("learn", config, *other, "--rollouts", tmp_path / "tiny")
    assert (learned["updates"], learned["directory"]) == (2, str(tmp_path / "other"))
    shown = called_json("inspect", tmp_path / "other")
    assert [(batch["rows"], batch["updates"], batch["ages"]) for batch in shown["batches"]] == [(32, 2, [0, 1])]
    assert (shown["updates"], shown["updates_done"], shown["objective"]) == (2, 2, "p3o")


def test_eval_prints_a_table_or_json(tiny_run: RunConfig) -> None:
    table = call("eval", tiny_run.directory, "--prompts", 4, "--samples", 2)
    assert table.exit_code == 0
    for words in ("arithmetic, version 4: 4 prompts, 2 samples each", "avg@2", "pass@1", "pass@2", "95% interval"):
        assert words in table.stdout
    record = called_json("eval", "arithmetic", "--prompts", 2, "--samples", 1, "--max-new-tokens", 8)
    assert (record["prompts"], list(record["pass_at"])) == (2, ["1"])
    assert "expected key=value" in refused("eval", tiny_run.directory, "--option", "path")
    assert "name the task" in refused("eval", tiny_run.directory.parent)


# ---------------------------------------------------------------- inspect


def test_inspect_shows_what_is_in_a_run(tiny_run: RunConfig) -> None:
    record = called_json("inspect", tiny_run.directory, "--verify")
    assert (record["updates"], record["updates_done"], record["updates_not_committed"]) == (4, 4, 0)
    assert record["checkpoints"] == [0, 2, 4]
    batches = record["batches"]
    assert [(b["generation_batch"], b["version"], b["rows"], b["shards"]) for b in batches] == [
        (0, 0, 32, 2),
        (1, 2, 32, 2),
    ]
    assert [(b["updates"], b["ages"], b["verifier_errors"], b["truncated"]) for b in batches] == [(2, [0, 1], 0, 0)] * 2
    assert all(b["tokens"] > 64 and 0 < b["reward"] < 1 and b["verified"] for b in batches)
    assert [e["version"] for e in record["evaluations"]] == [0, 4]
    text = call("inspect", tiny_run.directory).stdout
    for words in ("4 of 4 updates", "checkpoints: 0, 2, 4", "version 4: accuracy", "switch", "verifier errors"):
        assert words in text


def test_inspect_shows_a_rollout_token_by_token(tiny_run: RunConfig) -> None:
    record = called_json("inspect", tiny_run.directory, "--rollout", 37)
    assert (record["rollout_id"], record["group"], record["version_first"]) == (37, 9, 2)
    assert record["prompt"] == record["prompt_id"].removeprefix("arithmetic/") + "="
    assert "".join(token["text"] for token in record["tokens"]) == record["text"] + "<eos>"
    assert all(token["logp"] <= 0 for token in record["tokens"])
    (update,) = record["consumed_at"]
    assert update in (2, 3)
    text = call("inspect", tiny_run.directory, "--rollout", 37).stdout
    assert f"{record['tokens'][0]['logp']:.4f}" in text
    group = called_json("inspect", tiny_run.directory, "--group", 9)
    assert [member["rollout_id"] for member in group] == [36, 37, 38, 39]
    assert record["prompt_id"] in call("inspect", tiny_run.directory, "--group", 9).stdout
    assert "rollout ids are 0 to 63" in refused("inspect", tiny_run.directory, "--rollout", 64)
    assert "has no committed group 99" in refused("inspect", tiny_run.directory, "--group", 99)
    assert "is no run directory" in refused("inspect", tiny_run.directory.parent)


def test_inspect_shows_control_characters_as_escapes(tmp_path: Path) -> None:
    from stalewise.config import write_resolved
    from stalewise.store import commit_batch
    from stalewise.types import FinishReason, Rollout, SamplerSettings

    config = make_config(tiny_record(tmp_path))
    write_resolved(config, config.directory / "config.resolved.json")
    batch = config.directory / "rollouts" / "g000000-v000000"
    evil = "\x1b]0;owned\x07[red]\r\n\u202e7"
    rollout = Rollout(
        rollout_id=0,
        prompt_id="a\x1bb",
        group=0,
        prompt_ids=(1,),
        response_ids=(2, 3),
        behaviour_logp=(-0.5, -0.25),
        reward=float("nan"),
        reward_parts={},
        reward_error="ValueError: \x1b[2J",
        finish_reason=FinishReason.LENGTH,
        version_first=0,
        version_last=0,
        sampler=SamplerSettings(),
        seed=1,
        text=evil,
    )
    write_shard(batch, 0, [rollout])
    assert "nothing is committed yet" in refused("inspect", config.directory, "--rollout", 0)
    assert "not committed: 1 shards" in call("inspect", config.directory).stdout
    commit_batch(batch, shards=1, task="t")
    for words in (["--rollout", "0"], ["--group", "0"]):
        shown = call("inspect", config.directory, *words)
        assert shown.exit_code == 0
        assert r"\x1b]0;owned\x07[red]\r\n\u202e7" in shown.stdout
        assert not {"\x1b", "\x07", "\r", "\u202e"} & set(shown.stdout)
    shown = call("inspect", config.directory, "--rollout", 0)
    assert r"unknown: the verifier failed: ValueError: \x1b[2J" in shown.stdout
    assert called_json("inspect", config.directory, "--rollout", 0)["text"] == evil


# ---------------------------------------------------------------- doctor


def test_doctor_finds_nothing_wrong_with_the_default() -> None:
    record = called_json("doctor")
    assert record["ok"]
    statuses = {check["name"]: check["status"] for check in record["checks"]}
    assert set(statuses.values()) == {"ok"}
    needed = {"installation", "objective", "device", "memory", "disk", "model", "tokenizer", "task", "prompts"}
    assert {*needed, "verifier", "sampling", "run directory"} <= set(statuses)


def test_doctor_says_what_would_go_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def bad(**sections: Any) -> dict[str, str]:
        path = write_config(tmp_path / "bad.toml", tiny_record(tmp_path, **sections))
        result = call("doctor", path, "--json")
        assert result.exit_code == 1
        return {c["name"]: c["detail"] for c in json.loads(result.stdout)["checks"] if c["status"] == "bad"}

    assert list(bad(model={"path": str(tmp_path)})) == ["model directory"]
    assert list(bad(objective={"name": "grpoo"}, task={"name": "jsonl", "options": {"path": "none"}})) == [
        "objective",
        "model directory",  # auto is for tasks with an embedded policy
        "task",
    ]
    assert "over the model's context of 128" in bad(sampler={"max_new_tokens": 128})["prompts"]
    assert "no setting" in bad(sampler={"max_tokens": 1})["config"]
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"problem": f"{a}+1=", "answer": "twelve"}) for a in range(30)))
    sections = {"model": {"path": "arithmetic"}, "task": {"name": "jsonl", "options": {"path": str(rows)}}}
    assert "answer is not a number" in bad(**sections)["verifier"]
    shape = ModelShape(10**15, 10**15, layers=1, hidden=1, inner=1, keys=1, vocabulary=1)
    monkeypatch.setattr("stalewise.planning.memory.model_shape", lambda source, config: shape)
    assert set(bad()) == {"memory", "disk"}
    text = call("doctor", tmp_path / "none.toml")
    assert text.exit_code == 1
    assert "bad     config" in text.stdout


# ---------------------------------------------------------------- progress and trackers


def test_lines_are_one_per_phase() -> None:
    out = io.StringIO()
    lines = Lines(Console(file=out))
    lines.begin("generate", 4)
    lines.advance(2, "10 tokens")
    lines.advance(0, "12 tokens")
    assert out.getvalue() == ""
    lines.advance(2)
    lines.log("[bold]something[/bold]")
    lines.begin("learn", 3)
    lines.advance(1)
    lines.close()
    first, said, second = out.getvalue().splitlines()
    assert first.startswith("generate: 4/4 rollouts in ") and first.endswith("/s)  12 tokens")
    assert said == "[bold]something[/bold]"
    assert second.startswith("learn: 1/3 updates in ")


def test_bars_show_rate_and_time_left() -> None:
    out = io.StringIO()
    bars = Bars(Console(file=out, force_terminal=True, width=120))
    bars.advance(1)  # before anything began: nothing to move
    for what in ("generate", "learn"):
        bars.begin(what, 2)
        bars.advance(1, "reward 0.5")
        bars.advance(1, "[ESS] 0.9")
        bars.metrics(0, {})
    bars.log("version 4: accuracy 0.5 [0.4, 0.6]")
    bars.close()
    text = out.getvalue()
    for words in ("generate", "learn", "2/2", "/s", "[ESS] 0.9", "accuracy 0.5 [0.4, 0.6]"):
        assert words in text
    out.truncate(0)
    bars.begin("evaluate", 1000)
    bars.advance(1000)  # a rate after one step, too
    assert "1000/1000" in out.getvalue() and "/s" in out.getvalue()
    bars.begin("learn", 2)
    bars.advance(1)
    bars.close()
    assert "1/2" in out.getvalue()


def test_everybody_is_told() -> None:
    class Recorder(NullCallback):
        def __init__(self) -> None:
            self.told: list[Any] = []

        def begin(self, what: str, total: int) -> None:
            self.told.append((what, total))

        def advance(self, amount: int, note: str = "") -> None:
            self.told.append((amount, note))

        def metrics(self, update: int, record: dict[str, Any]) -> None:
            self.told.append((update, record))

        def log(self, message: str) -> None:
            self.told.append(message)

    recorders = [Recorder(), Recorder()]
    several = Several(recorders)
    several.begin("learn", 1)
    several.advance(1, "note")
    several.metrics(0, {"loss": 1.0})
    several.log("done")
    assert recorders[0].told == recorders[1].told == [("learn", 1), (1, "note"), (0, {"loss": 1.0}), "done"]


def test_tensorboard_gets_metrics_and_evaluations(tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    record = tiny_record(tmp_path) | {"trackers": ["tensorboard"]}
    assert call("train", write_config(tmp_path / "a.toml", record)).exit_code == 0
    events = event_accumulator.EventAccumulator(str(tmp_path / "tiny" / "tensorboard"))
    events.Reload()
    metrics = read_jsonl(tmp_path / "tiny" / "metrics.jsonl")
    logged = {(event.step, round(event.value, 5)) for event in events.Scalars("reward")}
    assert logged == {(line["update"], round(line["reward"], 5)) for line in metrics}
    assert [event.step for event in events.Scalars("evaluation/accuracy")] == [0, 4]
    assert "evaluation/pass@2" in events.Tags()["scalars"]


def test_a_tracker_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelerate.tracking.get_available_trackers", list)
    config = make_config(tiny_record(tmp_path) | {"trackers": ["wandb"]})
    with pytest.raises(ConfigError, match="pip install wandb"), watching(config):
        raise AssertionError("unreachable")
    path = write_config(tmp_path / "a.toml", tiny_record(tmp_path) | {"trackers": ["mlflow"]})
    assert "trackers names mlflow" in refused("train", path)
    assert not (tmp_path / "tiny").exists()


def test_the_list_of_commands_is_complete() -> None:
    names = [command.name or getattr(command.callback, "__name__", "") for command in app.registered_commands]
    assert sorted(names) == sorted(COMMANDS)
