"""Texts that must be equal."""

from stalewise.tasks import make_verifier
from stalewise.tasks.verifiers.number import ExactVerifier
from stalewise.types import Prompt
from verifying import score


def test_exact_ignores_only_white_space_around() -> None:
    assert [r.value for r in score(make_verifier("exact"), "8", " 8\n", "8.", "", "8 8")] == [1, 1, 0, 0, 0]


def test_case_and_inner_white_space_count() -> None:
    prompt = Prompt("a", "?", "one two")
    rewards = ExactVerifier().score([prompt] * 3, [" one two\n", "One two", "one  two"])
    assert [reward.value for reward in rewards] == [1.0, 0.0, 0.0]
