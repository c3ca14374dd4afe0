"""Compares two ways to train: which is better, by how much, how certain that is, and what they cost.

A side is one run, or several runs with different seeds. Axis: R runs of a side.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stalewise import statistics
from stalewise.config.run_directory import read_config
from stalewise.errors import StalewiseError, StoreError, nearest
from stalewise.reporting.read import UNIMPORTANT, Run, differing_keys, read_run, read_runs
from stalewise.types import Prompt

MOST_TEXTS = 4096  # held-out prompts whose texts are looked up
FEWEST_PROMPTS = 2  # that both sides must share, since one prompt has no spread
NORMAL_95 = 1.96  # half-width of a 95% interval in standard errors
FEWEST_EVALUATIONS = 3  # points that a curve of accuracy against time must have
# The measures of work, and by which factor each may differ and still count as equal. Tokens vary with the responses.
WORK = {"updates": 1.02, "rollouts": 1.02, "response tokens": 1.1}
FRACTIONS = {2: "half", 3: "a third", 4: "a quarter"}

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ComparisonSide:
    """One side of a comparison: its runs and their results."""

    name: str
    runs: list[str]
    accuracy: statistics.Interval  # accuracy of the last evaluated policies
    seconds: float  # training time, mean over the runs
    seconds_to_accuracy: float | None  # until A's final accuracy, see `_speed`; None: unknown
    work: dict[str, float] = field(default_factory=dict)  # until the evaluated policy, mean over the runs


@dataclass(frozen=True, slots=True)
class RunComparison:
    """The result of comparing B with A."""

    task: str
    a: ComparisonSide
    b: ComparisonSide
    difference: statistics.Interval  # difference of final accuracies, B − A
    probability_better: float  # share of the resamples in which B is better
    method: str
    prompts: int
    settings: dict[str, list[list[Any]]]  # settings that differ: values of A, values of B
    speed: str  # which side reaches the same accuracy earlier
    notes: list[str] = field(default_factory=list)

    @property
    def speed_up(self) -> float | None:
        """How many times as fast B reaches A's final accuracy; None if unknown."""
        a, b = self.a.seconds_to_accuracy, self.b.seconds_to_accuracy
        return a / b if a is not None and b else None

    @property
    def words(self) -> str:
        """The difference as a sentence."""
        value, low, high = (100 * end for end in (self.difference.value, self.difference.low, self.difference.high))
        first, second = (self.a, self.b) if high < 0 else (self.b, self.a)
        if low > 0:
            sentence = f"{first.name} is better by {value:.1f} points ({low:.1f} to {high:.1f})"
        elif high < 0:
            sentence = f"{first.name} is better by {-value:.1f} points ({-high:.1f} to {-low:.1f})"
        else:
            interval = f"{value:+.1f} points ({low:+.1f} to {high:+.1f})"
            sentence = f"no significant difference: {first.name} minus {second.name} is {interval}"
        unequal = unequal_work(first.work, second.work)
        return f"{sentence}; unequal work: {unequal}" if unequal else sentence

    def record(self) -> dict[str, Any]:
        """The result as JSON."""
        return {"words": self.words, **asdict(self), "speed_up": self.speed_up}


def compare(a: Sequence[Path], b: Sequence[Path]) -> RunComparison:
    """Compare the last evaluated policies of two sides, and their cost."""
    if not a or not b:
        raise StoreError("a comparison needs a run on either side: name at least one for A and one for B")
    runs = read_runs([*a, *b])
    if missing := [run.directory for run in runs if not run.evaluations]:
        raise StoreError(f"{missing[0]} has no evaluation to compare: continue the run, then compare again")
    tasks = {run.label: run.evaluations[-1]["task"] for run in runs}
    if len(set(tasks.values())) > 1:
        listed = ", ".join(f"{label} has {task}" for label, task in tasks.items())
        raise StoreError(f"runs of different tasks cannot be compared: {listed}; compare runs of one task")
    runs_a, runs_b = runs[: len(a)], runs[len(a) :]
    names = side_names([run.label for run in runs_a], [run.label for run in runs_b])
    notes = [note for run in runs for note in _notes(run)]
    resampled = resample(runs_a, runs_b, notes)
    reached, speed = _speed(runs_a, runs_b, names, resampled.margin)
    if len({run.environment.get("device") for run in runs}) > 1:
        reached, speed = [None, None], "speed is not compared: the runs used different devices"
    side_a, side_b = (
        ComparisonSide(
            name=names[i],
            runs=[str(run.directory) for run in side],
            accuracy=resampled.accuracies[i],
            seconds=float(np.mean([run.training_seconds for run in side])),
            seconds_to_accuracy=reached[i],
            work=_mean_work(side),
        )
        for i, side in enumerate((runs_a, runs_b))
    )
    return RunComparison(
        task=next(iter(tasks.values())),
        a=side_a,
        b=side_b,
        difference=resampled.difference,
        probability_better=resampled.probability_better,
        method=resampled.method,
        prompts=resampled.prompts,
        settings=_differing_settings(runs_a, runs_b),
        speed=speed,
        notes=list(dict.fromkeys([*notes, *_common_notes(runs)])),
    )


def work_of(run: Run) -> dict[str, float]:
    """Work spent on the last evaluated policy, rolled-back work included; NaN where it is not recorded."""
    version = run.evaluations[-1]["version"]
    of_policy = run.column("rollouts")[run.column("update")[: len(run.column("rollouts"))] < version]
    rolled_back = [rollback.metrics.get("rollouts", np.empty(0)) for rollback in run.rollbacks]
    rollouts = float(np.nansum(np.concatenate([of_policy, *rolled_back]))) if len(of_policy) else math.nan
    batches = [batch for batch in run.batches if batch.version < version]
    tokens = sum(
        batch.tokens for batch in [*batches, *(batch for rollback in run.rollbacks for batch in rollback.batches)]
    )
    values = (version + run.updates_rolled_back, rollouts, tokens if batches else math.nan)
    return dict(zip(WORK, map(float, values), strict=True))


def _mean_work(runs: Sequence[Run]) -> dict[str, float]:
    work = [work_of(run) for run in runs]
    return {name: float(np.mean([amounts[name] for amounts in work])) for name in WORK}


def unequal_work(one: Mapping[str, float], other: Mapping[str, float]) -> str:
    """Describe in which measures the work of two sides differs; empty if they did the same work.

    >>> unequal_work({"updates": 384.0, "rollouts": 512.0}, {"updates": 128.0, "rollouts": 512.0})
    '384 updates against 128'
    """
    known = [name for name in WORK if math.isfinite(one.get(name, math.nan) + other.get(name, math.nan))]
    unequal = [name for name in known if max(one[name], other[name]) > WORK[name] * min(one[name], other[name])]
    return ", ".join(f"{one[name]:,.0f} {name} against {other[name]:,.0f}" for name in unequal)


def describe_speed(ratio: float) -> str:
    """A ratio of speeds in words.

    >>> [describe_speed(ratio) for ratio in (2.667, 1.03, 0.52, 0.7)]
    ['2.7 times as fast', 'about as fast', 'half as fast', 'it took 1.4 times as long']
    """
    if abs(ratio - 1) < 0.05:
        return "about as fast"
    if ratio > 1:
        return "twice as fast" if abs(ratio - 2) < 0.05 else f"{ratio:.2g} times as fast"
    part = FRACTIONS.get(round(1 / ratio), "")
    is_near = abs(ratio * round(1 / ratio) - 1) < 0.05
    return f"{part} as fast" if part and is_near else f"it took {1 / ratio:.2g} times as long"


def side_names(a: Sequence[str], b: Sequence[str]) -> list[str]:
    """Names of the two sides: the common start of their labels, or else A and B."""
    same = [takewhile(lambda letters: len(set(letters)) == 1, zip(*side, strict=False)) for side in (a, b)]
    starts = ["".join(letters[0] for letters in start).rstrip("0123456789-_. /") for start in same]
    common = [side[0] if len(side) == 1 else start for side, start in zip((a, b), starts, strict=True)]
    return ["A", "B"] if common[0] == common[1] else [common[0] or "A", common[1] or "B"]


@dataclass(frozen=True, slots=True)
class ResampledAccuracy:
    """Accuracies of A and B: as measured, and resampled over prompts and seeds."""

    accuracies: tuple[statistics.Interval, statistics.Interval]
    difference: statistics.Interval
    probability_better: float
    margin: float  # from A's value down to the lower end of its interval over prompts
    prompts: int  # paired; 0 if not paired
    method: str


def resample(a: Sequence[Run], b: Sequence[Run], notes: list[str]) -> ResampledAccuracy:
    """Resample prompts, the same for both sides, and add the error of the mean over runs."""
    b, is_paired_by_seed = _in_order_of_seeds(a, b)
    is_paired = all(run.evaluations[-1].get("by_prompt") for run in [*a, *b])
    scores = [prompt_scores(run.evaluations[-1]) for run in [*a, *b]] if is_paired else [{}]
    common = [prompt for prompt in scores[0] if all(prompt in other for other in scores[1:])]
    if not is_paired:
        value_R = [np.array([run.evaluations[-1]["accuracy"]["value"] for run in side]) for side in (a, b)]
        samples, method = [_from_interval(side, seed) for seed, side in enumerate((a, b))], "not paired by prompt"
        tables = [np.array(list(run.evaluations[-1]["accuracy"].values())) for run in [*a, *b]]
    elif len(common) < FEWEST_PROMPTS:
        raise StoreError(_too_few_in_common([run.label for run in (*a, *b)], scores, len(common)))
    else:
        largest = max(run.evaluations[-1]["prompts"] for run in [*a, *b])
        if len(common) < largest:
            notes.append(f"the runs have {len(common)} of {largest} held-out prompts in common; only those count")
        score_RP = np.array([[score[prompt] for prompt in common] for score in scores])
        tables = [score_RP[: len(a)], score_RP[len(a) :]]
        value_R = [table.mean(axis=1) for table in tables]
        samples = statistics.resample_prompts([table.mean(axis=0) for table in tables])
        method = f"paired over {len(common)} prompts"
    value = [float(side.mean()) for side in value_R]
    # Where all scores are in [0, 1], so is every mean; Student's t has no bounds.
    is_bounded = all(((table >= 0) & (table <= 1)).all() for table in tables)
    low, high = (0.0, 1.0) if is_bounded else (-np.inf, np.inf)
    errors = [statistics.error_of_runs(value_R[0], seed=2), statistics.error_of_runs(value_R[1], seed=3)]
    error = statistics.error_of_runs(value_R[1] - value_R[0], seed=2) if is_paired_by_seed else errors[1] - errors[0]
    difference = np.clip(samples[1] - samples[0] + error, -high, high)
    span = max(1.0, *(float(table.max()) for table in tables)) - min(0.0, *(float(table.min()) for table in tables))
    a_P, b_P = (table.mean(axis=0) if is_paired else None for table in tables[:2])
    difference_P = None if a_P is None or b_P is None else b_P - a_P
    return ResampledAccuracy(
        accuracies=(
            _interval(value[0], np.clip(samples[0] + errors[0], low, high), a_P),
            _interval(value[1], np.clip(samples[1] + errors[1], low, high), b_P),
        ),
        difference=_interval(value[1] - value[0], difference, difference_P, (-span, span)),
        probability_better=float((difference > 0).mean() + (difference == 0).mean() / 2),
        margin=max(value[0] - _interval(value[0], samples[0], a_P).low, 0.0),
        prompts=len(common),
        method=f"{method}; {_over_runs(len(a), len(b), is_paired_by_seed)}",
    )


def _too_few_in_common(labels: Sequence[str], scores: Sequence[Mapping[str, float]], common: int) -> str:
    counts = ", ".join(f"{label} has {len(score)}" for label, score in zip(labels, scores, strict=True))
    return (
        f"the runs have {common} held-out prompt(s) with scores in common ({counts}), and a comparison needs at least "
        f"{FEWEST_PROMPTS}: compare runs that were evaluated on the same {FEWEST_PROMPTS} prompts or more"
    )


def _interval(
    value: float, samples: Array, value_P: Array | None, limits: tuple[float, float] = (0.0, 1.0)
) -> statistics.Interval:
    """The interval of resamples; at least `interval_of_equal` if the prompts are known and alike."""
    found = statistics.percentile_interval(value, samples)
    if value_P is None or not statistics.are_equal(value_P):
        return found
    equal = statistics.interval_of_equal(value, len(value_P), least=limits[0], largest=limits[1])
    return statistics.Interval(value, min(found.low, equal.low), max(found.high, equal.high))


def _from_interval(runs: Sequence[Run], seed: int) -> Array:
    """Accuracies from the recorded intervals: runs of a side share prompts, so their errors do not average out."""
    records = [run.evaluations[-1]["accuracy"] for run in runs]
    value = np.mean([record["value"] for record in records])
    error = np.mean([(record["high"] - record["low"]) / (2 * NORMAL_95) for record in records])
    return value + error * statistics.random_generator(seed).standard_normal(statistics.COMPARED_RESAMPLES)


def _in_order_of_seeds(a: Sequence[Run], b: Sequence[Run]) -> tuple[Sequence[Run], bool]:
    """B in the order of A's seeds, and whether both have the same seeds, each once."""
    seeds_a, seeds_b = ([repr(run.config.get("seed")) for run in side] for side in (a, b))
    if len(a) == 1 or len(set(seeds_a)) < len(a) or sorted(seeds_a) != sorted(seeds_b):
        return b, False
    return [b[seeds_b.index(seed)] for seed in seeds_a], True


def _over_runs(a: int, b: int, is_paired_by_seed: bool) -> str:
    if a == b == 1:
        return "one run on each side, so the interval does not include the variation between seeds"
    if is_paired_by_seed:
        return f"paired over {a} seeds"
    alone = "; the side with one run has no variation between seeds" if 1 in (a, b) else ""
    return f"over {a} and {b} runs{alone}"


def prompt_scores(record: Mapping[str, Any]) -> dict[str, float]:
    """Mean score of each held-out prompt; empty in records of older releases."""
    lists = record.get("by_prompt") or {"prompt_ids": [], "score": [], "scored": []}
    rows = zip(lists["prompt_ids"], lists["score"], lists["scored"], strict=True)
    return {prompt: score / scored for prompt, score, scored in rows if scored}


def flips(directory: Path, before: int | None = None, after: int | None = None, suite: str = "") -> dict[str, Any]:
    """Held-out prompts that one version solves and another does not: their mean score crosses one half.

    By default the versions are the first and the last that were evaluated. `p_value` is that of an exact sign test of
    gained against lost prompts.
    """
    run = read_run(directory)
    records = [record for record in run.suites if record["suite"] == suite] if suite else run.evaluations
    if suite and not records:
        known = nearest(suite, {record["suite"] for record in run.suites}) if run.suites else "the run has none"
        raise StoreError(f"{directory} has no evaluation on a suite {suite!r}; {known}")
    scores = {record["version"]: prompt_scores(record) for record in records if record.get("by_prompt")}
    if len(scores) < 2:
        raise StoreError(f"{directory} was evaluated by prompt at versions {sorted(scores)}: two versions are needed")
    chosen = min(scores) if before is None else before, max(scores) if after is None else after
    if missing := [version for version in chosen if version not in scores]:
        raise StoreError(f"version {missing[0]} of {directory} was not evaluated; evaluated: {sorted(scores)}")
    return {"suite": suite, **_flipped(scores, *chosen, held_out_prompts(directory, suite))}


def flips_of(run: Run) -> dict[str, Any] | None:
    """The flips between the first and the last evaluation of a run, for its report; None with fewer than two."""
    scores = {record["version"]: prompt_scores(record) for record in run.evaluations if record.get("by_prompt")}
    return _flipped(scores, min(scores), max(scores), held_out_prompts(run.directory)) if len(scores) > 1 else None


def _flipped(
    scores: Mapping[int, Mapping[str, float]], before: int, after: int, prompts: Mapping[str, Prompt]
) -> dict[str, Any]:
    old, new = scores[before], scores[after]
    common = [prompt for prompt in old if prompt in new]

    def listed(first: Mapping[str, float], second: Mapping[str, float]) -> list[dict[str, Any]]:
        return [
            {
                "prompt_id": prompt,
                "score_before": old[prompt],
                "score_after": new[prompt],
                "text": prompts[prompt].text if prompt in prompts else None,
                "answer": prompts[prompt].answer if prompt in prompts else None,
                "scores": {version: found.get(prompt) for version, found in scores.items()},
            }
            for prompt in common
            if first[prompt] < 0.5 <= second[prompt]
        ]

    gained, lost = listed(old, new), listed(new, old)
    return {
        "before": before,
        "after": after,
        "prompts": len(common),
        "gained": gained,
        "lost": lost,
        "same": len(common) - len(gained) - len(lost),
        "p_value": sign_test(len(gained), len(lost)),
    }


def held_out_prompts(directory: Path, suite: str = "") -> dict[str, Prompt]:
    """Held-out prompts by id, where their task can still be made from the config."""
    try:
        config = read_config(directory)
        section = next((section for section in config.evaluation.suite if section.label == suite), None)
        task = config.prompts_task(section)
        return {prompt.prompt_id: prompt for prompt in task.evaluation_prompts(MOST_TEXTS)}
    except StalewiseError:
        return {}


def sign_test(gained: int, lost: int) -> float:
    """Two-sided exact p-value of a fair coin that fell this often on each side.

    >>> sign_test(6, 0), sign_test(0, 0)
    (0.03125, 1.0)
    """
    number, fewer = gained + lost, min(gained, lost)
    return min(1.0, 2 * sum(math.comb(number, k) for k in range(fewer + 1)) / 2**number)


def _speed(a: Sequence[Run], b: Sequence[Run], names: Sequence[str], margin: float) -> tuple[list[float | None], str]:
    """When each side reached A's final accuracy minus `margin`, and a sentence about it."""
    unknown = "speed at equal accuracy is unknown"
    curves = [mean_curve(side) for side in (a, b)]
    for name, (seconds, _) in zip(names, curves, strict=True):
        if len(seconds) < FEWEST_EVALUATIONS:
            return [None, None], f"{unknown}: {name} has too few evaluations ({len(seconds)}): set evaluation.every"
    target = float(curves[0][1][-1]) - margin
    what = f"{target:.3f}, the lower end of {names[0]}'s final accuracy"
    reached = [first_reached(seconds, accuracy, target) for seconds, accuracy in curves]
    if reached[1] is None:
        return reached, f"{names[1]} never reached {what}: its best is {float(curves[1][1].max()):.3f}"
    if not reached[0] or not reached[1]:
        return reached, f"{unknown}: the accuracy was reached before any training"
    return reached, (
        f"{names[1]} reached {what}, after {reached[1]:.1f} s of training and {names[0]} after {reached[0]:.1f} s: "
        f"{describe_speed(reached[0] / reached[1])}"
    )


def mean_curve(runs: Sequence[Run]) -> tuple[Array, Array]:
    """Seconds of training and accuracy, averaged over runs, at the versions that all of them evaluated."""
    tables = [{record["version"]: record["accuracy"]["value"] for record in run.evaluations} for run in runs]
    versions = [version for version in tables[0] if all(version in table for table in tables[1:])]
    seconds = np.array([np.mean([run.seconds_at(version) for run in runs]) for version in versions], np.float64)
    accuracy = np.array([np.mean([table[version] for table in tables]) for version in versions], np.float64)
    known = np.isfinite(seconds) & np.isfinite(accuracy)
    return seconds[known], accuracy[known]


def first_reached(seconds: Array, accuracy: Array, target: float) -> float | None:
    """When a curve first reaches a value, interpolated linearly; None if it never does."""
    rows = np.flatnonzero(accuracy >= target)
    if not len(rows):
        return None
    span = slice(max(rows[0] - 1, 0), rows[0] + 1)
    return float(np.interp(target, accuracy[span], seconds[span]))


def _notes(run: Run) -> list[str]:
    notes = list(run.notes)
    last = run.evaluations[-1]
    if last["version"] == 0:
        notes.append(f"{run.label} has not been evaluated after learning: its accuracy is that of version 0")
    elif not run.is_complete:
        notes.append(f"{run.label} is not finished: its accuracy is that of version {last['version']}")
    if not last.get("by_prompt"):
        notes.append(f"eval.jsonl of {run.label} has no results per prompt, so prompts cannot be paired")
    return notes


def _common_notes(runs: Sequence[Run]) -> list[str]:
    of_task = {key for run in runs for key in run.config if key.startswith("task.") and key not in UNIMPORTANT}
    settings = [{k: v for k, v in run.config.items() if k in of_task and v not in (None, {})} for run in runs]
    keys = differing_keys(settings)
    return [f"the runs differ in {', '.join(keys)}: make sure that their task is the same"] if keys else []


def _differing_settings(a: Sequence[Run], b: Sequence[Run]) -> dict[str, list[list[Any]]]:
    """Settings that differ between the sides, each with the distinct values of A and of B."""
    differing: dict[str, list[list[Any]]] = {}
    for key in dict.fromkeys(key for run in [*a, *b] for key in run.config if key not in UNIMPORTANT):
        distinct = [{repr(run.config.get(key)): run.config.get(key) for run in side} for side in (a, b)]
        if distinct[0].keys() != distinct[1].keys():
            differing[key] = [list(values.values()) for values in distinct]
    return differing
