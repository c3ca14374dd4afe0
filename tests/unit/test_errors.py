"""Errors for users: standard classes that they refine, and exit codes."""

from __future__ import annotations

import pytest

from stalewise import errors


@pytest.mark.parametrize(
    ("name", "base", "exit_code"),
    [
        ("ConfigError", ValueError, 2),
        ("TaskError", ValueError, 2),
        ("StoreError", RuntimeError, 2),
        ("CalibrationError", LookupError, 3),
        ("RankError", RuntimeError, 5),
    ],
)
def test_an_error_is_also_the_standard_class(name: str, base: type[Exception], exit_code: int) -> None:
    kind = getattr(errors, name)
    assert issubclass(kind, base) and issubclass(kind, errors.StalewiseError)
    assert kind.exit_code == exit_code


def test_a_rank_ends_as_the_first_one_did() -> None:
    assert errors.StoppedByFirst(3).exit_code == 3


def test_similar_names_are_suggested_and_others_listed() -> None:
    assert errors.nearest("grop", ["grpo", "dapo"]) == "did you mean grpo?"
    assert errors.nearest("zzz", iter(["b", "a"])) == "known: a, b"
