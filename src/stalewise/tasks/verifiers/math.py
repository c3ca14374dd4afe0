"""Scores mathematics with math-verify: 1/2, 0.5 and \\frac{1}{2} are the same answer."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from stalewise.tasks.base import need
from stalewise.tasks.sandbox import probe
from stalewise.tasks.verifiers.judge_process import Judge
from stalewise.tasks.verifiers.number import number_in
from stalewise.tasks.verifiers.pool import Confinement, ProcessVerifier
from stalewise.types import Prompt, Reward


class MathVerifier(ProcessVerifier):
    """The answer that math-verify finds in the response must equal the gold answer.

    A response without an answer gets 0, with the part `parsed` 0. A gold answer that cannot be parsed is an error. Gold
    answers are parsed as LaTeX, with or without dollars or a box. With `sandbox`, if Landlock works, the parser has no
    network and reads only Python's own files and those on the Python path.
    """

    def __init__(self, *, workers: int | None = None, limit_s: float = 5.0, sandbox: bool = True):
        need("math_verify", "math", "the verifier math")
        confinement = Confinement(memory_mb=8192, sandbox=sandbox and not probe("landlock"))
        super().__init__(f"{__name__}:load_judge", workers=workers, limit_s=limit_s, confinement=confinement)
        self._matches: dict[str, bool] = {}  # by gold answer; later evaluations have the same ones

    def unmatched(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Prompts whose gold answer would be scored as wrong in a box, mostly since only part of it is parsed.

        Each different answer is scored once; prompts that cannot be scored are not listed.
        """
        new = {prompt.answer: prompt for prompt in prompts if prompt.answer not in self._matches}
        rewards = self.score(list(new.values()), [rf"The answer is \boxed{{{answer}}}." for answer in new])
        self._matches |= {answer: reward.value != 0 for answer, reward in zip(new, rewards, strict=True)}
        return [prompt for prompt in prompts if not self._matches[prompt.answer]]

    def answer(self, response: str) -> str | None:
        """The last boxed text, or the last number, for majority votes; 1/2 and 0.5 count as different answers."""
        if boxed := last_boxed(response):
            return boxed
        number = number_in(response)
        return None if number is None else str(number)


def last_boxed(text: str) -> str:
    r"""The content of the last \boxed{…}, without white space; empty if no box is closed.

    >>> last_boxed(r"so \boxed{1}, no: \boxed{\frac{1}{ 2 }}.")
    '\\frac{1}{2}'
    """
    _, box, rest = text.rpartition(r"\boxed{")
    depth = 1
    for position, character in enumerate(rest if box else ""):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return "".join(rest[:position].split())
    return ""


def load_judge() -> Judge:
    """Make the judge; runs in a worker."""
    # math-verify warns that its own time limits are off; the pool has a harder one.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    from math_verify import parse, verify

    @lru_cache(maxsize=256)  # the responses of a group share their gold answer
    def parse_gold(answer: str) -> list[Any]:
        plain = answer.replace(r"\$", "")  # the dollar of a price is no delimiter
        delimited = any(mark in plain for mark in ("$", r"\boxed", r"\(", r"\["))
        # In undelimited LaTeX math-verify finds only plain numbers, and nothing in "x^2+1".
        return parse(answer if delimited else rf"\boxed{{{answer}}}", parsing_timeout=None)  # type: ignore[arg-type]

    def judge(prompt: Prompt, response: str) -> Reward:
        gold = parse_gold(prompt.answer)
        if not gold:
            return Reward(math.nan, error=f"unparseable gold answer: {prompt.answer[:80]!r}")
        found = parse(response, parsing_timeout=None)  # type: ignore[arg-type]
        correct = bool(found) and verify(gold, found, timeout_seconds=None)  # not symmetric: gold comes first
        return Reward(float(correct), {"parsed": float(bool(found))})

    parse_gold("1")  # the first call builds the grammar, which should not count against a response's limit
    return judge
