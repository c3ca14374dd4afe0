"""benchmarks/few_blocks.py: it counts what is put back, and compares the responses."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.few_blocks import measure
from benchmarks.versus_vllm import make_model

from stalewise.rollout.engines import paged_cache, request_queue


def test_responses_are_put_back_and_stay_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_cache, "FIRST_GUESS", 16)
    monkeypatch.setattr(request_queue, "FIRST_GUESS", 2)
    monkeypatch.setattr(paged_cache, "BLOCK_SIZE", 16)
    # A tiny model's slots are large beside its keys and values, so few bytes alone would mean few slots.
    monkeypatch.setattr(paged_cache, "MOST_BLOCKS", 24)
    make_model("tiny", tmp_path / "tiny")
    found = measure("tiny", 64, 32, 4e6, tmp_path / "tiny")
    assert found["all"]["slots"].startswith("64 responses at once and 384 tokens")
    assert found["few"]["slots"].startswith("8 responses at once and 384 tokens")
    assert found["all"]["put_back"] > 0  # with 64 slots; with 8 the 24 blocks are enough
    assert found["same_responses"] == 32 and (found["new_tokens"], found["longest"]) == (373, 64)
