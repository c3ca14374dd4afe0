"""A run that changes its engine in the middle, twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from servers import VllmServer, served

from stalewise.api import run
from stalewise.config import RunConfig, make_config
from stalewise.store import open_batch
from stalewise.store.ledger import read_ledger
from stalewise.types import NullCallback
from tiny import tiny_record


class StopBefore(NullCallback):
    """Ends a sitting when something begins for the n-th time."""

    def __init__(self, what: str, times: int) -> None:
        self.what, self.left = what, times

    def begin(self, what: str, total: int) -> None:
        self.left -= what == self.what
        if self.left == 0:
            raise KeyboardInterrupt


@pytest.mark.nightly  # with stand-ins for both in tests/unit/rollout/test_server.py
@pytest.mark.parametrize("copies", [1, 2])
def test_a_run_goes_on_from_hf_to_a_server_to_vllm(
    server: VllmServer, untied: Path, tmp_path: Path, copies: int
) -> None:
    schedule = {"kind": "staged", "updates": 6, "stages": 3}

    def config(sampler: dict[str, Any]) -> RunConfig:
        return make_config(tiny_record(tmp_path, model={"path": str(untied)}, schedule=schedule, sampler=sampler))

    with pytest.raises(KeyboardInterrupt):
        run(config({"engine": "hf"}), StopBefore("generate", 2))
    with pytest.raises(KeyboardInterrupt):
        run(config(served(server)), StopBefore("generate", 2))
    options = {"copies": copies, "max_model_len": 96, "options": {"enforce_eager": True}}
    result = run(config({"engine": "vllm", "vllm": options}))
    assert len(result.evaluations) == 2
    batches = [open_batch(path).manifest for path in sorted((tmp_path / "tiny" / "rollouts").iterdir())]
    assert [[settings.name for settings in batch.samplers] for batch in batches] == [["hf"], ["server"], ["vllm"]]
    assert [batch.version for batch in batches] == [0, 2, 4]
    ledger = read_ledger(tmp_path / "tiny" / "ledger" / "updates.jsonl")
    assert [entry.update for entry in ledger] == list(range(6))
    assert [entry.generation_batch for entry in ledger] == [0, 0, 1, 1, 2, 2]
