"""The lab: from definitions to jobs, through the real command, to kept results. Nothing is simulated."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from experiments.lab.__main__ import main
from experiments.lab.bias import distance
from experiments.lab.definition import Job, load_experiments
from experiments.lab.downsample import downsampled
from experiments.lab.job_pool import JobPool, kept_path, warm_path
from experiments.lab.pages import import_results
from experiments.lab.results import LARGEST_BYTES, read_results, text_of
from experiments.lab.runner import ordered_jobs, record_machine

from stalewise.api import run
from stalewise.config import make_config
from stalewise.errors import ConfigError
from stalewise.store import batch_directories, open_batch
from stalewise.store.checkpoints import checkpoint_directory
from stalewise.trainer.trainer import Trainer
from tiny import tiny_record

FROM_ANYWHERE = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}

BASES = """
[tiny.task]
name = "arithmetic"
[tiny.model]
device = "cpu"
threads = 1
[tiny.schedule]
kind = "synchronous"
updates = 4
[tiny.batch]
prompts = 2
group_size = 4
[tiny.sampler]
max_new_tokens = 4
[tiny.evaluation]
every = 2
prompts = 8
samples = 2
"""
HEAD = """
number = 1
title = "A tiny one"
claim = "It runs."
verdict = "pass_at_k"
metrics = ["ess"]
[[sources]]
paper = "nobody"
place = "nowhere"
says = "nothing"
"""
LAB = """
[lab]
base = "tiny"
seeds = 2
[[lab.arms]]
name = "run of {method}"
set = { optimizer = { learning_rate = 1e-3 } }
[lab.arms.axes.method]
P3O = { objective = { name = "p3o" }, schedule = { updates_per_generation = 4 } }
GRPO = { objective = { name = "grpo" }, schedule = { updates_per_generation = 2 } }
[[lab.arms]]
name = "after {after}"
kind = "evaluate"
of = "run of {after}"
options = { prompts = 4, samples = 4 }
axes = { after = { P3O = {} } }
[[lab.arms]]
name = "before"
kind = "evaluate"
of = "run of P3O"
seeds = 1
options = { policy = "first", prompts = 4, samples = 4 }
[[lab.arms]]
name = "one stage with m2po"
kind = "learn"
of = "run of P3O"
seeds = 1
set = { objective = { name = "m2po" }, schedule = { updates_per_generation = 4 } }
[[lab.arms]]
name = "bias"
kind = "bias"
seeds = 1
options = { ages = [2, 4], prompts = 4 }
set = { objective = { name = "grpo" }, schedule = { updates_per_generation = 4 } }
[[lab.arms]]
name = "broken"
seeds = 1
set = { model = { path = "no-such-directory" }, schedule = { updates_per_generation = 4 } }
"""


def define(root: Path, lab: str = LAB, head: str = HEAD, name: str = "tiny") -> Path:
    directory = root / "experiments" / name
    directory.mkdir(parents=True)
    (root / "experiments" / "bases.toml").write_text(BASES)
    (directory / "experiment.toml").write_text(head + lab)
    return root / "experiments"


def lab(*words: object) -> tuple[int, str, str]:
    """`python -m experiments.lab …` in this process: exit status, stdout, stderr."""
    stdout, stderr = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        try:
            status = main(list(map(str, words)))
        except SystemExit as error:  # argparse
            status = int(str(error.code))
    return status, stdout.getvalue(), stderr.getvalue()


def refused(*words: object) -> str:
    status, stdout, stderr = lab(*words)
    assert (status, stdout) == (2, "")
    return stderr


def start(root: Path) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-m", "experiments.lab", "tiny", "--workers", "1", "--out", "out", "--no-render", "--json"]
    return subprocess.Popen(words, cwd=root, env=FROM_ANYWHERE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def reproduced(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A tiny experiment."""
    root = tmp_path_factory.mktemp("checkout")
    experiments = define(root)
    (root / "docs").mkdir()
    words = ("tiny", "--workers", "1", "--out", root / "out", "--experiments", experiments, "--no-render", "--json")
    _, stdout, _ = lab(*words)
    return root, json.loads(stdout)


@pytest.mark.nightly
def test_a_command_that_was_killed_goes_on_and_does_nothing_twice(tmp_path: Path) -> None:
    root = tmp_path
    define(root)
    process = start(root)
    deadline = time.monotonic() + 120
    while not list((root / "out" / "kept").glob("*.json")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    before = {path.name: path.read_text() for path in (root / "out" / "kept").glob("*.json")}
    time.sleep(0.5)  # the worker sees that its input has ended
    again = start(root)
    answer, _ = again.communicate(timeout=300)
    unchanged = {name for name, text in before.items() if (root / "out" / "kept" / name).read_text() == text}
    assert unchanged == set(before)  # what was done is not done again
    assert 1 <= len(before) < json.loads(answer)["jobs"]


def test_every_job_is_done_but_the_broken_one(reproduced: tuple[Path, dict[str, Any]]) -> None:
    _, answer = reproduced
    assert (answer["jobs"], answer["done"]) == (10, 9)
    assert len(answer["failed"]) == 1
    assert "no-such-directory" in next(iter(answer["failed"].values()))


def test_results_hold_what_figures_need(reproduced: tuple[Path, dict[str, Any]]) -> None:
    root, _ = reproduced
    results = read_results(root / "out" / "tiny" / "results-lab.json")
    assert results.record["failed"].keys() == {"broken, seed 1"}
    arm = results.arm("run of P3O")
    assert arm is not None and sorted(arm.runs) == [1, 2]
    run = arm.runs[1]
    assert run["evaluations"]["version"] == [0, 2, 4]
    assert len(run["series"]["ess"][0]) == 4 and run["series"].keys() == {"ess"}
    assert run["generations"] == 1 and run["training_seconds"] > 0
    after = results.arm("after P3O")
    assert after is not None and set(after.runs[1]["pass_at"]) == {"1", "2", "4"}
    stage = results.arm("one stage with m2po")
    assert stage is not None and stage.runs[1]["updates"] == 4
    bias = results.arm("bias")
    assert bias is not None
    assert {(row["age"], row["objective"]) for row in bias.runs[1]["rows"]} >= {(2, "P3O"), (4, "tight clip")}


def test_weights_and_rollouts_go_when_nobody_needs_them(reproduced: tuple[Path, dict[str, Any]]) -> None:
    root, _ = reproduced
    runs = list((root / "out" / "runs").iterdir())
    assert sum((run / "metrics.jsonl").is_file() for run in runs) == 6  # 4 runs, a stage learned again, and the bias
    assert not [path for run in runs for path in (run / "checkpoints", run / "rollouts") if path.exists()]


def test_the_command_renders_and_does_nothing_again(reproduced: tuple[Path, dict[str, Any]]) -> None:
    root, _ = reproduced
    experiments = root / "experiments"
    words = ("all", "--render-only", "--from", root / "out", "--experiments", experiments, "--json")
    status, stdout, _ = lab(*words)
    answer = json.loads(stdout)
    assert status == 0 and answer["experiments"]["tiny"]["lab"]["verdict"] in ("shown", "not shown", "opposite")
    page = (experiments / "tiny" / "README.md").read_text()
    assert "Rule, stated before these runs" in page and "broken, seed 1" in page and "(lab.svg)" in page
    assert (experiments / "tiny" / "lab.svg").read_text().startswith("<svg")
    assert "python -m experiments.lab tiny" in (root / "docs" / "results.md").read_text()


@pytest.mark.nightly
def test_jobs_that_failed_are_seen_in_the_exit_status(reproduced: tuple[Path, dict[str, Any]]) -> None:
    root, _ = reproduced
    words = ("tiny", "--workers", "1", "--out", root / "out", "--experiments", root / "experiments")
    status, _, stderr = lab(*words)
    assert status == 1 and "failed: " in stderr


@pytest.mark.nightly
def test_a_result_stays_until_the_run_that_others_need_again_is_made(
    reproduced: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """Without time for it, nothing may be lost; with time, the run is made again and then what needs it."""
    root, _ = reproduced
    jobs = ordered_jobs(load_experiments(root / "experiments"), "lab")
    stage = next(job for job in jobs if job.kind == "learn")
    chain = [job for job in jobs if job.key in (*stage.needs, stage.key)]
    shutil.copytree(root / "out" / "kept", tmp_path / "kept")
    kept_path(tmp_path, stage.key).unlink()
    assert JobPool(chain, tmp_path, workers=1, deadline_s=-1).run() == {}
    assert kept_path(tmp_path, stage.needs[-1]).is_file()
    assert not kept_path(tmp_path, stage.key).is_file()
    # A process killed in the middle of it leaves half a run, which must not count as complete.
    (tmp_path / "runs" / stage.needs[-1] / "checkpoints").mkdir(parents=True)
    assert set(JobPool(chain, tmp_path, workers=1).waiting) == {stage.needs[-1], stage.key}
    assert JobPool(chain, tmp_path, workers=2).run() == {}
    assert kept_path(tmp_path, stage.key).is_file()


def test_results_of_fewer_jobs_do_not_take_the_place_of_kept_ones(
    reproduced: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    root, _ = reproduced
    shutil.copytree(root / "experiments", tmp_path / "experiments")
    kept = tmp_path / "experiments" / "tiny" / "results-lab.json"
    shutil.copyfile(root / "out" / "tiny" / "results-lab.json", kept)
    before, record = kept.read_text(), json.loads(kept.read_text())
    (tmp_path / "trial" / "tiny").mkdir(parents=True)
    trial = text_of({**record, "done": record["done"] - 1})
    (tmp_path / "trial" / "tiny" / "results-lab.json").write_text(trial)
    experiments = load_experiments(tmp_path / "experiments")
    (sentence,) = import_results(experiments, tmp_path / "trial")
    assert f"it has {record['done']} jobs" in sentence and "--replace" in sentence
    assert kept.read_text() == before
    words = ("tiny", "--render-only", "--from", tmp_path / "trial", "--experiments", tmp_path / "experiments")
    stderr = lab(*words)[2]
    assert f"{tmp_path / 'trial' / 'tiny' / 'results-lab.json'}: " in stderr  # the verdict of the trial itself
    assert f"{record['done'] - 1} of {record['planned']} jobs done" in stderr and kept.read_text() == before
    assert import_results(experiments, tmp_path / "trial", replace=True) == [] and kept.read_text() == trial
    assert import_results(experiments, root / "out") == []  # as many, or more
    assert read_results(kept).done == record["done"]


def test_a_warm_start_whose_policy_is_gone_is_made_again(tmp_path: Path) -> None:
    warm = Job("first", "warm", {})
    run = Job("second", "train", {"model": {"path": "warm:sums"}}, needs=("first",))
    kept_path(tmp_path, "first").parent.mkdir()
    kept_path(tmp_path, "first").write_text("{}")
    assert JobPool([warm, run], tmp_path, workers=1).waiting == ["first", "second"]
    shutil.rmtree(tmp_path / "again")
    warm_path(tmp_path, "first").mkdir(parents=True)
    assert JobPool([warm, run], tmp_path, workers=1).waiting == ["second"]


def test_machines_of_all_processes_are_recorded(tmp_path: Path) -> None:
    for workers, seconds in ((4, 1.5), (2, 1.0), (4, 2.0)):
        machines = record_machine(tmp_path, "lab", workers, seconds)
    cores = os.cpu_count()
    assert machines == [
        {"cores": cores, "workers": 4, "seconds": 3.5},
        {"cores": cores, "workers": 2, "seconds": 1.0},
    ]


@pytest.mark.nightly
def test_makers_of_runs_import_neither_typer_nor_plotly() -> None:
    code = (
        "import sys, experiments.lab.run_job, experiments.lab.__main__; "
        "print([name for name in ('typer', 'plotly', 'rich') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout.strip() == "[]"


# ---------------------------------------------------------------- definitions


def test_equal_runs_are_made_once_and_seeds_come_in_order(tmp_path: Path) -> None:
    root = define(tmp_path)
    define_again = tmp_path / "experiments" / "second"
    define_again.mkdir()
    (define_again / "experiment.toml").write_text(HEAD.replace("number = 1", "number = 2") + LAB)
    experiments = load_experiments(root)
    assert [job.key for job in ordered_jobs(experiments, "lab")] == [
        job.key for job in ordered_jobs(experiments[:1], "lab")
    ]
    seeds = [job.config["seed"] for job in ordered_jobs(experiments, "lab") if job.kind == "train"]
    assert seeds == sorted(seeds) and set(seeds) == {1, 2}
    assert {job.config["seed"] for job in ordered_jobs(experiments, "lab", seeds=1)} == {1}


@pytest.mark.parametrize(
    ("lab", "part"),
    [
        (LAB.replace('base = "tiny"', 'base = "tinny"'), "did you mean tiny?"),
        (LAB.replace('of = "run of {after}"', 'of = "run of nobody"'), "did you mean run of"),
        (LAB.replace('name = "before"\nkind = "evaluate"\nof = "run of P3O"', 'name = "before"'), "extra"),
        (LAB.replace("learning_rate", "learning_rat"), "did you mean learning_rate?"),
        (LAB.replace('name = "before"', 'name = "after P3O"'), "the same name"),
    ],
)
def test_a_wrong_definition_is_refused(tmp_path: Path, lab: str, part: str) -> None:
    root = define(tmp_path, lab.replace("seeds = 2\n", "seeds = 2\nextra = 1\n") if part == "extra" else lab)
    with pytest.raises(ConfigError, match=part.replace("?", r"\?")):
        ordered_jobs(load_experiments(root), "lab")


def test_the_command_says_what_is_wrong(tmp_path: Path) -> None:
    root = define(tmp_path)
    assert "no experiment tinny; did you mean tiny?" in refused("tinny", "--experiments", root)
    assert "invalid choice: 'x' (choose from" in refused("tiny", "--setting", "x", "--experiments", root)
    assert "has no setting real" in refused("tiny", "--setting", "real", "--experiments", root)
    assert "holds no experiment" in refused("all", "--experiments", tmp_path / "nowhere")


# ---------------------------------------------------------------- measuring


def test_the_gradient_is_that_of_an_update_and_changes_nothing(tmp_path: Path) -> None:
    config = make_config(tiny_record(tmp_path, checkpoints={"keep": 8}))
    run(config)
    rows = open_batch(batch_directories(config.directory / "rollouts")[0])
    chosen = rows.take(np.sort(rows.column("rollout_id")))
    trainer = Trainer(config, checkpoint_directory(config.directory, 0))
    weights = [parameter.detach().clone() for parameter in trainer.names]
    gradient = trainer.gradient(chosen)
    assert all(torch.equal(a, b) for a, b in zip(weights, trainer.names, strict=True))
    assert float(gradient.double().norm()) == pytest.approx(trainer.update(chosen)["grad_norm"], rel=1e-5)


def test_bias_is_measured_across_halves() -> None:
    # s = (2, 0) and f = (1, 0), with noise of opposite sign in the halves: plain distances would count the noise.
    noise = torch.tensor([0.0, 1.0])
    s, f = torch.tensor([2.0, 0.0]), torch.tensor([1.0, 0.0])
    found = distance((s, s), (f, f))
    assert (found["bias"], found["cosine"], found["norm_ratio"]) == (1.0, 1.0, 2.0)
    apart = distance((s + noise, s), (f, f))  # noise in one half alone is gone from every product
    assert (apart["bias"], apart["norm_ratio"]) == (1.0, 2.0)


def test_curves_are_thinned_to_means() -> None:
    assert downsampled(range(8), [float(i) for i in range(8)], 4) == [[0.5, 2.5, 4.5, 6.5], [0.5, 2.5, 4.5, 6.5]]


def test_kept_files_can_be_read_line_by_line(reproduced: tuple[Path, dict[str, Any]]) -> None:
    root, _ = reproduced
    record = json.loads((root / "out" / "tiny" / "results-lab.json").read_text())
    assert json.loads(text_of(record)) == record
    assert len(text_of(record)) < LARGEST_BYTES
