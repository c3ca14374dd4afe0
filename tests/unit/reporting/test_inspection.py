"""The contents of a run as plain records."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout_runs import GROUP_SIZE, make_rollout, start_run
from stalewise.config import RunConfig
from stalewise.errors import StoreError, visible
from stalewise.reporting.inspection import (
    inspect_group,
    inspect_rollout,
    inspect_run,
    load_tokenizer,
    numbered_batches,
)


def test_a_finished_run_is_described(tiny_run: RunConfig) -> None:
    record = inspect_run(tiny_run.directory, verify=True)
    assert (record["updates"], record["updates_done"], record["updates_not_committed"]) == (4, 4, 0)
    assert [(batch["rows"], batch["updates"], batch["verified"]) for batch in record["batches"]] == [(32, 2, True)] * 2
    assert record["batches"][1]["ages"] == [0, 1]


def test_a_rollout_and_its_group_have_tokens_and_updates(run: Path) -> None:
    rollout = make_rollout(41)
    record = inspect_rollout(run, 41)
    assert [token["id"] for token in record["tokens"]] == list(rollout.response_ids)
    assert (record["reward_parts"], record["consumed_at"]) == (rollout.reward_parts, [1])
    assert [one["rollout_id"] for one in inspect_group(run, 10)] == list(range(40, 40 + GROUP_SIZE))
    with pytest.raises(StoreError, match=r"has no committed rollout 999: rollout ids are 0 to 319"):
        inspect_rollout(run, 999)
    with pytest.raises(StoreError, match=r"has no committed group 999: groups are 0 to 79"):
        inspect_group(run, 999)


def test_an_empty_run_has_no_batches(tmp_path: Path) -> None:
    directory = start_run(tmp_path)
    assert numbered_batches(directory) == []
    with pytest.raises(StoreError, match="has no committed group 0: nothing is committed yet"):
        inspect_group(directory, 0)


def test_a_damaged_tokenizer_is_passed_over(own: Path) -> None:
    assert load_tokenizer(own) is not None
    (own / "checkpoints" / "v000000" / "tokenizer.json").write_text("{}")
    assert load_tokenizer(own) is None
    assert inspect_rollout(own, 0)["prompt"] is None


def test_what_moves_a_cursor_is_written_as_an_escape() -> None:
    assert visible("1\x1b[2J\n\u202e2é") == "1\\x1b[2J\\n\\u202e2é"
