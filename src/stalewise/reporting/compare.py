"""Two ways to train, compared: is one better, how much, how sure is that, and what do they cost. Imports no torch.

A side is one run, or several that differ in their seeds. Axis: R runs of a side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stalewise.errors import StoreError
from stalewise.reporting.read import UNIMPORTANT, Run, differing, read_runs
from stalewise.statistics import (
    COMPARED_RESAMPLES,
    Interval,
    error_of_runs,
    percentile_interval,
    random_generator,
    resample_prompts,
)

FEWEST_PROMPTS = 2  # in common: fewer are another task
NORMAL_95 = 1.96  # an interval's half-width, in standard errors
FEWEST_EVALUATIONS = 3  # of a curve that tells when an accuracy was reached

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two: its runs, and what they came to."""

    name: str
    runs: list[str]
    accuracy: Interval  # of the last evaluated policies
    seconds: float  # of training, mean over its runs
    seconds_to_accuracy: float | None  # until B is as good as A in the end, see `_speed`; None: cannot be told


@dataclass(frozen=True, slots=True)
class Comparison:
    """The answer. Everything is about B less A, or B against A."""

    task: str
    a: Side
    b: Side
    difference: Interval  # of final accuracies
    probability_better: float  # that B is better, as far as the resamples tell
    method: str
    prompts: int
    settings: dict[str, list[list[Any]]]  # that differ: values of A, values of B
    speed: str  # in words: which of them reaches the same accuracy earlier
    notes: list[str] = field(default_factory=list)

    @property
    def speed_up(self) -> float | None:
        """How many times as fast B gets as good as A is in the end; None where it cannot be told."""
        a, b = self.a.seconds_to_accuracy, self.b.seconds_to_accuracy
        return a / b if a is not None and b else None

    @property
    def words(self) -> str:
        """The difference as a sentence."""
        value, low, high = (100 * end for end in (self.difference.value, self.difference.low, self.difference.high))
        if low > 0:
            return f"{self.b.name} is better by {value:.1f} points ({low:.1f} to {high:.1f})"
        if high < 0:
            return f"{self.a.name} is better by {-value:.1f} points ({-high:.1f} to {-low:.1f})"
        return (
            f"no difference can be told: {self.b.name} less {self.a.name} is {value:+.1f} points "
            f"({low:+.1f} to {high:+.1f})"
        )

    def record(self) -> dict[str, Any]:
        """What a script reads."""
        return {"words": self.words, **asdict(self), "speed_up": self.speed_up}


def compare(a: Sequence[Path], b: Sequence[Path]) -> Comparison:
    """Compare the last evaluated policies of two sides, and what it took to get there."""
    if not a or not b:
        raise StoreError("a comparison needs a run on either side: name at least one for A and one for B")
    found = read_runs([*a, *b])
    for run in found:
        if not run.evaluations:
            raise StoreError(f"{run.directory} has no evaluation to compare: let it run on, then compare again")
    first, second = found[: len(a)], found[len(a) :]
    tasks = {run.label: run.evaluations[-1]["task"] for run in found}
    if len(set(tasks.values())) > 1:
        listed = ", ".join(f"{label} has {task}" for label, task in tasks.items())
        raise StoreError(f"runs of different tasks cannot be compared: {listed}; compare runs of one task")
    names = side_names([run.label for run in first], [run.label for run in second])
    notes = [note for run in found for note in _notes(run)]
    resampled = resample(first, second, notes)
    reached, speed = _speed(first, second, names, resampled.margin)
    sides = [
        Side(
            name=name,
            runs=[str(run.directory) for run in side],
            accuracy=percentile_interval(value, sample),
            seconds=float(np.mean([run.training_seconds for run in side])),
            seconds_to_accuracy=seconds,
        )
        for name, side, value, sample, seconds in zip(
            names, (first, second), resampled.values, resampled.samples, reached, strict=True
        )
    ]
    difference = resampled.difference
    return Comparison(
        task=next(iter(tasks.values())),
        a=sides[0],
        b=sides[1],
        difference=percentile_interval(resampled.values[1] - resampled.values[0], difference),
        probability_better=float((difference > 0).mean() + (difference == 0).mean() / 2),
        method=resampled.method,
        prompts=resampled.prompts,
        settings=_differing_settings(first, second),
        speed=speed,
        notes=list(dict.fromkeys([*notes, *_task_notes(found), *_machine_notes(found)])),
    )


def side_names(a: Sequence[str], b: Sequence[str]) -> list[str]:
    """What to call two sides: by what the labels of their runs have in common, or else A and B.

    >>> side_names(["grpo0", "grpo1"], ["p3o"])
    ['grpo', 'p3o']
    >>> side_names(["x", "y"], ["z"])
    ['A', 'z']
    """
    common = [side[0] if len(side) == 1 else _common_start(side) for side in (a, b)]
    return ["A", "B"] if common[0] == common[1] else [name or letter for name, letter in zip(common, "AB", strict=True)]


def _common_start(labels: Sequence[str]) -> str:
    same = takewhile(lambda letters: len(set(letters)) == 1, zip(*labels, strict=False))
    return "".join(letters[0] for letters in same).rstrip("0123456789-_. /")


# ---------------------------------------------------------------- resampling


@dataclass(frozen=True, slots=True)
class Resampled:
    """Accuracies of A and of B: as measured, and as they may come out with other prompts and other seeds."""

    values: tuple[float, float]
    samples: tuple[Array, Array]
    difference: Array
    margin: float  # from A's value down to the lower end of its interval over prompts
    prompts: int  # that were paired; 0 where they could not be
    method: str


def resample(a: Sequence[Run], b: Sequence[Run], notes: list[str]) -> Resampled:
    """Draw prompts anew, many times, the same ones for both sides, and let the mean over runs err as it may."""
    b, is_paired_by_seed = _in_order_of_seeds(a, b)
    over = _over_runs(len(a), len(b), is_paired_by_seed)
    is_paired = all(run.evaluations[-1].get("by_prompt") for run in [*a, *b])
    common = _common_prompts([*a, *b]) if is_paired else []
    if not is_paired:
        value_R = [np.array([run.evaluations[-1]["accuracy"]["value"] for run in side]) for side in (a, b)]
        samples, method = [_from_interval(side, place) for place, side in enumerate((a, b))], "not paired by prompt"
        scores = [np.array(list(run.evaluations[-1]["accuracy"].values())) for run in [*a, *b]]
    elif len(common) < FEWEST_PROMPTS:
        raise StoreError(
            f"runs of different tasks cannot be compared: of their held-out prompts {len(common)} are in common, and "
            f"{FEWEST_PROMPTS} is the least; compare runs that were evaluated on the same prompts"
        )
    else:
        largest = max(run.evaluations[-1]["prompts"] for run in [*a, *b])
        if len(common) < largest:
            notes.append(f"the runs have {len(common)} of {largest} held-out prompts in common; only those count")
        scores = [_score_table(side, common) for side in (a, b)]
        value_R = [table.mean(axis=1) for table in scores]
        samples, method = resample_prompts([t.mean(axis=0) for t in scores]), f"paired over {len(common)} prompts"
    value = [float(side.mean()) for side in value_R]
    # Where no score is beyond 0 and 1, no mean is; Student's t does not know.
    end = 1.0 if all(((table >= 0) & (table <= 1)).all() for table in scores) else np.inf
    errors = [error_of_runs(value_R[0], seed=2), error_of_runs(value_R[1], seed=3)]
    error = error_of_runs(value_R[1] - value_R[0], seed=2) if is_paired_by_seed else errors[1] - errors[0]
    return Resampled(
        values=(value[0], value[1]),
        samples=(_within(samples[0] + errors[0], end), _within(samples[1] + errors[1], end)),
        difference=np.clip(samples[1] - samples[0] + error, -end, end),
        margin=max(value[0] - percentile_interval(value[0], samples[0]).low, 0.0),
        prompts=len(common),
        method=f"{method}; {over}",
    )


def _within(sample: Array, end: float) -> Array:
    return np.clip(sample, 0.0, end) if end == 1 else sample


def _from_interval(runs: Sequence[Run], seed: int) -> Array:
    """Accuracies from the intervals on record: runs of a side share their prompts, so errors do not average out."""
    records = [run.evaluations[-1]["accuracy"] for run in runs]
    value = np.mean([record["value"] for record in records])
    error = np.mean([(record["high"] - record["low"]) / (2 * NORMAL_95) for record in records])
    return value + error * random_generator(seed).standard_normal(COMPARED_RESAMPLES)


def _in_order_of_seeds(a: Sequence[Run], b: Sequence[Run]) -> tuple[Sequence[Run], bool]:
    """B in the order of A's seeds, and whether both have the same, each once."""
    seeds_a, seeds_b = ([repr(run.config.get("seed")) for run in side] for side in (a, b))
    if len(a) == 1 or len(set(seeds_a)) < len(a) or sorted(seeds_a) != sorted(seeds_b):
        return b, False
    return [b[seeds_b.index(seed)] for seed in seeds_a], True


def _over_runs(a: int, b: int, is_paired_by_seed: bool) -> str:
    if a == b == 1:
        return "one run on each side, so how much other seeds would differ is not in the interval"
    if is_paired_by_seed:
        return f"paired over {a} seeds"
    alone = ", of which the side of one run says nothing about its other seeds" if 1 in (a, b) else ""
    return f"over {a} and {b} runs{alone}"


def _common_prompts(runs: Sequence[Run]) -> list[str]:
    scores = [prompt_scores(run.evaluations[-1]) for run in runs]
    return [prompt for prompt in scores[0] if all(prompt in other for other in scores[1:])]


def _score_table(runs: Sequence[Run], prompts: Sequence[str]) -> Array:
    scores = [prompt_scores(run.evaluations[-1]) for run in runs]
    return np.array([[score[prompt] for prompt in prompts] for score in scores])


def prompt_scores(record: Mapping[str, Any]) -> dict[str, float]:
    """Mean score of each held-out prompt; empty in records that older releases wrote.

    >>> prompt_scores({"by_prompt": {"prompt_ids": ["a", "b"], "score": [1, 0.5], "scored": [2, 0]}})
    {'a': 0.5}
    """
    lists = record.get("by_prompt") or {"prompt_ids": [], "score": [], "scored": []}
    rows = zip(lists["prompt_ids"], lists["score"], lists["scored"], strict=True)
    return {prompt: score / scored for prompt, score, scored in rows if scored}


# ---------------------------------------------------------------- costs


def _speed(a: Sequence[Run], b: Sequence[Run], names: Sequence[str], margin: float) -> tuple[list[float | None], str]:
    """When each side got as good as A is in the end, as far as the prompts can tell, and what that means in words."""
    curves = [mean_curve(side) for side in (a, b)]
    for name, (seconds, _) in zip(names, curves, strict=True):
        if len(seconds) < FEWEST_EVALUATIONS:
            why = f"{name} was evaluated too seldom ({len(seconds)} times): set evaluation.every"
            return [None, None], f"speed at equal accuracy cannot be told: {why}"
    target = float(curves[0][1][-1]) - margin
    what = f"{target:.3f}, where the interval of {names[0]}'s final accuracy begins"
    reached = [first_reached(seconds, accuracy, target) for seconds, accuracy in curves]
    if reached[1] is None:
        best = float(curves[1][1].max())
        return reached, f"{names[1]} never reached {what}: its best is {best:.3f}"
    if not reached[0] or not reached[1]:
        return reached, "speed at equal accuracy cannot be told: the accuracy was there before any training"
    ratio = reached[0] / reached[1]
    return reached, (
        f"{names[1]} reached {what}, after {reached[1]:.1f} s of training and {names[0]} after {reached[0]:.1f} s: "
        f"{ratio:.2f} times as fast"
    )


def mean_curve(runs: Sequence[Run]) -> tuple[Array, Array]:
    """Seconds of training and accuracy, both averaged over runs, at the versions that all of them evaluated."""
    tables = [{record["version"]: record["accuracy"]["value"] for record in run.evaluations} for run in runs]
    versions = [version for version in tables[0] if all(version in table for table in tables[1:])]
    seconds = np.array([np.mean([run.seconds_at(version) for run in runs]) for version in versions], np.float64)
    accuracy = np.array([np.mean([table[version] for table in tables]) for version in versions], np.float64)
    known = np.isfinite(seconds) & np.isfinite(accuracy)
    return seconds[known], accuracy[known]


def first_reached(seconds: Array, accuracy: Array, target: float) -> float | None:
    """When a curve first gets to a value, on straight lines between its points; None where it never does.

    >>> first_reached(np.array([0.0, 10.0, 20.0]), np.array([0.25, 0.5, 0.75]), 0.625)
    15.0
    """
    places = np.flatnonzero(accuracy >= target)
    if not len(places):
        return None
    if (place := int(places[0])) == 0:
        return float(seconds[0])
    span = slice(place - 1, place + 1)
    return float(np.interp(target, accuracy[span], seconds[span]))


# ---------------------------------------------------------------- what to say beside it


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


def _task_notes(runs: Sequence[Run]) -> list[str]:
    settings = [{k: v for k, v in run.config.items() if k.startswith("task.") and v not in (None, {})} for run in runs]
    keys = differing(settings)
    return [f"the runs differ in {', '.join(keys)}: make sure that their task is the same"] if keys else []


def _machine_notes(runs: Sequence[Run]) -> list[str]:
    devices = {run.environment.get("device") for run in runs}
    return ["the runs were made on different devices: their times do not compare"] if len(devices) > 1 else []


def _differing_settings(a: Sequence[Run], b: Sequence[Run]) -> dict[str, list[list[Any]]]:
    """Settings whose values are not the same on both sides, each with the distinct values of A and of B."""
    keys = dict.fromkeys(key for run in [*a, *b] for key in run.config if key not in UNIMPORTANT)
    found: dict[str, list[list[Any]]] = {}
    for key in keys:
        values = [_distinct([run.config.get(key) for run in side]) for side in (a, b)]
        if sorted(map(repr, values[0])) != sorted(map(repr, values[1])):
            found[key] = values
    return found


def _distinct(values: Sequence[Any]) -> list[Any]:
    return [value for place, value in enumerate(values) if value not in values[:place]]
