"""A table of pass rates of prompts, shared by runs, and a task that yields only prompts worth training on.

`stalewise difficulty RUN…` writes the table. A prompt that always or never passes gives groups without variance. A
prompt that is not in the table is kept.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from stalewise.errors import StalewiseError, TaskError
from stalewise.tasks.base import Task, Verifier, check_range, fraction_of
from stalewise.types import Prompt

FORMAT = "stalewise.difficulty/1"
COPY = "difficulty.json"  # the copy of the table in the run directory: a run keeps the table with which it began
AT_ONCE = 256  # prompts that are examined together
MOST_IN_VAIN = 100_000  # consecutive prompts of an unlimited task of which none was chosen, before it is an error


@dataclass(frozen=True, slots=True)
class PassCounts:
    """How often a prompt was answered, and how often that passed."""

    passed: int = 0
    rollouts: int = 0

    def __add__(self, other: PassCounts) -> PassCounts:
        return PassCounts(self.passed + other.passed, self.rollouts + other.rollouts)

    @property
    def is_possible(self) -> bool:
        """Whether these are counts: whole numbers, of at least one rollout."""
        return type(self.passed) is type(self.rollouts) is int and 0 <= self.passed <= self.rollouts > 0

    @property
    def rate(self) -> float:
        """The share that passed."""
        return self.passed / self.rollouts


@dataclass(slots=True)
class DifficultyTable:
    """Pass counts by prompt id, and the generation batches that were counted, by the checksum of their rollouts."""

    prompts: dict[str, PassCounts] = field(default_factory=dict[str, PassCounts])
    batches: dict[str, str] = field(default_factory=dict[str, str])

    def add(self, batch: str, name: str, counts: Mapping[str, PassCounts]) -> bool:
        """Add the counts of a generation batch, once; False: it was counted before."""
        if batch in self.batches:
            return False
        self.batches[batch] = name
        for prompt_id, added in counts.items():
            self.prompts[prompt_id] = self.prompts.get(prompt_id, PassCounts()) + added
        return True

    def record(self) -> dict[str, Any]:
        """The JSON form."""
        prompts = {name: [counts.passed, counts.rollouts] for name, counts in sorted(self.prompts.items())}
        return {"format": FORMAT, "batches": self.batches, "prompts": prompts}

    def summary(self, low: float = 0.0, high: float = 1.0) -> dict[str, Any]:
        """How many prompts never pass, always pass, or lie between; and within a range of pass rates."""
        rates = [counts.rate for counts in self.prompts.values()]
        return {
            "prompts": len(rates),
            "rollouts": sum(counts.rollouts for counts in self.prompts.values()),
            "batches": len(self.batches),
            "never": sum(rate == 0 for rate in rates),
            "always": sum(rate == 1 for rate in rates),
            "between": sum(0 < rate < 1 for rate in rates),
            "in_range": sum(low <= rate <= high for rate in rates),
        }


def read_table(path: str | os.PathLike[str], read: Callable[[Path], Mapping[str, Any]]) -> DifficultyTable:
    """Read the table from a file, with `read`; a file that is missing or is no table is a TaskError."""
    if not os.path.lexists(path):
        raise TaskError(f"there is no table of pass rates {path}: `stalewise difficulty RUN --output {path}`")
    try:
        record = read(Path(path))
    except StalewiseError as error:
        why = str(error).removeprefix(f"{path} ").partition("; restore")[0]
        raise TaskError(f"{path} is not a table of pass rates: {why}; `stalewise difficulty` writes one") from None
    if record.get("format") != FORMAT:
        raise TaskError(
            f"{path} has format {record.get('format')}; expected {FORMAT}, as `stalewise difficulty` writes it"
        )
    try:
        prompts = {str(name): PassCounts(*counts) for name, counts in record["prompts"].items()}
        batches = {str(key): str(name) for key, name in record["batches"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TaskError(f"{path} is damaged: {error!r}; write it again with `stalewise difficulty`") from None
    if wrong := [name for name, counts in prompts.items() if not counts.is_possible]:
        raise TaskError(
            f"{path} is damaged: {wrong[0]} passed {prompts[wrong[0]].passed} of {prompts[wrong[0]].rollouts}"
        )
    return DifficultyTable(prompts, batches)


class ChosenPrompts:
    """A task with the training prompts whose pass rate lies in a range; everything else is the task's own.

    `sample` also draws prompts in proportion to p(1 − p), the variance of a reward with pass rate p. Which prompts are
    chosen depends only on table, seed and the task's order.
    """

    def __init__(
        self,
        task: Task,
        table: DifficultyTable,
        *,
        low: float,
        high: float,
        by: Literal["range", "sample"] = "range",
        seed: int = 0,
    ) -> None:
        self.task, self.table, self.low, self.high, self.by, self.seed = task, table, low, high, by, seed
        self._chosen: list[Prompt] = []
        self._seen = 0  # prompts of the task that were examined
        size = task.size
        self._size = None if size is None else sum(map(self._is_in_range, task.prompts(0, size)))
        if self._size == 0:
            raise TaskError(
                f"no prompt of {task.name} has a pass rate from {low:g} to {high:g}: widen task.pass_rates, or remove "
                "task.difficulty"
            )

    def __getattr__(self, name: str) -> Any:
        if name == "task" or name.startswith("__"):  # copy and pickle ask for these before `task` is set
            raise AttributeError(name)
        return getattr(self.task, name)  # such as `solution`, which some tasks have

    @property
    def name(self) -> str:
        """The task's name."""
        return self.task.name

    @property
    def size(self) -> int | None:
        """The number of distinct training prompts in the range; None if unlimited."""
        return self._size

    @property
    def verifier(self) -> Verifier:
        """The task's verifier."""
        return self.task.verifier

    def evaluation_prompts(self, count: int) -> list[Prompt]:
        """The task's own: held-out prompts are never chosen by difficulty."""
        return self.task.evaluation_prompts(count)

    def prompts(self, start: int, count: int) -> list[Prompt]:
        """Chosen training prompts number `start` to `start + count - 1`, the same at every call."""
        check_range(start, count)
        in_vain = 0
        while len(self._chosen) < start + count:
            prompts = self.task.prompts(self._seen, AT_ONCE)
            chosen = [prompt for index, prompt in enumerate(prompts, self._seen) if self._is_chosen(prompt, index)]
            self._chosen += chosen
            self._seen += AT_ONCE
            in_vain = 0 if chosen else in_vain + AT_ONCE
            if in_vain > max(MOST_IN_VAIN, 10 * (self.task.size or 0)):
                raise TaskError(f"none of {in_vain:,} prompts of {self.name} was chosen: widen task.pass_rates")
        return self._chosen[start : start + count]

    def _is_in_range(self, prompt: Prompt) -> bool:
        counts = self.table.prompts.get(prompt.prompt_id)
        return counts is None or self.low <= counts.rate <= self.high

    def _is_chosen(self, prompt: Prompt, index: int) -> bool:
        if not self._is_in_range(prompt):
            return False
        counts = self.table.prompts.get(prompt.prompt_id)
        if self.by == "range" or counts is None:
            return True
        rate = (counts.passed + 1) / (counts.rollouts + 2)  # never 0: few answers do not prove a prompt hopeless
        return fraction_of(f"difficulty/{self.seed}/{index}/{prompt.prompt_id}") < 4 * rate * (1 - rate)
