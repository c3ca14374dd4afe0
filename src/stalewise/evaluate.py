"""Held-out accuracy of a checkpoint: avg@k and pass@k with bootstrap intervals. Axes: P prompts, K samples each."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stalewise.errors import TaskError
from stalewise.generate.loop import sample_for_evaluation
from stalewise.generate.sampler import Sampler
from stalewise.tasks import Task, count_errors
from stalewise.types import FinishReason

CONFIDENCE = 0.95
RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over prompts with its bootstrap interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What one checkpoint scored."""

    version: int
    task: str
    prompts: int
    samples: int
    accuracy: Interval  # avg@k: mean reward of all samples
    pass_at: dict[int, Interval]  # share of prompts with a right answer among k samples, unbiased
    response_length: float
    truncated_fraction: float
    verifier_errors: int
    verifier_error_kinds: dict[str, int]
    seconds: float

    def record(self) -> dict[str, Any]:
        """What is written to `eval.jsonl`."""
        return asdict(self)


def evaluate_checkpoint(
    checkpoint: Path,
    *,
    version: int,
    task: Task,
    sampler: Sampler,
    prompts: int,
    samples: int,
    seed: int = 0,
    rows_at_once: int = 2048,
    exclude_ids: Sequence[str] = (),
    on_load: Callable[[float], object] = lambda seconds: None,
) -> Evaluation:
    """Sample `samples` responses to each held-out prompt and score them. The seeds do not depend on the checkpoint."""
    start = time.perf_counter()
    sampler.load(checkpoint)
    on_load(time.perf_counter() - start)
    held_out = [p for p in task.evaluation_prompts(prompts) if p.prompt_id not in set(exclude_ids)]
    if not held_out:
        raise TaskError(f"task {task.name} has no held-out prompts left to evaluate on")
    repeated, responses = sample_for_evaluation(
        held_out, samples=samples, seed=seed, sampler=sampler, rows_at_once=rows_at_once
    )
    rewards = task.verifier.score(repeated, [response.text for response in responses])
    errors = count_errors(rewards)
    if errors.failed == len(rewards):
        raise TaskError(f"the verifier of {task.name} failed on all {len(rewards)} responses: {errors}")
    score_PK = np.array([reward.value for reward in rewards]).reshape(len(held_out), samples)
    return Evaluation(
        version=version,
        task=task.name,
        prompts=len(held_out),
        samples=samples,
        accuracy=average(score_PK),
        pass_at={k: pass_at_k(score_PK, k) for k in _powers_of_two(samples)},
        response_length=float(np.mean([len(response.token_ids) for response in responses])),
        truncated_fraction=float(np.mean([r.finish_reason is FinishReason.LENGTH for r in responses])),
        verifier_errors=errors.failed,
        verifier_error_kinds=dict(errors.kinds),
        seconds=time.perf_counter() - start,
    )


def average(score_PK: npt.NDArray[np.float64]) -> Interval:
    """Mean score with its interval; samples without a score (NaN) are left out."""
    known_PK = ~np.isnan(score_PK)
    count_P = known_PK.sum(axis=1)
    total_P = np.where(known_PK, score_PK, 0.0).sum(axis=1)
    return bootstrap(total_P[count_P > 0] / count_P[count_P > 0])


def pass_at_k(score_PK: npt.NDArray[np.float64], k: int) -> Interval:
    """Probability that one of k samples is right, 1 − C(n − c, k) / C(n, k) per prompt: unbiased (Chen et al. 2021).

    Right is a score of 1; a sample without a score counts as one that is not right.
    """
    samples = score_PK.shape[1]
    if not 1 <= k <= samples:
        raise ValueError(f"k is {k}; expected 1 to {samples}, the number of samples")
    correct_P = (score_PK >= 1).sum(axis=1)
    missed_P = np.array([math.comb(samples - int(c), k) / math.comb(samples, k) for c in correct_P])
    return bootstrap(1 - missed_P)


def bootstrap(value_P: npt.NDArray[np.float64], *, seed: int = 0) -> Interval:
    """Mean over prompts with a percentile interval from resampled prompts."""
    generator = np.random.Generator(np.random.Philox(key=seed))
    chosen = generator.integers(len(value_P), size=(RESAMPLES, len(value_P)))
    means = value_P[chosen].mean(axis=1)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return Interval(float(value_P.mean()), float(low), float(high))


def _powers_of_two(largest: int) -> list[int]:
    return [2**i for i in range(largest.bit_length()) if 2**i <= largest]


def describe_evaluation(result: Evaluation) -> str:
    """One line for a person."""
    accuracy = result.accuracy
    line = f"version {result.version}: accuracy {accuracy.value:.3f} [{accuracy.low:.3f}, {accuracy.high:.3f}]"
    if result.truncated_fraction > 0.5:
        line += f", {result.truncated_fraction:.0%} truncated"
    if result.verifier_errors:
        line += f", {result.verifier_errors} verifier errors {result.verifier_error_kinds}"
    return line
