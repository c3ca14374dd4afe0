"""The engine vllm with its real processes and pipes, and a stand-in for vLLM in them (tests/fakes)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from policies import POLICY, furthest, moved, requests
from stalewise.api import run
from stalewise.config import make_config
from stalewise.config.sections import VllmSection
from stalewise.errors import ConfigError, EngineError, ModelError
from stalewise.rollout.engines.vllm import VllmSampler, device_groups, split
from stalewise.rollout.sampler import OffloadableSampler, Request
from stalewise.types import SamplerSettings
from tiny import tiny_record

FAKES = Path(__file__).parents[2] / "fakes"
Make = Callable[..., VllmSampler]


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return moved(POLICY, tmp_path_factory.mktemp("other") / "v000004", by=0.003)


@pytest.fixture(autouse=True)
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FAKES))  # for this process, which only looks whether vLLM is there
    monkeypatch.setenv("PYTHONPATH", f"{FAKES}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("FAKE_VLLM_NOTES", str(tmp_path / "notes.jsonl"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("stalewise.rollout.engines.vllm.reloads_tied_layers", lambda: True)  # the stand-in's does


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[VllmSampler] = []

    def one(settings: SamplerSettings | None = None, **options: Any) -> VllmSampler:
        section = VllmSection(**options)
        made.append(VllmSampler(settings or SamplerSettings(name="vllm"), max_new_tokens=6, options=section))
        return made[-1]

    yield one
    for sampler in made:
        sampler.close()


def notes(tmp_path: Path, *events: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (tmp_path / "notes.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] in events]


def test_responses_have_the_log_probabilities_of_what_was_sampled(make: Make, tmp_path: Path) -> None:
    told: list[int] = []
    settings = SamplerSettings(name="vllm", temperature=0.7, top_p=0.9, top_k=5)
    sampler = make(settings, max_model_len=100, gpu_memory_utilization=0.3, options={"enforce_eager": True})
    sampler.on_tokens = told.append
    sampler.load(POLICY)
    asked = requests(6)
    responses = sampler.sample(asked)
    assert furthest(asked, responses, POLICY, settings) < 1e-5
    assert sampler.sample(asked) == responses
    assert furthest(asked, sampler.sample(asked, SamplerSettings()), POLICY, SamplerSettings()) < 1e-5
    assert told[0] == sum(len(response.token_ids) for response in responses)
    (start,) = notes(tmp_path, "start")
    assert start["arguments"] == {
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "enable_sleep_mode": False,
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "dtype": "float32",
        "max_model_len": 100,
        "tensor_parallel_size": 1,
        "gpu_memory_utilization": 0.3,
        "enforce_eager": True,
    }
    with pytest.raises(
        ModelError, match=r"95 tokens; with sampler\.max_new_tokens = 6 that is over the model's context of 100"
    ):
        sampler.sample([Request([3] * 95, 0)])


def test_later_checkpoints_are_loaded_in_place(make: Make, other: Path, tmp_path: Path) -> None:
    sampler = make()
    sampler.load(POLICY)
    sampler.load(other)
    asked = requests(4)
    assert furthest(asked, sampler.sample(asked), other, SamplerSettings()) < 1e-5
    sampler.load(other)
    assert len(notes(tmp_path, "start")) == len(notes(tmp_path, "reload_weights")) == 1


def test_another_architecture_is_started_anew(make: Make, other: Path, tmp_path: Path) -> None:
    longer = moved(other, tmp_path / "longer", by=0.0)
    config = json.loads((longer / "config.json").read_text())
    (longer / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 256}))
    sampler = make()
    sampler.load(other)
    sampler.load(longer)
    assert [line["event"] for line in notes(tmp_path, "start", "reload_weights")] == ["start", "start"]


def test_a_tied_output_layer_is_not_trusted_to_vllm_on_a_cpu(
    make: Make, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stalewise.rollout.engines.vllm.reloads_tied_layers", lambda: False)
    sampler = make()
    sampler.load(POLICY)
    sampler.load(POLICY)
    sampler.load(other)
    assert [line["event"] for line in notes(tmp_path, "start", "reload_weights")] == ["start", "start"]


@pytest.mark.parametrize("fault", ["deaf", "held"])
def test_where_a_reload_does_not_work_the_engine_is_started_anew(
    fault: str, make: Make, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM_FAULTS", fault)  # keeps its weights, or its prefix cache
    sampler = make()
    sampler.load(POLICY)
    sampler.load(other)
    asked = requests(4)
    assert furthest(asked, sampler.sample(asked), other, SamplerSettings()) < 1e-5
    first, second = notes(tmp_path, "start")
    assert first["model"] == str(POLICY)
    assert second["model"] == str(other)
    assert list(tmp_path.glob("stalewise-vllm-*.log")) == [sampler._replicas[0].log]  # a reload that failed leaves none
    assert first["pid"] != second["pid"]
    assert not psutil.pid_exists(first["pid"])


def test_copies_share_the_requests(make: Make, tmp_path: Path) -> None:
    asked = [
        Request(request.prompt_ids, 10 * place + seed) for place, request in enumerate(requests(5)) for seed in (0, 1)
    ]
    alone, both = make(), make(copies=2)
    alone.load(POLICY)
    expected = alone.sample(asked)
    assert any(
        one.token_ids.tolist() != two.token_ids.tolist() for one, two in zip(expected[::2], expected[1::2], strict=True)
    )
    (tmp_path / "notes.jsonl").unlink()
    both.load(POLICY)
    assert both.sample(asked) == expected
    parts = [line["count"] for line in notes(tmp_path, "generate") if line["count"] > 2]
    assert sorted(parts) == [4, 6]
    assert len({line["pid"] for line in notes(tmp_path, "start")}) == 2


def test_requests_are_split_by_prompt_and_evenly() -> None:
    def numbered(*prompts: int) -> list[Request]:
        return [Request([prompt], seed) for seed, prompt in enumerate(prompts)]

    assert split(numbered(1, 1, 2, 2, 3, 3), 2) == [[0, 1, 4, 5], [2, 3]]
    assert split(numbered(1, 2, 3, 4), 3) == [[0, 3], [1], [2]]
    assert split(numbered(1, 1, 1), 1) == [[0, 1, 2]]
    assert split(numbered(1), 2) == [[0], []]
    assert split([], 2) == [[], []]


@pytest.mark.parametrize(
    ("visible", "count", "copies", "tensor_parallel", "groups"),
    [
        (None, 0, 0, 1, [[]]),
        (None, 0, 2, 1, [[], []]),
        (None, 4, 0, 1, [["0"], ["1"], ["2"], ["3"]]),
        ("4,6,7", 3, 0, 1, [["4"], ["6"], ["7"]]),
        ("4,6,7", 3, 0, 2, [["4", "6"]]),
        (None, 4, 1, 2, [["0", "1"]]),
    ],
)
def test_each_copy_has_its_own_gpus(
    visible: str | None,
    count: int,
    copies: int,
    tensor_parallel: int,
    groups: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert device_groups(copies, tensor_parallel) == groups


def test_each_process_sees_the_gpus_of_its_copy(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    make().load(POLICY)
    started = notes(tmp_path, "start")
    assert sorted(line["devices"] for line in started) == ["3", "5"]
    assert len({line["pid"] for line in started}) == 2


def test_more_copies_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with pytest.raises(ConfigError, match="needs 2 copies on 2 GPUs each, and there are 3"):
        device_groups(2, 2)
    with pytest.raises(ConfigError, match="needs 1 copies on 4 GPUs each, and there are 3"):
        device_groups(0, 4)


def test_vllm_begins_at_the_gpu_of_model_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert device_groups(0, 1, torch.device("cuda:2")) == [["2"]]
    assert device_groups(0, 2, torch.device("cuda:2")) == [["2", "3"]]
    assert device_groups(3, 1, torch.device("cuda:1")) == [["1"], ["2"], ["3"]]
    assert device_groups(0, 2, torch.device("cuda")) == [["0", "1"], ["2", "3"]]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "9,5,7,8")
    assert device_groups(0, 1, torch.device("cuda:1")) == [["5"]]
    with pytest.raises(ConfigError, match="needs 1 copies on 2 GPUs each from cuda:3 on, and there are 4"):
        device_groups(0, 2, torch.device("cuda:3"))
    with pytest.raises(ConfigError, match=r"samples on a GPU, and model\.device is cpu"):
        device_groups(0, 1, torch.device("cpu"))


@pytest.mark.parametrize("while_learning", ["sleep", "drop", "close", "stay"])
def test_what_the_engine_does_while_the_learner_works(
    while_learning: str, make: Make, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM_FAULTS", "gpu")
    sampler = make(while_learning=while_learning)
    assert isinstance(sampler, OffloadableSampler)
    sampler.load(POLICY)
    sampler.sleep()
    sampler.load(other)
    asked = requests(3)
    assert furthest(asked, sampler.sample(asked), other, SamplerSettings()) < 1e-5
    sampler.sleep()
    sampler.load(other)
    events = [line["event"] for line in notes(tmp_path, "start", "sleep", "wake", "reload_weights")]
    assert (
        events
        == {
            "sleep": ["start", "sleep", "wake", "reload_weights", "sleep", "wake"],
            "drop": ["start", "sleep", "wake", "reload_weights", "sleep", "wake", "reload_weights"],
            "close": ["start", "start", "start"],
            "stay": ["start", "reload_weights"],
        }[while_learning]
    )
    assert notes(tmp_path, "start")[0]["arguments"]["enable_sleep_mode"] == (while_learning in ("sleep", "drop"))
    assert {line["level"] for line in notes(tmp_path, "sleep")} <= {2 if while_learning == "drop" else 1}
    assert furthest(asked, sampler.sample(asked), other, SamplerSettings()) < 1e-5


def test_a_start_that_fails_is_one_message_with_the_log(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM_FAULTS", "refuse")
    with pytest.raises(EngineError, match=r"vLLM: ValueError: no kernel for this \(its log: (.*)\)") as failed:
        make(copies=2).load(POLICY)
    log = str(failed.value).partition("its log: ")[2].rstrip(")")
    assert Path(log).is_file()


def test_a_death_in_the_middle_is_one_message_with_its_last_words(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_VLLM_FAULTS", "die")
    sampler = make()
    sampler.load(POLICY)
    with pytest.raises(EngineError, match=r"vLLM ended by itself \(3\): RuntimeError: out of everything") as died:
        sampler.sample(requests(2))
    sampler.close()
    assert "out of everything" in Path(str(died.value).partition("its log: ")[2].rstrip(")")).read_text()
    monkeypatch.delenv("FAKE_VLLM_FAULTS")
    sampler.load(POLICY)  # and can be started again
    assert len(sampler.sample(requests(2))) == 2


def test_nothing_is_left_when_it_is_closed(make: Make, tmp_path: Path) -> None:
    sampler = make()
    sampler.load(POLICY)
    (pid,) = {line["pid"] for line in notes(tmp_path, "start")}
    assert psutil.pid_exists(pid)
    sampler.close()
    assert not psutil.pid_exists(pid)
    assert list(tmp_path.glob("stalewise-vllm-*")) == []


def interrupt_once(is_time: Callable[[], bool]) -> None:
    """Ctrl-C for the main thread, when it does nothing but wait: elsewhere a destructor may swallow it."""
    while not is_time():
        time.sleep(0.01)
    time.sleep(0.2)
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)


def test_it_can_be_closed_while_it_samples(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_VLLM_FAULTS", "slow")
    sampler = make()
    sampler.load(POLICY)
    (pid,) = {line["pid"] for line in notes(tmp_path, "start")}
    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    ctrl_c = threading.Thread(target=interrupt_once, args=(lambda: bool(notes(tmp_path, "slow")),))
    ctrl_c.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            sampler.sample(requests(2))
    finally:
        ctrl_c.join()
        signal.signal(signal.SIGUSR1, before)
    sampler.close()  # which does not wait for what is under way
    assert not psutil.pid_exists(pid)


@pytest.mark.nightly
def test_processes_end_with_a_parent_that_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_VLLM_FAULTS", "slow")
    code = """
from stalewise.rollout.sampler import Request
from stalewise.rollout.engines.vllm import VllmSampler
from stalewise.models import EMBEDDED
from stalewise.config.sections import VllmSection
from stalewise.types import SamplerSettings
sampler = VllmSampler(SamplerSettings(), max_new_tokens=6, options=VllmSection())
sampler.load(EMBEDDED / "arithmetic")
print("ready", flush=True)
sampler.sample([Request([3, 4, 5], 0)])
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "ready\n"
    (pid,) = {line["pid"] for line in notes(tmp_path, "start")}
    time.sleep(0.5)  # it is sampling by now
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 20
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_run_with_vllm_and_its_sleep(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_VLLM_FAULTS", "gpu")
    result = run(make_config(tiny_record(runs, sampler={"engine": "vllm"})))
    assert result.updates == 4
    events = [line["event"] for line in notes(tmp_path, "start", "sleep", "wake", "reload_weights")]
    # Version 0 is evaluated and generates, then learning; version 2 generates, then learning; version 4 is evaluated.
    assert events == ["start", "sleep", "wake", "reload_weights", "sleep", "wake", "reload_weights"]
    pids = {line["pid"] for line in notes(tmp_path, "start")}
    assert not any(map(psutil.pid_exists, pids))
