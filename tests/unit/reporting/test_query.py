"""Filters, search and sorting."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from rollout_runs import (
    GROUP_SIZE,
    expected,
    found,
    index_of,
    make_rollout,
)
from stalewise.errors import ConfigError
from stalewise.reporting.browser.query import QueryResult, json_log_ratio, json_number, parse_filters
from stalewise.types import FinishReason, Rollout


def rewards_differ(rollout: Rollout) -> bool:
    first = rollout.group * GROUP_SIZE
    rewards = [make_rollout(i).reward for i in range(first, first + GROUP_SIZE)]
    return len({reward for reward in rewards if not math.isnan(reward)}) > 1


def test_filters_filter(run: Path) -> None:
    index = index_of(run)
    assert found(index) == list(range(480))
    assert found(index, truncated=True) == expected(lambda r: r.finish_reason is FinishReason.LENGTH)
    assert found(index, error=True) == expected(lambda r: r.reward_error != "")
    assert found(index, degenerate=True) == expected(lambda r: not rewards_differ(r))
    assert found(index, mixed=True) == expected(rewards_differ)
    assert found(index, reward_min=0.5) == expected(lambda r: r.reward >= 0.5)
    assert found(index, part="format", part_max=0) == expected(lambda r: r.reward_parts["format"] <= 0)
    assert found(index, update=3) == list(range(120, 160))
    assert found(index, group=7) == list(range(28, 32))
    assert found(index, prompt="PROMPT/11") == expected(lambda r: "prompt/11" in r.prompt_id)
    assert found(index, batch="r000:g000002-v000008") == list(range(320, 480))
    assert found(index, unused=True) == list(range(240, 480))
    assert found(index, text="<IMG src") == expected(lambda r: "<img src" in r.text)
    assert found(index, text="%_.*") == []
    both = set(found(index, text="w7")) & set(found(index, truncated=True))
    assert found(index, text="w7", truncated=True) == sorted(both) != []


def test_filters_by_what_the_learner_saw(run: Path) -> None:
    index = index_of(run)
    worst = index.column("worst_log_ratio")
    assert found(index, ratio=5) == np.flatnonzero(np.abs(worst) >= math.log(5)).tolist() != []
    long = [i for i in range(240) if len(make_rollout(i).response_ids) > 2]
    assert found(index, vetoed=True) == [i for i in long if i % 5 == 0]
    assert found(index, clipped=True) == [i for i in range(240) if len(make_rollout(i).response_ids) > 1]


@pytest.mark.parametrize(
    ("words", "problem"),
    [({"ratio": "x"}, "ratio"), ({"ratio": "0.5"}, "ratio"), ({"colour": "red"}, "colour"), ({"sort": "x"}, "sort")],
)
def test_a_filter_that_is_not_understood_is_named(words: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError, match=f"filter {problem}"):
        parse_filters(words)


def test_groups_are_sorted_and_paged(run: Path) -> None:
    index = index_of(run)
    matches = QueryResult(index, parse_filters({"sort": "ratio", "descending": "true"}))
    rows = [row for offset in range(0, 120, 50) for row in matches.page(offset, 50)]
    assert len(rows) == len(matches.groups) == 120
    sizes = [abs(row["worst_log_ratio"]) for row in rows if row["worst_log_ratio"] is not None]
    assert sizes == sorted(sizes, reverse=True) and len(sizes) == 60
    assert [row["worst_log_ratio"] for row in rows[60:]] == [None] * 60  # unknown comes last in either direction
    up = QueryResult(index, parse_filters({"sort": "reward"})).page(0, 200)
    rewards = [row["reward"] for row in up]
    assert rewards == sorted(rewards)
    assert QueryResult(index, parse_filters({"sort": "group", "descending": "true"})).page(0, 1)[0]["group"] == 119


def test_numbers_that_json_lacks_are_none_or_strings() -> None:
    assert (json_number(float("nan")), json_number(1 / 3)) == (None, 0.333333)
    values = [0.5, float("-inf"), float("inf"), float("nan")]
    assert [json_log_ratio(value) for value in values] == [0.5, "-Infinity", "Infinity", "NaN"]
