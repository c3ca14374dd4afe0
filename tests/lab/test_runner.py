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
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from experiments.lab import raw_logprobs, run_job, worker
from experiments.lab.__main__ import UNFINISHED, main
from experiments.lab.definition import Job, load_experiments
from experiments.lab.downsample import downsampled
from experiments.lab.job_pool import JobPool, kept_path, policy_path
from experiments.lab.pages import import_results
from experiments.lab.plan import is_collapsed, next_jobs
from experiments.lab.raw_logprobs import RawLogprobs
from experiments.lab.results import LARGEST_BYTES, read_results, text_of
from experiments.lab.run_summary import early_norm_per_rate
from experiments.lab.runner import kept_results, record_machine

from stalewise.config import RunConfig, make_config
from stalewise.errors import ConfigError, ModelError
from stalewise.models import EMBEDDED
from stalewise.models.plain_forward import plain_logits
from stalewise.rollout.engines.embedded import HFSampler
from stalewise.rollout.mixed_policy import MixedPolicySampler
from stalewise.rollout.sampler import Request
from stalewise.store.atomic import write_json_atomic
from stalewise.store.json_lines import read_jsonl
from stalewise.trainer.trainer import Trainer
from stalewise.types import SamplerSettings
from tiny import tiny_record
from tiny_lab import HEAD, LAB, define

FROM_ANYWHERE = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
RUNNABLE = """
[lab]
base = "tiny"
task = "tiny"
rates = [1e-4, 1e-3, 1e-2]
seeds = [1, 1]
[[lab.arms]]
name = "auto"
set = { recipe = "auto", schedule = { kind = "staged" } }
[[lab.arms]]
name = "P3O, foreign"
rate = "of auto"
set = { objective = { name = "p3o" }, sampler = { foreign = { path = "policy:strong", share = 0.5 } } }
[[lab.arms]]
name = "P3O, raw"
rate = "of auto"
options = { pass_samples = 4, raw_logprobs = true }
set = { objective = { name = "p3o" }, sampler = { temperature = 1.2 } }
[[lab.arms]]
name = "lag"
rate = "set"
[lab.arms.set]
schedule = { kind = "pipelined", updates_per_generation = 1, lag = 1 }
objective = { name = "grpo" }
optimizer = { learning_rate = 1e-3 }
[[lab.arms]]
name = "broken"
rate = "set"
set = { model = { path = "no-such-directory" } }
"""


def lab(*words: object) -> tuple[int, str, str]:
    """`python -m experiments.lab …` in this process: exit status, stdout, stderr."""
    stdout, stderr = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        try:
            status = main(list(map(str, words)))
        except SystemExit as error:  # argparse
            status = int(str(error.code))
    return status, stdout.getvalue(), stderr.getvalue()


def test_the_verdict_of_one_claim_is_corrected_for_all_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def verdicts(*words: str) -> dict[str, Any]:
        assert main([*words, "--json"]) == (UNFINISHED if words else 0)
        return json.loads(capsys.readouterr().out)["experiments"]

    alone = verdicts("pass-at-k", "--deadline-s", "0", "--no-render", "--out", str(tmp_path))
    assert alone == {"pass-at-k": verdicts()["pass-at-k"]}


def test_no_job_is_begun_in_the_seconds_that_are_kept_for_others_to_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    define(tmp_path, RUNNABLE)
    places = ("--experiments", str(tmp_path / "experiments"), "--out", str(tmp_path / "out"), "--no-render", "--json")
    assert main(["tiny", "--deadline-s", "30", "--least-s", "40", *places]) == UNFINISHED
    found = json.loads(capsys.readouterr().out)
    assert found["jobs"] > 0 == found["done"]


def test_jobs_that_were_done_elsewhere_are_not_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    define(tmp_path, RUNNABLE)
    places = ("--experiments", str(tmp_path / "experiments"), "--no-render", "--json", "--deadline-s", "0")
    (experiment,) = load_experiments(tmp_path / "experiments")
    job = next(job for job in next_jobs([experiment], "lab", lambda key: None) if job.kind == "train")
    kept = kept_path(tmp_path / "elsewhere", job.key)
    kept.parent.mkdir(parents=True)
    kept.write_text(json.dumps({"ended": "", "evaluations": {"version": [0], "accuracy": [0.5]}, "cpu_seconds": 1.0}))
    out = tmp_path / "out"
    assert main(["tiny", "--kept", str(kept.parent), "--out", str(out), *places]) == UNFINISHED
    assert json.loads(capsys.readouterr().out)["done"] == 1 and kept_path(out, job.key).is_file()
    assert "there are no results of jobs" in refused("tiny", "--kept", tmp_path / "none", "--out", out, *places)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "machine-lab.json").write_text("{}")
    assert "machine-lab.json is no result" in refused("tiny", "--kept", tmp_path / "other", "--out", out, *places)
    planned = lab("tiny", "--kept", kept.parent, "--out", tmp_path / "new", *places[:2], "--plan")
    assert planned[1].splitlines()[1].split()[-1] == "1"


def test_results_of_experiments_are_taken_over_unless_their_settings_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def done(out: str, *words: str) -> int:
        places = ("--experiments", str(root), "--out", str(tmp_path / out), "--no-render", "--json")
        assert main(["tiny", "--deadline-s", "0", *words, *places]) == UNFINISHED
        return json.loads(capsys.readouterr().out)["done"]

    root, first = tmp_path / "experiments", tmp_path / "first"
    (experiment,) = define(tmp_path, RUNNABLE)
    made: set[str] = set()
    for _ in range(2):  # tuning, then what is judged at its rates
        jobs = next_jobs([experiment], "lab", kept_results(first))
        for job in (job for job in jobs if job.kind == "train" and job.key not in made):
            accuracy = 0.9 if job.config["optimizer"]["learning_rate"] == 1e-3 else 0.5
            result = {"kind": "train", "ended": "", "evaluations": {"version": [0, 1], "accuracy": [0.4, accuracy]}}
            write_json_atomic(kept_path(first, job.key), {**result, "cpu_seconds": 1.0, "wall_seconds": 2.0})
            made.add(job.key)
    assert done("first") == len(made) == 11  # six trials, five arms
    (first / "tiny" / "results-lab.json").rename(root / "tiny" / "results-lab.json")
    assert done("second", "--kept", str(root)) == 11
    kept = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "second" / "kept").glob("*.json")}
    assert kept.keys() == made and all(one["wall_seconds"] == 2.0 and "key" not in one for one in kept.values())
    bases = root / "bases.toml"
    bases.write_text(bases.read_text().replace("updates = 2", "updates = 3"))
    assert done("third", "--kept", str(root)) == 0


def test_a_worker_whose_job_failed_frees_its_memory_when_the_error_is_handled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[weakref.ref[Any]] = []

    def fails(job: object, out: Path, workers: int) -> None:
        tensor = torch.zeros(8)
        held.append(weakref.ref(tensor))
        raise ModelError("out of memory")

    def freed() -> None:
        assert held[-1]() is None  # no frame holds it any more
        raise KeyboardInterrupt  # ends the loop

    monkeypatch.setattr(run_job, "run_job", fails)
    monkeypatch.setattr(run_job, "free_memory", freed)
    monkeypatch.setattr(worker.os, "fdopen", lambda *_, **__: io.StringIO())
    monkeypatch.setattr(worker.os, "dup", lambda number: number)
    monkeypatch.setattr(worker.os, "dup2", lambda *_: None)
    monkeypatch.setattr(worker.gc, "freeze", lambda: None)
    monkeypatch.setattr(worker, "_listen", lambda jobs: [jobs.put(line) for line in ('{"key": "a"}', "no more jobs")])
    with pytest.raises(KeyboardInterrupt):
        worker.main(tmp_path, 2)


def test_samplers_that_share_a_gpu_count_with_their_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10 << 30, 120 << 30))
    sampler = HFSampler(SamplerSettings(), max_new_tokens=8, device=torch.device("cpu"), dtype=torch.float32)
    run_job.leave_room(sampler, 1)
    assert np.isinf(sampler.most_bytes)
    run_job.leave_room(sampler, 4)
    assert sampler.most_bytes == run_job.SAMPLERS_SHARE * (120 << 30) / 4
    second = HFSampler(SamplerSettings(), max_new_tokens=8, device=torch.device("cpu"), dtype=torch.float32)
    run_job.leave_room(MixedPolicySampler(sampler, second), 4)
    assert sampler.most_bytes == second.most_bytes == run_job.SAMPLERS_SHARE * (120 << 30) / 8


def test_the_first_evaluation_is_shared_by_runs_that_sample_alike_alone(tmp_path: Path) -> None:
    def path(**sections: Any) -> Path:
        return run_job.first_path(make_config(tiny_record(tmp_path, **sections)), tmp_path)

    assert path() == path(optimizer={"learning_rate": 1.0}) == path(sampler={"temperature": 1.2})
    others = [{"sampler": {"weights": "int8"}}, {"sampler": {"max_new_tokens": 4}}, {"evaluation": {"samples": 3}}]
    assert len({path(), *(path(**one) for one in others)}) == 4


def refused(*words: object) -> str:
    status, stdout, stderr = lab(*words)
    assert (status, stdout) == (2, "")
    return stderr


def start(root: Path, *more: str) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-m", "experiments.lab", "tiny", "--workers", "1", "--out", "out", "--no-render", "--json"]
    return subprocess.Popen(
        [*words, *more], cwd=root, env=FROM_ANYWHERE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )


@pytest.fixture(scope="module")
def reproduced(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A tiny experiment, tuned and judged."""
    root = tmp_path_factory.mktemp("checkout")
    define(root, RUNNABLE)
    (root / "docs").mkdir()
    words = ("--workers", "1", "--out", root / "out", "--experiments", root / "experiments", "--no-render", "--json")
    _, stdout, _ = lab("tiny", *words)
    return root, json.loads(stdout)


@pytest.mark.nightly
def test_a_command_that_was_killed_goes_on_and_does_nothing_twice(tmp_path: Path) -> None:
    define(tmp_path, RUNNABLE.split('[[lab.arms]]\nname = "P3O, foreign"')[0])  # one arm is enough
    process = start(tmp_path)
    deadline = time.monotonic() + 120
    while not list((tmp_path / "out" / "kept").glob("*.json")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    time.sleep(0.5)  # the worker sees that its input has ended
    before = {path.name: path.read_text() for path in (tmp_path / "out" / "kept").glob("*.json")}
    collected = json.loads(start(tmp_path, "--deadline-s", "0").communicate(timeout=120)[0])
    assert collected["done"] == len(before)  # no job was started, and what is done is in the results
    assert read_results(tmp_path / "out" / "tiny" / "results-lab.json") is not None
    answer, _ = start(tmp_path).communicate(timeout=300)
    unchanged = {name for name, text in before.items() if (tmp_path / "out" / "kept" / name).read_text() == text}
    assert unchanged == set(before)  # what was done is not done again
    assert 1 <= len(before) < json.loads(answer)["done"]


@pytest.mark.nightly
def test_every_job_is_done_but_the_broken_ones(reproduced: tuple[Path, dict[str, Any]]) -> None:
    _, answer = reproduced
    # 4 arms, the policy that others sample with, and the tuning: one arm × 2 seeds at each of 3 rates, or of more where
    # the grid was widened.
    tuning = answer["done"] - 5
    assert tuning >= 6 and tuning % 2 == 0 and answer["jobs"] == answer["done"] + 1
    assert len(answer["failed"]) == 1 and all("no-such-directory" in reason for reason in answer["failed"].values())


@pytest.mark.nightly
def test_results_hold_what_figures_and_verdicts_need(reproduced: tuple[Path, dict[str, Any]]) -> None:
    root, _ = reproduced
    results = read_results(root / "out" / "tiny" / "results-lab.json")
    assert results is not None and results.record["failed"].keys() == {"broken, seed 200"}
    tuning = results.tuning
    assert tuning["is_complete"] and tuning["best"]["auto"] in tuning["rates"] and tuning["seeds_run"] == 1
    arms = {arm.name: arm for arm in results.arms}
    assert arms["auto"].rate == arms["P3O, raw"].rate == tuning["best"]["auto"] and arms["lag"].rate == 1e-3
    run = arms["P3O, raw"].runs[200]
    assert run["evaluations"]["version"] == [0, 1, 2] and run["series"].keys() == {"ess"}
    assert set(run["pass_at"]) == {"1", "2", "4"} and "pass_at" not in arms["lag"].runs[200]
    assert run["cpu_seconds"] > 0 and results.record["cpu_seconds"] > run["cpu_seconds"]
    assert arms["lag"].runs[200]["generations"] == 2


@pytest.mark.nightly
def test_weights_and_rollouts_go_and_policies_for_others_stay(reproduced: tuple[Path, dict[str, Any]]) -> None:
    root, answer = reproduced
    assert {path.name for path in (root / "out" / "runs").iterdir()} <= set(answer["failed"])
    assert len(list((root / "out" / "policies").glob("*/model.safetensors"))) == 1


@pytest.mark.nightly
def test_the_command_renders_and_does_nothing_again(reproduced: tuple[Path, dict[str, Any]]) -> None:
    root, _ = reproduced
    experiments = root / "experiments"
    words = ("all", "--render-only", "--from", root / "out", "--experiments", experiments, "--json")
    status, stdout, _ = lab(*words)
    answer = json.loads(stdout)["experiments"]["tiny"]["lab"]
    assert status == 0 and answer["verdict"] == "cannot say" and "missing: auto and a single" in answer["ours"]
    page = (experiments / "tiny" / "README.md").read_text()
    assert "Rule, stated before these runs" in page and "broken, seed 200" in page and "(lab.svg)" in page
    assert (experiments / "tiny" / "lab-scores.svg").read_text().startswith("<svg")
    assert "| [1](../experiments/tiny/README.md) |" in (root / "docs" / "results.md").read_text()


@pytest.mark.nightly
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
    assert import_results(experiments, tmp_path / "trial", replace=True) == [] and kept.read_text() == trial
    assert import_results(experiments, root / "out") == [] and kept.read_text() == before  # as many, or more
    kept.write_text(json.dumps({"format": "stalewise.results/1", "done": 10**6}))  # superseded ones always give way
    assert import_results(experiments, root / "out") == [] and kept.read_text() == before


def test_a_policy_that_is_gone_is_made_again(tmp_path: Path) -> None:
    policy, run = Job("first", "policy", {}), Job("second", "train", {}, needs=("first",))
    kept_path(tmp_path, "first").parent.mkdir()
    kept_path(tmp_path, "first").write_text("{}")
    assert JobPool(lambda: [policy, run], tmp_path, workers=1).waiting == ["first", "second"]
    policy_path(tmp_path, "first").mkdir(parents=True)
    assert JobPool(lambda: [policy, run], tmp_path, workers=1).waiting == ["second"]


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


def test_equal_runs_of_two_experiments_are_made_once(tmp_path: Path) -> None:
    define(tmp_path)
    second = tmp_path / "experiments" / "second"
    second.mkdir()
    (second / "experiment.toml").write_text(HEAD.replace("number = 1", "number = 2") + LAB)
    experiments = load_experiments(tmp_path / "experiments")
    both, one = (next_jobs(some, "lab", lambda key: None) for some in (experiments, experiments[:1]))
    assert [job.key for job in both] == [job.key for job in one]


@pytest.mark.parametrize(
    ("lab", "part"),
    [
        (LAB.replace('base = "tiny"', 'base = "tinny"'), "did you mean tiny?"),
        (LAB.replace('rate = "of GRPO"', 'rate = "of GRP"'), "did you mean GRPO?"),
        (LAB.replace('rate = "of GRPO"', 'rate = "GRPO"'), "has the rate 'GRPO'"),
        (LAB.replace("rates = [1e-4, 1e-3, 1e-2]", "rates = [1e-3, 1e-2]"), "three values or more"),
        (LAB.replace("learning_rate", "learning_rat"), "did you mean learning_rate?"),
        (LAB.replace('name = "before"', 'name = "fixed"'), "the same name"),
        (LAB.replace("policy:strong", "policy:strog"), "did you mean strong?"),
        (LAB.replace("seeds = [2, 9]", "seeds = [2, 9]\nextra = 1"), "extra"),
    ],
)
def test_a_wrong_definition_is_refused(tmp_path: Path, lab: str, part: str) -> None:
    def result(key: str) -> dict[str, Any]:
        return {"ended": "", "evaluations": {"accuracy": [0.5]}}

    with pytest.raises(ConfigError, match=part.replace("?", r"\?")):
        next_jobs(define(tmp_path, lab), "lab", result)


def test_the_command_says_what_is_wrong(tmp_path: Path) -> None:
    define(tmp_path)
    root = tmp_path / "experiments"
    assert "no experiment tinny; did you mean tiny?" in refused("tinny", "--experiments", root)
    assert "invalid choice: 'x' (choose from" in refused("tiny", "--setting", "x", "--experiments", root)
    assert "has no setting real" in refused("tiny", "--setting", "real", "--experiments", root)
    assert "holds no experiment" in refused("all", "--experiments", tmp_path / "nowhere")
    assert "--smoke needs --no-render" in refused("tiny", "--smoke", "--experiments", root)


# ---------------------------------------------------------------- measuring


@pytest.mark.parametrize("tokens", [20, 8192])  # of a pass: one sequence, or all
def test_raw_log_probabilities_are_those_before_temperature(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    monkeypatch.setattr(raw_logprobs, "TOKENS", tokens)
    given = {"max_new_tokens": 6, "device": torch.device("cpu"), "dtype": torch.float32}
    hot = SamplerSettings(temperature=1.5)
    raw, tempered = RawLogprobs(hot, **given), HFSampler(hot, **given)
    for sampler in (raw, tempered):
        sampler.load(EMBEDDED / "arithmetic")
    texts = ("47+38=", "1+2=", "47+38=", "12+38=")
    requests = [Request(raw.tokenizer(text)["input_ids"], seed=seed) for seed, text in enumerate(texts)]
    for request, ours, theirs in zip(requests, raw.sample(requests), tempered.sample(requests), strict=True):
        assert np.array_equal(ours.token_ids, theirs.token_ids)  # the same distribution is sampled from
        logits_NV = plain_logits(raw._model, request.prompt_ids, ours.token_ids.tolist())
        place = (range(len(ours.token_ids)), ours.token_ids.tolist())
        assert ours.logp == pytest.approx(logits_NV.log_softmax(1)[place].numpy(), abs=1e-5)
        assert theirs.logp == pytest.approx((logits_NV / 1.5).log_softmax(1)[place].numpy(), abs=1e-5)
    plain = [sampler.sample(requests, SamplerSettings()) for sampler in (raw, tempered)]
    assert plain[0] == plain[1]


def test_drift_per_rate_is_that_of_updates_4_to_19_that_took_a_step() -> None:
    # Each step moves by 2η. Update 10 took none: 15 steps of 16 in the window, and the same ratio.
    rate, norm = np.full(40, 0.5), np.full(40, 1.0)
    rate[10] = norm[10] = np.nan
    rate[:4] = 0.1  # warm-up is outside of the window, and so is what comes after it
    norm[20:] = 100.0
    drift = np.where(np.isnan(norm), np.nan, np.nancumsum(norm))
    assert early_norm_per_rate(rate, drift) == 2.0
    assert early_norm_per_rate(rate[:19], drift[:19]) is None  # it ended before


def test_curves_are_thinned_to_means() -> None:
    assert downsampled(range(8), [float(i) for i in range(8)], 4) == [[0.5, 2.5, 4.5, 6.5], [0.5, 2.5, 4.5, 6.5]]


@pytest.mark.nightly
def test_kept_files_can_be_read_line_by_line(reproduced: tuple[Path, dict[str, Any]]) -> None:
    root, _ = reproduced
    record = json.loads((root / "out" / "tiny" / "results-lab.json").read_text())
    assert json.loads(text_of(record)) == record
    assert len(text_of(record)) < LARGEST_BYTES


def test_a_run_that_the_guard_ends_has_a_result(tmp_path: Path) -> None:
    ruinous = {"optimizer": {"learning_rate": 1.0}, "guard": {"action": "stop", "window": 4}}
    config = tiny_record(
        tmp_path, schedule={"updates": 12, "stages": 3}, evaluation={"every": 4, "prompts": 16, "samples": 2}, **ruinous
    )
    found = run_job._train(make_config(config), {}, tmp_path)
    assert "collapsed" in found["ended"] and is_collapsed(found)


def cut_off_at(version: int, config: RunConfig, out: Path) -> None:
    """Run it up to an update that fails."""
    enqueue = Trainer.enqueue

    def fail(trainer: Trainer, *arguments: Any) -> Any:
        if trainer.version == version:
            raise OSError("cut off")
        return enqueue(trainer, *arguments)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError, match="cut off"):
        patch.setattr(Trainer, "enqueue", fail)
        run_job._train(config, {}, out)
    assert (config.directory / "checkpoints").is_dir()


def test_runs_of_real_models_write_policies_alone_and_begin_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedules: list[dict[str, Any]] = [
        {"updates": 6, "stages": 3},
        {"kind": "pipelined", "updates": 6, "updates_per_generation": 2, "lag": 1},
    ]
    for number, schedule in enumerate(schedules):
        records = [
            tiny_record(tmp_path / f"{number}-{kind}", checkpoints={"every": 2, "keep": 9}, model={"check": "refuse"})
            | {"schedule": schedule}
            for kind in ("all", "policies")
        ]
        everything, policies = map(make_config, records)
        expected = run_job._train(everything, {}, tmp_path)
        with monkeypatch.context() as there:
            there.setattr(run_job, "OF_REAL_MODELS", (policies.task.name,))
            cut_off_at(4, policies, tmp_path)
            found = run_job._train(policies, {}, tmp_path)  # what was left is removed
            assert {**found, "seconds": 0} == {**expected, "seconds": 0}
            (first,) = (tmp_path / "first").glob("*.json")
            assert json.loads(first.read_text())["version"] == 0
            journal = read_jsonl(policies.directory / "journal.jsonl")
            evaluated = [one["version"] for one in journal if one["event"] == "evaluate"]
            assert evaluated == ([0, 6] if number == 0 else [6])  # the second run takes the first evaluation over
            checks = [one for one in journal if one.get("reason") == "check"]
            assert "model.check is off" in checks[-1]["found"]  # the model was compared when this process first ran it
        directories = everything.directory, policies.directory
        files = [[path.name for path in each.glob("checkpoints/*/*.safetensors")] for each in directories]
        assert set(files[1]) == {"model.safetensors"} < set(files[0])
        assert files[0].count("model.safetensors") == len(files[1]) == 4
