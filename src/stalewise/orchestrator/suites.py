"""The suites of a run, `[[evaluation.suite]]`: held-out sets with sampling settings of their own."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from stalewise.config import RunConfig
from stalewise.config.sections import SuiteSection
from stalewise.orchestrator.contamination import seen_in_training
from stalewise.orchestrator.evaluation import Evaluation, evaluate_checkpoint
from stalewise.rollout.generate import ScoreCheck
from stalewise.rollout.sampler import Sampler
from stalewise.tasks import Seen, Task
from stalewise.types import SamplerSettings


def sampling_of(suite: SuiteSection) -> SamplerSettings:
    """How a suite samples. Greedy decoding is the choice among one token, which every engine has."""
    if suite.temperature == 0:
        return SamplerSettings(top_k=1)
    return SamplerSettings(temperature=suite.temperature, top_p=suite.top_p)


def evaluate_suite(
    suite: SuiteSection,
    checkpoint: Path,
    *,
    version: int,
    task: Task,
    sampler: Sampler,
    prompts: int,
    exclude: Seen,
    rows_at_once: int = 2048,
    scores: ScoreCheck | None = None,
) -> Evaluation:
    """Evaluate a checkpoint on the first `prompts` prompts of a suite."""
    limit = sampler.max_new_tokens
    sampler.max_new_tokens = suite.max_new_tokens or limit
    try:
        result = evaluate_checkpoint(
            checkpoint,
            version=version,
            task=task,
            sampler=sampler,
            prompts=prompts,
            samples=suite.responses,
            rows_at_once=rows_at_once,
            exclude=exclude,
            scores=scores,
            settings=sampling_of(suite),
        )
        settings = {"temperature": suite.temperature, "top_p": suite.top_p, "max_new_tokens": sampler.max_new_tokens}
        return replace(result, suite=suite.label, settings=settings)
    finally:
        sampler.max_new_tokens = limit


class Suites:
    """The suites of a run: when each is due, and its task, which is made when it is first needed."""

    def __init__(self, config: RunConfig, log: Callable[[str], object]) -> None:
        self.config, self._log = config, log
        self._tasks: dict[str, Task] = {}
        self._seen: dict[bool, Seen] = {}

    def due(self, version: int, last: int, recorded: Iterable[Mapping[str, Any]]) -> SuiteSection | None:
        """The first suite that this version must be evaluated on and was not, with the present settings."""
        done = {record["suite"] for record in recorded if record["version"] == version and self._is_same(record)}
        for suite in self.config.evaluation.suite:
            is_due = version in (0, last) or (suite.every > 0 and version % suite.every == 0)
            if is_due and suite.label not in done:
                return suite
        return None

    def _is_same(self, record: Mapping[str, Any]) -> bool:
        suite = next((one for one in self.config.evaluation.suite if one.label == record["suite"]), None)
        return suite is not None and record.get("definition") == definition_of(suite)

    def periods(self) -> list[int]:
        """After how many updates suites are evaluated."""
        return [suite.every for suite in self.config.evaluation.suite if suite.every]

    def responses(self, suite: SuiteSection) -> int:
        """How many responses an evaluation samples, before prompts are left out."""
        return len(self._task(suite).evaluation_prompts(self._count(suite))) * suite.responses

    def _count(self, suite: SuiteSection) -> int:
        return suite.prompts or (sys.maxsize if suite.file else self.config.evaluation.prompts)

    def evaluate(
        self, suite: SuiteSection, checkpoint: Path, version: int, sampler: Sampler, scores: ScoreCheck
    ) -> Evaluation:
        """Evaluate a version of the run. Prompts that its training sees are left out, also those of earlier runs."""
        # A task holds its own prompts out; what runs before this one have seen is excluded all the same.
        is_own = not suite.file and not suite.task and not suite.options
        if is_own not in self._seen:
            apart = self.config.task if is_own else None
            self._seen[is_own] = seen_in_training(self.config.directory, self._log, apart=apart)
        return evaluate_suite(
            suite,
            checkpoint,
            version=version,
            task=self._task(suite),
            sampler=sampler,
            prompts=self._count(suite),
            exclude=self._seen[is_own],
            rows_at_once=self.config.sampler.rollouts_per_shard,
            scores=scores,
        )

    def _task(self, suite: SuiteSection) -> Task:
        if suite.label not in self._tasks:
            self._tasks[suite.label] = self.config.make_suite(suite)
        return self._tasks[suite.label]

    def close(self) -> None:
        """End the processes of the suites' verifiers."""
        with contextlib.ExitStack() as stack:
            for task in self._tasks.values():
                stack.callback(task.verifier.close)
        self._tasks = {}


def definition_of(suite: SuiteSection) -> dict[str, Any]:
    """What a recorded result of a suite is a result of: all of its settings, except how often it is evaluated."""
    return suite.model_dump(mode="json", exclude={"every"})
