"""From definitions and results to the jobs that come next: tuning, widening, the number of seeds, judged runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from experiments.lab.definition import Job, load_experiments
from experiments.lab.plan import describe_plan, is_collapsed, judged_jobs, next_jobs, score, seeds_of, tune, wider

from tiny_lab import LAB, define


def outcome(value: float, *, fell: bool = False) -> dict[str, Any]:
    return {"ended": "", "evaluations": {"accuracy": [10.0 if fell else 0.1, value, value, value]}}


class Runs:
    """Results by key, made up from the settings of a job once it was planned."""

    def __init__(self, result: Callable[[Job], dict[str, Any]]) -> None:
        self.result, self.done = result, {}

    def __call__(self, key: str) -> dict[str, Any] | None:
        return self.done.get(key)

    def finish(self, jobs: list[Job]) -> None:
        self.done |= {job.key: self.result(job) for job in jobs}


def rate_of(job: Job) -> float:
    return job.config["optimizer"]["learning_rate"]


def by_rate(scores: dict[float, float], spread: float = 0.0, hot: float = 1.0) -> Callable[[Job], dict[str, Any]]:
    def result(job: Job) -> dict[str, Any]:
        sign = 1 if job.config["seed"] % 2 else -1
        return outcome(scores[rate_of(job)] + sign * spread, fell=rate_of(job) >= hot)

    return result


def test_tuning_comes_first_then_judged_seeds_at_the_rates_that_won(tmp_path: Path) -> None:
    (experiment,) = define(tmp_path)
    runs = Runs(by_rate({1e-4: 0.5, 1e-3: 0.9, 1e-2: 0.2, 5e-4: 0.5}, hot=1e-3))
    first = next_jobs([experiment], "lab", runs)
    tuning = [job for job in first if job.config["seed"] in (101, 102)]
    assert len(tuning) == 2 * 3 * 2 and not any(job.options for job in tuning)
    assert [job.config["seed"] for job in first[: len(tuning)]].count(101) == 6  # before all others
    rest = first[len(tuning) :]  # what needs no tuning: the arm `fixed`, and the evaluation of the start
    assert sorted((job.kind, job.config["seed"]) for job in rest) == [
        ("evaluate", 200),
        ("evaluate", 201),
        ("train", 200),
        ("train", 201),
    ]
    runs.finish(tuning)
    judged = [job for job in next_jobs([experiment], "lab", runs) if job.config["seed"] >= 200 and job.kind == "train"]
    found, _ = tune(experiment, "lab", runs)
    assert (found.best("auto"), found.hot("GRPO"), found.widened) == (1e-3, 1e-3, 0)
    rates = sorted(rate_of(job) for job in judged if job.config["seed"] == 200)
    assert rates == [5e-4, 1e-3, 1e-3, 1e-3, 1e-3]  # fixed; auto, GRPO, GRPO hot and with foreign rollouts
    assert sum(job.options == {"pass_samples": 4} for job in judged) == 2  # of GRPO, on both seeds


def test_a_policy_for_others_is_made_first(tmp_path: Path) -> None:
    (experiment,) = define(tmp_path)
    runs = Runs(by_rate({1e-4: 0.5, 1e-3: 0.9, 1e-2: 0.2}, hot=1e-2))
    runs.finish([job for job in next_jobs([experiment], "lab", runs) if job.config["seed"] < 200])
    jobs = next_jobs([experiment], "lab", runs)
    assert jobs[0].kind == "policy" and jobs[0].config["seed"] == 100
    assert [job.needs for job in jobs if job.needs] == [(jobs[0].key,)] * 2


def test_a_hot_rate_may_have_to_be_beyond_the_border_of_collapse(tmp_path: Path) -> None:
    """Runs end at 40% of their best at 1e-3, and at 20% at 1e-2."""
    ends = {1e-4: 1.0, 1e-3: 0.4, 1e-2: 0.2, 5e-4: 0.8}

    def result(job: Job) -> dict[str, Any]:
        return {"ended": "", "evaluations": {"version": [0, 1], "accuracy": [1.0, *[ends[rate_of(job)]] * 3]}}

    for settings, hot in (("", 1e-3), ("hot = 0.25\n", 1e-2)):
        (experiment,) = define(tmp_path / str(hot), LAB.replace("[lab]\n", f"[lab]\n{settings}"))
        runs = Runs(result)
        runs.finish([job for job in next_jobs([experiment], "lab", runs) if job.config["seed"] < 200])
        found, _ = tune(experiment, "lab", runs)
        assert (found.hot("GRPO"), found.widened) == (hot, 1)  # the best rate is at the lower edge


def test_a_grid_without_a_hot_rate_gets_larger_rates(tmp_path: Path) -> None:
    (experiment,) = define(tmp_path)
    for hot, rates in ((1e-2, 3), (3e-2, 4), (1.0, 5)):  # two more at most
        runs = Runs(by_rate({1e-4: 0.5, 1e-3: 0.9, 1e-2: 0.3, 3e-2: 0.2, 1e-1: 0.1}, hot=hot))
        for _ in range(3):
            runs.finish([job for job in next_jobs([experiment], "lab", runs) if job.config["seed"] < 200])
        found, _ = tune(experiment, "lab", runs)
        assert (len(found.rates), found.widened) == (rates, rates - 3)
        assert found.hot("GRPO") == min(hot, 1e-1) and found.best("GRPO") == 1e-3


def test_a_best_rate_at_an_edge_widens_the_grid_for_all_arms_twice_at_most(tmp_path: Path) -> None:
    (experiment,) = define(tmp_path)
    # auto is best at the largest rate, GRPO inside: both get one more rate, and the same number of trials.
    scores = {"mu_grpo": {1e-4: 0.1, 1e-3: 0.2, 1e-2: 0.9, 3e-2: 0.3}, "grpo": {1e-4: 0.1, 1e-3: 0.9, 1e-2: 0, 3e-2: 0}}
    runs = Runs(lambda job: outcome(scores[job.config["objective"]["name"]][rate_of(job)]))
    runs.finish(tune(experiment, "lab", runs)[1])
    found, jobs = tune(experiment, "lab", runs)
    assert found.rates == (1e-4, 1e-3, 1e-2, 3e-2) and not found.is_complete and len(jobs) == 2 * 4 * 2
    runs.finish(jobs)
    found, _ = tune(experiment, "lab", runs)
    assert found.is_complete and found.widened == 1 and found.edges() == {}
    rising = Runs(lambda job: outcome(rate_of(job)))
    for _ in range(4):
        rising.finish(tune(experiment, "lab", rising)[1])
    found, _ = tune(experiment, "lab", rising)
    assert found.rates[-1] == 0.1 and found.widened == 2 and set(found.edges()) == {"auto", "GRPO"}


def test_an_arm_that_others_take_their_rate_from_need_not_be_judged(tmp_path: Path) -> None:
    alone = LAB.replace('auto = { objective = { name = "mu_grpo" } }\n', "").replace(
        'name = "{method}"\n', 'name = "{method}"\nrate = "tuning"\n'
    )
    (experiment,) = define(tmp_path, alone)
    # Best at the smallest rate, and collapsed from 1e-3 on. The grid stays: nothing is judged at the best rate.
    runs = Runs(by_rate({1e-4: 0.9, 1e-3: 0.5, 1e-2: 0.2, 5e-4: 0.5}, hot=1e-3))
    runs.finish(tune(experiment, "lab", runs)[1])
    found, jobs = tune(experiment, "lab", runs)
    assert found.is_complete and found.widened == 0 and len(jobs) == 3 * 2
    judged = [(arm.name, rate_of(chain[-1])) for arm, _, chain in judged_jobs(experiment, "lab", found)]
    assert set(judged) == {("GRPO, hot", 1e-3), ("GRPO, foreign", 1e-4), ("fixed", 5e-4), ("before", 1e-4)}


def test_seeds_follow_from_the_spread_within_their_range(tmp_path: Path) -> None:
    (experiment,) = define(tmp_path)
    # Scores ± 0.02 on two seeds: SD 0.0283, so 8.564 · 2 · 0.0008 / 0.03² = 15.2 seeds; nine are the most.
    for spread, wanted in ((0.02, (16, 9)), (0.01, (4, 4)), (0.0, (2, 2))):
        runs = Runs(by_rate({1e-4: 0.5, 1e-3: 0.9, 1e-2: 0.2}, spread, hot=1e-2))
        runs.finish(tune(experiment, "lab", runs)[1])
        assert seeds_of(experiment, "lab", tune(experiment, "lab", runs)[0]) == wanted


def test_a_score_is_the_mean_of_the_last_three_evaluations() -> None:
    run = outcome(0.0) | {"evaluations": {"accuracy": [0.9, 0.1, 0.2, 0.6]}}
    assert score(run) == pytest.approx(0.3)
    assert score(run | {"ended": "not finite"}) == 0.0
    # 0.3 is below half of 0.9; from 0.6 it would not be, nor without the first evaluation.
    assert is_collapsed(run) and is_collapsed(outcome(0.9) | {"ended": "not finite"})
    assert not is_collapsed(outcome(0.0) | {"evaluations": {"accuracy": [0.6, 0.1, 0.2, 0.6]}})


def test_rates_beside_a_grid() -> None:
    assert [wider(rate, down=True) for rate in (1e-4, 3e-3, 5e-4)] == [3e-5, 1e-3, 3e-4]
    assert [wider(rate, down=False) for rate in (1e-4, 3e-3, 5e-4)] == [3e-4, 1e-2, 1e-3]


def test_a_plan_counts_a_job_of_two_claims_once(tmp_path: Path) -> None:
    (experiment,) = define(tmp_path)
    lines = describe_plan([experiment, experiment], "lab", lambda key: None)
    assert lines[1].split()[1] == "12" and lines[2].split()[1] == "0" and "core-seconds" in lines[-1]


def test_a_plan_for_a_real_model_counts_seconds_of_a_gpu() -> None:
    experiments = load_experiments(Path(__file__).parents[2] / "experiments")
    lines = describe_plan(experiments, "real", lambda key: None)
    assert [line.split()[0] for line in lines[1:-1]] == [
        "clipping-dilemma",
        "where-the-harm-is",
        "mismatch",
        "two-anchors",
        "the-law",
        "pass-at-k",
    ]
    # Three rates on two seeds: of the relaxed clip, of two methods, and of four.
    assert [line.split()[1] for line in lines[1:-1]] == ["0", "6", "12", "24", "0", "0"]
    assert lines[-1].endswith("seconds of one H200")
