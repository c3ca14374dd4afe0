"""The pure parts of benchmarks/: what the figures are computed with, on numbers made by hand; and the results' keys."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # benchmarks/ is no part of the package

from benchmarks.scales import verdict as scales  # noqa: E402
from benchmarks.versus import figures, plot, profiling, table  # noqa: E402

RESULTS = sorted((ROOT / "benchmarks" / "results").glob("versus_trl-*.json"))


# ---------------------------------------------------------------- time to accuracy


def test_a_rising_sequence_is_its_own_monotone_fit() -> None:
    assert figures.monotone([0.1, 0.2, 0.5]) == [0.1, 0.2, 0.5]


def test_a_fall_is_pooled_with_what_came_before() -> None:
    # 0.6 > 0.4: mean 0.5. Then 0.3 < 0.5: (0.6 + 0.4 + 0.3) / 3 = 0.4333; 0.2 before it is lower and stays.
    assert figures.monotone([0.2, 0.6, 0.4, 0.3]) == pytest.approx([0.2, 1.3 / 3, 1.3 / 3, 1.3 / 3])


def test_the_target_is_the_mean_of_the_last_two() -> None:
    assert figures.target_accuracy([0.1, 0.6, 0.8]) == pytest.approx(0.7)


def test_the_time_is_linear_between_evaluations() -> None:
    # 0.5 lies 3/4 of the way from 0.2 to 0.6: 10 s + 0.75 · 10 s.
    assert figures.time_to_accuracy([0, 10, 20], [0.1, 0.2, 0.6], 0.5) == pytest.approx(17.5)


def test_a_peak_that_is_not_held_does_not_count() -> None:
    # Fit of 0.9, 0.3, 0.3: 0.5 each.
    times, accuracies = [0, 10, 20, 30], [0.1, 0.9, 0.3, 0.3]
    assert figures.time_to_accuracy(times, accuracies, 0.6) is None
    # 0.5 itself: all of the way from 0.1 at 0 s to 0.5 at 10 s.
    assert figures.time_to_accuracy(times, accuracies, 0.5) == pytest.approx(10)


@pytest.mark.parametrize("accuracies", [[0.2, 0.4, 0.8], [0.2, 0.8, 0.4], [0.9, 0.4, 0.8], [0.5, 0.5, 0.5]])
def test_a_run_always_reaches_its_own_target(accuracies: list[float]) -> None:
    assert figures.time_to_accuracy([0, 1, 2], accuracies, figures.target_accuracy(accuracies)) is not None


def test_what_is_there_from_the_start_takes_no_time() -> None:
    assert figures.time_to_accuracy([0, 10], [0.7, 0.8], 0.6) == 0


def test_the_clock_of_a_journal_leaves_evaluation_out() -> None:
    # Called at 100. Evaluation 5 s, then 10 s of generating, 4 s of learning up to update 2 (within the stage of 4):
    # 119 − 100 − 5 = 14. Its checkpoint (3 s) is for an evaluation alone; 4 s more up to update 4: 126 − 100 − 8 = 18.
    # The checkpoint at the end of the stage (3 s) counts, so update 6 comes at 136 − 100 − 8 = 28.
    journal = [
        {"time": 105, "event": "evaluate", "seconds": 5},
        {"time": 115, "event": "generate", "seconds": 10},
        {"time": 119, "event": "learn", "seconds": 4, "stop": 2},
        {"time": 122, "event": "switch", "seconds": 3, "reason": "checkpoint"},
        {"time": 126, "event": "learn", "seconds": 4, "stop": 4},
        {"time": 129, "event": "switch", "seconds": 3, "reason": "checkpoint"},
        {"time": 136, "event": "learn", "seconds": 4, "stop": 6},
    ]
    clock = figures.journal_clock(journal, 100, stage_ends=[4, 8])
    assert clock["at"] == {2: 14, 4: 18, 6: 28}
    assert clock["excluded"] == {"evaluate": 5, "evaluation_checkpoints": 3}
    assert clock["spent"][4] == {"generate": 10, "learn": 8, "switch": 0}
    assert clock["spent"][6] == {"generate": 10, "learn": 12, "switch": 3}
    # An evaluation at the end took 2 s: 3 of the first one's 5 were loading, which counts as switching.
    clock = figures.journal_clock([*journal, {"time": 138, "event": "evaluate", "seconds": 2}], 100, stage_ends=[4, 8])
    assert clock["at"] == {2: 17, 4: 21, 6: 31}
    assert clock["excluded"] == {"evaluate": 4, "evaluation_checkpoints": 3}
    assert clock["spent"][6] == {"generate": 10, "learn": 12, "switch": 6}


# ---------------------------------------------------------------- intervals and operations


def test_the_union_counts_what_overlaps_once() -> None:
    # [0, 4] and [2, 6] cover 6; [1, 3] lies within; [8, 9] adds 1.
    intervals = [(8.0, 9.0), (0.0, 4.0), (2.0, 6.0), (1.0, 3.0)]
    assert figures.union(intervals) == 7
    assert figures.gaps(intervals) == [2]
    assert figures.union([]) == 0 and figures.gaps([]) == []


def test_only_what_ran_on_the_device_is_read_from_a_trace() -> None:
    events = [
        {"ph": "X", "cat": "kernel", "ts": 10, "dur": 5, "name": "gemm"},
        {"ph": "X", "cat": "gpu_memcpy", "ts": 20, "dur": 1, "name": "copy"},
        {"ph": "X", "cat": "cuda_runtime", "ts": 0, "dur": 100, "name": "cudaLaunchKernel"},
        {"ph": "M", "name": "process_name"},
    ]
    assert figures.device_intervals({"traceEvents": events}) == [(10, 15, "gemm"), (20, 21, "copy")]


def test_where_a_device_waits_is_named() -> None:
    intervals = [(0.0, 10.0, "a"), (2.0, 4.0, "b"), (30.0, 31.0, "c"), (31.5, 40.0, "a"), (65.0, 66.0, "c")]
    found = figures.gap_places(intervals, longer_than=1.0)
    assert found == [{"after": "a", "before": "c", "count": 2, "ms": 0.045}]


def test_a_span_is_told_by_what_ran_and_where_nothing_did() -> None:
    intervals = [(0.0, 400_000.0, "a"), (400_005.0, 600_000.0, "b"), (600_020.0, 800_000.0, "a")]  # microseconds
    found = profiling.device_figures(intervals, 1.0)
    assert found["busy_seconds"] == pytest.approx(0.799975)
    assert found["idle_share"] == pytest.approx(0.200025)
    assert found["idle_share_gaps_over_10_us"] == pytest.approx(20e-6)
    assert found["gaps"]["over_0_us"] == {"count": 2, "ms": pytest.approx(0.025)}
    assert found["top_kernels"][0] == {"name": "a", "ms": pytest.approx(599.98), "calls": 2}


def test_the_operations_of_a_sequence() -> None:
    # 3 + 2 tokens, 10 body parameters: 6 · 10 · 5 = 300. Output: 6 · 4 · 7 · 2 = 336. Attention: 6 · 2 · 8 · 25 = 2400.
    shape = figures.ModelShape(body_parameters=10, layers=2, attention_width=8, hidden=4, vocabulary=7)
    assert figures.training_flops(shape, [3], [2]) == 300 + 336 + 2400
    assert figures.training_flops(shape, [3, 3], [2, 2]) == 2 * (300 + 336 + 2400)
    # A group of one shares nothing; a second response adds its own tokens and its own pairs, 5² − 3².
    assert figures.shared_prompt_flops(shape, [(3, [2])]) == 300 + 336 + 2400
    assert figures.shared_prompt_flops(shape, [(3, [2, 2])]) == 420 + 2 * 336 + 2400 / 25 * (25 + 16)


# ---------------------------------------------------------------- the headline


def accuracy_run(times: list[float], accuracies: list[float]) -> dict[str, Any]:
    updates = [4 * place for place in range(len(times))]
    return {
        "times": times,
        "updates": updates,
        "curves": {"held_out": accuracies},
        "seconds": times[2],
        "sitting": 0,
    }


def made_runs() -> dict[str, Any]:
    return {
        "learner/stalewise": {"tokens_per_second": 600.0, "mfu": 0.3, "peak_bytes": 10},
        "learner/trl/batch256": {
            "tokens_per_second": 200.0,
            "tokens_per_second_update_only": 300.0,
            "peak_bytes": 40,
            "whole_update_at_once": True,
            "gradient_checkpointing": False,
        },
        "learner/trl/batch64": {
            "tokens_per_second": 100.0,
            "tokens_per_second_update_only": 150.0,
            "peak_bytes": 15,
            "whole_update_at_once": False,
            "gradient_checkpointing": False,
        },
        "memory/stalewise-whole": {"peak_bytes": 24},
        "sampler/stalewise": {"tokens_per_second": 800.0},
        "sampler/generate/batch64": {"tokens_per_second": 100.0, "tokens_per_second_without_logp": 160.0, "way": "a"},
        "sampler/generate/batch256": {"tokens_per_second": 200.0, "tokens_per_second_without_logp": 100.0, "way": "b"},
        "sampler/generate/batch1024": {"error": "out of\nmemory"},
        "idle/stalewise": {"idle_share": 0.01},
        "accuracy/trl/seed0": accuracy_run([0, 100, 200], [0.2, 0.4, 0.6]),
        "accuracy/trl_same_mu/seed0": accuracy_run([0, 80, 160], [0.2, 0.3, 0.4]),
        "accuracy/stalewise/seed0": accuracy_run([0, 25, 50], [0.2, 0.5, 0.6]),
    }


def test_every_figure_of_made_up_runs() -> None:
    found = figures.headline(made_runs())
    assert found["learner_ratio"] == 3  # 600 / 200, TRL's faster configuration
    assert found["learner_ratio_without_scoring"] == 2  # 600 / 300
    assert found["mfu"] == 0.3
    assert found["memory_ratio"] == 0.25  # 10 / 40
    assert found["memory_ratio_same_micro_batch"] == 0.6  # 24 / 40
    assert found["sampler_ratio"] == 4  # 800 / 200
    assert found["sampler_ratio_without_logp"] == 5  # 800 / 160
    assert found["idle_share"] == 0.01
    # Target (0.4 + 0.6) / 2 = 0.5: TRL at 150 s, ours at 25 s; TRL with our µ ends at 0.4.
    assert found["time_to_accuracy_ratio"] == pytest.approx(6)
    assert found["time_to_accuracy_ratio_same_mu"] == pytest.approx(160 / 25)  # at least: it was ended there
    assert any("at least what is said, since trl_same_mu was ended" in note for note in found["notes"])
    assert found["wallclock_ratio"] == 4  # 200 / 50
    assert "seed 0, held_out: trl_same_mu never reaches 0.500 (its last is 0.400)" in found["notes"]
    assert "sampler/generate/batch1024: memory" in found["notes"]


def test_a_file_with_nothing_in_it_has_every_key() -> None:
    found = figures.headline({})
    assert {found[key] for key in figures.KEYS} == {None}


def test_a_target_that_takes_more_updates_is_said() -> None:
    runs = made_runs()
    runs["accuracy/stalewise/seed0"] = accuracy_run([0, 25, 50, 75], [0.2, 0.3, 0.4, 0.6])
    found = figures.headline(runs)
    # 0.5 lies half way from update 8 (50 s) to update 12 (75 s): 62.5 s, against TRL's 150 s.
    assert found["time_to_accuracy_ratio"] == pytest.approx(2.4)
    assert found["wallclock_ratio"] == 4  # at 8 updates, as before
    assert "seed 0, held_out: stalewise reaches 0.500 after 10 updates, not 8" in found["notes"]


def test_seeds_are_summed_up_by_median_and_range() -> None:
    runs = made_runs()
    for seed, seconds in ((1, 20.0), (2, 100.0)):  # ratios 10 and 2 beside the 4 of seed 0
        runs[f"accuracy/trl/seed{seed}"] = runs["accuracy/trl/seed0"]
        runs[f"accuracy/stalewise/seed{seed}"] = accuracy_run([0, seconds / 2, seconds], [0.2, 0.5, 0.6])
    found = figures.headline(runs)
    assert found["wallclock_ratio"] == 4
    assert found["wallclock_ratio_range"] == [2, 10]


def test_a_seed_that_never_gets_there_counts() -> None:
    runs = made_runs()
    for seed in (1, 2):
        runs[f"accuracy/trl/seed{seed}"] = runs["accuracy/trl/seed0"]
        runs[f"accuracy/stalewise/seed{seed}"] = accuracy_run([0, 25, 50], [0.2, 0.3, 0.4])
    found = figures.headline(runs)
    assert found["time_to_accuracy_ratio"] == 0  # of 6, 0 and 0
    assert found["time_to_accuracy_ratio_range"] == [0, pytest.approx(6)]
    # TRL with our µ was not run with those seeds: nothing is known of them.
    assert found["time_to_accuracy_ratio_same_mu_range"] == [pytest.approx(6.4), pytest.approx(6.4)]


def test_sides_that_were_measured_at_different_times_are_named() -> None:
    runs = made_runs()
    runs["learner/stalewise"]["sitting"] = 0
    runs["learner/trl/batch256"]["sitting"] = 1
    runs["accuracy/stalewise/seed0"]["sitting"] = 1
    found = figures.parts_in_pieces(runs)
    assert found == ["learner", "accuracy, seed0"]


# ---------------------------------------------------------------- what is shown


def made_record() -> dict[str, Any]:
    runs = made_runs()
    settings = {"device": "cuda", "updates": 8, "stages": 2, "trl_mu": 4}
    return {**figures.headline(runs), "settings": settings, "runs": runs, "sittings": []}


def test_the_table_says_what_is_reached_and_what_is_not_known() -> None:
    rows = {line.split(" | ")[0]: line for line in table.markdown(made_record()).splitlines()}
    assert rows["| learner tokens/s against TRL's training step on the same tokens"].endswith(
        "| ≥ 3.00× | 3.00× | yes |"
    )
    assert rows["| model FLOP utilisation of the learner"].endswith("| ≥ 25.0% | 30.0% | yes |")
    assert rows["| peak learner memory at equal tokens per step against TRL"].endswith("| ≤ 0.50× | 0.25× | yes |")
    assert rows["| the same against TRL with our µ"].endswith("| ≥ 1.50× | 6.40× | yes |")
    without = table.markdown({**made_record(), "time_to_accuracy_ratio_same_mu": None})
    assert "| the same against TRL with our µ | ≥ 1.50× | n/a | unknown |" in without


def test_a_missed_bound_is_a_problem() -> None:
    record = {**made_record(), "idle_share": 0.03}
    assert "idle_share is 3.0%, not 2.0%" in table.problems(record)
    assert "| ≤ 2.0% | 3.0% | no |" in table.markdown(record)


def test_a_cpu_has_one_bound() -> None:
    record = {**made_record(), "settings": {**made_record()["settings"], "device": "cpu"}}
    assert [key for key in table.ROWS if table.bound(key, record) is not None] == ["wallclock_ratio"]


def test_the_picture_has_a_line_for_each_run_and_a_bar_for_each_figure() -> None:
    record = made_record()
    drawn = plot.draw(record)
    assert drawn.count("<polyline") == 3
    known = [key for key in figures.KEYS if record[key] is not None]
    assert all(key.replace("_", " ") in drawn for key in known)
    assert drawn.startswith("<svg") and drawn.endswith("</svg>")


# ---------------------------------------------------------------- scaling


def test_a_cost_that_rises_is_flat_explained_or_neither() -> None:
    assert scales.rise([8, 9, 10]) == 0.25  # from the smallest before it, not from its neighbour
    assert scales.verdict([10, 9, 11])["words"] == "flat within 22%"
    assert scales.verdict([10, 6, 5])["words"] == "falls by 50%"
    # Twice the cost for twice the work: explained. Twice the cost for the same work: not.
    assert scales.verdict([10, 20], [1, 2])["explained"] is True
    assert scales.verdict([10, 20], [1, 1])["explained"] is False
    assert scales.verdict([10, 20])["words"] == "rises by 100%"


def test_points_of_a_series_are_sorted_by_size() -> None:
    runs = {f"learner/length/{n}": {"costs": {"ns per token": n}} for n in (1024, 64)} | {
        "learner/length/256": {"error": "a\nb"}
    }
    found = scales.headline(runs)
    assert found["verdicts"]["learner/length: ns per token"]["sizes"] == [64, 1024]
    assert found["notes"] == ["learner/length/256: b"]
    assert "64: 64, 1,024: 1,024" in scales.markdown(found)


# ---------------------------------------------------------------- results that are kept


@pytest.mark.parametrize("path", RESULTS, ids=[path.name for path in RESULTS])
def test_results_hold_every_key_and_what_it_was_computed_from(path: Path) -> None:
    record = json.loads(path.read_text())
    assert set(figures.KEYS) <= record.keys()
    assert record["sittings"] and all(sitting["date"] and sitting["versions"] for sitting in record["sittings"])
    again = figures.headline(record["runs"])
    assert {key: again[key] for key in figures.KEYS} == pytest.approx({key: record[key] for key in figures.KEYS})
