"""Checks of records."""

from __future__ import annotations

import math
from typing import Any

import pytest

from stalewise.store.records import HOLDER, JOURNAL, SOURCES, dict_of, is_by_prompt, is_number, is_whole


def test_numbers_are_finite_and_exact_as_floats() -> None:
    assert (is_number(0.5), is_number(math.nan), is_number(None), is_number("1")) == (True, False, False, False)
    assert is_whole(2**53) and not is_whole(2**53 + 1) and not is_whole(1.0)
    assert dict_of(is_whole)({"a": 1}) and not dict_of(is_whole)({"a": None}) and not dict_of(is_whole)([1])
    assert SOURCES.accepts({"batches": [{"directory": "a", "updates": 3}]})
    assert not SOURCES.accepts({"batches": [{"directory": "a", "updates": "3"}]})
    assert not SOURCES.accepts({"batches": {"updates": 3}})


@pytest.mark.parametrize(
    ("record", "is_usable"),
    [
        ({}, True),
        ({"prompt_ids": ["a"], "score": [1.5], "scored": [2]}, True),
        ({"prompt_ids": ["a", "b"], "score": [1.5], "scored": [2]}, False),
        ({"prompt_ids": [], "score": [], "scored": []}, False),
        ({"prompt_ids": ["a"], "score": [math.nan], "scored": [2]}, False),
        ({"prompt_ids": ["a"]}, False),
        (None, False),
    ],
)
def test_results_per_prompt_are_lists_of_one_length(record: Any, is_usable: bool) -> None:
    assert is_by_prompt(record) == is_usable


def test_a_schema_requires_more_of_some_events() -> None:
    record = {"time": 1.0, "event": "switch", "seconds": 2}
    assert JOURNAL.accepts(record) and JOURNAL.accepts(record | {"generation_batch": None})
    assert not JOURNAL.accepts(record | {"generation_batch": "0"})
    assert not JOURNAL.accepts(record | {"event": "learn"})
    assert JOURNAL.accepts(record | {"event": "learn", "first": 0, "stop": 2})
    assert not HOLDER.accepts([])
