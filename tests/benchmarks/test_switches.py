"""The benchmark of switches: a tiny run, and the arithmetic of its figures."""

from __future__ import annotations

import sys
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
    copied = switches.one({"part": "copy", "size": "tiny", "moment_bytes": 2}, tmp_path)
    assert copied["bytes"] % 8 == 0 and copied["sampler_takes_s"] > 0


def test_start_and_end_of_a_run_are_no_switches() -> None:
    journal = [
        {"event": "switch", "reason": "first checkpoint", "seconds": 9.0},
        {"event": "generate", "seconds": 4.0},
        {"event": "switch", "reason": "learner", "seconds": 5.0},
        {"event": "learn", "seconds": 3.0},
        {"event": "switch", "reason": "checkpoint", "seconds": 0.5},
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
    runs = {
        "1b/4": {**found, "updates": 8},
        "1b/8": {**found, "updates": 4, "seconds": {"learn": 6.0, "switch": 1.75, "start": 20.0}},
    }
    head = switches.headline(runs)
    assert head["times_faster_than_mu_4"] == {"1b/4": 1.0, "1b/8": pytest.approx(15 / 7.75 / 2)}
