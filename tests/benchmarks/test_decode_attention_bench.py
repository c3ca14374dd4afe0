"""The benchmark of decoding steps runs without a GPU on a tiny model, and says what it measured."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))  # benchmarks/ is no part of the package

from benchmarks import decode_attention as bench
from stalewise.rollout.engines import slot_decode


def test_steps_of_a_tiny_model_with_and_without_fused_operators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module, name, value in ((bench, "STEPS", 8), (bench, "NEW_TOKENS", 64), (slot_decode, "FINE_ROWS", 64)):
        monkeypatch.setattr(module, name, value)
    out = tmp_path / "out.json"
    options = ["--sizes", "tiny", "--rows", "8", "--tokens", "12", "--work", str(tmp_path), "--out", str(out)]
    bench.main(["--step", *options])
    found = json.loads(out.read_text())
    assert list(found) == ["tiny 8 rows of 12, fused", "tiny 8 rows of 12, plain"]
    assert all(one["ms"] > 0 and len(one["longest_ms"]) == bench.LONGEST for one in found.values())
    fused, plain = found.values()
    assert fused["operators"] and not plain["operators"]
    assert fused["kernels"] < plain["kernels"]
    assert len(capsys.readouterr().out.splitlines()) == 2


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton")
def test_divisions_of_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(bench, "WARM_UP", 0)
    monkeypatch.setattr(bench, "PART_HEADS", {"tiny": (4, 2, 16)})
    usual = bench.kernel().PART
    found = bench.part_sizes(rows=(2,), lengths=(300,), room=1024)
    assert list(found) == [f"tiny 2 rows of 300: {part}/{most}" for part, most in bench.PARTS]
    assert [one["keys_of_a_part"] for one in found.values()] == [1024, 512, 256]
    assert all(one["microseconds"] > 0 for one in found.values()) and usual == bench.kernel().PART
