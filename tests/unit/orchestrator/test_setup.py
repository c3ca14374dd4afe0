"""How a run starts: recipe and learning rate."""

from __future__ import annotations

import json
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from callbacks import Listener, StopAt
from stalewise.api import run
from stalewise.config import RunConfig, make_config
from stalewise.config.run_directory import read_config
from stalewise.config.sections import ObjectiveSection
from stalewise.errors import ConfigError
from stalewise.models import EMBEDDED, resolve_model
from stalewise.orchestrator import setup as module
from stalewise.orchestrator.preflight import check_objective, examine
from stalewise.orchestrator.run_log import RunLog
from stalewise.orchestrator.setup import (
    changed_files,
    check_vllm_room,
    drift_limits,
    log_changed_files,
    log_move,
    rate_warning,
    write_first_checkpoint,
)
from stalewise.planning.memory import MemoryEstimate
from stalewise.reporting.read import read_run
from stalewise.reporting.summary import summarize
from stalewise.store.atomic import read_json, write_json_atomic
from stalewise.store.checkpoints import checkpoint_directory
from stalewise.store.json_lines import read_jsonl
from tiny import tiny_record


def test_the_recipe_fills_in_what_a_config_does_not_say() -> None:
    auto = make_config({"recipe": "auto"})
    assert (auto.schedule.end, auto.guard.action, auto.plan.learning_rate) == (
        "spent",
        "halve",
        "planned-if-calibrated",
    )
    own = make_config({"recipe": "auto", "schedule": {"stages": 2}, "guard": {"rollbacks": 1}, "plan": {"risk": 0.1}})
    assert (own.schedule.end, own.guard.action, own.guard.rollbacks) == ("count", "halve", 1)
    assert make_config(own.model_dump(mode="json")) == own
    with pytest.raises(ConfigError, match="recipe"):
        make_config({"recipe": "magic"})


def test_auto_is_an_engine_that_a_run_keeps(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listener, config = Listener(), make_config(tiny_record(runs, sampler={"engine": "auto"}))
    plain = make_config(tiny_record(runs, "plain"))
    assert config.identity() == {**plain.identity()}
    with pytest.raises(KeyboardInterrupt):
        run(config, StopAt(1))
    assert read_config(config.directory).sampler.engine == "hf"
    monkeypatch.setattr(module, "pick_engine", lambda *_: ("vllm", "installed since"))
    run(config, listener)
    assert "sampler.engine auto: hf, with which the run began" in listener.said
    run(plain)
    final = "checkpoints/v000004/model.safetensors"
    assert (config.directory / final).read_bytes() == (plain.directory / final).read_bytes()
    new = make_config(tiny_record(runs, "new", sampler={"engine": "auto"}))
    checks = {check.name: check for check in examine(new)}
    assert checks["engine"].detail == "auto: vllm, installed since"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    pipelined = {"kind": "pipelined", "updates": 4, "updates_per_generation": 2}
    two = make_config(tiny_record(runs, "two", sampler={"engine": "auto"}) | {"schedule": pipelined})
    found = next(check for check in examine(two) if check.name == "engine")
    assert found.status == "bad" and "a pipelined run has two engines" in found.detail


def test_the_recipe_trains_without_a_calibration_and_says_so(runs: Path) -> None:
    listener = Listener()
    config = make_config({**tiny_record(runs), "schedule": {"updates": 4}, "recipe": "auto"})
    assert run(config, listener).updates == 4
    assert any("optimizer.learning_rate stays 0.0003, as given: no calibration" in text for text in listener.said)


def test_the_parameters_of_an_objective_are_filled_in_or_refused() -> None:
    assert check_objective(ObjectiveSection(name="grpo", params={"clip_low": 0.1}))["clip_low"] == 0.1
    with pytest.raises(ConfigError, match=r"objective: .*did you mean grpo"):
        check_objective(ObjectiveSection(name="grpoo"))


def test_drift_limits_stay_as_they_were_when_training_began(runs: Path) -> None:
    config = make_config(tiny_record(runs))
    config.directory.mkdir(parents=True)
    assert drift_limits(config) is None  # no calibration
    write_json_atomic(config.directory / "limits.json", {"format": "stalewise.limits/1", "limits": [0.5, 2.0]})
    assert drift_limits(config) == (0.5, 2.0)


def test_a_learner_and_vllm_that_do_not_fit_on_one_gpu_are_refused(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = str(EMBEDDED / "arithmetic")
    needed = module.estimate(make_config(tiny_record(runs, sampler={"engine": "vllm"})), policy)
    assert needed is not None
    monkeypatch.setattr(module, "pick_device", lambda device: torch.device("cuda:0"))

    def estimated(config: RunConfig, source: str, *, alone: bool) -> MemoryEstimate:
        waits = needed.least if alone and config.learner.offload == "always" else 0
        return replace(needed, waits=waits, may_wait=needed.least if alone else 0)

    monkeypatch.setattr(module, "estimate", estimated)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 2 * needed.least))

    def check(share: float, world: int = 1, **learner: str) -> None:
        sampler = {"engine": "vllm", "vllm": {"gpu_memory_utilization": share}}
        check_vllm_room(make_config(tiny_record(runs, sampler=sampler, learner=learner)), policy, world)

    check(0.5)
    with pytest.raises(ConfigError, match=r"takes 60%.* set sampler.vllm.gpu_memory_utilization to 0.5 or less"):
        check(0.6)
    check(0.9, offload="always")  # the learner waits in host memory while vLLM samples
    with pytest.raises(ConfigError, match=r"to 0.5 or less, set learner.offload = .always., train adapters"):
        check(0.6)
    with pytest.raises(ConfigError, match=r"to 0.5 or less, train adapters"):  # of several ranks none waits
        check(0.6, world=2, offload="always")
    with pytest.raises(ConfigError, match=r"does not fit for sampling: .* 5% of .* \(the trainer leaves 50%\)"):
        check(0.05)  # the weights are an eighth or a sixteenth of all, in float32 or bfloat16
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, needed.least))
    with pytest.raises(ConfigError, match=r"while vLLM samples: train adapters"):
        check(0.3, world=2)
    check_vllm_room(make_config(tiny_record(runs)), policy)


def test_what_learning_needs_must_fit_beside_a_vllm_that_stays(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer of 25 GB that takes 38 more while it learns, on 150 GB: 63 are .42 of them, and 25 are .17."""
    policy, gigabyte = str(EMBEDDED / "arithmetic"), 10**9
    made = module.estimate(make_config(tiny_record(runs, sampler={"engine": "vllm"})), policy)
    assert made is not None
    sizes = {"certain": {"weights": 25 * gigabyte}, "learning": {"activations": 38 * gigabyte}, "sampling": {}}
    needed = replace(made, shape=replace(made.shape, parameters=1_500_000_000), **sizes)
    monkeypatch.setattr(module, "pick_device", lambda device: torch.device("cuda:0"))
    total = [150 * gigabyte]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, total[0]))

    def estimated(config: RunConfig, source: str, *, alone: bool) -> MemoryEstimate:
        may_wait = 25 * gigabyte if alone else 0
        return replace(needed, may_wait=may_wait, waits=may_wait if config.learner.offload == "always" else 0)

    monkeypatch.setattr(module, "estimate", estimated)

    def check(share: float, stays: str = "stay", world: int = 1, **learner: str) -> None:
        section = {"gpu_memory_utilization": share, "while_learning": stays}
        sampler = {"engine": "vllm", "vllm": section}
        check_vllm_room(make_config(tiny_record(runs, sampler=sampler, learner=learner)), policy, world)

    check(0.58)
    check(0.8, "sleep")
    check(0.8, "drop")
    check(0.8, "close")
    small = "set sampler.vllm.gpu_memory_utilization to 0.58 or less, "
    asleep = 'set sampler.vllm.while_learning = "sleep"'
    with pytest.raises(ConfigError) as refused:
        check(0.8)
    assert str(refused.value) == (
        "sampler.vllm takes 80% of the 139.7 GiB of cuda:0, and the trainer needs 58.7 GiB of them while it learns, "
        f"when vLLM keeps its share (while_learning = stay): {small}{asleep}, train adapters (model.lora.rank), or "
        "choose a smaller model or a larger device"
    )
    with pytest.raises(ConfigError, match=r"58.7 GiB .* or less, set sampler.vllm.while_learning = .sleep., train"):
        check(0.8, offload="always")  # all of it is on the GPU while it learns
    with pytest.raises(ConfigError, match=f"{small}{asleep} with learner.offload = .always., train adapters"):
        check(0.9)  # 135 + 25 are more than 150
    with pytest.raises(ConfigError, match=f"{small}train adapters"):
        check(0.9, world=2)
    total[0] = 64 * gigabyte  # of .01 vLLM cannot run
    with pytest.raises(ConfigError, match=f": {asleep}, train adapters"):
        check(0.5)
    total[0] = 60 * gigabyte  # too little to learn without vLLM
    with pytest.raises(ConfigError, match=": train adapters"):
        check(0.5)


@pytest.mark.parametrize("lora", [{}, {"lora": {"rank": 2}}])
def test_version_0_has_weights_of_the_type_that_is_trained(lora: dict[str, Any], runs: Path) -> None:
    config = make_config(tiny_record(runs, model={"precision": "bfloat16-only", **lora}))
    write_first_checkpoint(config, resolve_model(config.model.path, config.task.name), config.make_task(), print)
    first = checkpoint_directory(config.directory, 0)
    assert {tensor.dtype for tensor in load_file(first / "model.safetensors").values()} == {torch.bfloat16}
    if lora:  # adapters are never rounded
        adapters = load_file(first / "adapter" / "adapter_model.safetensors").values()
        assert {tensor.dtype for tensor in adapters} == {torch.float32}


def test_a_run_that_moves_to_another_device_says_so(tmp_path: Path) -> None:
    heard: list[str] = []
    file = tmp_path / "environment.json"
    log_move(tmp_path, {"device": "cpu", "threads": 2}, heard.append)
    write_json_atomic(file, {"device": "cpu", "threads": 1}, sealed=True)
    log_move(tmp_path, {"device": "cpu", "threads": 2}, heard.append)  # nothing has begun
    (tmp_path / "checkpoints" / "v000000").mkdir(parents=True)
    log_move(tmp_path, {"device": "cpu", "threads": 1}, heard.append)
    assert heard == []
    log_move(tmp_path, {"device": "cpu", "threads": 2}, heard.append)
    log_move(tmp_path, {"device": "NVIDIA H200", "threads": 1}, heard.append)
    rest = "from here on its numbers round differently"
    assert heard == [
        f"this run was on cpu with 1 thread(s) and continues on cpu with 2 thread(s): {rest}",
        f"this run was on cpu with 1 thread(s) and continues on NVIDIA H200: {rest}",
    ]
    file.write_text("{")
    log_move(tmp_path, {"device": "NVIDIA H200", "threads": 1}, heard.append)  # damaged, and about to be written anew
    assert len(heard) == 2


def test_a_run_says_that_its_data_or_reward_function_changed(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    rows, rewards, listener = tmp_path / "rows.jsonl", tmp_path / "rewards_that_change.py", Listener()
    rows.write_text("".join(f'{{"problem": "{one}+1=", "answer": "{one + 1}"}}\n' for one in range(8)))
    rewards.write_text("def parity(response):\n    return float(len(response) % 2)\n")
    function = {"function": "rewards_that_change:parity", "workers": 1}
    options = {"path": str(rows), "verifier": "python", "verifier_options": function}
    record = tiny_record(runs, task={"name": "jsonl", "options": options}, model={"path": "arithmetic", "check": "off"})
    config = make_config({**record, "schedule": {"kind": "synchronous", "updates": 3, "updates_per_generation": 1}})
    for update in (0, 1):
        with pytest.raises(KeyboardInterrupt):
            run(config, StopAt(update))
    rewards.write_text("def parity(response):\n    return float(len(response) % 2 == 0)\n")
    run(config, listener)
    (said,) = (text for text in listener.said if "changed since this run last started" in text)
    assert said.startswith("rewards_that_change:parity (task.options.verifier_options.function) changed since")
    (changes,) = read_run(config.directory).config_changes
    (before, after) = changes["changes"]["content of task.options.verifier_options.function"]
    assert changes["version"] == 1 and before != after
    rewards.write_text("def parity(response):\n    return 1.0\n")
    run(config, listener)  # it has ended, so nothing comes from the file any more
    assert len(read_run(config.directory).config_changes) == 1


@pytest.mark.parametrize(
    "damaged", [None, [], "", {"path": "abc"}, {"path": {"file": "a"}}, {"path": {"file": "a", "sha256": 1}}, {}]
)
def test_of_a_file_without_a_digest_of_before_nothing_is_known(damaged: Any) -> None:
    assert changed_files(damaged, {"path": {"file": "a", "sha256": "1"}}) == {}


def test_only_the_content_of_the_same_file_changes() -> None:
    before = {"path": {"file": "a", "sha256": "1"}, "evaluation_path": {"file": "b", "sha256": "2"}}
    now = {"path": {"file": "c", "sha256": "3"}, "evaluation_path": {"file": "b", "sha256": "4"}}
    assert changed_files(before, now) == {"evaluation_path": ("2", "4")}


def test_rollouts_without_a_checkpoint_are_begun_too(tmp_path: Path) -> None:
    """As `stalewise generate --checkpoint` makes them."""
    run_log, heard = RunLog(tmp_path), list[str]()
    (tmp_path / "rows.jsonl").write_text("{}")
    batch = tmp_path / "rollouts" / "g000000-v000000"
    batch.mkdir(parents=True)
    options, file = {"path": str(tmp_path / "rows.jsonl")}, tmp_path / "environment.json"
    write_json_atomic(file, {"task_files": log_changed_files(options, run_log, 4, heard.append)}, sealed=True)
    log_changed_files(options, run_log, 4, heard.append)
    assert heard == []
    assert read_json(file)["task_files"]["path"]["sha256"] == sha256(b"{}").hexdigest()
    (tmp_path / "rows.jsonl").write_text("{ }")
    log_changed_files(options, run_log, 4, heard.append)
    assert len(heard) == 1 and heard[0].startswith(
        f"{tmp_path / 'rows.jsonl'} (task.options.path) changed since this run"
    )
    assert [line["version"] for line in read_jsonl(tmp_path / "journal.jsonl")] == [0]
    file.write_text("{")
    log_changed_files(options, run_log, 4, heard.append)  # damaged, and about to be written anew
    assert len(heard) == 1


def test_a_learning_rate_for_small_models_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rate_warning(1e-4, 494_000_000) == (
        "optimizer.learning_rate is 1e-4, which suits adapters and small models: a full model of 494 M parameters is "
        "usually trained with 1e-6 to 4e-6"
    )
    assert rate_warning(4e-6, 494_000_000) == rate_warning(1e-3, 10_000_000) == ""
    monkeypatch.setattr("stalewise.orchestrator.setup.SMALL_MODEL", 100_000)
    record = tiny_record(tmp_path, optimizer={"learning_rate": 1e-4})
    config, said = make_config(record), []
    source = resolve_model(config.model.path, config.task.name)
    write_first_checkpoint(config, source, config.make_task(), said.append)
    assert [text.partition(",")[0] for text in said] == ["optimizer.learning_rate is 1e-4"]
    checks = {check.name: check for check in examine(config)}
    assert (checks["learning rate"].status, checks["learning rate"].detail) == ("warning", said[0])
    adapters = make_config({**record, "name": "adapters", "model": {"path": "auto", "lora": {"rank": 4}}})
    write_first_checkpoint(adapters, source, config.make_task(), said.append)
    assert sum("learning_rate" in text for text in said) == 1


def test_fewer_held_out_prompts_than_asked_for_are_said_once_at_the_start(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"problem": f"{a}+{a}=", "answer": str(2 * a)}) + "\n" for a in range(10, 50)))
    task = {"name": "jsonl", "options": {"path": str(rows)}}
    config = make_config(tiny_record(tmp_path, model={"path": "arithmetic"}, task=task))
    held_out = len(config.make_task().evaluation_prompts(8))
    assert 0 < held_out < 8
    said = f"evaluation.prompts is 8, but rows holds out {held_out}: accuracy is measured on those"
    for there in (1, 0):  # a run that goes on has said it
        listener = Listener()
        run(config, listener)
        assert sum(text.startswith(said) for text in listener.said) == there
    assert [text for text in summarize(read_run(config.directory)).warnings if text.startswith(said)]
    enough = make_config(tiny_record(tmp_path, "enough"))
    run(enough, listener)
    assert not [text for text in listener.said if "holds out" in text]
