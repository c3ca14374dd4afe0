"""From job files to the keys of the results. Pure; every figure is null where what it needs was not measured."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from benchmarks.versus.figures import time_to_accuracy

from .settings import ARMS, CONTROLS, OURS, REFERENCE, Settings

Record = Mapping[str, Any]
TUNING_SEEDS = 100  # seeds from here on are for tuning and are never judged
RESAMPLES = 2000
PAIRS = 20_000  # of arms that are simulated for a power
A_POINT = 0.01
OWN_STAGES = ("auto", "auto_x2")  # arms whose clock depends on the seed, by the stages that it has
# Two-sided 95% quantiles of Student's t by degrees of freedom; scipy has them all, and is asked where it is there.
_T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228}
CLAIM_PAIRS = {  # by claim of docs/results.md, the arm that is compared and the one it is compared with
    "3": ("mu_grpo", "synchronous"),
    "3 (µ = 64)": ("mu_grpo_64", "synchronous"),
    "3 (µ = 128)": ("mu_grpo_128", "synchronous"),
    "4": ("p3o", "grpo_tight"),
    "9 (µ = 64)": ("auto", "mu_grpo_64"),
    "9 (µ = 16)": ("auto", "mu_grpo"),
    "9 (µ = 4)": ("auto", "synchronous"),
}


# ---------------------------------------------------------------- curves


def time_to(curve: Sequence[tuple[float, float]], target: float) -> float | None:
    """When the monotone fit of (seconds, accuracy) first reaches the target, linear in between; None: never."""
    return time_to_accuracy([seconds for seconds, _ in curve], [accuracy for _, accuracy in curve], target)


def accuracy_at(curve: Sequence[tuple[float, float]], seconds: float) -> float:
    """Accuracy at a time, linear between evaluations; after the end, that of the end."""
    for (before, low), (after, high) in itertools.pairwise(curve):
        if seconds <= after:
            return low + (high - low) * (seconds - before) / (after - before)
    return curve[-1][1]


def points(job: Record) -> list[tuple[float, float]]:
    """(seconds, accuracy) of a job that has a clock."""
    return [(float(point["seconds"]), float(point["accuracy"])) for point in job["curve"]]


def final(job: Record) -> float:
    return float(job["curve"][-1]["accuracy"])


# ---------------------------------------------------------------- intervals


def t95(freedom: float) -> float:
    try:
        from scipy import stats
    except ImportError:
        return _T95.get(int(freedom), 1.96) if freedom >= 1 else math.inf
    return float(stats.t.ppf(0.975, freedom))


def over_seeds(values: Sequence[float]) -> dict[str, Any] | None:
    """Mean with its 95% interval by Student's t; no interval of one value."""
    if not values:
        return None
    mean = statistics.fmean(values)
    found: dict[str, Any] = {"mean": mean, "low": None, "high": None, "sd": None, "values": list(values)}
    if len(values) > 1:
        sd = statistics.stdev(values)
        half = t95(len(values) - 1) * sd / math.sqrt(len(values))
        found |= {"low": mean - half, "high": mean + half, "sd": sd}
    return found


def welch(left: Sequence[float], right: Sequence[float]) -> dict[str, Any] | None:
    """Difference of two means with Welch's 95% interval; none where a side has one value."""
    if not left or not right:
        return None
    difference = statistics.fmean(left) - statistics.fmean(right)
    found: dict[str, Any] = {"difference": difference, "low": None, "high": None, "seeds": [len(left), len(right)]}
    if min(len(left), len(right)) < 2:
        return found
    parts = [statistics.variance(values) / len(values) for values in (left, right)]
    error = math.sqrt(sum(parts))
    if error == 0:
        return found | {"low": difference, "high": difference}
    spread = sum(part**2 / (len(values) - 1) for part, values in zip(parts, (left, right), strict=True))
    half = t95(sum(parts) ** 2 / spread) * error
    return found | {"low": difference - half, "high": difference + half}


def against(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any] | None:
    """The difference of two arms, and whether its interval excludes a loss of more than a point; None: no interval."""
    if (found := welch(ours, theirs)) is None:
        return None
    return found | {"within_a_point": None if found["low"] is None else found["low"] > -A_POINT}


def pooled_sd(sides: Iterable[Sequence[float]]) -> float | None:
    """Standard deviation over the seeds of an arm, from all arms with two or more."""
    known = [values for values in sides if len(values) > 1]
    freedom = sum(len(values) - 1 for values in known)
    squares = sum(statistics.variance(values) * (len(values) - 1) for values in known)
    return math.sqrt(squares / freedom) if freedom else None


def power(sd: float, difference: float, seeds: int) -> float:
    """How often as many seeds of two arms exclude a loss of a point, if they truly differ by so much (simulated)."""
    draw = np.random.default_rng(0)
    ours, theirs = (draw.normal(mean, sd, (PAIRS, seeds)) for mean in (difference, 0.0))
    error = np.sqrt((ours.var(1, ddof=1) + theirs.var(1, ddof=1)) / seeds)
    return float((ours.mean(1) - theirs.mean(1) - t95(2 * seeds - 2) * error > -A_POINT).mean())


def power_table(accuracies: Mapping[str, Sequence[float]]) -> dict[str, Any] | None:
    """`power` by true difference and seeds of each arm."""
    if (sd := pooled_sd(accuracies.values())) is None:
        return None
    by_difference = {
        f"{gap:g}": {str(n): power(sd, gap, n) for n in (5, 10)} for gap in (0.0, 0.005, 0.01, 0.015, 0.02)
    }
    return {"sd": sd, "power": by_difference}


def bootstrap(
    ours: Sequence[Any], theirs: Sequence[Any], figure: Callable[[Sequence[Any], Sequence[Any]], float]
) -> dict[str, Any]:
    """A figure of two arms with its 95% interval, both arms' seeds drawn again; no interval where a side has one."""
    found: dict[str, Any] = {"median": figure(ours, theirs), "low": None, "high": None}
    found["seeds"] = [len(ours), len(theirs)]
    if min(len(ours), len(theirs)) < 2:
        return found
    draw = random.Random(0)
    drawn = sorted(
        figure(draw.choices(ours, k=len(ours)), draw.choices(theirs, k=len(theirs))) for _ in range(RESAMPLES)
    )
    return found | {"low": drawn[int(0.025 * RESAMPLES)], "high": drawn[int(0.975 * RESAMPLES) - 1]}


# ---------------------------------------------------------------- figures


def time_ratio(ours: Sequence[Record], theirs: Sequence[Record], less: float = 0.0) -> float:
    """How many times sooner an arm reaches the reference's final accuracy (the mean of its seeds), less so much.

    The reference's time is the median of its seeds' times to that accuracy (a seed that never reaches it: its whole
    run). Each seed of ours has its own ratio, 0 where it never gets there; the median counts, of an even number the
    lower of the two in the middle: a mean of a ratio and of "never" says nothing.
    """
    target = statistics.fmean(map(final, theirs)) - less
    reference = statistics.median([_or_end(job, target) for job in theirs])
    return statistics.median_low([ratio_of(reference, time_to(points(job), target)) for job in ours])


def near_ratio(ours: Sequence[Record], theirs: Sequence[Record]) -> float:
    """`time_ratio` to a point below the reference's final accuracy, the margin within which arms count as level.

    Of two arms that end level, each seed has an even chance to end below the other's mean, and then never reaches it.
    """
    return time_ratio(ours, theirs, less=A_POINT)


def reached(ours: Sequence[Record], theirs: Sequence[Record]) -> list[int]:
    """How many seeds reach the reference's final accuracy, and of how many."""
    target = statistics.fmean(map(final, theirs))
    return [sum(time_to(points(job), target) is not None for job in ours), len(ours)]


def with_clocks(judged: Sequence[Record]) -> list[Record]:
    """The seeds of an arm that were timed; and the others, with the median seconds of the timed ones at each update.

    An arm's seconds depend on the seed by some 10%, half of it through the length of its responses.
    """
    timed = [job for job in judged if has_clock(job)]
    if not timed or timed[0]["arm"] in OWN_STAGES:
        return timed
    at = {
        update: statistics.median([_by_update(job)[update] for job in timed])
        for update in set.intersection(*(set(_by_update(job)) for job in timed))
    }
    found = list(timed)
    for job in judged:
        if not has_clock(job) and _by_update(job).keys() <= at.keys():
            curve = [{**point, "seconds": at[point["update"]]} for point in job["curve"]]
            found.append({**job, "curve": curve, "clock": "borrowed"})
    return sorted(found, key=lambda job: job["seed"])


def _by_update(job: Record) -> dict[int, Any]:
    """Seconds at each evaluated update; None where they were not measured."""
    return {int(point["update"]): point.get("seconds") for point in job["curve"]}


def _or_end(job: Record, target: float) -> float:
    reached = time_to(points(job), target)
    return points(job)[-1][0] if reached is None else reached


def ratio_of(reference: float, seconds: float | None) -> float:
    """Never reached: 0, as slow as can be."""
    return 0.0 if seconds is None else math.inf if seconds == 0 else reference / seconds


def equal_wallclock(ours: Sequence[Record], theirs: Sequence[Record]) -> dict[str, Any] | None:
    """Accuracy of ours less that of the reference at one time: when the first of the two arms is over (medians)."""
    if not ours or not theirs:
        return None
    seconds = min(statistics.median([points(job)[-1][0] for job in side]) for side in (ours, theirs))
    sides = [[accuracy_at(points(job), seconds) for job in side] for side in (ours, theirs)]
    return {"seconds": seconds, **(welch(*sides) or {}), "values": sides}


def rate_of(kind: str) -> Callable[[Record], float | None]:
    """Response tokens per second that an arm samples (with scoring by the verifier) or learns from."""

    def rate(job: Record) -> float | None:
        tokens, seconds = job.get("response_tokens"), job.get(f"{kind}_seconds")
        return tokens / seconds if tokens and seconds else None

    return rate


def rate_ratio(kind: str, ours: Sequence[Record], theirs: Sequence[Record]) -> dict[str, Any] | None:
    rate = rate_of(kind)
    left, right = ([job for job in side if rate(job)] for side in (ours, theirs))
    if not left or not right:
        return None

    def figure(mine: Sequence[Record], others: Sequence[Record]) -> float:
        return statistics.median([rate(job) or 0.0 for job in mine]) / statistics.median(
            [rate(job) or 0.0 for job in others]
        )

    return bootstrap(left, right, figure)


def switch_share(job: Record) -> float | None:
    """Share of an arm's clock that goes into switches between sampling and learning, checkpoints among them."""
    seconds, spent = job.get("seconds"), job.get("by_event", {})
    return spent.get("switch", 0.0) / seconds if seconds and spent else None


def claims(accuracies: Mapping[str, Sequence[float]], timed: Mapping[str, Sequence[Record]]) -> dict[str, Any]:
    """Our arms against each other, for the claims that docs/results.md judges: at equal updates and equal wall-clock.

    Claim 3: staged µ-GRPO against GRPO with fresh rollouts, at three sizes of a stage; 4: P3O against a tight clip with
    the same stages; 9: `auto` against the single methods, all three, since one tuning seed tells little of which one is
    best.
    """
    return {
        number: {
            "arms": [arm, other],
            "equal_updates": welch(accuracies[arm], accuracies[other]),
            "equal_wallclock": equal_wallclock(timed[arm], timed[other]),
        }
        for number, (arm, other) in CLAIM_PAIRS.items()
    }


# ---------------------------------------------------------------- all of them


def done_jobs(jobs: Iterable[Record | None]) -> list[Record]:
    """Those that came to their end and have a curve."""
    return [job for job in jobs if job and not job.get("error") and not job.get("left_out") and job.get("curve")]


def is_tuning(job: Record) -> bool:
    return int(job["seed"]) >= TUNING_SEEDS


def size_of(job: Record) -> dict[str, Any]:
    """The settings that must be equal for jobs to be compared."""
    free = {"trl_batch", "trl_checkpointing", "vllm_memory", "vllm_sleep", "threads", "device", "rollouts_per_shard"}
    free |= {"verifier_workers", "vllm_cache_gb"}
    usual = {"evaluate_every": Settings().evaluate_every} if is_tuning(job) else {}  # final accuracy decides there
    every = {"also_test": "", **job["settings"], **usual}  # files of before there was a second test set are of the same
    return {key: value for key, value in every.items() if key not in free}


def tuned(jobs: Sequence[Record]) -> dict[str, Any]:
    """By arm: mean final accuracy on the tuning seeds by learning rate, the best one, and whether it lies inside."""
    found: dict[str, Any] = {}
    for arm in ARMS:
        by_rate: dict[float, list[float]] = {}
        for job in jobs:
            if job["arm"] == arm and is_tuning(job):
                by_rate.setdefault(float(job["learning_rate"]), []).append(final(job))
        if by_rate:
            means = {rate: statistics.fmean(by_rate[rate]) for rate in sorted(by_rate)}
            best = max(means, key=lambda rate: means[rate])
            found[arm] = {
                "accuracy": {f"{rate:g}": mean for rate, mean in means.items()},
                "trials": sum(map(len, by_rate.values())),
                "best": best,
                "inside": min(means) < best < max(means),
            }
    return found


def best_arm(jobs: Sequence[Record], tuning: Record) -> tuple[str | None, str | None]:
    """Which arm of ours is best on the tuning seeds, and by what.

    By time to the reference's accuracy where every arm was timed there, by final accuracy elsewhere.
    """
    sides: dict[str, list[Record]] = {}
    for arm in (*OURS, REFERENCE):
        if arm in tuning and arm not in CONTROLS:
            rate = tuning[arm]["best"]
            sides[arm] = [job for job in jobs if job["arm"] == arm and is_tuning(job) and job["learning_rate"] == rate]
    ours = [arm for arm in sides if arm != REFERENCE]
    if not ours:
        return None, None
    if REFERENCE in sides and all(has_clock(job) for side in sides.values() for job in side):
        scores = {arm: time_ratio(sides[arm], sides[REFERENCE]) for arm in ours}
        return max(ours, key=lambda arm: scores[arm]), "time to the reference's accuracy on the tuning seeds"
    scores = {arm: tuning[arm]["accuracy"][f"{tuning[arm]['best']:g}"] for arm in ours}
    return max(ours, key=lambda arm: scores[arm]), "final accuracy on the tuning seeds"


def has_clock(job: Record) -> bool:
    """Whether its seconds count: it ran alone and without a break."""
    return bool(job.get("timed")) and not job.get("resumed") and job.get("seconds") is not None


def headline(jobs: Iterable[Record]) -> dict[str, Any]:
    """All keys of the results, from the jobs of one size.

    Accuracies are those of all judged seeds, and so are the times to an accuracy (`with_clocks`); rates, shares and
    seconds are those of the timed ones.
    """
    every = list(jobs)
    done = done_jobs(every)
    tuning = tuned(done)
    judged = {arm: _judged(done, arm, tuning) for arm in ARMS}
    timed = {arm: [job for job in judged[arm] if has_clock(job)] for arm in ARMS}
    clocked = {arm: with_clocks(judged[arm]) for arm in ARMS}
    reference = clocked[REFERENCE]
    name, rule = best_arm(done, tuning)
    accuracies = {arm: [final(job) for job in judged[arm]] for arm in ARMS}

    def by_arm(figure: Callable[[str], Any], arms: Sequence[str] = OURS) -> dict[str, Any]:
        return {arm: figure(arm) for arm in arms}

    def ratio(arm: str) -> dict[str, Any] | None:
        if not clocked[arm] or not reference:
            return None
        found = bootstrap(clocked[arm], reference, time_ratio)
        return found | {"reached": reached(clocked[arm], reference), "timed": [len(timed[arm]), len(timed[REFERENCE])]}

    def near(arm: str) -> dict[str, Any] | None:
        return bootstrap(clocked[arm], reference, near_ratio) if clocked[arm] and reference else None

    notes = [f"{_called(job)}: left out: {job['left_out']}" for job in every if job.get("left_out")]
    notes += [f"{_called(job)}: failed: {job['error'].splitlines()[-1]}" for job in every if job.get("error")]
    notes += [
        f"{arm}: best at the edge of its grid, {one['best']:g}" for arm, one in tuning.items() if not one["inside"]
    ]
    notes += [f"{arm}: not measured" for arm in ARMS if not judged[arm]]
    notes += [
        f"{arm}: judged at {judged[arm][0]['learning_rate']:g} and not at its tuned rate, {one['best']:g}"
        for arm, one in tuning.items()
        if judged[arm] and float(judged[arm][0]["learning_rate"]) != one["best"]
    ]
    borrowed = {arm: sum(job.get("clock") == "borrowed" for job in clocked[arm]) for arm in ARMS}
    notes += [
        f"{arm}: {count} of {len(clocked[arm])} seeds ran beside others and have the seconds of the timed ones"
        for arm, count in borrowed.items()
        if count
    ]
    return {
        "time_to_accuracy_ratio": by_arm(ratio, [arm for arm in OURS if arm not in CONTROLS]),
        "time_to_within_a_point_ratio": by_arm(near, [arm for arm in OURS if arm not in CONTROLS]),
        "best_arm": name,
        "best_arm_by": rule,
        "target_accuracy": statistics.fmean(map(final, reference)) if reference else None,
        "final_accuracy": by_arm(lambda arm: over_seeds(accuracies[arm]), ARMS),
        "final_accuracy_greedy": by_arm(
            lambda arm: over_seeds([float(job["greedy"]["accuracy"]) for job in judged[arm] if job.get("greedy")]), ARMS
        ),
        "final_accuracy_also": by_arm(lambda arm: over_seeds([one["accuracy"] for one in _also(judged[arm])]), ARMS),
        "base_accuracy": _median(job["curve"][0]["accuracy"] for arm in ARMS for job in judged[arm]),
        "base_accuracy_also": _median(one["before"] for arm in ARMS for one in _also(judged[arm])),
        "final_difference": by_arm(lambda arm: against(accuracies[arm], accuracies[REFERENCE])),
        "power_within_a_point": power_table(accuracies),
        "equal_wallclock_difference": by_arm(lambda arm: equal_wallclock(clocked[arm], reference)),
        "claims": claims(accuracies, clocked),
        "learner_ratio": by_arm(lambda arm: rate_ratio("learn", timed[arm], timed[REFERENCE])),
        "sampler_ratio": by_arm(lambda arm: rate_ratio("generate", timed[arm], timed[REFERENCE])),
        "switch_share": by_arm(lambda arm: _median(map(switch_share, timed[arm])), ARMS),
        "seconds": by_arm(lambda arm: _median(job["seconds"] for job in timed[arm]), ARMS),
        "startup_seconds": by_arm(
            lambda arm: _median(sum((job.get("startup_seconds") or {}).values()) for job in timed[arm]), ARMS
        ),
        "tuning": tuning,
        "notes": notes,
    }


def _judged(jobs: Sequence[Record], arm: str, tuning: Record) -> list[Record]:
    """The judged seeds of an arm, at its tuned learning rate where there is one (controls: at any)."""
    mine = [job for job in jobs if job["arm"] == arm and not is_tuning(job)]
    rate = tuning.get(arm, {}).get("best")  # None: the arm was not tuned
    at_rate = [job for job in mine if rate is None or float(job["learning_rate"]) == rate]
    return sorted(at_rate or mine, key=lambda job: job["seed"])


def _also(jobs: Sequence[Record]) -> list[Record]:
    """What was found on the second test set."""
    return [job["also"] for job in jobs if job.get("also")]


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _called(job: Record) -> str:
    return f"{job['arm']}, seed {job['seed']}, learning rate {job['learning_rate']:g}"
