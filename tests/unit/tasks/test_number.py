"""Numbers in responses."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stalewise.tasks import make_verifier
from stalewise.tasks.verifiers.number import number_in
from stalewise.types import Reward
from verifying import score


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("the answer is 85", "85"),
        ("47+38=85.", "85"),
        ("1,250 apples", "1250"),
        ("1,234,567.50", "2469135/2"),
        ("3,4", "4"),
        ("1,2345", "2345"),
        ("-7", "-7"),
        ("\N{MINUS SIGN}7", "-7"),
        ("x=-7", "-7"),
        ("10-7", "7"),
        ("(4)-7", "7"),
        ("+.5", "1/2"),
        ("-0", "0"),
        ("3/4", "3/4"),
        ("it is 3/45.", "1/15"),
        ("3/4.5", "9/2"),
        ("on 1/2/2024", "2024"),
        ("1e3", "1000"),
        ("2E-2", "1/50"),
        ("#### 42", "42"),
        ("007", "7"),
    ],
)
def test_last_number_of_a_text(text: str, number: str) -> None:
    assert number_in(text) == Fraction(number)


@pytest.mark.parametrize(
    "text", ["", "none", "٣", "-", ".", ",", "1/0", "9" * 5000, "1" + ",234" * 50_000, "-" * 50_000]
)
def test_no_number_in_hostile_text(text: str) -> None:
    assert number_in(text) is None


def test_numbers_compare_exactly_and_not_as_floats() -> None:
    verifier = make_verifier("number")
    assert [reward.value for reward in score(verifier, "0.1", "0.10", "1/10", answer="0.1")] == [1, 1, 1]
    # As floats these two are equal: 2**53 + 1 rounds to 2**53.
    assert score(verifier, "9007199254740993", answer="9007199254740992")[0].value == 0
    assert score(verifier, "no idea")[0] == Reward(0.0, {"parsed": 0.0})
    assert [reward.value for reward in score(make_verifier("number", which="first"), "8 or 9", "9 or 8")] == [1, 0]


def test_gold_without_a_number_is_an_error_and_not_zero() -> None:
    reward = score(make_verifier("number"), "8", answer="eight")[0]
    assert math.isnan(reward.value)
    assert reward.error == "answer is not a number: 'eight'"


@given(st.text())
def test_any_text_can_be_scored(text: str) -> None:
    assert score(make_verifier("number"), text)[0].value in (0.0, 1.0)
    assert score(make_verifier("exact"), text, answer=text)[0].value == 1.0
