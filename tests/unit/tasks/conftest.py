"""Judges of users, and a small file of sums."""

from pathlib import Path

import pytest

from prompts import write
from verifying import JUDGES


@pytest.fixture
def judges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "judges_of_the_test.py").write_text(JUDGES)
    monkeypatch.syspath_prepend(tmp_path)
    return "judges_of_the_test:judge"


@pytest.fixture
def sums(tmp_path: Path) -> Path:
    return write(tmp_path / "sums.jsonl", [{"problem": f"{n}+1", "answer": n + 1} for n in range(50)])
