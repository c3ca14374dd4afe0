"""The arithmetic of benchmarks/gsm8k.py on numbers made by hand: clocks, ratios, intervals, lists of jobs."""

from __future__ import annotations

import dataclasses
import json
import signal
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # benchmarks/ is no part of the package

from benchmarks.gsm8k_bench import figures, jobs, library, ours, picture, settings  # noqa: E402
from benchmarks.gsm8k_bench.library import model_directory  # noqa: E402

from benchmarks import gsm8k  # noqa: E402
from multi_process import fake_service  # noqa: E402

FILES = {"model": "m", "train": "math_train.jsonl", "test": "math500_test.jsonl", "also_test": "gsm8k_test.jsonl"}


def job(arm: str, seed: int, curve: list[tuple[float, float]], *, rate: float = 1e-6, **more: Any) -> dict[str, Any]:
    """A timed job whose evaluations are (seconds, accuracy)."""
    return {
        "arm": arm,
        "seed": seed,
        "learning_rate": rate,
        "timed": True,
        "resumed": False,
        "seconds": curve[-1][0],
        "curve": [{"update": i, "seconds": s, "accuracy": a} for i, (s, a) in enumerate(curve)],
        "greedy": {"accuracy": curve[-1][1] + 0.1},
        **more,
    }


# ---------------------------------------------------------------- curves and ratios


def test_time_to_an_accuracy_is_linear_between_evaluations() -> None:
    # 0.3 lies half-way from 0.2 (10 s) to 0.4 (20 s).
    assert figures.time_to([(0, 0.1), (10, 0.2), (20, 0.4)], 0.3) == pytest.approx(15.0)


def test_a_peak_that_is_not_held_is_not_reached() -> None:
    # Pooled: (0.5 + 0.3) / 2 = 0.4 from 10 s on.
    assert figures.time_to([(0, 0.1), (10, 0.5), (20, 0.3)], 0.45) is None
    assert figures.time_to([(0, 0.1), (10, 0.5), (20, 0.3)], 0.4) == pytest.approx(10.0)


def test_the_ratio_is_of_times_to_the_references_final_accuracy() -> None:
    # Target 0.4: the reference at 100 s. Ours: 0.4 lies 2/3 of the way from 0.2 to 0.5: 20 + 2/3·30 = 40 s.
    theirs = [job("trl_vllm", 0, [(0, 0.2), (100, 0.4)])]
    mine = [job("mu_grpo", 0, [(0, 0.2), (20, 0.2), (50, 0.5)])]
    assert figures.time_ratio(mine, theirs) == pytest.approx(2.5)


def test_an_arm_that_never_gets_there_has_the_ratio_zero() -> None:
    theirs = [job("trl_vllm", 0, [(0, 0.2), (100, 0.4)])]
    assert figures.time_ratio([job("p3o", 0, [(0, 0.2), (10, 0.39)])], theirs) == 0.0


def test_a_seed_that_never_gets_there_pulls_the_median() -> None:
    # Ratios 0, 2, 4: median 2.
    theirs = [job("trl_vllm", 0, [(0, 0.2), (100, 0.4)])]
    mine = [
        job("p3o", 0, [(0, 0.2), (10, 0.3)]),
        job("p3o", 1, [(0, 0.2), (50, 0.4)]),
        job("p3o", 2, [(0, 0.2), (25, 0.4)]),
    ]
    assert figures.time_ratio(mine, theirs) == pytest.approx(2.0)


def test_a_reference_seed_below_the_mean_counts_with_its_whole_run() -> None:
    # Finals 0.3 and 0.5, target 0.4. Seed 0 never: 90 s, its end. Seed 1: 0.4 at 50 of 100 s. Median 70 s; ours 35 s.
    theirs = [job("trl_vllm", 0, [(0, 0.3), (90, 0.3)]), job("trl_vllm", 1, [(0, 0.3), (100, 0.5)])]
    assert figures.time_ratio([job("auto", 0, [(0, 0.3), (35, 0.4)])], theirs) == pytest.approx(2.0)


def test_equal_wallclock_is_at_the_end_of_the_faster_arm() -> None:
    # Ours ends at 40 s with 0.5; the reference is then at 0.2 + 0.4·0.2 = 0.28.
    theirs = [job("trl_vllm", 0, [(0, 0.2), (100, 0.4)])]
    found = figures.equal_wallclock([job("mu_grpo", 0, [(0, 0.2), (40, 0.5)])], theirs)
    assert found is not None
    assert found["seconds"] == 40
    assert found["difference"] == pytest.approx(0.22)
    assert found["low"] is None


def test_of_two_seeds_one_of_which_never_gets_there_the_ratio_is_zero() -> None:
    # Ratios 0 and 2: their mean would be the ratio of no run.
    theirs = [job("trl_vllm", 0, [(0, 0.2), (100, 0.4)])]
    mine = [job("p3o", 0, [(0, 0.2), (10, 0.3)]), job("p3o", 1, [(0, 0.2), (50, 0.4)])]
    assert figures.time_ratio(mine, theirs) == 0.0
    assert figures.reached(mine, theirs) == [1, 2]


def test_the_ratio_to_a_point_below_is_of_both_sides_times_to_it() -> None:
    # Target 0.40 − 0.01 = 0.39: the reference at 95 of 100 s, ours, which ends at 0.395, at 19 of 19.5 s: 5.
    theirs = [job("trl_vllm", 0, [(0, 0.2), (100, 0.4)])]
    mine = [job("mu_grpo", 0, [(0, 0.2), (19.5, 0.395)])]
    assert figures.time_ratio(mine, theirs) == 0.0
    assert figures.near_ratio(mine, theirs) == pytest.approx(5.0)


def test_a_seed_that_ran_beside_others_has_the_seconds_of_the_timed_ones() -> None:
    # The timed seeds took 28 and 32 s for the second evaluation, 60 and 70 s for the third: medians 30 and 65.
    timed = [
        job("mu_grpo", 0, [(0, 0.2), (28, 0.3), (60, 0.4)]),
        job("mu_grpo", 1, [(0, 0.2), (32, 0.3), (70, 0.4)]),
    ]
    beside = {**job("mu_grpo", 2, [(0, 0.2), (99, 0.35), (200, 0.45)]), "timed": False}
    coarse = {**job("mu_grpo", 3, [(0, 0.2), (60, 0.4)]), "timed": False, "curve": [{"update": 7, "accuracy": 0.4}]}
    found = figures.with_clocks([beside, coarse, *timed])
    assert [one["seed"] for one in found] == [0, 1, 2]  # nobody was timed at update 7
    assert figures.points(found[2]) == [(0, 0.2), (30, 0.35), (65, 0.45)]
    assert found[2]["clock"] == "borrowed" and beside["curve"][1]["seconds"] == 99
    assert figures.with_clocks([beside]) == []
    adaptive = [{**one, "arm": "auto"} for one in (timed[0], beside)]
    assert [one["seed"] for one in figures.with_clocks(adaptive)] == [0]  # its stages differ from seed to seed


def test_the_picture_has_seeds_that_ran_beside_others(tmp_path: Path) -> None:
    curve = [(0.0, 0.2), (50.0, 0.4)]
    seeds = [job("mu_grpo", 0, curve), {**job("mu_grpo", 1, [(0.0, 0.2), (150.0, 0.5)]), "timed": False}]
    seeds += [job("auto", 0, curve), {**job("auto", 1, curve), "timed": False}]  # its clock depends on the seed
    shared = {"stage_updates": 16, "mu": 4, "test": "test.jsonl"}
    assert picture.draw(seeds, {"target_accuracy": None}, tmp_path / "one.svg", settings=shared)
    drawn = (tmp_path / "one.svg").read_text()
    assert "<!-- stalewise, µ-GRPO, µ = 16 (2 seeds) -->" in drawn
    assert '<!-- stalewise, recipe "auto" (1 seed) -->' in drawn
    assert not picture.draw(seeds[1:2], {"target_accuracy": None}, tmp_path / "two.svg", settings=shared)


def test_the_target_is_that_of_all_judged_seeds() -> None:
    # Finals 0.4 (timed) and 0.5 (beside others): target 0.45, which ours reaches at 25 of 30 s; the reference's seeds
    # take 90 s (never, its end) and 75 s: median 82.5.
    theirs = [
        job("trl_vllm", 0, [(0, 0.2), (90, 0.4)]),
        {**job("trl_vllm", 1, [(0, 0.2), (500, 0.5)]), "timed": False},
    ]
    head = figures.headline([*theirs, job("mu_grpo", 0, [(0, 0.2), (30, 0.5)])])
    ratio = head["time_to_accuracy_ratio"]["mu_grpo"]
    assert head["target_accuracy"] == pytest.approx(0.45)
    assert ratio["median"] == pytest.approx(82.5 / 25)
    assert (ratio["seeds"], ratio["timed"], ratio["reached"]) == ([1, 2], [1, 1], [1, 1])
    assert head["seconds"]["trl_vllm"] == 90
    assert "trl_vllm: 1 of 2 seeds ran beside others and have the seconds of the timed ones" in head["notes"]


# ---------------------------------------------------------------- intervals


def test_interval_over_seeds_by_students_t() -> None:
    # Mean 0.4, sd 0.1, n = 3, t(2) = 4.3027: half width 4.3027·0.1/√3 = 0.24841.
    found = figures.over_seeds([0.3, 0.4, 0.5])
    assert found is not None
    assert (found["mean"], found["low"], found["high"]) == pytest.approx((0.4, 0.15159, 0.64841), abs=1e-4)
    assert figures.over_seeds([]) is None
    assert (figures.over_seeds([0.3]) or {})["low"] is None


def test_welch_with_equal_variances_and_sizes() -> None:
    # Variances 0.01 each, n = 3: error √(0.02/3) = 0.081650, 4 degrees of freedom, t = 2.7764: half 0.22669.
    found = figures.welch([0.4, 0.5, 0.6], [0.3, 0.4, 0.5])
    assert found is not None
    assert (found["difference"], found["low"], found["high"]) == pytest.approx((0.1, -0.12669, 0.32669), abs=1e-4)


def test_a_loss_of_more_than_a_point_is_excluded_by_the_interval() -> None:
    level = [0.30, 0.31, 0.32]  # error √(2 · 0.0001 / 3) = 0.0082, half 0.0227
    found = [figures.against([value + more for value in level], level) for more in (0.012, 0.013)]
    assert [one and one["within_a_point"] for one in found] == [False, True]
    alone = figures.against([0.3], level)
    assert alone is not None and (alone["low"], alone["within_a_point"]) == (None, None)
    assert figures.against([], level) is None


def test_the_power_to_exclude_a_loss_of_a_point() -> None:
    # Without spread it is certain. Far from the margin it is 0 or 1; at the margin it is one side of 95%.
    sides = {"a": [0.3, 0.32], "b": [0.29, 0.31, 0.30], "c": [0.5]}
    assert figures.pooled_sd(sides.values()) == pytest.approx(((2e-4 + 2e-4) / 3) ** 0.5)
    power = {gap: figures.power(0.01, gap, 5) for gap in (-0.05, -0.01, 0.0, 0.05)}
    assert power[-0.05] == 0 and power[-0.01] == pytest.approx(0.025, abs=0.005) and power[0.05] == 1
    # Noncentral t, 8 degrees of freedom, δ = 0.01 / (0.01·√(2/5)) = 1.58: P(t' > 2.306) = 0.29.
    assert power[0.0] == pytest.approx(0.29, abs=0.01)
    assert figures.power(0.01, 0.0, 10) > power[0.0]
    assert figures.pooled_sd([[0.3], []]) is None


def test_equal_seeds_leave_an_interval_of_no_width() -> None:
    theirs = [job("trl_vllm", seed, [(0, 0.2), (90, 0.4)]) for seed in range(2)]
    mine = [job("mu_grpo", seed, [(0, 0.2), (30, 0.4)]) for seed in range(3)]
    found = figures.bootstrap(mine, theirs, figures.time_ratio)
    assert (found["median"], found["low"], found["high"]) == pytest.approx((3.0, 3.0, 3.0))
    assert found["seeds"] == [3, 2]


# ---------------------------------------------------------------- the whole


def test_headline_of_two_arms() -> None:
    speed = {"response_tokens": 1000, "by_event": {"generate": 10.0, "learn": 15.0, "switch": 5.0}}
    mine = [
        job("mu_grpo", seed, [(0, 0.2), (30, 0.4)], generate_seconds=10.0, learn_seconds=15.0, **speed)
        for seed in range(2)
    ]
    theirs = [
        job("trl_vllm", seed, [(0, 0.2), (90, 0.4)], generate_seconds=40.0, learn_seconds=45.0, **speed)
        for seed in range(2)
    ]
    head = figures.headline([*mine, *theirs])
    assert head["time_to_accuracy_ratio"]["mu_grpo"]["median"] == pytest.approx(3.0)
    assert head["time_to_accuracy_ratio"]["p3o"] is None
    assert head["final_accuracy"]["trl_vllm"]["mean"] == pytest.approx(0.4)
    assert head["final_accuracy_greedy"]["mu_grpo"]["mean"] == pytest.approx(0.5)
    assert head["sampler_ratio"]["mu_grpo"]["median"] == pytest.approx(4.0)
    assert head["learner_ratio"]["mu_grpo"]["median"] == pytest.approx(3.0)
    assert head["switch_share"]["mu_grpo"] == pytest.approx(5 / 30)
    assert head["best_arm"] is None
    assert "p3o: not measured" in head["notes"]
    assert "mu_grpo" in picture.table(head, FILES)


def test_a_second_test_set_is_a_column_with_the_first_policy_in_a_row_of_its_own() -> None:
    also = [{"before": 0.5, "accuracy": accuracy} for accuracy in (0.6, 0.7)]
    mine = [job("mu_grpo", seed, [(0, 0.2), (30, 0.4)], also=also[seed]) for seed in range(2)]
    head = figures.headline([*mine, job("trl_vllm", 0, [(0, 0.2), (90, 0.4)], also={"before": 0.5, "accuracy": 0.55})])
    assert (head["base_accuracy"], head["base_accuracy_also"]) == (0.2, 0.5)
    assert head["final_accuracy_also"]["mu_grpo"]["mean"] == pytest.approx(0.65)
    assert head["final_accuracy_also"]["p3o"] is None
    lines = picture.table(head, FILES).splitlines()
    assert lines[0] == "m: math_train → math500_test"
    assert lines[1].split()[-1] == "gsm8k_test"
    assert lines[3].split() == ["before", "0.200", "0.500"]
    assert lines[5].split()[-1] == "0.550"
    assert "0.550" not in picture.table(head, {**FILES, "also_test": ""})


def test_claims_compare_our_arms_with_each_other() -> None:
    judged = [
        job("mu_grpo", 0, [(0, 0.2), (40, 0.40)]),
        job("synchronous", 0, [(0, 0.2), (80, 0.44)]),
        job("auto", 0, [(0, 0.2), (50, 0.41)]),
    ]
    head = figures.headline(judged)
    third, fourth, ninth = (head["claims"][number] for number in ("3", "4", "9 (µ = 16)"))
    # At equal updates 0.40 − 0.44. At 40 s the synchronous arm is half-way: 0.32.
    assert third["equal_updates"]["difference"] == pytest.approx(-0.04)
    assert (third["equal_wallclock"]["seconds"], third["equal_wallclock"]["difference"]) == pytest.approx((40, 0.08))
    assert third["equal_wallclock"]["values"] == [[0.40], [pytest.approx(0.32)]]
    assert fourth["equal_updates"] is None  # neither arm was judged
    assert ninth["arms"] == ["auto", "mu_grpo"]
    assert ninth["equal_updates"]["difference"] == pytest.approx(0.01)
    text = picture.table(head, {"model": "m", "train": "a", "test": "b", "also_test": ""})
    assert "claim 3: mu_grpo less synchronous: -0.040 at equal updates, +0.080 at equal wall-clock" in text
    assert "claim 4" not in text


def test_without_the_reference_ratios_are_null() -> None:
    head = figures.headline([job("mu_grpo", 0, [(0, 0.2), (30, 0.4)])])
    assert head["time_to_accuracy_ratio"]["mu_grpo"] is None
    assert head["target_accuracy"] is None
    assert head["final_accuracy"]["mu_grpo"]["mean"] == pytest.approx(0.4)


def test_times_of_jobs_that_ran_among_others_do_not_count() -> None:
    theirs = job("trl_vllm", 0, [(0, 0.2), (90, 0.4)])
    shared = {**job("mu_grpo", 0, [(0, 0.2), (30, 0.4)]), "timed": False}
    head = figures.headline([theirs, shared])
    assert head["time_to_accuracy_ratio"]["mu_grpo"] is None
    assert head["final_accuracy"]["mu_grpo"]["mean"] == pytest.approx(0.4)


def test_learning_rates_and_the_best_arm_come_from_the_tuning_seeds_alone() -> None:
    tuning = [
        job(arm, seed, [(0, 0.2), (30, accuracy)], rate=rate, timed=False)
        for arm, accuracies in (("mu_grpo", (0.30, 0.40, 0.35)), ("p3o", (0.31, 0.33, 0.45)))
        for rate, accuracy in zip((1e-6, 2e-6, 4e-6), accuracies, strict=True)
        for seed in (101, 102)
    ]
    judged = [job("mu_grpo", 0, [(0, 0.2), (30, 0.9)], rate=rate) for rate in (1e-6, 2e-6)]
    head = figures.headline([*tuning, *judged])
    assert head["tuning"]["mu_grpo"]["best"] == 2e-6
    assert head["tuning"]["mu_grpo"]["inside"] is True
    assert head["tuning"]["p3o"]["inside"] is False
    assert head["best_arm"] == "p3o"
    assert head["final_accuracy"]["mu_grpo"]["values"] == [0.9]  # that of the tuned learning rate
    assert not any("judged at" in note for note in head["notes"])
    elsewhere = figures.headline([*tuning, judged[0]])
    assert "mu_grpo: judged at 1e-06 and not at its tuned rate, 2e-06" in elsewhere["notes"]


def test_arms_that_were_left_out_or_failed_are_said() -> None:
    left = {"arm": "trl_vllm", "seed": 0, "learning_rate": 1e-6, "left_out": "vllm is not installed"}
    failed = {"arm": "p3o", "seed": 0, "learning_rate": 1e-6, "error": "Traceback\nRuntimeError: no"}
    notes = figures.headline([left, failed])["notes"]
    assert "trl_vllm, seed 0, learning rate 1e-06: left out: vllm is not installed" in notes
    assert "p3o, seed 0, learning rate 1e-06: failed: RuntimeError: no" in notes


# ---------------------------------------------------------------- our clock


def test_our_clock_leaves_out_start_up_evaluations_and_checkpoints_for_them() -> None:
    def record(time: float, event: str, seconds: float, **notes: Any) -> dict[str, Any]:
        return {"time": time, "event": event, "seconds": seconds, **notes}

    journal = [
        record(5, "switch", 5, reason="first checkpoint"),
        record(15, "evaluate", 10, version=0),
        record(25, "generate", 10, version=0),  # the clock begins at 15
        record(32, "switch", 7, reason="learner"),  # 5 more than the longest later one: start-up
        record(42, "learn", 10, first=0, stop=32),  # 42 − 15 − 5 = 22, less 3 of the first update
        record(46, "switch", 4, reason="checkpoint"),  # nothing is generated from 32
        record(56, "evaluate", 10, version=32),
        record(58, "switch", 2, reason="learner"),
        record(68, "learn", 10, first=32, stop=64),  # 68 − 15 − 5 − 3 − 14 = 31
        record(72, "switch", 4, reason="checkpoint"),  # 64 generates: it counts
        record(82, "evaluate", 10, version=64),
        record(92, "generate", 10, version=64),
        record(93, "switch", 1, reason="learner"),
        record(103, "learn", 10, first=64, stop=96),  # 103 − 15 − 5 − 3 − 24 = 56
    ]
    clock = ours.journal_clock(journal, first_update=3.0)
    assert clock["at"] == {32: 19.0, 64: 31.0, 96: 56.0}
    assert clock["startup"] == {"before_first_generation": 15.0, "first_learner": 5.0, "first_update": 3.0}
    assert clock["excluded"] == {"evaluate": 20.0, "evaluation_checkpoints": 4.0}
    # 20 generate, 30 − 3 learn, 2 + 2 + 4 + 1 switch: 56 in all.
    assert clock["spent"] == {"generate": 20.0, "learn": 27.0, "switch": 9.0, "between": 0.0}


def test_a_run_that_generated_nothing_has_no_clock() -> None:
    assert ours.journal_clock([{"time": 5.0, "event": "evaluate", "seconds": 1.0}])["at"] == {}


# ---------------------------------------------------------------- jobs


def test_what_is_done_is_not_wanted_again_unless_its_time_is(tmp_path: Path) -> None:
    def asked(*, timed: bool) -> jobs.Job:
        return jobs.Job("p3o", 0, 1e-6, settings.Settings(), tmp_path, tmp_path, timed=timed)

    assert jobs.is_wanted(asked(timed=False))
    asked(timed=False).file.write_text(json.dumps({"timed": False, "curve": []}))
    assert not jobs.is_wanted(asked(timed=False))
    assert jobs.is_wanted(asked(timed=True))
    asked(timed=False).file.write_text(json.dumps({"error": "no"}))
    assert jobs.is_wanted(asked(timed=False))


LISTS = sorted((ROOT / "benchmarks" / "plans").glob("*.txt"))


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.stem)
def test_planned_jobs_are_jobs_and_stand_once(path: Path) -> None:
    kept = ["--out", str(ROOT / "benchmarks" / "results" / "gsm8k-jobs")]  # with the tuned rates
    still_tuned = {line[1] for one in LISTS for line in jobs.read_list(one) if int(line[3]) >= figures.TUNING_SEEDS}
    found: list[jobs.Job] = []
    for line in jobs.read_list(path):
        try:
            found.append(gsm8k.job_of(gsm8k.parser().parse_args(["run", *line, *kept])))
        except SystemExit:  # no tuned rate yet
            assert line[1] in still_tuned
            later = ["1e-6" if word == "tuned" else word for word in line]
            found.append(gsm8k.job_of(gsm8k.parser().parse_args(["run", *later, *kept])))
    assert found and len({one.name for one in found}) == len(found)
    for one in found:
        one.settings.check(one.arm)


def test_a_tuned_rate_is_the_best_one_of_the_arm_and_size(tmp_path: Path) -> None:
    def asked(*more: str) -> jobs.Job:
        given = ["run", "--arm", "p3o", "--seed", "0", "--lr", "tuned", "--out", str(tmp_path), *more]
        return gsm8k.job_of(gsm8k.parser().parse_args(given))

    small, large = settings.Settings(evaluate_every=128), settings.Settings(prompts=64)

    def write(name: str, size: settings.Settings, seed: int, rate: float, accuracy: float, **more: Any) -> None:
        made = job("p3o", seed, [(0, 0.1), (9, accuracy)], rate=rate, settings=size.record(), **more)
        (tmp_path / f"{name}.json").write_text(json.dumps(made))

    write("low", small, 101, 1e-6, 0.2)
    write("best", small, 101, 2e-6, 0.3)
    with pytest.raises(gsm8k.NotTunedError, match=r"2e-06 is best for p3o among 1e-06, 2e-06, and at the edge"):
        asked()
    write("high", small, 101, 4e-6, 0.1)
    write("judged", small, 0, 4e-6, 0.9)
    for name, rate, accuracy in (("lower", 4e-6, 0.8), ("large", 8e-6, 0.9), ("larger", 2e-5, 0.8)):
        write(name, large, 101, rate, accuracy)
    write("failed", small, 101, 1e-5, 0.9, error="no")
    assert asked().rate == 2e-6 and asked("--prompts", "64").rate == 8e-6
    with pytest.raises(SystemExit, match=r"no job in .* is of p3o, a tuning seed and this size"):
        asked("--prompts", "32")


def test_twice_the_updates_have_the_rate_of_the_arm(tmp_path: Path) -> None:
    for rate, accuracy in ((1e-6, 0.2), (2e-6, 0.3), (4e-6, 0.2)):
        made = job("auto", 101, [(0, 0.1), (9, accuracy)], rate=rate, settings=settings.Settings().record())
        (tmp_path / f"{rate}.json").write_text(json.dumps(made))
    given = ["run", "--arm", "auto_x2", "--seed", "0", "--lr", "tuned", "--out", str(tmp_path)]
    assert gsm8k.job_of(gsm8k.parser().parse_args(given)).rate == 2e-6
    record = settings.our_record(
        "auto_x2", settings.Settings(), seed=0, rate=2e-6, runs=tmp_path, name="run", changes={}
    )
    assert record["recipe"] == "auto" and record["schedule"] == {"updates": 256}


def test_lists_of_jobs_have_comments(tmp_path: Path) -> None:
    path = tmp_path / "jobs.txt"
    path.write_text("# tuning\n--arm p3o --seed 101 --lr 1e-6  # first\n\n--arm auto --seed 0 --lr 2e-6 --timed\n")
    found = jobs.read_list(path)
    assert [line[1] for line in found] == ["p3o", "auto"]
    assert found[1][-1] == "--timed"


@pytest.mark.parametrize("arm", settings.OURS)
def test_each_arm_of_ours_is_a_config(arm: str, tmp_path: Path) -> None:
    import stalewise

    record = settings.our_record(
        arm, settings.Settings(), seed=1, rate=2e-6, runs=tmp_path, name="run", changes={"learner.compile": "never"}
    )
    config = stalewise.make_config(record)
    assert config.schedule.updates == (256 if arm.endswith("_x2") else 128)
    assert config.optimizer.schedule == "cosine"
    assert config.optimizer.warmup_updates == 8
    assert config.learner.compile == "never"


@pytest.mark.parametrize(
    ("arm", "stages", "groups"), [("mu_grpo", 8, "skip"), ("mu_grpo_64", 2, "skip"), ("p3o_64", 2, "keep")]
)
def test_a_number_behind_an_arm_is_the_updates_of_a_stage(arm: str, stages: int, groups: str, tmp_path: Path) -> None:
    record = settings.our_record(arm, settings.Settings(), seed=0, rate=1e-6, runs=tmp_path, name="run", changes={})
    assert record["schedule"] == {"kind": "staged", "updates": 128, "stages": stages}
    assert record["objective"]["name"] == arm.removesuffix("_64")
    assert record["batch"]["without_variance"] == groups


def test_a_job_that_fails_beside_others_is_tried_once_more_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "exit_when_told", lambda: None)
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, time; file = open(sys.argv[2], 'a'); print(time.time(), file=file)\n"
        "time.sleep(float(sys.argv[3])); print(time.time(), file=file); sys.exit(int(sys.argv[4]))"
    )
    listed = [([str(tmp_path / "failing"), "0", "1"], False), ([str(tmp_path / "good"), "1.5", "0"], False)]
    assert jobs.Queue(script, [], seconds=30.0, parallel=2).work(listed)
    failing, good = ([float(line) for line in (tmp_path / name).read_text().split()] for name in ("failing", "good"))
    assert len(failing) == 4 and len(good) == 2
    assert good[1] < failing[2]


def test_jobs_beside_each_other_share_the_device_and_timed_ones_have_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_service(tmp_path, monkeypatch)
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys; open(sys.argv[2], 'w').write(os.environ.get('CUDA_MPS_PIPE_DIRECTORY', 'alone'))"
    )
    listed = [([str(tmp_path / name)], name == "timed") for name in ("first", "timed", "second")]
    assert jobs.Queue(script, [], seconds=30.0, parallel=2).work(listed)
    first, timed, second = ((tmp_path / name).read_text() for name in ("first", "timed", "second"))
    assert timed == "alone" and first == second != "alone"
    assert (tmp_path / "service").read_text().splitlines() == [f"{first} -d", f"{first} quit"]
    assert jobs.Queue(script, [], seconds=30.0, parallel=1).work([([str(tmp_path / "single")], False)])
    assert (tmp_path / "single").read_text() == "alone"


def test_no_more_jobs_run_at_once_than_the_disk_has_room_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"a": torch.zeros(100, 10, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    for free, count in ((3.9, 3), (0.5, 1)):
        room = SimpleNamespace(free=int(free * 1000 * jobs.BYTES_A_WEIGHT))
        monkeypatch.setattr(jobs.shutil, "disk_usage", lambda path, room=room: room)
        assert jobs.jobs_that_fit(tmp_path, tmp_path / "work") == count
    asked: list[int] = []
    monkeypatch.setattr(jobs.Queue, "work", lambda queue, todo: asked.append(queue.parallel) or True)
    (tmp_path / "list.txt").write_text("--arm mu_grpo --seed 0 --lr 1e-6\n")
    told = ["next", "--list", str(tmp_path / "list.txt"), "--model", str(tmp_path), "--train", "x", "--test", "x"]
    told += ["--out", str(tmp_path / "jobs"), "--work", str(tmp_path / "work"), "--parallel", "4"]
    assert gsm8k.main(told) == 3 and asked == [1]  # none was done


DONE = ("mu_grpo-s0", "mu_grpo-s1", "p3o-s0")


def test_a_list_with_something_left_is_not_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = tmp_path / "list.txt"
    listed.write_text("--arm p3o --seed 0 --lr tuned\n--arm mu_grpo --seed 0 --lr 1e-6\n")
    told = ["next", "--list", str(listed), "--out", str(tmp_path / "jobs"), "--work", str(tmp_path / "work")]
    outcomes: list[dict[str, Any]] = [{"error": "no"}, {"error": "no"}, {"left_out": "no vllm"}, {"curve": []}]

    def work(queue: jobs.Queue, todo: list[tuple[list[str], bool]]) -> bool:
        for line, _ in todo:
            one = gsm8k.job_of(gsm8k.parser().parse_args(["run", *queue.common, *line]))
            one.out.mkdir(exist_ok=True)
            one.file.write_text(json.dumps(outcomes.pop(0)))
        return True

    monkeypatch.setattr(jobs.Queue, "work", work)
    assert gsm8k.main(told) == 3
    assert "--arm p3o --seed 0 --lr tuned: passed over: --lr tuned: no job in" in capsys.readouterr().out
    listed.write_text("--arm mu_grpo --seed 0 --lr 1e-6\n")
    assert gsm8k.main(told) == 3  # it failed
    for _ in range(2):
        assert gsm8k.main(told) == 0
    assert not outcomes
    other = tmp_path / "other.txt"
    other.write_text("--arm p3o --seed 0 --lr tuned\n")
    assert gsm8k.main([*told, "--list", str(other)]) == 3  # nothing but what is passed over
    outcomes = [{"curve": []}, {"curve": []}]
    other.write_text("--arm p3o --seed 0 --lr 1e-6\n")
    listed.write_text("--arm mu_grpo --seed 1 --lr 1e-6\n")
    assert gsm8k.main([*told, f"--list={other}"]) == 0 and not outcomes
    assert {one.stem for one in (tmp_path / "jobs").iterdir()} == {f"{one}-lr1e-06" for one in DONE}


def test_each_process_with_vllm_has_a_port_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "benchmarks" / "worker.py"  # instead of TRL: notes its environment
    script.parent.mkdir()
    script.write_text(
        "import json, os, pathlib, sys\n"
        "spec = json.loads(pathlib.Path(sys.argv[2]).read_text())\n"
        "pathlib.Path(spec['result']).write_text(json.dumps({'port': os.environ.get('MASTER_PORT')}))\n"
    )
    monkeypatch.setenv("MASTER_PORT", "29500")

    def port(arm: str, worker: str) -> int:
        job = jobs.Job(arm, 0, 1e-6, settings.Settings(), tmp_path / "out", tmp_path / "work")
        return int(jobs._work(job, worker, tmp_path, script)["port"])

    with socket.socket() as first, socket.socket() as second:
        for opened in (first, second):  # neither is told a port on which the other one listens
            opened.bind(("127.0.0.1", port("trl_vllm", "theirs")))
            opened.listen()
    assert port("mu_grpo", "ours") == port("trl_vllm", "evaluate") == 29500


def test_no_job_is_begun_without_the_time_for_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys, time; open(sys.argv[2], 'w').close(); time.sleep(float(sys.argv[3]))")
    listed = [([str(tmp_path / name), "0.9"], False) for name in ("first", "second")]
    queue = jobs.Queue(script, [], seconds=20.0, parallel=1, least=19.5)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        assert not queue.work(listed)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert (tmp_path / "first").exists()
    assert not (tmp_path / "second").exists()


def test_tuning_jobs_may_be_evaluated_less_often() -> None:
    often, seldom = ({"settings": {"evaluate_every": every, "updates": 128}} for every in (32, 128))
    assert figures.size_of({**often, "seed": 0}) == figures.size_of({**seldom, "seed": 101})
    assert figures.size_of({**often, "seed": 0}) != figures.size_of({**seldom, "seed": 0})


def test_files_of_before_there_was_a_second_test_set_are_of_the_same_size() -> None:
    before = {"seed": 0, "settings": {"updates": 128}}
    assert figures.size_of(before) == figures.size_of({"seed": 0, "settings": {"updates": 128, "also_test": ""}})
    assert figures.size_of(before) != figures.size_of({"seed": 0, "settings": {"updates": 128, "also_test": "gsm8k"}})


def test_a_second_test_set_that_is_not_there_is_refused_before_the_training(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no such file"):
        settings.Settings(also_test=str(tmp_path / "gsm8k.jsonl")).check("mu_grpo")


def test_the_last_policy_answers_both_test_sets_and_the_first_policy_the_second_one_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = jobs.smoke_settings(tmp_path)
    rows = [{"problem": f"{a}+{a + 1}=", "answer": str(2 * a + 1)} for a in range(1, 31)]
    also = tmp_path / "other.jsonl"
    also.write_text("".join(json.dumps(row) + "\n" for row in rows))
    chosen = settings.Settings(**{**small, "also_test": str(also), "test_prompts": 8, "verifier_workers": 1})
    spec = {"settings": dataclasses.asdict(chosen), "out": str(tmp_path / "out")}
    first = model_directory("arithmetic")
    answers: dict[str, Any] = {}
    real = library.Evaluator.__call__

    def noted(self: library.Evaluator, *given: Any) -> Any:
        answers[self.settings.test] = real(self, *given)
        return answers[self.settings.test]

    monkeypatch.setattr(library.Evaluator, "__call__", noted)
    found = jobs.evaluate_last(spec, first, 0)
    assert (found["greedy"]["prompts"], found["greedy"]["samples"]) == (8, 1)
    assert (found["also"]["prompts"], found["also"]["samples"]) == (30, 1)  # all of it
    assert 0 < found["also"]["before"] == found["also"]["accuracy"]  # it is the same policy
    kept = tmp_path / "out" / "base" / "arithmetic-other-greedy-n8.json"
    kept.write_text(json.dumps({"accuracy": 0.125}))
    monkeypatch.setattr(library.Evaluator, "__call__", lambda self, *given: answers[self.settings.test])  # once more
    assert jobs.evaluate_last(spec, first, 0)["also"] == {**found["also"], "before": 0.125}


@pytest.mark.parametrize("arm", ["mu_grpo", "random_reward"])
def test_the_number_of_scoring_processes_reaches_the_verifier(arm: str, tmp_path: Path) -> None:
    chosen = settings.Settings(verifier_workers=3)
    record = settings.our_record(arm, chosen, seed=0, rate=1e-6, runs=tmp_path, name="run", changes={})
    assert record["task"]["options"]["verifier_options"]["workers"] == 3


# ---------------------------------------------------------------- TRL's side


@pytest.mark.nightly  # imports TRL
def test_vllm_is_started_by_trl_with_a_cache_of_the_size_that_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code that starts vLLM is TRL's; what it would start notes its arguments."""
    from accelerate import Accelerator
    from benchmarks.gsm8k_bench import theirs
    from trl.generation import vllm_generation

    from policies import POLICY
    from stalewise.models.loading import load_model, load_tokenizer

    started: list[dict[str, Any]] = []
    monkeypatch.setattr(vllm_generation, "LLM", lambda **arguments: started.append(arguments), raising=False)
    monkeypatch.setattr(vllm_generation, "is_vllm_available", lambda: True)
    accelerator = Accelerator(cpu=True)  # before these, which TRL sets for vLLM: it would look for other ranks
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")

    def start() -> dict[str, Any]:
        model = load_model(str(POLICY), device=accelerator.device)
        vllm_generation.VLLMGeneration(model, accelerator, load_tokenizer(str(POLICY)), gpu_memory_utilization=0.3)
        return started.pop()

    plain = start()
    assert "kv_cache_memory_bytes" not in plain
    theirs.fix_vllm_cache(1.5)
    assert start() == {**plain, "kv_cache_memory_bytes": 1_500_000_000}
    theirs.fix_vllm_cache(2)  # of a later job in the same process
    assert start() == {**plain, "kv_cache_memory_bytes": 2_000_000_000}
