"""A group for the browser: its prompt, and its responses token by token with the trainer's records of them."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc

from stalewise.config.run_directory import RESOLVED, read_config
from stalewise.errors import StalewiseError, StoreError, visible
from stalewise.reporting.browser.index import Column, RolloutIndex
from stalewise.reporting.browser.locations import BatchLocation, read_rows
from stalewise.reporting.browser.query import json_log_ratio, json_number, rows_of_group
from stalewise.reporting.inspection import load_tokenizer, rescored
from stalewise.store import read_tokens, rollouts_from_table
from stalewise.store.reward_versions import BatchRewards
from stalewise.types import Rollout, TokenFlag

WINDOW = 1000  # tokens of a response in one answer
MOST_VERSIONS = 64  # groups of one prompt that are listed


class GoldAnswers:
    """Gold answers of prompts, from the tasks of the runs that generated them. A task is made once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tasks: dict[Path, Any] = {}

    def of(self, index: RolloutIndex, batch: str, group: int) -> dict[str, Any]:
        """The gold answer of a group's prompt, or why it is unknown."""
        location, rows = _find(index, batch, index.column("group") == group, f"group {group}")
        prompt_id = index.table.column("prompt_id")[int(rows[0])].as_py()
        try:
            with self._lock:  # making a task may read a large file: once
                prompt = self._task(location.directory).prompts(group, 1)[0]
        except (StalewiseError, OSError) as error:
            return {"answer": None, "why": visible(" ".join(str(error).split()))}
        if prompt.prompt_id != prompt_id:  # a group is the number of its prompt in the order of the task
            return {"answer": None, "why": "the task's data has changed since"}
        return {"answer": printable(prompt.answer), "why": ""}

    def _task(self, batch: Path) -> Any:
        run = next((path for path in batch.resolve().parents if (path / RESOLVED).is_file()), None)
        if run is None:
            raise StoreError(f"{batch} lies in no run, whose config names the task")
        if run not in self._tasks:
            self._tasks[run] = read_config(run).prompts_task()
        return self._tasks[run]


class TokenDecoder:
    """Decodes single tokens of a run; without a tokenizer it gives their ids."""

    def __init__(self, run: Path) -> None:
        tokenizer = load_tokenizer(run)
        added = {} if tokenizer is None else tokenizer.get_added_tokens_decoder()
        self._special = {token for token, entry in added.items() if entry.special}
        self._decode = None if tokenizer is None else lru_cache(maxsize=None)(partial(_decode_one, tokenizer))

    @property
    def has_tokenizer(self) -> bool:
        """Whether the run has a tokenizer."""
        return self._decode is not None

    def prompt(self, ids: Sequence[int]) -> str:
        """The prompt as the policy saw it, for a page: special tokens are in «»."""
        if not self.has_tokenizer:
            return f"token ids {list(ids)}"
        marked = zip(ids, map(printable, self.texts(ids)), strict=True)
        return "".join(f"«{text}»" if token in self._special else text for token, text in marked)

    def texts(self, ids: Sequence[int]) -> list[str]:
        """The text of each token."""
        return [f"⟨{token}⟩" for token in ids] if self._decode is None else [self._decode(token) for token in ids]


def _decode_one(tokenizer: Any, token: int) -> str:
    """The text of a token inside a response: many decoders strip a leading space from the first token."""
    once, twice = (tokenizer.decode([token] * n, skip_special_tokens=False) for n in (1, 2))
    return twice[len(once) :] if twice.startswith(once) and len(twice) > len(once) else once


def printable(text: str) -> str:
    """The text of a token for a page: unprintable characters as escapes, line breaks marked."""
    return "".join("↵\n" if character == "\n" else visible(character) for character in text)


def describe_group(index: RolloutIndex, batch: str, group: int, decoder: TokenDecoder) -> dict[str, Any]:
    """The prompt of a group and all its responses, each with its first tokens."""
    location, rows = _find(index, batch, index.column("group") == group, f"group {group}")
    rows = rows_of_group(index, int(index.column("group_number")[rows[0]]))
    rollouts, logged, problems = _read(index, location, rows)
    rollout_ids = index.column("rollout_id")[rows]
    other_rewards: dict[str, BatchRewards] = {}
    try:
        other_rewards = {visible(name): rewards for name, rewards in rescored(location.directory).items()}
    except StalewiseError as error:
        problems.append(str(error))
    first = next(iter(rollouts.values()), None)
    prompt = [] if first is None else list(first.prompt_ids)
    return {
        "batch": batch,
        "rollback": location.rollback,
        "is_kept": location.is_kept,
        "directory": location.directory.name,
        "group": group,
        "prompt_id": visible(index.table.column("prompt_id")[int(rows[0])].as_py()),
        "prompt": decoder.prompt(prompt),
        "versions": groups_of_prompt(index, int(rows[0])),
        "degenerate": bool(index.column("degenerate")[int(rows[0])]),
        "responses": [
            describe_response(index, int(row), rollouts, logged, decoder)
            | {
                "rewards": {
                    name: json_number(rewards.values(rollout_ids[[position]])[0])
                    for name, rewards in other_rewards.items()
                }
            }
            for position, row in enumerate(rows)
        ],
        "rewards_used": visible(location.rewards),
        "problems": problems,
    }


def groups_of_prompt(index: RolloutIndex, row: int) -> list[dict[str, Any]]:
    """All groups with the prompt of this row, by the version of the policy that answered it."""
    prompt_id = index.table.column("prompt_id")
    same = np.flatnonzero(pc.call_function("equal", [prompt_id, prompt_id[row]]).to_numpy())
    numbers = np.unique(index.column("group_number")[same])
    groups: list[dict[str, Any]] = []
    for number in numbers.tolist():
        rows = rows_of_group(index, number)
        reward = index.column("reward")[rows]
        known = reward[~np.isnan(reward)]
        location = index.batches[int(index.column("place")[rows[0]])]
        groups.append(
            {
                "batch": location.key,
                "group": int(index.column("group")[rows[0]]),
                "version": int(index.column("version_first")[rows].min()),
                "reward": json_number(known.mean()) if len(known) else None,
                "rollback": location.rollback,
            }
        )
    return sorted(groups, key=lambda group: group["version"])[:MOST_VERSIONS]


def describe_tokens(
    index: RolloutIndex, batch: str, rollout_id: int, start: int, decoder: TokenDecoder
) -> dict[str, Any]:
    """Another window of a response's tokens."""
    location, rows = _find(index, batch, index.column("rollout_id") == rollout_id, f"rollout {rollout_id}")
    rollouts, logged, problems = _read(index, location, rows[:1])
    if rollout_id not in rollouts:
        raise StoreError("; ".join(problems) or f"rollout {rollout_id} cannot be read")
    return _tokens(rollouts[rollout_id], logged.get(rollout_id), start, decoder)


def describe_response(
    index: RolloutIndex,
    row: int,
    rollouts: Mapping[int, Rollout],
    logged: Mapping[int, dict[str, Any]],
    decoder: TokenDecoder,
) -> dict[str, Any]:
    """One response; if its shard cannot be read, only the values in the index."""
    value = {name: index.column(name)[row] for name in ("rollout_id", "update", "age", "clipped", "vetoed")}
    is_consumed, is_logged = value["update"] >= 0, value["clipped"] >= 0
    known: dict[str, Any] = {
        "rollout_id": int(value["rollout_id"]),
        "reward": json_number(index.column("reward")[row]),
        "advantage": json_number(index.column("advantage")[row]),
        "update": int(value["update"]) if is_consumed else None,
        "age": int(value["age"]) if is_consumed else None,
        "length": int(index.column("response_length")[row]),
        "worst_log_ratio": json_log_ratio(index.column("worst_log_ratio")[row]) if is_logged else None,
        "clipped": max(int(value["clipped"]), 0),
        "vetoed": max(int(value["vetoed"]), 0),
    }
    rollout, record = rollouts.get(known["rollout_id"]), logged.get(known["rollout_id"])
    if rollout is None:
        return known | {"missing": True}
    log_ratio = _log_ratio(rollout, record)
    triggers = np.flatnonzero(np.array(record["flags"] if record else [], dtype=np.uint8) & TokenFlag.TRIGGER)
    return known | {
        "parts": {visible(name): json_number(value) for name, value in rollout.reward_parts.items()},
        "error": visible(rollout.reward_error),
        "finish": str(rollout.finish_reason),
        "sampler": asdict(rollout.sampler) | {"seed": str(rollout.seed)},
        "version_first": rollout.version_first,
        "version_last": rollout.version_last,
        "worst_place": None if log_ratio is None or not len(log_ratio) else int(np.abs(log_ratio).argmax()),
        "trigger_place": int(triggers[0]) if len(triggers) else None,
        "segments": _segments(rollout),
        "tokens": _tokens(rollout, record, 0, decoder),
    }


def _find(index: RolloutIndex, batch: str, chosen: Column, what: str) -> tuple[BatchLocation, Column]:
    keys = [location.key for location in index.batches]
    rows = np.flatnonzero(chosen & (index.column("place") == keys.index(batch))) if batch in keys else []
    if not len(rows):
        raise StoreError(f"there is no {what} in batch {visible(batch)}: choose one from the list")
    return index.batches[keys.index(batch)], np.asarray(rows)


def _read(
    index: RolloutIndex, location: BatchLocation, rows: Column
) -> tuple[dict[int, Rollout], dict[int, dict[str, Any]], list[str]]:
    """The rollouts of these rows and their token logs, by rollout id, and what could not be read."""
    rollouts: dict[int, Rollout] = {}
    logged: dict[int, dict[str, Any]] = {}
    problems: list[str] = []
    rollout_id, update = index.column("rollout_id"), index.column("update")
    for shard in index.shards:
        here = rows[(rows >= shard.rows.start) & (rows < shard.rows.stop)]
        if not len(here):
            continue
        try:
            table = read_rows(location, shard.shard, rollout_id[here])
            rollouts |= {rollout.rollout_id: rollout for rollout in rollouts_from_table(table)}
        except StalewiseError as error:
            problems.append(str(error))
    for number in np.unique(update[rows][update[rows] >= 0]).tolist():
        try:
            table = read_tokens(location.tokens, number, rollout_id[rows[update[rows] == number]])
            logged |= {record["rollout_id"]: record for record in table.to_pylist()}
        except StalewiseError as error:
            problems.append(str(error))
    return rollouts, logged, problems


def _log_ratio(rollout: Rollout, record: dict[str, Any] | None) -> Column | None:
    """The log-ratio of each token; None if no update recorded the rollout, or its record has another length."""
    if record is None or len(record["logp"]) != len(rollout.behaviour_logp):
        return None
    return np.array(record["logp"], dtype=np.float32) - np.array(rollout.behaviour_logp, dtype=np.float32)


def _segments(rollout: Rollout) -> list[dict[str, Any]]:
    """Where the turns of an episode begin, and who wrote them; empty for a single turn."""
    starts = np.cumsum([0, *(segment.tokens for segment in rollout.segments)]).tolist()
    return [
        {"by": visible(segment.by), "start": start, "tokens": segment.tokens}
        for segment, start in zip(rollout.segments, starts, strict=False)
    ]


def _tokens(rollout: Rollout, record: dict[str, Any] | None, start: int, decoder: TokenDecoder) -> dict[str, Any]:
    window = slice(max(start, 0), max(start, 0) + WINDOW)
    log_ratio = _log_ratio(rollout, record)
    ids = list(rollout.response_ids[window])
    logged: dict[str, Any] = {"logp": None, "log_ratio": None, "flags": None}
    if record is not None and log_ratio is not None:
        logged["logp"] = list(map(json_log_ratio, record["logp"][window]))
        logged |= {"log_ratio": list(map(json_log_ratio, log_ratio[window])), "flags": record["flags"][window]}
    return {
        "start": window.start,
        "ids": ids,
        "texts": list(map(printable, decoder.texts(ids))),
        "behaviour_logp": [
            json_log_ratio(logp) if is_own else None
            for logp, is_own in zip(rollout.behaviour_logp[window], rollout.mask[window], strict=True)
        ],
        **logged,
    }
