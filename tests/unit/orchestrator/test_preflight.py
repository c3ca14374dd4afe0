"""The checks before a run: what they find, and what they skip."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from stalewise.config import make_config
from stalewise.orchestrator.preflight import _host_memory, examine, gold_response, installation
from stalewise.tasks import callables, make_task
from tiny import tiny_record


def test_a_config_that_will_run_passes_every_check(runs: Path) -> None:
    checks = {check.name: check for check in examine(make_config(tiny_record(runs)))}
    names = ["run directory", "task", "verifier", "objective", "device", "model directory", "memory", "disk"]
    names += ["host memory", "tokenizer", "model", "prompts", "first prompt", "sampling", "learning"]
    assert list(checks) == ["installation", *names]
    assert {check.status for check in checks.values()} == {"ok"}
    assert checks["run directory"].detail.endswith("tiny: a new run")
    assert not (runs / "tiny").exists()  # nothing is written


def test_the_first_checks_do_not_wait_for_torch_nor_the_next_ones_for_transformers() -> None:
    code = """
import sys
from stalewise.cli import tables
from stalewise.config import RunConfig
from stalewise.orchestrator.preflight import examine
for check in examine(RunConfig()):
    print(check.name, *{'torch', 'transformers', 'scipy'} & set(sys.modules), sep=',')
    if check.name == 'model directory':
        break
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines() == [
        *("installation", "run directory", "task", "verifier"),
        *("objective,torch", "device,torch", "model directory,torch"),
    ]


def test_what_depends_on_something_bad_is_skipped(runs: Path) -> None:
    config = make_config(tiny_record(runs, model={"path": str(runs / "none")}, objective={"name": "grpoo"}))
    checks = {check.name: check for check in examine(config)}
    assert checks["objective"].status == checks["model directory"].status == "bad"
    assert "did you mean grpo" in checks["objective"].detail
    assert not {"memory", "disk", "tokenizer", "model", "prompts", "sampling"} & set(checks)
    assert checks["verifier"].status == "ok"  # it needs no model


def test_what_a_run_would_warn_of_is_a_warning(runs: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"problem": "{a}+{a}=", "answer": "{2 * a}"}}\n' for a in range(10, 30)))
    task = {"name": "jsonl", "options": {"path": str(path), "held_out": 0.1}}
    more = {"schedule": {"updates": 10, "stages": 6}, "sampler": {"temperature": 0.7}}
    record = tiny_record(runs, model={"path": "arithmetic"}, task=task, **more)
    checks = {check.name: check for check in examine(make_config(record))}
    assert {checks[name].status for name in ("task", "schedule", "temperature")} == {"warning"}
    assert "2 held out, though evaluation.prompts is 8: each training prompt is used 2.2 times" in checks["task"].detail
    assert "10 updates make 5 stages" in checks["schedule"].detail
    assert "set objective.policy_temperature = 0.7" in checks["temperature"].detail


def test_a_package_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stalewise.orchestrator.preflight.requires", lambda name: ["numpy>=999", "no-such-package>=1"])
    (check,) = installation()
    assert check.status == "bad"
    assert "no-such-package is not installed: pip install --upgrade stalewise" in check.detail
    assert ">=999 is needed" in check.detail


def test_a_gold_response_is_the_answer_or_the_solution() -> None:
    task = make_task("arithmetic", seed=0)
    (prompt,) = task.prompts(0, 1)
    assert gold_response(task, prompt) == prompt.answer


def test_a_checkpoint_that_host_memory_does_not_hold_is_a_warning(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr("stalewise.orchestrator.preflight.fits_beside", asked.append)
    config = make_config(tiny_record(runs, optimizer={"moments": "int8"}))
    checks = {check.name: check for check in examine(config)}
    assert asked == [6 * 395_904]  # 4 bytes of a weight, 2 of its moments
    assert checks["host memory"].status == "warning"
    assert "each checkpoint is written while the run waits for it" in checks["host memory"].detail


def test_what_waits_in_host_memory_must_fit_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10 << 30))
    assert _host_memory(1 << 30, 0) == (
        "ok",
        "the copy of a checkpoint that is being written takes 1.00 GiB of host memory",
    )
    status, detail = _host_memory(1 << 30, 9 << 30)
    assert status == "warning" and "learner.offload takes 9.00 GiB for trainer and sampler" in detail
    status, detail = _host_memory(1 << 30, 11 << 30)
    assert status == "bad" and "10.00 GiB are free: choose a smaller model" in detail


def test_prompts_that_replace_others_are_counted(runs: Path) -> None:
    details: list[tuple[str, str]] = []
    for batch in ({"prompts": 4, "group_size": 2}, {"prompts": 4, "group_size": 2, "without_variance": "refill"}):
        checks = {check.name: check for check in examine(make_config(tiny_record(runs, batch=batch)))}
        details.append((checks["task"].detail, checks["disk"].detail))
    (needed, disk), (needed_with, disk_with) = details
    assert "training prompts, 16 needed" in needed and "training prompts, 48 needed" in needed_with
    assert disk.startswith("32 rollouts") and disk_with.startswith("96 rollouts")


@pytest.mark.parametrize("kind", ["reward", "task"])
def test_a_function_that_only_its_program_has_is_a_warning(
    kind: str, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callables, "_REGISTERED", {})  # as in the program of `stalewise doctor`
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"problem": "{a}+{a}=", "answer": "{2 * a}"}}\n' for a in range(10, 90)))
    rows = {"path": str(path), "verifier": "function", "verifier_options": {"function": "graded@123456789abc"}}
    task = {"name": "jsonl", "options": rows}
    if kind == "task":
        task = {"name": "python", "options": {"task": "Own@123456789abc"}}
    checks = {
        check.name: check for check in examine(make_config(tiny_record(runs, model={"path": "arithmetic"}, task=task)))
    }
    found = checks["verifier" if kind == "reward" else "task"]
    assert found.status == "warning"
    assert "exists only in the program that called stalewise.train" in found.detail
    assert not [check for check in checks.values() if check.status == "bad"]
    assert ("learning" in checks) == (kind == "reward")  # which needs prompts, and no rewards
