"""Built-in arithmetic: three tasks with no files, no dependencies and answers that can be checked exactly.

`arithmetic` and `arithmetic-steps` are for a policy with one token per character. They write gold responses
(`solution`) and plausible wrong ones (`spoiled_solution`). A policy trained on both is often wrong when sampled and
mostly right when greedy, so reinforcement learning improves it quickly.

A hash of the question decides whether it is held out, so no seed can put a held-out question into training.
"""

from __future__ import annotations

import operator
import random
import re
from functools import cached_property, lru_cache
from itertools import accumulate, product

from stalewise.errors import TaskError
from stalewise.tasks.base import (
    CHAT,
    FinitePrompts,
    LocalVerifier,
    below,
    check_range,
    first_distinct,
    fraction_of,
    pick,
    stream,
)
from stalewise.tasks.verifiers.number import NumberVerifier
from stalewise.types import Prompt, Reward

MARKER = "#"  # precedes the final answer of a worked-out response
CHARACTERS = "0123456789+-=;" + MARKER  # all characters in prompts and responses of `arithmetic` and `arithmetic-steps`
_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_STEPS = re.compile(r"(?:[0-9]{1,2}[+-][0-9]=[0-9]{1,2};)+#[0-9]{1,2}")


class AnswerVerifier(LocalVerifier):
    """The whole response must be the answer. Parts: `correct` (the value) and `format` (only digits)."""

    def judge(self, prompt: Prompt, response: str) -> Reward:
        """Score one response."""
        answer = response.strip()
        correct = float(answer == prompt.answer)
        return Reward(correct, {"correct": correct, "format": float(answer.isascii() and answer.isdigit())})

    def answer(self, response: str) -> str | None:
        """The response, for a vote among responses."""
        return response.strip() or None


class StepsVerifier(LocalVerifier):
    """The text after the last marker must be the answer; the steps before it are not checked.

    Parts: `correct` (the value) and `format` (whether the response has the form of worked-out steps).
    """

    def judge(self, prompt: Prompt, response: str) -> Reward:
        """Score one response."""
        text = response.strip()
        _, marker, answer = text.rpartition(MARKER)
        correct = float(bool(marker) and answer == prompt.answer)
        return Reward(correct, {"correct": correct, "format": float(_STEPS.fullmatch(text) is not None)})

    def answer(self, response: str) -> str | None:
        """The text after the last marker, for a vote among responses."""
        return response.strip().rpartition(MARKER)[2] if MARKER in response else None


@lru_cache(maxsize=4)  # a program makes a task for each run, doctor and evaluation
def _sides(name: str, fraction: float, smallest: int, largest: int, operations: str) -> bytes:
    """For each question, in order, 1 if it is held out and 0 if not."""
    terms = range(smallest, largest + 1)

    def is_held_out(operation: str, left: int, right: int) -> bool:
        # 47+38 and 38+47 are on the same side: one of them in training would give the other away.
        first, second = (left, right) if operation == "-" else (min(left, right), max(left, right))
        return fraction_of(f"{name}/{first}{operation}{second}") < fraction

    return bytes(is_held_out(*question) for question in product(operations, terms, terms))


class Addition:
    """`arithmetic`: two-digit addition. The answer to the prompt "47+38=" is "85"."""

    name = "arithmetic"
    held_out = 1 / 8  # fraction of the questions that only evaluation sees
    smallest, largest, operations, prefill = 10, 99, "+", False

    def __init__(self, *, seed: int = 0):
        self.seed = seed
        self.verifier: LocalVerifier = AnswerVerifier()
        self._training = FinitePrompts(self._questions(held_out=False), seed=seed, name=self.name)

    @property
    def size(self) -> int:
        """The number of distinct training prompts."""
        return len(self._training)

    def prompts(self, start: int, count: int) -> list[Prompt]:
        """Training prompts number `start` to `start + count - 1`; epochs are shuffled by the seed."""
        return self._training.take(start, count)

    def evaluation_prompts(self, count: int) -> list[Prompt]:
        """The first `count` held-out prompts, or all if there are fewer; the same for every seed."""
        check_range(0, count)
        return self._evaluation[:count]

    def solution(self, prompt: Prompt) -> str:
        """Write the gold response."""
        return prompt.answer

    def spoiled_solution(self, prompt: Prompt, rng: random.Random) -> str:
        """Write a wrong response: as long as the gold one, with one or more of its digits changed."""
        digits = list(prompt.answer)
        changed = [index for index in range(len(digits)) if below(rng, 2)] or [below(rng, len(digits))]
        for index in changed:
            # A leading zero would be no plausible number, except in a one-digit answer.
            choices = "123456789" if index == 0 and len(digits) > 1 else "0123456789"
            digits[index] = pick(rng, [digit for digit in choices if digit != digits[index]])
        return "".join(digits)

    @classmethod
    def _prompt(cls, left: int, operation: str, right: int, prefill: bool) -> Prompt:
        problem = f"{left}{operation}{right}"
        return Prompt(f"{cls.name}/{problem}", f"{problem}=", str(_OPERATIONS[operation](left, right)))

    def _questions(self, *, held_out: bool) -> tuple[Prompt, ...]:
        return _questions(type(self), held_out, self.smallest, self.largest, self.operations, self.prefill)

    @cached_property
    def _evaluation(self) -> list[Prompt]:
        questions = self._questions(held_out=True)
        return sorted(questions, key=lambda prompt: fraction_of("order/" + prompt.prompt_id))


@lru_cache(maxsize=8)
def _questions(
    task: type[Addition], held_out: bool, smallest: int, largest: int, operations: str, prefill: bool
) -> tuple[Prompt, ...]:
    """The questions of one side, in order."""
    terms = range(smallest, largest + 1)
    sides = _sides(task.name, task.held_out, smallest, largest, operations)
    return tuple(
        task._prompt(left, operation, right, prefill)
        for (operation, left, right), side in zip(product(operations, terms, terms), sides, strict=True)
        if side == held_out
    )


class AdditionChat(Addition):
    """`arithmetic-chat`: "What is 3+5?" for instruct models. The last number counts, since they write "3 + 5 = 8".

    Terms go from 0 to `largest`; `operations` are some of "+-*". With `prefill` the reply already begins with
    "3 + 5 =", which keeps a wordy model to the point, and the first number after that counts.
    """

    name = "arithmetic-chat"
    held_out = 1 / 5
    smallest = 0

    def __init__(self, *, seed: int = 0, largest: int = 9, operations: str = "+", prefill: bool = False):
        if not 1 <= largest <= 999:
            raise TaskError(f"{self.name}: {largest=} must lie in 1..999")
        if not operations or set(operations) - set(_OPERATIONS) or len(set(operations)) < len(operations):
            raise TaskError(f'{self.name}: {operations=} must be some of "+-*", each once')
        self.largest, self.operations, self.prefill = largest, operations, prefill
        super().__init__(seed=seed)
        self.verifier = NumberVerifier(which="first" if prefill else "last")

    @classmethod
    def _prompt(cls, left: int, operation: str, right: int, prefill: bool) -> Prompt:
        plain = super()._prompt(left, operation, right, prefill)
        metadata = {**CHAT, "prefill": f"{left} {operation} {right} ="} if prefill else CHAT
        return Prompt(plain.prompt_id, f"What is {left}{operation}{right}?", plain.answer, metadata)


class Steps:
    """`arithmetic-steps`: chains of one-digit terms, worked out one step at a time.

    The answer to "7+8-5+6-2+3=" is "7+8=15;15-5=10;10+6=16;16-2=14;14+3=17;#17". Running totals stay within
    0..`largest_total`, so there are few facts to learn; with 6 or 7 terms a gold response has 32 to 50 characters. The
    number of prompts is unlimited; one in eight is held out.
    """

    name = "arithmetic-steps"
    size = None
    held_out = 1 / 8

    def __init__(self, *, seed: int = 0, fewest_terms: int = 6, most_terms: int = 7, largest_total: int = 19):
        if not 2 <= fewest_terms <= most_terms <= 999:
            raise TaskError(f"{self.name}: {fewest_terms=}, {most_terms=} must be 2 ≤ fewest ≤ most ≤ 999")
        if not 9 <= largest_total <= 99:
            raise TaskError(f"{self.name}: {largest_total=} must lie in 9..99")
        self.seed, self.largest_total = seed, largest_total
        self._lengths = range(fewest_terms, most_terms + 1)
        self.verifier = StepsVerifier()

    def prompts(self, start: int, count: int) -> list[Prompt]:
        """Training prompts number `start` to `start + count - 1`."""
        check_range(start, count)
        return [self._draw(self.seed, index, held_out=False) for index in range(start, start + count)]

    def evaluation_prompts(self, count: int) -> list[Prompt]:
        """The first `count` held-out prompts, the same for every seed."""
        check_range(0, count)
        # Very short chains have few held-out questions: the number of draws is limited.
        return first_distinct((self._draw("evaluation", index, held_out=True) for index in range(100 * count)), count)

    def solution(self, prompt: Prompt) -> str:
        """Write the gold response."""
        terms = _terms(prompt.text)
        return _worked_out(terms, list(accumulate(terms)))

    def spoiled_solution(self, prompt: Prompt, rng: random.Random) -> str:
        """Write a wrong response: one step gives a wrong total, and the steps after it continue from there.

        Step and error are drawn evenly among those that keep every later total within the task's range, so that a
        policy meets no total that is not in gold responses.
        """
        terms = _terms(prompt.text)
        totals = list(accumulate(terms))
        step = pick(rng, [step for step in range(1, len(terms)) if self._errors(totals[step:])])
        error = pick(rng, self._errors(totals[step:]))
        return _worked_out(terms, totals[:step] + [total + error for total in totals[step:]])

    def _errors(self, totals: list[int]) -> list[int]:
        """The amounts that can be added to all of these totals without leaving the range."""
        return [error for error in range(-min(totals), self.largest_total - max(totals) + 1) if error]

    def _draw(self, *names: object, held_out: bool) -> Prompt:
        rng = stream(self.name, *names)
        while True:
            chain = self._chain(rng)
            if (fraction_of(f"{self.name}/{chain}") < self.held_out) is held_out:
                return Prompt(f"{self.name}/{chain}", f"{chain}=", str(sum(_terms(chain + "="))))

    def _chain(self, rng: random.Random) -> str:
        total = 1 + below(rng, 9)
        chain = str(total)
        for _ in range(pick(rng, self._lengths) - 1):
            term = pick(rng, [term for term in range(-9, 10) if term and 0 <= total + term <= self.largest_total])
            total += term
            chain += f"{term:+d}"
        return chain


def _terms(text: str) -> list[int]:
    """Read the terms of a prompt: "7+8-5=" is [7, 8, -5]."""
    return [int(term) for term in re.findall(r"[+-]?[0-9]", text)]


def _worked_out(terms: list[int], totals: list[int]) -> str:
    """Write the steps with these running totals."""
    steps = [f"{before}{term:+d}={after};" for before, term, after in zip(totals, terms[1:], totals[1:], strict=False)]
    return "".join(steps) + f"{MARKER}{totals[-1]}"
