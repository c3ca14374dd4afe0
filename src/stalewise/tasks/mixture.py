"""`mixture`: several tasks with weights as one task.

Prompt number i belongs to one of the tasks, and is the n-th prompt of that task, where n counts the task's earlier
prompts. Both depend only on the seed, the weights and i. Numbers come in blocks: each block has exactly every task's
share of prompts, in a random order. Ids of prompts begin with the label of their task (`label::id`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

from stalewise.errors import TaskError, nearest
from stalewise.tasks.base import Task, Verifier, check_range, paired, shuffled, stream, used_prompts
from stalewise.tasks.rows import IN_MIXTURE, MIXTURE, task_of
from stalewise.types import Prompt, Reward

LARGEST_BLOCK = 240  # prompts; weights that need larger blocks are rounded
KEYS = ("name", "weight", "label", "options")


class MixtureTask:
    """Tasks with weights. `tasks` are tables with `name`, and optionally `weight` (1), `label` and `options`."""

    size = None  # small tasks repeat earlier than large ones, so there is no common epoch

    def __init__(self, tasks: Sequence[Mapping[str, Any]], *, seed: int = 0):
        tables = _checked(tasks)
        self.name, self.seed = MIXTURE, seed
        self.tasks: dict[str, Task] = {}
        for table in tables:
            task = _make(table, seed)
            label = table.get("label") or task.name
            if label in self.tasks:
                raise TaskError(f"mixture: two tasks are called {label!r}: give each a label")
            self.tasks[label] = task
        self.counts = block_counts(
            {label: table.get("weight", 1) for label, table in zip(self.tasks, tables, strict=True)}
        )
        self.verifier = MixtureVerifier(self.tasks)
        self._order = lru_cache(maxsize=4)(self._block)

    @property
    def block(self) -> int:
        """Prompts in a block."""
        return sum(self.counts.values())

    def _block(self, number: int) -> list[tuple[str, int]]:
        """The task of each prompt of a block, and the prompt's number in that task."""
        labels = [label for label, count in self.counts.items() for _ in range(count)]
        order = shuffled(len(labels), stream(self.name, self.seed, "block", number))
        next_number = {label: number * count for label, count in self.counts.items()}
        block: list[tuple[str, int]] = []
        for position in order:
            label = labels[position]
            block.append((label, next_number[label]))
            next_number[label] += 1
        return block

    def prompts(self, start: int, count: int) -> list[Prompt]:
        """Training prompts number `start` to `start + count - 1`."""
        check_range(start, count)
        chosen = [self._order(index // self.block)[index % self.block] for index in range(start, start + count)]
        made: dict[tuple[str, int], Prompt] = {}
        for label, task in self.tasks.items():
            own = [number for of, number in chosen if of == label]
            if own:  # consecutive numbers
                prompts = task.prompts(own[0], own[-1] - own[0] + 1)
                made |= {(label, number): prompt for number, prompt in enumerate(prompts, own[0])}
        return [_labelled(label, made[label, number]) for label, number in chosen]

    def used_prompts(self, count: int, most: int) -> list[Prompt]:
        """The distinct prompts of each task among the first `count`; at most `most` of an unlimited task."""
        blocks = -(-count // self.block)
        used = {label: used_prompts(self.tasks[label], blocks * own, most) for label, own in self.counts.items()}
        return [_labelled(label, prompt) for label, prompts in used.items() for prompt in prompts]

    def evaluation_prompts(self, count: int) -> list[Prompt]:
        """Held-out prompts of each task, in all `count` or fewer, as many as the weights say and at least one each."""
        check_range(0, count)
        if count and count < len(self.tasks):
            raise TaskError(f"evaluation.prompts is {count}, fewer than the {len(self.tasks)} tasks of the mixture")
        shares = split(count, self.counts)
        return [
            _labelled(label, prompt)
            for label, task in self.tasks.items()
            for prompt in (task.evaluation_prompts(shares[label]) if shares[label] else [])
        ]


class MixtureVerifier:
    """Scores each response with the verifier of its task."""

    def __init__(self, tasks: Mapping[str, Task]) -> None:
        self._tasks = tasks

    @property
    def scores_independently(self) -> bool:
        """Whether the verifiers of all tasks do."""
        return all(getattr(task.verifier, "scores_independently", False) for task in self._tasks.values())

    def score(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[Reward]:
        """Score `responses[i]` as an answer to `prompts[i]`; results in the same order."""
        items = [(*_own(prompt), response) for prompt, response in paired(prompts, responses)]
        rewards: dict[int, Reward] = {}
        for label, task in self._tasks.items():
            rows = [row for row, (of, _, _) in enumerate(items) if of == label]
            scored = task.verifier.score([items[i][1] for i in rows], [items[i][2] for i in rows]) if rows else []
            rewards |= dict(zip(rows, scored, strict=True))
        if len(rewards) < len(items):
            unknown = next(of for of, _, _ in items if of not in self._tasks)
            raise TaskError(
                f"a prompt is of the task {unknown!r}, which the mixture does not have: {', '.join(self._tasks)}"
            )
        return [rewards[row] for row in range(len(items))]

    def of(self, prompt: Prompt) -> Verifier:
        """The verifier of a prompt's task."""
        return self._tasks[task_of(prompt.prompt_id)].verifier

    def close(self) -> None:
        """End the verifiers' processes."""
        for task in self._tasks.values():
            task.verifier.close()


def _labelled(label: str, prompt: Prompt) -> Prompt:
    return replace(prompt, prompt_id=f"{label}{IN_MIXTURE}{prompt.prompt_id}")


def _own(prompt: Prompt) -> tuple[str, Prompt]:
    label, _, own = prompt.prompt_id.partition(IN_MIXTURE)
    return label, replace(prompt, prompt_id=own)


def _checked(tasks: Any) -> list[Mapping[str, Any]]:
    if not isinstance(tasks, list | tuple) or not all(isinstance(table, Mapping) for table in tasks):
        raise TaskError("mixture: tasks must be a list of tables, each a [[task.options.tasks]] with a name")
    if len(tasks) < 2:
        raise TaskError(f"mixture: {len(tasks)} task(s) are not a mixture: name at least two")
    for number, table in enumerate(tasks):
        where = f"mixture, task {number}"
        for key in table:
            if key not in KEYS:
                raise TaskError(f"{where}: {key!r} is not a setting; {nearest(str(key), KEYS)}")
        if not isinstance(table.get("name"), str) or table["name"] == MIXTURE:
            raise TaskError(f"{where}: needs a name, as in arithmetic or jsonl, which is not mixture itself")
        weight, label = table.get("weight", 1), table.get("label", "")
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
            raise TaskError(f"{where}: weight is {weight!r}; expected a number above 0")
        if not isinstance(label, str) or IN_MIXTURE in label or "/" in label:
            raise TaskError(f"{where}: label is {label!r}; expected a text without {IN_MIXTURE!r} and /")
        if not isinstance(table.get("options", {}), Mapping):
            raise TaskError(f"{where}: options must be a table")
    return list(tasks)


def _make(table: Mapping[str, Any], seed: int) -> Task:
    from stalewise.tasks import make_task  # here, since that module names this one

    if "environment" in table.get("options", {}):
        raise TaskError(
            f"mixture, {table.get('label') or table['name']}: an environment plays all tasks of a mixture or none: "
            "give it to the mixture, as task.options.environment, or train on this task alone"
        )
    try:
        return make_task(table["name"], seed=seed, **table.get("options", {}))
    except TaskError as error:
        raise TaskError(f"mixture, {table.get('label') or table['name']}: {error}") from error


def block_counts(weights: Mapping[str, float]) -> dict[str, int]:
    """Prompts of each task in a block: exact if LARGEST_BLOCK allows it, otherwise rounded.

    >>> block_counts({"a": 3, "b": 1}), block_counts({"a": 0.7, "b": 0.3})
    ({'a': 3, 'b': 1}, {'a': 7, 'b': 3})
    """
    parts = {label: Fraction(str(weight)) for label, weight in weights.items()}
    whole = sum(parts.values())
    shares = {label: part / whole for label, part in parts.items()}
    size = math.lcm(*(share.denominator for share in shares.values()))
    counts = split(LARGEST_BLOCK, shares) if size > LARGEST_BLOCK else {k: int(v * size) for k, v in shares.items()}
    if least := [label for label, share in shares.items() if share * LARGEST_BLOCK < Fraction(1, 2)]:
        raise TaskError(
            f"mixture: {least[0]!r} has a share below 1/{2 * LARGEST_BLOCK}: raise its weight or leave it out"
        )
    return counts


def split(count: int, weights: Mapping[str, Any]) -> dict[str, int]:
    """Split `count` by weights with the largest-remainder method; at least one each if `count` suffices.

    >>> split(10, {"a": 2, "b": 1}), split(2, {"a": 99, "b": 1})
    ({'a': 7, 'b': 3}, {'a': 1, 'b': 1})
    """
    whole = sum(weights.values())
    exact = {label: Fraction(weight) * count / whole for label, weight in weights.items()}
    shares = {label: int(share) for label, share in exact.items()}
    by_remainder = sorted(exact, key=lambda label: (shares[label] - exact[label], list(exact).index(label)))
    for label in by_remainder[: count - sum(shares.values())]:
        shares[label] += 1
    while count >= len(shares) and (empty := [label for label, share in shares.items() if not share]):
        shares[max(shares, key=lambda label: shares[label])] -= 1
        shares[empty[0]] += 1
    return shares
