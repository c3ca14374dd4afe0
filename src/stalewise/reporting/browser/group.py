"""Token ids to texts, one by one, with the tokenizer that lies in the run's checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from stalewise.errors import StalewiseError, StoreError
from stalewise.reporting.browser.index import Column, Index
from stalewise.reporting.browser.locations import Location, read_rows
from stalewise.reporting.browser.query import log_ratio, number, rows_of_group
from stalewise.reporting.inspection import visible
from stalewise.store import read_tokens, rollouts_from_table
from stalewise.store.checkpoints import checkpoint_directory, versions
from stalewise.types import Rollout, TokenFlag


class TokenTexts:
    """Decodes tokens of a run; ids as text where the run has no tokenizer."""

    def __init__(self, run: Path) -> None:
        paths = [checkpoint_directory(run, version) / "tokenizer.json" for version in reversed(versions(run))]
        tokenizer = next((found for path in paths if (found := _load(path)) is not None), None)
        self._decode = None if tokenizer is None else lru_cache(maxsize=None)(partial(_decode_one, tokenizer))

    @property
    def known(self) -> bool:
        """Whether there is a tokenizer."""
        return self._decode is not None

    def of(self, ids: Sequence[int]) -> list[str]:
        """The text of each token."""
        return [f"⟨{token}⟩" for token in ids] if self._decode is None else [self._decode(token) for token in ids]


def _load(path: Path) -> Any:
    """The tokenizer in a file; None where there is none, or none that can be read."""
    from tokenizers import Tokenizer  # the Rust library alone: transformers would take seconds to import

    try:
        return Tokenizer.from_file(str(path)) if path.is_file() else None
    except Exception:  # what the library raises has no class of its own
        return None


def _decode_one(tokenizer: Any, token: int) -> str:
    """The text of a token inside of a response: many decoders cut a space off what comes first."""
    once, twice = (tokenizer.decode([token] * n, skip_special_tokens=False) for n in (1, 2))
    return twice[len(once) :] if twice.startswith(once) and len(twice) > len(once) else once


def shown(text: str) -> str:
    r"""A token's text on a page: nothing in it can move the text around it, and line breaks are seen.

    >>> shown("a\n\u202eb")
    'a↵\n\\u202eb'
    """
    return "".join("↵\n" if character == "\n" else visible(character) for character in text)


# A group as the browser shows it: its prompt, and its responses token by token with what the learner saw of them.

WINDOW = 1000  # tokens of a response in one answer


def describe_group(index: Index, batch: str, group: int, texts: TokenTexts) -> dict[str, Any]:
    """The prompt of a group and all of its responses, each with its first tokens."""
    place, rows = _find(index, batch, index.column("group") == group, f"group {group}")
    rows = rows_of_group(index, int(index.column("group_number")[rows[0]]))
    rollouts, seen, problems = _read(index, place, rows)
    responses = [describe_response(index, int(row), rollouts, seen, texts) for row in rows]
    first = next(iter(rollouts.values()), None)
    prompt = [] if first is None else list(first.prompt_ids)
    return {
        "batch": batch,
        "rollback": place.rollback,
        "stands": place.stands,
        "directory": place.directory.name,
        "group": group,
        "prompt_id": visible(index.table.column("prompt_id")[int(rows[0])].as_py()),
        "prompt": "".join(shown(text) for text in texts.of(prompt)) if texts.known else f"token ids {prompt}",
        "degenerate": bool(index.column("degenerate")[int(rows[0])]),
        "responses": responses,
        "problems": problems,
    }


def describe_tokens(index: Index, batch: str, rollout_id: int, start: int, texts: TokenTexts) -> dict[str, Any]:
    """Another window of a response's tokens."""
    place, rows = _find(index, batch, index.column("rollout_id") == rollout_id, f"rollout {rollout_id}")
    rollouts, seen, problems = _read(index, place, rows[:1])
    if rollout_id not in rollouts:
        raise StoreError("; ".join(problems) or f"rollout {rollout_id} cannot be read")
    return _tokens(rollouts[rollout_id], seen.get(rollout_id), start, texts)


def describe_response(
    index: Index, row: int, rollouts: Mapping[int, Rollout], seen: Mapping[int, dict[str, Any]], texts: TokenTexts
) -> dict[str, Any]:
    """One response; what the index knows of it even where its shard cannot be read."""
    rollout_id = int(index.column("rollout_id")[row])
    update, clipped = int(index.column("update")[row]), int(index.column("clipped")[row])
    known: dict[str, Any] = {
        "rollout_id": rollout_id,
        "reward": number(index.column("reward")[row]),
        "advantage": number(index.column("advantage")[row]),
        "update": None if update < 0 else update,
        "age": None if update < 0 else int(index.column("age")[row]),
        "length": int(index.column("response_length")[row]),
        "worst_log_ratio": log_ratio(index.column("worst_log_ratio")[row]) if clipped >= 0 else None,
        "clipped": max(clipped, 0),
        "vetoed": max(int(index.column("vetoed")[row]), 0),
    }
    rollout = rollouts.get(rollout_id)
    if rollout is None:
        return known | {"missing": True}
    record = seen.get(rollout_id)
    return known | {
        "parts": {visible(name): number(value) for name, value in rollout.reward_parts.items()},
        "error": visible(rollout.reward_error),
        "finish": str(rollout.finish_reason),
        "sampler": asdict(rollout.sampler) | {"seed": str(rollout.seed)},
        "version_first": rollout.version_first,
        "version_last": rollout.version_last,
        "worst_place": _worst_place(rollout, record),
        "trigger_place": _first_trigger(record),
        "tokens": _tokens(rollout, record, 0, texts),
    }


def _find(index: Index, batch: str, chosen: Column, what: str) -> tuple[Location, Column]:
    keys = [place.key for place in index.places]
    rows = np.flatnonzero(chosen & (index.column("place") == keys.index(batch))) if batch in keys else []
    if not len(rows):
        raise StoreError(f"there is no {what} in batch {visible(batch)}: choose one from the list")
    return index.places[keys.index(batch)], np.asarray(rows)


def _read(
    index: Index, place: Location, rows: Column
) -> tuple[dict[int, Rollout], dict[int, dict[str, Any]], list[str]]:
    """The rollouts of these rows and what their updates saw of them, by rollout id, and what could not be read."""
    rollouts: dict[int, Rollout] = {}
    seen: dict[int, dict[str, Any]] = {}
    problems: list[str] = []
    rollout_id, update = index.column("rollout_id"), index.column("update")
    for piece in index.pieces:
        here = rows[(rows >= piece.rows.start) & (rows < piece.rows.stop)]
        if not len(here):
            continue
        try:
            found = rollouts_from_table(read_rows(place, piece.shard, rollout_id[here]))
            rollouts |= {rollout.rollout_id: rollout for rollout in found}
        except StalewiseError as error:
            problems.append(str(error))
    for one in np.unique(update[rows]).tolist():
        if one < 0:
            continue
        try:
            table = read_tokens(place.tokens, one, rollout_id[rows[update[rows] == one]])
            seen |= {record["rollout_id"]: record for record in table.to_pylist()}
        except StalewiseError as error:
            problems.append(str(error))
    return rollouts, seen, problems


def _log_ratio(rollout: Rollout, record: dict[str, Any] | None) -> Column | None:
    """None where no update has seen the rollout, or what it saw is not of these tokens."""
    if record is None or len(record["logp"]) != len(rollout.behaviour_logp):
        return None
    return np.array(record["logp"], dtype=np.float32) - np.array(rollout.behaviour_logp, dtype=np.float32)


def _worst_place(rollout: Rollout, record: dict[str, Any] | None) -> int | None:
    found = _log_ratio(rollout, record)
    return None if found is None or not len(found) else int(np.abs(found).argmax())


def _first_trigger(record: dict[str, Any] | None) -> int | None:
    places = np.flatnonzero(np.array(record["flags"] if record else [], dtype=np.uint8) & TokenFlag.TRIGGER)
    return int(places[0]) if len(places) else None


def _tokens(rollout: Rollout, record: dict[str, Any] | None, start: int, texts: TokenTexts) -> dict[str, Any]:
    window = slice(max(start, 0), max(start, 0) + WINDOW)
    found = _log_ratio(rollout, record)
    ids = list(rollout.response_ids[window])
    return {
        "start": window.start,
        "ids": ids,
        "texts": [shown(text) for text in texts.of(ids)],
        "behaviour_logp": [log_ratio(value) for value in rollout.behaviour_logp[window]],
        "logp": None if found is None or record is None else [log_ratio(value) for value in record["logp"][window]],
        "log_ratio": None if found is None else [log_ratio(value) for value in found[window]],
        "flags": None if found is None or record is None else record["flags"][window],
    }
