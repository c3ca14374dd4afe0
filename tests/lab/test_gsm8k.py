"""The claims that the benchmark on GSM8K decides: a rule can say shown, not shown and opposite, and waits for runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.gsm8k_bench.figures import CLAIM_PAIRS
from experiments.lab import gsm8k
from experiments.lab.definition import load_experiments
from experiments.lab.pages import benchmark_section, found, results_table
from experiments.lab.verdicts import judge

ROOT = Path(__file__).parents[2]
LEVEL = {"synchronous": 0.30, "mu_grpo": 0.30, "mu_grpo_64": 0.30, "mu_grpo_128": 0.30, "p3o": 0.30}
LEVEL |= {"grpo_tight": 0.30, "auto": 0.30}


def record(at_the_end: dict[str, float], at_one_time: dict[str, float], seeds: int = 4) -> dict[str, Any]:
    """What `collect` writes, with seeds around these accuracies."""

    def around(value: float) -> list[float]:
        return [value + 0.004 * (place - (seeds - 1) / 2) for place in range(seeds)]

    return {
        "final_accuracy": {arm: {"values": around(value)} for arm, value in at_the_end.items()},
        "claims": {
            key: {
                "arms": list(arms),
                "equal_wallclock": {"seconds": 50.0, "values": [around(at_one_time[arm]) for arm in arms]},
            }
            for key, arms in CLAIM_PAIRS.items()
        },
    }


def verdict(rule: str, made: dict[str, Any]) -> str:
    return judge({rule: gsm8k.RULES[rule](made)})[rule][0]


@pytest.mark.parametrize(
    ("end", "clock", "expected"),
    [
        ({}, {"synchronous": 0.20}, "shown"),
        ({}, {}, "not shown"),  # level, but not ahead at equal wall-clock
        ({"mu_grpo_128": 0.285}, {"synchronous": 0.20}, "not shown"),  # 1.5 points below: inside the margin, unproven
        ({"mu_grpo_128": 0.20}, {"synchronous": 0.20}, "opposite"),
    ],
)
def test_accuracy_at_speed(end: dict[str, float], clock: dict[str, float], expected: str) -> None:
    assert verdict("accuracy_at_speed", record(LEVEL | end, LEVEL | clock)) == expected


@pytest.mark.parametrize(("p3o", "expected"), [(0.30, "shown"), (0.27, "not shown"), (0.20, "opposite")])
def test_no_knob(p3o: float, expected: str) -> None:
    assert verdict("no_knob", record(LEVEL | {"p3o": p3o}, LEVEL)) == expected


@pytest.mark.parametrize(
    ("clock", "expected"),
    [({}, "shown"), ({"mu_grpo": 0.32}, "not shown"), ({"mu_grpo": 0.40}, "opposite"), ({"auto": 0.35}, "shown")],
)
def test_auto_against_every_single_method(clock: dict[str, float], expected: str) -> None:
    assert verdict("ours", record(LEVEL, LEVEL | clock)) == expected


@pytest.mark.parametrize("rule", gsm8k.RULES)
def test_one_seed_decides_nothing(rule: str) -> None:
    assert gsm8k.RULES[rule](record(LEVEL, LEVEL, seeds=1)).p_shown is None
    assert gsm8k.RULES[rule]({"final_accuracy": {}, "claims": {}}).p_shown is None


def test_the_page_has_a_row_and_a_section_and_counts_claims_that_were_not_run(tmp_path: Path) -> None:
    for name in ("bases.toml", "ours/experiment.toml", "no-knob/experiment.toml"):
        path = tmp_path / "experiments" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text((ROOT / "experiments" / name).read_text())
    experiments = load_experiments(tmp_path / "experiments")
    assert found(experiments) == {} and gsm8k.benchmark_findings(tmp_path) == {}
    path = tmp_path / gsm8k.FILE
    path.parent.mkdir(parents=True)
    made = record({arm: 0.3 for arm in LEVEL if arm != "p3o"}, LEVEL)
    made["final_accuracy"]["auto"]["values"].pop()  # three seeds of one of the claim's arms, and one of another claim's
    made["final_accuracy"]["mu_grpo_128"]["values"] = [0.3]
    path.write_text(json.dumps(made))
    judged = found(experiments)
    assert list(judged) == [("ours", "real")]
    alone = judge({"ours": judged["ours", "real"].finding})["ours"][1]
    assert judged["ours", "real"].p == pytest.approx(2 * alone)  # P3O's claim is not tested yet
    table = results_table(experiments) or ""
    assert "real: auto at equal wall-clock less GRPO with µ=4: +0.000" in table and "| 3 seeds, " in table
    assert "not run yet" in table
    text = "\n".join(benchmark_section("ours", judged["ours", "real"]))
    assert "**Rule.** `auto` against each single method" in text and "**Verdict: shown**" in text
