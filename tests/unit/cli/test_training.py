"""The command line: what goes to stdout and what to stderr, what scripts read, and what people see meanwhile."""

from __future__ import annotations

import errno
import json
import sys
from pathlib import Path
from typing import Any

import pytest

import stalewise.store.writer
from stalewise.cli.app import load_packages
from stalewise.cli.training import _describe_work  # pyright: ignore[reportPrivateUsage]
from stalewise.config import load_config, make_config
from stalewise.config.run import write_resolved
from stalewise.planning.memory import ModelShape
from stalewise.rollout.workers.worker import WorkDone
from stalewise.store import batch_directories
from stalewise.store.atomic import explain_write_errors
from stalewise.tasks import TASKS
from tiny import call, called_json, refused, tiny_record, write_config

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
        "next: stalewise report runs/first, or stalewise serve runs/first",
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
    assert "exists and is not overwritten" in refused("init", path)
    assert path.read_text() == before
    assert "did you mean arithmetic" in refused("init", tmp_path / "b.toml", "--task", "arithmetik")


@pytest.mark.parametrize(
    ("file", "name"), [("stalewise.toml", "run"), ("a/my run.toml", "my_run"), ("v1.2.toml", "v1.2")]
)
def test_a_run_is_named_after_its_config(file: str, name: str, tmp_path: Path) -> None:
    call("init", tmp_path / file)
    assert load_config(tmp_path / file).name == name


def test_the_work_of_a_worker_is_one_line() -> None:
    assert _describe_work(WorkDone("w1", 2, 1024)) == "w1: 2 shards with 1,024 rollouts"
    assert _describe_work(WorkDone("w1", 2, 64, 1, 3)).endswith("(1 taken over, 3 too late and dropped)")


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
    needed = "learn needs rollouts: `stalewise learn CONFIG --rollouts RUN`, where CONFIG is the TOML file of"
    assert refused("learn", tmp_path / "tiny/rollouts").startswith(needed)
    named = refused("learn", tmp_path / "tiny/rollouts", "--rollouts", tmp_path / "tiny")
    assert named.endswith(f"config.resolved.json; name the run that it belongs to, {tmp_path / 'tiny'}")
    shown = called_json("inspect", tmp_path / "other")
    assert [(batch["rows"], batch["updates"], batch["ages"]) for batch in shown["batches"]] == [(32, 2, [0, 1])]
    assert (shown["updates"], shown["updates_done"], shown["objective"]) == (2, 2, "p3o")


# ---------------------------------------------------------------- doctor


def test_doctor_finds_nothing_wrong_with_the_default() -> None:
    record = called_json("doctor")
    assert record["ok"]
    statuses = {check["name"]: check["status"] for check in record["checks"]}
    assert set(statuses.values()) == {"ok"}
    needed = {"installation", "objective", "device", "memory", "disk", "model", "tokenizer", "task", "prompts"}
    assert {*needed, "verifier", "sampling", "learning", "run directory"} <= set(statuses)


def test_doctor_says_what_would_go_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def bad(**sections: Any) -> dict[str, str]:
        path = write_config(tmp_path / "bad.toml", tiny_record(tmp_path, **sections))
        result = call("doctor", path, "--json")
        assert result.exit_code == 1
        return {c["name"]: c["detail"] for c in json.loads(result.stdout)["checks"] if c["status"] == "bad"}

    assert list(bad(model={"path": str(tmp_path)})) == ["model directory"]
    assert list(bad(objective={"name": "grpoo"}, task={"name": "jsonl", "options": {"path": "none"}})) == [
        "task",
        "objective",
        "model directory",  # auto is for tasks with an embedded policy
    ]
    assert "over the model's context of 128" in bad(sampler={"max_new_tokens": 128})["prompts"]
    assert "is not a setting" in bad(sampler={"max_tokens": 1})["config"]
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"problem": f"{a}+1=", "answer": "twelve"}) for a in range(30)))
    sections = {"model": {"path": "arithmetic"}, "task": {"name": "jsonl", "options": {"path": str(rows)}}}
    assert "answer is not a number" in bad(**sections)["verifier"]
    shape = ModelShape(10**15, 10**15, layers=1, hidden=1, inner=1, keys=1, vocabulary=1)
    monkeypatch.setattr("stalewise.planning.memory.model_shape", lambda source, config: shape)
    assert set(bad()) == {"memory", "disk"}
    setting = ("--set", "task.name=no_such_task")
    record = tiny_record(tmp_path / "runs", "begun")
    run = make_config(record)
    run.directory.mkdir(parents=True)
    write_resolved(run, run.directory / "config.resolved.json")
    for words in (["doctor"], ["doctor", run.directory], ["doctor", write_config(tmp_path / "a.toml", record)]):
        assert "bad     task            unknown task 'no_such_task'" in call(*words, *setting).stdout, words
    text = call("doctor", tmp_path / "none.toml")
    assert text.exit_code == 1
    assert "bad     config" in text.stdout


def test_who_watches_a_terminal_is_told_what_takes_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("stalewise.models.import_packages", lambda: None)
    load_packages()
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    load_packages()
    assert capsys.readouterr().err == "loading torch and transformers …\n"
