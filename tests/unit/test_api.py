"""The public verbs, and the package as an interface."""

from __future__ import annotations

import inspect
import json
import pydoc
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import stalewise
from stalewise.api import evaluate, generate, run
from stalewise.config import RunConfig, make_config
from stalewise.errors import ConfigError, ModelError, StoreError, TaskError
from stalewise.models import EMBEDDED
from stalewise.store import (
    batch_directories,
)
from stalewise.store.atomic import sha256_file
from stalewise.store.checkpoints import checkpoint_directory, versions
from stalewise.store.json_lines import read_jsonl
from stalewise.types import NullCallback
from tiny import tiny_record, write_config


def weights(config: RunConfig, version: int) -> str:
    return sha256_file(checkpoint_directory(config.directory, version) / "model.safetensors")


def rollouts_of(config: RunConfig) -> list[Path]:
    return batch_directories(config.directory / "rollouts")


def test_generation_alone_is_what_training_would_have_made(tiny_run: RunConfig, runs: Path) -> None:
    config = make_config(tiny_record(runs, "ahead"))
    (made,) = generate(config)
    assert (made.generation_batch, made.version, made.rows) == (0, 0, 32)
    assert generate(config) == []  # batch 1 needs version 2
    assert generate(config, batch=0) == [made]
    with pytest.raises(StoreError, match=r"made by version 2, which .* does not have"):
        generate(config, batch=1)
    with pytest.raises(StoreError, match="generation batch 2 does not exist: this schedule has 0 to 1"):
        generate(config, batch=2)
    assert versions(config.directory) == [0]
    theirs, ours = (sha256_file(rollouts_of(c)[0] / "shard-00001.parquet") for c in (tiny_run, config))
    assert theirs == ours
    modified = (rollouts_of(config)[0] / "manifest.json").stat().st_mtime_ns
    run(config)
    assert (rollouts_of(config)[0] / "manifest.json").stat().st_mtime_ns == modified
    assert weights(config, 4) == weights(tiny_run, 4)
    assert generate(config) == []


def test_a_copied_checkpoint_generates_on_another_machine(tiny_run: RunConfig, runs: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "copied"
    shutil.copytree(checkpoint_directory(tiny_run.directory, 2), checkpoint)
    config = make_config(tiny_record(runs, "elsewhere", checkpoints={"keep": 8}))
    (made,) = generate(config, checkpoint=checkpoint)
    assert (made.generation_batch, made.version) == (1, 2)
    assert versions(config.directory) == []
    for shard in ("shard-00000.parquet", "shard-00001.parquet"):
        assert sha256_file(rollouts_of(config)[0] / shard) == sha256_file(rollouts_of(tiny_run)[1] / shard)
    first = generate(config, checkpoint=checkpoint_directory(tiny_run.directory, 0))
    assert [(batch.generation_batch, batch.version) for batch in first] == [(0, 0)]
    with pytest.raises(StoreError, match=r"version 4 makes no generation batch .* versions that do: \[0, 2\]"):
        generate(config, checkpoint=checkpoint_directory(tiny_run.directory, 4))
    with pytest.raises(StoreError, match="is not a checkpoint of a run"):
        generate(config, checkpoint=EMBEDDED / "arithmetic")


def test_a_run_is_evaluated_as_it_was_trained(tiny_run: RunConfig) -> None:
    recorded = read_jsonl(tiny_run.directory / "eval.jsonl")
    newest = evaluate(tiny_run.directory)
    assert (newest.version, newest.prompts, newest.samples) == (4, 8, 2)
    assert newest.record()["accuracy"] == recorded[-1]["accuracy"]
    first = evaluate(checkpoint_directory(tiny_run.directory, 0))
    assert (first.version, first.record()["accuracy"]) == (0, recorded[0]["accuracy"])
    embedded = evaluate("arithmetic", prompts=8, samples=2, max_new_tokens=8)
    assert embedded.accuracy == first.accuracy
    assert evaluate(tiny_run.directory, prompts=3, samples=1).prompts == 3
    assert read_jsonl(tiny_run.directory / "eval.jsonl") == recorded  # nothing is written


def test_a_model_is_evaluated_on_the_task_that_is_named(tiny_run: RunConfig, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="name the task to evaluate it on"):
        evaluate(EMBEDDED / "arithmetic")
    with pytest.raises(ModelError, match="is not a directory"):
        evaluate(tmp_path / "none", task="arithmetic")
    with pytest.raises(TaskError, match="has no option 'terms'"):
        evaluate("arithmetic", options={"terms": 3})
    rows = [{"problem": f"{a}+{a}=", "answer": "nothing that it could say"} for a in range(10, 30)]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    options = {"path": str(path), "verifier": "exact"}
    other = evaluate(tiny_run.directory, task="jsonl", options=options, prompts=2, samples=2)
    assert (other.task, other.prompts, other.accuracy.value) == ("rows", 2, 0)


PUBLIC = ["RunConfig", "RunResult", "evaluate", "evaluate_suites", "fork", "generate", "learn", "load_config"]
PUBLIC += ["make_config", "objective", "report", "rescore", "run", "train"]


def test_verbs_take_paths_and_show_their_progress(
    tiny_run: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tiny_record(tmp_path, schedule={"updates": 1, "stages": 1}, evaluation={"prompts": 2, "samples": 1})
    path = write_config(tmp_path / "first.toml", record)
    result = run(str(path))
    assert "generate: 16/16 rollouts" in capsys.readouterr().err
    assert run(result.directory).accuracy == result.accuracy
    assert "1 of 1 updates are made" in capsys.readouterr().err
    run(path, NullCallback())
    learned = stalewise.learn(make_config({**record, "name": "learned"}), rollouts=str(result.directory))
    assert learned.updates == 1
    assert "learn: 1/1 updates" in capsys.readouterr().err
    assert stalewise.report(str(learned.directory), str(tmp_path / "page.html")) == tmp_path / "page.html"
    evaluate(str(result.directory))
    assert "evaluate: 2/2 responses" in capsys.readouterr().err
    stalewise.rescore(result.directory)
    assert "rescore: 16/16" in capsys.readouterr().err


def test_mistakes_in_a_call_are_one_message(tiny_run: RunConfig, tmp_path: Path) -> None:
    given: Any = {"name": "a"}
    with pytest.raises(
        ConfigError, match=r"config has type dict: expected .*; stalewise.make_config makes one of a dict"
    ):
        run(given)
    with pytest.raises(ConfigError, match=r"first.toml does not exist"):
        run("first.toml")
    no_callback: Any = print
    with pytest.raises(
        ConfigError, match=r"callback=<built-in function print> has no method begin: .*ProgressCallback"
    ):
        stalewise.train("embedded:arithmetic", task="arithmetic", runs=str(tmp_path), callback=no_callback)
    with pytest.raises(ConfigError, match="samples=0: expected at least 1"):
        evaluate(tiny_run.directory, samples=0)
    rows = [{"prompt": f"{a}+1=", "answer": str(a + 1)} for a in range(10, 40)]
    with pytest.raises(StoreError, match="cannot write /proc/foo/"):
        stalewise.train("embedded:arithmetic", rows, "exact", runs="/proc/foo")
    newest = checkpoint_directory(tiny_run.directory, 4)
    with pytest.raises(ModelError, match=f"is a run directory, not a model: pass its newest checkpoint, {newest}$"):
        stalewise.train(str(tiny_run.directory), rows, "exact", runs=str(tmp_path))


def test_the_package_shows_its_public_interface_and_nothing_else() -> None:
    assert dir(stalewise) == [*PUBLIC[:2], "__version__", *PUBLIC[2:]]
    values = [getattr(stalewise, name) for name in PUBLIC]
    assert all(callable(value) and not inspect.ismodule(value) for value in values)
    assert all(value.__doc__ for value in values)
    with pytest.raises(AttributeError, match="module 'stalewise' has no attribute 'nothing'"):
        _ = stalewise.nothing


def test_help_shows_the_parameters_of_a_verb() -> None:
    shown = pydoc.plain(pydoc.render_doc(stalewise.run))
    assert "run(config: 'RunConfig | str | Path', callback: 'ProgressCallback | None' = None, *, say_plan" in shown
    assert "Train as the config says" in shown
    assert list(inspect.signature(stalewise.learn).parameters) == [
        "config",
        "rollouts",
        "checkpoint",
        "unused",
        "rewards",
        "callback",
    ]


def test_importing_the_package_is_light_and_verbs_stay_functions_whatever_is_imported() -> None:
    code = """
import sys, stalewise
assert not {"torch", "pydantic", "numpy"} & set(sys.modules), "import stalewise is heavy"
assert stalewise.make_config({}).name == "run" and "torch" not in sys.modules
import stalewise.config, stalewise.store, stalewise.tasks, stalewise.reporting.render
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for module in ("rollout.generate", "orchestrator.evaluation", "trainer.trainer", "reporting.render"):
        import_module(f"stalewise.{module}")
    for verb in (stalewise.run, stalewise.generate, stalewise.learn, stalewise.evaluate, stalewise.report):
        assert type(verb).__name__ == "function", verb


def test_the_old_name_of_the_callback_warns_and_works(tiny_run: RunConfig) -> None:
    old: Any = stalewise.evaluate
    begun: list[str] = []

    class Recorder(NullCallback):
        def begin(self, what: str, total: int) -> None:
            begun.append(what)

    with pytest.warns(DeprecationWarning, match=r"stalewise.evaluate\(watcher=…\) is deprecated: use callback=…"):
        old(tiny_run.directory, prompts=2, samples=1, watcher=Recorder())
    assert begun == ["evaluate"]


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        ("checkpoints", "store.checkpoints", "read_state"),
        ("compare", "reporting.compare", "compare"),
        ("diagnostics", "objectives.diagnostics", "token_sums"),
        ("files", "store.atomic", "RunLock"),
        ("generate.loop", "rollout.generate", "generate_batch"),
        ("hub", "integrations.hub", "export_policy"),
        ("staleness.step_control", "objectives.batch_statistics", "vcpo_factor"),
        ("workers.worker", "rollout.workers.worker", "work"),
    ],
)
def test_module_paths_of_earlier_documents_warn_and_work(old: str, new: str, name: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"stalewise.{old} has moved: import stalewise.{new}"):
        found = getattr(import_module(f"stalewise.{old}"), name)
    assert found is getattr(import_module(f"stalewise.{new}"), name)


def test_where_the_documents_find_the_directory_of_a_model() -> None:
    from stalewise.models import resolve_model

    assert resolve_model("arithmetic") == str(EMBEDDED / "arithmetic")


def test_the_verbs_do_what_the_functions_do(tiny_run: RunConfig) -> None:
    assert stalewise.run(tiny_run).updates == 4
    assert stalewise.generate(tiny_run) == []
    assert stalewise.evaluate(tiny_run.directory, prompts=2, samples=1).version == 4
    with pytest.raises(StoreError):
        stalewise.learn(tiny_run, [tiny_run.directory])
