"""Checksums of lines, and of how far the files of a run go."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from stalewise.errors import StoreError
from stalewise.store.json_lines import (
    append_line,
    commit_records,
    committed_ends,
    read_jsonl,
    scan_lines,
    truncate_jsonl,
    write_lines,
)

RECORDS = [{"update": i, "reward": i / 7, "note": "ü\n"} for i in range(5)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    for record in RECORDS:
        append_line(tmp_path / "ledger" / "updates.jsonl", record)
    return tmp_path / "ledger" / "updates.jsonl"


def test_lines_are_json_with_a_checksum_that_readers_leave_out(path: Path) -> None:
    assert read_jsonl(path) == RECORDS
    plain = [json.loads(line) for line in path.read_text().splitlines()]
    assert [set(record) - set(RECORDS[0]) for record in plain] == [{"checksum"}] * 5
    assert all(line.is_sealed for line in scan_lines(path))


def test_no_byte_of_a_file_can_change_unnoticed(path: Path) -> None:
    commit_records(path.parent.parent)
    content = path.read_bytes()
    rng = random.Random(0)
    for place in range(len(content)):
        changed = bytearray(content)
        changed[place] ^= 1 << rng.randrange(8)
        path.write_bytes(changed)
        with pytest.raises(StoreError, match=r"line \d+ is corrupt"):
            read_jsonl(path)


@pytest.mark.parametrize("kept", [[1, 2, 3, 4], [0, 1, 3, 4], [0, 1, 2, 3], [], [0, 2, 1, 3, 4], [0, 0, 1, 2, 3, 4]])
def test_no_line_can_be_lost_moved_or_repeated_unnoticed(path: Path, kept: list[int]) -> None:
    commit_records(path.parent.parent)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[i] for i in kept))
    with pytest.raises(StoreError, match="corrupt"):
        read_jsonl(path)
    path.unlink()
    with pytest.raises(StoreError, match="is missing"):
        read_jsonl(path)


def test_a_cut_is_a_crash_only_beyond_what_was_committed(path: Path) -> None:
    run = path.parent.parent
    commit_records(run)
    content = path.read_bytes()
    append_line(path, {"update": 5})
    whole = path.read_bytes()
    for end in range(len(content), len(whole)):  # the last line was not committed
        path.write_bytes(whole[:end])
        assert read_jsonl(path, str) == RECORDS
    path.write_bytes(content[:-1])
    with pytest.raises(StoreError, match="line 5 is corrupt"):
        read_jsonl(path)


def test_the_next_line_covers_those_of_a_release_without_checksums(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    assert read_jsonl(path) == RECORDS
    assert not any(line.is_sealed for line in scan_lines(path))
    append_line(path, {"update": 5})
    append_line(path, {"update": 6})
    assert read_jsonl(path) == [*RECORDS, {"update": 5}, {"update": 6}]
    path.write_bytes(path.read_bytes().replace(b'"update": 1', b'"update": 9'))
    with pytest.raises(StoreError, match="line 6 is corrupt: its checksum does not fit"):
        read_jsonl(path)


def test_an_old_file_is_covered_once_its_end_is_committed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    commit_records(tmp_path)
    assert read_jsonl(path) == RECORDS
    path.write_bytes(path.read_bytes().replace(b'"update": 1', b'"update": 9'))
    with pytest.raises(StoreError, match="lines are changed or lost"):
        read_jsonl(path)


def test_a_line_without_checksum_after_one_with_is_refused(path: Path) -> None:
    with path.open("a") as file:
        file.write('{"update": 5}\n{"update": 6}\n')
    with pytest.raises(StoreError, match="line 6 is corrupt: it has no checksum"):
        read_jsonl(path)


def test_truncation_takes_back_the_commit_first_and_keeps_the_chain(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = path.parent.parent
    commit_records(run)
    before = path.read_bytes()

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("stalewise.store.json_lines.write_atomic", crash)
        truncate_jsonl(path, lambda record: record["update"] < 3)
    assert path.read_bytes() == before and committed_ends(run) == {}
    assert read_jsonl(path) == RECORDS  # the same command goes on
    assert truncate_jsonl(path, lambda record: record["update"] < 3) == 2
    assert before.startswith(path.read_bytes()) and read_jsonl(path) == RECORDS[:3]
    assert truncate_jsonl(path, lambda record: record["update"] != 1) == 1  # from the middle: later lines move
    assert read_jsonl(path) == [RECORDS[0], RECORDS[2]]


def test_truncation_names_a_line_that_it_cannot_judge(tmp_path: Path) -> None:
    path = tmp_path / "eval.jsonl"
    write_lines(path, [{"version": 0}, {"vorsion": 1}])
    with pytest.raises(StoreError, match="line 2 is damaged: KeyError"):
        truncate_jsonl(path, lambda record: record["version"] < 1)


def test_the_table_of_ends_is_itself_checked(path: Path) -> None:
    run = path.parent.parent
    commit_records(run)
    table = run / "records.json"
    assert set(committed_ends(run)) == {"ledger/updates.jsonl"}
    table.write_text(table.read_text().replace('"bytes": ', '"bytes": 1'))
    with pytest.raises(StoreError, match=r"records\.json was changed"):
        read_jsonl(path)


def test_lines_that_were_not_flushed_are_before_records_say_they_are_there(tmp_path: Path, flushed: list[str]) -> None:
    (tmp_path / "ledger").mkdir()
    metrics, ledger, directories = tmp_path / "metrics.jsonl", tmp_path / "ledger" / "updates.jsonl", {tmp_path.name}
    for path in (metrics, ledger):
        append_line(path, {"update": 0}, durable=False)
    assert flushed == []
    commit_records(tmp_path)
    until = flushed.index(".records.json")
    assert set(flushed[:until]) == {"metrics.jsonl", "updates.jsonl", "ledger"} | directories

    flushed.clear()
    append_line(metrics, {"update": 1}, durable=False)
    commit_records(tmp_path)
    assert "metrics.jsonl" in flushed and "updates.jsonl" not in flushed  # it has not grown
    flushed.clear()
    commit_records(tmp_path)
    assert flushed == []
    append_line(metrics, {"update": 2})
    assert flushed == ["metrics.jsonl"]
