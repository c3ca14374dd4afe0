"""Selects rollouts of the index: filters, search in the text, sorting, pages of groups."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow.compute as pc
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from stalewise.errors import ConfigError, StalewiseError, visible
from stalewise.reporting.browser.index import PART, Column, RolloutIndex
from stalewise.reporting.browser.locations import read_shard

SEARCH_S = 20.0  # time limit of a text search
MOST_GROUPS = 500  # groups in one answer
LONGEST_NAME = 120  # characters of a prompt id in a list


class RolloutFilters(BaseModel):
    """The filters of the list of groups, as in the address. A rollout has to pass all of them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    batch: str = Field(default="", description="Key of a generation batch.")
    update: int | None = Field(default=None, description="Update that consumed the rollout.")
    group: int | None = None
    prompt: str = Field(default="", description="Part of the prompt's id.")
    text: str = Field(default="", description="Part of the response; case is ignored.")
    ratio: float | None = Field(default=None, ge=1, description="Least factor of the worst ratio above or below 1.")
    reward_min: float | None = None
    reward_max: float | None = None
    part: str = Field(default="", description="Reward part for part_min and part_max.")
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


def parse_filters(parameters: Mapping[str, str]) -> RolloutFilters:
    """Filters from the parameters of an address; raises a ConfigError that names an invalid one."""
    try:
        return RolloutFilters.model_validate({key: value for key, value in parameters.items() if value != ""})
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"filter {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


class QueryResult:
    """Groups with at least one rollout that passes the filters, sorted."""

    def __init__(self, index: RolloutIndex, filters: RolloutFilters) -> None:
        self.index = index
        self.problems: list[str] = []
        self.rows = self._matching(filters)  # bool, one per rollout
        self.counts = self._reduce(np.add, self.rows[index.order])  # number of matching rollouts, one per group
        groups = np.flatnonzero(self.counts)
        self.groups = groups[self._sorted(groups, filters)]

    @property
    def rollouts(self) -> int:
        """How many rollouts pass the filters."""
        return int(self.rows.sum())

    def page(self, offset: int, limit: int) -> list[dict[str, Any]]:
        """Some groups, as the list shows them."""
        return [self._describe(group) for group in self.groups[offset : offset + min(limit, MOST_GROUPS)].tolist()]

    def _reduce(self, function: np.ufunc, values: Column) -> Column:
        starts = self.index.starts
        return function.reduceat(values, starts) if len(starts) else np.empty(0, np.int64)

    def _matching(self, filters: RolloutFilters) -> Column:
        index = self.index
        column = index.column
        passes = np.ones(index.table.num_rows, dtype=np.bool_)
        if filters.batch:
            keys = [batch.key for batch in index.batches]
            passes &= column("place") == (keys.index(filters.batch) if filters.batch in keys else -1)
        for name in ("update", "group"):
            if (value := getattr(filters, name)) is not None:
                passes &= column(name) == value
        if filters.prompt:
            passes &= _contains(index.table.column("prompt_id"), filters.prompt)
        if filters.ratio is not None:
            passes &= _between(_worst_size(index), np.float32(math.log(filters.ratio)), None)
        passes &= _between(column("reward"), filters.reward_min, filters.reward_max)
        if filters.part:
            if filters.part not in index.parts:
                raise ConfigError(f"filter part: {visible(filters.part)} is not a reward part of this run")
            passes &= _between(column(PART + filters.part), filters.part_min, filters.part_max)
        for name in ("clipped", "vetoed", "truncated", "error", "degenerate"):
            if getattr(filters, name):
                passes &= column(name) > 0
        if filters.mixed:
            passes &= ~column("degenerate")
        if filters.unused:
            passes &= column("update") < 0
        return self._with_text(passes, filters.text) if filters.text else passes

    def _with_text(self, passes: Column, text: str) -> Column:
        """The passing rollouts with this text; shards without candidates are not opened."""
        matches, until = np.zeros_like(passes), time.monotonic() + SEARCH_S
        for number, shard in enumerate(self.index.shards):
            if not passes[shard.rows].any():
                continue
            if time.monotonic() > until:
                left = f"{len(self.index.shards) - number} of {len(self.index.shards)} shards were not searched"
                self.problems.append(f"the search was ended after {SEARCH_S:g} s, {left}: choose a batch or an update")
                break
            try:
                table = read_shard(self.index.batches[shard.batch], shard.shard, ["rollout_id", "text"])
            except StalewiseError as error:
                self.problems.append(str(error))
                continue
            listed = np.isin(table.column("rollout_id").to_numpy(), self.index.column("rollout_id")[shard.rows])
            matches[shard.rows] = passes[shard.rows] & _contains(table.column("text"), text)[listed]
        return matches

    def _sorted(self, groups: Column, filters: RolloutFilters) -> Column:
        """Positions in `groups`, sorted; unknown values come last."""
        order = np.arange(len(groups))
        if filters.sort == "group":
            return order[::-1] if filters.descending else order
        value = self._value(filters.sort)[groups]
        return np.lexsort((order, -value if filters.descending else value))  # NaN is last in either direction

    def _value(self, sort: str) -> Column:
        """The sort value of each group: the largest of its passing rollouts, or their mean reward."""
        index = self.index
        name = {"length": "response_length"}.get(sort, sort)
        value = (_worst_size(index) if sort == "ratio" else index.column(name)).astype(np.float64)
        if sort in ("update", "vetoed"):
            value = np.where(value < 0, np.nan, value)
        value = np.where(self.rows, value, np.nan)[index.order]
        if sort != "reward":
            return self._reduce(np.fmax, value)
        known = ~np.isnan(value)
        count, total = self._reduce(np.add, known), self._reduce(np.add, np.where(known, value, 0.0))
        return np.where(count > 0, total / np.maximum(count, 1), np.nan)

    def _describe(self, group: int) -> dict[str, Any]:
        index = self.index
        rows = rows_of_group(index, group)
        first = int(rows[0])
        batch = index.batches[int(index.column("place")[first])]
        reward, worst = index.column("reward")[rows], index.column("worst_log_ratio")[rows]
        size = _worst_size(index, rows)
        known = reward[~np.isnan(reward)]
        update = int(index.column("update")[first])
        return {
            "batch": batch.key,
            "rollback": batch.rollback,
            "group": int(index.column("group")[first]),
            "prompt": visible(index.table.column("prompt_id")[first].as_py()[:LONGEST_NAME]),
            "update": None if update < 0 else update,
            "rollouts": len(rows),
            "matching": int(self.counts[group]),
            "reward": float(known.mean()) if len(known) else None,
            "worst_log_ratio": None if np.isnan(size).all() else json_log_ratio(worst[np.nanargmax(size)]),
            "vetoed": int((index.column("vetoed")[rows] > 0).sum()),
            "truncated": int(index.column("truncated")[rows].sum()),
            "errors": int(index.column("error")[rows].sum()),
            "degenerate": bool(index.column("degenerate")[first]),
        }


def rows_of_group(index: RolloutIndex, group: int) -> Column:
    """The rows of a group in the index."""
    stop = index.starts[group + 1] if group + 1 < len(index.starts) else len(index.order)
    return index.order[index.starts[group] : stop]


def json_number(value: Any) -> float | None:
    """A number with six digits for JSON, which has no NaN and no infinity."""
    value = float(value)
    return float(f"{value:.6g}") if math.isfinite(value) else None


def json_log_ratio(value: Any) -> float | str:
    """A log-ratio for JSON; a string if it is not finite."""
    value = float(value)
    number = json_number(value)
    return number if number is not None else "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _worst_size(index: RolloutIndex, rows: Column | slice = slice(None)) -> Column:
    """The size of the worst log-ratio of each rollout: NaN if none was recorded, ∞ if it was not a number."""
    size = np.abs(index.column("worst_log_ratio")[rows])
    return np.where(np.isnan(size) & (index.column("clipped")[rows] >= 0), np.float32(np.inf), size)


def _contains(column: Any, text: str) -> Column:
    options = pc.MatchSubstringOptions(text, ignore_case=True)
    return pc.call_function("match_substring", [column], options).to_numpy()


def _between(column: Column, low: Any, high: Any) -> Column:
    passes = np.ones(len(column), dtype=np.bool_)
    with np.errstate(invalid="ignore"):
        if low is not None:
            passes &= column >= low
        if high is not None:
            passes &= column <= high
    return passes
