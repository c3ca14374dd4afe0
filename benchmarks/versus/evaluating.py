"""Accuracy of saved policies, whoever trained them: one evaluator, the same questions and the same random numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stalewise.orchestrator.evaluation import evaluate_checkpoint
from stalewise.rollout.factory import make_sampler
from stalewise.tasks import Task, Verifier, make_task
from stalewise.types import Prompt

from .clock import set_up
from .ours import base_checkpoint
from .settings import Settings, our_config

MOST_PROMPTS = 256
# Of an evaluation. What each prompt scored would be nine tenths of the file.
KEPT = (
    "version",
    "accuracy",
    "prompts",
    "samples",
    "response_length",
    "truncated_fraction",
    "verifier_errors",
    "seconds",
)


class AllQuestions:
    """A finite task whose evaluation prompts are all its questions, held out or not."""

    def __init__(self, task: Task) -> None:
        self.task, self.name, self.size = task, task.name, task.size

    @property
    def verifier(self) -> Verifier:
        return self.task.verifier

    def prompts(self, start: int, count: int) -> list[Prompt]:
        return self.task.prompts(start, count)

    def evaluation_prompts(self, count: int) -> list[Prompt]:
        return [*self.task.evaluation_prompts(count), *self.task.prompts(0, self.task.size or 0)][:count]


def evaluate(settings: Settings, work: Path, directory: str, updates: Sequence[int]) -> dict[str, Any]:
    """Curves of held-out accuracy, and of accuracy on all questions where that is asked for."""
    set_up(settings.device, settings.threads)
    task = make_task(settings.task, seed=0)
    sampler = make_sampler(our_config(settings, work, "evaluation"))
    sets: dict[str, tuple[Task, int]] = {"held_out": (task, settings.held_out_samples)}
    if settings.all_samples:
        sets["all_questions"] = (AllQuestions(task), settings.all_samples)
    curves: dict[str, list[float]] = {name: [] for name in sets}
    records: list[dict[str, Any]] = []
    for update in updates:
        checkpoint = Path(directory) / f"v{update:06d}" if update else base_checkpoint(work)
        for name, (questions, samples) in sets.items():
            result = evaluate_checkpoint(
                checkpoint,
                version=update,
                task=questions,
                sampler=sampler,
                prompts=MOST_PROMPTS,
                samples=samples,
                rows_at_once=8192,
            )
            curves[name].append(result.accuracy.value)
            records.append({"set": name, **{key: value for key, value in result.record().items() if key in KEPT}})
    sampler.close()
    at_equal_updates = curves["held_out"][list(updates).index(settings.updates)]
    return {"curves": curves, "evaluations": records, "final_accuracy": at_equal_updates}
