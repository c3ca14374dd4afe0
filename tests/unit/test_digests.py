"""Checksums of files: of one piece and of several, by hand and against what was written before there were pieces."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from stalewise import digests
from stalewise.digests import describe_files, first_damaged


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "PIECE", 10)
    monkeypatch.setattr(digests, "_CHUNK", 4)


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize("flushing", [False, True])
def test_a_file_has_one_checksum_for_each_of_its_pieces(tmp_path: Path, flushing: bool) -> None:
    contents = {"empty": b"", "small": b"abc", "full": b"0123456789", "large": b"0123456789abcdefghijk"}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    empty, small, full, large = describe_files([tmp_path / name for name in contents], flushing=flushing)
    assert empty == {"bytes": 0, "sha256": sha256(b"")}
    assert small == {"bytes": 3, "sha256": sha256(b"abc")}
    assert full == {"bytes": 10, "sha256": sha256(b"0123456789")}
    pieces = [sha256(piece) for piece in (b"0123456789", b"abcdefghij", b"k")]
    assert large == {"bytes": 21, "sha256_pieces": pieces, "piece_bytes": 10}


@pytest.mark.parametrize("place", [0, 9, 10, 20])
def test_a_byte_that_changed_is_noticed(tmp_path: Path, place: int) -> None:
    whole, path = tmp_path / "whole", tmp_path / "large"
    for file in (whole, path):
        file.write_bytes(b"0123456789abcdefghijk")
    said = dict(zip((whole, path), describe_files([whole, path]), strict=True))
    assert first_damaged(said) is None
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    assert first_damaged(said) == path


def test_a_file_that_is_shorter_longer_or_gone_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    said = dict(zip([path], describe_files([path]), strict=True))
    for content in (b"012345678", b"0123456789a", b"0123456789" * 2):
        path.write_bytes(content)
        assert first_damaged(said) == path
    path.unlink()
    assert first_damaged(said) == path


def test_what_was_said_with_pieces_of_another_size_or_none_still_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"0123456789abcdefghijk")
    said = describe_files([path])[0]
    monkeypatch.setattr(digests, "PIECE", 7)
    assert first_damaged({path: said}) is None
    assert first_damaged({path: {"bytes": 21, "sha256": sha256(path.read_bytes())}}) is None
    assert first_damaged({path: {"bytes": 21, "sha256": sha256(b"another")}}) == path
