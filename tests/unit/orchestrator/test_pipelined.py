"""Generation in a process of its own."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from callbacks import StopAt
from processes import FORKING
from stalewise.api import generate, run
from stalewise.config import RunConfig, make_config
from stalewise.errors import ConfigError, EngineError
from stalewise.models import EMBEDDED, resolve_model
from stalewise.orchestrator import pipelined
from stalewise.orchestrator.orchestrator import Orchestrator
from stalewise.orchestrator.pipelined import BackgroundGeneration
from stalewise.planning.memory import estimate
from stalewise.rollout.engines.embedded import HFSampler
from stalewise.store import (
    batch_directories,
)
from stalewise.store.json_lines import read_jsonl
from tiny import tiny_record

PIPELINED = {"kind": "pipelined", "updates": 6, "stages": None, "updates_per_generation": 2, "lag": 1}


def made(runs: Path, name: str = "run", **changes: Mapping[str, Any]) -> RunConfig:
    return make_config(tiny_record(runs, name, **{"optimizer": {"learning_rate": 1e-3}, **changes}))


@pytest.mark.nightly
def test_a_generator_that_fails_says_why_and_loses_nothing(runs: Path, tmp_path: Path) -> None:
    weightless = tmp_path / "weightless"  # whoever samples from it finds that out
    shutil.copytree(EMBEDDED / "arithmetic", weightless, ignore=shutil.ignore_patterns("*.safetensors"))
    config = made(runs, schedule=PIPELINED, sampler={"foreign": {"path": str(weightless), "share": 0.5}})
    with pytest.raises(EngineError, match=r"the generating process ended: .*weightless.*run the same command again"):
        run(config)
    assert "Fatal" not in (config.directory / "generator.log").read_text()


@pytest.mark.nightly
def test_files_beside_a_config_hide_no_module_from_the_generator_and_its_reward_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("random", "torch"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('a file of the working directory was imported')\n")
    (tmp_path / "rewards_of_the_generator.py").write_text("def score(response, answer): return response == answer\n")
    rows = [json.dumps({"problem": f"{a}+{a}=", "answer": str(2 * a)}) for a in range(10, 50)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])  # as that of an installed script
    monkeypatch.chdir(tmp_path)
    options = {"path": "rows.jsonl", "verifier": "python", "held_out": 0.5}
    options["verifier_options"] = {"function": "rewards_of_the_generator:score"}
    task = {"name": "jsonl", "options": options}
    config = made(tmp_path / "runs", schedule=PIPELINED, model={"path": "arithmetic"}, task=task)
    assert run(config).updates == 6


def test_a_generator_that_is_killed_is_one_message_and_the_next_runs_beside_learning(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = BackgroundGeneration.start

    def start_and_kill(self: BackgroundGeneration, run: Orchestrator) -> None:
        start(self, run)
        assert self.process is not None
        self.process.kill()

    # Tests of `make nightly` start generators as they are started.
    monkeypatch.setattr(pipelined, "subprocess", FORKING)
    config = made(runs, schedule=PIPELINED, checkpoints={"every": 32, "keep": 1})
    with monkeypatch.context() as patched:
        patched.setattr(BackgroundGeneration, "start", start_and_kill)
        with pytest.raises(EngineError, match=r"the generating process ended: .*run the same command again"):
            run(config)
    result = run(config)
    assert result.updates == 6
    assert "Fatal" not in (config.directory / "generator.log").read_text()
    made_by = [json.loads((d / "manifest.json").read_text()) for d in batch_directories(config.directory / "rollouts")]
    assert [(one["generation_batch"], one["version"]) for one in made_by] == [(0, 0), (1, 0), (2, 2)]
    ours, theirs = (read_jsonl(config.directory / name) for name in ("journal.jsonl", "journal-generator.jsonl"))
    assert {"learn", "wait"} <= {record["event"] for record in ours}
    assert "generate" not in {record["event"] for record in ours}
    assert {record["event"] for record in theirs} == {"generate", "wait", "switch"}
    assert result.seconds["wait"] > 0
    assert [record["age_max"] for record in read_jsonl(config.directory / "metrics.jsonl")] == [0, 1, 2, 3, 2, 3]


def test_a_generator_on_the_learners_gpu_leaves_room_for_it(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = made(runs, schedule=PIPELINED)
    generate(config, batch=0)
    needed = estimate(config, resolve_model(config.model.path, config.task.name))
    assert needed is not None and needed.at_once
    found: list[float] = []

    def stop(run: Orchestrator, batch: int) -> None:
        assert isinstance(run.sampler, HFSampler)
        found.append(run.sampler.most_bytes)
        raise KeyboardInterrupt

    monkeypatch.setattr(Orchestrator, "generate", stop)
    monkeypatch.setattr(pipelined, "_acquire", lambda lock: None)  # which it would hold as long as this process
    with pytest.raises(KeyboardInterrupt):
        pipelined.generate_all(config.directory)
    monkeypatch.setattr(pipelined, "find_device", lambda device, setting: torch.device("cuda"))
    for memory in (10**9, 10):  # of the GPU; on one that is too small, twice what is needed at least
        monkeypatch.setattr(pipelined, "device_memory", lambda device, memory=memory: memory)
        with pytest.raises(KeyboardInterrupt):
            pipelined.generate_all(config.directory)
    learning, sampling = sum(needed.learning.values()), sum(needed.sampling.values())
    assert found == [math.inf, 10**9 - needed.least - learning, 2 * sampling]
    # On a GPU of its own nothing of the learner's is looked at: that would make the learner's GPU the current one.
    monkeypatch.setattr(pipelined, "generator_elsewhere", lambda schedule, device: torch.device("cuda:1"))
    monkeypatch.setattr(pipelined, "estimate", None)
    with pytest.raises(KeyboardInterrupt):
        pipelined.generate_all(config.directory)
    assert found[-1] == math.inf


@pytest.mark.nightly
def test_batches_that_were_made_elsewhere_are_learned_from(runs: Path) -> None:
    config = made(runs, schedule=PIPELINED)
    assert generate(config)  # here, as it could be on another machine
    assert run(config).updates == 6


@pytest.mark.nightly
def test_a_batch_that_was_moved_away_comes_again_though_later_ones_are_there(runs: Path) -> None:
    config = made(runs, schedule=PIPELINED)

    with pytest.raises(KeyboardInterrupt):
        run(config, StopAt(2))
    generate(config, batch=2)
    shutil.rmtree(batch_directories(config.directory / "rollouts")[1])
    assert run(config).updates == 6


def test_a_pipelined_run_cannot_have_fresh_rollouts_from_policies_that_are_gone() -> None:
    with pytest.raises(ConfigError, match='use "halve" or "stop"'):
        make_config({"schedule": {"kind": "pipelined"}, "guard": {"action": "both"}})
