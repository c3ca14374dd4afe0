"""The comparison with vLLM: equal work on both sides, and what is made of the measurements."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # benchmarks/ is no part of the package

from benchmarks import versus_vllm as bench


def side(fixed: float, drawn: float) -> dict[str, Any]:
    return {"fixed": {"tokens_per_second": fixed}, "drawn": {"tokens_per_second": drawn}}


def test_drawn_lengths_have_a_long_tail_and_are_alike_within_a_group() -> None:
    drawn = np.array(bench.lengths("drawn", 4096, 16_384))
    assert bench.lengths("drawn", 4096, 16_384) == drawn.tolist()  # both sides get the same
    assert np.median(drawn) == pytest.approx(16_384 / 6, rel=0.1)
    assert drawn.min() >= 4 and drawn.max() == 16_384
    assert np.quantile(drawn, 0.95) > 3.5 * np.median(drawn)
    groups = np.log(drawn).reshape(-1, 8)
    assert groups.mean(axis=1).std() > 0.5 and groups.std(axis=1).mean() > 0.4
    assert bench.lengths("fixed", 3, 7) == [7, 7, 7]


def test_a_group_shares_its_prompt() -> None:
    part = bench.Part(20, 5, (8,))
    asked = bench.prompts(part, 100, seed=1)
    assert len(asked) == 20 and {len(prompt) for prompt in asked} == {5}
    assert asked[0] == asked[7] != asked[8] and asked != bench.prompts(part, 100, seed=2)


def test_the_ratio_is_to_the_best_of_vllm_and_bars_are_for_fixed_lengths() -> None:
    parts: dict[str, Any] = {
        "1.5b/512": {"ours": side(100.0, 50.0), "vllm": {"512": side(30.0, 60.0), "2048": side(40.0, 20.0)}},
        "7b/256": {"ours": side(26.0, 30.0), "vllm": {"512": side(20.0, 20.0), "1024": {"error": ["out of memory"]}}},
        "0.5b/512": {"ours": side(1.0, 1.0)},
        "0.5b/16384": {"ours": side(15.1526, 8.0), "vllm": {"512": side(10.0, 5.0)}},
    }
    found = bench.summary(parts)
    assert found["ratios"] == {"1.5b/512": 2.5, "1.5b/512 drawn": 0.833, "7b/256": 1.3, "7b/256 drawn": 1.5} | {
        "0.5b/16384": 1.515,
        "0.5b/16384 drawn": 1.6,
    }
    assert found["bars"] == dict.fromkeys(found["ratios"], 1.0) | {"1.5b/512": 3.0, "7b/256": 1.3}
    assert found["missed"] == ["1.5b/512", "1.5b/512 drawn"]
    lines = bench.table({"parts": parts, **found}).splitlines()
    assert lines[2] == "| 1.5b/512 | fixed | 100 | 40 | 2048 | 2.50 | 3 |"
    assert lines[3] == "| 1.5b/512 | drawn | 50 | 60 | 512 | 0.83 | 1 |"
    assert lines[6] == "| 0.5b/512 | fixed | 1 | – | – | – | 1 |"
    assert lines[8] == "| 0.5b/16384 | fixed | 15 | 10 | 512 | 1.52 | 1 |"  # 1.515, rounded once more, would be 1.51


def test_only_what_is_missing_is_measured() -> None:
    record: dict[str, Any] = {"parts": {"7b/256": {"ours": side(1, 1), "vllm": {"512": side(1, 1), "1024": {}}}}}
    wanted = bench.jobs(record, ["7b/256", "7b/4096"])
    assert [(job["parts"], job["side"], job.get("seqs")) for job in wanted] == [
        (["7b/256"], "vllm", 128),
        (["7b/256"], "vllm", 256),
        (["7b/256"], "vllm", 1024),
        (["7b/4096"], "ours", None),
        (["7b/4096"], "vllm", 512),
    ]
    assert len(bench.jobs(record, ["7b/256"], again=True)) == 5


def test_vllm_starts_once_for_the_parts_of_a_size() -> None:
    wanted = bench.jobs({"parts": {}}, ["0.5b/512", "0.5b/4096", "1.5b/4096"])
    theirs = [(job["parts"], job["seqs"], job["seconds"]) for job in wanted if job["side"] == "vllm"]
    seconds = [bench.PARTS[name].seconds for name in ("0.5b/512", "0.5b/4096", "1.5b/4096")]
    assert theirs == [
        (["0.5b/512"], 256, seconds[0] / 5),
        (["0.5b/512", "0.5b/4096"], 512, seconds[0] / 5 + seconds[1] / 2),
        (["0.5b/512"], 1024, seconds[0] / 5),
        (["0.5b/512"], 2048, seconds[0] / 5),
        (["1.5b/4096"], 512, seconds[2] / 2),
    ]
    assert [job["parts"] for job in wanted if job["side"] == "ours"] == [["0.5b/512"], ["0.5b/4096"], ["1.5b/4096"]]


def test_a_side_that_fails_says_why_and_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny").mkdir()

    def run_job(job: Any, model: Path, vllm: str, options: Any) -> dict[str, Any]:
        assert model == tmp_path / "tiny" and vllm == "there" and options == {"a": 1}
        return {"tiny/12": side(8, 8)} if job["side"] == "ours" else {"error": ["ImportError: no vllm"]}

    monkeypatch.setattr(bench, "run_job", run_job)
    out = tmp_path / "out.json"
    argv = ["--parts", "tiny/12", "--out", str(out), "--work", str(tmp_path), "--vllm", "there"]
    assert bench.main(bench.parsed([*argv, "--vllm-options", '{"a": 1}'])) == 0
    record = json.loads(out.read_text())
    assert record["parts"]["tiny/12"]["vllm"]["8"]["error"] == ["ImportError: no vllm"] and record["ratios"] == {}
    assert "ImportError: no vllm" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="no part is called 9b/1: choose from 135m/64"):
        bench.main(bench.parsed(["--parts", "9b/1"]))


def test_our_side_makes_the_lengths_that_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "set_default_dtype", lambda dtype: None)  # it is for a process of its own
    bench.make_model("tiny", tmp_path / "tiny")
    options = {"compiled": False, "profile": True}
    found = bench.work({"parts": ["tiny/12"], "side": "ours", "model": str(tmp_path / "tiny"), **options})["tiny/12"]
    assert found["profile"]["ms_per_step"]
    assert found["problem"] == "" and found["fixed"]["tokens"] == 24 * 12
    assert found["drawn"]["tokens"] == sum(bench.lengths("drawn", 24, 12)) < 24 * 12


def test_a_process_that_outlives_its_worker_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "versus_vllm.py"
    script.write_text(
        "import json, pathlib, subprocess, sys\n"
        "spec = json.loads(sys.argv[2])\n"
        "left = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(120)'])\n"
        "pathlib.Path(spec['out']).write_text(json.dumps({'left': left.pid}))\n"
        "print('last words')\n"
        "sys.exit(spec['seqs'])\n"
    )
    monkeypatch.setattr(bench, "HERE", tmp_path)
    start = time.monotonic()
    found = bench.run_job({"parts": [], "side": "vllm", "seqs": 0}, tmp_path, "", {})
    assert time.monotonic() - start < 60
    end = time.monotonic() + 30
    while psutil.pid_exists(found["left"]) and psutil.Process(found["left"]).status() != "zombie":
        assert time.monotonic() < end
        time.sleep(0.05)
    assert bench.run_job({"parts": [], "side": "vllm", "seqs": 3}, tmp_path, "", {}) == {"error": ["last words"]}
