"""Run directories with rollouts of our own making, written by the store's own writers: for tests of the browser."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from stalewise.config import make_config, write_resolved
from stalewise.reporting.browser.index import IndexCache, RolloutIndex
from stalewise.reporting.browser.query import QueryResult, parse_filters
from stalewise.store import (
    LedgerEntry,
    TokenLog,
    TokenRecord,
    append_entry,
    batch_directory,
    commit_batch,
    ledger_path,
    open_batch,
    to_ranges,
    write_shard,
)
from stalewise.store.atomic import write_json_atomic
from stalewise.store.json_lines import append_line
from stalewise.types import FinishReason, Rollout, SamplerSettings, TokenFlag

GROUP_SIZE = 4
MANY = 100_000  # rollouts of a large run
# Each is a word of the vocabulary, so each is a token of some response.
HOSTILE = (
    "<script>window.pwned=1</script>",
    "<img src=x onerror=window.pwned=1>",
    "</span></div><b>bold</b>",
    "\u202eright to left",
    "line\u2028separator",
    "\x00\x1b[2J\x07",
    "two\nlines",
    "שלום",
    "W" * 3000,
    "'\"`&amp;${1}",
)
SAMPLER = SamplerSettings()
WORDS = (*HOSTILE, *(f"w{i}" for i in range(20)))


def make_rollout(rollout_id: int, **changes: Any) -> Rollout:
    """A rollout that depends on its id alone: rewards of some groups differ, some are truncated, some unverified."""
    rng = np.random.default_rng(rollout_id)
    group = rollout_id // GROUP_SIZE
    length = int(rng.integers(1, 9))
    ids = tuple(rng.integers(0, len(WORDS), length).tolist())
    fails = rollout_id % 23 == 5
    reward = 1.0 if group % 5 == 0 else float(rng.integers(0, 2))
    rollout = Rollout(
        rollout_id=rollout_id,
        prompt_id=f"prompt/{group}",
        group=group,
        prompt_ids=(1, 2, group % len(WORDS)),
        response_ids=ids,
        behaviour_logp=tuple((-rng.random(length)).astype(np.float32).tolist()),
        reward=float("nan") if fails else reward,
        reward_parts={"correct": reward, "format": float(rng.integers(0, 2))},
        reward_error="no answer <b>found</b>" if fails else "",
        finish_reason=FinishReason.LENGTH if rollout_id % 7 == 3 else FinishReason.STOP,
        version_first=0,
        version_last=0,
        sampler=SAMPLER,
        seed=rollout_id,
        text=" ".join(WORDS[token] for token in ids),
    )
    return replace(rollout, **changes)


def start_run(directory: Path, *, updates: int = 8) -> Path:
    """A run directory with its config and a tokenizer, and nothing else."""
    config = make_config({"schedule": {"updates": updates, "stages": 2}, "objective": {"name": "mu_grpo"}})
    write_resolved(config, directory / "config.resolved.json")
    checkpoint = directory / "checkpoints" / "v000000"
    write_json_atomic(checkpoint / "manifest.json", {})
    Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="w0")).save(
        str(checkpoint / "tokenizer.json")
    )
    return directory


def add_batch(
    run: Path, number: int, rollouts: Sequence[Rollout], *, shard_rows: int = 64, root: str = "rollouts"
) -> Path:
    """Write and commit a generation batch."""
    directory = batch_directory(run / root, version=number * 4, generation_batch=number)
    starts = range(0, len(rollouts), shard_rows)
    for index, start in enumerate(starts):
        write_shard(directory, index, rollouts[start : start + shard_rows])
    commit_batch(directory, shards=len(starts), task="arithmetic")
    return directory


def seen_by(batch: Path, rollout_ids: Iterable[int], flag_every: int = 3) -> TokenRecord:
    """What a made-up update saw: ratios from the id, flags on every n-th token, a veto in every fifth rollout."""
    rows = open_batch(batch, verify=False).take(np.array(list(rollout_ids)))
    rng = np.random.default_rng(int(rows.rollout_id[0]))
    logp = rows.behaviour_logp + rng.normal(scale=1.5, size=len(rows.behaviour_logp)).astype(np.float32)
    place = np.arange(len(logp)) - np.repeat(rows.response_offsets[:-1], rows.response_lengths)
    ids = np.repeat(rows.rollout_id, rows.response_lengths)
    flags = np.where(place % flag_every == 1, TokenFlag.CLIPPED, 0).astype(np.uint8)
    vetoed = (ids % 5 == 0) & (place >= 2)
    flags[vetoed] = TokenFlag.VETOED
    flags[(ids % 5 == 0) & (place == 2)] |= np.uint8(TokenFlag.TRIGGER)
    return TokenRecord(rows, np.arange(len(rows)), rng.normal(size=len(rows)).astype(np.float32), logp, flags)


def consume(run: Path, batch: Path, number: int, updates: range, per_update: int) -> None:
    """Updates on a batch: ledger and token log, as a conductor leaves them."""
    log = TokenLog(run)
    rollout_ids = open_batch(batch, verify=False).column("rollout_id")
    for i, update in enumerate(updates):
        ids = rollout_ids[i * per_update : (i + 1) * per_update]
        append_entry(ledger_path(run), LedgerEntry(update, number, number * 4, update - number * 4, to_ranges(ids)))
        log.add(update, seen_by(batch, ids))
    log.commit(updates.stop)


def add_metrics(run: Path, updates: int) -> None:
    """The metrics that a report draws a reward curve from."""
    for update in range(updates):
        append_line(
            run / "metrics.jsonl", {"update": update, "generation_batch": 0, "reward": 0.1 * update, "ess": 0.9}
        )


def small_run(directory: Path, rollout: Callable[..., Rollout] = make_rollout) -> Path:
    """Three batches of 160 rollouts: one learned from, one in half, one taken back by the guard."""
    run = start_run(directory)
    first = add_batch(run, 0, [rollout(i) for i in range(160)])
    consume(run, first, 0, range(4), per_update=40)
    second = add_batch(run, 1, [rollout(i) for i in range(160, 320)])
    consume(run, second, 1, range(4, 6), per_update=40)
    third = add_batch(run, 2, [rollout(i) for i in range(320, 480)])
    rollback = run / "rollbacks" / "r000"
    (rollback / "rollouts").mkdir(parents=True)
    shutil.move(third, rollback / "rollouts" / third.name)
    write_json_atomic(rollback / "rollback.json", {"reason": "made up"})
    add_metrics(run, 6)
    return run


def index_of(run: Path) -> RolloutIndex:
    return IndexCache(run).index()


def same_table(one: RolloutIndex, other: RolloutIndex) -> None:
    assert one.table.column_names == other.table.column_names
    for name in one.table.column_names:
        np.testing.assert_array_equal(one.column(name), other.column(name))


def found(index: RolloutIndex, **filters: Any) -> list[int]:
    """Ids of the rollouts that pass."""
    matches = QueryResult(index, parse_filters({key: str(value) for key, value in filters.items()}))
    return index.column("rollout_id")[matches.rows].tolist()


def expected(keep: Any) -> list[int]:
    return [i for i in range(480) if keep(make_rollout(i))]
