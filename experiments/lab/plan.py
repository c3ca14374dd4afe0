"""From definitions and the results so far to the jobs that come next.

Each tuned arm is tried at every rate of its claim's grid on the tuning seeds. Where the best rate of any arm is at an
edge, all arms get one more rate at that end; a larger one also where an arm is to collapse at its hot rate and does so
at none. Then the number of judged seeds follows from the spread, and every arm is
judged at its rate on seeds that nothing else has used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from experiments.lab.definition import HALF, Arm, Experiment, Job
from experiments.lab.statistics import seeds_needed

TUNING_SEEDS = (101, 102)
FIRST_SEED = 200
WIDENINGS = 2  # rates that may be added to a grid
LAST = 3  # evaluations whose mean is a run's score
COLLAPSE_RULE = "its score is below half of its best evaluation, an update is not finite, or the guard ends the run"
HOT = "hot of "  # before the name of an arm, in the rate of another
NEAR = 3  # best rates of an arm that its spread is pooled over

Kept = Callable[[str], Mapping[str, Any] | None]  # the result of a job by its key


def score(run: Mapping[str, Any]) -> float:
    """Mean held-out accuracy of the last three evaluations; 0 for a run that stopped at a non-finite update."""
    return 0.0 if run["ended"] else float(np.mean(run["evaluations"]["accuracy"][-LAST:]))


def is_collapsed(run: Mapping[str, Any], share: float = HALF) -> bool:
    """Whether the run collapsed, by `COLLAPSE_RULE`, or with another share of its best evaluation in place of half."""
    return bool(run["ended"]) or score(run) < max(run["evaluations"]["accuracy"]) * share


@dataclass(frozen=True, slots=True)
class Tuning:
    """The tuning runs of an experiment as far as they are done."""

    rates: tuple[float, ...]  # the grid, as widened so far
    scores: dict[str, dict[float, list[float]]]  # by arm and rate
    collapses: dict[str, dict[float, int]]
    is_complete: bool
    widened: int = 0

    def best(self, arm: str) -> float:
        """The rate with the best mean score."""
        return max(self.rates, key=lambda rate: float(np.mean(self.scores[arm][rate])))

    def collapsing(self, arm: str) -> float | None:
        """The smallest rate at which all tuning seeds collapse."""
        return next((rate for rate in self.rates if self.collapses[arm][rate] == len(TUNING_SEEDS)), None)

    def hot(self, arm: str) -> float:
        """The smallest rate at which all tuning seeds collapse; the largest of the grid where there is none."""
        return self.collapsing(arm) or self.rates[-1]

    def edges(self) -> dict[str, float]:
        """Arms whose best rate is the smallest or the largest of the grid."""
        return {arm: rate for arm in self.scores if (rate := self.best(arm)) in (self.rates[0], self.rates[-1])}

    def spread(self, arm: str) -> float:
        """Standard deviation over seeds, pooled over the arm's three best rates."""
        by_rate = sorted(self.scores[arm].values(), key=lambda values: -float(np.mean(values)))
        return math.sqrt(float(np.mean([np.var(values, ddof=1) for values in by_rate[:NEAR]])))

    def rate_of(self, arm: Arm) -> float | None:
        """The rate at which an arm is judged; None: that of its settings."""
        if arm.kind == "evaluate" or arm.rate == "set":
            return None
        if arm.rate.startswith(HOT):
            return self.hot(arm.rate.removeprefix(HOT))
        return self.best(arm.name if arm.is_tuned else arm.rate.removeprefix("of "))


def tune(experiment: Experiment, setting: str, kept: Kept) -> tuple[Tuning, list[Job]]:
    """The tuning so far, and its jobs."""
    rates = tuple(sorted(experiment.setting(setting).rates))
    every = experiment.arms(setting).values()
    arms = [arm for arm in every if arm.is_tuned]
    hot = {arm.rate.removeprefix(HOT) for arm in every if arm.rate.startswith(HOT)}
    widened = 0
    while True:
        found, jobs = _tried(experiment, setting, arms, rates, widened, kept)
        judged = {arm.name for arm in arms if arm.is_judged}  # a wider grid is for the rates of these
        edges = {rate for arm, rate in found.edges().items() if arm in judged} if found.is_complete else set()
        if found.is_complete and any(found.collapsing(arm) is None for arm in hot):
            edges.add(rates[-1])
        if not edges or widened == WIDENINGS or experiment.is_smoke:
            return found, jobs
        rates = tuple(sorted({*rates, *(wider(rate, down=rate == rates[0]) for rate in edges)}))
        widened += 1


def _tried(
    experiment: Experiment, setting: str, arms: Sequence[Arm], rates: tuple[float, ...], widened: int, kept: Kept
) -> tuple[Tuning, list[Job]]:
    scores: dict[str, dict[float, list[float]]] = {arm.name: {rate: [] for rate in rates} for arm in arms}
    collapses: dict[str, dict[float, int]] = {arm.name: dict.fromkeys(rates, 0) for arm in arms}
    jobs: list[Job] = []
    complete, share = True, experiment.setting(setting).hot
    for seed in TUNING_SEEDS:
        for arm in arms:
            for rate in rates:
                chain = experiment.job(arm, seed, rate, judged=False)
                jobs += chain
                if (run := kept(chain[-1].key)) is None:
                    complete = False
                else:
                    scores[arm.name][rate].append(score(run))
                    collapses[arm.name][rate] += is_collapsed(run, share)
    return Tuning(rates, scores, collapses, complete, widened), jobs


def wider(rate: float, *, down: bool) -> float:
    """The next rate of the series 1, 3, 10, 30.

    >>> wider(1e-4, down=True), wider(3e-3, down=False)
    (3e-05, 0.01)
    """
    series = [float(f"{digit}e{power}") for power in range(-9, 2) for digit in (1, 3)]
    below, above = [r for r in series if r < rate * 0.99], [r for r in series if r > rate * 1.01]
    return below[-1] if down else above[0]


def seeds_of(experiment: Experiment, setting: str, tuning: Tuning) -> tuple[int, int]:
    """Seeds that the power calculation asks for, from the two largest spreads, and those within the setting's range."""
    table = experiment.setting(setting)
    fewest, most = (2, 2) if experiment.is_smoke else table.seeds
    spreads = sorted((tuning.spread(arm) for arm in tuning.scores), reverse=True)
    if not spreads:
        return fewest, fewest
    asked = seeds_needed(spreads[0], spreads[min(1, len(spreads) - 1)], table.margin)
    return asked, min(max(asked, fewest), most)


def judged_jobs(experiment: Experiment, setting: str, tuning: Tuning) -> Iterator[tuple[Arm, int, list[Job]]]:
    """For each arm whose rate is known and each seed its job, preceded by the jobs it needs."""
    arms = [arm for arm in experiment.arms(setting).values() if arm.is_judged]
    count = seeds_of(experiment, setting, tuning)[1] if tuning.is_complete else experiment.setting(setting).seeds[0]
    for arm in arms:
        known = tuning.is_complete or arm.kind == "evaluate" or arm.rate == "set"
        for seed in range(FIRST_SEED, FIRST_SEED + count) if known else ():
            yield arm, seed, experiment.job(arm, seed, tuning.rate_of(arm))


def next_jobs(experiments: Sequence[Experiment], setting: str, kept: Kept) -> list[Job]:
    """Every job that is known now, once: tuning first, then judged seeds in order, long runs first within each."""
    found: list[tuple[tuple[int, float], list[Job]]] = []
    for experiment in experiments:
        if setting in experiment.settings:
            tuning, jobs = tune(experiment, setting, kept)
            found += [((0, -cost(job)), [job]) for job in jobs]
            for _, seed, chain in judged_jobs(experiment, setting, tuning):
                found.append(((seed, -cost(chain[-1])), chain))
    ordered = [job for _, chain in sorted(found, key=lambda pair: pair[0]) for job in chain]
    policies = [job for job in ordered if job.kind == "policy"]  # others wait for them
    return list({job.key: job for job in (*policies, *ordered)}.values())


# ---------------------------------------------------------------- what it costs

# Core-seconds on a 3 GHz x86 core, from process times of single runs on an ARM core divided by 2.5. Tasks of real
# models: seconds of an H200, `jsonl` with GSM8K and 0.5B, 280 tokens a response, from rates of benchmarks/gsm8k.py;
# `arithmetic-chat` with SmolLM2-135M and 35 tokens.
UPDATE_S = {
    "arithmetic": 0.028 / 64,
    "arithmetic-steps": 0.11 / 32,
    "jsonl": 0.006,
    "arithmetic-chat": 0.0003,
}  # a rollout's generation and its share of an update
REFRESH_S = 0.065  # a generation batch: checkpoint, loading, shards
SAMPLE_S = {  # an evaluated response
    "arithmetic": 0.00016,
    "arithmetic-steps": 0.0013,
    "jsonl": 0.003,
    "arithmetic-chat": 0.0001,
}


def cost(job: Job) -> float:
    """Estimated core-seconds of a job."""
    config, task = job.config, job.config["task"]["name"]
    schedule, batch, evaluation = (config[table] for table in ("schedule", "batch", "evaluation"))
    sample = SAMPLE_S.get(task, SAMPLE_S["arithmetic-steps"])
    more = evaluation["prompts"] * job.options.get("pass_samples", 0) * sample
    if job.kind == "evaluate":
        return more
    updates = schedule["updates"]
    rollouts = updates * batch["prompts"] * batch["group_size"]
    refreshes = -(-updates // (schedule.get("updates_per_generation") or 16))
    evaluations = 1 + (-(-updates // evaluation["every"]) if evaluation["every"] else 1)
    learned = rollouts * UPDATE_S.get(task, UPDATE_S["arithmetic-steps"])
    return learned + refreshes * REFRESH_S + evaluations * evaluation["prompts"] * evaluation["samples"] * sample + more


def describe_plan(experiments: Sequence[Experiment], setting: str, kept: Kept) -> list[str]:
    """Jobs and core-seconds of each claim that no earlier claim has: tuning, and judged with fewest and most seeds."""
    seen: set[str] = set()
    totals = np.zeros(4)
    lines = [f"{'claim':22} {'tuning':>16} {'judged, fewest':>18} {'judged, most':>18} {'done':>6}"]
    for experiment in (one for one in experiments if setting in one.settings):
        tuning, jobs = tune(experiment, setting, kept)
        middle = tuning if tuning.is_complete else _assumed(tuning)
        fewest, most = experiment.setting(setting).seeds
        columns: list[list[Job]] = [[job for job in jobs if job.key not in seen]]
        for count in (fewest, most):
            seeds = range(FIRST_SEED, FIRST_SEED + count)
            columns.append(
                [
                    job
                    for arm in experiment.arms(setting).values()
                    if arm.is_judged
                    for seed in seeds
                    for job in experiment.job(arm, seed, middle.rate_of(arm))
                    if job.key not in seen
                ]
            )
        columns = [list({job.key: job for job in column}.values()) for column in columns]
        seen |= {job.key for column in columns for job in column}
        done = sum(kept(job.key) is not None for job in (*columns[0], *columns[2]))
        parts = [(len(column), sum(map(cost, column))) for column in columns]
        totals += [parts[0][1], parts[1][1], parts[2][1], done]
        cells = [f"{count:5} {seconds:8,.0f} s" for count, seconds in parts]
        lines.append(f"{experiment.name:22} {cells[0]:>16} {cells[1]:>18} {cells[2]:>18} {done:6}")
    low, high = totals[0] + totals[1], totals[0] + totals[2]
    where = f"core-seconds: {low / 16 / 60:.0f} to {high / 16 / 60:.0f} min on 16 cores"
    lines.append(f"in all {low:,.0f} to {high:,.0f} {where if setting == 'lab' else 'seconds of one H200'}")
    return lines


def _assumed(tuning: Tuning) -> Tuning:
    """A tuning with made-up outcomes, for a plan before there are any: hot and tuned rates differ."""
    inner = tuning.rates[1] if tuning.rates else math.nan
    scores = {arm: {rate: [float(rate == inner)] * 2 for rate in tuning.rates} for arm in tuning.scores}
    return Tuning(tuning.rates, scores, {arm: dict.fromkeys(tuning.rates, 0) for arm in scores}, is_complete=True)
