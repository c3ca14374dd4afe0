"""The benchmark of memory: its configs, the peak that it sees, and its words."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]  # benchmarks/ is no part of the package

from benchmarks import memory, switches  # noqa: E402
from stalewise.errors import StoreError  # noqa: E402
from stalewise.store.json_lines import read_jsonl  # noqa: E402

LARGE = ["7b/full/one", "7b/full/pipelined", "7b/lora/one", "7b/lora-offload/one"]


@pytest.mark.parametrize("part", [*memory.DEFAULT.split(","), *LARGE])
def test_every_part_has_a_config(part: str, tmp_path: Path) -> None:
    size, kind, schedule = part.split("/")
    config = memory.config_of(part, tmp_path)
    assert config.model.trains_adapters == (kind != "full")
    assert config.learner.offload == ("always" if kind == "lora-offload" else "auto")
    assert config.schedule.kind == {"one": "staged", "pipelined": "pipelined"}[schedule]
    assert config.learner.gradient_checkpointing == (size == "7b")
    assert config.optimizer.moments == ("int8" if (size, kind) == ("7b", "full") else "float32")
    assert config.schedule.updates == (16 if kind == "lora-offload" or (size, kind) == ("7b", "full") else 8)
    each = {"one": 8 if config.schedule.updates == 16 else 4, "pipelined": 8 if part == "7b/full/pipelined" else 2}
    assert config.schedule.schedule().updates_of(0) == range(each[schedule])


def test_the_peak_is_that_of_the_process_and_its_children() -> None:
    inner = "import time; held = b'x' * (150 << 20); time.sleep(60)"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    with subprocess.Popen([sys.executable, "-c", outer]) as process:
        peak = memory.Peak(psutil.Process(process.pid), before=20 << 20)
        peak.start()
        end = time.monotonic() + 30
        while peak.most < 140 << 20 and time.monotonic() < end:
            time.sleep(0.05)
        for one in psutil.Process(process.pid).children():
            one.kill()
    peak.is_over.set()
    peak.join()
    assert 140 << 20 <= peak.most < 250 << 20


def test_a_run_tells_what_its_switch_blocked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # of the verifier's process: the reward is there
    monkeypatch.syspath_prepend(str(tmp_path))
    memory.write_model("tiny", tmp_path / "tiny")
    found = memory.work_on("tiny/full/one", tmp_path)
    assert found["switches"]["switches"] == 1 and found["switches"]["blocking_s_per_switch"] > 0  # two stages
    reasons = [one["reason"] for one in found["switches"]["one_by_one"]]
    assert reasons.count("checkpoint") == 2 and reasons.count("memory") == 1


def test_a_run_that_ends_before_its_second_checkpoint_tells_what_its_switch_blocked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(memory.ENDS_BEFORE, "tiny/full/one", 16)
    memory.write_model("tiny", tmp_path / "tiny")
    found = memory.work_on("tiny/full/one", tmp_path)["switches"]
    reasons = [one["reason"] for one in found["one_by_one"]]
    assert found["switches"] == 1 and (reasons.count("checkpoint"), reasons.count("commit")) == (1, 1)
    start = {"first checkpoint", "check"}
    parts = [one["seconds"] for one in found["one_by_one"] if one["reason"] not in start]
    # The first learner and sampler belong to the start, and so do the others' first turns.
    assert 0 < found["blocking_s_per_switch"] <= sum(parts) and set(found["median_s"]) >= {"checkpoint", "commit"}
    kept = (tmp_path / "tiny-full-one" / "checkpoints").iterdir()
    assert [path.name for path in kept] == ["v000008"]


@pytest.mark.slow
def test_a_pipelined_run_of_7b_ends_before_its_first_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole path in a small size: disk short, moments in 8 bits, gradient checkpointing, a generator beside it."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    for sizes in (switches.SHAPES, switches.VOCABULARY, switches.ONE_IN, memory.PROMPTS, memory.TOKENS):
        monkeypatch.setitem(sizes, "7b", sizes["tiny"])
    usage = memory.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(memory.shutil, "disk_usage", lambda path: usage._replace(free=0))
    memory.write_model("7b", tmp_path / "7b")
    found = memory.work_on("7b/full/pipelined", tmp_path)
    assert "error" not in found and found["switches"]["switches"] == 0
    run = tmp_path / "7b-full-pipelined"
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["v000000"]
    assert (tmp_path / "7b").exists() and list((run / "checkpoints" / "v000000").glob("*.safetensors"))
    assert [record["update"] for record in read_jsonl(run / "metrics.jsonl")] == list(range(8))
    made = [one for one in read_jsonl(run / "journal-generator.jsonl") if one["event"] == "generate"]
    assert made[0]["generation_batch"] == 0  # the next one may not be made, where learning is faster


def test_learner_and_generator_of_7b_fit_on_one_gpu_by_the_estimate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 7.615e9 weights: 4 bytes each, 4 of gradients, 2 of moments, 2 in each of two samplers; a process besides."""
    there = "stalewise.planning.memory."
    monkeypatch.setattr(f"{there}pick_device", lambda device: torch.device("cuda"))
    monkeypatch.setattr(f"{there}device_memory", lambda device: 140 * 2**30)
    monkeypatch.setattr(f"{there}pick_precision", lambda precision, device: torch.bfloat16)
    monkeypatch.setattr(f"{there}can_compile", lambda: True)
    monkeypatch.setattr(f"{there}kernels_for", lambda device: None)  # not the plain ones
    switches.model_config("7b").save_pretrained(tmp_path / "7b")
    config = memory.config_of("7b/full/pipelined", tmp_path)
    needed = memory.estimate(config, config.model.path, longest_prompt=memory.PROMPT_TOKENS, alone=True)
    assert needed is not None and needed.at_once
    assert needed.least == pytest.approx(14 * 7.615e9 + (850 << 20), rel=0.001)
    assert needed.peak == pytest.approx(139.3e9, rel=0.005)  # 150.3 are there


def test_model_and_version_0_make_room_only_where_the_disk_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = memory.config_of("tiny/full/one", tmp_path)
    model, first = tmp_path / "tiny", config.directory / "checkpoints" / "v000000"
    for place in (model, first):
        place.mkdir(parents=True)
        (place / "model.safetensors").write_bytes(b"x" * 100)
    callback = memory.MakesRoom(config)
    usage = memory.shutil.disk_usage(tmp_path)
    for free, stays in ((320, True), (319, False), (0, False)):  # the last time they are gone
        monkeypatch.setattr(memory.shutil, "disk_usage", lambda path, free=free: usage._replace(free=free))
        callback.begin("generate", 1)
        assert model.exists() == stays
        callback.metrics(0, {})
        assert [path.name for path in first.iterdir()] == ["model.safetensors"] * stays
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"x" * 100)
    # Both stages have four updates: the run ends with the first one, and writes no checkpoint.
    assert memory.MakesRoom(config, ends_before=5).is_short() and not memory.MakesRoom(config, ends_before=4).is_short()


def test_a_run_without_room_still_tells_its_switches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    memory.write_model("tiny", tmp_path / "tiny")
    usage = memory.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(memory.shutil, "disk_usage", lambda path: usage._replace(free=0))
    full = StoreError("disk full while writing metrics.jsonl")

    def fails(self: memory.MakesRoom, update: int, record: object) -> None:
        if update == 6:  # after the switch at 4
            raise full

    monkeypatch.setattr(memory.MakesRoom, "metrics", fails)
    found = memory.work_on("tiny/full/one", tmp_path)
    assert found["error"] == [str(full)] and found["switches"]["blocking_s_per_switch"] > 0
    assert not (tmp_path / "tiny").exists()


@pytest.mark.parametrize(
    ("found", "code"), [({"error": ["disk full"]}, 1), ({"estimate_bytes": 1, "peak_bytes": 1}, 0)]
)
def test_a_part_that_failed_is_told_to_who_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: dict[str, Any], code: int
) -> None:
    monkeypatch.setattr(memory, "measure", lambda part, work: {"estimate_ratio": None, **found})
    monkeypatch.setattr(sys, "argv", ["memory.py", "--parts", "tiny/full/one", "--work", str(tmp_path)])
    assert memory.main() == code


@pytest.mark.nightly
def test_a_run_that_fails_says_why(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()  # a model that is not there
    found = memory.measure("tiny/full/one", tmp_path)
    assert "config.json" in " ".join(found["error"])


def test_a_part_that_was_killed_says_so_and_leaves_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python, work = tmp_path / "python", tmp_path / "work"
    # Stands in for a run that needs too much memory; found.txt tells which runs were there when it began.
    python.write_text('#!/bin/sh\ncd "$3" && ls > found.txt && mkdir tiny-full-one && kill -9 $$\n')
    python.chmod(0o700)
    for left in ("tiny-full-one", "0.5b-lora-pipelined", "0.5b", "tiny"):  # the last two are models
        (work / left / "checkpoints").mkdir(parents=True)
    monkeypatch.setattr(sys, "executable", str(python))
    found = memory.measure("tiny/full/one", work)
    assert found["error"] == ["ended with signal 9; the machine's memory may have run out"]
    assert (work / "found.txt").read_text().split() == ["0.5b", "found.txt", "log", "tiny"]
    assert sorted(one.name for one in work.iterdir()) == ["0.5b", "found.txt", "log", "tiny"]


def test_lines() -> None:
    found = {"peak_bytes": 50_000_000_000, "estimate_bytes": 45_000_000_000, "estimate_ratio": 0.9}
    assert memory.line("0.5b/full/one", found) == "0.5b/full/one: peak 50.0 GB, estimate 45.0 GB, 0.90 of the peak"
    assert memory.line("7b/full/one", {"error": ["a", "b", "c", "d"]}) == "7b/full/one: b | c | d"


def test_what_the_allocator_holds_is_summed_by_pool_and_stream() -> None:
    sizes = [((0, 0), 0, 10, 4), ((0, 0), 7, 30, 30), ((0, 3), 7, 50, 20), ((0, 0), 0, 5, 0), ((0, 4), 7, 1, 1)]
    names = ("segment_pool_id", "stream", "total_size", "allocated_size")
    assert memory.by_pool([dict(zip(names, one, strict=True)) for one in sizes]) == [
        {"pool": "graphs", "bytes": 51, "in_use": 21},
        {"pool": "launches", "bytes": 30, "in_use": 30},
        {"pool": "launches", "bytes": 15, "in_use": 4},
    ]


def test_the_largest_blocks_are_told_in_use_or_not() -> None:
    def segment(pool: tuple[int, int], *blocks: tuple[int, str]) -> dict[str, Any]:
        return {"segment_pool_id": pool, "blocks": [{"size": size, "state": state} for size, state in blocks]}

    small = [(1, "active_allocated")] * 20
    segments = [
        segment((0, 0), (500, "active_allocated"), (700, "inactive"), *small),
        segment((0, 3), (600, "active_pending_free"), *small),
    ]
    found = memory.largest_blocks(segments)
    assert found[:3] == [
        {"pool": "launches", "bytes": 700, "in_use": False, "state": "inactive"},
        {"pool": "graphs", "bytes": 600, "in_use": True, "state": "active_pending_free"},
        {"pool": "launches", "bytes": 500, "in_use": True, "state": "active_allocated"},
    ]
    assert len(found) == 12
