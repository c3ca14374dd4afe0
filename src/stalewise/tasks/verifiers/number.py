"""Scores the first or the last number of a response against the answer (`number`), or the whole text (`exact`)."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import Literal

from stalewise.errors import TaskError
from stalewise.tasks.base import LocalVerifier
from stalewise.types import Prompt, Reward


class ExactVerifier(LocalVerifier):
    """The response must equal the answer, except for surrounding white space."""

    def judge(self, prompt: Prompt, response: str) -> Reward:
        """Score one response."""
        return Reward(float(response.strip() == prompt.answer.strip()))

    def answer(self, response: str) -> str | None:
        """The response, for a vote among responses."""
        return response.strip() or None


_NUMBER = re.compile(
    r"""
    (?: (?<![0-9A-Za-z)\]}]) [-+−] )?            # a sign, but not the operator in "5-3"
    (?: (?: [0-9]{1,3} (?: ,[0-9]{3} )+ (?![0-9])  # 1,234,567; but "3,4" is two numbers
          | [0-9]+ )                             # not \d, which takes digits of every script
        (?: \.[0-9]+ )?
      | (?<![0-9]) \.[0-9]+ )                    # .5 alone
    (?: [eE][-+]?[0-9]{1,3} (?![0-9]) )?         # three digits: 10**999 is cheap, 10**999999999 is an attack
    (?: /[0-9]+ (?! [0-9/] | \.[0-9] ) )?        # 3/4
    """,
    re.VERBOSE,
)

_LONGEST = 1000  # characters of a number; parsing an integer takes quadratic time


class NumberVerifier(LocalVerifier):
    """The first or the last number in the response must equal the answer: exactly, as fractions.

    Understands signs, decimals, thousands separators, exponents and fractions, so "1,250.0" equals "1250".
    The part `parsed` says whether the response has a number. A gold answer without one is an error.
    """

    def __init__(self, which: Literal["first", "last"] = "last"):
        if which not in ("first", "last"):
            raise TaskError(f'verifier number: which="{which}" must be "first" or "last"')
        self.which: Literal["first", "last"] = which

    def judge(self, prompt: Prompt, response: str) -> Reward:
        """Score one response."""
        gold = number_in(prompt.answer, which="last")
        if gold is None:
            return Reward(math.nan, error=f"answer is not a number: {prompt.answer[:80]!r}")
        number = number_in(response, which=self.which)
        return Reward(float(number == gold), {"parsed": float(number is not None)})

    def answer(self, response: str) -> str | None:
        """The number that counts, for majority votes among responses."""
        number = number_in(response, which=self.which)
        return None if number is None else str(number)


def number_in(text: str, *, which: Literal["first", "last"] = "last") -> Fraction | None:
    """Read the first or the last number of a text.

    >>> number_in("so 1,250 - 0.5 = 1249.50.")
    Fraction(2499, 2)
    >>> number_in("x = -3/4"), number_in("none")
    (Fraction(-3, 4), None)
    """
    token = ""
    for match in _NUMBER.finditer(text):
        token = match.group()
        if text.endswith("/", 0, match.start()):  # the 2/2024 in 1/2/2024 is not a fraction
            token = token.rpartition("/")[2]
        if which == "first":
            break
    if not token or len(token) > _LONGEST:
        return None
    numerator, _, denominator = token.replace(",", "").replace("−", "-").partition("/")
    below = int(denominator or 1)
    return Fraction(numerator) / below if below else None
