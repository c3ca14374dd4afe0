"""A group with its tokens."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout_runs import (
    GROUP_SIZE,
    HOSTILE,
    add_batch,
    consume,
    found,
    index_of,
    make_rollout,
    seen_by,
    start_run,
)
from stalewise.config import make_config, write_resolved
from stalewise.config.run_directory import read_config
from stalewise.reporting.browser.group import (
    WINDOW,
    GoldAnswers,
    TokenDecoder,
    describe_group,
    describe_tokens,
    printable,
)
from stalewise.reporting.browser.query import QueryResult, parse_filters
from stalewise.store import TokenLog, batch_directories, token_files, token_log_directory
from stalewise.types import POLICY, Segment, TokenFlag


def test_a_shard_that_breaks_later_is_said_in_its_group(own: Path) -> None:
    index = index_of(own)
    shard = batch_directories(own / "rollouts")[0] / "shard-00000.parquet"
    shard.write_bytes(b"x" * shard.stat().st_size)
    record = describe_group(index, "g000000-v000000", 1, TokenDecoder(own))
    assert "shard-00000.parquet is damaged" in record["problems"][0]
    assert [response["missing"] for response in record["responses"]] == [True] * GROUP_SIZE


def test_a_group_shows_what_the_token_log_says(run: Path) -> None:
    index = index_of(run)
    record = describe_group(index, "g000000-v000000", 5, TokenDecoder(run))
    assert record["prompt_id"] == "prompt/5" and record["problems"] == []
    seen = seen_by(batch_directories(run / "rollouts")[0], range(40))
    for response in record["responses"]:
        rollout = make_rollout(response["rollout_id"])
        here = slice(*seen.rows.response_offsets[[rollout.rollout_id, rollout.rollout_id + 1]])
        assert response["tokens"]["ids"] == list(rollout.response_ids)
        assert response["tokens"]["flags"] == seen.flags[here].tolist()
        log_ratio = seen.logp[here] - seen.rows.behaviour_logp[here]
        assert response["tokens"]["log_ratio"] == pytest.approx(log_ratio, rel=1e-4, abs=1e-6)
        triggers = np.flatnonzero(seen.flags[here] & TokenFlag.TRIGGER)
        assert response["trigger_place"] == (int(triggers[0]) if len(triggers) else None)
        assert (response["update"], response["finish"]) == (0, str(rollout.finish_reason))
        assert response["parts"] == rollout.reward_parts


def test_gold_answers_need_no_verifier_and_say_why_they_are_unknown(tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text('{"id": "a", "problem": "1+1", "answer": "2"}\n{"id": "b", "problem": "2+2", "answer": "4"}\n')
    options: dict[str, Any] = {"path": str(data), "held_out": 0.0, "verifier": "python"}
    options["verifier_options"] = {"function": "no_such_module:reward"}  # it would be imported
    run = start_run(tmp_path / "run")
    write_resolved(make_config({"task": {"name": "jsonl", "options": options}}), run / "config.resolved.json")
    names = [prompt.prompt_id for prompt in read_config(run).prompts_task().prompts(0, 2)]
    add_batch(run, 0, [make_rollout(i, prompt_id=[*names, "c"][i // GROUP_SIZE]) for i in range(3 * GROUP_SIZE)])
    index, gold = index_of(run), GoldAnswers()
    answers = {"a": "2", "b": "4"}
    assert [gold.of(index, index.batches[0].key, group)["answer"] for group in range(2)] == [answers[n] for n in names]
    assert gold.of(index, index.batches[0].key, 2)["why"] == "the task's data has changed since"
    write_resolved(make_config({"task": {"name": "verifiers"}}), run / "config.resolved.json")
    unknown = GoldAnswers().of(index, index.batches[0].key, 0)
    assert unknown["answer"] is None and "known only to the program that made the run" in unknown["why"]


def test_a_rollout_that_was_not_consumed_has_no_ratio(run: Path) -> None:
    record = describe_group(index_of(run), "r000:g000002-v000008", 80, TokenDecoder(run))
    assert record["rollback"] == "r000"
    for response in record["responses"]:
        assert response["update"] is response["advantage"] is response["tokens"]["log_ratio"] is None


def test_what_was_taken_back_keeps_what_its_updates_saw(own: Path) -> None:
    rollback = own / "rollbacks" / "r000"
    batch = rollback / "rollouts" / "g000002-v000008"
    scratch = own / "scratch"
    consume(scratch, batch, 2, range(8, 10), per_update=40)
    shutil.move(scratch / "ledger" / "updates.jsonl", rollback / "updates.jsonl")
    shutil.move(token_log_directory(scratch), rollback / "tokens")
    index = index_of(own)
    assert index.column("update")[320:400].tolist() == [8] * 40 + [9] * 40
    record = describe_group(index, "r000:g000002-v000008", 80, TokenDecoder(own))
    assert all(response["tokens"]["log_ratio"] for response in record["responses"])


@pytest.mark.parametrize(("logp", "word"), [(math.nan, "NaN"), (-math.inf, "-Infinity")])
def test_a_ratio_that_is_not_finite_is_said_to_be_so(tmp_path: Path, logp: float, word: str) -> None:
    run = start_run(tmp_path)
    batch = add_batch(run, 0, [make_rollout(i) for i in range(8)])
    consume(run, batch, 0, range(1), per_update=8)
    (path,) = token_files(token_log_directory(run))
    seen = seen_by(batch, range(8))
    seen.logp[int(seen.rows.response_offsets[1])] = logp  # the first token of rollout 1
    path.unlink()
    log = TokenLog(run)
    log.add(0, seen)
    log.commit(1)
    index = index_of(run)
    response = describe_group(index, batch.name, 0, TokenDecoder(run))["responses"][1]
    assert response["worst_log_ratio"] == response["tokens"]["log_ratio"][0] == response["tokens"]["logp"][0] == word
    assert response["worst_place"] == 0
    assert found(index, ratio=1e30) == [1]
    assert (
        QueryResult(index, parse_filters({"sort": "ratio", "descending": "true"})).page(0, 1)[0]["worst_log_ratio"]
        == word
    )
    json.dumps(response, allow_nan=False)


def test_long_responses_come_in_windows(tmp_path: Path) -> None:
    run = start_run(tmp_path)
    ids = tuple(10 + i % 20 for i in range(WINDOW + 50))
    long = [make_rollout(i, response_ids=ids, behaviour_logp=(-0.5,) * len(ids)) for i in range(GROUP_SIZE)]
    batch = add_batch(run, 0, long)
    consume(run, batch, 0, range(1), per_update=GROUP_SIZE)
    index = index_of(run)
    first = describe_group(index, batch.name, 0, TokenDecoder(run))["responses"][0]
    assert len(first["tokens"]["ids"]) == WINDOW and first["length"] == WINDOW + 50
    rest = describe_tokens(index, batch.name, 0, WINDOW, TokenDecoder(run))
    assert rest["start"] == WINDOW and rest["ids"] == list(ids[WINDOW:]) and len(rest["flags"]) == 50


@pytest.mark.parametrize("damaged", [False, True])
def test_ids_stand_for_texts_where_there_is_no_tokenizer(own: Path, damaged: bool) -> None:
    path = own / "checkpoints" / "v000000" / "tokenizer.json"
    path.write_text("{}") if damaged else path.unlink()
    record = describe_group(index_of(own), "g000000-v000000", 0, TokenDecoder(own))
    tokens = record["responses"][0]["tokens"]
    assert tokens["texts"] == [f"⟨{token}⟩" for token in tokens["ids"]]


def test_nothing_that_moves_text_gets_through() -> None:
    assert [printable(text) for text in HOSTILE[3:7]] == [
        "\\u202eright to left",
        "line\\u2028separator",
        "\\x00\\x1b[2J\\x07",
        "two↵\nlines",
    ]


def test_an_episode_is_shown_turn_by_turn(tmp_path: Path) -> None:
    run = start_run(tmp_path / "run")
    turns = (Segment(POLICY, 2), Segment("calculator <b>", 1), Segment(POLICY, 1))
    changes = {"response_ids": (3, 4, 5, 6), "behaviour_logp": (-1.0, -2.0, 0.0, -0.5)}
    rollouts = [make_rollout(i, **changes, segments=turns if i % 2 else ()) for i in range(GROUP_SIZE)]
    add_batch(run, 0, rollouts)
    one_turn, episode = describe_group(index_of(run), "g000000-v000000", 0, TokenDecoder(run))["responses"][:2]
    assert one_turn["segments"] == []
    assert one_turn["tokens"]["behaviour_logp"][2] == 0
    assert [(one["by"], one["start"], one["tokens"]) for one in episode["segments"]] == [
        ("policy", 0, 2),
        ("calculator <b>", 2, 1),
        ("policy", 3, 1),
    ]
    assert episode["tokens"]["behaviour_logp"] == [-1.0, -2.0, None, -0.5]
