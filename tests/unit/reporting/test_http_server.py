"""The rollout browser without a browser: index, filters, groups, and who the server answers."""

from __future__ import annotations

import http.client
import json
import math
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import numpy as np
import pyarrow.parquet as pq
import pytest

from rollout_runs import GROUP_SIZE, HOSTILE, add_batch, consume, make_rollout, seen_by, small_run, start_run
from stalewise.config import RunConfig
from stalewise.errors import ConfigError, StoreError
from stalewise.reporting.browser import RunServer, make_server
from stalewise.reporting.browser.group import WINDOW, TokenDecoder, describe_group, describe_tokens, printable
from stalewise.reporting.browser.index import CACHE, IndexCache, RolloutIndex
from stalewise.reporting.browser.query import QueryResult, parse_filters
from stalewise.store import TokenLog, batch_directories, token_files, token_log_directory
from stalewise.store.atomic import write_json_atomic
from stalewise.types import FinishReason, Rollout, TokenFlag
from tiny import refused


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_run(tmp_path_factory.mktemp("browser") / "small")


@pytest.fixture
def own(run: Path, tmp_path: Path) -> Path:
    """A copy of the run, to be changed."""
    return Path(shutil.copytree(run, tmp_path / "own"))


@pytest.fixture
def server(run: Path) -> Iterator[RunServer]:
    with make_server(run) as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield made
        made.shutdown()


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


# ---------------------------------------------------------------- the index


def test_the_index_knows_every_rollout_and_what_became_of_it(run: Path) -> None:
    index = index_of(run)
    assert index.column("rollout_id").tolist() == list(range(480))
    assert [place.rollback for place in index.batches] == ["", "", "r000"]
    update = index.column("update")
    assert update[:240].tolist() == np.repeat(np.arange(6), 40).tolist()
    assert (update[240:] == -1).all()
    assert np.isnan(index.column("worst_log_ratio")[240:]).all() and np.isnan(index.column("advantage")[240:]).all()
    assert index.problems == [] and index.parts == ["correct", "format"]
    for start in range(0, 240, 40):
        batch = batch_directories(run / "rollouts")[start // 160]
        seen = seen_by(batch, range(start, start + 40))
        assert index.column("advantage")[start : start + 40] == pytest.approx(seen.advantage)
        log_ratio = np.split(seen.logp - seen.rows.behaviour_logp, seen.rows.response_offsets[1:-1])
        worst = [part[np.abs(part).argmax()] for part in log_ratio]
        assert index.column("worst_log_ratio")[start : start + 40] == pytest.approx(worst)


def test_the_index_is_kept_and_made_anew_when_the_run_goes_on(own: Path) -> None:
    first = index_of(own)
    kept = own / "report" / CACHE
    before = kept.stat().st_mtime_ns
    again = index_of(own)
    assert kept.stat().st_mtime_ns == before
    same_table(again, first)
    assert again.shards == first.shards
    consume(own, batch_directories(own / "rollouts")[1], 1, range(6, 8), per_update=40)
    grown = index_of(own)
    assert grown.fingerprint != first.fingerprint and int(grown.column("update").max()) == 7


def test_a_damaged_cache_is_no_obstacle(own: Path) -> None:
    first = index_of(own)
    (own / "report" / CACHE).write_bytes(b"garbage")
    same_table(index_of(own), first)


def test_a_directory_that_cannot_be_written_is_read_all_the_same(own: Path) -> None:
    shutil.rmtree(own / "report", ignore_errors=True)
    (own / "report").write_text("a file in the way")
    assert index_of(own).table.num_rows == 480


@pytest.mark.parametrize("damage", ["cut", "gone", "garbage"])
def test_a_corrupt_shard_is_named_and_the_rest_works(own: Path, damage: str) -> None:
    shard = batch_directories(own / "rollouts")[0] / "shard-00001.parquet"
    data = shard.read_bytes()
    shard.unlink()
    if damage != "gone":
        shard.write_bytes(data[:200] if damage == "cut" else b"x" * len(data))
    index = index_of(own)
    assert index.table.num_rows == 480 - 64
    assert len(index.problems) == 1 and "shard-00001.parquet is damaged" in index.problems[0]
    assert found(index, text="w7") == [i for i in expected(lambda r: "w7" in r.text) if not 64 <= i < 128]


def test_a_shard_that_breaks_later_is_said_in_its_group(own: Path) -> None:
    index = index_of(own)
    shard = batch_directories(own / "rollouts")[0] / "shard-00000.parquet"
    shard.write_bytes(b"x" * shard.stat().st_size)
    record = describe_group(index, "g000000-v000000", 1, TokenDecoder(own))
    assert "shard-00000.parquet is damaged" in record["problems"][0]
    assert [response["missing"] for response in record["responses"]] == [True] * GROUP_SIZE


def change_one_byte(shard: Path) -> None:
    """The file can be read as before, and is not the one that was written."""
    content = shard.read_bytes()
    assert b"parquet-cpp-arrow" in content
    shard.write_bytes(content.replace(b"parquet-cpp-arrow", b"parquet-cpp-arroW"))


def test_a_shard_that_can_be_read_and_is_another_is_damaged(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change_one_byte(batch_directories(own / "rollouts")[0] / "shard-00000.parquet")
    index = index_of(own)
    assert index.table.num_rows == 480 - 64
    assert len(index.problems) == 1 and "shard-00000.parquet is damaged" in index.problems[0]
    shutil.rmtree(own / "report")
    monkeypatch.setattr("stalewise.reporting.browser.index.CHECKED_BYTES", 0)  # as in a store that takes long to hash
    index = index_of(own)
    assert index.table.num_rows == 480 and index.problems == []
    record = describe_group(index, "g000000-v000000", 1, TokenDecoder(own))
    assert "shard-00000.parquet is damaged" in record["problems"][0]
    assert [response["missing"] for response in record["responses"]] == [True] * GROUP_SIZE


def test_a_damaged_token_log_is_named_and_ratios_are_missing(own: Path) -> None:
    token_files(token_log_directory(own))[0].write_bytes(b"garbage")
    index = index_of(own)
    assert "u000000-u000003.parquet is damaged" in index.problems[0]
    assert np.isnan(index.column("worst_log_ratio")[:160]).all()
    assert not np.isnan(index.column("worst_log_ratio")[160:240]).any()


def test_a_token_log_with_other_columns_is_damaged(own: Path) -> None:
    path = token_files(token_log_directory(own))[0]
    table = pq.read_table(path)
    pq.write_table(table.set_column(2, "advantage", table.column("advantage").cast("string")), path)
    index = index_of(own)
    assert "u000000-u000003.parquet is damaged" in index.problems[0]
    assert np.isnan(index.column("advantage")[:160]).all() and not np.isnan(index.column("advantage")[160:240]).any()


def test_a_batch_in_the_making_is_mentioned(own: Path) -> None:
    (batch_directories(own / "rollouts")[1] / "manifest.json").unlink()
    index = index_of(own)
    assert index.table.num_rows == 320
    assert index.generating == ["g000001-v000004"] and index.problems == []


def test_a_run_that_has_just_begun_is_empty(tmp_path: Path) -> None:
    index = index_of(start_run(tmp_path))
    matches = QueryResult(index, parse_filters({"sort": "ratio"}))
    assert index.table.num_rows == 0 and matches.rollouts == 0 and matches.page(0, 10) == []


# ---------------------------------------------------------------- filters


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


# ---------------------------------------------------------------- a group


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


@pytest.fixture
def halved(own: Path) -> Path:
    """Updates 4 and 5 were taken back and happened again on the same batch, in another order."""
    rollback = own / "rollbacks" / "r001"
    rollback.mkdir()
    batch = batch_directories(own / "rollouts")[1]
    scratch = own / "scratch"
    consume(scratch, batch, 1, range(4, 6), per_update=20)
    shutil.move(scratch / "ledger" / "updates.jsonl", rollback / "updates.jsonl")
    shutil.move(token_log_directory(scratch), rollback / "tokens")
    return own


def test_updates_that_were_taken_back_are_shown_where_their_batch_stands(halved: Path) -> None:
    index = index_of(halved)
    rows = index.column("place") == [place.key for place in index.batches].index("r001:g000001-v000004")
    assert index.column("rollout_id")[rows].tolist() == list(range(160, 200))  # what those updates saw, and no more
    assert index.column("update")[rows].tolist() == [4] * 20 + [5] * 20
    taken, stands = (
        describe_group(index, key, 46, TokenDecoder(halved)) for key in ("r001:g000001-v000004", "g000001-v000004")
    )
    assert (taken["rollback"], taken["stands"], stands["rollback"]) == ("r001", True, "")
    assert [one["update"] for one in taken["responses"]] == [5] * GROUP_SIZE
    assert [one["update"] for one in stands["responses"]] == [4] * GROUP_SIZE
    assert [one["rollout_id"] for one in taken["responses"]] == [one["rollout_id"] for one in stands["responses"]]
    for one, other in zip(taken["responses"], stands["responses"], strict=True):
        assert one["tokens"]["ids"] == other["tokens"]["ids"] and one["tokens"]["logp"] != other["tokens"]["logp"]
    with_text = found(index, text="w7", batch="r001:g000001-v000004")
    assert with_text == [i for i in expected(lambda r: "w7" in r.text) if 160 <= i < 200] != []
    same_table(index_of(halved), index)


def test_a_rollback_whose_ledger_is_damaged_is_named(halved: Path) -> None:
    (halved / "rollbacks" / "r001" / "updates.jsonl").write_text("garbage\n" * 3)
    index = index_of(halved)
    assert index.table.num_rows == 480
    assert any("r001/updates.jsonl" in problem for problem in index.problems)


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


def test_a_real_run_is_indexed(tiny_run: RunConfig) -> None:
    index = index_of(tiny_run.directory)
    assert index.table.num_rows == 64 and (index.column("update") >= 0).all()
    record = describe_group(index, index.batches[0].key, 0, TokenDecoder(tiny_run.directory))
    response = record["responses"][0]
    rollout_text = "".join(response["tokens"]["texts"])
    assert response["length"] == len(response["tokens"]["ids"]) and rollout_text


def test_batches_of_another_run_are_found(own: Path, tmp_path: Path) -> None:
    learned = start_run(tmp_path / "learned")
    batch = batch_directories(own / "rollouts")[0]
    write_json_atomic(learned / "sources.json", {"batches": [{"directory": str(batch), "updates": 4}]})
    assert index_of(learned).table.num_rows == 160
    write_json_atomic(learned / "sources.json", {"batches": [{"directory": str(batch), "updates": 4}] * 2})
    assert [place.key for place in index_of(learned).batches] == ["0:g000000-v000000", "1:g000000-v000000"]


# ---------------------------------------------------------------- the server


def get(server: RunServer, path: str, **headers: str) -> tuple[int, http.client.HTTPMessage, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.headers, answer.read()


def ask(server: RunServer, path: str, **parameters: Any) -> tuple[int, dict[str, Any]]:
    status, _, body = get(server, f"/{server.token}/api/{path}?{urlencode(parameters)}")
    return status, json.loads(body)


def test_the_server_answers_who_knows_the_word(server: RunServer) -> None:
    word = server.token
    assert get(server, f"/{word}/rollouts")[0] == 200
    for path in ("/", "/rollouts", "/x/rollouts", f"/{word[:-1]}/rollouts", f"/{word}x/", f"/?token={word}", "/%00/"):
        assert get(server, path)[0] == 403, path
    assert urlsplit(server.url).path == f"/{word}/" and len(word) >= 32


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *(("localhost:9000", 200), ("127.0.0.1", 200), ("[::1]:1", 200), ("[::1]", 200)),
        *(("evil.example:80", 403), ("127.0.0.1.evil", 403), ("", 403), ("[::1", 403), ("localhost@evil.example", 403)),
    ],
)
def test_the_server_answers_to_its_own_name_alone(server: RunServer, host: str, status: int) -> None:
    assert get(server, f"/{server.token}/rollouts", Host=host)[0] == status


def test_pages_may_ask_for_nothing_elsewhere(server: RunServer) -> None:
    for path in ("", "rollouts", "static/tokens.js", "api/overview"):
        status, headers, body = get(server, f"/{server.token}/{path}")
        assert status == 200 and headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 'self';")
        assert (headers["X-Content-Type-Options"], headers["Referrer-Policy"]) == ("nosniff", "no-referrer")
        assert b"://" not in body.replace(b"http://www.w3.org/2000/svg", b"")
    assert "unsafe-inline" not in get(server, f"/{server.token}/rollouts")[1]["Content-Security-Policy"]


def test_the_server_is_read_only_and_keeps_to_its_files(server: RunServer) -> None:
    for path in ("static/../server.py", "static/%2e%2e/server.py", "../config.resolved.json", "static/", "nothing"):
        assert get(server, f"/{server.token}/{path}")[0] == 404, path
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.request("POST", f"/{server.token}/api/overview", body=b"{}")
    assert connection.getresponse().status == 501


def test_questions_are_answered_or_refused_in_words(server: RunServer) -> None:
    assert ask(server, "overview")[1]["rollouts"] == 480
    status, answer = ask(server, "groups", truncated="true", limit=3)
    wanted = expected(lambda r: r.finish_reason is FinishReason.LENGTH)
    assert status == 200 and answer["rollouts"] == len(wanted) and len(answer["rows"]) == 3
    assert ask(server, "group", batch="g000000-v000000", group=2)[1]["prompt_id"] == "prompt/2"
    assert ask(server, "tokens", batch="g000000-v000000", rollout=2)[1]["ids"] == list(make_rollout(2).response_ids)
    for path, words, expected_status in (
        ("groups", {"ratio": "much"}, 400),
        ("groups", {"offset": "-1"}, 400),
        ("groups", {"part": "colour", "part_min": 1}, 400),
        ("group", {"batch": "g000000-v000000", "group": "9" * 30}, 400),
        ("group", {"batch": "../..", "group": 0}, 422),
        ("tokens", {"batch": "g000000-v000000", "rollout": 10**6}, 422),
    ):
        status, answer = ask(server, path, **words)
        assert status == expected_status and answer["error"], (path, answer)


def test_the_report_is_made_anew_when_the_run_goes_on(own: Path) -> None:
    with make_server(own) as server:
        first, state = server.report(), server.state()
        assert server.report() is first
        with open(own / "metrics.jsonl", "a") as file:
            file.write(json.dumps({"update": 6, "generation_batch": 1, "reward": 1.0}) + "\n")
        assert server.state() != state and server.report() != first
        state = server.state()
        add_batch(own, 2, [make_rollout(i) for i in range(480, 484)])
        assert server.state() != state


def test_how_the_run_stands_is_said(server: RunServer) -> None:
    standing = ask(server, "state")[1]["standing"]
    assert standing.startswith("stopped · next: ") and "update 6 of 8" in standing


def test_a_slow_search_keeps_nobody_waiting(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search whose shard comes late: others are answered meanwhile, and who asks the same gets its answer."""
    from stalewise.reporting.browser import query

    asked, may_go_on = threading.Event(), threading.Event()
    plain = query.read_shard

    def slow(*arguments: Any) -> Any:
        asked.set()
        assert may_go_on.wait(30)
        return plain(*arguments)

    monkeypatch.setattr(query, "read_shard", slow)
    with make_server(own) as server, ThreadPoolExecutor(2) as pool:
        index = server.indexes.index()
        searches = [pool.submit(server.query, index, parse_filters({"text": "w7"})) for _ in range(2)]
        assert asked.wait(30)
        assert server.query(index, parse_filters({"group": "3"})).rollouts == GROUP_SIZE
        may_go_on.set()
        assert searches[0].result() is searches[1].result()


def test_the_browser_serves_without_torch(run: Path) -> None:
    code = (
        "import sys; from stalewise.reporting.browser import make_server\n"
        f"with make_server({str(run)!r}) as server: server.indexes.index(); server.report()\n"
        "print(*sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""


# ---------------------------------------------------------------- the verb


def test_a_port_in_use_is_said_with_what_to_do(run: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert refused("serve", run, "--port", port) == (
            f"port {port} is in use: name another with --port, or --port 0 for any free port"
        )
    assert "does not exist" in refused("serve", run, "--port", "70000")


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    assert "is no run directory" in refused("serve", tmp_path)
    with pytest.raises(StoreError, match="no run directory"):
        make_server(tmp_path)


def test_serve_prints_an_address_that_works_and_ends_on_ctrl_c(run: Path) -> None:
    command = [sys.executable, "-m", "stalewise", "serve", str(run), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = urlsplit(process.stdout.readline().strip())
        connection = http.client.HTTPConnection(address.netloc, timeout=30)
        connection.request("GET", quote(f"{address.path}rollouts"))
        assert connection.getresponse().status == 200
        os.kill(process.pid, 2)
        assert process.wait(timeout=30) == 0


def test_a_group_number_tells_batches_apart(tmp_path: Path) -> None:
    """Two sources may have groups of one number: they stay two groups."""
    run = start_run(tmp_path)
    add_batch(run, 0, [make_rollout(i) for i in range(8)])
    add_batch(run, 1, [replace(make_rollout(i), rollout_id=100 + i) for i in range(8)])
    assert len(QueryResult(index_of(run), parse_filters({})).groups) == 4
