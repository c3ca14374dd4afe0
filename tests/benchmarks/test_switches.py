"""The benchmark of switches: a tiny run, and the arithmetic of its figures."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # benchmarks/ is no part of the package

from benchmarks import switches  # noqa: E402


def test_a_tiny_run_tells_what_a_switch_blocks(tmp_path: Path) -> None:
    options = {"part": "run", "size": "tiny", "mu": 2, "updates": 4, "prompts": 2, "tokens": 8}
    options["engine"] = "hf"
    found = switches.one(options, tmp_path)
    assert found["switches"] == 1 and found["checkpoint_bytes"] > 3 * 4 * 512 * 64
    assert 0 < found["blocking_s_per_switch"] < found["wall_s"]
    assert found["background_s"] > 0 and found["seconds"]["learn"] > 0
    assert (found["prompts"], found["rollouts"], found["tokens"]) == (2, 16, 8)
    copied = switches.one({"part": "copy", "size": "tiny", "moment_bytes": 2}, tmp_path)
    assert copied["bytes"] % 8 == 0 and copied["sampler_takes_s"] > 0


def test_checkpoints_wait_for_a_disk_that_removes_slowly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = switches.prune
    monkeypatch.setattr(switches, "prune", lambda *places, **kept: [time.sleep(0.1), real(*places, **kept)])
    found = switches.measure_disk(12e-6, 0.0, tmp_path)
    assert found["writing_s"] > 0 and found["removing_s"] > 0.1
    # The removal before the last one must be over: in the long run a checkpoint waits as long as a removal takes.
    assert 0.05 < found["waiting_s"] <= found["longest_wait_s"]
    assert switches.measure_disk(12e-6, 0.3, tmp_path)["waiting_s"] < found["waiting_s"]
    spares: list[object] = []
    monkeypatch.setattr(switches, "prune", lambda *places, **kept: spares.append(kept["spare"]))
    with switches.no_checksums():
        switches.measure_disk(12e-6, 0.0, tmp_path, removes=True)
    switches.measure_disk(12e-6, 0.0, tmp_path)
    assert spares[: switches.CHECKPOINTS] == [None] * switches.CHECKPOINTS and spares[-1] is not None
    assert list(tmp_path.iterdir()) == []


def test_start_and_end_of_a_run_are_no_switches() -> None:
    journal = [
        {"event": "switch", "reason": "first checkpoint", "seconds": 9.0},
        {"event": "generate", "seconds": 4.0},
        {"event": "switch", "reason": "learner", "seconds": 5.0},
        {"event": "learn", "seconds": 3.0},
        {"event": "switch", "reason": "memory", "seconds": 0.125},
        {"event": "switch", "reason": "checkpoint", "seconds": 0.375},
        {"event": "evaluate", "seconds": 100.0},
        {"event": "switch", "reason": "commit", "seconds": 0.25, "bytes": 7, "writing_s": 2.0, "checksums_s": 1.0}
        | {"committing_s": 0.5},
        {"event": "generate", "seconds": 4.0},
        {"event": "switch", "reason": "learner", "seconds": 0.25},
        {"event": "learn", "seconds": 3.0},
        {"event": "switch", "reason": "checkpoint", "seconds": 0.5},
    ]
    found = switches.summary(journal)
    assert found["seconds"] == {"generate": 8.0, "learn": 6.0, "switch": 1.0, "start": 14.0, "end": 0.5}
    assert (found["switches"], found["blocking_s_per_switch"], found["background_s"]) == (1, 1.0, 3.5)
    assert found["median_s"]["memory"] == 0.125
    one_stage = switches.summary([*journal[:4], *journal[4:6]])  # its only checkpoint is its end
    assert (one_stage["switches"], one_stage["seconds"]["switch"], one_stage["seconds"]["end"]) == (0, 0.0, 0.5)
    found["tokens"] = 64
    other = {**found, "updates": 8, "seconds": {"learn": 6.0, "switch": 1.75, "start": 20.0}}
    runs = {
        "1b/64/4": {**found, "updates": 8},
        "1b/64/8": other,
        # Nothing to compare with: another size of an update, another engine, longer responses.
        "1b/128/8": other,
        "1b-vllm/64/8": other,
        "1b/64/16": {**other, "tokens": 128},
        "1b/64/32": {**other, "updates": 32},  # four times as many updates in the same time
    }
    head = switches.headline(runs)
    gains = {"1b/64/4": 1.0, "1b/64/8": pytest.approx(15 / 7.75), "1b/64/32": pytest.approx(15 / 8 / (7.75 / 32))}
    assert head["times_faster_than_mu_4"] == gains
    assert head["blocking_s_per_switch"].keys() == runs.keys()


def test_a_commit_after_the_last_update_belongs_to_the_switch_before() -> None:
    """The rollouts of the last update waited for it."""
    switch = {"event": "switch", "seconds": 1.0}
    journal = [
        {**switch, "reason": "checkpoint"},
        {"event": "generate", "seconds": 4.0},
        {"event": "learn", "seconds": 3.0},
    ]
    journal += [{**switch, "reason": "commit"}, {**switch, "reason": "checkpoint"}, {**switch, "reason": "commit"}]
    found = switches.summary(journal)
    assert (found["switches"], found["seconds"]["switch"], found["seconds"]["end"]) == (1, 2.0, 2.0)


def test_what_a_cut_run_left_goes_and_a_failure_is_told(
    arguments: argparse.Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny-mu4" / "checkpoints").mkdir(parents=True)
    monkeypatch.setattr(switches, "in_a_process", lambda part, options, work: {"error": "no"})
    found, failed = switches.measure(arguments, tmp_path)
    (run,) = found["runs"].items()
    assert failed and run[0] == "tiny/8/2" and run[1]["error"] == "no" and {"date", "load"} < {*run[1]}
    assert not (tmp_path / "tiny-mu4").exists()


def test_the_headline_of_the_kept_file_is_that_of_its_runs() -> None:
    kept = json.loads((ROOT / "benchmarks" / "results" / "switches-h200.json").read_text())
    assert kept["headline"] == switches.headline(kept["runs"])


def test_a_label_keeps_runs_of_the_same_sizes_apart(
    arguments: argparse.Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = ["switches.py", "--quick", "--parts", "run", "--out", str(arguments.out)]
    seconds = {"generate": 1.0, "learn": 1.0, "switch": 1.0}
    monkeypatch.setattr(
        switches,
        "in_a_process",
        lambda part, options, work: {**options, "switches": 1, "blocking_s_per_switch": 1.0, "seconds": seconds},
    )
    for more in ([], ["--label", "disk", "--work", str(tmp_path / "disk")]):
        monkeypatch.setattr(sys, "argv", [*quick, *more])
        assert switches.main() == 0
    found = json.loads(arguments.out.read_text())
    assert [*found["runs"]] == ["tiny/16/8", "tiny/16/4", "tiny-disk/16/8", "tiny-disk/16/4"]
    assert found["headline"]["times_faster_than_mu_4"].keys() == found["runs"].keys()
    monkeypatch.setattr(sys, "argv", [*quick, "--label", "a/b"])
    with pytest.raises(SystemExit):
        switches.main()


@pytest.fixture
def arguments(tmp_path: Path) -> argparse.Namespace:
    options = {"sizes": "tiny", "parts": "run", "mu": "2", "updates": 4, "prompts": 1, "tokens": 8}
    options |= {"engine": "hf", "sleep": "sleep", "label": "", "deadline_s": 600, "out": tmp_path / "found.json"}
    return argparse.Namespace(**options)


@pytest.mark.nightly
def test_runs_of_another_size_stay(arguments: argparse.Namespace, tmp_path: Path) -> None:
    before = {"format": switches.FORMAT, "machine": switches.machine(), "copy": {}, "runs": {}}
    before["runs"] = {"tiny/16/2": {"error": "as it was"}}
    arguments.out.write_text(json.dumps(before))
    found, failed = switches.measure(arguments, tmp_path)
    assert not failed and found == json.loads(arguments.out.read_text())
    assert found["runs"].keys() == {"tiny/16/2", "tiny/8/2"} and found["runs"]["tiny/16/2"]["error"] == "as it was"
    assert (found["runs"]["tiny/8/2"]["updates"], found["runs"]["tiny/8/2"]["switches"]) == (4, 1)
    assert found["headline"]["times_faster_than_mu_4"] == {}


def test_a_file_of_another_format_is_not_overwritten(arguments: argparse.Namespace, tmp_path: Path) -> None:
    arguments.out.write_text('{"format": "stalewise.switches/1", "runs": {}}')
    with pytest.raises(SystemExit, match=r"has the format stalewise\.switches/1, not stalewise\.switches/2"):
        switches.measure(arguments, tmp_path)


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("echo first >&2; echo last >&2; exit 1", "last"),
        ("exit 3", "ended with exit code 3"),
        ("kill -9 $$", "ended with signal 9; the machine's memory may have run out"),
        ("echo a warning >&2; kill -6 $$", "ended with signal 6"),
    ],
)
def test_a_run_that_failed_says_why(script: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"  # stands in for the run
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    assert switches.in_a_process("run", {}, tmp_path) == {"error": error}
