"""Which rollouts of the index are asked for: filters, search in the text, sorting, pages of groups."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow.compute as pc
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from stalewise.errors import ConfigError, StalewiseError
from stalewise.reporting.browser.index import PART, Column, Index
from stalewise.reporting.browser.locations import read_shard
from stalewise.reporting.inspection import visible

MOST_ROWS = 500  # groups in one answer
LONGEST_NAME = 120  # characters of a prompt's name in a list


class Filters(BaseModel):
    """What a list of groups is asked for, as it stands in the address. Filters are about rollouts and add up."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    batch: str = Field(default="", description="Key of a generation batch.")
    update: int | None = Field(default=None, description="Update that consumed the rollout.")
    group: int | None = None
    prompt: str = Field(default="", description="Part of the prompt's id.")
    text: str = Field(default="", description="Part of the response, in any case.")
    ratio: float | None = Field(default=None, ge=1, description="Worst ratio at least so many times above or below 1.")
    reward_min: float | None = None
    reward_max: float | None = None
    part: str = Field(default="", description="Reward part that part_min and part_max are about.")
    part_min: float | None = None
    part_max: float | None = None
    clipped: bool = False
    vetoed: bool = False
    truncated: bool = False
    error: bool = False
    degenerate: bool = False
    mixed: bool = False
    unused: bool = False
    sort: str = Field(default="group", pattern="^(group|ratio|reward|length|vetoed|update)$")
    descending: bool = False


def parse(parameters: Mapping[str, str]) -> Filters:
    """Filters from the words of an address; what is not understood is an error that names it."""
    try:
        return Filters.model_validate({key: value for key, value in parameters.items() if value != ""})
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"filter {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


class Matches:
    """Groups with at least one rollout that passes the filters, sorted."""

    def __init__(self, index: Index, filters: Filters) -> None:
        self.index = index
        self.problems: list[str] = []
        self.rows = self._matching(filters)  # bool, one per rollout
        counts = np.add.reduceat(self.rows[index.order], index.starts) if len(index.starts) else np.empty(0, np.int64)
        groups = np.flatnonzero(counts)
        self.counts = counts
        self.groups = groups[self._sorted(groups, filters)]

    @property
    def rollouts(self) -> int:
        """How many rollouts pass the filters."""
        return int(self.rows.sum())

    def page(self, offset: int, limit: int) -> list[dict[str, Any]]:
        """Some groups, as the list shows them."""
        return [self._describe(group) for group in self.groups[offset : offset + min(limit, MOST_ROWS)].tolist()]

    def _matching(self, filters: Filters) -> Column:
        index = self.index
        column = index.column
        passes = np.ones(index.table.num_rows, dtype=np.bool_)
        if filters.batch:
            keys = [place.key for place in index.places]
            passes &= column("place") == (keys.index(filters.batch) if filters.batch in keys else -1)
        for name in ("update", "group"):
            if (value := getattr(filters, name)) is not None:
                passes &= column(name) == value
        if filters.prompt:
            passes &= _contains(index.table.column("prompt_id"), filters.prompt)
        if filters.ratio is not None:
            with np.errstate(invalid="ignore"):
                passes &= _worst_size(index) >= np.float32(math.log(filters.ratio))
        passes &= _between(column("reward"), filters.reward_min, filters.reward_max)
        if filters.part:
            if filters.part not in index.parts:
                raise ConfigError(f"filter part: {visible(filters.part)} is no reward part of this run")
            passes &= _between(column(PART + filters.part), filters.part_min, filters.part_max)
        for name in ("clipped", "vetoed"):
            if getattr(filters, name):
                passes &= column(name) > 0
        for name in ("truncated", "error", "degenerate"):
            if getattr(filters, name):
                passes &= column(name)
        if filters.mixed:
            passes &= ~column("degenerate")
        if filters.unused:
            passes &= column("update") < 0
        return self._with_text(passes, filters.text) if filters.text else passes

    def _with_text(self, passes: Column, text: str) -> Column:
        """Of the rollouts that pass, those with this text; shards without any are not opened."""
        found = np.zeros_like(passes)
        for piece in self.index.pieces:
            if not passes[piece.rows].any():
                continue
            try:
                table = read_shard(self.index.places[piece.place], piece.shard, ["rollout_id", "text"])
            except StalewiseError as error:
                self.problems.append(str(error))
                continue
            listed = np.isin(table.column("rollout_id").to_numpy(), self.index.column("rollout_id")[piece.rows])
            found[piece.rows] = passes[piece.rows] & _contains(table.column("text"), text)[listed]
        return found

    def _sorted(self, groups: Column, filters: Filters) -> Column:
        """Positions in `groups`, in the order that was asked for; unknown values come last."""
        if filters.sort == "group":
            order = np.arange(len(groups))
            return order[::-1] if filters.descending else order
        value = self._value(filters.sort)[groups]
        value = -value if filters.descending else value
        return np.lexsort((np.arange(len(groups)), value))  # NaN is last in either direction

    def _value(self, sort: str) -> Column:
        """Of each group the number to sort by: of its rollouts that pass, the largest; of rewards the mean."""
        index = self.index
        name = {"ratio": "worst_log_ratio", "length": "response_length"}.get(sort, sort)
        value = (_worst_size(index) if sort == "ratio" else index.column(name)).astype(np.float64)
        if sort in ("update", "vetoed"):
            value = np.where(value < 0, np.nan, value)
        value = np.where(self.rows, value, np.nan)[index.order]
        if not len(index.starts):
            return np.empty(0)
        if sort != "reward":
            return np.fmax.reduceat(value, index.starts)
        known = ~np.isnan(value)
        count = np.add.reduceat(known, index.starts)
        total = np.add.reduceat(np.where(known, value, 0.0), index.starts)
        return np.where(count > 0, total / np.maximum(count, 1), np.nan)

    def _describe(self, group: int) -> dict[str, Any]:
        index = self.index
        rows = rows_of_group(index, group)
        first = int(rows[0])
        place = index.places[int(index.column("place")[first])]
        reward, worst = index.column("reward")[rows], index.column("worst_log_ratio")[rows]
        size = _worst_size(index, rows)
        known = reward[~np.isnan(reward)]
        update = int(index.column("update")[first])
        return {
            "batch": place.key,
            "rollback": place.rollback,
            "group": int(index.column("group")[first]),
            "prompt": visible(index.table.column("prompt_id")[first].as_py()[:LONGEST_NAME]),
            "update": None if update < 0 else update,
            "rollouts": len(rows),
            "matching": int(self.counts[group]),
            "reward": float(known.mean()) if len(known) else None,
            "worst_log_ratio": None if np.isnan(size).all() else log_ratio(worst[np.nanargmax(size)]),
            "vetoed": int((index.column("vetoed")[rows] > 0).sum()),
            "truncated": int(index.column("truncated")[rows].sum()),
            "errors": int(index.column("error")[rows].sum()),
            "degenerate": bool(index.column("degenerate")[first]),
        }


def rows_of_group(index: Index, group: int) -> Column:
    """Rows of the index that make up a group."""
    stop = index.starts[group + 1] if group + 1 < len(index.starts) else len(index.order)
    return index.order[index.starts[group] : stop]


def number(value: Any) -> float | None:
    """A number for JSON, which knows no NaN and no infinity, with six digits.

    >>> number(float("nan")), number(1 / 3)
    (None, 0.333333)
    """
    value = float(value)
    return float(f"{value:.6g}") if math.isfinite(value) else None


def log_ratio(value: Any) -> float | str:
    """A log-ratio for JSON: the word for it where it is not finite, which says more than that it is unknown.

    >>> log_ratio(0.5), log_ratio(float("-inf")), log_ratio(float("nan"))
    (0.5, '-Infinity', 'NaN')
    """
    value = float(value)
    found = number(value)
    return found if found is not None else "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _worst_size(index: Index, rows: Column | slice = slice(None)) -> Column:
    """How far the worst ratio of each rollout is from 1: NaN where none was recorded, ∞ where what was is no number."""
    size = np.abs(index.column("worst_log_ratio")[rows])
    return np.where(np.isnan(size) & (index.column("clipped")[rows] >= 0), np.float32(np.inf), size)


def _contains(column: Any, text: str) -> Column:
    options = pc.MatchSubstringOptions(text, ignore_case=True)
    return pc.call_function("match_substring", [column], options).to_numpy()


def _between(column: Column, low: float | None, high: float | None) -> Column:
    passes = np.ones(len(column), dtype=np.bool_)
    with np.errstate(invalid="ignore"):
        if low is not None:
            passes &= column >= low
        if high is not None:
            passes &= column <= high
    return passes
